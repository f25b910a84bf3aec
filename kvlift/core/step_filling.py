"""The busiest phase: a request whose pages are on their way from several sources at once.

A part's copy may run on one rank and not on another, so what it writes to is settled only when its
ticket has ended on all ranks. Until then its device pages are asked of nobody else, and its host
pages are nobody else's. See `plan` for the drawing of the sources.
"""

from typing import TypeAlias, assert_never

from attrs import evolve

from kvlift.core.deed import (
    Announce,
    AnnounceReady,
    AnnounceShrunk,
    CloseTicket,
    Commit,
    Deed,
    DismissPeer,
    ForgetStored,
    GiveUpCopy,
    GiveUpRead,
    HoldBack,
    KeepHost,
    MirrorPrompt,
    ReleaseDevice,
    UnpinDevice,
    UnpinHost,
)
from kvlift.core.event import (
    Aborted,
    AllLanded,
    Call,
    Consequence,
    CopyEnded,
    CopyShort,
    Event,
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
    TokenCame,
    Widened,
)
from kvlift.core.ids import DeviceHandle, Ticket
from kvlift.core.illegal import IllegalEvent
from kvlift.core.landed import PeerCause
from kvlift.core.phase import Draining, Filling, Outcome, Phase, Ready
from kvlift.core.plan import Bounds, Lease, Part, Span, spans_arrived, spans_outside
from kvlift.core.tier import Source

Step: TypeAlias = tuple[Phase, tuple[Deed, ...]]


def from_filling(phase: Filling, event: Event) -> Step:
    match event:
        case ReadShort(ticket=ticket, n_good=n_good):
            return _part_short(phase, _part_reading(phase, ticket), n_good)
        case ReadOverdue(ticket=ticket, n_good=n_good):
            return _read_overdue(phase, _part_reading(phase, ticket), n_good)
        case ReadEnded(ticket=ticket):
            return _read_ended(phase, _part_reading(phase, ticket))
        case CopyShort(ticket=ticket, n_good=n_good):
            return _part_short(phase, _part_copying(phase, ticket), n_good)
        case CopyEnded(ticket=ticket):
            return _copy_ended(phase, _part_copying(phase, ticket))
        case PagesCame(n_pages=n_pages):
            return _with_arrived(phase, n_pages), ()
        case TokenCame():
            return evolve(phase, token=None), ()
        case PeerStopped(cause=cause):
            gone = evolve(phase, peer_gone=cause)
            return _failed(gone, cause) if needs_peer(gone) else (gone, ())
        case SharedCame(lease=lease) | Published(lease=lease):
            return _with_lease(phase, lease), ()
        case LeaderLost():
            return _cut(evolve(phase, follow=None), phase.lease.n_shared)
        case HandedOver() if phase.peer_gone is None:
            return _handed_over(phase, event)
        case Widened(spans=spans, promise=promise):
            plan = evolve(phase.plan, promise=promise)
            return evolve(phase, wanted=phase.wanted + spans, plan=plan), ()
        case AllLanded():
            return _ready(phase)
        case Aborted():
            return _ended(phase, Outcome.ABORTED, None)
        case Report():
            return phase, ()
        case Call() | Consequence():
            raise IllegalEvent(phase, event)
        case _:
            assert_never(event)


def _with_arrived(phase: Filling, n_arrived: int) -> Filling:
    """Built by hand, not by `evolve`: the commonest event of all."""
    return Filling(
        plan=phase.plan,
        lease=phase.lease,
        parts=phase.parts,
        wanted=phase.wanted,
        n_arrived=n_arrived,
        token=phase.token,
        follow=phase.follow,
        peer_gone=phase.peer_gone,
    )


# Questions about a Filling phase; `settle` asks them too.


def spans_under_copy(phase: Filling) -> tuple[Span, ...]:
    """Device pages that a restore may still write into on some rank."""
    return tuple(Span(part.start, part.stop) for part in phase.parts if part.copy is not None)


def spans_landed(phase: Filling) -> tuple[Span, ...]:
    """Pages that are on the device on all ranks: shared, restored or arrived."""
    restored = tuple(
        Span(part.start, part.start + min(part.n_landed, part.n_good))
        for part in phase.parts
        if part.copy is None
    )
    arrived = spans_arrived(phase.wanted, phase.n_arrived)
    return (Span(0, phase.lease.n_shared), *restored, *arrived)


