"""Pages on both sides of the copies, fresh random bytes in them, and how one copy is timed."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch
from attrs import evolve, frozen

from kvlift.core.ids import Ticket
from kvlift.core.landed import MirrorEnded, RestoreEnded
from kvlift.effects.copies_cpu import CpuCopies
from kvlift.effects.copies_cuda import CudaCopies, CudaOptions
from kvlift.effects.copies_jobs import Direction
from kvlift.effects.device_memory import BlockMemory, LayeredMemory, PagedMemory
from kvlift.effects.host_pool import HostPool
from kvlift.effects.layout import PageLayout

DEVICE: Final = "cuda" if torch.cuda.is_available() else "cpu"
MIB: Final = 1 << 20
DEADLINE_S: Final = 30.0

PAGE_8MIB: Final = PageLayout(
    kind="mha", n_layers=32, n_kv_heads=8, head_dim=128, dtype="bfloat16", page_tokens=64
)
PAGE_1MIB: Final = evolve(PAGE_8MIB, page_tokens=8)
LAYOUTS: Final[dict[str, tuple[PageLayout, int]]] = {
    "8MiB": (PAGE_8MIB, 128),
    "1MiB": (PAGE_1MIB, 1024),
}

AnyCopies = CudaCopies | CpuCopies


@frozen
class Setup:
    """Pages on both sides, and the shuffled places that the timed copies use."""

    host: HostPool
    memory: PagedMemory
    host_pages: tuple[int, ...]
    device_pages: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return len(self.host_pages) * self.memory.page_bytes


@contextmanager
def layered_setup(layout: PageLayout, n_pages: int) -> Iterator[Setup]:
    with setup_around(LayeredMemory.allocate(layout, n_pages, DEVICE)) as setup:
        yield setup


@contextmanager
def setup_around(memory: PagedMemory) -> Iterator[Setup]:
    host = HostPool(memory.n_pages, memory.page_bytes)
    try:
        yield Setup(host, memory, shuffled(memory.n_pages, 1), shuffled(memory.n_pages, 2))
    finally:
        synchronize()
        host.close()


@contextmanager
def opened(setup: Setup, options: CudaOptions) -> Iterator[AnyCopies]:
    copies = copies_of(setup, options)
    try:
        yield copies
    finally:
        if not copies.close(DEADLINE_S):
            raise RuntimeError("copies still run after the deadline")


def copies_of(setup: Setup, options: CudaOptions) -> AnyCopies:
    """Of CUDA with these options, or without a GPU the CPU's, by one thread."""
    if DEVICE == "cpu":
        return CpuCopies(setup.host, setup.memory)
    return CudaCopies(setup.host, setup.memory, options=options)


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def shuffled(n: int, seed: int) -> tuple[int, ...]:
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    return tuple(int(page) for page in order)


_next_ticket = iter(range(1 << 60))


def new_ticket() -> Ticket:
    return Ticket(next(_next_ticket))


def start(copies: AnyCopies, setup: Setup, direction: Direction) -> None:
    if direction is Direction.RESTORE:
        copies.start_restore(new_ticket(), setup.host_pages, setup.device_pages)
    else:
        copies.start_mirror(new_ticket(), setup.device_pages, setup.host_pages)


def finish(copies: AnyCopies, n_jobs: int, n_pages: int) -> None:
    """Poll as a tick would, without a pause; every job must be whole."""
    end = time.monotonic() + DEADLINE_S
    n_ended = 0
    while n_ended < n_jobs:
        for report in copies.landed():
            assert isinstance(report, RestoreEnded | MirrorEnded)
            if report.n_pages != n_pages:
                raise RuntimeError(f"a copy ended short: {report}")
            n_ended += 1
        if DEVICE == "cpu":
            time.sleep(0.0001)
        if time.monotonic() > end:
            raise RuntimeError("a copy did not land within the deadline")


def randomise(tensor: torch.Tensor) -> None:
    tensor.copy_(torch.randint(0, 256, tensor.shape, dtype=torch.uint8, device=DEVICE))


def on_device(memory: PagedMemory) -> list[torch.Tensor]:
    """Every piece of every page, uint8 `[n_pages, piece_bytes]`, in host order."""
    return [memory.blocks] if isinstance(memory, BlockMemory) else list(memory.slices)


def check_bytes(copies: AnyCopies, setup: Setup, direction: Direction) -> None:
    """Fresh random bytes on both sides; every page must be right after one copy of all."""
    randomise(setup.host.tensor())
    pieces = on_device(setup.memory)
    for piece in pieces:
        randomise(piece)
    synchronize()
    start(copies, setup, direction)
    finish(copies, 1, len(setup.host_pages))
    synchronize()
    host_index = torch.tensor(setup.host_pages, device=DEVICE)
    device_index = torch.tensor(setup.device_pages, device=DEVICE)
    pages = setup.host.tensor().to(DEVICE).index_select(0, host_index)
    offset = 0
    for i, piece in enumerate(pieces):
        width = piece.shape[1]
        expected = pages[:, offset : offset + width]
        if not torch.equal(piece.index_select(0, device_index), expected):
            raise RuntimeError(f"wrong bytes after a {direction.value}, piece {i}")
        offset += width


def timed_copy(copies: AnyCopies, setup: Setup, direction: Direction) -> tuple[float, float]:
    """Seconds from the call to the report, and the submission's processor seconds."""
    begin = time.perf_counter()
    cpu_begin = time.thread_time()
    start(copies, setup, direction)
    cpu_s = time.thread_time() - cpu_begin
    finish(copies, 1, len(setup.host_pages))
    return time.perf_counter() - begin, cpu_s


def timed_ceiling(setup: Setup, flat: torch.Tensor, direction: Direction) -> float:
    """Seconds of one contiguous pinned copy of the same size, timed in the same way."""
    host = setup.host.tensor().view(-1)
    if DEVICE == "cpu":
        begin = time.perf_counter()
        flat.copy_(host) if direction is Direction.RESTORE else host.copy_(flat)
        return time.perf_counter() - begin
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    begin = time.perf_counter()
    if direction is Direction.RESTORE:
        flat.copy_(host, non_blocking=True)
    else:
        host.copy_(flat, non_blocking=True)
    event.record()
    while not event.query():  # type: ignore[no-untyped-call]
        pass
    return time.perf_counter() - begin
