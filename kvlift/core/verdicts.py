"""From a verdict to events: what the agreed observation of each ticket means for its owner."""

from typing import assert_never

from attrs import evolve

from kvlift.core.agreed import Drain, Kind, Open
from kvlift.core.apply import happen
from kvlift.core.ballot import RanksDiverged, Verdict
from kvlift.core.descent import MirrorOver, PersistOver
from kvlift.core.draft import Draft
from kvlift.core.effect import ClosePeer
from kvlift.core.event import (
    CopyEnded,
    CopyShort,
    Event,
    PagesCame,
    PeerStopped,
    ReadEnded,
    ReadOverdue,
    ReadShort,
    StorageAnswered,
    TailEnded,
    TokenCame,
)
from kvlift.core.handover import hand_over
from kvlift.core.ids import Attempt, Ticket
from kvlift.core.landed import PeerCause
from kvlift.core.observation import Observation, is_one_token
from kvlift.core.phase import Filling
from kvlift.core.step_filling import needs_peer
from kvlift.core.tier import Tier
from kvlift.core.way_down import descent_event


def take_verdict(draft: Draft, verdict: Verdict) -> None:
    """Rooms and rates, then the news of each ticket, in ticket order."""
    draft.ledger = evolve(
        draft.ledger, device_room=verdict.device_room, host_room=verdict.host_room
    )
    draft.rates = verdict.rates
    for ticket, seen in sorted(verdict.observations, key=lambda pair: pair[0]):
        known = draft.tickets.get(ticket)
        if known is not None:
            _take(draft, ticket, known, seen)


def _take(draft: Draft, ticket: Ticket, known: Open, seen: Observation) -> None:
    """Remember what was seen, tell the owner what is new, close the ticket when it has ended."""
    draft.tickets[ticket] = Open(
        known.kind, known.owner, known.n_pages, seen.progress, seen.ceiling
    )
    match known.kind:
        case Kind.LOOKUP:
            _lookup(draft, ticket, known, seen)
        case Kind.READ:
            _read(draft, ticket, known, seen)
        case Kind.COPY:
            if 0 <= seen.ceiling < known.ceiling:
                _tell(draft, known, CopyShort(ticket, seen.ceiling))
            if seen.ended:
                _tell(draft, known, CopyEnded(ticket))
        case Kind.HOLD:
            _hold(draft, ticket, known, seen)
        case Kind.TOKEN:
            _token(draft, known, seen)
        case Kind.TAIL:
            if seen.ended:
                _tell(draft, known, TailEnded(ticket, seen.progress))
        case Kind.MIRROR:
            if seen.ended:
                descent_event(draft, known.owner, MirrorOver(ticket, seen.progress))
        case Kind.PERSIST:
            if seen.ended:
                descent_event(draft, known.owner, PersistOver(ticket, seen.progress))
        case _:
            assert_never(known.kind)
    if seen.ended:
        _let_go(draft, ticket)
        draft.close_ticket(ticket)


def _tell(draft: Draft, known: Open, event: Event) -> None:
    """The owner is here: it stays, draining, as long as a ticket of its own is open."""
    happen(draft, Attempt(known.owner), event)


def _lookup(draft: Draft, ticket: Ticket, known: Open, seen: Observation) -> None:
    if seen.ended:
        _tell(draft, known, StorageAnswered(ticket, seen.progress))
    elif seen.ceiling == 0:  # a rank has nothing, or gives up; a smaller hit waits for the others
        _tell(draft, known, StorageAnswered(ticket, 0))
        draft.close_ticket(ticket)


def _read(draft: Draft, ticket: Ticket, known: Open, seen: Observation) -> None:
    if seen.ceiling < 0 <= known.ceiling:
        _tell(draft, known, ReadOverdue(ticket, seen.progress))
    elif 0 <= seen.ceiling < known.ceiling:
        _tell(draft, known, ReadShort(ticket, seen.ceiling))
    if seen.ended:
        _tell(draft, known, ReadEnded(ticket))


def _hold(draft: Draft, ticket: Ticket, known: Open, seen: Observation) -> None:
    if seen.progress > known.progress:
        _tell(draft, known, PagesCame(seen.progress))
    if seen.ended and seen.ceiling == 0:  # it let go without a word
        seen = evolve(seen, ceiling=int(PeerCause.LOST))
    if seen.ceiling >= known.ceiling:
        return
    if seen.ceiling == PeerCause.SILENT:
        draft.effects.append(ClosePeer(ticket=ticket))
        return
    attempt = Attempt(known.owner)
    request = draft.requests.get(attempt)
    if request is not None and isinstance(request.phase, Filling) and needs_peer(request.phase):
        hand_over(draft, attempt)
    _tell(draft, known, PeerStopped(PeerCause(seen.ceiling)))


def _token(draft: Draft, known: Open, seen: Observation) -> None:
    if not seen.ended:
        return
    if not is_one_token(seen):
        raise RanksDiverged("first token", draft.before.tick)
    _tell(draft, known, TokenCame())


def _let_go(draft: Draft, ticket: Ticket) -> None:
    """Pages that were held back for this ticket alone are free."""
    kept: list[Drain] = []
    for drain in draft.drains:
        if ticket not in drain.tickets:
            kept.append(drain)
            continue
        draft.touched[drain.attempt] = None
        left = tuple(t for t in drain.tickets if t != ticket)
        if left:
            kept.append(evolve(drain, tickets=left))
            continue
        draft.free_device(drain.device)
        draft.free_host(drain.host)
        draft.index.unpin(Tier.HOST, drain.prompt, drain.pin_host_start, drain.pin_host_stop)
        draft.collect_evicted()
    draft.drains = kept
