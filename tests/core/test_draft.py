"""The ledger while a tick decides: who gives way, which handles come, what is dirty."""

import pytest
from attrs import evolve

from kvlift.core.agreed import Kind, Open
from kvlift.core.descent import Descent, Due, Mirroring, Reach, Stowing
from kvlift.core.dirty import (
    is_going_down,
    keep_low_water,
    n_device_dirty,
    path_of,
    start_down,
)
from kvlift.core.draft import Draft
from kvlift.core.effect import FreeDevice, FreeHost, TakeDevice, TakeHost
from kvlift.core.ids import DeviceHandle, HostHandle, Rid, Ticket
from kvlift.core.phase import Waiting
from kvlift.core.policy import EvictionPolicy, Policy, Switch, WritePolicy
from kvlift.core.tier import Tier
from kvlift.core.way_down import settle_descents
from tests.core.scenario import prompt_of
from tests.core.test_admission import POLICY, draft_of, put, wait

BACK = evolve(POLICY, write=WritePolicy.BACK)
OLD, NEW, LONG = prompt_of(1, 2), prompt_of(3, 4), prompt_of(5, 6, 7)


def room(draft: Draft, *, device: int | None = None, host: int | None = None) -> Draft:
    """As many free pages as said."""
    ledger = draft.ledger
    if device is not None:
        ledger = evolve(ledger, device_room=ledger.device_live + device)
    if host is not None:
        ledger = evolve(ledger, host_room=ledger.host_live + host)
    draft.ledger = ledger
    return draft


def devices(*numbers: int) -> tuple[DeviceHandle, ...]:
    return tuple(DeviceHandle(n) for n in numbers)


def hosts(*numbers: int) -> tuple[HostHandle, ...]:
    return tuple(HostHandle(n) for n in numbers)


# Tickets.


@pytest.mark.parametrize("kind", list(Kind))
def test_a_ticket_counts_what_may_come_but_for_a_peers(kind: Kind) -> None:
    draft = draft_of()
    assert draft.open_ticket(kind, 7, 3) == 1
    ceiling = 0 if kind in (Kind.HOLD, Kind.TOKEN) else 3
    assert draft.tickets == {1: Open(kind, 7, 3, ceiling=ceiling)}
    assert draft.next_ticket == 2


def test_a_ticket_is_closed_once() -> None:
    draft = draft_of()
    ticket = draft.open_ticket(Kind.READ, 7, 3)
    draft.close_ticket(ticket)
    draft.close_ticket(ticket)
    draft.close_ticket(Ticket(9))
    assert draft.closed == [ticket]
    assert draft.tickets == {}


def test_instants_and_names() -> None:
    draft = draft_of()
    assert [draft.moment(), draft.moment()] == [1, 2]
    request = wait(draft, "A", OLD)
    assert draft.request(Rid("A")) == request
    assert draft.request(Rid("B")) is None
    changed = evolve(request, priority=4, n_pages_output=2, n_pages_given=1, peer="q")
    draft.requests[request.attempt] = changed
    phase = Waiting(stored_start=0, stored_stop=1, n_lookups=2, n_bypassed=9)
    draft.put_phase(request.attempt, phase)
    assert draft.requests[request.attempt] == evolve(changed, phase=phase)


# Pages.


def test_pages_are_taken_from_the_free_ones_under_new_handles() -> None:
    draft = draft_of()
    assert draft.take_device(2) == devices(0, 1)
    assert draft.take_device(1) == devices(2)
    assert draft.take_device(0) == ()
    assert draft.take_host(2) == hosts(0, 1)
    assert draft.take_host(1) == hosts(2)
    assert draft.take_host(0) == ()
    ledger = draft.ledger
    assert (ledger.device_live, ledger.next_device) == (3, 3)
    assert (ledger.host_live, ledger.next_host) == (3, 3)
    assert (draft.n_device_free(), draft.n_host_free()) == (9, 9)
    draft.free_device(devices(1))
    draft.free_host(hosts(0, 1))
    draft.free_device(())
    draft.free_host(())
    assert (draft.ledger.device_live, draft.ledger.host_live) == (2, 1)
    assert draft.effects == [
        TakeDevice(pages=devices(0, 1)),
        TakeDevice(pages=devices(2)),
        TakeHost(pages=hosts(0, 1)),
        TakeHost(pages=hosts(2)),
        FreeDevice(pages=devices(1)),
        FreeHost(pages=hosts(0, 1)),
    ]


