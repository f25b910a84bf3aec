"""What the pipelined copies need of a GPU: lanes, events, the copy engine, the slice mover.

`CudaEngine` is the real one. Copies go to the CUDA driver directly: torch's `copy_` costs 5 to 9 us
of processor time, a driver call 2, and neither batches nor 2D copies exist in torch.
"""

import contextlib
import ctypes
import logging
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Any, Final, NamedTuple, Protocol

import torch

from kvlift.effects.copies_scatter import SliceMover
from kvlift.effects.device_memory import LayeredMemory, PagedMemory

_log = logging.getLogger(__name__)

_HOST_MEMORY: Final = 1
_DEVICE_MEMORY: Final = 2
_SOURCE_IN_STREAM_ORDER: Final = 1
_OVERLAP_WITH_COMPUTE: Final = 1


class Lane(Enum):
    """A stream of its own: what is put on one lane runs in order, lanes run beside each other."""

    TO_DEVICE = "to device"
    SCATTER = "scatter"
    GATHER = "gather"
    TO_HOST = "to host"


class Span(NamedTuple):
    """One contiguous copy: addresses and length in bytes."""

    target: int
    source: int
    size_bytes: int


class Rows(NamedTuple):
    """One 2D copy of `n_rows` rows of `width` bytes; pitches are the rows' distances in bytes."""

    target: int
    target_pitch: int
    source: int
    source_pitch: int
    width: int
    n_rows: int


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

    def copy_rows(self, lane: Lane, rows: Sequence[Rows]) -> None: ...

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
    the driver can (570 and later). `n_programs` processors at most scatter or gather. `is_ordered`:
    device pages are touched only after what is queued on `compute_stream` (None: the stream that is
    current when a copy starts). A host that starts copies only when no kernel in flight uses their
    pages switches it off, and then copies run beside its step.
    """

    def __init__(
        self,
        memory: PagedMemory,
        *,
        n_programs: int,
        batch_below_bytes: int,
        compute_stream: torch.cuda.Stream | None,
        is_ordered: bool,
    ) -> None:
        self._device = memory.device
        self._page_bytes = memory.page_bytes
        self._batch_below_bytes = batch_below_bytes
        self._compute_stream = compute_stream
        self._is_ordered = is_ordered
        with torch.cuda.device(self._device):
            self._streams = {
                lane: torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
                for lane in Lane
            }
            torch.cuda.synchronize(self._device)
            self._driver = _Driver()
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

    def copy_rows(self, lane: Lane, rows: Sequence[Rows]) -> None:
        stream = self._streams[lane].cuda_stream
        to_host = lane is Lane.TO_HOST
        for each in rows:
            self._driver.copy_rows(each, stream, to_host=to_host)

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


class _Location(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int), ("id", ctypes.c_int))


class _BatchAttributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = (
        ("source_order", ctypes.c_int),
        ("source_hint", _Location),
        ("target_hint", _Location),
        ("flags", ctypes.c_uint),
    )


class _Copy2d(ctypes.Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = (
        ("source_x_bytes", ctypes.c_size_t),
        ("source_y", ctypes.c_size_t),
        ("source_kind", ctypes.c_int),
        ("source_host", ctypes.c_void_p),
        ("source_device", ctypes.c_uint64),
        ("source_array", ctypes.c_void_p),
        ("source_pitch", ctypes.c_size_t),
        ("target_x_bytes", ctypes.c_size_t),
        ("target_y", ctypes.c_size_t),
        ("target_kind", ctypes.c_int),
        ("target_host", ctypes.c_void_p),
        ("target_device", ctypes.c_uint64),
        ("target_array", ctypes.c_void_p),
        ("target_pitch", ctypes.c_size_t),
        ("width_bytes", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


class _Driver:
    """The three copies of the CUDA driver that torch does not offer.

    The calls keep the interpreter's lock: they last microseconds, getting it back may last a
    thread's whole turn.
    """

    def __init__(self) -> None:
        library = ctypes.PyDLL("libcuda.so.1")
        u64, size, pointer = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p
        self._copy = _function(library, "cuMemcpyAsync", u64, u64, size, pointer)
        self._copy_2d = _function(library, "cuMemcpy2DAsync_v2", pointer, pointer)
        self._set_context = _function(library, "cuCtxSetCurrent", pointer)
        # The name without a version is CUDA 12.8's call, which newer drivers keep.
        self._batch: Any = None
        if hasattr(library, "cuMemcpyBatchAsync"):
            self._batch = _function(library, "cuMemcpyBatchAsync", *[pointer] * 3, size, pointer,
                                    pointer, size, pointer, pointer)  # fmt: skip
        self._attributes = _BatchAttributes(
            source_order=_SOURCE_IN_STREAM_ORDER, flags=_OVERLAP_WITH_COMPUTE
        )
        self._attributes_from = size(0)
        self._failed_at = size(0)
        context = pointer()
        _check("cuCtxGetCurrent", _function(library, "cuCtxGetCurrent", pointer)(
            ctypes.byref(context)))  # fmt: skip
        self._context = context

    def make_current(self) -> None:
        """A thread that torch has not used on this device yet has no context."""
        _check("cuCtxSetCurrent", self._set_context(self._context))

    def copy(self, span: Span, stream: int) -> None:
        _check("cuMemcpyAsync", self._copy(span.target, span.source, span.size_bytes, stream))

    def copy_batch(self, spans: Sequence[Span], stream: int) -> None:
        """All in one call; they may run in any order among themselves."""
        if self._batch is not None:
            n = len(spans)
            array = ctypes.c_uint64 * n
            code = self._batch(
                array(*[span.target for span in spans]),
                array(*[span.source for span in spans]),
                array(*[span.size_bytes for span in spans]),
                n,
                ctypes.byref(self._attributes),
                ctypes.byref(self._attributes_from),
                1,
                ctypes.byref(self._failed_at),
                stream,
            )
            if code == 0:
                return
            _log.warning("no batched copies here (CUDA error %d): they go one by one", code)
            self._batch = None
        # Copying again what a refused batch may have copied gives the same bytes.
        for span in spans:
            self.copy(span, stream)

    def copy_rows(self, rows: Rows, stream: int, *, to_host: bool) -> None:
        request = _Copy2d(
            source_kind=_DEVICE_MEMORY if to_host else _HOST_MEMORY,
            source_pitch=rows.source_pitch,
            target_kind=_HOST_MEMORY if to_host else _DEVICE_MEMORY,
            target_pitch=rows.target_pitch,
            width_bytes=rows.width,
            height=rows.n_rows,
        )
        if to_host:
            request.source_device, request.target_host = rows.source, rows.target
        else:
            request.source_host, request.target_device = rows.source, rows.target
        _check("cuMemcpy2DAsync", self._copy_2d(ctypes.byref(request), stream))


def _function(library: ctypes.CDLL, name: str, *argument_types: Any) -> Any:
    function = getattr(library, name)
    function.argtypes = argument_types
    function.restype = ctypes.c_int
    return function


def _check(call: str, code: int) -> None:
    if code != 0:
        raise RuntimeError(f"{call} failed with CUDA error {code}")
