"""Hearing: reports of this rank's ports, and its clock, become observations.

Repeated and late reports change nothing: counts are cumulative, a ticket ends once, and a report
under a ticket that nobody watches any more is counted and dropped.
"""

from collections.abc import Iterable
from typing import Final, assert_never

from attrs import evolve

from kvlift.core.agreed import Kind, Rates
from kvlift.core.desk import Desk
from kvlift.core.effect import Effect
from kvlift.core.ids import Ticket
from kvlift.core.landed import (
    Landed,
    LookupAnswered,
    MirrorEnded,
    PagesArrived,
    PeerCause,
    PeerFailed,
    PeerLetGo,
    PersistEnded,
    PrefetchEnded,
    PrefetchProgressed,
    RestoreEnded,
    TokenArrived,
)
from kvlift.core.local import Limits, Local, Watch, ended_with, given_up, is_overdue

FADE_PARTS: Final = 64
"""A measure of reads that are left out loses so many-th a transfer: small, so that storage that is
slow all along is tried seldom."""


def hear(
    local: Local, limits: Limits, reports: Iterable[Landed], now_ns: int
) -> tuple[Local, tuple[Effect, ...]]:
    """The local state after these reports at this time, and what may start because of them."""
    news = tuple(reports)
    if not news and now_ns <= local.deadline_ns:
        return local, ()
    desk = Desk(local, limits, now_ns)
    for report in news:
        _take(desk, report)
    for ticket, watch in list(desk.watches.items()):
        if is_overdue(watch, now_ns):
            _overdue(desk, ticket, watch)
    return desk.frozen(), tuple(desk.started)


def order(
    local: Local,
    limits: Limits,
    effects: Iterable[Effect],
    closed: Iterable[Ticket],
    now_ns: int,
) -> tuple[Local, tuple[Effect, ...]]:
    """The local state after a plan's effects, and those of them that start now."""
    wanted, over = tuple(effects), tuple(closed)
    if not wanted and not over:
        return local, ()
    desk = Desk(local, limits, now_ns)
    for effect in wanted:
        desk.order(effect)
    for ticket in over:
        desk.close(ticket)
    return desk.frozen(), tuple(desk.started)


def _take(desk: Desk, report: Landed) -> None:
    watch = desk.watches.get(report.ticket)
    if watch is None or watch.has_ended:
        desk.n_stale += 1
        return
    match report:
        case LookupAnswered(ticket=ticket, n_pages=n_pages):
            desk.watches[ticket] = ended_with(watch, min(n_pages, watch.n_pages))
        case PrefetchProgressed(ticket=ticket, n_pages=n_pages):
            if n_pages > watch.progress:
                desk.watches[ticket] = evolve(watch, progress=n_pages, since_ns=desk.now_ns)
                desk.pages_read(ticket, n_pages)
        case PrefetchEnded(ticket=ticket, n_pages=n_pages):
            desk.watches[ticket] = ended_with(watch, n_pages)
            _measure_prefetch(desk, watch, n_pages)
            desk.read_over(ticket, n_pages)
            desk.turn_over(Kind.READ)
        case RestoreEnded(ticket=ticket, n_pages=n_pages, start=start):
            desk.copy_over(ticket, start, n_pages)
        case MirrorEnded(ticket=ticket, n_pages=n_pages):
            desk.watches[ticket] = ended_with(watch, n_pages)
            desk.turn_over(Kind.MIRROR)
        case PersistEnded(ticket=ticket, n_pages=n_pages):
            desk.watches[ticket] = ended_with(watch, n_pages)
            desk.turn_over(Kind.PERSIST)
        case PagesArrived(ticket=ticket, n_pages=n_pages):
            _pages_arrived(desk, ticket, watch, n_pages)
        case TokenArrived(ticket=ticket, token=token, logprob=logprob):
            desk.tokens.setdefault(ticket, (token, logprob))
            desk.token_came(ticket)
        case PeerFailed(ticket=ticket, cause=cause, reason=reason):
            desk.reasons.setdefault(ticket, reason)
            desk.peer_failed(ticket, cause)
        case PeerLetGo(ticket=ticket):
            desk.watches[ticket] = evolve(watch, has_ended=True, timeout_ms=None)
        case _:
            assert_never(report)


def _pages_arrived(desk: Desk, ticket: Ticket, watch: Watch, n_pages: int) -> None:
    n_pages = min(n_pages, watch.n_pages)
    if n_pages <= watch.progress:
        return
    is_waiting = n_pages < watch.n_pages
    timeout_ms = watch.timeout_ms if is_waiting or ticket in desk.dismissed else None
    desk.watches[ticket] = Watch(
        kind=watch.kind,
        n_pages=watch.n_pages,
        ceiling=watch.ceiling,
        progress=n_pages,
        since_ns=desk.now_ns,
        timeout_ms=timeout_ms,
        begun_ns=watch.begun_ns,
    )
    desk.peer_moves(ticket)
    if not is_waiting:
        spent_us = (desk.now_ns - watch.begun_ns) // 1000 // n_pages
        _measure_transfer(desk, spent_us)


def _measure_transfer(desk: Desk, spent_us: int) -> None:
    """Reads that are left out for what the last ones took are measured by nobody: their measure
    fades with every transfer, until one is tried again."""
    rates = evolve(desk.rates, transfer_us=_smooth(desk.rates.transfer_us, spent_us))
    if rates.is_read_dearer(desk.limits.cost_threshold_percent):
        part_us = -(-rates.prefetch_us // FADE_PARTS)
        rates = evolve(rates, prefetch_us=max(1, rates.prefetch_us - part_us))
    desk.rates = rates


def _measure_prefetch(desk: Desk, watch: Watch, n_pages: int) -> None:
    if n_pages > 0:
        spent_us = (desk.now_ns - watch.begun_ns) // 1000 // n_pages
        desk.rates = Rates(
            prefetch_us=_smooth(desk.rates.prefetch_us, spent_us),
            transfer_us=desk.rates.transfer_us,
        )


def _smooth(before_us: int, now_us: int) -> int:
    """Moving average, an eighth at a time; never 0 once measured."""
    return max(1, now_us if before_us == 0 else (7 * before_us + now_us) // 8)


def _overdue(desk: Desk, ticket: Ticket, watch: Watch) -> None:
    match watch.kind:
        case Kind.HOLD if ticket in desk.dismissed:
            desk.reasons.setdefault(ticket, "the prefill node has not confirmed the end")
            desk.watches[ticket] = evolve(watch, ceiling=int(PeerCause.SILENT), timeout_ms=None)
        case Kind.HOLD:
            desk.peer_failed(ticket, PeerCause.OVERDUE)
        case Kind.TOKEN:
            desk.watches[ticket] = evolve(watch, timeout_ms=None)
            for hold, token in desk.token_by_hold.items():
                if token == ticket and hold in desk.watches:
                    desk.peer_failed(hold, PeerCause.TOKEN_OVERDUE)
        case Kind.PERSIST:
            desk.persist_overdue(ticket, watch)
        case Kind.LOOKUP | Kind.READ | Kind.COPY | Kind.TAIL | Kind.MIRROR:
            desk.watches[ticket] = given_up(watch)
        case _:
            assert_never(watch.kind)
