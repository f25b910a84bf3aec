"""The CUDA driver's calls as the driver reads them: a simulated library decodes what it is given.

Offsets are written out here from the CUDA driver API's structures, apart from the code's own.
"""

import ctypes
import random
import struct
from collections.abc import Callable
from typing import Any

import pytest

from kvlift.effects.copies_driver import CopyDriver, Rows, Span

_OPERAND = "iiQQQii"  # type, padding, ptr, rowLength, layerHeight, locHint
_ROWS_COPY = struct.Struct(f"<{_OPERAND}{_OPERAND}QQQiI")
_COPY_2D = struct.Struct("<QQi4xQQQQ QQi4xQQQQ QQ")
_U64 = ctypes.c_uint64
_SIZE = ctypes.c_size_t
_POINTER = ctypes.c_void_p


class SimulatedCuda:
    """libcuda's copies on host memory; calls named in `refused` answer 801 (not supported)."""

    def __init__(self, *refused: str) -> None:
        self.calls: list[str] = []
        self.hints: set[int] = set()
        self._offer("cuMemcpyAsync", refused, self._copy, _U64, _U64, _SIZE, _POINTER)
        self._offer("cuMemcpy2DAsync_v2", refused, self._copy_2d, _POINTER, _POINTER)
        self._offer("cuCtxSetCurrent", refused, lambda _: 0, _POINTER)
        self._offer("cuCtxGetCurrent", refused, lambda _: 0, _POINTER)
        self._offer("cuMemcpyBatchAsync", refused, self._batch, _POINTER, _POINTER, _POINTER,
                    _SIZE, _POINTER, _POINTER, _SIZE, _POINTER, _POINTER)  # fmt: skip
        self._offer("cuMemcpy3DBatchAsync", refused, self._batch_3d, _SIZE, _POINTER, _POINTER,
                    ctypes.c_ulonglong, _POINTER)  # fmt: skip

    def _offer(
        self, name: str, refused: tuple[str, ...], answer: Callable[..., int], *types: Any
    ) -> None:
        def call(*arguments: Any) -> int:
            self.calls.append(name)
            return 801 if name in refused else answer(*arguments)

        setattr(self, name, ctypes.PYFUNCTYPE(ctypes.c_int, *types)(call))

    def _copy(self, target: int, source: int, size: int, stream: int) -> int:
        ctypes.memmove(target, source, size)
        return 0

    def _batch(
        self, targets: int, sources: int, sizes: int, n: int, attributes: int, first: int,
        n_attributes: int, failed: int, stream: int,
    ) -> int:  # fmt: skip
        order, *_, flags = struct.unpack("<iiiiiI", ctypes.string_at(attributes, 24))
        assert (order, n_attributes, stream) == (1, 1, 77)
        assert ctypes.string_at(first, 8) == bytes(8)
        self.hints.add(flags)
        columns = [struct.unpack(f"<{n}Q", ctypes.string_at(at, 8 * n))
                   for at in (targets, sources, sizes)]  # fmt: skip
        for target, source, size in zip(*columns, strict=True):
            ctypes.memmove(target, source, size)
        return 0

    def _batch_3d(self, n: int, ops: int, failed: int, flags: int, stream: int) -> int:
        assert (flags, stream) == (0, 77)
        for i in range(n):
            fields = _ROWS_COPY.unpack(ctypes.string_at(ops + 112 * i, 112))
            source_kind, _, source, source_pitch, source_height, *_ = fields
            target_kind, _, target, target_pitch, target_height, *_ = fields[7:]
            width, height, depth, order, hint = fields[14:]
            assert (source_kind, target_kind, depth, order) == (1, 1, 1, 1)
            assert source_height >= height
            assert target_height >= height
            assert min(source_pitch, target_pitch) >= width
            self.hints.add(hint)
            _move(target, target_pitch, source, source_pitch, width, height)
        return 0

    def _copy_2d(self, request: int, stream: int) -> int:
        fields = _COPY_2D.unpack(ctypes.string_at(request, _COPY_2D.size))
        *source_from, source_kind, _, source, _, source_pitch = fields[:7]
        *target_from, target_kind, _, target, _, target_pitch, width, height = fields[7:]
        assert (source_from, target_from) == ([0, 0], [0, 0])
        assert (source_kind, target_kind) == (4, 4)
        _move(target, target_pitch, source, source_pitch, width, height)
        return 0


