"""Copies for device memory that the CPU can reach: the embedded default, tests and CI.

Worker threads, so that "in flight" is as real as on a GPU: starting only queues.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence

from kvlift.core.ids import Ticket
from kvlift.core.landed import Landed
from kvlift.effects.copies_jobs import CopyJob, Direction, JobBook, check_sizes
from kvlift.effects.device_memory import PagedMemory
from kvlift.effects.host_pool import HostPool

_log = logging.getLogger(__name__)


class CpuCopies:
    """`ports.Copies` between a host pool and the engine's memory, with `n_threads` workers.

    `on_landed` is called from a worker after each report, to wake a host that sleeps. A failure in
    a worker is weather: it is logged and the job's report counts only the pages before it.
    """

    def __init__(
        self,
        host: HostPool,
        device: PagedMemory,
        *,
        n_threads: int = 1,
        on_landed: Callable[[], None] | None = None,
    ) -> None:
        if n_threads < 1:
            raise ValueError(f"copies need at least one thread, not {n_threads}")
        check_sizes(host, device)
        self._host = host
        self._device = device
        self._book = JobBook(host, device.n_pages, on_landed)
        self._jobs: queue.SimpleQueue[CopyJob | None] = queue.SimpleQueue()
        self._is_stopping = False
        self._threads = [
            threading.Thread(target=self._work, name=f"kvlift-copies-{i}", daemon=True)
            for i in range(n_threads)
        ]
        for thread in self._threads:
            thread.start()

    def start_restore(
        self,
        ticket: Ticket,
        host_pages: Sequence[int],
        device_pages: Sequence[int],
        start: int = 0,
    ) -> None:
        """Host to device. Answer: `RestoreEnded`."""
        pages = tuple(host_pages), tuple(device_pages)
        self._start(CopyJob(ticket, Direction.RESTORE, *pages, start))

    def start_mirror(
        self, ticket: Ticket, device_pages: Sequence[int], host_pages: Sequence[int]
    ) -> None:
        """Device to host. Answer: `MirrorEnded`."""
        self._start(CopyJob(ticket, Direction.MIRROR, tuple(host_pages), tuple(device_pages)))

    def landed(self) -> list[Landed]:
        return self._book.landed()

    def close(self, deadline_s: float) -> bool:
        """Wait for running copies; what is still queued ends short, without a page copied.

        False if some still run at the deadline: the host pool then stays lent and mapped.
        """
        end_ns = time.monotonic_ns() + int(deadline_s * 1e9)
        self._book.close()
        self._is_stopping = True
        for _ in self._threads:
            self._jobs.put(None)
        is_drained = self._book.drained(deadline_s)
        for thread in self._threads:
            thread.join(max(0.0, (end_ns - time.monotonic_ns()) / 1e9))
        return is_drained

    def _start(self, job: CopyJob) -> None:
        self._book.begin(job)
        self._jobs.put(job)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            n_good = 0
            try:
                for host_page, device_page in zip(job.host_pages, job.device_pages, strict=True):
                    if self._is_stopping and n_good == 0:
                        break
                    self._copy_page(job.direction, host_page, device_page)
                    n_good += 1
            except Exception:  # noqa: BLE001 - whatever went wrong here, the request goes on without
                _log.exception(
                    "%s %d failed after %d of %d pages",
                    job.direction.value,
                    job.ticket,
                    n_good,
                    job.n_pages,
                )
            self._book.end(job, n_good)

    def _copy_page(self, direction: Direction, host_page: int, device_page: int) -> None:
        view = self._host.page_view(host_page)
        if direction is Direction.RESTORE:
            self._device.write_page(device_page, view)
        else:
            self._device.read_page(device_page, view)
