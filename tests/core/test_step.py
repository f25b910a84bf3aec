"""`step` and `EDGES` are the same set of arrows; what a request held, its end gives back."""

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import get_args

import pytest
from attrs import evolve

from kvlift.core.deed import (
    Announce,
    Deed,
    DismissPeer,
    GiveUpRead,
    HoldBack,
    ReleaseDevice,
    ReleaseHost,
    UnpinDevice,
    UnpinHost,
)
from kvlift.core.descent import (
    Descent,
    DescentEvent,
    DescentPhase,
    Due,
    Mirroring,
    MirrorOver,
    MirrorSkipped,
    MirrorStarted,
    NothingLeft,
    Persisting,
    PersistOver,
    PersistStarted,
    Reach,
    Settled,
    Stowing,
    descend,
)
from kvlift.core.edges import EDGES, MIRROR_EDGES, takes
from kvlift.core.event import (
    Aborted,
    Admitted,
    AllLanded,
    AskedAgain,
    CopyEnded,
    CopyShort,
    Drained,
    Event,
    Finished,
    GivenUp,
    Grown,
    HandedOver,
    LeaderLost,
    PagesCame,
    PeerStopped,
    Published,
    ReadEnded,
    ReadOverdue,
    ReadShort,
    Report,
    SharedCame,
    Started,
    StorageAnswered,
    TailEnded,
    TokenCame,
    WantedBack,
    Widened,
)
from kvlift.core.ids import DeviceHandle, HostHandle, Ticket
from kvlift.core.illegal import IllegalEvent
from kvlift.core.landed import PeerCause
from kvlift.core.phase import (
    Asking,
    Draining,
    Ended,
    Filling,
    Outcome,
    Phase,
    Ready,
    Resuming,
    Retracted,
    Running,
    Waiting,
)
from kvlift.core.plan import Bounds, Follow, Lease, Part, Plan, Span
from kvlift.core.prompt import Prompt
from kvlift.core.step import step
from kvlift.core.tier import Source

READ, CHAINED, COPY, TOKEN, LOOKUP, TAIL = (Ticket(n) for n in range(1, 7))
OWN = tuple(DeviceHandle(n) for n in range(10, 15))
LEASE = Lease(n_shared=1, own=OWN)
BOUNDS = Bounds(device=1, shared=1, host=2, storage=4)
PARTS = (
    Part(source=Source.HOST, start=1, stop=2, n_good=1, copy=COPY),
    Part(
        source=Source.STORAGE,
        start=2,
        stop=4,
        n_good=2,
        copy=CHAINED,
        read=READ,
        host=(HostHandle(1), HostHandle(2)),
    ),
)


def _fillings() -> Iterator[Filling]:
    """Pages 1 of 6 pinned, 1 restored, 2 read, 2 from the peer; one that follows; one resumed."""
    chained = evolve(PARTS[1], read=None)
    landed = tuple(evolve(p, copy=None, read=None, host=(), n_landed=p.n_good) for p in PARTS)
    for parts, n_arrived, token, gone in itertools.product(
        (PARTS, (PARTS[0], chained), landed), (0, 2), (None, TOKEN), (None, PeerCause.GONE)
    ):
        if gone is not None and (n_arrived < 2 or token is not None):
            continue  # then it would have failed
        yield Filling(
            plan=Plan(bounds=BOUNDS, n_pages=6, promise=4),
            lease=LEASE,
            parts=parts,
            wanted=(Span(4, 6),),
            n_arrived=n_arrived,
            token=token,
            peer_gone=gone,
        )
    for gone, stop in itertools.product((None, PeerCause.GONE), (3, 6)):
        yield Filling(
            plan=Plan(
                bounds=Bounds(device=1, shared=stop, host=stop, storage=stop),
                n_pages=6,
                promise=stop,
            ),
            lease=LEASE,
            parts=(),
            wanted=(Span(stop, 6),) if stop < 6 else (),
            n_arrived=6 - stop if gone else 0,
            token=None,
            follow=Follow(leader=9, stop=stop),
            peer_gone=gone,
        )
    yield Filling(
        plan=Plan(bounds=BOUNDS, n_pages=6, promise=4, rest=Source.RECOMPUTE),
        lease=LEASE,
        parts=PARTS,
        wanted=(),
        n_arrived=0,
        token=None,
    )


