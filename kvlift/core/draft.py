"""The agreed state while one tick decides: a draft of the next state, with the effects so far.

`advance` opens a draft, fills it and freezes it; nobody else sees one. Inside, maps may be changed,
since they are the draft's own; the state that it came from stays whole (decision 0004).
Handles and tickets are drawn here, in agreed order, and never twice.
"""

from attrs import evolve

from kvlift.core.agreed import Agreed, Drain, Growth, Kind, Open, Request
from kvlift.core.descent import Descent
from kvlift.core.effect import Effect, FreeDevice, FreeHost, TakeDevice, TakeHost
from kvlift.core.ids import Attempt, DeviceHandle, HostHandle, Rid, Ticket
from kvlift.core.index_edit import IndexEdit
from kvlift.core.notice import Notice
from kvlift.core.phase import Phase
from kvlift.core.policy import Policy, WritePolicy
from kvlift.core.tier import Tier


class Draft:
    """The workspace of one tick."""

    def __init__(self, agreed: Agreed, policy: Policy) -> None:
        self.before = agreed
        self.policy = policy
        self.clock = agreed.clock
        self.storage = agreed.storage
        self.host_epoch = agreed.host_epoch
        self.requests: dict[Attempt, Request] = dict(agreed.requests)
        self.attempt_by_rid: dict[Rid, Attempt] = dict(agreed.attempt_by_rid)
        self.tickets: dict[Ticket, Open] = dict(agreed.tickets)
        self.drains: list[Drain] = list(agreed.drains)
        self.descents: list[Descent] = list(agreed.descents)
        self.growths: list[Growth] = list(agreed.growths)
        self.index = IndexEdit(agreed.index)
        self.ledger = agreed.ledger
        self.rates = agreed.rates
        self.next_ticket = agreed.next_ticket
        self.next_attempt = agreed.next_attempt
        self.effects: list[Effect] = []
        self.touched: dict[Attempt, None] = {}
        self.notices: list[Notice] = []
        self.closed: list[Ticket] = []
        self.arrows: list[tuple[type, type, type]] = []
        self.movers: list[int] = []

    def moment(self) -> int:
        """A new instant of the agreed order of events; recency is counted in these."""
        self.clock += 1
        return self.clock

    # Requests.

    def put_phase(self, attempt: Attempt, phase: Phase) -> None:
        # Built by hand: `evolve` costs ten times as much, and this is done for every event.
        old = self.requests[attempt]
        self.requests[attempt] = Request(
            rid=old.rid,
            attempt=old.attempt,
            prompt=old.prompt,
            n_tokens_prompt=old.n_tokens_prompt,
            peer=old.peer,
            priority=old.priority,
            n_pages_output=old.n_pages_output,
            hold=old.hold,
            phase=phase,
            n_pages_given=old.n_pages_given,
        )

    def request(self, rid: Rid) -> Request | None:
        attempt = self.attempt_by_rid.get(rid)
        return None if attempt is None else self.requests[attempt]

    # Tickets.

    def open_ticket(self, kind: Kind, owner: int, n_pages: int) -> Ticket:
        ticket = Ticket(self.next_ticket)
        self.next_ticket += 1
        ceiling = 0 if kind in (Kind.HOLD, Kind.TOKEN) else n_pages
        self.tickets[ticket] = Open(kind, owner, n_pages, ceiling=ceiling)
        return ticket

    def close_ticket(self, ticket: Ticket) -> None:
        if self.tickets.pop(ticket, None) is not None:
            self.closed.append(ticket)

    # Pages.

    def n_device_free(self) -> int:
        """Below 0 where a rank has set more aside than is left; eviction makes that good first."""
        return self.ledger.device_room - self.ledger.device_live

    def n_host_free(self) -> int:
        return self.ledger.host_room - self.ledger.host_live

    def n_host_room_below(self) -> int:
        """Host pages that a copy down may have. With write-back those that a device page came down
        to are no room: taking them would make that page dirty again, and so on for ever."""
        if self.policy.write is not WritePolicy.BACK:
            return max(0, self.n_host_free() + self.index.n_host_idle)
        n_useless = sum(
            segment.n_pages
            for segment in self.index.segments.values()
            if segment.host is not None and segment.host_pins == 0 and segment.device is None
        )
        return max(0, self.n_host_free() + n_useless)

    def take_device(self, n_pages: int) -> tuple[DeviceHandle, ...]:
        """New device pages; evicts idle ones for what is not free. The caller has counted."""
        short = n_pages - self.n_device_free()
        if short > 0:
            self._evict_device(short)
        first = self.ledger.next_device
        pages = tuple(DeviceHandle(first + n) for n in range(n_pages))
        self.ledger = evolve(
            self.ledger,
            next_device=first + n_pages,
            device_live=self.ledger.device_live + n_pages,
        )
        if pages:
            self.effects.append(TakeDevice(pages=pages))
        return pages

    def _evict_device(self, n_pages: int) -> None:
        """Clean pages first; dirty ones only where they can't go down any more."""
        policy = self.policy.eviction
        if self.policy.write is WritePolicy.BACK:
            n_pages -= self.index.evict(
                Tier.DEVICE, n_pages, policy, lambda segment: not segment.is_dirty()
            )
        if n_pages > 0:
            self.index.evict(Tier.DEVICE, n_pages, policy)
        self.collect_evicted()

    def take_host(self, n_pages: int) -> tuple[HostHandle, ...]:
        """New host pages; as `take_device`."""
        short = n_pages - self.n_host_free()
        if short > 0:
            if self.policy.write is WritePolicy.BACK:
                short -= self.index.evict(
                    Tier.HOST, short, self.policy.eviction, lambda s: s.device is None
                )
            self.index.evict(Tier.HOST, max(0, short), self.policy.eviction)
            self.collect_evicted()
        first = self.ledger.next_host
        pages = tuple(HostHandle(first + n) for n in range(n_pages))
        self.ledger = evolve(
            self.ledger, next_host=first + n_pages, host_live=self.ledger.host_live + n_pages
        )
        if pages:
            self.effects.append(TakeHost(pages=pages))
        return pages

    def free_device(self, pages: tuple[DeviceHandle, ...]) -> None:
        if pages:
            live = self.ledger.device_live - len(pages)
            self.ledger = evolve(self.ledger, device_live=live)
            self.effects.append(FreeDevice(pages=pages))

    def free_host(self, pages: tuple[HostHandle, ...]) -> None:
        if pages:
            live = self.ledger.host_live - len(pages)
            self.ledger = evolve(self.ledger, host_live=live)
            self.effects.append(FreeHost(pages=pages))

    def collect_evicted(self) -> None:
        """Pages that the index has let go of are free."""
        device, self.index.freed_device = tuple(self.index.freed_device), []
        host, self.index.freed_host = tuple(self.index.freed_host), []
        self.free_device(device)
        self.free_host(host)
