"""The copies of the CUDA driver that torch does not offer: plain, 2D, and batches of both.

The calls keep the interpreter's lock: one lasts microseconds, a batch of 64 about a hundred, and
getting the lock back may last a thread's whole turn.
"""

import ctypes
import logging
from array import array
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from attrs import define, field

_log = logging.getLogger(__name__)

_HOST_OR_DEVICE: Final = 4  # CU_MEMORYTYPE_UNIFIED: the address says which
_POINTER: Final = 1
_SOURCE_IN_STREAM_ORDER: Final = 1
_OVERLAP_WITH_COMPUTE: Final = 1
_ROWS_BATCH_MAX: Final = 256


class Span(NamedTuple):
    """One contiguous copy: addresses and length in bytes."""

    target: int
    source: int
    size_bytes: int


class Rows(NamedTuple):
    """The shape of 2D copies: `n_rows` rows of `width` bytes, pitches are their distances."""

    target_pitch: int
    source_pitch: int
    width: int
    n_rows: int


class _Location(ctypes.Structure):
    """CUmemLocation."""

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


class _Operand(ctypes.Structure):
    """CUmemcpy3DOperand with a pointer."""

    _fields_ = (
        ("kind", ctypes.c_int),
        ("address", ctypes.c_uint64),
        ("row_length", ctypes.c_size_t),
        ("layer_height", ctypes.c_size_t),
        ("hint", _Location),
    )


class _RowsCopy(ctypes.Structure):
    """CUDA_MEMCPY3D_BATCH_OP; for pointers an element is a byte."""

    _fields_ = (
        ("source", _Operand),
        ("target", _Operand),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
        ("depth", ctypes.c_size_t),
        ("source_order", ctypes.c_int),
        ("flags", ctypes.c_uint),
    )


_WORDS: Final = ctypes.sizeof(_RowsCopy) // 8
_SOURCE_WORD: Final = (_RowsCopy.source.offset + _Operand.address.offset) // 8
_TARGET_WORD: Final = (_RowsCopy.target.offset + _Operand.address.offset) // 8


@define(eq=False)
class _RowsBatch:
    """Descriptors of one shape, made once: a call changes the addresses alone."""

    rows: Rows
    flags: int
    _words: memoryview = field(init=False)
    _first: Any = field(init=False)

    def __attrs_post_init__(self) -> None:
        rows = self.rows
        one = _RowsCopy(
            source=_Operand(kind=_POINTER, row_length=rows.source_pitch, layer_height=rows.n_rows),
            target=_Operand(kind=_POINTER, row_length=rows.target_pitch, layer_height=rows.n_rows),
            width=rows.width,
            height=rows.n_rows,
            depth=1,
            source_order=_SOURCE_IN_STREAM_ORDER,
            flags=self.flags,
        )
        memory = bytearray(bytes(one) * _ROWS_BATCH_MAX)
        self._words = memoryview(memory).cast("Q")
        self._first = (ctypes.c_char * len(memory)).from_buffer(memory)

    def filled(self, targets: Sequence[int], sources: Sequence[int]) -> Any:
        """The array for the driver, good until the next call."""
        end = len(targets) * _WORDS
        self._words[_SOURCE_WORD:end:_WORDS] = array("Q", sources)
        self._words[_TARGET_WORD:end:_WORDS] = array("Q", targets)
        return self._first


