"""Copies for CUDA: pipelined over streams, submitted from the tick's thread, polled by events.

Several restores go in one submission; each is ready when its own pages are. The order is the order
of the calls: whoever has priority is started first.
"""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from itertools import accumulate, chain
from typing import Final

import torch
from attrs import define, field, frozen

from kvlift.core.ids import Ticket
from kvlift.core.landed import Landed
from kvlift.effects.copies_engine import CudaEngine, Engine, Event
from kvlift.effects.copies_jobs import CopyJob, Direction, JobBook, check_sizes
from kvlift.effects.copies_routes import (
    BlockCopies,
    PageCopies,
    Queued,
    Route,
    RowCopies,
    StagedRoute,
    Steps,
    StraightRoute,
    Submission,
)
from kvlift.effects.device_memory import BlockMemory, LayeredMemory, PagedMemory
from kvlift.effects.host_pool import HostPool

_log = logging.getLogger(__name__)

_POLL_S: Final = 0.0005
_CHUNK_PAGES_MAX: Final = 256


class LayeredBy(Enum):
    """How pages reach per-layer tensors. ROWS needs tensors at equal distances, else STAGED.

    AUTO: rows for pages of `CudaOptions.rows_from_bytes` and more, staged below.
    """

    AUTO = "auto"
    STAGED = "staged"
    ROWS = "rows"


