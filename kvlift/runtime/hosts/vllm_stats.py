"""What is counted for vLLM's `/metrics`: plain numbers, of the scheduler's side and of each worker.

Counts are since the last report; vLLM adds them up over workers and steps. Gauges are last words,
said again as long as they are not 0, since vLLM adds those of all workers. What follows a slash is
the label `tier`.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from attrs import define, field

from kvlift.core.ids import Ticket
from kvlift.core.landed import Landed, MirrorEnded, PersistEnded
from kvlift.effects.ports import Copies, DeviceMemory, PageRun, Store

COUNTERS: Final[Mapping[str, str]] = {
    "bytes_received": "Bytes of KV received from prefill instances.",
    "bytes_sent": "Bytes of KV read for decode instances.",
    "pages_received": "Pages of loads that came from a prefill instance.",
    "pages_restored/host": "Pages of loads that came from a tier below the device.",
    "pages_restored/storage": "Pages of loads that came from a tier below the device.",
    "pages_mirrored": "Pages copied to the host tier, on all ranks.",
    "pages_persisted": "Pages written to storage, on all ranks.",
    "loads": "Loads that have ended.",
    "loads_short": "Loads that brought fewer pages than were promised.",
}
GAUGES: Final[Mapping[str, str]] = {
    "loads_in_flight": "Loads under way.",
    "leases": "Finished prompts kept for decode instances, on all ranks.",
}


@define(eq=False)
class Tally:
    """Counts since they were taken last; `totals` are those since the start."""

    totals: dict[str, int] = field(factory=dict, init=False)
    _counts: dict[str, int] = field(factory=dict, init=False)
    _gauges: dict[str, int] = field(factory=dict, init=False)
    _told: dict[str, int] = field(factory=dict, init=False)

    def add(self, name: str, n: int = 1) -> None:
        if n:
            self.totals[name] = self.totals.get(name, 0) + n
            self._counts[name] = self._counts.get(name, 0) + n

    def set(self, name: str, n: int) -> None:
        self._gauges[name] = n

    def taken(self) -> dict[str, int]:
        """What is new; empty where nothing is."""
        counts, self._counts = self._counts, {}
        fresh = {name: n for name, n in self._gauges.items() if n or self._told.get(name)}
        self._told.update(fresh)
        return {**counts, **fresh}


def added(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    """Both together."""
    return {name: one.get(name, 0) + other.get(name, 0) for name in {**one, **other}}


@define(eq=False)
class CountedMemory:
    """Implements `ports.DeviceMemory` by another one and counts what the wire writes."""

    inner: DeviceMemory
    n_bytes_written: int = field(default=0, init=False)

    @property
    def page_bytes(self) -> int:
        return self.inner.page_bytes

    @property
    def n_pages(self) -> int:
        return self.inner.n_pages

    def write_page(self, device_page: int, data: memoryview) -> None:
        self.inner.write_page(device_page, data)
        self.n_bytes_written += len(data)

    def read_page(self, device_page: int, into: memoryview) -> None:
        self.inner.read_page(device_page, into)


@define(eq=False)
class CountedCopies:
    """Implements `ports.Copies` by another one and counts pages that came down."""

    inner: Copies
    tally: Tally

    def start_restore(
        self,
        ticket: Ticket,
        host_pages: Sequence[int],
        device_pages: Sequence[int],
        start: int = 0,
    ) -> None:
        self.inner.start_restore(ticket, host_pages, device_pages, start)

    def start_mirror(
        self, ticket: Ticket, device_pages: Sequence[int], host_pages: Sequence[int]
    ) -> None:
        self.inner.start_mirror(ticket, device_pages, host_pages)

    def landed(self) -> list[Landed]:
        reports = self.inner.landed()
        for report in reports:
            if isinstance(report, MirrorEnded):
                self.tally.add("pages_mirrored", report.n_pages)
        return reports

    def close(self, deadline_s: float) -> bool:
        return self.inner.close(deadline_s)


@define(eq=False)
class CountedStore:
    """Implements `ports.Store` by another one and counts pages that were written."""

    inner: Store
    tally: Tally

    def start_lookup(self, ticket: Ticket, run: PageRun) -> None:
        self.inner.start_lookup(ticket, run)

    def start_prefetch(self, ticket: Ticket, run: PageRun, host_pages: Sequence[int]) -> None:
        self.inner.start_prefetch(ticket, run, host_pages)

    def cancel_prefetch(self, ticket: Ticket) -> None:
        self.inner.cancel_prefetch(ticket)

    def start_persist(self, ticket: Ticket, run: PageRun, host_pages: Sequence[int]) -> None:
        self.inner.start_persist(ticket, run, host_pages)

    def start_persist_device(
        self, ticket: Ticket, run: PageRun, device_pages: Sequence[int]
    ) -> None:
        self.inner.start_persist_device(ticket, run, device_pages)

    def cancel_persist(self, ticket: Ticket) -> None:
        self.inner.cancel_persist(ticket)

    def forget_all(self) -> None:
        self.inner.forget_all()

    def landed(self) -> list[Landed]:
        reports = self.inner.landed()
        for report in reports:
            if isinstance(report, PersistEnded):
                self.tally.add("pages_persisted", report.n_pages)
        return reports

    def close(self, deadline_s: float) -> bool:
        return self.inner.close(deadline_s)
