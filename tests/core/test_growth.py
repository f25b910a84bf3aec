"""A running request asks for pages: granted at once, put off, or refused, and until when."""

import pytest
from attrs import evolve

from kvlift.core.advance import grow_agreed
from kvlift.core.agreed import Growth
from kvlift.core.descent import Due
from kvlift.core.draft import Draft
from kvlift.core.growth import N_TICKS_MAX, grow, settle_growths
from kvlift.core.ids import Attempt, DeviceHandle, Rid
from kvlift.core.notice import HasGrown
from kvlift.core.phase import Running
from kvlift.core.plan import Bounds, Lease, Plan
from kvlift.core.policy import Switch, WritePolicy
from kvlift.core.tier import Tier
from tests.core.scenario import prompt_of
from tests.core.test_admission import POLICY, draft_of, put, wait

BACK = evolve(POLICY, write=WritePolicy.BACK)
OLD = prompt_of(7, 8, 9)


def running(draft: Draft, rid: str = "A") -> Attempt:
    """A request of one page that runs."""
    request = wait(draft, rid, prompt_of(1))
    lease = Lease(n_shared=0, own=draft.take_device(1))
    plan = Plan(bounds=Bounds(device=0, shared=0, host=0, storage=0), n_pages=1, promise=0)
    draft.put_phase(request.attempt, Running(plan=plan, lease=lease))
    return request.attempt


def with_room(draft: Draft, n_free: int, n_aside: int = 0) -> None:
    room = draft.ledger.device_live + n_free
    draft.ledger = evolve(draft.ledger, device_room=room)
    draft.policy = evolve(draft.policy, n_device_pages=room + n_aside)


def grown(draft: Draft, attempt: Attempt, n_pages: int) -> tuple[DeviceHandle, ...] | None:
    return grow(draft, draft.requests[attempt], n_pages)


@pytest.mark.parametrize(("n_free", "n_cached"), [(2, 0), (1, 1), (0, 2), (0, 3)])
def test_free_and_clean_pages_are_given_at_once(n_free: int, n_cached: int) -> None:
    draft = draft_of()
    attempt = running(draft)
    put(draft, Tier.DEVICE, OLD, 0, n_cached)
    with_room(draft, n_free)
    pages = grown(draft, attempt, 2)
    assert pages is not None
    phase = draft.requests[attempt].phase
    assert isinstance(phase, Running)
    assert phase.lease.own[-2:] == pages
    assert draft.growths == []


def test_what_can_never_be_given_is_refused_and_nothing_goes_down_for_it() -> None:
    draft = draft_of(BACK)
    attempt = running(draft)
    put(draft, Tier.DEVICE, OLD, 0, 2)
    with_room(draft, 1)
    assert grown(draft, attempt, 4) is None
    assert (draft.growths, draft.descents) == ([], [])


@pytest.mark.parametrize("n_pages", [2, 3])
def test_dirty_pages_are_waited_for_if_they_are_enough(n_pages: int) -> None:
    draft = draft_of(BACK)
    attempt = running(draft)
    put(draft, Tier.DEVICE, OLD, 0, 2)
    with_room(draft, 1)
    assert grown(draft, attempt, n_pages) is None
    deadline = draft.before.tick + N_TICKS_MAX
    assert draft.growths == [Growth(attempt=attempt, n_pages=n_pages, deadline=deadline)]
    (descent,) = draft.descents
    assert isinstance(descent.phase, Due)


@pytest.mark.parametrize(
    ("n_pins", "is_mirrored", "n_pages", "waits"),
    [
        (1, True, 2, True),
        (1, True, 3, False),
        (2, True, 2, False),
        (1, False, 2, False),
        (2, False, 1, False),
    ],
)
def test_pages_on_their_way_down_are_waited_for_unless_someone_else_needs_them(
    n_pins: int, *, is_mirrored: bool, n_pages: int, waits: bool
) -> None:
    draft = draft_of()
    attempt = running(draft)
    put(draft, Tier.DEVICE, OLD, 0, 2)
    for _ in range(n_pins):
        draft.index.pin(Tier.DEVICE, OLD, 0, 2)
    for segment in list(draft.index.cover(OLD, 0, 2)):
        draft.index.mark_mirroring(segment, Switch.ON if is_mirrored else Switch.OFF)
    with_room(draft, 0)
    assert grown(draft, attempt, n_pages) is None
    assert [growth.n_pages for growth in draft.growths] == ([n_pages] if waits else [])


def test_host_pages_that_wait_for_a_copy_are_no_device_pages() -> None:
    draft = draft_of()
    attempt = running(draft)
    put(draft, Tier.HOST, OLD, 0, 2)
    for segment in list(draft.index.cover(OLD, 0, 2)):
        draft.index.mark_mirroring(segment, Switch.ON)
    with_room(draft, 0)
    assert grown(draft, attempt, 1) is None
    assert draft.growths == []


@pytest.mark.parametrize(("n_pages", "waits"), [(3, True), (4, False)])
def test_what_a_rank_had_set_aside_is_waited_for(n_pages: int, *, waits: bool) -> None:
    """It may have it back: where nothing else is under way, no ballot says so."""
    draft = draft_of()
    attempt = running(draft)
    with_room(draft, 1, n_aside=2)
    assert grown(draft, attempt, n_pages) is None
    assert [growth.n_pages for growth in draft.growths] == ([n_pages] if waits else [])


def test_growths_are_settled_each_for_itself() -> None:
    draft = draft_of()
    gone, queued, granted, refused, patient, last = (
        running(draft, rid) for rid in ("A", "B", "C", "D", "E", "F")
    )
    draft.put_phase(queued, wait(draft, "Q", prompt_of(2)).phase)
    tick = draft.before.tick
    del draft.requests[gone]
    with_room(draft, 3)
    draft.growths = [
        Growth(attempt=gone, n_pages=1, deadline=tick + 9),
        Growth(attempt=queued, n_pages=1, deadline=tick + 9),
        Growth(attempt=granted, n_pages=2, deadline=tick + 9),
        Growth(attempt=refused, n_pages=5, deadline=tick + 1),
        Growth(attempt=patient, n_pages=5, deadline=tick + 2),
        Growth(attempt=last, n_pages=1, deadline=tick + 9),
    ]
    settle_growths(draft)
    assert [(n.rid, len(n.pages)) for n in draft.notices if isinstance(n, HasGrown)] == [
        ("C", 2),
        ("D", 0),
        ("F", 1),
    ]
    assert [growth.attempt for growth in draft.growths] == [patient]


def test_a_growth_between_ticks_is_no_tick() -> None:
    draft = draft_of()
    attempt = running(draft)
    with_room(draft, 2)
    agreed = evolve(
        draft.before,
        requests=draft.requests,
        attempt_by_rid=draft.attempt_by_rid,
        tickets=draft.tickets,
        ledger=draft.ledger,
        tick=7,
        next_attempt=draft.next_attempt,
        next_ticket=draft.next_ticket,
    )
    after, decision, pages = grow_agreed(agreed, Rid("A"), 2, POLICY)
    assert after.tick == 7
    assert pages == after.requests[attempt].phase.lease.own[1:]  # type: ignore[union-attr]
    assert [pair[1].__name__ for pair in decision.arrows] == ["Grown"]
    assert decision.movers == (attempt,)
    with pytest.raises(LookupError, match="request 'Z' is not running"):
        grow_agreed(agreed, Rid("Z"), 2, POLICY)
