"""What the pipelined copies need of a GPU: lanes, events, the copy engine, the slice mover.

`CudaEngine` is the real one. Copies go to the CUDA driver directly (`copies_driver`): torch's
`copy_` costs 5 to 9 us of processor time, and neither batches nor 2D copies exist in torch.
"""

import contextlib
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Protocol

import torch

from kvlift.effects.copies_driver import CopyDriver, Rows, Span
from kvlift.effects.copies_scatter import SliceMover
from kvlift.effects.device_memory import LayeredMemory, PagedMemory


class Lane(Enum):
    """A stream of its own: what is put on one lane runs in order, lanes run beside each other."""

    TO_DEVICE = "to device"
    TO_DEVICE_BESIDE = "to device, beside"
    SCATTER = "scatter"
    GATHER = "gather"
    TO_HOST = "to host"
    TO_HOST_BESIDE = "to host, beside"


class Event(Protocol):
    """A point on a lane."""

    def query(self) -> bool:
        """Whether everything before it has ended. Never waits."""

    def synchronize(self) -> None:
        """Wait for it, without the interpreter's lock."""


class Engine(Protocol):
    """Everything here queues and returns; nothing waits, apart from the constructor's warm-up."""

    def ring(self, n_slots: int) -> torch.Tensor:
        """A staging buffer on the device, uint8 `[n_slots, page_bytes]`."""

    def session(self) -> contextlib.AbstractContextManager[None]:
        """Everything is queued inside of one."""

    def copy(self, lane: Lane, spans: Sequence[Span]) -> None: ...

    def copy_rows(
        self, lane: Lane, rows: Rows, targets: Sequence[int], sources: Sequence[int]
    ) -> None:
        """2D copies of one shape, from `sources[i]` to `targets[i]`."""

    def upload(self, lane: Lane, pages: Sequence[int]) -> torch.Tensor:
        """Page numbers as int64 on the device, for this lane and the scatters behind it."""

    def scatter(
        self, lane: Lane, ring: torch.Tensor, slot: int, pages: torch.Tensor, first: int, n: int
    ) -> None: ...

    def gather(
        self, lane: Lane, ring: torch.Tensor, slot: int, pages: torch.Tensor, first: int, n: int
    ) -> None: ...

    def record(self, lane: Lane) -> Event: ...

    def wait(self, lane: Lane, event: Event) -> None: ...

    def wait_for_compute(self, lane: Lane) -> None:
        """Order the lane behind what the engine has queued so far, where that is asked for."""


class CudaEngine:
    """Streams of one CUDA device. Raises `RuntimeError` when the CUDA driver refuses.

    `batch_below_bytes`: copies smaller than this on average are submitted in one driver call, where
    the driver can (570 and later), 2D copies only with `batch_rows`; `prefers_overlap` hints such a
    call to leave them to the copy engine. `n_programs` processors at most scatter or gather.
    `is_ordered`: device pages are touched only after what is queued on `compute_stream` (None: the
    stream that is current when a copy starts). A host that starts copies only when no kernel in
    flight uses their pages switches it off, and then copies run beside its step.
    """

    def __init__(
        self,
        memory: PagedMemory,
        *,
        n_programs: int,
        batch_below_bytes: int,
        batch_rows: bool,
        prefers_overlap: bool,
        compute_stream: torch.cuda.Stream | None,
        is_ordered: bool,
    ) -> None:
        self._device = memory.device
        self._page_bytes = memory.page_bytes
        self._batch_below_bytes = batch_below_bytes
        self._batch_rows_below_bytes = batch_below_bytes if batch_rows else 0
        self._compute_stream = compute_stream
        self._is_ordered = is_ordered
        with torch.cuda.device(self._device):
            self._streams = {
                lane: torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
                for lane in Lane
            }
            torch.cuda.synchronize(self._device)
            self._driver = CopyDriver(prefers_overlap=prefers_overlap)
            self._mover = (
                SliceMover(memory, n_programs=n_programs)
                if isinstance(memory, LayeredMemory)
                else None
            )
            if self._mover is not None:
                self._mover.warm_up(self.ring(1))
            torch.cuda.synchronize(self._device)

    def ring(self, n_slots: int) -> torch.Tensor:
        ring = torch.empty((n_slots, self._page_bytes), dtype=torch.uint8, device=self._device)
        # Its memory may have been another stream's a moment ago, and must not become another's
        # while a lane still uses it, however this object ends.
        torch.cuda.synchronize(self._device)
        for stream in self._streams.values():
            ring.record_stream(stream)
        return ring

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        with torch.cuda.device(self._device):
            self._driver.make_current()
            yield

    def copy(self, lane: Lane, spans: Sequence[Span]) -> None:
        stream = self._streams[lane].cuda_stream
        size_bytes = sum(span.size_bytes for span in spans)
        if len(spans) > 1 and size_bytes < self._batch_below_bytes * len(spans):
            self._driver.copy_batch(spans, stream)
            return
        for span in spans:
            self._driver.copy(span, stream)

    def copy_rows(
        self, lane: Lane, rows: Rows, targets: Sequence[int], sources: Sequence[int]
    ) -> None:
        stream = self._streams[lane].cuda_stream
        if len(targets) > 1 and rows.width * rows.n_rows < self._batch_rows_below_bytes:
            self._driver.copy_rows_batch(rows, targets, sources, stream)
            return
        self._driver.copy_rows(rows, targets, sources, stream)

    def upload(self, lane: Lane, pages: Sequence[int]) -> torch.Tensor:
        with torch.cuda.stream(self._streams[lane]):
            pinned = torch.tensor(pages, dtype=torch.int64, pin_memory=True)
            on_device = pinned.to(self._device, non_blocking=True)
        if lane is Lane.TO_DEVICE:
            on_device.record_stream(self._streams[Lane.SCATTER])
        return on_device

    def scatter(
        self, lane: Lane, ring: torch.Tensor, slot: int, pages: torch.Tensor, first: int, n: int
    ) -> None:
        assert self._mover is not None
        with torch.cuda.stream(self._streams[lane]):
            self._mover.scatter(ring, slot, pages, first, n)

    def gather(
        self, lane: Lane, ring: torch.Tensor, slot: int, pages: torch.Tensor, first: int, n: int
    ) -> None:
        assert self._mover is not None
        with torch.cuda.stream(self._streams[lane]):
            self._mover.gather(ring, slot, pages, first, n)

    def record(self, lane: Lane) -> Event:
        # Blocking: whoever synchronises on it sleeps instead of spinning.
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self._streams[lane])
        return event

    def wait(self, lane: Lane, event: Event) -> None:
        assert isinstance(event, torch.cuda.Event)
        self._streams[lane].wait_event(event)

    def wait_for_compute(self, lane: Lane) -> None:
        if self._is_ordered:
            compute = self._compute_stream or torch.cuda.current_stream(self._device)
            self._streams[lane].wait_stream(compute)
