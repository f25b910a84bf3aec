"""What is true after every tick, each as a function with one sentence.

An invariant takes the state of one rank and gives None, or a sentence that says what is wrong. The
checker holds all of them against every state it reaches; tests and simulations use the same ones.
`invariants_of_pages` has those about pages and the index.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final, assert_never

from attrs import frozen

from kvlift.core.agreed import Agreed, Kind, Request
from kvlift.core.descent import Mirroring, Persisting, Settled
from kvlift.core.desk import ticket_and_kind
from kvlift.core.ids import Attempt, Ticket
from kvlift.core.invariants_of_pages import (
    counts_are_right,
    device_is_conserved,
    host_is_conserved,
    idle_pages_are_nobodys,
    marks_have_descents,
    no_device_page_has_two_owners,
    no_host_page_has_two_owners,
    pins_are_needed,
    the_tree_is_whole,
)
from kvlift.core.local import Limits, Local
from kvlift.core.phase import (
    Asking,
    Draining,
    Ended,
    Filling,
    Ready,
    Resuming,
    Retracted,
    Running,
    Waiting,
)
from kvlift.core.plan import Span, spans_outside
from kvlift.core.step_filling import n_pages_wanted, spans_under_copy
from kvlift.core.tier import Source

Invariant = Callable[[Agreed], str | None]
LocalInvariant = Callable[[Agreed, Local, Limits], str | None]


# Requests.


def a_name_means_one_living_attempt(agreed: Agreed) -> str | None:
    """A request id leads to its one attempt that has not ended, and none is left out."""
    alive = {
        request.rid: attempt
        for attempt, request in agreed.requests.items()
        if not isinstance(request.phase, Draining)
    }
    if alive != dict(agreed.attempt_by_rid):
        return f"living attempts are {alive}, the names lead to {dict(agreed.attempt_by_rid)}"
    return None


def nothing_ended_stays(agreed: Agreed) -> str | None:
    """An ended request, a settled descent and a drain without a ticket have left the state."""
    for attempt, request in agreed.requests.items():
        if isinstance(request.phase, Ended):
            return f"attempt {attempt} has ended and is still here"
        is_draining = isinstance(request.phase, Draining)
        if is_draining and not any(drain.attempt == attempt for drain in agreed.drains):
            return f"attempt {attempt} drains and nothing of it is held back"
    if any(isinstance(descent.phase, Settled) for descent in agreed.descents):
        return "a descent is settled and still here"
    if any(not drain.tickets for drain in agreed.drains):
        return "pages are held back for nothing"
    return None


def leases_are_whole(agreed: Agreed) -> str | None:
    """A request that was admitted holds a device page for every page of its prompt."""
    for request in agreed.requests.values():
        match request.phase:
            case Filling(plan=plan, lease=lease) | Ready(plan=plan, lease=lease):
                if lease.n_shared + len(lease.own) != plan.n_pages:
                    return f"{request.rid} needs {plan.n_pages} pages and holds {lease}"
            case Running(plan=plan, lease=lease):
                if lease.n_shared + len(lease.own) < plan.n_pages:
                    return f"{request.rid} needs {plan.n_pages} pages and holds {lease}"
            case Asking() | Waiting() | Retracted() | Resuming() | Draining() | Ended():
                pass
            case _:
                assert_never(request.phase)
    return None


def _fillings(agreed: Agreed) -> Iterator[tuple[Request, Filling]]:
    for request in agreed.requests.values():
        if isinstance(request.phase, Filling):
            yield request, request.phase


def bounds_never_cross(agreed: Agreed) -> str | None:
    """The sources of a plan stand in their order and end before the prompt does."""
    for request, phase in _fillings(agreed):
        b = phase.plan.bounds
        if not 0 <= b.device <= b.shared <= b.host <= b.storage <= phase.plan.n_pages:
            return f"{request.rid} has bounds {b} in {phase.plan.n_pages} pages"
    return None


def every_page_has_one_source(agreed: Agreed) -> str | None:
    """Shared pages, running parts, followed pages and wants tile a request: no gap, no overlap.

    A page under a copy that was given up is asked for when the copy has ended, not before."""
    for request, phase in _fillings(agreed):
        sources = [Span(0, phase.lease.n_shared)]
        if phase.follow is not None:
            sources.append(Span(phase.lease.n_shared, phase.follow.stop))
        for part in phase.parts:
            n_pages = part.stop - part.start
            if part.copy is None:
                n_pages = min(part.n_landed, part.n_good)
            start = max(part.start, phase.lease.n_shared)
            sources.append(Span(start, max(start, part.start + n_pages)))
        start = phase.lease.n_shared
        sources += [Span(max(start, w.start), max(start, w.stop)) for w in phase.wanted]
        n_covered = sum(span.n_pages for span in sources)
        gaps = spans_outside(0, phase.plan.n_pages, tuple(sources))
        if phase.plan.rest is Source.RECOMPUTE:
            gaps = spans_outside(0, phase.plan.bounds.storage, tuple(sources))
        if gaps and phase.peer_gone is None:
            return f"{request.rid}: nothing brings the pages {gaps}"
        n_distinct = phase.plan.n_pages - sum(
            span.n_pages for span in spans_outside(0, phase.plan.n_pages, tuple(sources))
        )
        if n_covered > n_distinct:
            return f"{request.rid}: a page has two sources among {sources}"
    return None


def the_promise_is_leased(agreed: Agreed) -> str | None:
    """What the peer was told not to send is in the cached prefix, or still under a copy.

    So the promise is taken back as soon as nothing writes into the pages any more."""
    for request, phase in _fillings(agreed):
        if phase.plan.rest is Source.RECOMPUTE or phase.peer_gone is not None:
            continue
        owed = spans_outside(phase.plan.bounds.storage, phase.plan.promise, spans_under_copy(phase))
        if owed:
            return f"{request.rid}: {owed} were promised and nobody brings them"
    return None


def nothing_arrives_unasked(agreed: Agreed) -> str | None:
    """A request counts no more pages from its peer than it has asked for."""
    for request, phase in _fillings(agreed):
        if not 0 <= phase.n_arrived <= n_pages_wanted(phase):
            return f"{request.rid} asked for {phase.wanted} and counts {phase.n_arrived}"
    return None


def followers_have_a_leader(agreed: Agreed) -> str | None:
    """Who shares another request's work shares that of a request that is being filled."""
    for request, phase in _fillings(agreed):
        if phase.follow is None:
            continue
        leader = agreed.requests.get(Attempt(phase.follow.leader))
        if leader is None or not isinstance(leader.phase, Filling):
            return f"{request.rid} follows attempt {phase.follow.leader}, which brings nothing"
        if phase.follow.stop <= phase.lease.n_shared:
            return f"{request.rid} follows for pages that it has"
    return None


