"""Copies, host pool, layouts and device memory, on the CPU and on a shuffled simulated GPU."""

import itertools
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlift.core.ids import Ticket
from kvlift.core.landed import MirrorEnded, RestoreEnded
from kvlift.effects import copies_routes
from kvlift.effects.copies_cpu import CpuCopies
from kvlift.effects.copies_cuda import CudaCopies, CudaOptions, LayeredBy
from kvlift.effects.copies_engine import Lane
from kvlift.effects.copies_jobs import (
    CopyJob,
    Direction,
    chunk_sizes,
    merged_pairs,
    merged_runs,
    ramped,
    tapered,
)
from kvlift.effects.copies_scatter import HAS_TRITON
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
from tests.effects.shuffled_engine import ShuffledEngine

MHA = PageLayout(kind="mha", n_layers=3, n_kv_heads=2, head_dim=8, dtype="bfloat16", page_tokens=4)
MLA = PageLayout(
    kind="mla", n_layers=2, n_kv_heads=1, head_dim=5, dtype="float8_e4m3fn", page_tokens=3
)
N_HOST, N_DEVICE = 23, 19


def uneven(layout: PageLayout, n_pages: int) -> LayeredMemory:
    """Tensors of the engine's own, at odd distances, with a token left over."""
    n_tokens = n_pages * layout.page_tokens + 1
    shape = (n_tokens, layout.n_kv_heads, layout.head_dim)
    keep = [torch.zeros(shape, dtype=layout.torch_dtype) for _ in range(layout.n_slices)]
    if layout.n_parts == 1:
        return LayeredMemory(layout, keep)
    return LayeredMemory(layout, keep[0::2], keep[1::2])


def blocks(n_pages: int) -> BlockMemory:
    return BlockMemory(torch.zeros((n_pages, 96), dtype=torch.uint8))


def world_around(
    copies: CpuCopies | CudaCopies,
    host: HostPool,
    memory: PagedMemory,
    settle: Callable[[], None],
) -> CopiesWorld:
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
        settle,
    )


def cpu_world(memory: PagedMemory, n_threads: int = 1) -> CopiesWorld:
    host = HostPool(N_HOST, memory.page_bytes, pinned=False)
    copies = CpuCopies(host, memory, n_threads=n_threads)
    return world_around(copies, host, memory, lambda: time.sleep(0.002))


def pipelined_world(
    memory: PagedMemory,
    *,
    layered_by: LayeredBy = LayeredBy.STAGED,
    n_lanes: int = 1,
    chunk_pages: int = 4,
    n_buffers: int = 2,
    in_flight_pages: int = 1 << 20,
    takes_turns: bool = False,
    seed: int = 0,
    fail_at: int | None = None,
) -> tuple[CopiesWorld, ShuffledEngine]:
    host = HostPool(N_HOST, memory.page_bytes, pinned=False)
    engine = ShuffledEngine(memory, seed, fail_at)
    options = CudaOptions(
        layered_by=layered_by,
        n_lanes=n_lanes,
        chunk_bytes=chunk_pages * memory.page_bytes,
        n_buffers=n_buffers,
        takes_turns=takes_turns,
        in_flight_bytes_max=in_flight_pages * memory.page_bytes,
    )
    copies = CudaCopies(host, memory, options=options, engine=engine)
    return world_around(copies, host, memory, engine.run), engine


# How pages reach layers (None: pages that are contiguous on the device), and over how many lanes.
WAYS = [(LayeredBy.STAGED, 1), (LayeredBy.ROWS, 1), (LayeredBy.ROWS, 2), (None, 1), (None, 2)]


def memory_for(way: LayeredBy | None) -> PagedMemory:
    return blocks(N_DEVICE) if way is None else LayeredMemory.allocate(MHA, N_DEVICE)


