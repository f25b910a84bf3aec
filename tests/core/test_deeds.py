"""Deeds one by one: what each does to the index, the ledger, the peer and the tickets."""

import pytest
from attrs import evolve

from kvlift.core.apply import apply, happen
from kvlift.core.deed import (
    Announce,
    AnnounceReady,
    AnnounceShrunk,
    Commit,
    DismissPeer,
    ForgetStored,
    GiveUpCopy,
    GiveUpRead,
    HoldBack,
    KeepHost,
    KnowStored,
    MirrorPrompt,
    ReleaseDevice,
    ReleaseHost,
    StowAll,
)
from kvlift.core.descent import Reach
from kvlift.core.effect import (
    CancelPrefetch,
    CancelRestore,
    FreeDevice,
    FreeHost,
    SendAborted,
    SendCommitted,
)
from kvlift.core.event import Published
from kvlift.core.ids import Ticket
from kvlift.core.landed import PeerCause
from kvlift.core.notice import BecameReady, HasEnded, HasShrunk
from kvlift.core.phase import (
    Outcome,
    Ready,
    Running,
)
from kvlift.core.plan import Lease
from kvlift.core.policy import Switch, WritePolicy
from kvlift.core.publish import published
from kvlift.core.tier import Source, Tier
from tests.core.test_admission import POLICY, draft_of, put, wait
from tests.core.test_calls import ODD, PROMPT, A, plan_of, running
from tests.core.test_draft import devices, hosts

# Deeds.


def test_deeds_for_the_ports_name_their_tickets() -> None:
    draft = draft_of()
    request = wait(draft, "A", PROMPT)
    draft.take_device(2)
    draft.take_host(2)
    draft.effects.clear()
    for deed in (
        GiveUpRead(Ticket(5), 2),
        GiveUpCopy(Ticket(6)),
        ReleaseDevice(devices(1)),
        ReleaseHost(hosts(1)),
        AnnounceShrunk(2),
        Commit(),
    ):
        apply(draft, request, deed)
    assert draft.effects == [
        CancelPrefetch(ticket=Ticket(5), n_pages_kept=2),
        CancelRestore(ticket=Ticket(6)),
        FreeDevice(pages=devices(1)),
        FreeHost(pages=hosts(1)),
        SendCommitted(ticket=request.hold),
    ]
    assert draft.closed == [request.hold]
    assert draft.notices == [HasShrunk(rid=A, attempt=request.attempt, page=2)]


def test_an_end_is_announced_with_everything_that_the_host_asks_for() -> None:
    draft = draft_of()
    request = wait(draft, "A", PROMPT)
    apply(draft, request, Announce(outcome=Outcome.FAILED, cause=PeerCause.GONE, n_pages_landed=2))
    assert draft.notices == [
        HasEnded(
            rid=A,
            attempt=request.attempt,
            outcome=Outcome.FAILED,
            cause=PeerCause.GONE,
            hold=request.hold,
            peer="p",
            n_pages_landed=2,
        )
    ]
    assert draft.attempt_by_rid == {}


def test_a_peer_that_may_still_write_is_waited_for() -> None:
    draft = draft_of()
    request = wait(draft, "A", PROMPT)
    apply(draft, request, DismissPeer(device=()))
    assert draft.effects == [SendAborted(ticket=request.hold)]
    assert draft.closed == [request.hold]
    assert draft.drains == []
    other = wait(draft, "B", PROMPT)
    apply(draft, other, DismissPeer(device=devices(3)))
    (drain,) = draft.drains
    assert (drain.attempt, drain.tickets, drain.device, drain.host) == (
        other.attempt,
        (other.hold,),
        devices(3),
        (),
    )
    assert (drain.pin_host_start, drain.pin_host_stop) == (0, 0)
    assert draft.closed == [request.hold]
    held = HoldBack(
        tickets=(Ticket(8),), device=devices(4), host=hosts(5), pin_host_start=1, pin_host_stop=3
    )
    apply(draft, other, held)
    drain = draft.drains[1]
    assert (drain.tickets, drain.device, drain.host) == ((8,), devices(4), hosts(5))
    assert (drain.pin_host_start, drain.pin_host_stop, drain.attempt) == (1, 3, other.attempt)


@pytest.mark.parametrize(
    ("write", "persist", "reach"),
    [
        (WritePolicy.THROUGH, Switch.ON, Reach.BOTH),
        (WritePolicy.THROUGH, Switch.OFF, Reach.HOST),
        (WritePolicy.BACK, Switch.ON, Reach.STORAGE),
        (WritePolicy.NONE, Switch.ON, Reach.STORAGE),
        (WritePolicy.NONE, Switch.OFF, None),
    ],
)
def test_what_goes_down_and_how_far_is_said_by_the_policy(
    write: WritePolicy, persist: Switch, reach: Reach | None
) -> None:
    draft = draft_of(evolve(POLICY, write=write, persist=persist))
    request = wait(draft, "A", ODD)
    apply(draft, request, StowAll())
    assert [(d.n_pages, d.reach) for d in draft.descents] == ([(2, reach)] if reach else [])
    draft.descents.clear()
    apply(draft, request, MirrorPrompt())
    through = [(2, Reach.HOST)] if write is WritePolicy.THROUGH else []
    assert [(d.n_pages, d.reach) for d in draft.descents] == through


