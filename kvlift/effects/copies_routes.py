"""The ways of a page between the host pool and the device, as queued work on an engine's lanes.

- staged: whole pages by the copy engine into a staging ring, one scatter a chunk into the layers
  beside the next chunk's copies. A few processors take part; no submission a layer.
- rows: one 2D copy a page, where the layers' tensors lie at equal distances; many in one batch. No
  processor at all.
- blocks: engines whose pages are contiguous need neither.

Every route yields, chunk by chunk, an event and the number of pages that are good once it passed.
"""

from collections.abc import Iterator
from typing import Final, Protocol, TypeAlias

import torch
from attrs import define, field, frozen

from kvlift.effects.copies_driver import Rows, Span
from kvlift.effects.copies_engine import Engine, Event, Lane
from kvlift.effects.copies_jobs import chunk_sizes, merged_pairs, merged_runs, ramped, tapered
from kvlift.effects.device_memory import RowGroup

TAPER_BYTES: Final = 16 << 20
"""The last chunk's smaller half: its scatter has no copy beside it, at several times their rate."""

RAMP_BYTES: Final = 8 << 20
"""The first batch without staging: 0.15 ms of copying, in which the next ones are submitted."""


@frozen
class Submission:
    """Jobs of one direction, queued together. `sizes` are the jobs' numbers of pages."""

    host_pages: tuple[int, ...]
    device_pages: tuple[int, ...]
    sizes: tuple[int, ...]


@frozen
class Queued:
    """`n_pages` more pages are good once `event` has passed."""

    event: Event
    n_pages: int


Steps: TypeAlias = Iterator[Queued]


class Route(Protocol):
    def restore(self, submission: Submission) -> Steps: ...

    def mirror(self, submission: Submission) -> Steps: ...

    def fence(self, *, to_host: bool) -> Event:
        """An event behind everything that a broken-off submission may have queued."""


@define(eq=False)
class _Ring:
    """Chunk buffers in one tensor, used in turn; `free[i]` passes when buffer `i` may be reused."""

    tensor: torch.Tensor
    chunk_pages: int
    free: list[Event | None]
    next_buffer: int = 0

    @classmethod
    def open(cls, engine: Engine, chunk_pages: int, n_buffers: int) -> "_Ring":
        return cls(engine.ring(chunk_pages * n_buffers), chunk_pages, [None] * n_buffers)

    def take(self) -> tuple[int, Event | None]:
        """The next buffer's index and what to wait for before writing into it."""
        buffer = self.next_buffer
        self.next_buffer = (buffer + 1) % len(self.free)
        return buffer, self.free[buffer]