WORLDS: dict[str, Callable[[], CopiesWorld]] = {
    "cpu-mha": lambda: cpu_world(LayeredMemory.allocate(MHA, N_DEVICE)),
    "cpu-mla-two-threads": lambda: cpu_world(uneven(MLA, N_DEVICE), n_threads=2),
    "cpu-blocks": lambda: cpu_world(blocks(N_DEVICE)),
    "staged-mha": lambda: pipelined_world(LayeredMemory.allocate(MHA, N_DEVICE))[0],
    "staged-mla": lambda: pipelined_world(uneven(MLA, N_DEVICE), n_buffers=3, seed=5)[0],
    "rows-mha": lambda: pipelined_world(
        LayeredMemory.allocate(MHA, N_DEVICE), layered_by=LayeredBy.ROWS
    )[0],
    "rows-mha-two-lanes": lambda: pipelined_world(
        LayeredMemory.allocate(MHA, N_DEVICE), layered_by=LayeredBy.ROWS, n_lanes=2, seed=2
    )[0],
    "blocks": lambda: pipelined_world(blocks(N_DEVICE), seed=3)[0],
    "rows-taking-turns": lambda: pipelined_world(
        LayeredMemory.allocate(MHA, N_DEVICE), layered_by=LayeredBy.ROWS, takes_turns=True, seed=6
    )[0],
    "blocks-two-lanes": lambda: pipelined_world(blocks(N_DEVICE), n_lanes=2, seed=4)[0],
}


@pytest.fixture(params=sorted(WORLDS))
def world(request: pytest.FixtureRequest) -> Iterator[CopiesWorld]:
    built = WORLDS[request.param]()
    yield built
    built.settle()
    assert built.copies.close(5.0)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_copies_conform(world: CopiesWorld, check: Callable[[CopiesWorld], None]) -> None:
    check(world)


def test_bad_jobs_raise_and_start_nothing(world: CopiesWorld) -> None:
    bad_jobs_raise_and_start_nothing(world)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(("way", "n_lanes"), WAYS)
def test_every_order_that_streams_allow_gives_the_right_bytes(
    seed: int, way: LayeredBy | None, n_lanes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    memory = memory_for(way)
    # So that chunks of several sizes come up, as with real pages.
    monkeypatch.setattr(copies_routes, "TAPER_BYTES", rng.choice([1, 2]) * memory.page_bytes)
    monkeypatch.setattr(copies_routes, "RAMP_BYTES", rng.choice([1, 2]) * memory.page_bytes)
    world, engine = pipelined_world(
        memory,
        layered_by=way or LayeredBy.AUTO,
        n_lanes=n_lanes,
        chunk_pages=rng.choice([2, 3, 4]),
        seed=seed,
    )
    held_up = rng.sample(range(N_DEVICE), 12)
    fill_device(world, range(N_DEVICE), rng)
    contents = fill_host(world, range(N_HOST), rng)
    expected: dict[int, bytes] = {}
    jobs: list[CopyJob] = []
    while held_up:
        pages = tuple(held_up.pop() for _ in range(min(len(held_up), rng.choice([1, 2, 5]))))
        host_pages = tuple(rng.sample(range(N_HOST), len(pages)))
        jobs.append(CopyJob(Ticket(len(jobs)), Direction.RESTORE, host_pages, pages))
        expected |= {page: contents[host] for page, host in zip(pages, host_pages, strict=True)}
    copies = world.copies
    assert isinstance(copies, CudaCopies)
    copies.start_together(jobs[::2])
    engine.run(rng.randrange(20))
    copies.start_together(jobs[1::2])
    ended: set[Ticket] = set()
    while len(ended) < len(jobs):
        engine.run(1)
        for report in copies.landed():
            assert isinstance(report, RestoreEnded)
            job = jobs[report.ticket]
            assert report.n_pages == job.n_pages
            for page in job.device_pages:
                assert world.read_device(page) == expected[page]
            ended.add(report.ticket)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("way", "n_lanes"), WAYS)
