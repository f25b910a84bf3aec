"""Pages on their way down, step by step: what is copied, written, believed, dropped and said."""

import pytest
from attrs import evolve

from kvlift.core.agreed import Kind
from kvlift.core.descent import (
    Descent,
    DescentPhase,
    Due,
    Mirrored,
    Mirroring,
    MirrorOver,
    Persisting,
    PersistOver,
    Reach,
    Settled,
    Stowing,
    after_mirror,
    descend,
)
from kvlift.core.draft import Draft
from kvlift.core.effect import FreeHost, StartMirror, StartPersist
from kvlift.core.ids import DeviceHandle, HostHandle, Ticket
from kvlift.core.index import Hit, match
from kvlift.core.notice import PageLost
from kvlift.core.policy import Switch, WritePolicy
from kvlift.core.tier import Tier
from kvlift.core.way_down import begin_descent, descent_event, forget_stored, settle_descents
from tests.core.scenario import prompt_of
from tests.core.test_admission import POLICY, draft_of, put
from tests.core.test_draft import BACK, room

PATH = prompt_of(1, 2, 3, 4)


def on_device(n_pages: int = 4, *, back: bool = False) -> Draft:
    draft = draft_of(BACK if back else POLICY)
    put(draft, Tier.DEVICE, PATH, 0, n_pages)
    draft.effects.clear()
    return draft


def going(draft: Draft, reach: Reach = Reach.BOTH, n_pages: int = 4) -> Draft:
    begin_descent(draft, PATH, n_pages, reach)
    settle_descents(draft)
    return draft


def phases(draft: Draft) -> list[DescentPhase]:
    return [descent.phase for descent in draft.descents]


def mirrors(draft: Draft) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [(e.device, e.host) for e in draft.effects if isinstance(e, StartMirror)]


def writes(draft: Draft) -> list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    return [(e.positions, e.host, e.device) for e in draft.effects if isinstance(e, StartPersist)]


def lost(draft: Draft) -> list[tuple[str, int]]:
    return [(n.tier, n.n_pages) for n in draft.notices if isinstance(n, PageLost)]


def mark(draft: Draft, start: int, stop: int) -> None:
    """These pages are stored."""
    for segment in list(draft.index.cover(PATH, start, stop)):
        draft.index.mark_stored(segment, Switch.ON)


# Device to host.


def test_a_path_without_pages_does_not_go_down() -> None:
    draft = going(on_device(), n_pages=0)
    assert draft.descents == []
    assert draft.arrows == []


def test_the_first_pages_of_a_path_are_copied_to_the_host_together() -> None:
    draft = going(on_device(), n_pages=3)
    assert mirrors(draft) == [((0, 1, 2), (0, 1, 2))]
    (phase,) = phases(draft)
    assert phase == Mirroring(
        ticket=Ticket(1), positions=(0, 1, 2), host=tuple(map(HostHandle, range(3))), host_epoch=0
    )
    known = draft.tickets[Ticket(1)]
    assert (known.kind, known.owner, known.n_pages) == (Kind.MIRROR, draft.descents[0].id, 3)
    marked = [s for s in draft.index.segments.values() if s.mirroring]
    assert [(s.n_pages, s.device_pins) for s in marked] == [(3, 1)]
    assert [s.host_pins for s in draft.index.segments.values()] == [0, 0]
    assert draft.movers == [draft.descents[0].id]
    assert [arrow[1].__name__ for arrow in draft.arrows] == ["MirrorStarted"]


def test_only_what_the_host_lacks_is_copied() -> None:
    draft = on_device()
    put(draft, Tier.HOST, PATH, 1, 2)
    draft.effects.clear()
    going(draft)
    assert mirrors(draft) == [((0, 2, 3), (1, 2, 3))]
    pins = {s.tokens: s.device_pins for s in draft.index.segments.values()}
    assert pins[PATH.tokens[PATH.page_bytes() : 2 * PATH.page_bytes()]] == 0


@pytest.mark.parametrize("what", ["mirroring", "stale", "gone"])
def test_what_is_on_its_way_or_is_no_hit_is_not_copied(what: str) -> None:
    draft = on_device()
    (segment,) = draft.index.cover(PATH, 2, 4)
    if what == "mirroring":
        draft.index.mark_mirroring(segment, Switch.ON)
    elif what == "stale":
        draft.index._put(evolve(segment, device_stale=True))
    else:
        draft.index.set_host(segment, (HostHandle(90), HostHandle(91)))
        draft.index.forget(Tier.DEVICE, draft.index.segments[segment.id])
    going(draft)
    assert [device for device, _host in mirrors(draft)] == [(0, 1)]