def growths_are_of_running_requests(agreed: Agreed) -> str | None:
    """Only a running request waits for more pages."""
    for growth in agreed.growths:
        request = agreed.requests.get(growth.attempt)
        if request is None or not isinstance(request.phase, Running):
            return f"attempt {growth.attempt} grows and does not run"
    return None


# Tickets.


def _needed(agreed: Agreed) -> Iterator[tuple[Ticket, tuple[Kind, ...]]]:
    """Tickets that somebody waits for, with the kinds that they may be of."""
    for request in agreed.requests.values():
        match request.phase:
            case Asking(lookup=lookup):
                yield lookup, (Kind.LOOKUP,)
                if request.peer:
                    yield request.hold, (Kind.HOLD,)
            case Waiting():
                if request.peer:
                    yield request.hold, (Kind.HOLD,)
            case Filling(parts=parts, token=token, plan=plan, peer_gone=gone):
                if plan.rest is Source.PEER and gone is None:
                    yield request.hold, (Kind.HOLD,)
                if token is not None:
                    yield token, (Kind.TOKEN,)
                for part in parts:
                    if part.read is not None:
                        yield part.read, (Kind.READ,)
                    if part.copy is not None:
                        yield part.copy, (Kind.COPY,)
            case Retracted(tail_copy=tail) | Resuming(tail_copy=tail):
                if tail is not None:
                    yield tail, (Kind.TAIL,)
            case Ready() | Running() | Draining() | Ended():
                pass
            case _:
                assert_never(request.phase)
    for descent in agreed.descents:
        if isinstance(descent.phase, Mirroring):
            yield descent.phase.ticket, (Kind.MIRROR,)
        elif isinstance(descent.phase, Persisting):
            yield descent.phase.ticket, (Kind.PERSIST,)
    for drain in agreed.drains:
        for ticket in drain.tickets:
            yield ticket, (Kind.READ, Kind.COPY, Kind.HOLD, Kind.TAIL)


def open_tickets_are_waited_for(agreed: Agreed) -> str | None:
    """Every open ticket has somebody who waits for it, and whatever is waited for is open."""
    needed = dict(_needed(agreed))
    for ticket, kinds in _needed(agreed):
        known = agreed.tickets.get(ticket)
        if known is None:
            return f"ticket {ticket} ({kinds[0].value}) is waited for and closed"
        if known.kind not in kinds:
            return f"ticket {ticket} is a {known.kind.value}, not a {kinds[0].value}"
    holds = {request.hold for request in agreed.requests.values()}
    for ticket, known in agreed.tickets.items():
        if ticket not in needed and ticket not in holds:
            return f"ticket {ticket} ({known.kind.value}) is open and nobody waits for it"
    return None


