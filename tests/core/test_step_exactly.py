"""What each arrow does, deed by deed: the table of `test_step` says only where it leads."""

import pytest
from attrs import evolve

from kvlift.core.deed import (
    Announce,
    AnnounceShrunk,
    Deed,
    ForgetStored,
    GiveUpCopy,
    GiveUpRead,
    HoldBack,
    KeepHost,
    UnpinHost,
)
from kvlift.core.event import (
    CopyEnded,
    CopyShort,
    Event,
    HandedOver,
    LeaderLost,
    PagesCame,
    PeerStopped,
    ReadEnded,
    ReadOverdue,
    ReadShort,
    SharedCame,
    TokenCame,
    Widened,
)
from kvlift.core.ids import DeviceHandle, HostHandle, Ticket
from kvlift.core.illegal import IllegalEvent
from kvlift.core.landed import PeerCause
from kvlift.core.phase import (
    Draining,
    Filling,
    Outcome,
)
from kvlift.core.plan import Bounds, Follow, Lease, Part, Plan, Span
from kvlift.core.step import step
from kvlift.core.step_filling import (
    n_pages_landed,
    n_pages_wanted,
    needs_peer,
    spans_landed,
    spans_not_wanted,
    spans_owed,
    spans_under_copy,
)
from kvlift.core.tier import Source
from tests.core.test_step import (
    BOUNDS,
    CHAINED,
    COPY,
    LEASE,
    OWN,
    PARTS,
    READ,
    TOKEN,
)

FILL = Filling(
    plan=Plan(bounds=BOUNDS, n_pages=6, promise=4),
    lease=LEASE,
    parts=PARTS,
    wanted=(Span(4, 6),),
    n_arrived=0,
    token=TOKEN,
)
RESTORE, CHAIN = PARTS
HOST = (HostHandle(1), HostHandle(2))
LANDED = evolve(RESTORE, copy=None, n_landed=1)
"""The first part when its copy has ended."""

RECOMPUTED = evolve(FILL, plan=evolve(FILL.plan, rest=Source.RECOMPUTE), wanted=(), token=None)
GONE = evolve(FILL, peer_gone=PeerCause.GONE, n_arrived=2, token=None)


def filled(before: Filling, event: Event) -> tuple[Filling, tuple[Deed, ...]]:
    after, deeds = step(before, event)
    assert isinstance(after, Filling)
    return after, deeds


def cut(storage: int, host: int = 2) -> Plan:
    return evolve(FILL.plan, bounds=Bounds(device=1, shared=1, host=host, storage=storage))


# Questions.


def test_pages_land_in_any_order_and_count_from_the_first_on() -> None:
    assert spans_under_copy(FILL) == (Span(1, 2), Span(2, 4))
    assert spans_landed(FILL) == (Span(0, 1),)
    assert n_pages_landed(FILL) == 1
    behind = evolve(FILL, n_arrived=1)
    assert spans_landed(behind) == (Span(0, 1), Span(4, 5))
    assert n_pages_landed(behind) == 1
    restored = evolve(FILL, parts=(LANDED, CHAIN))
    assert spans_landed(restored) == (Span(0, 1), Span(1, 2))
    assert spans_under_copy(restored) == (Span(2, 4),)
    assert n_pages_landed(restored) == 2
    over = evolve(CHAIN, copy=None, read=None, host=(), n_landed=2)
    assert n_pages_landed(evolve(FILL, parts=(LANDED, over))) == 4
    assert n_pages_landed(evolve(FILL, parts=(LANDED, over), n_arrived=2)) == 6
    for n_landed, n_good in ((1, 2), (2, 1)):
        short = evolve(over, n_landed=n_landed, n_good=n_good)
        assert n_pages_landed(evolve(FILL, parts=(LANDED, short))) == 3


def test_the_peer_owes_what_no_source_brings_any_more() -> None:
    assert spans_owed(FILL) == ()
    shorter = evolve(FILL, plan=cut(2))
    assert spans_owed(shorter) == (), "under a copy still"
    over = evolve(CHAIN, copy=None)
    assert spans_owed(evolve(shorter, parts=(RESTORE, over))) == (Span(2, 4),)
    assert spans_owed(evolve(FILL, wanted=())) == (Span(4, 6),)
    assert spans_owed(RECOMPUTED) == ()
    assert spans_not_wanted(FILL) == (Span(0, 4),)
    assert n_pages_wanted(evolve(FILL, wanted=(Span(4, 6), Span(2, 3)))) == 3


