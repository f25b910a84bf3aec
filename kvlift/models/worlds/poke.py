"""Both machines of the core, poked: every event in every phase, also those that nothing brings.

No situation: one step from phases that are made here. What a chart has no arrow for is old news,
and changes nothing, or the mistake of a caller, and is refused aloud.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from types import UnionType
from typing import Final, NamedTuple

from attrs import define, evolve, field

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
from kvlift.core.step import step
from kvlift.core.tier import Source
from kvlift.models.claim import Always, AlwaysStep, Claim, Move, Sometimes, World
from kvlift.models.statechart import Edge
from kvlift.models.worlds.host import prompt_of

PROMPT: Final = prompt_of(1, 1, 2, 2)
READ, CHAINED, COPY, TOKEN, LOOKUP, TAIL, FOREIGN = (Ticket(n) for n in range(1, 8))
OWN = tuple(DeviceHandle(n) for n in range(10, 14))
LEASE: Final = Lease(n_shared=1, own=OWN)
LONGER: Final = Lease(n_shared=3, own=OWN[2:])
PLAN: Final = Plan(
    bounds=Bounds(device=1, shared=1, host=2, storage=4), n_pages=5, promise=4
)  # fmt: skip
PARTS: Final = (
    Part(source=Source.HOST, start=1, stop=2, n_good=1, copy=COPY),
    Part(source=Source.STORAGE, start=2, stop=4, n_good=2, copy=CHAINED, read=READ,
         host=(HostHandle(1), HostHandle(2))),
)  # fmt: skip
FULL: Final = Filling(
    plan=PLAN, lease=LEASE, parts=PARTS, wanted=(Span(4, 5),), n_arrived=0, token=TOKEN
)
MIRRORING: Final = Mirroring(
    ticket=Ticket(1), positions=(0, 1), host=(HostHandle(1), HostHandle(2)), host_epoch=0
)
PERSISTING: Final = Persisting(ticket=Ticket(1), positions=(0, 1), from_host=True)


def _phases() -> Iterator[Phase]:
    yield Asking(lookup=LOOKUP, start=1, n_lookups=1)
    yield Waiting(stored_start=1, stored_stop=2, n_lookups=1)
    yield FULL
    yield evolve(FULL, parts=(), n_arrived=1, token=None, peer_gone=PeerCause.GONE)
    yield evolve(FULL, parts=(), follow=Follow(leader=9, stop=4))
    yield evolve(FULL, plan=evolve(PLAN, rest=Source.RECOMPUTE), wanted=(), token=None)
    yield Ready(plan=PLAN, lease=LEASE)
    yield Running(plan=PLAN, lease=LEASE)
    for device, host, copy in ((OWN[0], HostHandle(7), TAIL), (None, None, None)):
        yield Retracted(plan=PLAN, n_pages_pinned=2, tail_device=device, tail_host=host,
                        tail_copy=copy)  # fmt: skip
        yield Resuming(plan=PLAN, n_pages_pinned=2, tail_device=device, tail_host=host,
                       tail_copy=copy)  # fmt: skip
    yield Draining(outcome=Outcome.DONE)
    yield Ended(outcome=Outcome.DONE)


def _events() -> Iterator[Event]:
    for ticket in (LOOKUP, FOREIGN):
        yield StorageAnswered(ticket, 1)
    for ticket in (READ, COPY, CHAINED, FOREIGN):
        yield from (ReadShort(ticket, 1), ReadOverdue(ticket, 1), ReadEnded(ticket))
        yield from (CopyShort(ticket, 0), CopyEnded(ticket))
    for ticket in (TAIL, FOREIGN):
        yield from (TailEnded(ticket, 0), TailEnded(ticket, 1))
    yield from (PagesCame(1), TokenCame(), PeerStopped(PeerCause.LOST))
    yield from (AskedAgain(LOOKUP, 0), Admitted(FULL), SharedCame(LONGER), Published(LONGER))
    yield from (LeaderLost(), HandedOver(LEASE, PARTS[:1], 2, 2, None), Widened((Span(2, 4),), 2))
    yield from (AllLanded(), Aborted(), Started(), Grown(OWN[:1]), Finished(), WantedBack())
    yield from (GivenUp(2, OWN[0], HostHandle(7), TAIL), GivenUp(2, None, None, None), Drained())


def _ways_down() -> Iterator[Descent]:
    phases: tuple[DescentPhase, ...] = (Due(), MIRRORING, Stowing(), PERSISTING, Settled())
    for reach in Reach:
        for phase in phases:
            yield Descent(id=1, prompt=PROMPT, n_pages=2, reach=reach, phase=phase)


def _news_of_descents() -> Iterator[DescentEvent]:
    yield from (MirrorStarted(MIRRORING), MirrorSkipped(), PersistStarted(PERSISTING))
    for ticket in (Ticket(1), FOREIGN):
        for n_good in (1, 2):
            yield from (MirrorOver(ticket, n_good), PersistOver(ticket, n_good))
    yield NothingLeft()


class Poked(NamedTuple):
    """A phase, or what an event has made of it. `after` is None where the event was refused."""

    before: Phase | Descent
    event: Event | DescentEvent | None = None
    after: Phase | Descent | None = None
    n_deeds: int = 0


@define(eq=False)
class Pokes(World[Poked]):
    """One step from every phase."""

    name: str = "poke"
    events: tuple[Event, ...] = field(init=False)
    news: tuple[DescentEvent, ...] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.events, self.news = tuple(_events()), tuple(_news_of_descents())

    def claims(self) -> Sequence[Claim[Poked]]:
        return [
            Always("no arrow is taken that the charts have not", _is_in_a_chart),
            Always("old news changes nothing", _is_harmless),
            Always("what is refused is in no chart", _is_rightly_refused),
            AlwaysStep("a step gives the same twice", _gives_the_same),
            Sometimes("an arrow is taken", _is_arrow),
            Sometimes("old news comes", lambda one: one.after == one.before),
            Sometimes("a request refuses", _refuses(Phase)),
            Sometimes("a descent refuses", _refuses(Descent)),
        ]

    def initial(self) -> Iterator[Poked]:
        yield from map(Poked, _phases())
        yield from map(Poked, _ways_down())

    def moves(self, state: Poked) -> Iterator[Move[Poked]]:
        if state.event is None:
            is_descent = isinstance(state.before, Descent)
            for event in self.news if is_descent else self.events:
                yield Move(f"# {type(event).__name__}", poked(state.before, event))

    def canonical(self, state: Poked) -> Hashable:
        return state


def poked(before: Phase | Descent, event: Event | DescentEvent) -> Poked:
    """What the event makes of the phase."""
    try:
        if isinstance(before, Descent):
            assert isinstance(event, DescentEvent)
            descent, duties = descend(before, event)
            return Poked(before, event, descent, len(duties))
        assert isinstance(event, Event)
        phase, deeds = step(before, event)
        return Poked(before, event, phase, len(deeds))
    except IllegalEvent:
        return Poked(before, event)


def _kinds(poke: Poked) -> Edge:
    """The classes of phase, event and phase."""
    ends = [one.phase if isinstance(one, Descent) else one for one in (poke.before, poke.after)]
    return type(ends[0]), type(poke.event), type(ends[1])


def _is_arrow(poke: Poked) -> bool:
    return poke.after is not None and poke.after != poke.before


def _is_in_a_chart(poke: Poked) -> bool:
    return not _is_arrow(poke) or _kinds(poke) in EDGES | MIRROR_EDGES


def _is_harmless(poke: Poked) -> bool:
    """Nothing changed, so nothing is to be done."""
    return poke.after != poke.before or poke.n_deeds == 0


def _is_rightly_refused(poke: Poked) -> bool:
    """A report may always come; a descent alone is told its own news or none."""
    if poke.event is None or poke.after is not None:
        return True
    before, event, _ = _kinds(poke)
    if isinstance(poke.before, Descent):
        is_foreign = getattr(poke.event, "ticket", None) == FOREIGN
        return is_foreign or not any((b, e) == (before, event) for b, e, _ in MIRROR_EDGES)
    if isinstance(poke.before, Ended):
        return True
    is_without_peer = isinstance(poke.before, Filling) and poke.before.peer_gone is not None
    has_arrow = takes(before, event) and not (is_without_peer and event is HandedOver)
    return not issubclass(event, Report) and not has_arrow


def _gives_the_same(before: Poked, move: Move[Poked], after: Poked) -> bool:
    del move
    return after.event is None or poked(before.before, after.event) == after


def _refuses(kind: type | UnionType) -> Callable[[Poked], bool]:
    return lambda one: one.event is not None and one.after is None and isinstance(one.before, kind)


def poke(*, deep: bool) -> Pokes:
    """Every event in every phase of both machines, also those that nothing brings."""
    del deep
    return Pokes()
