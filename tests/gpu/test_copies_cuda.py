"""The same suite on a real CUDA device, and what only a real one can show."""

import gc
import random
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from kvlift.core.ids import Ticket
from kvlift.core.landed import RestoreEnded
from kvlift.effects.copies_cuda import CudaCopies, CudaOptions, LayeredBy
from kvlift.effects.copies_driver import CopyDriver
from kvlift.effects.copies_jobs import CopyJob, Direction
from kvlift.effects.device_memory import BlockMemory, LayeredMemory, PagedMemory
from kvlift.effects.host_mapping import CudaHostRegistry
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


def staged(layout: PageLayout, **options: object) -> CopiesWorld:
    return layered(layout, layered_by=LayeredBy.STAGED, **options)


def rows(layout: PageLayout, **options: object) -> CopiesWorld:
    return layered(layout, layered_by=LayeredBy.ROWS, **options)


def block_world(**options: object) -> CopiesWorld:
    blocks = torch.zeros((N_DEVICE, 12288), dtype=torch.uint8, device="cuda")
    chunk_bytes = 4 * 12288
    return world_with(BlockMemory(blocks), CudaOptions(chunk_bytes=chunk_bytes, **options))  # type: ignore[arg-type]


WORLDS: dict[str, Callable[[], CopiesWorld]] = {
    "staged-mha": lambda: staged(MHA),
    "staged-mha-one-by-one": lambda: staged(MHA, batch_below_bytes=0),
    "staged-mla-fp8": lambda: staged(MLA, n_buffers=3),
    "staged-odd-bytes": lambda: staged(ODD),
    "rows-mha": lambda: rows(MHA),
    "rows-mha-one-by-one": lambda: rows(MHA, batch_rows=False),
    "rows-mha-two-lanes": lambda: rows(MHA, n_lanes=2),
    "rows-mha-taking-turns": lambda: rows(MHA, takes_turns=True),
    "rows-mha-two-lanes-one-by-one": lambda: rows(MHA, n_lanes=2, batch_rows=False),
    "rows-mla-fp8": lambda: rows(MLA, prefers_overlap=False),
    "rows-odd-bytes": lambda: rows(ODD),
    "blocks": block_world,
    "blocks-two-lanes": lambda: block_world(n_lanes=2),
    "blocks-one-by-one": lambda: block_world(batch_below_bytes=0),
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


@pytest.mark.parametrize("build", [staged, rows, lambda layout: rows(layout, n_lanes=2)])
def test_many_rounds_with_both_directions_keep_their_bytes(
    build: Callable[[PageLayout], CopiesWorld],
) -> None:
    rng = random.Random(11)
    world = build(MHA)
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


@pytest.mark.parametrize("build", [staged, rows])
def test_without_batched_copies_pages_go_one_by_one(
    build: Callable[[PageLayout], CopiesWorld],
) -> None:
    rng = random.Random(3)
    world = build(MHA)
    driver = world.copies._engine._driver  # type: ignore[attr-defined]
    assert isinstance(driver, CopyDriver)
    driver._batch = driver._batch_3d = lambda *arguments: 801
    contents = fill_host(world, range(8), rng)
    world.copies.start_restore(Ticket(1), [3, 1, 7, 5], [0, 1, 2, 3])
    collected(world, 1)
    assert [world.read_device(page) for page in range(4)] == [contents[i] for i in (3, 1, 7, 5)]
    assert None in (driver._batch, driver._batch_3d)
    assert world.copies.close(10.0)


@pytest.mark.parametrize("build", [staged, rows])
def test_this_driver_takes_batches(build: Callable[[PageLayout], CopiesWorld]) -> None:
    """Says so when the measured way is not the one that runs: the way without is slower."""
    world = build(MHA)
    fill_host(world, range(4), random.Random(4))
    world.copies.start_restore(Ticket(1), [3, 1, 2, 0], [0, 5, 2, 3])
    collected(world, 1)
    driver = world.copies._engine._driver  # type: ignore[attr-defined]
    assert driver._batch is not None
    assert driver._batch_3d is not None
    assert world.copies.close(10.0)


def test_pools_that_are_lost_can_be_pinned_again_at_their_addresses() -> None:
    addresses = set()
    for _ in range(20):
        pool = HostPool(N_HOST, 12288, pinned=True)
        addresses.add(pool.address)
        del pool
        gc.collect()
    assert len(addresses) < 20


def test_a_refused_registration_does_not_spoil_the_next_launch() -> None:
    registry = CudaHostRegistry()
    pool = HostPool(N_HOST, 12288, pinned=True)
    assert registry.register(pool.address, 4096) == 712
    assert int(torch.ones(8, device="cuda").sum()) == 8
    assert pool.close()


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