@pytest.mark.parametrize(
    ("phase", "needs"),
    [
        (FILL, True),
        (evolve(FILL, token=None), True),
        (evolve(FILL, n_arrived=2), True),
        (evolve(FILL, token=None, n_arrived=2), False),
        (evolve(FILL, token=None, n_arrived=2, plan=cut(3)), True),
        (evolve(FILL, token=None, n_arrived=0, wanted=(), plan=cut(6)), False),
        (RECOMPUTED, False),
    ],
)
def test_the_peer_is_needed_for_pages_and_for_the_token(phase: Filling, *, needs: bool) -> None:
    assert needs_peer(phase) is needs


# Reports while pages come.


def test_pages_and_the_token_are_counted_and_nothing_else_changes() -> None:
    for before in (FILL, GONE, evolve(FILL, follow=Follow(leader=9, stop=2))):
        assert step(before, PagesCame(1)) == (evolve(before, n_arrived=1), ())
    assert step(FILL, TokenCame()) == (evolve(FILL, token=None), ())


def test_a_read_that_is_short_moves_the_boundary_and_its_page_is_no_hit_any_more() -> None:
    after, deeds = filled(FILL, ReadShort(READ, 1))
    assert after == evolve(FILL, plan=cut(3), parts=(RESTORE, evolve(CHAIN, n_good=1)))
    assert deeds == (ForgetStored(3, 4), AnnounceShrunk(3))
    after, deeds = filled(FILL, ReadShort(READ, 0))
    assert after == evolve(FILL, plan=cut(2), parts=(RESTORE, evolve(CHAIN, n_good=0)))
    assert deeds == (
        ForgetStored(2, 3),
        GiveUpRead(READ, 0),
        AnnounceShrunk(2),
        GiveUpCopy(CHAINED),
    )
    assert step(FILL, ReadShort(READ, 2))[0] is FILL
    assert step(FILL, ReadShort(Ticket(99), 0))[0] is FILL


def test_a_copy_that_is_short_gives_up_what_lies_behind_it() -> None:
    after, deeds = filled(FILL, CopyShort(COPY, 0))
    good = (evolve(RESTORE, n_good=0), evolve(CHAIN, n_good=0))
    assert after == evolve(FILL, plan=cut(1, host=1), parts=good)
    assert deeds == (
        AnnounceShrunk(1),
        GiveUpCopy(COPY),
        GiveUpRead(READ, 0),
        GiveUpCopy(CHAINED),
    )
    after, deeds = filled(FILL, CopyShort(CHAINED, 1))
    assert after.plan == cut(3)
    assert deeds == (ForgetStored(3, 4), AnnounceShrunk(3)), "the read has ended where it copies"
    assert step(FILL, CopyShort(Ticket(99), 0))[0] is FILL


def test_a_cut_in_front_of_a_part_keeps_none_of_it_and_behind_it_all() -> None:
    more = Part(source=Source.STORAGE, start=4, stop=6, n_good=2, copy=Ticket(8), read=Ticket(9))
    bounds = evolve(BOUNDS, storage=6)
    before = evolve(
        FILL, parts=(*PARTS, more), plan=evolve(FILL.plan, bounds=bounds), wanted=(), token=None
    )
    after, deeds = filled(before, ReadShort(READ, 1))
    assert [part.n_good for part in after.parts] == [1, 1, 0]
    assert deeds == (
        ForgetStored(3, 4),
        AnnounceShrunk(3),
        GiveUpRead(Ticket(9), 0),
        GiveUpCopy(Ticket(8)),
    )


def test_a_late_read_keeps_what_has_come_and_forgets_nothing() -> None:
    after, deeds = filled(FILL, ReadOverdue(READ, 1))
    assert after == evolve(FILL, plan=cut(3), parts=(RESTORE, evolve(CHAIN, n_good=1)))
    assert deeds == (GiveUpRead(READ, 1), AnnounceShrunk(3))
    after, deeds = filled(FILL, ReadOverdue(READ, 5))
    assert (after, deeds) == (FILL, (GiveUpRead(READ, 2),))
    assert step(FILL, ReadOverdue(Ticket(99), 0)) == (FILL, ())
    assert step(FILL, ReadOverdue(Ticket(99), 0))[0] is FILL


def test_a_read_that_has_ended_is_no_ticket_of_its_part() -> None:
    after, deeds = filled(FILL, ReadEnded(READ))
    assert after == evolve(FILL, parts=(RESTORE, evolve(CHAIN, read=None)))
    assert deeds == ()
    assert step(FILL, ReadEnded(Ticket(99)))[0] is FILL


