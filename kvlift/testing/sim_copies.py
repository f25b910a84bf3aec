"""The copies port without a device: values move between lists, and only when a copy lands."""

from collections import deque
from collections.abc import Iterator, Sequence

from attrs import define, field

from kvlift.core.ids import Ticket
from kvlift.core.landed import Landed, MirrorEnded, RestoreEnded
from kvlift.core.tier import Tier
from kvlift.testing.sim_memory import Access, Content, Mode, SimMemory
from kvlift.testing.sim_operation import Calls, Kind, Operation, Outbox, operation_log


@define
class SimCopies:
    """One rank's copies. A target is poison from the start of a copy until it has landed.

    `restores` and `mirrors` say who lands them: the next `landed()`, or `land` and `fail`.
    """

    memory: SimMemory
    restores: Mode = Mode.AUTO
    mirrors: Mode = Mode.AUTO
    log: deque[Operation] = field(factory=operation_log)
    outbox: Outbox = field(factory=Outbox)
    calls: Calls = field(factory=Calls)
    _outstanding: list[Operation] = field(factory=list)

    def start_restore(
        self,
        ticket: Ticket,
        host_pages: Sequence[int],
        device_pages: Sequence[int],
        start: int = 0,
    ) -> None:
        self._start(Kind.RESTORE, ticket, host_pages, device_pages).start = start
        self.calls.begin_piece(Kind.RESTORE.value, ticket, start, len(host_pages))

    def start_mirror(
        self, ticket: Ticket, device_pages: Sequence[int], host_pages: Sequence[int]
    ) -> None:
        self._start(Kind.MIRROR, ticket, device_pages, host_pages)
        self.calls.begin(Kind.MIRROR.value, ticket)

    def landed(self) -> list[Landed]:
        for copy in list(self._outstanding):
            if self._mode(copy.kind) is Mode.AUTO:
                self.land(copy)
        return self.outbox.drain()

    def close(self, deadline_s: float) -> bool:
        """False if a held copy still runs."""
        del deadline_s  # nothing held lands by waiting for it
        for copy in list(self._outstanding):
            if self._mode(copy.kind) is Mode.AUTO:
                self.land(copy)
        return not self._outstanding

    def land(self, copy: Operation) -> None:
        """The copy ends; a source that changed under it has left torn bytes."""
        source, target = self._pools(copy.kind)
        moves = zip(copy.values, copy.sources, copy.targets, strict=True)
        for value, source_page, target_page in moves:
            target[target_page] = value if source[source_page] == value else None
        self._end(copy, len(copy.targets))

    def fail(self, copy: Operation) -> None:
        """The copy ends without one good page."""
        self._end(copy, 0)

    def accesses(self) -> Iterator[Access]:
        """What the copies in flight may still touch."""
        for copy in self._outstanding:
            ends = (Tier.HOST, Tier.DEVICE)
            source, target = ends if copy.kind is Kind.RESTORE else ends[::-1]
            yield Access(copy.ticket, source, "reads", copy.sources)
            yield Access(copy.ticket, target, "writes", copy.targets)

    def running(self) -> Sequence[Operation]:
        return self._outstanding

    def _mode(self, kind: Kind) -> Mode:
        return self.restores if kind is Kind.RESTORE else self.mirrors

    def _pools(self, kind: Kind) -> tuple[list[Content], list[Content]]:
        pools = (self.memory.host, self.memory.device)
        return pools if kind is Kind.RESTORE else pools[::-1]

    def _start(
        self, kind: Kind, ticket: Ticket, sources: Sequence[int], targets: Sequence[int]
    ) -> Operation:
        if len(sources) != len(targets):
            raise ValueError(f"a copy from {len(sources)} pages into {len(targets)} is a mistake")
        source, target = self._pools(kind)
        values = tuple(source[page] for page in sources)
        copy = Operation(ticket, kind, values, tuple(sources), tuple(targets))
        for page in targets:
            target[page] = None
        self._outstanding.append(copy)
        self.log.append(copy)
        return copy

    def _end(self, copy: Operation, n_pages: int) -> None:
        if not copy.is_outstanding:
            raise ValueError(f"the copy with ticket {copy.ticket} has ended before")
        copy.is_outstanding = False
        self._outstanding.remove(copy)
        copy.report = MirrorEnded(copy.ticket, n_pages)
        if copy.kind is Kind.RESTORE:
            copy.report = RestoreEnded(copy.ticket, n_pages, copy.start)
        self.outbox.put(copy.report)