# The local half.


def watched_tickets_are_open(agreed: Agreed, local: Local, limits: Limits) -> str | None:
    """A rank watches exactly the tickets that are open."""
    del limits
    if set(local.watches) != set(agreed.tickets):
        return f"open are {sorted(agreed.tickets)}, this rank watches {sorted(local.watches)}"
    return None


def no_more_in_flight_than_allowed(agreed: Agreed, local: Local, limits: Limits) -> str | None:
    """What has begun and not ended is counted right, and kept under its limit."""
    del agreed
    running = Counter(
        watch.kind
        for watch in local.watches.values()
        if watch.has_begun and not watch.has_ended and limits.n_in_flight_max(watch.kind)
    )
    counted = {kind: n for kind, n in local.n_in_flight.items() if n}
    if counted != dict(running):
        return f"in flight are {dict(running)}, this rank counts {counted}"
    for kind, n in counted.items():
        most = limits.n_in_flight_max(kind)
        if most is not None and n > most:
            return f"{n} of {kind.value} are in flight, {most} are allowed"
    return None


def what_is_parked_will_begin(agreed: Agreed, local: Local, limits: Limits) -> str | None:
    """A parked effect is watched, has not begun, and waits only while its kind is at its limit."""
    del agreed
    for effect in local.parked:
        ticket, kind = ticket_and_kind(effect)
        watch = local.watches.get(ticket)
        if watch is None or watch.has_begun or watch.has_ended:
            return f"ticket {ticket} is parked, and this rank knows it as {watch}"
        most = limits.n_in_flight_max(kind)
        if most is not None and local.n_in_flight.get(kind, 0) < most:
            return f"ticket {ticket} is parked although its turn has come"
    return None


def a_restore_waits_for_its_read(agreed: Agreed, local: Local, limits: Limits) -> str | None:
    """A restore behind a read has a piece to copy, or waits for a read that goes on."""
    del agreed, limits
    reads = {chain.read: restore for restore, chain in local.chains.items()}
    reads.pop(None, None)
    if reads != dict(local.restore_by_read):
        return f"restores wait for the reads {reads}, known are {local.restore_by_read}"
    for restore, chain in local.chains.items():
        watch, read = local.watches.get(restore), chain.read
        is_idle = chain.start == chain.stop
        if watch is None or watch.has_ended or (watch.has_begun and is_idle):
            return f"ticket {restore} has more to restore, and this rank knows it as {watch}"
        behind = None if read is None else local.watches.get(read)
        if read is None and is_idle:
            return f"ticket {restore} waits for no read, and has nothing to copy"
        if read is not None and (behind is None or behind.has_ended):
            return f"ticket {restore} waits for read {read}, which is over"
    return None


INVARIANTS: Final[tuple[Invariant, ...]] = (
    device_is_conserved,
    host_is_conserved,
    counts_are_right,
    no_device_page_has_two_owners,
    no_host_page_has_two_owners,
    pins_are_needed,
    idle_pages_are_nobodys,
    marks_have_descents,
    the_tree_is_whole,
    a_name_means_one_living_attempt,
    nothing_ended_stays,
    leases_are_whole,
    bounds_never_cross,
    every_page_has_one_source,
    the_promise_is_leased,
    nothing_arrives_unasked,
    followers_have_a_leader,
    growths_are_of_running_requests,
    open_tickets_are_waited_for,
)
LOCAL_INVARIANTS: Final[tuple[LocalInvariant, ...]] = (
    watched_tickets_are_open,
    no_more_in_flight_than_allowed,
    what_is_parked_will_begin,
    a_restore_waits_for_its_read,
)


@frozen
class Breach:
    """One invariant that does not hold."""

    name: str
    sentence: str


def name_of(invariant: Invariant | LocalInvariant) -> str:
    """The function's name in words."""
    return invariant.__name__.replace("_", " ")


def breaches(agreed: Agreed) -> tuple[Breach, ...]:
    """All that is wrong with the agreed half."""
    found = ((invariant, invariant(agreed)) for invariant in INVARIANTS)
    return tuple(Breach(name_of(one), said) for one, said in found if said is not None)


def local_breaches(agreed: Agreed, local: Local, limits: Limits) -> tuple[Breach, ...]:
    """All that is wrong with one rank's half."""
    found = ((invariant, invariant(agreed, local, limits)) for invariant in LOCAL_INVARIANTS)
    return tuple(Breach(name_of(one), said) for one, said in found if said is not None)