FILLINGS = tuple(_fillings())
PLAN = FILLINGS[0].plan
TAILS = tuple(
    {"tail_device": device, "tail_host": host, "tail_copy": copy}
    for device, host, copy in (
        (None, None, None),
        (OWN[0], HostHandle(7), TAIL),
        (None, HostHandle(7), None),
    )
)
PHASES: tuple[Phase, ...] = (
    Asking(lookup=LOOKUP, start=1, n_lookups=1),
    Waiting(stored_start=1, stored_stop=2, n_lookups=1),
    *FILLINGS,
    Ready(plan=PLAN, lease=LEASE),
    Running(plan=PLAN, lease=LEASE),
    *(Retracted(plan=PLAN, n_pages_pinned=2, **tail) for tail in TAILS),  # type: ignore[arg-type]
    *(Resuming(plan=PLAN, n_pages_pinned=2, **tail) for tail in TAILS),  # type: ignore[arg-type]
    *(Draining(outcome=outcome) for outcome in Outcome),
    *(Ended(outcome=outcome) for outcome in Outcome),
)
TICKETS = (READ, CHAINED, COPY, Ticket(99))
SHARED = Lease(n_shared=3, own=OWN[2:])
EVENTS: tuple[Event, ...] = (
    *(StorageAnswered(t, n) for t in (LOOKUP, Ticket(99)) for n in (0, 2)),
    AskedAgain(LOOKUP, 0),
    Admitted(FILLINGS[0]),
    *(
        kind(t, n)
        for kind in (ReadShort, ReadOverdue, CopyShort)
        for t in TICKETS
        for n in (0, 1, 2)
    ),
    *(kind(t) for kind in (ReadEnded, CopyEnded) for t in TICKETS),
    *(PagesCame(n) for n in (1, 2)),
    TokenCame(),
    *(PeerStopped(cause) for cause in PeerCause),
    SharedCame(SHARED),
    Published(SHARED),
    LeaderLost(),
    HandedOver(LEASE, PARTS[:1], 2, 2, None),
    Widened((Span(2, 4),), 2),
    AllLanded(),
    Aborted(),
    Started(),
    Grown((DeviceHandle(50),)),
    Finished(),
    GivenUp(2, OWN[0], HostHandle(7), TAIL),
    GivenUp(2, None, None, None),
    *(TailEnded(t, n) for t in (TAIL, Ticket(99)) for n in (0, 1)),
    WantedBack(),
    Drained(),
)


def _arrows() -> Iterator[tuple[Phase, Event, Phase, tuple[Deed, ...]]]:
    for phase, event in itertools.product(PHASES, EVENTS):
        try:
            after, deeds = step(phase, event)
        except IllegalEvent:
            continue
        if after is not phase:
            yield phase, event, after, deeds


ARROWS = tuple(_arrows())


def test_every_kind_of_phase_and_event_is_tried() -> None:
    assert {type(p) for p in PHASES} == set(get_args(Phase))
    assert {type(e) for e in EVENTS} == set(get_args(Event))


def test_the_code_takes_every_arrow_of_the_table_and_no_other() -> None:
    taken = {(type(before), type(event), type(after)) for before, event, after, _d in ARROWS}
    assert taken - EDGES == set(), "arrows that no table has"
    assert EDGES - taken == set(), "arrows that the code never takes"


@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: type(phase).__name__)
def test_a_report_is_never_illegal_and_a_call_is_where_the_table_has_no_arrow(phase: Phase) -> None:
    for event in EVENTS:
        try:
            after, deeds = step(phase, event)
        except IllegalEvent:
            assert not isinstance(event, Report) or isinstance(phase, Ended)
            is_heir = isinstance(event, HandedOver) and isinstance(phase, Filling)
            assert not takes(type(phase), type(event)) or is_heir
            continue
        assert after is not phase or not deeds, "nothing changed, so nothing is to be done"


