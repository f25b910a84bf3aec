"""What the CPU's and the GPU's copies share: checking jobs, counting them, reporting their ends."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum

from attrs import define, field, frozen

from kvlift.core.ids import Ticket
from kvlift.core.landed import Landed, MirrorEnded, RestoreEnded
from kvlift.effects.device_memory import PagedMemory
from kvlift.effects.host_pool import HostPool

_log = logging.getLogger(__name__)


class Direction(Enum):
    """RESTORE is host to device, MIRROR is device to host."""

    RESTORE = "restore"
    MIRROR = "mirror"


@frozen
class CopyJob:
    """One ticket's pages: `host_pages[i]` and `device_pages[i]` hold the same page.

    `start`: of a restore's piece, the number of its first page in the whole restore."""

    ticket: Ticket
    direction: Direction
    host_pages: tuple[int, ...]
    device_pages: tuple[int, ...]
    start: int = 0

    @property
    def n_pages(self) -> int:
        return len(self.host_pages)


@define(eq=False)
class JobBook:
    """The jobs in flight and the reports that wait for `landed()`. Safe for several threads.

    Every job in flight has the host pool lent, so that its memory stays mapped.
    """

    _host: HostPool
    _n_device_pages: int
    _on_landed: Callable[[], None] | None
    _reports: deque[Landed] = field(init=False, factory=deque)
    _tickets: set[Ticket] = field(init=False, factory=set)
    _is_closed: bool = field(init=False, default=False)
    _changed: threading.Condition = field(init=False, factory=threading.Condition)

    def begin(self, job: CopyJob) -> None:
        """Check a job and count it. A bad one raises (`ValueError`, `IndexError`): it is a bug."""
        if len(job.host_pages) != len(job.device_pages):
            raise ValueError(
                f"ticket {job.ticket}: {len(job.host_pages)} host pages for "
                f"{len(job.device_pages)} device pages"
            )
        _check_range(job.host_pages, self._host.n_pages, "host")
        _check_range(job.device_pages, self._n_device_pages, "device")
        with self._changed:
            if self._is_closed:
                raise RuntimeError("copies are closed: start nothing after close()")
            if job.ticket in self._tickets:
                raise ValueError(f"ticket {job.ticket} is in flight already")
            self._host.lend()
            self._tickets.add(job.ticket)

    def end(self, job: CopyJob, n_pages: int) -> None:
        """The job reads and writes nothing any more; its first `n_pages` are good."""
        report: Landed = MirrorEnded(job.ticket, n_pages)
        if job.direction is Direction.RESTORE:
            report = RestoreEnded(job.ticket, n_pages, job.start)
        with self._changed:
            self._tickets.remove(job.ticket)
            self._host.take_back()
            self._reports.append(report)
            self._changed.notify_all()
        if self._on_landed is not None:
            self._on_landed()

    def landed(self) -> list[Landed]:
        """The reports since the last call, in the order in which the jobs ended."""
        if not self._reports:
            return []
        with self._changed:
            reports = list(self._reports)
            self._reports.clear()
        return reports

    @property
    def n_in_flight(self) -> int:
        return len(self._tickets)

    def close(self) -> None:
        """Nothing can begin any more; what runs goes on."""
        with self._changed:
            self._is_closed = True

    def drained(self, timeout_s: float) -> bool:
        """Wait until nothing is in flight; False after `timeout_s`."""
        with self._changed:
            is_drained = self._changed.wait_for(lambda: not self._tickets, timeout_s)
        if not is_drained:
            _log.warning("%d copies still run at the deadline", len(self._tickets))
        return is_drained


def check_sizes(host: HostPool, memory: PagedMemory) -> None:
    """Raises `ValueError` when the two sides' pages differ in size."""
    if host.page_bytes != memory.page_bytes:
        raise ValueError(
            f"host pages have {host.page_bytes} bytes, device pages {memory.page_bytes}: "
            "both must come from the same layout"
        )


def chunk_sizes(job_sizes: Sequence[int], n_pages_max: int, n_pages_min: int) -> list[int]:
    """How jobs in a row are cut into chunks of a staging buffer, in pages.

    A chunk is full, or ends with a job: a job's end closes a chunk of at least `n_pages_min`, so
    that the job is ready when its own pages are, while many small jobs still share a chunk.
    """
    sizes = []
    filled = 0
    for size in job_sizes:
        left = size
        while left:
            taken = min(left, n_pages_max - filled)
            filled += taken
            left -= taken
            if filled == n_pages_max:
                sizes.append(filled)
                filled = 0
        if filled >= n_pages_min:
            sizes.append(filled)
            filled = 0
    if filled:
        sizes.append(filled)
    return sizes


def tapered(sizes: Sequence[int], n_pages_min: int) -> list[int]:
    """The same pages with the last chunk cut by halves, down to `n_pages_min`.

    The last chunk's second stage has nothing to overlap with; the smaller it is, the less it adds.
    """
    if not sizes:
        return []
    cut = list(sizes[:-1])
    last = sizes[-1]
    while last >= 2 * n_pages_min:
        cut.append(last - last // 2)
        last //= 2
    return [*cut, last]


def ramped(sizes: Sequence[int], n_pages_min: int) -> list[int]:
    """The same pages with the first chunk cut into parts that double, from `n_pages_min` up."""
    return tapered(sizes[::-1], n_pages_min)[::-1]


def merged_runs(pages: Sequence[int]) -> list[tuple[int, int, int]]:
    """Adjacent pages as runs `(index of the first, first page, n_pages)`, in order."""
    runs = []
    start = 0
    n_pages = len(pages)
    for i in range(1, n_pages + 1):
        if i == n_pages or pages[i] != pages[i - 1] + 1:
            runs.append((start, pages[start], i - start))
            start = i
    return runs


def merged_pairs(one: Sequence[int], other: Sequence[int]) -> list[tuple[int, int]]:
    """Pages that are adjacent on both sides as runs `(index of the first, n_pages)`, in order."""
    runs = []
    start = 0
    n_pages = len(one)
    for i in range(1, n_pages + 1):
        if i == n_pages or one[i] != one[i - 1] + 1 or other[i] != other[i - 1] + 1:
            runs.append((start, i - start))
            start = i
    return runs


def _check_range(pages: tuple[int, ...], capacity: int, tier: str) -> None:
    if pages and not (min(pages) >= 0 and max(pages) < capacity):
        outside = next(page for page in pages if not 0 <= page < capacity)
        raise IndexError(f"{tier} page {outside} is outside {capacity} pages")