@pytest.mark.parametrize(("n_free", "copied"), [(0, []), (1, [(0,)]), (3, [(0, 1, 2)])])
def test_what_finds_no_room_is_said_to_be_lost(n_free: int, copied: list[tuple[int, ...]]) -> None:
    draft = going(room(on_device(), host=n_free), Reach.HOST)
    assert [device for device, _host in mirrors(draft)] == copied
    assert lost(draft) == [("host", 4 - n_free)]
    assert len(draft.descents) == len(copied)


def test_a_path_does_not_chase_its_own_host_pages() -> None:
    draft = on_device()
    put(draft, Tier.HOST, PATH, 0, 2)
    other = prompt_of(7)
    put(draft, Tier.HOST, other, 0, 1)
    going(room(draft, host=0), Reach.HOST)
    assert mirrors(draft) == [((2,), (3,))]
    assert match(draft.index.view(), other) == Hit(0, 0)
    assert lost(draft) == [("host", 1)]


def test_a_copy_down_ends_with_its_first_pages_on_the_host() -> None:
    draft = going(on_device(), Reach.HOST)
    (descent,) = draft.descents
    draft.effects.clear()
    descent_event(draft, descent.id, MirrorOver(Ticket(1), 3))
    assert [s.host for s in draft.index.segments.values() if s.host] == [(0, 1, 2)]
    assert draft.effects == [FreeHost(pages=(HostHandle(3),))]
    assert lost(draft) == [("host", 1)]
    assert [(s.mirroring, s.device_pins) for s in draft.index.segments.values()] == [
        (False, 0),
        (False, 0),
    ]
    assert phases(draft) == [Settled()]
    settle_descents(draft)
    assert draft.descents == []


def test_a_copy_down_of_several_runs_is_sorted_in() -> None:
    draft = on_device()
    put(draft, Tier.HOST, PATH, 1, 2)
    going(draft, Reach.HOST)
    (descent,) = draft.descents
    descent_event(draft, descent.id, MirrorOver(Ticket(1), 3))
    assert match(draft.index.view(), PATH) == Hit(4, 4)
    by_place = sorted(draft.index.segments.values(), key=lambda s: PATH.tokens.find(s.tokens))
    assert [s.host for s in by_place] == [(1,), (0,), (2, 3)]
    assert lost(draft) == []
    assert not [s for s in by_place if s.mirroring or s.device_pins]


def test_what_the_host_has_got_meanwhile_or_was_flushed_is_not_kept_twice() -> None:
    draft = going(on_device(2), Reach.HOST, n_pages=2)
    (descent,) = draft.descents
    (segment,) = draft.index.cover(PATH, 0, 2)
    draft.index.set_host(segment, (HostHandle(90), HostHandle(91)))
    draft.effects.clear()
    descent_event(draft, descent.id, MirrorOver(Ticket(1), 2))
    assert draft.effects == [FreeHost(pages=(HostHandle(0), HostHandle(1)))]
    assert [s.host for s in draft.index.segments.values()] == [(90, 91)]

    draft = going(on_device(2), Reach.HOST, n_pages=2)
    draft.host_epoch += 1
    draft.effects.clear()
    descent_event(draft, draft.descents[0].id, MirrorOver(Ticket(1), 2))
    assert draft.effects == [FreeHost(pages=(HostHandle(0), HostHandle(1)))]
    assert lost(draft) == []


@pytest.mark.parametrize(("n_good", "left"), [(4, 4), (3, 3), (2, 2), (0, 0)])
def test_with_write_back_what_failed_to_go_down_is_dropped(n_good: int, left: int) -> None:
    draft = going(on_device(back=True), Reach.HOST)
    descent_event(draft, draft.descents[0].id, MirrorOver(Ticket(1), n_good))
    assert draft.index.n_device == left
    draft = going(on_device(), Reach.HOST)
    descent_event(draft, draft.descents[0].id, MirrorOver(Ticket(1), n_good))
    assert draft.index.n_device == 4, "with write-through they hold nobody up"