def test_mirrors_and_restores_beside_each_other_keep_their_bytes(
    seed: int, way: LayeredBy | None, n_lanes: int
) -> None:
    rng = random.Random(seed)
    world, engine = pipelined_world(
        memory_for(way),
        layered_by=way or LayeredBy.AUTO,
        n_lanes=n_lanes,
        chunk_pages=3,
        seed=seed,
    )
    down = fill_device(world, range(9), rng)
    up = fill_host(world, range(9, 18), rng)
    world.copies.start_mirror(Ticket(1), range(9), range(9))
    world.copies.start_restore(Ticket(2), range(9, 18), range(9, 18))
    engine.run()
    assert set(world.copies.landed()) == {MirrorEnded(Ticket(1), 9), RestoreEnded(Ticket(2), 9)}
    assert [world.read_host(page) for page in range(9)] == down
    assert [world.read_device(page) for page in range(9, 18)] == up


def test_nothing_lands_before_the_device_has_done_it() -> None:
    world, engine = pipelined_world(LayeredMemory.allocate(MHA, N_DEVICE))
    world.copies.start_restore(Ticket(1), [0, 1], [0, 1])
    assert world.copies.landed() == []
    assert not world.copies.close(0.01)
    engine.run()
    assert world.copies.landed() == [RestoreEnded(Ticket(1), 2)]
    assert world.copies.close(0.01)


def test_an_earlier_job_of_a_submission_is_ready_before_a_later_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = LayeredMemory.allocate(MHA, N_DEVICE)
    monkeypatch.setattr(copies_routes, "TAPER_BYTES", memory.page_bytes)
    world, engine = pipelined_world(memory)
    copies = world.copies
    assert isinstance(copies, CudaCopies)
    pages = tuple(range(N_DEVICE))
    copies.start_together(
        [
            CopyJob(Ticket(1), Direction.RESTORE, pages[:2], pages[:2]),
            CopyJob(Ticket(2), Direction.RESTORE, pages[2:], pages[2:]),
        ]
    )
    order: list[tuple[Ticket, int]] = []
    while len(order) < 2:
        engine.run(1)
        order += [
            (report.ticket, sum(map(len, engine.lanes.values()))) for report in copies.landed()
        ]
    assert [ticket for ticket, _ in order] == [1, 2]
    assert order[0][1] > 0


def test_adjacent_host_pages_are_one_copy_and_chunks_taper() -> None:
    world, engine = pipelined_world(LayeredMemory.allocate(MHA, N_DEVICE), chunk_pages=8)
    world.copies.start_restore(Ticket(1), range(16), range(16))
    assert engine.n_spans == engine.n_moves == 2
    world.copies.start_restore(Ticket(2), [20, 18, 16], [16, 17, 18])
    assert engine.n_spans == 5
    assert engine.scattered == [8, 8, 3]
    engine.run()


