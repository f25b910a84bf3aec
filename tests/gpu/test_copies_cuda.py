"""The same suite on a real CUDA device, and what only a real one can show."""

import random
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from kvlift.core.ids import Ticket
from kvlift.core.landed import RestoreEnded
from kvlift.effects import copies_engine
from kvlift.effects.copies_cuda import CudaCopies, CudaOptions, LayeredBy
from kvlift.effects.copies_jobs import CopyJob, Direction
from kvlift.effects.device_memory import BlockMemory, LayeredMemory, PagedMemory
from kvlift.effects.host_pool import HostPool
from kvlift.effects.layout import PageLayout
from tests.effects.copies_conformance import (
    CHECKS,
    CopiesWorld,
    bad_jobs_raise_and_start_nothing,
    collected,
    fill_device,
    fill_host,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MHA = PageLayout(
    kind="mha", n_layers=4, n_kv_heads=2, head_dim=64, dtype="bfloat16", page_tokens=16
)
MLA = PageLayout(
    kind="mla", n_layers=3, n_kv_heads=1, head_dim=576, dtype="float8_e4m3fn", page_tokens=16
)
ODD = PageLayout(
    kind="mla", n_layers=3, n_kv_heads=1, head_dim=5, dtype="float8_e4m3fn", page_tokens=3
)
N_HOST, N_DEVICE = 40, 33


def world_with(memory: PagedMemory, options: CudaOptions) -> CopiesWorld:
    host = HostPool(N_HOST, memory.page_bytes, pinned=True)
    copies = CudaCopies(host, memory, options=options)

    def read_device(page: int) -> bytes:
        into = bytearray(memory.page_bytes)
        memory.read_page(page, memoryview(into))
        return bytes(into)

    def write_host(page: int, content: bytes) -> None:
        host.page_view(page)[:] = content

    return CopiesWorld(
        copies,
        host.n_pages,
        memory.n_pages,
        memory.page_bytes,
        write_host,
        lambda page: bytes(host.page_view(page)),
        lambda page, content: memory.write_page(page, memoryview(content)),
        read_device,
        lambda: time.sleep(0.001),
    )


def layered(layout: PageLayout, **options: object) -> CopiesWorld:
    chunk_bytes = 4 * layout.page_bytes
    memory = LayeredMemory.allocate(layout, N_DEVICE, "cuda")
    return world_with(memory, CudaOptions(chunk_bytes=chunk_bytes, **options))  # type: ignore[arg-type]


def block_world() -> CopiesWorld:
    blocks = torch.zeros((N_DEVICE, 12288), dtype=torch.uint8, device="cuda")
    return world_with(BlockMemory(blocks), CudaOptions())


WORLDS: dict[str, Callable[[], CopiesWorld]] = {
    "staged-mha": lambda: layered(MHA),
    "staged-mha-one-by-one": lambda: layered(MHA, batch_below_bytes=0),
    "staged-mla-fp8": lambda: layered(MLA, n_buffers=3),
    "staged-odd-bytes": lambda: layered(ODD),
    "rows-mha": lambda: layered(MHA, layered_by=LayeredBy.ROWS),
    "blocks": block_world,
}


@pytest.fixture(params=sorted(WORLDS))
def world(request: pytest.FixtureRequest) -> Iterator[CopiesWorld]:
    built = WORLDS[request.param]()
    yield built
    assert built.copies.close(10.0)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_copies_conform(world: CopiesWorld, check: Callable[[CopiesWorld], None]) -> None:
    check(world)


def test_bad_jobs_raise_and_start_nothing(world: CopiesWorld) -> None:
    bad_jobs_raise_and_start_nothing(world)


def test_many_rounds_with_both_directions_keep_their_bytes() -> None:
    rng = random.Random(11)
    world = layered(MHA)
    copies = world.copies
    assert isinstance(copies, CudaCopies)
    for round_number in range(30):
        up, down = rng.sample(range(N_DEVICE), 16), rng.sample(range(N_HOST), 16)
        contents = fill_host(world, down[:8], rng)
        mirrored = fill_device(world, up[8:], rng)
        ticket = round_number * 10
        jobs = [
            CopyJob(Ticket(ticket), Direction.RESTORE, tuple(down[:3]), tuple(up[:3])),
            CopyJob(Ticket(ticket + 1), Direction.MIRROR, tuple(down[8:]), tuple(up[8:])),
            CopyJob(Ticket(ticket + 2), Direction.RESTORE, tuple(down[3:8]), tuple(up[3:8])),
        ]
        copies.start_together(jobs)
        collected(world, 3)
        assert [world.read_device(page) for page in up[:8]] == contents
        assert [world.read_host(page) for page in down[8:]] == mirrored
    assert copies.close(10.0)


def test_a_mirror_is_ordered_behind_the_kernels_that_fill_its_pages() -> None:
    blocks = torch.zeros((4, 4 << 20), dtype=torch.uint8, device="cuda")
    world = world_with(BlockMemory(blocks), CudaOptions())
    torch.cuda._sleep(50_000_000)  # type: ignore[no-untyped-call]
    blocks.fill_(7)
    world.copies.start_mirror(Ticket(1), [2], [0])
    collected(world, 1)
    assert world.read_host(0) == bytes([7]) * (4 << 20)
    assert world.copies.close(10.0)


def test_a_landing_wakes_a_sleeping_host() -> None:
    memory = LayeredMemory.allocate(MHA, N_DEVICE, "cuda")
    host = HostPool(N_HOST, memory.page_bytes, pinned=True)
    woken = threading.Event()
    copies = CudaCopies(host, memory, on_landed=woken.set)
    copies.start_restore(Ticket(1), [0, 1], [0, 1])
    assert woken.wait(10)
    assert copies.landed() == [RestoreEnded(Ticket(1), 2)]
    assert copies.close(10.0)


def test_a_host_pool_that_is_not_pinned_is_refused() -> None:
    memory = LayeredMemory.allocate(MHA, N_DEVICE, "cuda")
    with pytest.raises(ValueError, match="pinned"):
        CudaCopies(HostPool(N_HOST, memory.page_bytes, pinned=False), memory)


def test_without_batched_copies_pages_go_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(3)
    world = layered(MHA)
    driver = world.copies._engine._driver  # type: ignore[attr-defined]
    assert isinstance(driver, copies_engine._Driver)
    driver._batch = lambda *arguments: 801
    contents = fill_host(world, range(8), rng)
    world.copies.start_restore(Ticket(1), [3, 1, 7, 5], [0, 1, 2, 3])
    collected(world, 1)
    assert [world.read_device(page) for page in range(4)] == [contents[i] for i in (3, 1, 7, 5)]
    assert driver._batch is None
    assert world.copies.close(10.0)


def test_pages_written_from_many_threads_keep_their_bytes() -> None:
    memory = LayeredMemory.allocate(MHA, N_DEVICE, "cuda")
    contents = [random.Random(page).randbytes(memory.page_bytes) for page in range(N_DEVICE)]

    def write(start: int) -> None:
        for page in range(start, N_DEVICE, 4):
            memory.write_page(page, memoryview(contents[page]))

    threads = [threading.Thread(target=write, args=(start,)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for page in range(N_DEVICE):
        into = bytearray(memory.page_bytes)
        memory.read_page(page, memoryview(into))
        assert bytes(into) == contents[page]
