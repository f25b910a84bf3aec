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
    given_up,
)


class Desk:
    """The workspace of one tick for the local half."""

    def __init__(self, local: Local, limits: Limits, now_ns: int) -> None:
        self._before = local
        self.limits = limits
        self.now_ns = now_ns
        self.watches = dict(local.watches)
        self.chains = dict(local.chains)
        self.restore_by_read = dict(local.restore_by_read)
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
        self._moved: list[Ticket] = []
        for hold in local.leaving:
            self.tokens.pop(hold, None)
            self.reasons.pop(hold, None)

    def frozen(self) -> Local:
        for restore in self._moved:
            self._go_on(restore)
        return Local(
            watches=self.watches,
            chains=self.chains,
            restore_by_read=self.restore_by_read,
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
                self._watch(ticket, Kind.COPY, len(host), None)
                self._begin_or_park(effect)
            case StartMirror(ticket=ticket, host=host):
                self._watch(ticket, Kind.MIRROR, len(host), None)
                self._begin_or_park(effect)
            case StartPersist():
                self._order_persist(effect)
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
        self._unchain(ticket)
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

    def _order_persist(self, effect: StartPersist) -> None:
        """A silent store may keep host pages, but not those of the device: requests need them."""
        timeout_ms = self.limits.prefetch_stall_ms if effect.device else None
        self._watch(effect.ticket, Kind.PERSIST, len(effect.positions), timeout_ms)
        self._begin_or_park(effect)

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

    def _begin_or_park(self, effect: Parkable) -> None:
        ticket, kind = ticket_and_kind(effect)
        if self._has_turn(kind):
            self._begin(effect, ticket, kind)
        else:
            self.watches[ticket] = evolve(self.watches[ticket], has_begun=False)
            self.parked.append(effect)

    def _begin(self, effect: Parkable, ticket: Ticket, kind: Kind) -> None:
        self.n_in_flight[kind] = self.n_in_flight.get(kind, 0) + 1
        self.watches[ticket] = evolve(
            self.watches[ticket], has_begun=True, since_ns=self.now_ns, begun_ns=self.now_ns
        )
        self.started.append(effect)

    def turn_over(self, kind: Kind) -> None:
        """One of this kind has ended: the next parked one may begin."""
        self.n_in_flight[kind] -= 1
        for at, effect in enumerate(self.parked):
            ticket, parked_kind = ticket_and_kind(effect)
            if parked_kind is kind and self._has_turn(kind):
                del self.parked[at]
                self._begin(effect, ticket, kind)
                return

    # Reads and the restores behind them.

    def _order_prefetch(self, effect: StartPrefetch) -> None:
        n_pages = len(effect.host)
        self.watches[effect.restore] = Watch(
            kind=Kind.COPY, n_pages=n_pages, ceiling=n_pages, has_begun=False
        )
        self.restore_by_read[effect.ticket] = effect.restore
        self.chains[effect.restore] = Chain(
            read=effect.ticket, host=effect.host, device=effect.device
        )
        self._watch(effect.ticket, Kind.READ, n_pages, self.limits.read_deadline_ms())
        self._begin_or_park(effect)

    def pages_read(self, read: Ticket, n_pages: int) -> None:
        """The first `n_pages` of a read are here, and more come."""
        restore = self.restore_by_read.get(read)
        if restore is not None:
            self.chains[restore] = evolve(self.chains[restore], n_read=n_pages)
            self._moved.append(restore)

    def read_over(self, read: Ticket, n_pages: int) -> None:
        """The first `n_pages` of a read are restored, and nobody waits for more of them."""
        restore = self.restore_by_read.pop(read, None)
        if restore is not None:
            self.chains[restore] = evolve(self.chains[restore], read=None, n_read=n_pages)
            watch = self.watches[restore]
            self.watches[restore] = evolve(watch, ceiling=min(watch.ceiling, n_pages))
            self._moved.append(restore)

    def _go_on(self, restore: Ticket) -> None:
        """The next piece: all that has been read while the one before it was copied."""
        chain = self.chains.get(restore)
        if chain is None or chain.start < chain.stop:
            return
        start, stop = chain.stop, chain.n_read
        if start < stop:
            self.chains[restore] = evolve(chain, stop=stop)
            host, device = chain.host[start:stop], chain.device[start:stop]
            self._begin_or_park(StartRestore(ticket=restore, host=host, device=device, start=start))
        elif chain.read is None:
            self._end_restore(restore, stop)

    def copy_over(self, restore: Ticket, start: int, n_pages: int) -> None:
        """A restore has ended, or a piece of one: a short piece is its end."""
        chain = self.chains.get(restore)
        if chain is None:
            self._end_restore(restore, n_pages)
        elif start != chain.start or chain.start == chain.stop:
            self.n_stale += 1
            return
        elif start + n_pages < chain.stop:
            if chain.read is not None:
                self.watches[chain.read] = given_up(self.watches[chain.read])
            self._end_restore(restore, start + n_pages)
        else:
            self.chains[restore] = evolve(chain, start=chain.stop)
            self.watches[restore] = evolve(self.watches[restore], has_begun=False)
            self._moved.append(restore)
        self.turn_over(Kind.COPY)

    def _end_restore(self, restore: Ticket, n_pages: int) -> None:
        self._unchain(restore)
        self.watches[restore] = ended_with(self.watches[restore], n_pages)

    def _unchain(self, restore: Ticket) -> None:
        chain = self.chains.pop(restore, None)
        if chain is not None and chain.read is not None:
            del self.restore_by_read[chain.read]

    def _cancel_prefetch(self, effect: CancelPrefetch, read: Ticket, n_kept: int) -> None:
        watch = self.watches.get(read)
        if watch is None or watch.has_ended or watch.is_cancelled:
            return
        if watch.has_begun:
            self.watches[read] = evolve(watch, is_cancelled=True)
            self.started.append(effect)
        else:
            self._unpark(read)
            self.watches[read] = ended_with(watch, 0)
            n_kept = 0
        self.read_over(read, n_kept)

    def _cancel_restore(self, ticket: Ticket) -> None:
        """What runs is left alone, and nothing follows it: a read in front is given up by now."""
        watch = self.watches.get(ticket)
        chain = self.chains.get(ticket)
        if watch is None or watch.has_ended:
            return
        if not watch.has_begun:
            self._unpark(ticket)
            self._end_restore(ticket, 0)
        elif chain is not None:
            self.chains[ticket] = evolve(chain, n_read=0)

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