@pytest.mark.parametrize("n_lanes", [1, 2])
def test_straight_copies_begin_with_a_small_batch(
    n_lanes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = LayeredMemory.allocate(MHA, N_DEVICE)
    monkeypatch.setattr(copies_routes, "RAMP_BYTES", memory.page_bytes)
    world, engine = pipelined_world(
        memory, layered_by=LayeredBy.ROWS, n_lanes=n_lanes, chunk_pages=8
    )
    world.copies.start_restore(Ticket(1), range(N_DEVICE), range(N_DEVICE))
    on_lanes = {1: [1, 1, 2, 4, 8, 3], 2: [1, 1, 1, 1, 2, 2, 4, 4, 2, 1]}
    assert engine.batches == on_lanes[n_lanes]
    engine.run()
    assert world.copies.landed() == [RestoreEnded(Ticket(1), N_DEVICE)]


@pytest.mark.parametrize(("rows_from_bytes", "is_staged"), [(0, False), (1 << 20, True)])
def test_pages_are_staged_or_copied_by_rows_after_their_size(
    rows_from_bytes: int, *, is_staged: bool
) -> None:
    memory = LayeredMemory.allocate(MHA, N_DEVICE)
    host = HostPool(N_HOST, memory.page_bytes, pinned=False)
    engine = ShuffledEngine(memory)
    options = CudaOptions(rows_from_bytes=rows_from_bytes)
    copies = CudaCopies(host, memory, options=options, engine=engine)
    copies.start_restore(Ticket(1), [0, 5], [1, 2])
    assert (engine.n_moves > 0) == is_staged
    engine.run()
    assert copies.close(1.0)


def test_a_broken_off_submission_on_two_lanes_ends_behind_both() -> None:
    for seed in range(8):
        memory = LayeredMemory.allocate(MHA, N_DEVICE)
        world, engine = pipelined_world(
            memory, layered_by=LayeredBy.ROWS, n_lanes=2, chunk_pages=4, fail_at=5, seed=seed
        )
        world.copies.start_restore(Ticket(1), range(12), range(12))
        reports = world.copies.landed()
        while not reports:
            engine.run(1)
            reports = world.copies.landed()
        assert not any(engine.lanes.values())
        assert reports == [RestoreEnded(Ticket(1), 8)]


@pytest.mark.parametrize("fail_at", range(1, 11))
@pytest.mark.parametrize("direction", Direction)
def test_a_device_that_refuses_shortens_jobs_and_keeps_their_good_pages(
    fail_at: int, direction: Direction
) -> None:
    rng = random.Random(fail_at)
    world, engine = pipelined_world(
        LayeredMemory.allocate(MHA, N_DEVICE), chunk_pages=3, fail_at=fail_at, seed=fail_at
    )
    copies = world.copies
    assert isinstance(copies, CudaCopies)
    is_restore = direction is Direction.RESTORE
    contents = (fill_host if is_restore else fill_device)(world, range(15), rng)
    pages = tuple(range(15))
    jobs = [
        CopyJob(Ticket(0), direction, pages[:7], pages[:7]),
        CopyJob(Ticket(1), direction, pages[7:], pages[7:]),
    ]
    copies.start_together(jobs)
    reports = copies.landed()
    while len(reports) < 2:
        engine.run(1)
        reports += copies.landed()
    # The second job broke off: nothing of it may still run, reads included.
    assert not any(engine.lanes.values())
    assert [report.ticket for report in reports] == [0, 1]
    n_good = [
        report.n_pages for report in reports if isinstance(report, RestoreEnded | MirrorEnded)
    ]
    n_chunks_good = (fail_at - 1) // 2
    assert sum(n_good) == 3 * n_chunks_good
    read = world.read_device if is_restore else world.read_host
    for job, n in zip(jobs, n_good, strict=True):
        for page in job.device_pages[:n]:
            assert read(page) == contents[page]
    # The device is asked again, and now it works.
    copies.start_together([evolve(job, ticket=Ticket(job.ticket + 10)) for job in jobs])
    assert [report.n_pages for report in collected(world, 2)] == [7, 8]  # type: ignore[union-attr]


@pytest.mark.parametrize("direction", Direction)
def test_what_has_no_room_in_the_devices_queue_follows_with_the_next_looks(
    direction: Direction,
) -> None:
    rng = random.Random(1)
    world, engine = pipelined_world(
        LayeredMemory.allocate(MHA, N_DEVICE),
        layered_by=LayeredBy.ROWS,
        chunk_pages=2,
        in_flight_pages=4,
    )
    copies = world.copies
    assert isinstance(copies, CudaCopies)
    is_restore = direction is Direction.RESTORE
    contents = (fill_host if is_restore else fill_device)(world, range(15), rng)
    pages = tuple(range(15))
    copies.start_together(
        [
            CopyJob(Ticket(0), direction, pages[:9], pages[:9]),
            CopyJob(Ticket(1), direction, pages[9:], pages[9:]),
        ]
    )
    # The device holds what was asked for, and not a chunk more.
    assert sum(engine.batches) == 4
    reports = copies.landed()
    while len(reports) < 2:
        engine.run()
        reports += copies.landed()
        assert max(engine.batches) <= 2
    assert [report.ticket for report in reports] == [0, 1]
    assert sum(engine.batches) == 15
    read = world.read_device if is_restore else world.read_host
    assert [read(page) for page in pages] == contents
    assert copies.close(1.0)


@pytest.mark.parametrize("seed", range(8))
def test_batches_that_take_turns_begin_when_the_one_before_has_ended(seed: int) -> None:
    world, engine = pipelined_world(
        LayeredMemory.allocate(MHA, N_DEVICE),
        layered_by=LayeredBy.ROWS,
        chunk_pages=4,
        takes_turns=True,
        seed=seed,
    )
    contents = fill_host(world, range(16), random.Random(seed))
    world.copies.start_restore(Ticket(1), range(16), range(16))
    first, second = engine.lanes[Lane.TO_DEVICE], engine.lanes[Lane.TO_DEVICE_BESIDE]
    assert not second[0]()  # it waits for the first batch, which has not run
    while not second[0]():
        assert first.popleft()()
    assert world.copies.landed() == []
    second.popleft()
    engine.run()
    assert world.copies.landed() == [RestoreEnded(Ticket(1), 16)]
    assert [world.read_device(page) for page in range(16)] == contents


def test_a_bad_job_of_a_submission_ends_those_before_it_and_raises() -> None:
    world, _ = pipelined_world(LayeredMemory.allocate(MHA, N_DEVICE))
    copies = world.copies
    assert isinstance(copies, CudaCopies)
    good = CopyJob(Ticket(1), Direction.RESTORE, (0,), (0,))
    with pytest.raises(ValueError, match="in flight"):
        copies.start_together([good, good])
    assert copies.landed() == [RestoreEnded(Ticket(1), 0)]


def test_uneven_tensors_fall_back_to_staging() -> None:
    memory = uneven(MLA, N_DEVICE)
    assert LayeredMemory.allocate(MHA, 3).row_groups() is not None
    base = torch.zeros((5, 40 * 3), dtype=torch.uint8)
    shifted = [base[0, 0:120], base[2, 0:120], base[3, 0:120]]
    layout = PageLayout(
        kind="mla", n_layers=3, n_kv_heads=1, head_dim=4, dtype="float8_e4m3fn", page_tokens=3
    )
    views = [t.view(torch.float8_e4m3fn).view(30, 1, 4) for t in shifted]
    assert LayeredMemory(layout, views).row_groups() is None
    world, engine = pipelined_world(
        LayeredMemory(layout, views), layered_by=LayeredBy.ROWS, chunk_pages=2
    )
    (content,) = fill_host(world, [0], random.Random(0))
    world.copies.start_restore(Ticket(1), [0], [1])
    assert engine.n_moves == 1
    engine.run()
    assert world.read_device(1) == content
    assert memory.n_pages == N_DEVICE


def test_k_and_v_tensors_at_their_own_distances_are_two_row_groups() -> None:
    k = torch.zeros((3, 8, 2, 4))
    v = torch.zeros((3, 2, 8, 2, 4))
    layout = PageLayout(
        kind="mha", n_layers=3, n_kv_heads=2, head_dim=4, dtype="float32", page_tokens=4
    )
    memory = LayeredMemory(layout, list(k), [v[i, 0] for i in range(3)])
    groups = memory.row_groups()
    assert groups is not None
    assert len(groups) == 2
    world, engine = pipelined_world(memory, layered_by=LayeredBy.ROWS)
    contents = fill_host(world, [4, 5], random.Random(0))
    world.copies.start_restore(Ticket(1), [4, 5], [1, 0])
    engine.run()
    assert engine.n_moves == 0
    assert [world.read_device(1), world.read_device(0)] == contents


def test_a_worker_that_fails_ends_short_with_its_good_pages(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    memory = LayeredMemory.allocate(MHA, N_DEVICE)
    real = memory.write_page

    def write_page(device_page: int, data: memoryview) -> None:
        if device_page == 5:
            raise OSError("the memory is gone")
        real(device_page, data)

    monkeypatch.setattr(memory, "write_page", write_page)
    world = cpu_world(memory)
    world.copies.start_restore(Ticket(1), [0, 1, 2, 3], [3, 4, 5, 6])
    world.copies.start_restore(Ticket(2), [0], [0])
    assert collected(world, 2) == [RestoreEnded(Ticket(1), 2), RestoreEnded(Ticket(2), 1)]
    assert "failed after 2 of 4" in caplog.text
    assert world.copies.close(5.0)


def test_cpu_copies_are_in_flight_until_their_thread_has_done_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = LayeredMemory.allocate(MHA, N_DEVICE)
    real = memory.write_page
    entered, gate = threading.Event(), threading.Event()

    def write_page(device_page: int, data: memoryview) -> None:
        entered.set()
        assert gate.wait(10)
        real(device_page, data)

    monkeypatch.setattr(memory, "write_page", write_page)
    host = HostPool(N_HOST, memory.page_bytes, pinned=False)
    woken = threading.Event()
    copies = CpuCopies(host, memory, on_landed=woken.set)
    copies.start_restore(Ticket(1), [0, 1], [0, 1])
    copies.start_restore(Ticket(2), [2], [2])
    assert entered.wait(5)
    assert copies.landed() == []
    assert not copies.close(0.05)
    assert host.n_lent == 2
    assert not host.close()
    assert bytes(host.page_view(0)) == bytes(memory.page_bytes)
    gate.set()
    assert woken.wait(5)
    assert copies.close(5.0)
    # What had not begun when the copies were closed ends without a page.
    assert copies.landed() == [RestoreEnded(Ticket(1), 2), RestoreEnded(Ticket(2), 0)]
    assert host.close()


def test_a_pipelined_copy_wakes_a_sleeping_host() -> None:
    memory = LayeredMemory.allocate(MHA, N_DEVICE)
    host = HostPool(N_HOST, memory.page_bytes, pinned=False)
    engine = ShuffledEngine(memory)
    woken = threading.Event()
    copies = CudaCopies(host, memory, engine=engine, on_landed=woken.set)
    copies.start_restore(Ticket(1), [0], [0])
    assert woken.wait(5)
    assert copies.landed() == [RestoreEnded(Ticket(1), 1)]
    assert copies.close(1.0)


def test_pages_of_different_sizes_are_refused() -> None:
    memory = LayeredMemory.allocate(MHA, N_DEVICE)
    host = HostPool(4, memory.page_bytes + 1, pinned=False)
    with pytest.raises(ValueError, match="same layout"):
        CpuCopies(host, memory)
    with pytest.raises(ValueError, match="same layout"):
        CudaCopies(host, memory, engine=ShuffledEngine(memory))


@given(st.lists(st.integers(0, 40), max_size=8), st.integers(1, 16), st.integers(1, 16))
@settings(max_examples=200, deadline=None)
def test_chunks_hold_every_page_once_and_end_where_large_jobs_end(
    jobs: list[int], chunk_pages: int, least: int
) -> None:
    least = min(least, chunk_pages)
    sizes = chunk_sizes(jobs, chunk_pages, least)
    cut = tapered(sizes, least)
    up = ramped(sizes, least)
    assert sum(sizes) == sum(cut) == sum(up) == sum(jobs)
    assert all(0 < size <= chunk_pages for size in [*cut, *up])
    assert not sizes or up[0] < 2 * least
    ends = {sum(sizes[:i]) for i in range(len(sizes) + 1)}
    for i, job in enumerate(jobs):
        end = sum(jobs[: i + 1])
        if end in ends or not job:
            continue
        # A job may share its last chunk, but only a chunk that is small at the job's end.
        assert end - max(e for e in ends if e < end) < least


@given(st.lists(st.integers(0, 12), max_size=20))
@settings(max_examples=200, deadline=None)
def test_merged_runs_say_the_same_pages(pages: list[int]) -> None:
    runs = merged_runs(pages)
    assert [page + i for _, page, n in runs for i in range(n)] == pages
    assert [start for start, _, _ in runs] == [
        sum(n for *_, n in runs[:i]) for i in range(len(runs))
    ]
    for (_, page, n), (_, following, _) in itertools.pairwise(runs):
        assert page + n != following


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=20))
@settings(max_examples=200, deadline=None)
def test_merged_pairs_say_the_same_pages_on_both_sides(pairs: list[tuple[int, int]]) -> None:
    one, other = [a for a, _ in pairs], [b for _, b in pairs]
    runs = merged_pairs(one, other)
    assert [(one[at] + i, other[at] + i) for at, n in runs for i in range(n)] == pairs
    for (at, n), (following, _) in itertools.pairwise(runs):
        assert at + n == following
        assert (one[at] + n, other[at] + n) != (one[following], other[following])


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
def test_the_triton_kernel_moves_the_right_bytes_in_its_interpreter() -> None:
    program = Path(__file__).with_name("triton_interpreted.py")
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, str(program)], env=environment, timeout=100, check=False)
    assert done.returncode == 0