class CopyDriver:
    """Copies on streams (CUstream as int) of the context that is current now.

    Addresses are ints, of pinned host memory or of the device. A batch's copies may run in any
    order among themselves. `prefers_overlap`: the hint that batches leave the processors alone.
    Raises `RuntimeError` with the error's number when the driver refuses, `OSError` without one.
    """

    def __init__(self, *, prefers_overlap: bool = True, library: Any = None) -> None:
        library = library or ctypes.PyDLL("libcuda.so.1")
        u64, size, pointer = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p
        self._copy = _function(library, "cuMemcpyAsync", u64, u64, size, pointer)
        self._copy_2d = _function(library, "cuMemcpy2DAsync_v2", pointer, pointer)
        self._set_context = _function(library, "cuCtxSetCurrent", pointer)
        # The names without a version are CUDA 12.8's calls, which newer drivers keep.
        self._batch: Any = None
        if hasattr(library, "cuMemcpyBatchAsync"):
            self._batch = _function(library, "cuMemcpyBatchAsync", *[pointer] * 3, size, pointer,
                                    pointer, size, pointer, pointer)  # fmt: skip
        self._batch_3d: Any = None
        if hasattr(library, "cuMemcpy3DBatchAsync"):
            self._batch_3d = _function(library, "cuMemcpy3DBatchAsync", size, pointer, pointer,
                                       ctypes.c_ulonglong, pointer)  # fmt: skip
        flags = _OVERLAP_WITH_COMPUTE if prefers_overlap else 0
        self._flags = flags
        self._attributes = _BatchAttributes(source_order=_SOURCE_IN_STREAM_ORDER, flags=flags)
        self._attributes_from = size(0)
        self._failed_at = size(0)
        self._request = _Copy2d(source_kind=_HOST_OR_DEVICE, target_kind=_HOST_OR_DEVICE)
        self._rows_batches: dict[Rows, _RowsBatch] = {}
        context = pointer()
        current = _function(library, "cuCtxGetCurrent", pointer)
        _check("cuCtxGetCurrent", current(ctypes.byref(context)))
        self._context = context

    def make_current(self) -> None:
        """A thread that torch has not used on this device yet has no context."""
        _check("cuCtxSetCurrent", self._set_context(self._context))

    def copy(self, span: Span, stream: int) -> None:
        _check("cuMemcpyAsync", self._copy(span.target, span.source, span.size_bytes, stream))

    def copy_batch(self, spans: Sequence[Span], stream: int) -> None:
        """All in one call; one by one where the driver has no such call."""
        if self._batch is not None:
            n = len(spans)
            words = ctypes.c_uint64 * n
            code = self._batch(
                words(*[span.target for span in spans]),
                words(*[span.source for span in spans]),
                words(*[span.size_bytes for span in spans]),
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

    def copy_rows(
        self, rows: Rows, targets: Sequence[int], sources: Sequence[int], stream: int
    ) -> None:
        """A call each."""
        request = self._request
        request.source_pitch, request.target_pitch = rows.source_pitch, rows.target_pitch
        request.width_bytes, request.height = rows.width, rows.n_rows
        at = ctypes.byref(request)
        for target, source in zip(targets, sources, strict=True):
            request.source_device, request.target_device = source, target
            _check("cuMemcpy2DAsync", self._copy_2d(at, stream))

    def copy_rows_batch(
        self, rows: Rows, targets: Sequence[int], sources: Sequence[int], stream: int
    ) -> None:
        """All in one call (two beyond 256); a call each where the driver has no such call."""
        for first in range(0, len(targets), _ROWS_BATCH_MAX):
            some_targets = targets[first : first + _ROWS_BATCH_MAX]
            some_sources = sources[first : first + _ROWS_BATCH_MAX]
            if not self._copied_rows(rows, some_targets, some_sources, stream):
                self.copy_rows(rows, some_targets, some_sources, stream)

    def _copied_rows(
        self, rows: Rows, targets: Sequence[int], sources: Sequence[int], stream: int
    ) -> bool:
        if self._batch_3d is None:
            return False
        batch = self._rows_batches.get(rows)
        if batch is None:
            batch = self._rows_batches[rows] = _RowsBatch(rows, self._flags)
        array_at = batch.filled(targets, sources)
        failed_at = ctypes.byref(self._failed_at)
        code = self._batch_3d(len(targets), array_at, failed_at, 0, stream)
        if code == 0:
            return True
        _log.warning("no batched 2D copies here (CUDA error %d): they go one by one", code)
        self._batch_3d = None
        return False


def _function(library: Any, name: str, *argument_types: Any) -> Any:
    function = getattr(library, name)
    function.argtypes = argument_types
    function.restype = ctypes.c_int
    return function


def _check(call: str, code: int) -> None:
    if code != 0:
        raise RuntimeError(f"{call} failed with CUDA error {code}")