def test_what_somebody_needs_or_is_stored_is_not_dropped() -> None:
    draft = going(on_device(back=True), Reach.HOST)
    draft.index.pin(Tier.DEVICE, PATH, 3, 4)
    mark(draft, 2, 3)
    descent_event(draft, draft.descents[0].id, MirrorOver(Ticket(1), 0))
    assert draft.index.n_device == 2
    assert draft.index.n_device_idle == 1


# To storage.


@pytest.mark.parametrize(
    ("reach", "after"),
    [(Reach.HOST, Settled()), (Reach.BOTH, Stowing()), (Reach.STORAGE, Stowing())],
)
def test_after_the_host_comes_storage_if_it_is_wanted(reach: Reach, after: DescentPhase) -> None:
    descent = Descent(id=1, prompt=PATH, n_pages=1, reach=reach, phase=Due())
    assert after_mirror(descent) == after


def test_a_write_takes_a_run_of_one_tier_that_storage_lacks() -> None:
    draft = on_device()
    put(draft, Tier.HOST, PATH, 1, 3)
    draft.effects.clear()
    going(draft, Reach.STORAGE)
    assert writes(draft) == [((0,), (), (0,))]
    (phase,) = phases(draft)
    assert phase == Persisting(ticket=Ticket(1), positions=(0,), from_host=False)
    known = draft.tickets[Ticket(1)]
    assert (known.kind, known.owner, known.n_pages) == (Kind.PERSIST, draft.descents[0].id, 1)
    by_place = sorted(draft.index.segments.values(), key=lambda s: PATH.tokens.find(s.tokens))
    assert [(s.persisting, s.device_pins, s.host_pins) for s in by_place] == [
        (True, 1, 0),
        (False, 0, 0),
        (False, 0, 0),
    ]
    descent_event(draft, draft.descents[0].id, PersistOver(Ticket(1), 1))
    assert phases(draft) == [Stowing()]
    by_place = sorted(draft.index.segments.values(), key=lambda s: PATH.tokens.find(s.tokens))
    assert [(s.persisting, s.device_pins, s.stored) for s in by_place] == [
        (False, 0, True),
        (False, 0, False),
        (False, 0, False),
    ]
    settle_descents(draft)
    assert writes(draft)[1:] == [((1, 2), (0, 1), ())]
    descent_event(draft, draft.descents[0].id, PersistOver(Ticket(2), 2))
    settle_descents(draft)
    assert writes(draft)[2:] == [((3,), (), (3,))]
    descent_event(draft, draft.descents[0].id, PersistOver(Ticket(3), 1))
    settle_descents(draft)
    assert draft.descents == []
    assert lost(draft) == []
    assert all(s.stored and not s.host_pins for s in draft.index.segments.values())


def test_stored_pages_are_skipped_and_end_a_run() -> None:
    draft = on_device()
    mark(draft, 0, 1)
    mark(draft, 2, 3)
    going(draft, Reach.STORAGE)
    assert [w[0] for w in writes(draft)] == [(1,)]


def test_a_write_waits_for_parents_that_another_one_writes() -> None:
    for start, written in ((0, []), (2, [(0, 1)])):
        draft = on_device()
        for segment in list(draft.index.cover(PATH, start, start + 1)):
            draft.index.mark_persisting(segment, Switch.ON)
        going(draft, Reach.STORAGE)
        assert [w[0] for w in writes(draft)] == written
        assert phases(draft) == [Stowing()] if start == 0 else len(draft.descents) == 1


@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.HOST])
def test_nothing_is_written_behind_a_page_that_is_nowhere_above(tier: Tier) -> None:
    draft = draft_of()
    put(draft, tier, PATH, 0, 1)
    put(draft, tier, PATH, 2, 4)
    going(draft, Reach.STORAGE)
    assert [w[0] for w in writes(draft)] == [(0,)]
    draft = draft_of()
    put(draft, tier, PATH, 1, 4)
    going(draft, Reach.STORAGE)
    assert writes(draft) == []
    assert draft.descents == []


@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.HOST])
def test_what_was_flushed_is_not_written(tier: Tier) -> None:
    draft = draft_of()
    put(draft, tier, PATH, 0, 4)
    draft.index.pin(tier, PATH, 2, 4)
    draft.index.flush(tier)
    put(draft, tier, PATH, 0, 2)
    draft.effects.clear()
    going(draft, Reach.STORAGE)
    assert [w[0] for w in writes(draft)] == [(0, 1)]