class TestLayout:
    def test_sizes_follow_from_the_fields(self) -> None:
        layout = PageLayout(
            kind="mha", n_layers=32, n_kv_heads=8, head_dim=128, dtype="bfloat16", page_tokens=64
        )
        assert layout.page_bytes == 8 << 20
        assert layout.slice_bytes == 128 << 10
        assert layout.slice_offset(0, 1) == 128 << 10
        assert layout.slice_offset(31, 1) == (8 << 20) - (128 << 10)
        assert MLA.page_bytes == 2 * 3 * 5

    def test_slices_outside_a_page_are_refused(self) -> None:
        with pytest.raises(IndexError):
            MLA.slice_offset(0, 1)
        with pytest.raises(IndexError):
            MHA.slice_offset(3, 0)

    def test_every_field_is_in_the_fingerprint(self) -> None:
        variants = [
            MHA,
            evolve(MHA, kind="mla"),
            evolve(MHA, n_layers=4),
            evolve(MHA, n_kv_heads=1),
            evolve(MHA, head_dim=16),
            evolve(MHA, dtype="float16"),
            evolve(MHA, page_tokens=8),
            # The same digits in a row, cut elsewhere.
            evolve(MHA, n_layers=1, n_kv_heads=12),
            evolve(MHA, n_layers=11, n_kv_heads=2),
        ]
        assert len({layout.fingerprint() for layout in variants}) == len(variants)
        assert evolve(MHA).fingerprint() == MHA.fingerprint()

    @pytest.mark.parametrize(
        "change", [{"n_layers": 0}, {"head_dim": -1}, {"page_tokens": 1 << 21}, {"dtype": "int8"}]
    )
    def test_impossible_layouts_are_refused(self, change: dict[str, Any]) -> None:
        with pytest.raises(ValueError):
            evolve(MHA, **change)

    def test_a_page_beyond_the_limit_is_refused(self) -> None:
        with pytest.raises(ValueError, match="fewer tokens"):
            evolve(MHA, n_layers=1000, head_dim=1 << 16, page_tokens=1 << 10)