def test_a_copy_that_has_ended_lets_its_host_pages_go() -> None:
    after, deeds = filled(FILL, CopyEnded(COPY))
    assert after == evolve(FILL, parts=(LANDED, CHAIN))
    assert deeds == (UnpinHost(1, 2),)
    over = evolve(CHAIN, copy=None, read=None, host=(), n_landed=2)
    after, deeds = filled(FILL, CopyEnded(CHAINED))
    assert after == evolve(FILL, parts=(RESTORE, over))
    assert deeds == (HoldBack(tickets=(READ,), host=HOST),)
    short = evolve(CHAIN, read=None, n_good=1, host_epoch=3)
    after, deeds = filled(evolve(FILL, parts=(RESTORE, short)), CopyEnded(CHAINED))
    landed = evolve(over, n_good=1, n_landed=1, host_epoch=3)
    assert after == evolve(FILL, parts=(RESTORE, landed))
    assert deeds == (KeepHost(start=2, n_good=1, pages=HOST, host_epoch=3),)
    assert step(FILL, CopyEnded(Ticket(99)))[0] is FILL


# Peers and leaders.


def test_a_peer_that_stops_matters_only_if_it_is_needed() -> None:
    after, deeds = step(FILL, PeerStopped(PeerCause.LOST))
    assert after == Draining(outcome=Outcome.FAILED)
    assert deeds[-1] == Announce(outcome=Outcome.FAILED, cause=PeerCause.LOST, n_pages_landed=1)
    served = evolve(FILL, n_arrived=2, token=None)
    assert step(served, PeerStopped(PeerCause.GONE)) == (GONE, ())


def test_a_shortfall_without_a_peer_ends_the_request() -> None:
    after, deeds = step(GONE, ReadShort(READ, 1))
    assert after == Draining(outcome=Outcome.FAILED)
    assert deeds[:2] == (ForgetStored(3, 4), AnnounceShrunk(3))
    assert deeds[-1] == Announce(outcome=Outcome.FAILED, cause=PeerCause.GONE, n_pages_landed=1)
    assert GiveUpRead(READ, 0) in deeds


def test_a_request_that_shares_follows_until_it_has_what_it_follows_for() -> None:
    before = evolve(FILL, follow=Follow(leader=9, stop=3))
    some, all_of_it = Lease(n_shared=2, own=OWN[1:]), Lease(n_shared=3, own=OWN[2:])
    assert step(before, SharedCame(some)) == (evolve(before, lease=some), ())
    assert step(before, SharedCame(all_of_it)) == (
        evolve(before, lease=all_of_it, follow=None),
        (),
    )
    assert step(FILL, SharedCame(some)) == (evolve(FILL, lease=some), ())


def test_who_loses_the_leader_asks_for_what_it_does_not_have() -> None:
    bounds = Bounds(device=1, shared=3, host=3, storage=3)
    before = evolve(
        FILL, plan=evolve(FILL.plan, bounds=bounds), parts=(), follow=Follow(leader=9, stop=3)
    )
    after, deeds = filled(before, LeaderLost())
    assert after.follow is None
    assert after.plan.bounds == Bounds(device=1, shared=1, host=1, storage=1)
    assert deeds == (AnnounceShrunk(1),)


def test_what_a_leader_hands_over_goes_on_as_its_heirs_own() -> None:
    bounds = Bounds(device=0, shared=5, host=5, storage=5)
    own = tuple(DeviceHandle(n) for n in range(20, 25))
    rest = Part(source=Source.STORAGE, start=4, stop=5, n_good=1, copy=Ticket(8), read=Ticket(9))
    before = evolve(
        FILL,
        plan=evolve(FILL.plan, bounds=bounds),
        parts=(rest,),
        follow=Follow(leader=9, stop=5),
    )
    lease = Lease(n_shared=1, own=own)
    after, deeds = filled(before, HandedOver(lease, PARTS, 2, 4, Follow(leader=7, stop=4)))
    assert after.plan.bounds == Bounds(device=0, shared=1, host=2, storage=4)
    assert after.lease == lease
    assert after.parts == (*PARTS, evolve(rest, n_good=0))
    assert after.follow == Follow(leader=7, stop=4)
    assert deeds == (AnnounceShrunk(4), GiveUpRead(Ticket(9), 0), GiveUpCopy(Ticket(8)))
    pinned = evolve(before, plan=evolve(FILL.plan, bounds=evolve(bounds, device=2)))
    after, _ = filled(pinned, HandedOver(lease, PARTS, 2, 4, None))
    assert after.plan.bounds.shared == 2
    with pytest.raises(IllegalEvent):
        step(evolve(before, peer_gone=PeerCause.GONE), HandedOver(lease, PARTS, 2, 4, None))


def test_a_widening_adds_to_what_was_wanted() -> None:
    after, deeds = filled(FILL, Widened((Span(2, 4),), 2))
    assert after == evolve(FILL, wanted=(Span(4, 6), Span(2, 4)), plan=evolve(FILL.plan, promise=2))
    assert deeds == ()