def n_pages_landed(phase: Filling) -> int:
    """The pages [0, n) are on the device on all ranks."""
    missing = spans_outside(0, phase.plan.n_pages, spans_landed(phase))
    return missing[0].start if missing else phase.plan.n_pages


def spans_owed(phase: Filling) -> tuple[Span, ...]:
    """Pages that no source brings any more and that may be asked of the peer now.

    A page under a running copy is asked for only after that copy has ended on all ranks."""
    if phase.plan.rest is Source.RECOMPUTE:
        return ()
    taken = (*phase.wanted, *spans_under_copy(phase))
    return spans_outside(phase.plan.bounds.storage, phase.plan.n_pages, taken)


def n_pages_wanted(phase: Filling) -> int:
    return sum(span.n_pages for span in phase.wanted)


def needs_peer(phase: Filling) -> bool:
    """Something has still to come from the peer, or will have to be asked of it."""
    if phase.plan.rest is Source.RECOMPUTE:
        return False
    short = spans_outside(phase.plan.bounds.storage, phase.plan.n_pages, phase.wanted)
    return bool(short) or phase.n_arrived < n_pages_wanted(phase) or phase.token is not None


# Parts.


def _part_reading(phase: Filling, ticket: Ticket) -> Part | None:
    return next((part for part in phase.parts if part.read == ticket), None)


def _part_copying(phase: Filling, ticket: Ticket) -> Part | None:
    return next((part for part in phase.parts if part.copy == ticket), None)


def _with_part(phase: Filling, before: Part, after: Part) -> Filling:
    return evolve(phase, parts=tuple(after if part is before else part for part in phase.parts))


def _with_lease(phase: Filling, lease: Lease) -> Filling:
    follow = phase.follow
    after = evolve(phase, lease=lease)
    if follow is not None and after.lease.n_shared >= follow.stop:
        return evolve(after, follow=None)
    return after


def _cut(phase: Filling, page: int) -> Step:
    """The one fallback: the cached prefix ends at `page`. What lies behind is given up."""
    bounds = phase.plan.bounds.cut_at(page)
    if bounds == phase.plan.bounds:
        return phase, ()
    deeds: list[Deed] = [AnnounceShrunk(bounds.storage)]
    parts: list[Part] = []
    for part in phase.parts:
        n_kept = max(0, min(part.n_good, bounds.storage - part.start))
        if n_kept < part.n_good and part.read is not None:
            deeds.append(GiveUpRead(part.read, n_kept))
        if n_kept == 0 and part.copy is not None:
            deeds.append(GiveUpCopy(part.copy))
        parts.append(evolve(part, n_good=n_kept))
    after = evolve(phase, plan=evolve(phase.plan, bounds=bounds), parts=tuple(parts))
    if after.peer_gone is not None and needs_peer(after):
        failed, more = _failed(after, after.peer_gone)
        return failed, (*deeds, *more)
    return after, tuple(deeds)


def _part_short(phase: Filling, part: Part | None, n_good: int) -> Step:
    if part is None or n_good >= part.n_good:
        return phase, ()
    before = _with_part(phase, part, evolve(part, n_good=n_good))
    after, deeds = _cut(before, part.start + n_good)
    return after, (*_forget_stored(part, n_good), *_given_up(part, n_good), *deeds)


def _given_up(part: Part, n_good: int) -> tuple[Deed, ...]:
    """A read of which nothing is left goes on where it has not failed, and nobody waits for it.

    While something is left, the copy behind it waits for its end, and its deadline holds."""
    if n_good > 0 or part.read is None:
        return ()
    return (GiveUpRead(part.read, 0),)


def _forget_stored(part: Part, n_good: int) -> tuple[Deed, ...]:
    """A page that could not be read is not a hit any more until it has been written again."""
    if part.source is not Source.STORAGE:
        return ()
    return (ForgetStored(part.start + n_good, part.start + n_good + 1),)


def _read_overdue(phase: Filling, part: Part | None, n_good: int) -> Step:
    """Too slow, which is not damaged: what has come is kept, nothing is forgotten.

    Also where all that is still wanted has come: the copy waits for the read on that rank."""
    if part is None or part.read is None:
        return phase, ()
    n_kept = min(n_good, part.n_good)
    shorter = _with_part(phase, part, evolve(part, n_good=n_kept))
    after, deeds = _cut(shorter, part.start + n_kept)
    return after, (GiveUpRead(part.read, n_kept), *deeds)