class TestDeviceMemory:
    def test_a_page_has_the_host_order_whatever_the_tensors_are(self) -> None:
        memory = LayeredMemory.allocate(MHA, 4)
        assert memory.v_layers is not None
        page = memory.page_bytes
        memory.write_page(2, memoryview(random.Random(0).randbytes(page)))
        into = bytearray(page)
        memory.read_page(2, memoryview(into))
        start = MHA.slice_offset(1, 1)
        tokens = memory.v_layers[1][2 * 4 : 3 * 4].contiguous().view(torch.uint8)
        assert bytes(into[start : start + MHA.slice_bytes]) == tokens.numpy().tobytes()

    def test_tensors_that_do_not_fit_are_named(self) -> None:
        k = [torch.zeros((8, 2, 8), dtype=torch.bfloat16) for _ in range(3)]
        v = list(k)
        LayeredMemory(MHA, k, v)
        LayeredMemory(MHA, [t.view(2, 4, 2, 8) for t in k], [t.view(2, 4, 2, 8) for t in k])
        with pytest.raises(ValueError, match=r"v_layers\[1\] is torch.float32"):
            LayeredMemory(MHA, k, [v[0], v[1].float(), v[2]])
        with pytest.raises(ValueError, match=r"k_layers\[0\] has shape"):
            LayeredMemory(MHA, [t.view(8, 4, 4) for t in k], v)
        with pytest.raises(ValueError, match="not contiguous"):
            LayeredMemory(MHA, k, [v[0], torch.zeros((16, 2, 8), dtype=torch.bfloat16)[::2], v[2]])
        with pytest.raises(ValueError, match="2 k_layers for 3"):
            LayeredMemory(MHA, k[:2], v)
        with pytest.raises(ValueError, match=r"takes 2 tensor\(s\)"):
            LayeredMemory(MHA, k)
        with pytest.raises(ValueError, match="less than one page"):
            LayeredMemory(MHA, [t[:3] for t in k], [t[:3] for t in v])

    @pytest.mark.parametrize("memory", [LayeredMemory.allocate(MLA, 3), blocks(3)])
    def test_pages_and_sizes_are_checked(self, memory: PagedMemory) -> None:
        with pytest.raises(IndexError, match="device page 3"):
            memory.write_page(3, memoryview(bytearray(memory.page_bytes)))
        with pytest.raises(ValueError, match="a page has"):
            memory.read_page(0, memoryview(bytearray(1)))

    def test_blocks_must_be_bytes(self) -> None:
        with pytest.raises(ValueError, match="uint8"):
            BlockMemory(torch.zeros((2, 4)))