def _move(
    target: int, target_pitch: int, source: int, source_pitch: int, width: int, n_rows: int
) -> None:
    for row in range(n_rows):
        ctypes.memmove(target + row * target_pitch, source + row * source_pitch, width)


ROWS = Rows(target_pitch=96, source_pitch=16, width=12, n_rows=5)


def copied_rows(driver: CopyDriver, n: int, rng: random.Random) -> tuple[bytes, bytes]:
    """What `n` 2D copies made of zeros, and what they should have made."""
    slots = rng.sample(range(8 * n), n)
    source = rng.randbytes(n * 80)
    at_source = ctypes.create_string_buffer(source, len(source))
    # Slots of 12 bytes in rows of 96, five rows a slot; eight slots beside each other.
    got = ctypes.create_string_buffer(n * 5 * 96)
    expected = bytearray(n * 5 * 96)
    offsets = [(slot // 8) * 480 + (slot % 8) * 12 for slot in slots]
    for i, offset in enumerate(offsets):
        for row in range(5):
            begin = offset + row * 96
            expected[begin : begin + 12] = source[i * 80 + row * 16 :][:12]
    base = ctypes.addressof(got)
    driver.copy_rows_batch(
        ROWS,
        [base + offset for offset in offsets],
        [ctypes.addressof(at_source) + i * 80 for i in range(n)],
        77,
    )
    return got.raw, bytes(expected)


@pytest.mark.parametrize(("n", "n_calls"), [(1, 1), (9, 1), (256, 1), (257, 2)])
def test_batched_rows_reach_their_places_in_one_call(n: int, n_calls: int) -> None:
    cuda = SimulatedCuda()
    got, expected = copied_rows(CopyDriver(library=cuda), n, random.Random(n))
    assert got == expected
    assert cuda.calls.count("cuMemcpy3DBatchAsync") == n_calls
    assert cuda.calls.count("cuMemcpy2DAsync_v2") == 0


def test_descriptors_are_used_again_with_other_addresses() -> None:
    cuda = SimulatedCuda()
    driver = CopyDriver(library=cuda)
    for n in (7, 3, 12):
        got, expected = copied_rows(driver, n, random.Random(n))
        assert got == expected


def test_a_driver_without_batched_rows_is_asked_once_and_then_gets_a_call_each() -> None:
    cuda = SimulatedCuda("cuMemcpy3DBatchAsync")
    driver = CopyDriver(library=cuda)
    for seed in (1, 2):
        got, expected = copied_rows(driver, 6, random.Random(seed))
        assert got == expected
    assert cuda.calls.count("cuMemcpy3DBatchAsync") == 1
    assert cuda.calls.count("cuMemcpy2DAsync_v2") == 12


@pytest.mark.parametrize("refused", [(), ("cuMemcpyBatchAsync",)])
def test_batched_spans_reach_their_places_with_and_without_the_call(
    refused: tuple[str, ...],
) -> None:
    cuda = SimulatedCuda(*refused)
    driver = CopyDriver(library=cuda)
    content = random.Random(5).randbytes(300)
    source, target = ctypes.create_string_buffer(content, 300), ctypes.create_string_buffer(300)
    at_source, at_target = ctypes.addressof(source), ctypes.addressof(target)
    cuts = [(0, 40), (40, 1), (41, 259)]
    driver.copy_batch([Span(at_target + at, at_source + at, n) for at, n in cuts], 77)
    assert target.raw == content
    assert cuda.calls.count("cuMemcpyAsync") == (3 if refused else 0)


@pytest.mark.parametrize("prefers_overlap", [True, False])
def test_the_hint_to_spare_the_processors_goes_with_every_batch(*, prefers_overlap: bool) -> None:
    cuda = SimulatedCuda()
    driver = CopyDriver(library=cuda, prefers_overlap=prefers_overlap)
    copied_rows(driver, 2, random.Random(0))
    memory = ctypes.create_string_buffer(8)
    at = ctypes.addressof(memory)
    driver.copy_batch([Span(at, at + 4, 2), Span(at + 2, at + 6, 2)], 77)
    assert cuda.hints == {int(prefers_overlap)}


def test_a_refused_copy_is_said_with_its_error() -> None:
    driver = CopyDriver(library=SimulatedCuda("cuMemcpy3DBatchAsync", "cuMemcpy2DAsync_v2"))
    with pytest.raises(RuntimeError, match="cuMemcpy2DAsync failed with CUDA error 801"):
        copied_rows(driver, 2, random.Random(0))