def test_an_illegal_event_names_both() -> None:
    phase = Ended(outcome=Outcome.DONE)
    with pytest.raises(IllegalEvent, match=r"Ended can't take Started\(\)") as error:
        step(phase, Started())
    assert error.value.phase is phase
    assert error.value.event == Started()


def test_a_step_gives_the_same_twice_and_changes_nothing() -> None:
    for phase, event, after, deeds in ARROWS:
        before = repr(phase)
        assert step(phase, event) == (after, deeds)
        assert repr(phase) == before


def test_an_ended_request_says_so_once() -> None:
    for before, _event, after, deeds in ARROWS:
        n_told = sum(isinstance(deed, Announce) for deed in deeds)
        has_ended = isinstance(after, Draining | Ended) and not isinstance(before, Draining)
        assert n_told == has_ended


def _device_pages(deeds: tuple[Deed, ...]) -> Counter[DeviceHandle]:
    back: Counter[DeviceHandle] = Counter()
    for deed in deeds:
        match deed:
            case ReleaseDevice(pages=pages) | DismissPeer(device=pages) | HoldBack(device=pages):
                back.update(pages)
            case _:
                pass
    return back


def test_the_end_of_a_request_gives_every_device_page_back_once() -> None:
    for before, event, after, deeds in ARROWS:
        if isinstance(before, Filling | Ready | Running) and isinstance(after, Draining):
            assert _device_pages(deeds) == Counter(before.lease.own), (before, event)
            assert [d.n_pages for d in deeds if isinstance(d, UnpinDevice)] == [1]


def test_pages_under_a_copy_or_at_the_peer_are_held_back_at_the_end() -> None:
    for before, event, after, deeds in ARROWS:
        if not isinstance(before, Filling) or not isinstance(after, Draining):
            continue
        free = {page for d in deeds if isinstance(d, ReleaseDevice) for page in d.pages}
        ended = {d.tickets for d in deeds if isinstance(d, HoldBack)}
        for part in before.parts:
            is_over = not any(part.copy in tickets for tickets in ended)
            if part.copy is not None and not is_over:
                assert not free & set(before.lease.pages(part.start, part.stop))
        n_here = before.n_arrived
        missing = [p for span in before.wanted for p in range(span.start, span.stop)][n_here:]
        if not isinstance(event, PagesCame):
            assert not free & {before.lease.own[page - 1] for page in missing}


def _host_back(deeds: tuple[Deed, ...]) -> tuple[Counter[HostHandle], set[int]]:
    """Host pages that go or are held back, and index pages whose pin goes or is held back."""
    pages: Counter[HostHandle] = Counter()
    unpinned: set[int] = set()
    for deed in deeds:
        match deed:
            case ReleaseHost(pages=back):
                pages.update(back)
            case HoldBack(host=back, pin_host_start=start, pin_host_stop=stop):
                pages.update(back)
                unpinned |= set(range(start, stop))
            case UnpinHost(start=start, stop=stop):
                unpinned |= set(range(start, stop))
            case _:
                pages.update(
                    getattr(deed, "pages", ()) if type(deed).__name__ == "KeepHost" else ()
                )
    return pages, unpinned


def test_the_end_of_a_request_gives_every_host_page_and_pin_back() -> None:
    for before, _event, after, deeds in ARROWS:
        pages, unpinned = _host_back(deeds)
        if isinstance(before, Filling) and isinstance(after, Draining):
            assert pages == Counter(page for part in before.parts for page in part.host)
            pinned = [p for p in before.parts if p.copy is not None and not p.host]
            assert unpinned == {n for p in pinned for n in range(p.start, p.stop)}
        if isinstance(before, Retracted | Resuming) and isinstance(after, Draining):
            assert pages == Counter(() if before.tail_host is None else (before.tail_host,))
            assert unpinned == {0, 1}