@pytest.mark.parametrize(
    ("deed", "kept", "freed"),
    [
        (KeepHost(start=1, n_good=2, pages=hosts(0, 1), host_epoch=0), (0, 1), ()),
        (KeepHost(start=1, n_good=1, pages=hosts(0, 1), host_epoch=0), (0,), (1,)),
        (KeepHost(start=1, n_good=0, pages=hosts(0, 1), host_epoch=0), (), (0, 1)),
        (KeepHost(start=1, n_good=2, pages=hosts(0, 1), host_epoch=1), (), (0, 1)),
        (KeepHost(start=2, n_good=2, pages=hosts(0, 1), host_epoch=0), (0,), (1,)),
    ],
)
def test_host_pages_that_a_read_brought_are_kept_or_freed(
    deed: KeepHost, kept: tuple[int, ...], freed: tuple[int, ...]
) -> None:
    draft = draft_of()
    put(draft, Tier.DEVICE, PROMPT, 0, deed.start)
    request = evolve(wait(draft, "A", PROMPT), priority=6)
    draft.take_host(2)
    draft.effects.clear()
    apply(draft, request, deed)
    on_host = [page for s in draft.index.segments.values() for page in s.host or ()]
    assert tuple(on_host) == kept
    freed_pages = tuple(p for e in draft.effects if isinstance(e, FreeHost) for p in e.pages)
    assert freed_pages == freed
    assert all(s.priority == 6 for s in draft.index.segments.values() if s.host)


def test_a_host_page_that_the_index_has_is_not_kept_twice() -> None:
    draft = draft_of()
    put(draft, Tier.HOST, PROMPT, 1, 2)
    request = wait(draft, "A", PROMPT)
    pages = draft.take_host(3)
    draft.effects.clear()
    apply(draft, request, KeepHost(start=0, n_good=3, pages=pages, host_epoch=0))
    by_place = sorted(draft.index.segments.values(), key=lambda s: PROMPT.tokens.find(s.tokens))
    assert [s.host for s in by_place] == [(pages[0],), (0,), (pages[2],)]
    assert draft.effects == [FreeHost(pages=(pages[1],))]


def test_what_storage_has_is_remembered_for_pages_with_a_place() -> None:
    draft = draft_of()
    put(draft, Tier.HOST, PROMPT, 0, 2)
    request = wait(draft, "A", PROMPT)
    apply(draft, request, KnowStored(1, 3))
    by_place = sorted(draft.index.segments.values(), key=lambda s: PROMPT.tokens.find(s.tokens))
    assert [s.stored for s in by_place] == [False, True]
    apply(draft, request, KnowStored(2, 3))
    apply(draft, request, ForgetStored(1, 2))
    assert not any(s.stored for s in draft.index.segments.values())


@pytest.mark.parametrize(
    ("rest", "storage", "n_kept"),
    [(Source.PEER, 1, None), (Source.RECOMPUTE, 1, 2), (Source.RECOMPUTE, 3, None)],
)
def test_a_ready_request_names_its_pages_and_what_is_to_be_computed_again(
    rest: Source, storage: int, n_kept: int | None
) -> None:
    draft = draft_of()
    put(draft, Tier.DEVICE, PROMPT, 0, 1)
    request = wait(draft, "A", PROMPT)
    plan = plan_of(3, rest, storage)
    ready = Ready(plan=plan, lease=Lease(n_shared=1, own=devices(7, 8)))
    draft.put_phase(request.attempt, ready)
    apply(draft, draft.requests[request.attempt], AnnounceReady())
    assert draft.notices == [
        BecameReady(
            rid=A,
            attempt=request.attempt,
            pages=devices(0, 7, 8),
            hold=request.hold,
            plan=plan,
            n_tokens_kept=n_kept,
        )
    ]


# Publishing.


def test_landed_pages_join_the_index_once() -> None:
    draft = draft_of()
    put(draft, Tier.DEVICE, PROMPT, 1, 2)
    request = evolve(wait(draft, "A", PROMPT), priority=5)
    own = draft.take_device(3)
    draft.effects.clear()
    lease = published(draft, request, Lease(n_shared=0, own=own), 2)
    assert lease == Lease(n_shared=2, own=own[2:])
    assert draft.effects == [FreeDevice(pages=(own[1],))]
    by_place = sorted(draft.index.segments.values(), key=lambda s: PROMPT.tokens.find(s.tokens))
    assert [s.device for s in by_place] == [(own[0],), (0,)]
    assert [(s.device_pins, s.priority, s.n_uses) for s in by_place] == [(1, 5, 1), (1, 5, 1)]
    assert {s.used for s in by_place} == {draft.clock}
    assert published(draft, request, lease, 2) is lease
    assert published(draft, request, lease, 1) is lease


def test_nothing_joins_behind_a_flushed_page_that_is_still_pinned() -> None:
    draft = draft_of()
    put(draft, Tier.DEVICE, PROMPT, 0, 1)
    put(draft, Tier.DEVICE, PROMPT, 1, 2)
    draft.index.pin(Tier.DEVICE, PROMPT, 0, 2)
    draft.index.unpin(Tier.DEVICE, PROMPT, 0, 1)
    draft.index.flush(Tier.DEVICE)
    request = wait(draft, "A", PROMPT)
    own = draft.take_device(3)
    lease = published(draft, request, Lease(n_shared=0, own=own), 3)
    assert lease == Lease(n_shared=1, own=own[1:])
    behind = Lease(n_shared=2, own=own[2:])
    assert published(draft, request, behind, 3) == Lease(n_shared=3, own=())


def test_an_event_is_remembered_only_where_something_changed() -> None:
    draft = draft_of()
    phase = running(draft)
    request = draft.request(A)
    assert request is not None
    happen(draft, request.attempt, Published(phase.lease))
    assert draft.touched == {request.attempt: None}
    assert draft.movers == [request.attempt]
    assert draft.arrows == [(Running, Published, Running)]