@frozen(kw_only=True)
class CudaOptions:
    """What can be tuned; `benches/copies_gpu.py` measures what each of them changes.

    `chunk_bytes`: what one submission holds at most, and a staging buffer's size; `n_buffers` of
    those for each direction. `n_programs`: processors that a scatter takes at most.
    `batch_below_bytes`: smaller copies are submitted many in one driver call, 2D copies only with
    `batch_rows`; `prefers_overlap` hints such a call to leave the processors alone. `n_lanes`:
    streams (1 or 2) that share a direction's copies where nothing is staged; `takes_turns`: there,
    between two chunks, the copy engine may serve another stream (two lanes are used then).
    `in_flight_bytes_max`: of a direction, so many bytes are queued on the device; the rest follows
    with `landed()`, because a full queue would stop the thread that submits. `compute_stream`,
    `is_ordered`: see `CudaEngine`.
    """

    layered_by: LayeredBy = LayeredBy.AUTO
    rows_from_bytes: int = 2 << 20
    chunk_bytes: int = 64 << 20
    n_buffers: int = 2
    n_programs: int = 16
    batch_below_bytes: int = 1 << 30
    batch_rows: bool = True
    prefers_overlap: bool = True
    n_lanes: int = 1
    takes_turns: bool = True
    in_flight_bytes_max: int = 1 << 30
    compute_stream: torch.cuda.Stream | None = None
    is_ordered: bool = True

    def __attrs_post_init__(self) -> None:
        for name in ("chunk_bytes", "n_buffers", "n_programs", "in_flight_bytes_max"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.n_lanes not in (1, 2):
            raise ValueError(f"n_lanes must be 1 or 2, not {self.n_lanes}")


@frozen
class _Flight:
    """A job whose pages are good once `event` passed (None: has ended already)."""

    job: CopyJob
    n_good: int
    event: Event | None


@define(eq=False)
class _Feed:
    """One submission on its way into the device's queue. `waiting`: its jobs that are not queued to
    the end, each with the number of pages up to its own end."""

    steps: Steps
    waiting: deque[tuple[CopyJob, int]]
    n_queued: int = 0


@define(eq=False)
class _Queue:
    """What one direction has on the device (`queued`, by chunk) and what is to follow."""

    feeds: deque[_Feed] = field(factory=deque)
    queued: deque[Queued] = field(factory=deque)
    n_pages: int = 0

    def forget_passed(self) -> None:
        while self.queued and self.queued[0].event.query():
            self.n_pages -= self.queued.popleft().n_pages

    def middle(self) -> Event:
        """When it has passed, half of the queue is empty again."""
        return self.queued[len(self.queued) // 2].event


class CudaCopies:
    """`ports.Copies` between pinned host memory and the engine's CUDA memory.

    All methods belong to the tick's thread. `on_landed` wakes a host that sleeps: it is called from
    a thread of its own when a job's event passes, before `landed()` reports it. Raises `ValueError`
    for a host pool that is not pinned or whose pages differ in size from the device's.
    """

    def __init__(
        self,
        host: HostPool,
        device: PagedMemory,
        *,
        options: CudaOptions | None = None,
        on_landed: Callable[[], None] | None = None,
        engine: Engine | None = None,
    ) -> None:
        check_sizes(host, device)
        self._options = options or CudaOptions()
        if engine is None:
            if not host.is_pinned:
                raise ValueError("CUDA copies need a pinned host pool: HostPool(pinned=True)")
            engine = CudaEngine(
                device,
                n_programs=self._options.n_programs,
                batch_below_bytes=self._options.batch_below_bytes,
                batch_rows=self._options.batch_rows,
                prefers_overlap=self._options.prefers_overlap,
                compute_stream=self._options.compute_stream,
                is_ordered=self._options.is_ordered,
            )
        self._engine = engine
        self._book = JobBook(host, device.n_pages, None)
        self._route = _route(engine, host, device, self._options)
        self._n_pages_max = max(1, self._options.in_flight_bytes_max // device.page_bytes)
        self._queues = {each: _Queue() for each in Direction}
        self._flights: dict[Direction, deque[_Flight]] = {each: deque() for each in Direction}
        self._wakers: dict[Direction, _Waker] = {}
        if on_landed is not None:
            self._wakers = {each: _Waker(each.value, on_landed) for each in Direction}

    def start_restore(
        self,
        ticket: Ticket,
        host_pages: Sequence[int],
        device_pages: Sequence[int],
        start: int = 0,
    ) -> None:
        """Host to device. Answer: `RestoreEnded`."""
        pages = tuple(host_pages), tuple(device_pages)
        self.start_together([CopyJob(ticket, Direction.RESTORE, *pages, start)])

    def start_mirror(
        self, ticket: Ticket, device_pages: Sequence[int], host_pages: Sequence[int]
    ) -> None:
        """Device to host. Answer: `MirrorEnded`."""
        job = CopyJob(ticket, Direction.MIRROR, tuple(host_pages), tuple(device_pages))
        self.start_together([job])

    def start_together(self, jobs: Sequence[CopyJob]) -> None:
        """Several jobs in one submission: small ones share a chunk, an event each.

        Jobs of one direction run in this order; the two directions run beside each other.
        """
        begun: list[CopyJob] = []
        try:
            for job in jobs:
                self._book.begin(job)
                begun.append(job)
        except BaseException:
            for job in begun:
                self._book.end(job, 0)
            raise
        for direction in Direction:
            chosen = [job for job in jobs if job.direction is direction]
            if chosen:
                self._submit(direction, chosen)

    def landed(self) -> list[Landed]:
        self._go_on()
        return self._book.landed()

    def close(self, deadline_s: float) -> bool:
        """Wait for running copies. False if some still run: then they keep all their memory."""
        self._book.close()
        end_ns = time.monotonic_ns() + int(deadline_s * 1e9)
        while True:
            self._go_on()
            if not self._book.n_in_flight or time.monotonic_ns() >= end_ns:
                break
            time.sleep(_POLL_S)
        for waker in self._wakers.values():
            waker.stop()
        return self._book.drained(0.0)

    def _submit(self, direction: Direction, jobs: list[CopyJob]) -> None:
        # What is done before the first copy starts, the link stands still: no loop over the pages.
        submission = Submission(
            host_pages=tuple(chain.from_iterable(job.host_pages for job in jobs)),
            device_pages=tuple(chain.from_iterable(job.device_pages for job in jobs)),
            sizes=tuple(job.n_pages for job in jobs),
        )
        waiting = deque(zip(jobs, accumulate(submission.sizes), strict=True))
        while waiting and waiting[0][1] == 0:
            self._take_off(_Flight(waiting.popleft()[0], 0, None))
        if waiting:
            self._queues[direction].feeds.append(_Feed(self._steps(direction, submission), waiting))
            self._pump(direction)

    def _go_on(self) -> None:
        """Take in what has ended, and queue what had no room so far."""
        for direction, flights in self._flights.items():
            self._collect(flights)
            if self._queues[direction].feeds:
                self._pump(direction)

    def _pump(self, direction: Direction) -> None:
        """Queue chunks up to the limit, at least one where nothing is queued."""
        queue_of = self._queues[direction]
        try:
            queue_of.forget_passed()
        except Exception:  # noqa: BLE001 - the device's end; the flights meet the same error
            _log.exception("the device is lost")
            queue_of.queued.clear()
            queue_of.n_pages = 0
        feeds = queue_of.feeds
        while feeds and queue_of.n_pages < self._n_pages_max:
            feed = feeds[0]
            try:
                with self._engine.session():
                    self._fill(queue_of, feed)
            except Exception:  # noqa: BLE001 - whatever went wrong, the request goes on without
                _log.exception(
                    "queueing a %s broke off after %d pages", direction.value, feed.n_queued
                )
                self._break_off(direction, feed.waiting, feed.n_queued)
                feed.waiting.clear()
            if not feed.waiting:
                feeds.popleft()
        waker = self._wakers.get(direction)
        if feeds and waker is not None:
            waker.watch(queue_of.middle())

    def _fill(self, queue_of: _Queue, feed: _Feed) -> None:
        """Chunks of one submission, until it is queued or the limit is reached."""
        while feed.waiting and queue_of.n_pages < self._n_pages_max:
            step = next(feed.steps)
            feed.n_queued += step.n_pages
            queue_of.queued.append(step)
            queue_of.n_pages += step.n_pages
            while feed.waiting and feed.waiting[0][1] <= feed.n_queued:
                job, _ = feed.waiting.popleft()
                self._take_off(_Flight(job, job.n_pages, step.event))

    def _steps(self, direction: Direction, submission: Submission) -> Steps:
        if direction is Direction.RESTORE:
            return self._route.restore(submission)
        return self._route.mirror(submission)

    def _break_off(
        self, direction: Direction, waiting: deque[tuple[CopyJob, int]], n_queued: int
    ) -> None:
        """What was queued still runs: the jobs end short, behind it."""
        event: Event | None = None
        try:
            with self._engine.session():
                event = self._route.fence(to_host=direction is Direction.MIRROR)
        except Exception:  # noqa: BLE001 - a device that can't record an event runs nothing either
            _log.exception("the device is lost")
        for job, end in waiting:
            n_good = max(0, job.n_pages - (end - n_queued)) if event is not None else 0
            self._take_off(_Flight(job, n_good, event))

    def _take_off(self, flight: _Flight) -> None:
        self._flights[flight.job.direction].append(flight)
        waker = self._wakers.get(flight.job.direction)
        if waker is not None:
            waker.watch(flight.event)

    def _collect(self, flights: deque[_Flight]) -> None:
        while flights:
            flight = flights[0]
            n_good = flight.n_good
            try:
                if flight.event is not None and not flight.event.query():
                    return
            except Exception:  # noqa: BLE001 - an error here is the device's end, not the request's
                _log.exception("%s %d failed", flight.job.direction.value, flight.job.ticket)
                n_good = 0
            flights.popleft()
            self._book.end(flight.job, n_good)


class _Waker:
    """Sleeps on events, in order, and calls `on_landed` after each."""

    def __init__(self, name: str, on_landed: Callable[[], None]) -> None:
        self._on_landed = on_landed
        self._events: queue.SimpleQueue[tuple[Event | None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"kvlift-{name}-waker", daemon=True)
        self._thread.start()

    def watch(self, event: Event | None) -> None:
        self._events.put((event,))

    def stop(self) -> None:
        self._events.put(None)

    def _run(self) -> None:
        while (watched := self._events.get()) is not None:
            (event,) = watched
            try:
                if event is not None:
                    event.synchronize()
            except Exception:  # noqa: BLE001 - landed() meets the same error and reports it
                _log.debug("waiting for an event failed", exc_info=True)
            self._on_landed()


def _route(engine: Engine, host: HostPool, device: PagedMemory, options: CudaOptions) -> Route:
    page_bytes = device.page_bytes
    chunk_pages = max(1, min(_CHUNK_PAGES_MAX, options.chunk_bytes // page_bytes))
    if isinstance(device, BlockMemory):
        blocks = BlockCopies(host.address, page_bytes, device.blocks.data_ptr())
        return _straight(engine, blocks, page_bytes, chunk_pages, options)
    assert isinstance(device, LayeredMemory)
    if options.layered_by is LayeredBy.ROWS or (
        options.layered_by is LayeredBy.AUTO and page_bytes >= options.rows_from_bytes
    ):
        groups = device.row_groups()
        if groups is not None:
            rows = RowCopies(host.address, page_bytes, groups)
            return _straight(engine, rows, page_bytes, chunk_pages, options)
        _log.info("the layers' tensors lie unevenly: pages are staged")
    return StagedRoute(engine, host.address, page_bytes, chunk_pages, options.n_buffers)


def _straight(
    engine: Engine, copies: PageCopies, page_bytes: int, chunk_pages: int, options: CudaOptions
) -> Route:
    return StraightRoute(
        engine, copies, page_bytes, chunk_pages, options.n_lanes, options.takes_turns
    )
