"""One place of a state damaged: what a wrong core, or a flipped bit, could leave behind.

Each damage yields the states in which it was done; none where there is nothing to do it to.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Final, TypeAlias, TypeVar

from attrs import evolve

from kvlift.core.agreed import Agreed, Growth, Kind, Open, Request
from kvlift.core.descent import Descent, Settled
from kvlift.core.ids import Attempt, Ticket
from kvlift.core.index import Segment
from kvlift.core.local import Local
from kvlift.core.phase import Draining, Ended, Filling, Outcome, Phase, Ready, Running
from kvlift.core.plan import Follow, Lease
from kvlift.core.tier import Source

Damage: TypeAlias = Callable[[Agreed], Iterator[Agreed]]
LocalDamage: TypeAlias = Callable[[Local], Iterator[Local]]

K = TypeVar("K")
V = TypeVar("V")

NOBODY: Final = 99


def _each(
    mapping: Mapping[K, V], change: Callable[[V], Iterator[V | None]]
) -> Iterator[dict[K, V]]:
    """The mapping with one value changed, or left out where it becomes None."""
    for key, value in mapping.items():
        for after in change(value):
            rest = {k: v for k, v in mapping.items() if k != key}
            yield rest if after is None else {**mapping, key: after}


def _phases(agreed: Agreed, change: Callable[[Phase], Iterator[Phase]]) -> Iterator[Agreed]:
    def changed(request: Request) -> Iterator[Request]:
        for phase in change(request.phase):
            yield evolve(request, phase=phase)

    for requests in _each(agreed.requests, changed):
        yield evolve(agreed, requests=requests)


def _fillings(agreed: Agreed, change: Callable[[Filling], Filling]) -> Iterator[Agreed]:
    yield from _phases(agreed, lambda p: iter((change(p),) if isinstance(p, Filling) else ()))


def _segments(agreed: Agreed, change: Callable[[Segment], Segment | None]) -> Iterator[Agreed]:
    def changed(segment: Segment) -> Iterator[Segment]:
        after = change(segment)
        if after is not None:
            yield after

    for segments in _each(agreed.index.segments, changed):
        yield evolve(agreed, index=evolve(agreed.index, segments=segments))


# Counts and owners.


def a_device_page_leaks(agreed: Agreed) -> Iterator[Agreed]:
    live = agreed.ledger.device_live + 1
    yield evolve(agreed, ledger=evolve(agreed.ledger, device_live=live))


def a_host_page_leaks(agreed: Agreed) -> Iterator[Agreed]:
    yield evolve(agreed, ledger=evolve(agreed.ledger, host_live=agreed.ledger.host_live + 1))


def a_count_of_the_index_is_off(agreed: Agreed) -> Iterator[Agreed]:
    index = agreed.index
    yield evolve(agreed, index=evolve(index, n_device_idle=index.n_device_idle + 1))
    yield evolve(agreed, index=evolve(index, n_host=index.n_host + 1))


def a_page_has_two_owners(agreed: Agreed) -> Iterator[Agreed]:
    def changed(phase: Phase) -> Iterator[Phase]:
        if isinstance(phase, Filling | Ready | Running) and len(phase.lease.own) > 1:
            twice = (*phase.lease.own[:-1], phase.lease.own[0])
            yield evolve(phase, lease=evolve(phase.lease, own=twice))

    yield from _phases(agreed, changed)


def a_host_page_has_two_owners(agreed: Agreed) -> Iterator[Agreed]:
    def changed(phase: Phase) -> Iterator[Phase]:
        if isinstance(phase, Filling) and any(part.host for part in phase.parts):
            parts = tuple(evolve(part, host=part.host * 2) for part in phase.parts)
            yield evolve(phase, parts=parts)

    yield from _phases(agreed, changed)


# Pins and marks.


def a_device_pin_is_lost(agreed: Agreed) -> Iterator[Agreed]:
    yield from _segments(
        agreed, lambda s: evolve(s, device_pins=s.device_pins - 1) if s.device_pins else None
    )


def a_host_pin_is_lost(agreed: Agreed) -> Iterator[Agreed]:
    yield from _segments(
        agreed, lambda s: evolve(s, host_pins=s.host_pins - 1) if s.host_pins else None
    )


def more_is_pinned_than_there_is(agreed: Agreed) -> Iterator[Agreed]:
    def changed(phase: Phase) -> Iterator[Phase]:
        if isinstance(phase, Filling | Ready | Running):
            n_shared = phase.lease.n_shared + 1
            yield evolve(phase, lease=Lease(n_shared=n_shared, own=phase.lease.own[1:]))

    yield from _phases(agreed, changed)


def more_is_pinned_on_the_host_than_there_is(agreed: Agreed) -> Iterator[Agreed]:
    for drain in agreed.drains[:1]:
        wrong = evolve(drain, pin_host_start=0, pin_host_stop=drain.prompt.n_pages_full + 1)
        yield evolve(agreed, drains=(wrong, *agreed.drains[1:]))


def a_part_of_a_segment_is_pinned(agreed: Agreed) -> Iterator[Agreed]:
    def changed(phase: Phase) -> Iterator[Phase]:
        if isinstance(phase, Filling | Ready | Running) and phase.lease.n_shared > 1:
            yield evolve(phase, lease=evolve(phase.lease, n_shared=phase.lease.n_shared - 1))

    yield from _phases(agreed, changed)


def a_mark_is_wrong(agreed: Agreed) -> Iterator[Agreed]:
    yield from _segments(agreed, lambda s: evolve(s, mirroring=not s.mirroring))
    yield from _segments(agreed, lambda s: evolve(s, persisting=not s.persisting))


# The tree.


def a_segment_is_out_of_place(agreed: Agreed) -> Iterator[Agreed]:
    yield from _segments(agreed, lambda s: evolve(s, id=s.id + NOBODY))
    yield from _segments(agreed, lambda s: evolve(s, n_pages=s.n_pages + NOBODY))
    yield from _segments(agreed, lambda s: evolve(s, n_children=s.n_children + 1))
    yield from _segments(agreed, lambda s: evolve(s, parent=NOBODY))


def a_segment_has_too_few_pages(agreed: Agreed) -> Iterator[Agreed]:
    yield from _segments(agreed, lambda s: evolve(s, device=s.device[1:]) if s.device else None)
    yield from _segments(agreed, lambda s: evolve(s, host=s.host[1:]) if s.host else None)


def an_empty_segment_stays(agreed: Agreed) -> Iterator[Agreed]:
    yield from _segments(
        agreed,
        lambda s: (
            evolve(s, device=None, host=None, device_pins=0, host_pins=0)
            if not s.n_children
            else None
        ),
    )


def a_segment_is_not_found(agreed: Agreed) -> Iterator[Agreed]:
    for children in _each(agreed.index.child_by_key, lambda child: iter((None,))):
        yield evolve(agreed, index=evolve(agreed.index, child_by_key=children))


def a_segment_is_found_that_is_gone(agreed: Agreed) -> Iterator[Agreed]:
    more = {**agreed.index.child_by_key, (NOBODY, b""): NOBODY}
    yield evolve(agreed, index=evolve(agreed.index, child_by_key=more))


# Requests.


def a_name_is_lost(agreed: Agreed) -> Iterator[Agreed]:
    if agreed.attempt_by_rid:
        yield evolve(agreed, attempt_by_rid={})


def an_end_stays(agreed: Agreed) -> Iterator[Agreed]:
    yield from _phases(agreed, lambda phase: iter((Ended(outcome=Outcome.DONE),)))


def a_request_drains_for_nothing(agreed: Agreed) -> Iterator[Agreed]:
    done = Draining(outcome=Outcome.DONE)
    yield from _phases(agreed, lambda p: iter(() if isinstance(p, Draining) else (done,)))
    if agreed.drains:
        yield evolve(agreed, drains=tuple(evolve(drain, tickets=()) for drain in agreed.drains))


def a_descent_stays(agreed: Agreed) -> Iterator[Agreed]:
    def settled(descent: Descent) -> Descent:
        return evolve(descent, phase=Settled())

    if agreed.descents:
        yield evolve(agreed, descents=tuple(map(settled, agreed.descents)))


def a_lease_is_short(agreed: Agreed) -> Iterator[Agreed]:
    def changed(phase: Phase) -> Iterator[Phase]:
        if isinstance(phase, Filling | Ready | Running) and phase.lease.own:
            yield evolve(phase, lease=evolve(phase.lease, own=phase.lease.own[1:]))

    yield from _phases(agreed, changed)


def bounds_cross(agreed: Agreed) -> Iterator[Agreed]:
    yield from _fillings(
        agreed,
        lambda p: evolve(p, plan=evolve(p.plan, bounds=evolve(p.plan.bounds, host=NOBODY))),
    )


def nobody_brings_a_page(agreed: Agreed) -> Iterator[Agreed]:
    yield from _fillings(agreed, lambda phase: evolve(phase, wanted=(), parts=(), follow=None))


def two_bring_a_page(agreed: Agreed) -> Iterator[Agreed]:
    yield from _fillings(agreed, lambda phase: evolve(phase, wanted=phase.wanted * 2))


def too_much_is_promised(agreed: Agreed) -> Iterator[Agreed]:
    """Where there is a peer that could believe it."""

    def changed(phase: Phase) -> Iterator[Phase]:
        if isinstance(phase, Filling) and phase.peer_gone is None:
            plan = phase.plan
            if plan.rest is Source.PEER:
                yield evolve(phase, plan=evolve(plan, promise=plan.n_pages + 1))

    yield from _phases(agreed, changed)


def more_arrives_than_was_asked_for(agreed: Agreed) -> Iterator[Agreed]:
    yield from _fillings(agreed, lambda phase: evolve(phase, n_arrived=NOBODY))


def nobody_is_followed(agreed: Agreed) -> Iterator[Agreed]:
    stop = NOBODY
    yield from _fillings(
        agreed, lambda phase: evolve(phase, follow=Follow(leader=NOBODY, stop=stop))
    )


def it_is_followed_for_nothing(agreed: Agreed) -> Iterator[Agreed]:
    def changed(phase: Filling, leader: int) -> Filling:
        return evolve(phase, follow=Follow(leader=leader, stop=0))

    for attempt in agreed.requests:
        yield from _fillings(agreed, partial(changed, leader=attempt))


def nobody_grows(agreed: Agreed) -> Iterator[Agreed]:
    growth = Growth(attempt=Attempt(NOBODY), n_pages=1, deadline=1)
    yield evolve(agreed, growths=(growth,))


# Tickets.


def a_ticket_is_lost(agreed: Agreed) -> Iterator[Agreed]:
    for tickets in _each(agreed.tickets, lambda known: iter((None,))):
        yield evolve(agreed, tickets=tickets)


def a_ticket_is_of_another_kind(agreed: Agreed) -> Iterator[Agreed]:
    def changed(known: Open) -> Iterator[Open]:
        other = Kind.COPY if known.kind is Kind.PERSIST else Kind.PERSIST
        yield Open(other, known.owner, known.n_pages)

    for tickets in _each(agreed.tickets, changed):
        yield evolve(agreed, tickets=tickets)


def a_ticket_stays(agreed: Agreed) -> Iterator[Agreed]:
    more = {**agreed.tickets, Ticket(NOBODY): Open(Kind.READ, NOBODY, 1)}
    yield evolve(agreed, tickets=more)


DAMAGES: Final[tuple[Damage, ...]] = (
    a_device_page_leaks,
    a_host_page_leaks,
    a_count_of_the_index_is_off,
    a_page_has_two_owners,
    a_host_page_has_two_owners,
    a_device_pin_is_lost,
    a_host_pin_is_lost,
    more_is_pinned_than_there_is,
    more_is_pinned_on_the_host_than_there_is,
    a_part_of_a_segment_is_pinned,
    a_mark_is_wrong,
    a_segment_is_out_of_place,
    a_segment_has_too_few_pages,
    an_empty_segment_stays,
    a_segment_is_not_found,
    a_segment_is_found_that_is_gone,
    a_name_is_lost,
    an_end_stays,
    a_request_drains_for_nothing,
    a_descent_stays,
    a_lease_is_short,
    bounds_cross,
    nobody_brings_a_page,
    two_bring_a_page,
    too_much_is_promised,
    more_arrives_than_was_asked_for,
    nobody_is_followed,
    it_is_followed_for_nothing,
    nobody_grows,
    a_ticket_is_lost,
    a_ticket_is_of_another_kind,
    a_ticket_stays,
)


# The local half.


def a_watch_is_lost(local: Local) -> Iterator[Local]:
    for watches in _each(local.watches, lambda watch: iter((None,))):
        yield evolve(local, watches=watches)


def a_watch_has_ended_unheard(local: Local) -> Iterator[Local]:
    """Of work that is counted, or that something waits for."""
    for ticket, watch in local.watches.items():
        is_counted = watch.has_begun and not watch.has_ended and local.n_in_flight.get(watch.kind)
        if is_counted or ticket in local.chains or ticket in local.restore_by_read:
            ended = {**local.watches, ticket: evolve(watch, has_ended=True)}
            yield evolve(local, watches=ended)


def a_watch_begins_unheard(local: Local) -> Iterator[Local]:
    for watches in _each(
        local.watches,
        lambda watch: iter(
            () if watch.has_begun or watch.has_ended else (evolve(watch, has_begun=True),)
        ),
    ):
        yield evolve(local, watches=watches)


def a_turn_is_not_given_on(local: Local) -> Iterator[Local]:
    if local.n_in_flight:
        yield evolve(local, n_in_flight={kind: n - 1 for kind, n in local.n_in_flight.items()})


def more_are_in_flight(local: Local) -> Iterator[Local]:
    """One more of each kind than is counted, and counted."""
    for ticket, watch in local.watches.items():
        if watch.has_begun and not watch.has_ended and local.n_in_flight.get(watch.kind):
            n_more = {**local.n_in_flight, watch.kind: local.n_in_flight[watch.kind] + 1}
            more = {**local.watches, Ticket(ticket + NOBODY): watch}
            yield evolve(local, watches=more, n_in_flight=n_more)


def a_restore_forgets_its_read(local: Local) -> Iterator[Local]:
    """Noticed at once, or, where the read was forgotten too, when nothing is left to copy."""
    for restore, chain in local.chains.items():
        chains = {**local.chains, restore: evolve(chain, read=None)}
        if chain.read is not None:
            yield evolve(local, chains=chains)
            if chain.start == chain.stop:
                yield evolve(local, chains=chains, restore_by_read={})


LOCAL_DAMAGES: Final[tuple[LocalDamage, ...]] = (
    a_watch_is_lost,
    a_watch_has_ended_unheard,
    a_watch_begins_unheard,
    a_turn_is_not_given_on,
    more_are_in_flight,
    a_restore_forgets_its_read,
)