def _read_ended(phase: Filling, part: Part | None) -> Step:
    if part is None:
        return phase, ()
    return _with_part(phase, part, evolve(part, read=None)), ()


def _copy_ended(phase: Filling, part: Part | None) -> Step:
    """The pages of this part are written by nobody any more; its host pages are let go."""
    if part is None:
        return phase, ()
    n_landed = part.n_good
    deeds: tuple[Deed, ...]
    if not part.host:
        deeds = (UnpinHost(part.start, part.stop),)
    elif part.read is None:
        deeds = (
            KeepHost(
                start=part.start, n_good=n_landed, pages=part.host, host_epoch=part.host_epoch
            ),
        )
    else:
        deeds = (HoldBack(tickets=(part.read,), host=part.host),)
    landed = evolve(part, copy=None, read=None, host=(), n_landed=n_landed)
    return _with_part(phase, part, landed), deeds


def _handed_over(phase: Filling, event: HandedOver) -> Step:
    bounds = Bounds(
        device=phase.plan.bounds.device,
        shared=max(phase.lease.n_shared, phase.plan.bounds.device),
        host=event.host,
        storage=event.storage,
    )
    doomed, deeds = _cut(evolve(phase, follow=None), event.storage)
    assert isinstance(doomed, Filling)  # its own peer is there for what this flight does not bring
    return evolve(
        doomed,
        plan=evolve(doomed.plan, bounds=bounds),
        lease=event.lease,
        parts=event.parts + doomed.parts,
        follow=event.follow,
    ), deeds


# Endings.


def _ready(phase: Filling) -> Step:
    deeds: list[Deed] = []
    if phase.plan.rest is Source.PEER:
        deeds.append(Commit())
        deeds.append(MirrorPrompt())
    return Ready(plan=phase.plan, lease=phase.lease), (*deeds, AnnounceReady())


def _failed(phase: Filling, cause: PeerCause) -> Step:
    return _ended(phase, Outcome.FAILED, cause)


def _ended(phase: Filling, outcome: Outcome, cause: PeerCause | None) -> Step:
    """The user has the answer; pages that something may still touch are held back."""
    deeds: list[Deed] = []
    busy: list[Span] = []
    for part in phase.parts:
        tickets = tuple(t for t in (part.read, part.copy) if t is not None)
        if part.read is not None:
            deeds.append(GiveUpRead(part.read, 0))
        if part.copy is not None:
            deeds.append(GiveUpCopy(part.copy))
            busy.append(Span(part.start, part.stop))
        if tickets:
            deeds.append(_held_part(phase, part, tickets))
    at_peer = spans_outside(
        0,
        phase.plan.n_pages,
        (*spans_arrived(phase.wanted, phase.n_arrived), *spans_not_wanted(phase)),
    )
    held_by_peer = _own_pages(phase, at_peer)
    idle = spans_outside(
        phase.lease.n_shared, phase.lease.n_shared + len(phase.lease.own), (*busy, *at_peer)
    )
    if phase.token is not None:
        deeds.append(CloseTicket(phase.token))
    if phase.plan.rest is Source.PEER:
        deeds.append(DismissPeer(device=held_by_peer))
    deeds.append(ReleaseDevice(_own_pages(phase, idle)))
    deeds.append(UnpinDevice(phase.lease.n_shared))
    n_landed = n_pages_landed(phase)
    deeds.append(Announce(outcome=outcome, cause=cause, n_pages_landed=n_landed))
    return Draining(outcome=outcome), tuple(deeds)


def spans_not_wanted(phase: Filling) -> tuple[Span, ...]:
    """Pages that the peer was never asked for."""
    return spans_outside(0, phase.plan.n_pages, phase.wanted)


def _own_pages(phase: Filling, spans: tuple[Span, ...]) -> tuple[DeviceHandle, ...]:
    lease = phase.lease
    return tuple(page for span in spans for page in lease.pages(span.start, span.stop))


def _held_part(phase: Filling, part: Part, tickets: tuple[Ticket, ...]) -> HoldBack:
    device = phase.lease.pages(part.start, part.stop) if part.copy is not None else ()
    is_pinned = not part.host
    return HoldBack(
        tickets=tickets,
        device=device,
        host=part.host,
        pin_host_start=part.start if is_pinned else 0,
        pin_host_stop=part.stop if is_pinned else 0,
    )
