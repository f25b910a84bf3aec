"""Pages that are good already: which get a place, in which order, and what makes room for them."""

import pytest
from attrs import evolve

from kvlift.core.adopt import Adopted, adopt_agreed, stow_agreed
from kvlift.core.agreed import Agreed, agreed_at_start
from kvlift.core.descent import Mirroring, Persisting, Reach
from kvlift.core.ids import DeviceHandle, HostHandle
from kvlift.core.index import Hit, device_pages, host_pages, match
from kvlift.core.policy import Policy, Switch, WritePolicy
from kvlift.core.prompt import Prompt
from kvlift.core.tier import Tier
from tests.core.scenario import prompt_of
from tests.core.test_admission import POLICY

PATH = prompt_of(1, 2, 3, 4, 5)
OTHER = prompt_of(8, 9)


def start(policy: Policy = POLICY, storage: Switch = Switch.ON) -> Agreed:
    return evolve(agreed_at_start(policy, storage), tick=7)


def adopted(
    agreed: Agreed, tier: Tier, first: int, stop: int, prompt: Prompt = PATH
) -> tuple[Agreed, Adopted]:
    after, decision, said = adopt_agreed(agreed, tier, prompt, first, stop, POLICY)
    assert after.tick == agreed.tick, "between two ticks"
    assert decision.closed == ()
    return after, said


@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.HOST])
def test_only_pages_that_the_tier_lacks_get_a_place(tier: Tier) -> None:
    agreed, _ = adopted(start(), tier, 1, 2)
    agreed, _ = adopted(agreed, tier, 3, 4)
    agreed, said = adopted(agreed, tier, 0, 5)
    assert said.positions == (0, 2, 4)
    handles = said.device if tier is Tier.DEVICE else said.host
    assert handles == (2, 3, 4)
    if tier is Tier.DEVICE:
        assert device_pages(agreed.index, PATH, 5) == (2, 0, 3, 1, 4)
        assert (agreed.index.n_device, agreed.index.n_device_idle, said.host) == (5, 5, ())
    else:
        assert host_pages(agreed.index, PATH, 0, 5) == (2, 0, 3, 1, 4)
        assert (agreed.index.n_host, agreed.index.n_host_idle, said.device) == (5, 5, ())
    again, said = adopted(agreed, tier, 0, 5)
    assert said == Adopted(positions=())
    assert again.index == agreed.index


def test_a_copy_in_the_other_tier_is_no_place_in_this_one() -> None:
    agreed, _ = adopted(start(), Tier.HOST, 0, 2)
    agreed, said = adopted(agreed, Tier.DEVICE, 0, 3)
    assert said == Adopted(positions=(0, 1, 2), device=tuple(map(DeviceHandle, range(3))))
    agreed, said = adopted(agreed, Tier.HOST, 1, 4)
    assert said == Adopted(positions=(2, 3), host=(HostHandle(2), HostHandle(3)))
    assert match(agreed.index, PATH) == Hit(3, 4)


@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.HOST])
@pytest.mark.parametrize(("n_room", "fits"), [(4, True), (3, True), (2, False)])
def test_idle_pages_of_others_make_room_and_its_own_do_not(
    tier: Tier, n_room: int, *, fits: bool
) -> None:
    agreed, _ = adopted(start(), tier, 0, 1, OTHER)
    agreed, _ = adopted(agreed, tier, 0, 1)
    ledger = evolve(agreed.ledger, device_room=n_room, host_room=n_room)
    agreed = evolve(agreed, ledger=ledger)
    if not fits:
        with pytest.raises(LookupError, match=f"the {tier.value} has no room for 2 pages more"):
            adopted(agreed, tier, 0, 3)
        return
    agreed, said = adopted(agreed, tier, 0, 3)
    assert said.positions == (1, 2)
    hit = match(agreed.index, OTHER)
    assert hit.host == (1 if n_room == 4 else 0)


BIG = evolve(POLICY, device_tier=Switch.OFF)


@pytest.mark.parametrize(
    ("write", "persist", "reach"),
    [
        (WritePolicy.THROUGH, Switch.ON, Reach.BOTH),
        (WritePolicy.THROUGH, Switch.OFF, Reach.HOST),
        (WritePolicy.NONE, Switch.ON, Reach.STORAGE),
        (WritePolicy.NONE, Switch.OFF, None),
    ],
)
def test_computed_pages_go_down_as_far_as_the_policy_says(
    write: WritePolicy, persist: Switch, reach: Reach | None
) -> None:
    policy = evolve(BIG, write=write, persist=persist)
    after, decision, said = stow_agreed(start(policy), PATH, 0, 3, policy)
    assert after.tick == 7
    if reach is None:
        assert said == Adopted(positions=())
        assert after.descents == ()
        assert decision.effects == ()
        return
    assert said.positions == (0, 1, 2)
    assert said.device == tuple(map(DeviceHandle, range(3)))
    (descent,) = after.descents
    assert (descent.reach, descent.n_pages) == (reach, 3)
    assert isinstance(descent.phase, Persisting if reach is Reach.STORAGE else Mirroring)


@pytest.mark.parametrize("persist", list(Switch))
def test_pages_that_are_below_already_need_no_place(persist: Switch) -> None:
    policy = evolve(BIG, persist=persist)
    agreed, _ = adopted(start(policy), Tier.HOST, 0, 2)
    after, _decision, said = stow_agreed(agreed, PATH, 0, 3, policy)
    assert said.positions == ((0, 1, 2) if persist is Switch.ON else (2,))
    without = start(policy, Switch.OFF)
    agreed, _ = adopted(without, Tier.HOST, 0, 3)
    after, decision, said = stow_agreed(agreed, PATH, 0, 3, policy)
    assert said == Adopted(positions=())
    assert after.descents == ()
    assert decision.arrows == ()


def test_places_are_named_by_their_page_and_are_of_no_priority() -> None:
    policy = evolve(BIG, persist=Switch.OFF)
    agreed, _ = adopted(start(policy), Tier.HOST, 1, 2)
    after, _decision, said = stow_agreed(agreed, PATH, 0, 4, policy)
    assert said.positions == (0, 2, 3)
    assert {segment.priority for segment in after.index.segments.values()} == {0}