def test_a_shortfall_never_moves_a_boundary_to_the_right() -> None:
    for before, event, after, _deeds in ARROWS:
        if isinstance(before, Filling) and isinstance(after, Filling | Ready):
            b, a = before.plan.bounds, after.plan.bounds
            if not isinstance(event, HandedOver):
                assert a.storage <= b.storage
                assert a.host <= b.host
                assert a.device == b.device


# The way down.

PROMPT = Prompt(bytes(32), bytes(16), 1)
MIRRORING = Mirroring(
    ticket=Ticket(1), positions=(0, 1), host=(HostHandle(1), HostHandle(2)), host_epoch=0
)
PERSISTING = Persisting(ticket=Ticket(1), positions=(0, 1), from_host=True)
DOWN: tuple[DescentPhase, ...] = (Due(), MIRRORING, Stowing(), PERSISTING, Settled())
DOWN_EVENTS: tuple[DescentEvent, ...] = (
    MirrorStarted(MIRRORING),
    MirrorSkipped(),
    *(MirrorOver(Ticket(1), n) for n in (0, 1, 2)),
    PersistStarted(PERSISTING),
    *(PersistOver(Ticket(1), n) for n in (0, 1, 2)),
    NothingLeft(),
)


def test_a_late_read_is_given_up_also_when_all_that_is_still_wanted_has_come() -> None:
    """One rank's read ended short, which moved the boundary; another's storage is silent behind
    that boundary. Its copy of what has come waits for the end of the read."""
    short, _ = step(FILLINGS[0], ReadShort(READ, 1))
    assert isinstance(short, Filling)
    assert short.plan.bounds.storage == 3
    after, deeds = step(short, ReadOverdue(READ, 1))
    assert isinstance(after, Filling)
    assert GiveUpRead(READ, 1) in deeds
    assert after.plan.bounds == short.plan.bounds


def test_a_read_of_which_nothing_is_left_is_given_up_on_the_ranks_where_it_still_goes_on() -> None:
    """Otherwise nobody would: the copy behind it is dropped, and the request goes on without it.

    A silent storage of another rank would keep the host pages for ever."""
    after, deeds = step(FILLINGS[0], ReadShort(READ, 0))
    assert isinstance(after, Filling)
    assert GiveUpRead(READ, 0) in deeds
    failed_copy, more = step(FILLINGS[0], CopyShort(CHAINED, 0))
    assert isinstance(failed_copy, Filling)
    assert GiveUpRead(READ, 0) in more


def test_the_way_down_takes_every_arrow_of_its_table_and_no_other() -> None:
    taken = set()
    for phase, reach, event in itertools.product(DOWN, Reach, DOWN_EVENTS):
        descent = Descent(id=1, prompt=PROMPT, n_pages=2, reach=reach, phase=phase)
        try:
            after, _deeds = descend(descent, event)
        except IllegalEvent:
            assert not any(a is type(phase) and e is type(event) for a, e, _b in MIRROR_EDGES)
            continue
        taken.add((type(phase), type(event), type(after.phase)))
    assert taken == MIRROR_EDGES
    assert {type(p) for p in DOWN} == set(get_args(DescentPhase))
    assert {type(e) for e in DOWN_EVENTS} == set(get_args(DescentEvent))


def test_a_page_that_was_not_stored_ends_the_descent() -> None:
    descent = Descent(id=1, prompt=PROMPT, n_pages=2, reach=Reach.BOTH, phase=PERSISTING)
    assert isinstance(descend(descent, PersistOver(Ticket(1), 1))[0].phase, Settled)
    assert isinstance(descend(descent, PersistOver(Ticket(1), 2))[0].phase, Stowing)


def test_an_answer_to_another_copy_is_a_bug_of_the_caller() -> None:
    descent = Descent(id=1, prompt=PROMPT, n_pages=2, reach=Reach.BOTH, phase=MIRRORING)
    with pytest.raises(IllegalEvent, match="Mirroring can't take"):
        descend(descent, MirrorOver(Ticket(2), 2))
