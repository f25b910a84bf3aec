"""The request machine: `step(phase, event) -> (phase, deeds)`.

Pure; one function per phase, the event inside, every case covered. Returning the same phase object
means that nothing changed. Reports may be old news and are ignored where they are; a call or a
consequence that the phase can't take is a bug of the caller and raises `IllegalEvent`.
The arrows stand once more in `edges`; a test proves that both are the same set.
"""

from typing import assert_never

from attrs import evolve

from kvlift.core.deed import (
    Announce,
    CloseTicket,
    Deed,
    DismissPeer,
    ForgetStored,
    HoldBack,
    KnowStored,
    ReleaseDevice,
    ReleaseHost,
    StowAll,
    UnpinDevice,
    UnpinHost,
)
from kvlift.core.event import (
    Aborted,
    Admitted,
    AskedAgain,
    Call,
    Consequence,
    Drained,
    Event,
    Finished,
    GivenUp,
    Grown,
    PeerStopped,
    Published,
    Report,
    Started,
    StorageAnswered,
    TailEnded,
    WantedBack,
)
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
from kvlift.core.step_filling import Step, from_filling


def step(phase: Phase, event: Event) -> Step:
    """What the event makes of the phase, and what has to be done about it."""
    match phase:
        case Asking():
            return _from_asking(phase, event)
        case Waiting():
            return _from_waiting(phase, event)
        case Filling():
            return from_filling(phase, event)
        case Ready():
            return _from_ready(phase, event)
        case Running():
            return _from_running(phase, event)
        case Retracted():
            return _from_retracted(phase, event)
        case Resuming():
            return _from_resuming(phase, event)
        case Draining():
            return _from_draining(phase, event)
        case Ended():
            raise IllegalEvent(phase, event)
        case _:
            assert_never(phase)


def _before_filling(outcome: Outcome, cause: PeerCause | None, *first: Deed) -> Step:
    """A request that holds no page ends: there is nothing to wait for."""
    deeds = (*first, DismissPeer(device=()), Announce(outcome=outcome, cause=cause))
    return Ended(outcome=outcome), deeds


def _from_asking(phase: Asking, event: Event) -> Step:
    match event:
        case StorageAnswered(ticket=ticket, n_pages=n_pages) if ticket == phase.lookup:
            stop = phase.start + n_pages
            waiting = Waiting(stored_start=phase.start, stored_stop=stop, n_lookups=phase.n_lookups)
            return waiting, (KnowStored(phase.start, stop), ForgetStored(stop, stop + 1))
        case Aborted():
            return _before_filling(Outcome.ABORTED, None, CloseTicket(phase.lookup))
        case PeerStopped(cause=cause):
            return _before_filling(Outcome.FAILED, cause, CloseTicket(phase.lookup))
        case Report():
            return phase, ()
        case Call() | Consequence():
            raise IllegalEvent(phase, event)
        case _:
            assert_never(event)


def _from_waiting(phase: Waiting, event: Event) -> Step:
    match event:
        case Admitted(filling=filling):
            return filling, ()
        case AskedAgain(lookup=lookup, start=start):
            return Asking(lookup=lookup, start=start, n_lookups=phase.n_lookups + 1), ()
        case Aborted():
            return _before_filling(Outcome.ABORTED, None)
        case PeerStopped(cause=cause):
            return _before_filling(Outcome.FAILED, cause)
        case Report():
            return phase, ()
        case Call() | Consequence():
            raise IllegalEvent(phase, event)
        case _:
            assert_never(event)


def _from_ready(phase: Ready, event: Event) -> Step:
    match event:
        case Started():
            return Running(plan=phase.plan, lease=phase.lease), ()
        case Aborted():
            return Draining(outcome=Outcome.ABORTED), (
                UnpinDevice(phase.lease.n_shared),
                ReleaseDevice(phase.lease.own),
                Announce(outcome=Outcome.ABORTED),
            )
        case Report():
            return phase, ()
        case Call() | Consequence():
            raise IllegalEvent(phase, event)
        case _:
            assert_never(event)