class TestHostPool:
    def test_pages_are_writable_apart_and_seen_by_the_tensor(self) -> None:
        pool = HostPool(3, 5000, pinned=False)
        assert pool.address % (2 << 20) == 0
        pool.page_view(1)[:] = b"x" * 5000
        assert pool.tensor()[1].eq(ord("x")).all()
        assert not pool.tensor()[0].any()
        assert not pool.tensor()[2].any()
        with pytest.raises(IndexError):
            pool.page_view(3)

    def test_memory_in_use_is_not_unmapped(self) -> None:
        pool = HostPool(2, 4096, pinned=False)
        pool.lend()
        view = pool.page_view(0)
        assert not pool.close()
        view[:1] = b"a"
        pool.take_back()
        assert not pool.close()
        view[:1] = b"b"
        with pytest.raises(RuntimeError, match="closed"):
            pool.lend()
        view.release()
        assert pool.close()
        assert pool.close()

    def test_nothing_is_taken_back_that_was_not_lent(self) -> None:
        with pytest.raises(RuntimeError, match="lend"):
            HostPool(1, 1, pinned=False).take_back()

    def test_impossible_pools_are_refused(self) -> None:
        with pytest.raises(ValueError, match="needs pages"):
            HostPool(0, 4096, pinned=False)
        with pytest.raises(ValueError, match="limit"):
            HostPool(1 << 40, 1 << 20, pinned=False)
