"""Storage of one simulated rank: pages by what they must hold, damage included."""

from collections import deque
from collections.abc import Iterator, Sequence
from enum import Enum

from attrs import define, field, frozen

from kvlift.core.ids import Ticket
from kvlift.core.landed import (
    Landed,
    LookupAnswered,
    PersistEnded,
    PrefetchEnded,
    PrefetchProgressed,
)
from kvlift.core.tier import Tier
from kvlift.effects.ports import PageRun
from kvlift.testing.sim_memory import Access, Content, Mode, PageValue, SimMemory, page_value
from kvlift.testing.sim_operation import Calls, Kind, Operation, Outbox, operation_log


class Damage(Enum):
    """What a read would find wrong with a stored page."""

    NONE = "none"
    CORRUPT = "corrupt"
    TRUNCATED = "truncated"


@frozen
class StoredPage:
    """`content` is what was written, right or not; damage is what a checksum notices."""

    content: Content
    damage: Damage = Damage.NONE


@define
class SimStore:
    """One rank's storage. Lookups are never held; reads and writes move values when they land.

    A damaged page is dropped by the read that notices it, as the file store does. With
    `n_pages_max` set, writing evicts the pages that were used longest ago.
    """

    memory: SimMemory
    n_pages_max: int | None = None
    reads: Mode = Mode.AUTO
    writes: Mode = Mode.AUTO
    is_silent: bool = False
    n_wedged: int = 0
    pages: dict[PageValue, StoredPage] = field(factory=dict)
    log: deque[Operation] = field(factory=operation_log)
    outbox: Outbox = field(factory=Outbox)
    calls: Calls = field(factory=Calls)
    _outstanding: list[Operation] = field(factory=list)

    def start_lookup(self, ticket: Ticket, run: PageRun) -> None:
        self._start(Operation(ticket, Kind.LOOKUP, _values(run), prompt=run.prompt))

    def start_prefetch(self, ticket: Ticket, run: PageRun, host_pages: Sequence[int]) -> None:
        values = _values(run)
        if len(values) != len(host_pages):
            raise ValueError(f"a read of {len(values)} pages into {len(host_pages)} is a mistake")
        for page in host_pages:
            self.memory.host[page] = None
        self._start(
            Operation(ticket, Kind.READ, values, targets=tuple(host_pages), prompt=run.prompt)
        )

    def cancel_prefetch(self, ticket: Ticket) -> None:
        """Noted only: a simulated read cannot be called back, as the worst real one cannot."""
        del ticket
        self.calls.add("CancelPrefetch")

    def cancel_persist(self, ticket: Ticket) -> None:
        """A write from the device lets go at once, and what it would have stored is not."""
        self.calls.add("CancelPersist")
        for operation in list(self._outstanding):
            if operation.ticket == ticket and operation.source_tier is Tier.DEVICE:
                operation.is_void = True
                self.land(operation)

    def start_persist(self, ticket: Ticket, run: PageRun, host_pages: Sequence[int]) -> None:
        self._start_persist(Tier.HOST, ticket, run, host_pages)

    def start_persist_device(
        self, ticket: Ticket, run: PageRun, device_pages: Sequence[int]
    ) -> None:
        self._start_persist(Tier.DEVICE, ticket, run, device_pages)

    def forget_all(self) -> None:
        """Everything is gone at once; what is being written now will not be kept either."""
        self.pages.clear()
        for operation in self._outstanding:
            operation.is_void = operation.kind is Kind.PERSIST
        self.calls.add("ForgetStorage")

    def landed(self) -> list[Landed]:
        self._settle()
        return self.outbox.drain()

    def close(self, deadline_s: float) -> bool:
        """False if a read or a write that is held, or that silence keeps, still runs."""
        del deadline_s  # nothing held lands by waiting for it
        self._settle()
        return not self._outstanding

    def land(self, operation: Operation, n_pages: int | None = None) -> None:
        """The operation ends; of a read, the first `n_pages` come at most (None: all)."""
        match operation.kind:
            case Kind.LOOKUP:
                self._end(operation, LookupAnswered(operation.ticket, self._n_present(operation)))
            case Kind.READ:
                limit = len(operation.values) if n_pages is None else n_pages
                self._end(operation, PrefetchEnded(operation.ticket, self._read(operation, limit)))
            case Kind.PERSIST:
                self._end(operation, PersistEnded(operation.ticket, self._write(operation)))
            case Kind.RESTORE | Kind.MIRROR:
                raise ValueError("a store has no copies between device and host")

    def fail(self, operation: Operation) -> None:
        """The operation ends without one good page more."""
        match operation.kind:
            case Kind.LOOKUP:
                self._end(operation, LookupAnswered(operation.ticket, 0))
            case Kind.READ:
                self._end(operation, PrefetchEnded(operation.ticket, operation.n_landed))
            case Kind.PERSIST:
                self._end(operation, PersistEnded(operation.ticket, 0))
            case Kind.RESTORE | Kind.MIRROR:
                raise ValueError("a store has no copies between device and host")

    def progress(self, operation: Operation, n_pages: int) -> None:
        """The first `n_pages` of a read are on the host, verified; it goes on behind them."""
        operation.n_landed = self._read(operation, n_pages)
        self.outbox.put(PrefetchProgressed(operation.ticket, operation.n_landed))

    def accesses(self) -> Iterator[Access]:
        """What the reads and writes in flight may still touch."""
        for operation in self._outstanding:
            if operation.kind is Kind.READ:
                targets = operation.targets[operation.n_landed :]
                yield Access(operation.ticket, Tier.HOST, "writes", targets)
            elif operation.source_tier is not None:
                yield Access(operation.ticket, operation.source_tier, "reads", operation.sources)

    def put(self, value: PageValue) -> None:
        self._make_room(frozenset())
        self.pages[value] = StoredPage(value)

    def lose(self, value: PageValue) -> None:
        self.pages.pop(value, None)

    def damage(self, value: PageValue, damage: Damage) -> bool:
        """Damage a stored page; False if it isn't stored."""
        stored = self.pages.get(value)
        if stored is None:
            return False
        self.pages[value] = StoredPage(stored.content, damage)
        return True

    def has(self, value: PageValue) -> bool:
        """Whether the page is stored and a read would bring the right bytes."""
        return self.pages.get(value) == StoredPage(value)

    def _settle(self) -> None:
        if self.is_silent:
            return
        modes = {Kind.LOOKUP: Mode.AUTO, Kind.READ: self.reads, Kind.PERSIST: self.writes}
        for operation in list(self._outstanding):
            if modes[operation.kind] is Mode.AUTO:
                self.land(operation)

    def _start(self, operation: Operation) -> None:
        self._outstanding.append(operation)
        self.log.append(operation)
        self.calls.begin(operation.kind.value, operation.ticket)

    def _start_persist(
        self, tier: Tier, ticket: Ticket, run: PageRun, pages: Sequence[int]
    ) -> None:
        values = _values(run)
        if len(values) != len(pages):
            raise ValueError(f"a write of {len(values)} keys from {len(pages)} pages is a mistake")
        sources = tuple(pages)
        self._start(
            Operation(ticket, Kind.PERSIST, values, sources, source_tier=tier, prompt=run.prompt)
        )

    def _end(self, operation: Operation, report: Landed) -> None:
        if not operation.is_outstanding:
            raise ValueError(f"the operation with ticket {operation.ticket} has ended before")
        operation.is_outstanding = False
        self._outstanding.remove(operation)
        operation.report = report
        self.outbox.put(report)

    def _n_present(self, operation: Operation) -> int:
        n_pages = 0
        for value in operation.values:
            if value not in self.pages:
                break
            n_pages += 1
        return n_pages

    def _read(self, operation: Operation, n_pages_max: int) -> int:
        n_pages_max = max(operation.n_landed, min(n_pages_max, len(operation.values)))
        for n_pages in range(operation.n_landed, n_pages_max):
            value = operation.values[n_pages]
            assert value is not None
            stored = self.pages.pop(value, None)
            if stored is None or stored.damage is not Damage.NONE:
                return n_pages
            self.pages[value] = stored
            self.memory.host[operation.targets[n_pages]] = stored.content
        return n_pages_max

    def _write(self, operation: Operation) -> int:
        if operation.is_void:
            return 0
        pool = self.memory.host if operation.source_tier is Tier.HOST else self.memory.device
        places = operation.sources
        written: set[Content] = set()
        for n_pages, (value, page) in enumerate(zip(operation.values, places, strict=True)):
            assert value is not None
            if value not in self.pages:
                if not self._make_room(written):
                    return n_pages
                self.pages[value] = StoredPage(pool[page])
            written.add(value)
        return len(places)

    def _make_room(self, keep: set[Content] | frozenset[Content]) -> bool:
        """Evict what was used longest ago until one more page fits; False if nothing may go."""
        if self.n_pages_max is None:
            return True
        room = self.n_pages_max - self.n_wedged
        while len(self.pages) >= room:
            oldest = next((value for value in self.pages if value not in keep), None)
            if oldest is None:
                return False
            del self.pages[oldest]
        return True


def _values(run: PageRun) -> tuple[PageValue, ...]:
    return tuple(page_value(run.prompt, position) for position in run.positions)