@pytest.mark.parametrize(("n_free", "n_left"), [(2, 4), (1, 3), (0, 2)])
def test_only_what_is_not_free_is_evicted(n_free: int, n_left: int) -> None:
    for tier in (Tier.DEVICE, Tier.HOST):
        draft = draft_of(evolve(POLICY, write=WritePolicy.NONE))
        put(draft, tier, OLD, 0, 2)
        put(draft, tier, NEW, 0, 2)
        room(draft, device=n_free, host=n_free)
        if tier is Tier.DEVICE:
            draft.take_device(2)
            assert draft.index.n_device == n_left
        else:
            draft.take_host(2)
            assert draft.index.n_host == n_left


def test_dirty_pages_leave_the_device_after_clean_ones() -> None:
    for policy, n_old in ((BACK, 2), (POLICY, 0)):
        draft = draft_of(policy)
        put(draft, Tier.DEVICE, OLD, 0, 2)
        put(draft, Tier.DEVICE, NEW, 0, 2)
        put(draft, Tier.HOST, NEW, 0, 2)
        room(draft, device=0)
        draft.take_device(2)
        assert len([s for s in draft.index.segments.values() if s.is_dirty()]) == n_old // 2
        draft.take_device(1)
        dirty = [s.n_pages for s in draft.index.segments.values() if s.is_dirty()]
        assert sum(dirty) == max(0, n_old - 1)


def test_host_pages_that_keep_device_pages_clean_leave_last() -> None:
    for policy, left in ((BACK, 0), (POLICY, 2)):
        draft = draft_of(policy)
        put(draft, Tier.HOST, OLD, 0, 2)
        put(draft, Tier.DEVICE, OLD, 0, 2)
        put(draft, Tier.HOST, NEW, 0, 2)
        room(draft, host=0)
        draft.take_host(2)
        on_host = [s for s in draft.index.segments.values() if s.host is not None]
        assert sum(s.n_pages for s in on_host if s.device is None) == left
        draft.take_host(2)
        assert draft.index.n_host == 0


def test_room_below_is_what_makes_nothing_dirty_again() -> None:
    for policy, n_room in ((BACK, 3), (POLICY, 5)):
        draft = draft_of(policy)
        put(draft, Tier.HOST, OLD, 0, 2)
        put(draft, Tier.DEVICE, OLD, 0, 2)
        put(draft, Tier.HOST, NEW, 0, 2)
        put(draft, Tier.HOST, LONG, 0, 3)
        draft.index.pin(Tier.HOST, LONG, 0, 3)
        assert room(draft, host=1).n_host_room_below() == n_room
        draft.ledger = evolve(draft.ledger, host_room=0)
        assert draft.n_host_room_below() == 0


# Dirty pages.


def test_without_write_back_nothing_is_dirty() -> None:
    draft = draft_of(POLICY)
    put(draft, Tier.DEVICE, OLD, 0, 2)
    assert n_device_dirty(draft) == 0
    start_down(draft, 2)
    assert draft.descents == []


@pytest.mark.parametrize(("n_host_free", "n_dirty"), [(12, 5), (5, 5), (4, 4), (1, 1), (0, 0)])
def test_dirty_pages_count_as_far_as_they_can_go_down(n_host_free: int, n_dirty: int) -> None:
    draft = draft_of(BACK)
    put(draft, Tier.DEVICE, OLD, 0, 2)
    put(draft, Tier.DEVICE, LONG, 0, 3)
    assert n_device_dirty(room(draft, host=n_host_free)) == n_dirty
    draft.index.pin(Tier.DEVICE, LONG, 0, 3)
    assert n_device_dirty(draft) == min(2, n_dirty)


def test_the_host_pages_in_front_of_a_dirty_page_are_no_room_for_it() -> None:
    draft = draft_of(BACK)
    put(draft, Tier.HOST, LONG, 0, 2)
    put(draft, Tier.DEVICE, LONG, 2, 3)
    assert n_device_dirty(room(draft, host=0)) == 0
    put(room(draft, host=2), Tier.HOST, NEW, 0, 1)
    assert n_device_dirty(room(draft, host=0)) == 1, "the other prompt's page is"
    draft.index.pin(Tier.HOST, NEW, 0, 1)
    draft.index.pin(Tier.HOST, LONG, 0, 2)
    assert n_device_dirty(room(draft, host=0)) == 0
    assert n_device_dirty(room(draft, host=1)) == 1


