"""The ways of a page between the host pool and the device, as queued work on an engine's lanes.

- staged: whole pages by the copy engine into a staging ring, one scatter a chunk into the layers
  beside the next chunk's copies. A few processors take part; no submission a layer.
- rows: one 2D copy a page, where the layers' tensors lie at equal distances. No processor at all.
- direct: engines whose pages are contiguous need neither.

Every route yields, chunk by chunk, an event and the number of pages that are good once it passed.
"""

from collections.abc import Iterator
from itertools import accumulate
from typing import Final, Protocol, TypeAlias

import torch
from attrs import define, field, frozen

from kvlift.effects.copies_engine import Engine, Event, Lane, Rows, Span
from kvlift.effects.copies_jobs import chunk_sizes, merged_runs, tapered
from kvlift.effects.device_memory import RowGroup

TAPER_BYTES: Final = 16 << 20
"""The last chunk's smaller half: its scatter has no copy beside it, at several times their rate."""


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
        for n in tapered(sizes, self._n_pages_min):
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
        for n in reversed(tapered(sizes[::-1], self._n_pages_min)):
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


@define(eq=False)
class RowsRoute:
    """One 2D copy a page and group of rows (see `LayeredMemory.row_groups`)."""

    _engine: Engine
    _host_address: int
    _page_bytes: int
    _groups: tuple[RowGroup, ...]

    def restore(self, submission: Submission) -> Steps:
        self._engine.wait_for_compute(Lane.TO_DEVICE)
        for start, stop in _job_bounds(submission):
            rows = [
                Rows(device, group.device_pitch, host, group.host_pitch, group.width, group.n_rows)
                for host, device, group in self._places(submission, start, stop)
            ]
            self._engine.copy_rows(Lane.TO_DEVICE, rows)
            yield Queued(self._engine.record(Lane.TO_DEVICE), stop - start)

    def mirror(self, submission: Submission) -> Steps:
        self._engine.wait_for_compute(Lane.TO_HOST)
        for start, stop in _job_bounds(submission):
            rows = [
                Rows(host, group.host_pitch, device, group.device_pitch, group.width, group.n_rows)
                for host, device, group in self._places(submission, start, stop)
            ]
            self._engine.copy_rows(Lane.TO_HOST, rows)
            yield Queued(self._engine.record(Lane.TO_HOST), stop - start)

    def fence(self, *, to_host: bool) -> Event:
        return self._engine.record(Lane.TO_HOST if to_host else Lane.TO_DEVICE)

    def _places(
        self, submission: Submission, start: int, stop: int
    ) -> Iterator[tuple[int, int, RowGroup]]:
        for i in range(start, stop):
            host = self._host_address + submission.host_pages[i] * self._page_bytes
            page = submission.device_pages[i]
            for group in self._groups:
                yield host + group.host_offset, group.address + page * group.width, group


@define(eq=False)
class DirectRoute:
    """Contiguous pages on both sides: pages that are adjacent on both are one copy."""

    _engine: Engine
    _host_address: int
    _device_address: int
    _page_bytes: int

    def restore(self, submission: Submission) -> Steps:
        self._engine.wait_for_compute(Lane.TO_DEVICE)
        for start, stop in _job_bounds(submission):
            places = self._places(submission, start, stop)
            spans = [Span(device, host, size) for host, device, size in places]
            self._engine.copy(Lane.TO_DEVICE, spans)
            yield Queued(self._engine.record(Lane.TO_DEVICE), stop - start)

    def mirror(self, submission: Submission) -> Steps:
        self._engine.wait_for_compute(Lane.TO_HOST)
        for start, stop in _job_bounds(submission):
            places = self._places(submission, start, stop)
            spans = [Span(host, device, size) for host, device, size in places]
            self._engine.copy(Lane.TO_HOST, spans)
            yield Queued(self._engine.record(Lane.TO_HOST), stop - start)

    def fence(self, *, to_host: bool) -> Event:
        return self._engine.record(Lane.TO_HOST if to_host else Lane.TO_DEVICE)

    def _places(
        self, submission: Submission, start: int, stop: int
    ) -> Iterator[tuple[int, int, int]]:
        size = self._page_bytes
        host_pages = submission.host_pages[start:stop]
        device_pages = submission.device_pages[start:stop]
        for index, host_page, n in merged_runs(host_pages):
            for inner, device_page, n_both in merged_runs(device_pages[index : index + n]):
                yield (
                    self._host_address + (host_page + inner) * size,
                    self._device_address + device_page * size,
                    n_both * size,
                )


def _job_bounds(submission: Submission) -> Iterator[tuple[int, int]]:
    """Where each job with pages begins and ends."""
    ends = list(accumulate(submission.sizes))
    return ((end - size, end) for end, size in zip(ends, submission.sizes, strict=True) if size)