@define(eq=False)
class StagedRoute:
    """Double-buffered: `chunk_pages` pages a buffer, `n_buffers` buffers for each direction."""

    _engine: Engine
    _host_address: int
    _page_bytes: int
    _chunk_pages: int
    _n_buffers: int
    _n_pages_min: int = field(init=False)
    _restores: _Ring = field(init=False)
    _mirrors: _Ring = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._n_pages_min = min(self._chunk_pages, max(1, TAPER_BYTES // self._page_bytes))
        self._restores = _Ring.open(self._engine, self._chunk_pages, self._n_buffers)
        self._mirrors = _Ring.open(self._engine, self._chunk_pages, self._n_buffers)

    def restore(self, submission: Submission) -> Steps:
        engine, ring = self._engine, self._restores
        engine.wait_for_compute(Lane.SCATTER)
        pages = engine.upload(Lane.TO_DEVICE, submission.device_pages)
        first = 0
        sizes = chunk_sizes(submission.sizes, self._chunk_pages, self._n_pages_min)
        for n in tapered(_short_start(sizes, self._n_pages_min), self._n_pages_min):
            buffer, free = ring.take()
            slot = buffer * self._chunk_pages
            if free is not None:
                engine.wait(Lane.TO_DEVICE, free)
            runs = self._runs(submission.host_pages[first : first + n], ring, slot)
            engine.copy(Lane.TO_DEVICE, [Span(staged, host, size) for staged, host, size in runs])
            engine.wait(Lane.SCATTER, engine.record(Lane.TO_DEVICE))
            engine.scatter(Lane.SCATTER, ring.tensor, slot, pages, first, n)
            event = engine.record(Lane.SCATTER)
            ring.free[buffer] = event
            yield Queued(event, n)
            first += n

    def mirror(self, submission: Submission) -> Steps:
        engine, ring = self._engine, self._mirrors
        engine.wait_for_compute(Lane.GATHER)
        pages = engine.upload(Lane.GATHER, submission.device_pages)
        first = 0
        sizes = chunk_sizes(submission.sizes, self._chunk_pages, self._n_pages_min)
        # Here the first chunk's gather has no copy beside it.
        for n in ramped(sizes, self._n_pages_min):
            buffer, free = ring.take()
            slot = buffer * self._chunk_pages
            if free is not None:
                engine.wait(Lane.GATHER, free)
            engine.gather(Lane.GATHER, ring.tensor, slot, pages, first, n)
            engine.wait(Lane.TO_HOST, engine.record(Lane.GATHER))
            runs = self._runs(submission.host_pages[first : first + n], ring, slot)
            engine.copy(Lane.TO_HOST, [Span(host, staged, size) for staged, host, size in runs])
            event = engine.record(Lane.TO_HOST)
            ring.free[buffer] = event
            yield Queued(event, n)
            first += n

    def fence(self, *, to_host: bool) -> Event:
        before, after = (Lane.GATHER, Lane.TO_HOST) if to_host else (Lane.TO_DEVICE, Lane.SCATTER)
        self._engine.wait(after, self._engine.record(before))
        return self._engine.record(after)

    def _runs(
        self, host_pages: tuple[int, ...], ring: _Ring, slot: int
    ) -> Iterator[tuple[int, int, int]]:
        """Address in the ring, address in the host pool and length of each contiguous copy."""
        size = self._page_bytes
        staged = ring.tensor.data_ptr() + slot * size
        for index, page, n in merged_runs(host_pages):
            yield staged + index * size, self._host_address + page * size, n * size


@frozen
class Ways:
    """Lanes that share one direction's copies, and the lane where they meet."""

    lanes: tuple[Lane, ...]
    meeting: Lane

    @classmethod
    def of(cls, *, to_host: bool, n_lanes: int) -> "Ways":
        if to_host:
            return cls((Lane.TO_HOST, Lane.TO_HOST_BESIDE)[:n_lanes], Lane.GATHER)
        return cls((Lane.TO_DEVICE, Lane.TO_DEVICE_BESIDE)[:n_lanes], Lane.SCATTER)

    def record(self, engine: Engine) -> Event:
        """A point behind what all lanes have now."""
        if len(self.lanes) == 1:
            return engine.record(self.lanes[0])
        for lane in self.lanes:
            engine.wait(self.meeting, engine.record(lane))
        return engine.record(self.meeting)


class PageCopies(Protocol):
    """How whole pages go straight to their places."""

    def queue(
        self,
        engine: Engine,
        lanes: tuple[Lane, ...],
        host_pages: tuple[int, ...],
        device_pages: tuple[int, ...],
        *,
        to_host: bool,
    ) -> None: ...


@frozen
class RowCopies:
    """One 2D copy a page and group of rows (see `LayeredMemory.row_groups`)."""

    host_address: int
    page_bytes: int
    groups: tuple[RowGroup, ...]

    def queue(
        self,
        engine: Engine,
        lanes: tuple[Lane, ...],
        host_pages: tuple[int, ...],
        device_pages: tuple[int, ...],
        *,
        to_host: bool,
    ) -> None:
        size = self.page_bytes
        for group in self.groups:
            host_base = self.host_address + group.host_offset
            at_host = [host_base + page * size for page in host_pages]
            at_device = [group.address + page * group.width for page in device_pages]
            if to_host:
                rows = Rows(group.host_pitch, group.device_pitch, group.width, group.n_rows)
                targets, sources = at_host, at_device
            else:
                rows = Rows(group.device_pitch, group.host_pitch, group.width, group.n_rows)
                targets, sources = at_device, at_host
            n_lanes = len(lanes)
            for i, lane in enumerate(lanes[: len(targets)]):
                engine.copy_rows(lane, rows, targets[i::n_lanes], sources[i::n_lanes])


@frozen
class BlockCopies:
    """Contiguous pages on both sides: pages that are adjacent on both are one copy."""

    host_address: int
    page_bytes: int
    device_address: int

    def queue(
        self,
        engine: Engine,
        lanes: tuple[Lane, ...],
        host_pages: tuple[int, ...],
        device_pages: tuple[int, ...],
        *,
        to_host: bool,
    ) -> None:
        size = self.page_bytes
        spans = []
        for at, n in merged_pairs(host_pages, device_pages):
            host = self.host_address + host_pages[at] * size
            device = self.device_address + device_pages[at] * size
            spans.append(Span(host, device, n * size) if to_host else Span(device, host, n * size))
        for i, lane in enumerate(lanes[: len(spans)]):
            engine.copy(lane, spans[i :: len(lanes)])


@define(eq=False)
class StraightRoute:
    """No staging: batches that begin small.

    A batch's copies start when all of it is submitted: what a first batch costs to submit, the link
    stands still. So batches double from `RAMP_BYTES` up to `chunk_pages`, and each is submitted
    while the one before it runs. With two lanes, one's copies begin while the other's end.

    With `takes_turns`, batches go over two lanes in turn, each behind the one before it. A copy
    engine stays with a stream as long as that has work; between two batches it looks elsewhere, so
    that another stream's copy (the inputs of a decode step) waits for one batch, not for all.
    """

    _engine: Engine
    _copies: PageCopies
    _page_bytes: int
    _chunk_pages: int
    _n_lanes: int
    _takes_turns: bool
    _n_pages_min: int = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._n_pages_min = min(self._chunk_pages, max(1, RAMP_BYTES // self._page_bytes))

    def restore(self, submission: Submission) -> Steps:
        return self._queue(submission, to_host=False)

    def mirror(self, submission: Submission) -> Steps:
        return self._queue(submission, to_host=True)

    def fence(self, *, to_host: bool) -> Event:
        return self._ways(to_host=to_host).record(self._engine)

    def _ways(self, *, to_host: bool) -> Ways:
        return Ways.of(to_host=to_host, n_lanes=2 if self._takes_turns else self._n_lanes)

    def _queue(self, submission: Submission, *, to_host: bool) -> Steps:
        engine = self._engine
        ways = self._ways(to_host=to_host)
        for lane in ways.lanes:
            engine.wait_for_compute(lane)
        sizes = chunk_sizes(submission.sizes, self._chunk_pages, self._n_pages_min)
        first = 0
        before: Event | None = None
        for number, n in enumerate(ramped(sizes, self._n_pages_min)):
            host_pages = submission.host_pages[first : first + n]
            device_pages = submission.device_pages[first : first + n]
            lanes = ways.lanes
            if self._takes_turns:
                lanes = (ways.lanes[number % 2],)
                if before is not None:
                    engine.wait(lanes[0], before)
            self._copies.queue(engine, lanes, host_pages, device_pages, to_host=to_host)
            before = engine.record(lanes[0]) if self._takes_turns else ways.record(engine)
            yield Queued(before, n)
            first += n


def _short_start(sizes: list[int], n_pages_min: int) -> list[int]:
    """A first chunk of `n_pages_min`: nothing is copied while it is submitted."""
    if sizes and sizes[0] > n_pages_min:
        return [n_pages_min, sizes[0] - n_pages_min, *sizes[1:]]
    return sizes