@pytest.mark.parametrize(("is_pinned", "is_above", "n_dirty"), [(0, 0, 0), (1, 0, 1), (0, 1, 1)])
def test_only_idle_host_pages_that_nothing_is_above_can_be_taken_from_a_path(
    is_pinned: int, is_above: int, n_dirty: int
) -> None:
    draft = draft_of(BACK)
    path = prompt_of(5, 6, 7, 8)
    put(draft, Tier.HOST, path, 0, 1)
    put(draft, Tier.DEVICE, path, 0, is_above)
    put(draft, Tier.DEVICE, path, 1, 4)
    draft.index.pin(Tier.HOST, path, 0, is_pinned)
    assert n_device_dirty(room(draft, host=1 if is_pinned or is_above else 0)) == n_dirty


def test_the_least_used_dirty_pages_go_down_and_no_more_than_asked() -> None:
    draft = draft_of(evolve(BACK, eviction=EvictionPolicy.LRU))
    put(draft, Tier.DEVICE, NEW, 0, 2)
    put(draft, Tier.DEVICE, OLD, 0, 2)
    put(draft, Tier.DEVICE, LONG, 0, 3)
    draft.index.touch(NEW, 2, now=draft.moment(), priority=0)
    draft.index.pin(Tier.DEVICE, LONG, 0, 3)
    start_down(draft, 0)
    assert draft.descents == []
    start_down(draft, 2)
    assert [(d.prompt, d.n_pages, d.reach, d.phase) for d in draft.descents] == [
        (OLD, 2, Reach.HOST, Due())
    ]
    draft.descents.clear()
    start_down(draft, 3)
    assert [d.prompt for d in draft.descents] == [OLD, NEW]
    for segment in list(draft.index.cover(OLD, 0, 2)):
        draft.index.mark_mirroring(segment, Switch.ON)
    for segment in list(draft.index.cover(NEW, 0, 2)):
        draft.index.mark_stored(segment, Switch.ON)
    draft.descents.clear()
    start_down(draft, 9)
    assert draft.descents == [], "on its way, safe, or in use"


def test_a_path_is_all_tokens_from_the_root_on() -> None:
    draft = draft_of(BACK)
    put(draft, Tier.DEVICE, LONG, 0, 1)
    put(draft, Tier.DEVICE, LONG, 1, 3)
    paths = [path_of(draft, segment) for segment in draft.index.segments.values()]
    assert paths == [prompt_of(5), LONG]


def test_copies_to_the_host_are_on_their_way_down_and_writes_are_not() -> None:
    draft = draft_of(BACK)
    assert not is_going_down(draft)
    mirroring = Mirroring(ticket=Ticket(1), positions=(0,), host=hosts(1), host_epoch=0)
    for phase, goes in ((Due(), True), (mirroring, True), (Stowing(), False)):
        draft.descents = [Descent(id=1, prompt=OLD, n_pages=1, reach=Reach.HOST, phase=phase)]
        assert is_going_down(draft) is goes


@pytest.mark.parametrize(
    ("mark", "n_free", "n_started"), [(0, 0, 0), (2, 2, 0), (2, 1, 1), (3, 0, 2), (2, 0, 1)]
)
def test_below_the_mark_pages_start_down(mark: int, n_free: int, n_started: int) -> None:
    draft = draft_of(evolve(BACK, write_back_low_water_pages=mark))
    put(draft, Tier.DEVICE, OLD, 0, 2)
    put(draft, Tier.DEVICE, NEW, 0, 2)
    room(draft, device=n_free)
    keep_low_water(draft)
    assert len(draft.descents) == n_started
    keep_low_water(draft)
    assert len(draft.descents) == n_started, "one after the other"


def test_a_draft_of_another_policy_is_of_that_policy() -> None:
    policy = Policy(n_device_pages=1)
    assert draft_of(policy).policy is policy


def test_no_more_host_pages_leave_than_are_needed() -> None:
    draft = draft_of(BACK)
    put(draft, Tier.HOST, OLD, 0, 2)
    put(draft, Tier.HOST, NEW, 0, 2)
    put(draft, Tier.DEVICE, NEW, 0, 2)
    room(draft, host=0)
    draft.take_host(2)
    assert draft.index.n_host == 2


def test_what_has_no_room_below_is_passed_over() -> None:
    """The oldest dirty page hangs on the only host page that could leave: it would never go."""
    draft = draft_of(BACK)
    put(draft, Tier.HOST, OLD, 0, 1)
    put(draft, Tier.DEVICE, OLD, 1, 2)
    put(draft, Tier.DEVICE, NEW, 0, 2)
    room(draft, host=0)
    start_down(draft, 1)
    assert [descent.prompt for descent in draft.descents] == [NEW]
    settle_descents(draft)
    assert [type(descent.phase).__name__ for descent in draft.descents] == ["Mirroring"]
