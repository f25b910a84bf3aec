"""The local state while a tick works on it: tickets in flight, parked, chained.

As `draft` for the agreed half: a workspace that copies what it changes, and is frozen at the end.
`order` and `hear` (below) are the two ways in.
"""

from typing import assert_never

from attrs import evolve

from kvlift.core.agreed import Kind, Rates
from kvlift.core.effect import (
    CancelPersist,
    CancelPrefetch,
    CancelRestore,
    ClosePeer,
    Effect,
    ForgetStorage,
    FreeDevice,
    FreeHost,
    SendAborted,
    SendCommitted,
    SendHold,
    SendWant,
    StartLookup,
    StartMirror,
    StartPersist,
    StartPrefetch,
    StartRestore,
    TakeDevice,
    TakeHost,
)
from kvlift.core.ids import Ticket
from kvlift.core.landed import PeerCause
from kvlift.core.local import (
    Chain,
    Limits,
    Local,
    Parkable,
    Watch,
    ended_with,
    first_deadline_ns,
)


class Desk:
    """The workspace of one tick for the local half."""

    def __init__(self, local: Local, limits: Limits, now_ns: int) -> None:
        self._before = local
        self.limits = limits
        self.now_ns = now_ns
        self.watches = dict(local.watches)
        self.chains = dict(local.chains)
        self.parked: list[Parkable] = list(local.parked)
        self.n_in_flight = dict(local.n_in_flight)
        self.token_by_hold = dict(local.token_by_hold)
        self.tokens = dict(local.tokens)
        self.reasons = dict(local.reasons)
        self.dismissed = list(local.dismissed)
        self.rates: Rates = local.rates
        self.n_stale = local.n_stale
        self.leaving: list[Ticket] = []
        self.started: list[Effect] = []
        for hold in local.leaving:
            self.tokens.pop(hold, None)
            self.reasons.pop(hold, None)

    def frozen(self) -> Local:
        return Local(
            watches=self.watches,
            chains=self.chains,
            parked=tuple(self.parked),
            n_in_flight=self.n_in_flight,
            token_by_hold=self.token_by_hold,
            tokens=self.tokens,
            reasons=self.reasons,
            dismissed=tuple(self.dismissed),
            rates=self.rates,
            deadline_ns=first_deadline_ns(self.watches.values()),
            n_stale=self.n_stale,
            leaving=tuple(self.leaving),
        )

    # Effects of a plan.

    def order(self, effect: Effect) -> None:
        match effect:
            case StartLookup(ticket=ticket, start=start, stop=stop):
                self._watch(ticket, Kind.LOOKUP, stop - start, self.limits.prefetch_deadline_ms)
                self.started.append(effect)
            case StartPrefetch():
                self._order_prefetch(effect)
            case StartRestore(ticket=ticket, host=host):
                self._begin_or_park(effect, ticket, Kind.COPY, len(host))
            case StartMirror(ticket=ticket, host=host):
                self._begin_or_park(effect, ticket, Kind.MIRROR, len(host))
            case StartPersist(ticket=ticket, positions=positions):
                self._begin_or_park(effect, ticket, Kind.PERSIST, len(positions))
                if effect.device:
                    self._limit_persist(ticket)
            case CancelPrefetch(ticket=ticket, n_pages_kept=n_kept):
                self._cancel_prefetch(effect, ticket, n_kept)
            case CancelRestore(ticket=ticket):
                self._cancel_restore(ticket)
            case SendHold(ticket=ticket):
                self.watches[ticket] = Watch(kind=Kind.HOLD, n_pages=0, ceiling=0)
                self.started.append(effect)
            case SendWant():
                self._order_want(effect)
            case SendCommitted(ticket=ticket):
                self.leaving.append(ticket)
                self.started.append(effect)
            case SendAborted(ticket=ticket):
                self._order_abort(ticket)
                self.leaving.append(ticket)
                self.started.append(effect)
            case (
                CancelPersist()
                | TakeDevice()
                | FreeDevice()
                | TakeHost()
                | FreeHost()
                | ClosePeer()
                | ForgetStorage()
            ):
                self.started.append(effect)
            case _:
                assert_never(effect)

    def close(self, ticket: Ticket) -> None:
        """Nobody asks about this ticket any more.

        What a peer has said stays until its request is committed or aborted: a request may go on
        with its first token when its peer is gone, on the pages that another one brings."""
        self.watches.pop(ticket, None)
        self.chains.pop(ticket, None)
        self.token_by_hold.pop(ticket, None)
        if ticket in self.dismissed:
            self.dismissed.remove(ticket)
            self.leaving.append(ticket)

    def _watch(self, ticket: Ticket, kind: Kind, n_pages: int, timeout_ms: int | None) -> None:
        self.watches[ticket] = Watch(
            kind=kind,
            n_pages=n_pages,
            ceiling=n_pages,
            since_ns=self.now_ns,
            begun_ns=self.now_ns,
            timeout_ms=timeout_ms,
        )

    def _limit_persist(self, ticket: Ticket) -> None:
        """A silent store may keep host pages, but not those of the device: requests need them."""
        timeout_ms = self.limits.prefetch_stall_ms
        self.watches[ticket] = evolve(self.watches[ticket], timeout_ms=timeout_ms)

    def persist_overdue(self, ticket: Ticket, watch: Watch) -> None:
        """Called back; one that has not begun is simply not begun."""
        if watch.has_begun:
            self.watches[ticket] = evolve(watch, timeout_ms=None)
            self.started.append(CancelPersist(ticket=ticket))
        else:
            self._unpark(ticket)
            self.watches[ticket] = ended_with(watch, 0)

    def _has_turn(self, kind: Kind) -> bool:
        limit = self.limits.n_in_flight_max(kind)
        return limit is None or self.n_in_flight.get(kind, 0) < limit

    def _begin_or_park(self, effect: Parkable, ticket: Ticket, kind: Kind, n_pages: int) -> None:
        timeout_ms = self.limits.read_deadline_ms() if kind is Kind.READ else None
        self._watch(ticket, kind, n_pages, timeout_ms)
        if self._has_turn(kind):
            self.n_in_flight[kind] = self.n_in_flight.get(kind, 0) + 1
            self.started.append(effect)
        else:
            self.watches[ticket] = evolve(self.watches[ticket], has_begun=False)
            self.parked.append(effect)

    def turn_over(self, kind: Kind) -> None:
        """One of this kind has ended: the next parked one may begin."""
        self.n_in_flight[kind] -= 1
        for at, effect in enumerate(self.parked):
            ticket, parked_kind = ticket_and_kind(effect)
            if parked_kind is kind and self._has_turn(kind):
                del self.parked[at]
                self.n_in_flight[kind] += 1
                self.watches[ticket] = evolve(
                    self.watches[ticket],
                    has_begun=True,
                    since_ns=self.now_ns,
                    begun_ns=self.now_ns,
                )
                self.started.append(effect)
                return

    # Reads and the restores behind them.

    def _order_prefetch(self, effect: StartPrefetch) -> None:
        n_pages = len(effect.host)
        self.watches[effect.restore] = Watch(
            kind=Kind.COPY, n_pages=n_pages, ceiling=n_pages, has_begun=False
        )
        self.chains[effect.ticket] = Chain(
            restore=effect.restore, host=effect.host, device=effect.device
        )
        self._begin_or_park(effect, effect.ticket, Kind.READ, n_pages)

    def follow_on(self, read: Ticket, n_pages: int) -> None:
        """The first `n_pages` of a read are restored now; with none, its restore is over."""
        chain = self.chains.pop(read, None)
        if chain is None or chain.restore not in self.watches:
            return
        if n_pages == 0:
            self.watches[chain.restore] = ended_with(self.watches[chain.restore], 0)
            return
        restore = StartRestore(
            ticket=chain.restore, host=chain.host[:n_pages], device=chain.device[:n_pages]
        )
        self._begin_or_park(restore, chain.restore, Kind.COPY, n_pages)

    def _cancel_prefetch(self, effect: CancelPrefetch, read: Ticket, n_kept: int) -> None:
        watch = self.watches.get(read)
        if watch is None or watch.has_ended:
            return
        if watch.has_begun:
            self.started.append(effect)
        else:
            self._unpark(read)
            self.watches[read] = ended_with(watch, 0)
            n_kept = 0
        self.follow_on(read, n_kept)

    def _cancel_restore(self, ticket: Ticket) -> None:
        """One that hangs on a read has ended by now: the read is given up first."""
        watch = self.watches.get(ticket)
        if watch is None or watch.has_begun or watch.has_ended:
            return
        self._unpark(ticket)
        self.watches[ticket] = ended_with(watch, 0)

    def _unpark(self, ticket: Ticket) -> None:
        self.parked = [e for e in self.parked if ticket_and_kind(e)[0] != ticket]

    # Peers.

    def _order_want(self, effect: SendWant) -> None:
        """The deadlines of the transfer and of the token start again at each widening."""
        hold = self.watches[effect.ticket]
        n_pages = hold.n_pages + len(effect.device)
        is_waiting = n_pages > hold.progress
        self.watches[effect.ticket] = evolve(
            hold,
            n_pages=n_pages,
            since_ns=self.now_ns,
            begun_ns=self.now_ns,
            timeout_ms=self.limits.transfer_deadline_ms if is_waiting else None,
        )
        if effect.token is not None:
            self.token_by_hold[effect.ticket] = effect.token
            self._watch(effect.token, Kind.TOKEN, 0, self.limits.transfer_deadline_ms)
            if effect.ticket in self.tokens:
                self.token_came(effect.ticket)
        self.peer_moves(effect.ticket)
        self.started.append(effect)

    def peer_moves(self, hold: Ticket) -> None:
        """The peer is asked for more, or gives: it has its whole time for the token again."""
        ticket = self.token_by_hold.get(hold)
        watch = None if ticket is None else self.watches.get(ticket)
        if ticket is not None and watch is not None and not watch.has_ended:
            self.watches[ticket] = Watch(
                kind=watch.kind,
                n_pages=watch.n_pages,
                ceiling=watch.ceiling,
                since_ns=self.now_ns,
                timeout_ms=watch.timeout_ms,
                begun_ns=watch.begun_ns,
            )

    def token_came(self, hold: Ticket) -> None:
        """The token under this conversation is here and awaited."""
        ticket = self.token_by_hold.get(hold)
        watch = None if ticket is None else self.watches.get(ticket)
        if ticket is None or watch is None:
            return
        token, _logprob = self.tokens[hold]
        self.watches[ticket] = evolve(
            watch, progress=token + 1, ceiling=-(token + 1), has_ended=True, timeout_ms=None
        )

    def _order_abort(self, hold: Ticket) -> None:
        """From now on only proof is awaited that the peer has stopped."""
        watch = self.watches.get(hold)
        if watch is not None and not watch.has_ended:
            self.dismissed.append(hold)
            self.watches[hold] = evolve(
                watch, since_ns=self.now_ns, timeout_ms=self.limits.quarantine_max_ms
            )

    def peer_failed(self, hold: Ticket, cause: PeerCause) -> None:
        """The worst cause counts; a conversation that has been given up only waits for its end."""
        watch = self.watches[hold]
        timeout_ms = watch.timeout_ms if hold in self.dismissed else None
        self.watches[hold] = evolve(
            watch, ceiling=min(watch.ceiling, int(cause)), timeout_ms=timeout_ms
        )


def ticket_and_kind(effect: Parkable) -> tuple[Ticket, Kind]:
    match effect:
        case StartPrefetch(ticket=ticket):
            return ticket, Kind.READ
        case StartRestore(ticket=ticket):
            return ticket, Kind.COPY
        case StartMirror(ticket=ticket):
            return ticket, Kind.MIRROR
        case StartPersist(ticket=ticket):
            return ticket, Kind.PERSIST
        case _:
            assert_never(effect)