def test_without_storage_nothing_is_written() -> None:
    draft = on_device()
    draft.storage = Switch.OFF
    going(draft, Reach.STORAGE)
    assert draft.descents == []
    assert draft.tickets == {}
    assert [arrow[1].__name__ for arrow in draft.arrows] == ["MirrorSkipped", "NothingLeft"]


@pytest.mark.parametrize(("n_good", "ended"), [(4, Stowing()), (3, Settled()), (0, Settled())])
def test_a_write_is_believed_as_far_as_it_came(n_good: int, ended: DescentPhase) -> None:
    draft = going(on_device(), Reach.STORAGE)
    descent_event(draft, draft.descents[0].id, PersistOver(Ticket(1), n_good))
    assert sum(s.n_pages for s in draft.index.segments.values() if s.stored) == n_good
    assert phases(draft) == [ended]
    assert lost(draft) == ([("storage", 4 - n_good)] if n_good < 4 else [])
    assert not [s for s in draft.index.segments.values() if s.persisting or s.device_pins]


def test_a_write_that_was_under_way_at_a_flush_is_not_believed() -> None:
    draft = going(on_device(), Reach.STORAGE)
    begin_descent(draft, prompt_of(9), 1, Reach.HOST)
    forget_stored(draft)
    first, second = phases(draft)
    assert isinstance(first, Persisting)
    assert first.counts is Switch.OFF
    assert second == Due()
    descent_event(draft, draft.descents[0].id, PersistOver(Ticket(1), 4))
    assert not [s for s in draft.index.segments.values() if s.stored]


def test_news_reach_the_descent_that_they_are_about() -> None:
    draft = going(on_device(), Reach.HOST)
    begin_descent(draft, prompt_of(9), 1, Reach.HOST)
    other = draft.descents[1]
    descent_event(draft, draft.descents[0].id, MirrorOver(Ticket(1), 4))
    assert draft.descents[1] is other
    assert draft.movers[-1] == draft.descents[0].id


def test_a_settled_descent_leaves_and_the_others_stay() -> None:
    draft = on_device()
    put(draft, Tier.HOST, PATH, 0, 4)
    begin_descent(draft, PATH, 4, Reach.HOST)
    begin_descent(draft, PATH, 4, Reach.STORAGE)
    settle_descents(draft)
    assert [descent.reach for descent in draft.descents] == [Reach.STORAGE]


def test_what_a_copy_brought_is_a_deed_of_its_end() -> None:
    draft = going(on_device())
    (descent,) = draft.descents
    mirroring = descent.phase
    assert isinstance(mirroring, Mirroring)
    after, deeds = descend(descent, MirrorOver(Ticket(1), 3))
    assert after == evolve(descent, phase=Stowing())
    assert deeds == (Mirrored(mirroring, 3),)


def test_pages_are_what_they_were_for_the_policy_without_copies() -> None:
    draft = draft_of(evolve(POLICY, write=WritePolicy.NONE))
    put(draft, Tier.DEVICE, PATH, 0, 4)
    assert draft.take_device(1) == (DeviceHandle(4),)


def test_what_failed_to_go_down_does_not_take_its_parent_along() -> None:
    """Page 0 is dirty as well, but another copy of it is on its way."""
    draft = on_device(2, back=True)
    (parent,) = draft.index.cover(PATH, 0, 1)
    draft.index.mark_mirroring(parent, Switch.ON)
    going(draft, Reach.HOST, n_pages=2)
    (phase,) = phases(draft)
    assert isinstance(phase, Mirroring)
    assert phase.positions == (1,)
    descent_event(draft, draft.descents[0].id, MirrorOver(phase.ticket, 0))
    assert [s.device for s in draft.index.segments.values()] == [(0,)]


def test_a_write_from_the_device_names_no_stale_host_page() -> None:
    draft = on_device(1)
    put(draft, Tier.HOST, PATH, 0, 1)
    draft.index.pin(Tier.HOST, PATH, 0, 1)
    draft.index.flush(Tier.HOST)
    draft.effects.clear()
    going(draft, Reach.STORAGE, n_pages=1)
    assert writes(draft) == [((0,), (), (0,))]


def test_what_did_not_get_to_storage_is_counted_from_where_the_write_began() -> None:
    draft = on_device()
    mark(draft, 0, 1)
    going(draft, Reach.STORAGE)
    descent_event(draft, draft.descents[0].id, PersistOver(Ticket(1), 1))
    assert lost(draft) == [("storage", 2)]