def _from_running(phase: Running, event: Event) -> Step:
    match event:
        case Grown(pages=pages):
            lease = evolve(phase.lease, own=phase.lease.own + pages)
            return evolve(phase, lease=lease), ()
        case Published(lease=lease):
            return evolve(phase, lease=lease), ()
        case Finished():
            return Draining(outcome=Outcome.DONE), (
                StowAll(),
                UnpinDevice(phase.lease.n_shared),
                ReleaseDevice(phase.lease.own),
                Announce(outcome=Outcome.DONE),
            )
        case GivenUp(n_pages_pinned=n_pinned, tail_device=device, tail_host=host, tail_copy=copy):
            retracted = Retracted(
                plan=phase.plan,
                n_pages_pinned=n_pinned,
                tail_device=device,
                tail_host=host,
                tail_copy=copy,
            )
            own = tuple(page for page in phase.lease.own if page != device)
            return retracted, (UnpinDevice(phase.lease.n_shared), ReleaseDevice(own))
        case Aborted():
            return Draining(outcome=Outcome.ABORTED), (
                UnpinDevice(phase.lease.n_shared),
                ReleaseDevice(phase.lease.own),
                Announce(outcome=Outcome.ABORTED),
            )
        case Report():
            return phase, ()
        case Call() | Consequence():
            raise IllegalEvent(phase, event)
        case _:
            assert_never(event)


def _without_tail(phase: Retracted | Resuming) -> tuple[Deed, ...]:
    """Let go of the host copies, and of the partial page; while that is copied it is held back."""
    unpin = UnpinHost(0, phase.n_pages_pinned)
    device = () if phase.tail_device is None else (phase.tail_device,)
    host = () if phase.tail_host is None else (phase.tail_host,)
    if phase.tail_copy is not None:
        return (unpin, HoldBack(tickets=(phase.tail_copy,), device=device, host=host))
    return (unpin, ReleaseDevice(device), ReleaseHost(host))


def _tail_ended(phase: Retracted | Resuming, n_good: int) -> Step:
    """The partial page is safe on the host, or lost: then its tokens are computed again."""
    device = () if phase.tail_device is None else (phase.tail_device,)
    landed = evolve(phase, tail_device=None, tail_copy=None)
    if n_good > 0:
        return landed, (ReleaseDevice(device),)
    host = () if phase.tail_host is None else (phase.tail_host,)
    return evolve(landed, tail_host=None), (ReleaseDevice(device), ReleaseHost(host))


def _from_retracted(phase: Retracted, event: Event) -> Step:
    match event:
        case TailEnded(ticket=ticket, n_good=n_good) if ticket == phase.tail_copy:
            return _tail_ended(phase, n_good)
        case WantedBack():
            return Resuming(
                plan=phase.plan,
                n_pages_pinned=phase.n_pages_pinned,
                tail_device=phase.tail_device,
                tail_host=phase.tail_host,
                tail_copy=phase.tail_copy,
            ), ()
        case Aborted():
            return Draining(outcome=Outcome.ABORTED), (
                *_without_tail(phase),
                Announce(outcome=Outcome.ABORTED),
            )
        case Report():
            return phase, ()
        case Call() | Consequence():
            raise IllegalEvent(phase, event)
        case _:
            assert_never(event)


def _from_resuming(phase: Resuming, event: Event) -> Step:
    match event:
        case TailEnded(ticket=ticket, n_good=n_good) if ticket == phase.tail_copy:
            return _tail_ended(phase, n_good)
        case Admitted(filling=filling):
            return filling, ()
        case Aborted():
            return Draining(outcome=Outcome.ABORTED), (
                *_without_tail(phase),
                Announce(outcome=Outcome.ABORTED),
            )
        case Report():
            return phase, ()
        case Call() | Consequence():
            raise IllegalEvent(phase, event)
        case _:
            assert_never(event)


def _from_draining(phase: Draining, event: Event) -> Step:
    match event:
        case Drained():
            return Ended(outcome=phase.outcome), ()
        case Report() | Aborted():
            return phase, ()
        case Call() | Consequence():
            raise IllegalEvent(phase, event)
        case _:
            assert_never(event)
