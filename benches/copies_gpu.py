"""Copies on one GPU: rates against one contiguous pinned copy, submission cost, decode beside it.

    python benches/copies_gpu.py --out FILE [--rounds N] [--commit HASH]

Every case checks its bytes on fresh random data, is timed in rounds that alternate with the
ceiling, and stands alone: one that fails is a row with `error`, and the script goes on.
"""

import argparse
import ctypes
import datetime as dt
import gc
import importlib
import json
import os
import platform
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import torch
from attrs import evolve, frozen

from kvlift.core.ids import Ticket
from kvlift.core.landed import MirrorEnded, RestoreEnded
from kvlift.effects.copies_cuda import CudaCopies, CudaOptions, LayeredBy
from kvlift.effects.copies_jobs import CopyJob, Direction
from kvlift.effects.copies_scatter import HAS_TRITON
from kvlift.effects.device_memory import BlockMemory, LayeredMemory, PagedMemory
from kvlift.effects.host_pool import HostPool
from kvlift.effects.layout import PageLayout

DEVICE = "cuda"
MIB: Final = 1 << 20
DEADLINE_S: Final = 30.0

PAGE_8MIB = PageLayout(
    kind="mha", n_layers=32, n_kv_heads=8, head_dim=128, dtype="bfloat16", page_tokens=64
)
PAGE_1MIB = evolve(PAGE_8MIB, page_tokens=8)
LAYOUTS: dict[str, tuple[PageLayout, int]] = {"8MiB": (PAGE_8MIB, 128), "1MiB": (PAGE_1MIB, 1024)}
OTHER_LAYOUTS: dict[str, tuple[PageLayout, int]] = {
    "fp16": (evolve(PAGE_8MIB, dtype="float16"), 64),
    "fp8": (evolve(PAGE_8MIB, dtype="float8_e4m3fn"), 64),
    "mla-bf16": (
        PageLayout(
            kind="mla", n_layers=61, n_kv_heads=1, head_dim=576, dtype="bfloat16", page_tokens=64
        ),
        64,
    ),
    "mla-fp8": (
        PageLayout(
            kind="mla",
            n_layers=61,
            n_kv_heads=1,
            head_dim=576,
            dtype="float8_e4m3fn",
            page_tokens=64,
        ),
        64,
    ),
}

# The bench starts copies only when no kernel uses their pages; then they may run beside a step.
DEFAULT = CudaOptions(is_ordered=False)
ROWS = evolve(DEFAULT, layered_by=LayeredBy.ROWS)
STAGED = evolve(DEFAULT, layered_by=LayeredBy.STAGED)
VARIANTS: dict[str, CudaOptions] = {
    "": DEFAULT,
    "rows": ROWS,
    "rows-lanes-2": evolve(ROWS, n_lanes=2),
    "rows-one-by-one": evolve(ROWS, batch_rows=False),
    "rows-one-by-one-lanes-2": evolve(ROWS, batch_rows=False, n_lanes=2),
    "rows-chunk-16MiB": evolve(ROWS, chunk_bytes=16 * MIB),
    "rows-chunk-128MiB": evolve(ROWS, chunk_bytes=128 * MIB),
    "rows-without-hint": evolve(ROWS, prefers_overlap=False),
    "staged": STAGED,
    "staged-one-by-one": evolve(STAGED, batch_below_bytes=0),
    "staged-chunk-32MiB": evolve(STAGED, chunk_bytes=32 * MIB),
    "staged-programs-8": evolve(STAGED, n_programs=8),
}
BLOCK_VARIANTS: dict[str, CudaOptions] = {
    "": DEFAULT,
    "lanes-2": evolve(DEFAULT, n_lanes=2),
    "one-by-one": evolve(DEFAULT, batch_below_bytes=0),
    "one-by-one-lanes-2": evolve(DEFAULT, batch_below_bytes=0, n_lanes=2),
}
BESIDE: dict[str, tuple[str, ...]] = {
    "8MiB": (
        "",
        "rows-lanes-2",
        "rows-one-by-one",
        "rows-without-hint",
        "staged",
        "staged-programs-8",
    ),
    "1MiB": ("rows", "staged"),
}

Row = dict[str, Any]


@frozen
class Bench:
    rows: list[Row]
    n_rounds: int

    def add(self, case: str, value: float, unit: str, **more: Any) -> None:
        row: Row = {"case": case, "value": round(value, 4), "unit": unit}
        row |= {name: _rounded(each) for name, each in more.items()}
        self.rows.append(row)
        print(json.dumps(row), flush=True)

    @contextmanager
    def case(self, name: str) -> Iterator[None]:
        """A failure inside is a row, not the end."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever it is, the other cases still count
            traceback.print_exc()
            self.rows.append({"case": name, "error": f"{type(error).__name__}: {error}"})
        finally:
            gc.collect()
            with suppress(RuntimeError):
                torch.cuda.empty_cache()


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
        torch.cuda.synchronize()
        host.close()


@contextmanager
def opened(setup: Setup, options: CudaOptions) -> Iterator[CudaCopies]:
    copies = CudaCopies(setup.host, setup.memory, options=options)
    try:
        yield copies
    finally:
        if not copies.close(DEADLINE_S):
            raise RuntimeError("copies still run after the deadline")


def shuffled(n: int, seed: int) -> tuple[int, ...]:
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    return tuple(int(page) for page in order)


_next_ticket = iter(range(1 << 60))


def new_ticket() -> Ticket:
    return Ticket(next(_next_ticket))


def start(copies: CudaCopies, setup: Setup, direction: Direction) -> None:
    if direction is Direction.RESTORE:
        copies.start_restore(new_ticket(), setup.host_pages, setup.device_pages)
    else:
        copies.start_mirror(new_ticket(), setup.device_pages, setup.host_pages)


def finish(copies: CudaCopies, n_jobs: int, n_pages: int) -> None:
    """Poll as a tick would, without a pause; every job must be whole."""
    end = time.monotonic() + DEADLINE_S
    n_ended = 0
    while n_ended < n_jobs:
        for report in copies.landed():
            assert isinstance(report, RestoreEnded | MirrorEnded)
            if report.n_pages != n_pages:
                raise RuntimeError(f"a copy ended short: {report}")
            n_ended += 1
        if time.monotonic() > end:
            raise RuntimeError("a copy did not land within the deadline")


def randomise(tensor: torch.Tensor) -> None:
    tensor.copy_(torch.randint(0, 256, tensor.shape, dtype=torch.uint8, device=DEVICE))


def on_device(memory: PagedMemory) -> list[torch.Tensor]:
    """Every piece of every page, uint8 `[n_pages, piece_bytes]`, in host order."""
    return [memory.blocks] if isinstance(memory, BlockMemory) else list(memory.slices)


def check_bytes(copies: CudaCopies, setup: Setup, direction: Direction) -> None:
    """Fresh random bytes on both sides; every page must be right after one copy of all."""
    randomise(setup.host.tensor())
    pieces = on_device(setup.memory)
    for piece in pieces:
        randomise(piece)
    torch.cuda.synchronize()
    start(copies, setup, direction)
    finish(copies, 1, len(setup.host_pages))
    torch.cuda.synchronize()
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


def timed_copy(copies: CudaCopies, setup: Setup, direction: Direction) -> tuple[float, float]:
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


def rate_rows(
    bench: Bench, setup: Setup, direction: Direction, size: str, options: dict[str, CudaOptions]
) -> None:
    """Rates of several variants, alternating with the ceiling; submission cost beside them."""
    name = f"{'restore' if direction is Direction.RESTORE else 'writethrough'}-{size}"
    flat = torch.empty(setup.size_bytes, dtype=torch.uint8, device=DEVICE)
    ceilings: list[float] = []
    times: dict[str, list[tuple[float, float]]] = {}
    for variant, chosen in options.items():
        case = f"{name}/{variant}" if variant else name
        with bench.case(case), opened(setup, chosen) as copies:
            check_bytes(copies, setup, direction)
            timed_copy(copies, setup, direction)
            timed_ceiling(setup, flat, direction)
            beside = []
            rounds = []
            for _ in range(bench.n_rounds):
                beside.append(timed_ceiling(setup, flat, direction))
                rounds.append(timed_copy(copies, setup, direction))
            check_bytes(copies, setup, direction)
            ceilings += beside
            times[case] = rounds
            add_rate(bench, case, setup, beside, rounds)
    if ceilings:
        bench.add(
            f"ceiling-{name}",
            setup.size_bytes / statistics.median(ceilings) / 1e9,
            "GB/s",
            size_bytes=setup.size_bytes,
        )
    if name in times:
        cpu_us = statistics.median(cpu for _, cpu in times[name]) * 1e6 / len(setup.host_pages)
        bench.add(f"submit-{name}", cpu_us, "us/page", ceiling=5.0, ratio=cpu_us / 5.0)


def add_rate(
    bench: Bench,
    case: str,
    setup: Setup,
    ceilings: Sequence[float],
    rounds: Sequence[tuple[float, float]],
) -> None:
    copy_s = statistics.median(wall for wall, _ in rounds)
    ceiling_s = statistics.median(ceilings)
    n_pages = len(setup.host_pages)
    bench.add(
        case,
        setup.size_bytes / copy_s / 1e9,
        "GB/s",
        ceiling=setup.size_bytes / ceiling_s / 1e9,
        ratio=ceiling_s / copy_s,
        best_ratio=min(ceilings) / min(wall for wall, _ in rounds),
        submit_us_a_page=statistics.median(cpu for _, cpu in rounds) * 1e6 / n_pages,
    )


def bench_rates(bench: Bench) -> None:
    for size, (layout, n_pages) in LAYOUTS.items():
        with bench.case(f"rates-{size}"), layered_setup(layout, n_pages) as setup:
            for direction in Direction:
                rate_rows(bench, setup, direction, size, VARIANTS)
            ordered = tuple(range(n_pages))
            adjacent = evolve(setup, host_pages=ordered, device_pages=ordered)
            for direction in Direction:
                chosen = {name: VARIANTS[name] for name in ("rows", "staged")}
                rate_rows(bench, adjacent, direction, f"{size}-adjacent", chosen)
        with bench.case(f"blocks-{size}"):
            blocks = torch.zeros((n_pages, layout.page_bytes), dtype=torch.uint8, device=DEVICE)
            with setup_around(BlockMemory(blocks)) as setup:
                for direction in Direction:
                    rate_rows(bench, setup, direction, f"{size}-blocks", BLOCK_VARIANTS)
            del blocks
    for name, (layout, n_pages) in OTHER_LAYOUTS.items():
        with bench.case(f"layout-{name}"), layered_setup(layout, n_pages) as setup:
            for direction in Direction:
                rate_rows(bench, setup, direction, name, {"": DEFAULT, "staged": STAGED})


def bench_together(bench: Bench) -> None:
    """Many small restores in one submission: when the first is ready, and what a page costs."""
    for size, n_pages_a_job in (("8MiB", 4), ("1MiB", 4)):
        case = f"restore-together-{size}"
        layout, n_pages = LAYOUTS[size]
        with bench.case(case), layered_setup(layout, n_pages) as setup:
            firsts, totals, cpus = [], [], []
            with opened(setup, DEFAULT) as copies:
                check_bytes(copies, setup, Direction.RESTORE)
                for _ in range(bench.n_rounds):
                    first_s, total_s, cpu_s = timed_together(copies, setup, n_pages_a_job)
                    firsts.append(first_s)
                    totals.append(total_s)
                    cpus.append(cpu_s)
            bench.add(
                case,
                setup.size_bytes / statistics.median(totals) / 1e9,
                "GB/s",
                n_jobs=n_pages // n_pages_a_job,
                first_ready_ms=statistics.median(firsts) * 1e3,
                all_ready_ms=statistics.median(totals) * 1e3,
                submit_us_a_page=statistics.median(cpus) * 1e6 / n_pages,
            )


def timed_together(
    copies: CudaCopies, setup: Setup, n_pages_a_job: int
) -> tuple[float, float, float]:
    bounds = range(0, len(setup.host_pages), n_pages_a_job)
    jobs = [
        CopyJob(
            new_ticket(),
            Direction.RESTORE,
            setup.host_pages[at : at + n_pages_a_job],
            setup.device_pages[at : at + n_pages_a_job],
        )
        for at in bounds
    ]
    begin, cpu_begin = time.perf_counter(), time.thread_time()
    copies.start_together(jobs)
    cpu_s = time.thread_time() - cpu_begin
    finish_first = len(jobs)
    first_s = 0.0
    end = time.monotonic() + DEADLINE_S
    while finish_first and time.monotonic() < end:
        reports = copies.landed()
        if reports and not first_s:
            first_s = time.perf_counter() - begin
        finish_first -= len(reports)
    if finish_first:
        raise RuntimeError("restores did not land within the deadline")
    return first_s, time.perf_counter() - begin, cpu_s


class DecodeStep:
    """16 products of a batch of 64 with matrices of 8192 by 8192, bf16, as one CUDA graph."""

    def __init__(self, n_products: int = 16, width: int = 8192, batch: int = 64) -> None:
        shape = (n_products, width, width)
        self._weights = torch.randn(shape, dtype=torch.bfloat16, device=DEVICE) / width**0.5
        self._input = torch.randn((batch, width), dtype=torch.bfloat16, device=DEVICE)
        self._replay: Callable[[], object] = self._products
        for _ in range(3):
            self._products()
        torch.cuda.synchronize()
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._output = self._products()
            self._replay = graph.replay
        except Exception as error:  # noqa: BLE001 - the eager step measures the same
            print(f"no CUDA graph, the step runs eagerly: {error}", file=sys.stderr)

    def _products(self) -> torch.Tensor:
        value = self._input
        for weight in self._weights:
            value = value @ weight
        return value

    def mean_ms(self, n_steps: int) -> float:
        """Of `n_steps` steps in a row, by events on the device; the first two are left out."""
        events = [
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(n_steps + 1)
        ]
        events[0].record()
        for event in events[1:]:
            self._replay()
            event.record()
        events[-1].synchronize()
        return float(events[2].elapsed_time(events[-1])) / (n_steps - 2)


def bench_decode(bench: Bench) -> None:
    for size, variants in BESIDE.items():
        layout, n_pages = LAYOUTS[size]
        with bench.case(f"decode-beside-{size}"), layered_setup(layout, n_pages) as setup:
            step = DecodeStep()
            alone_ms = step.mean_ms(20)
            # Two passes over all pages last about 40 ms: the steps must be over before them.
            n_steps = max(6, min(40, int(24.0 / alone_ms)))
            flat = torch.empty((n_pages, layout.page_bytes), dtype=torch.uint8, device=DEVICE)
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            for direction in Direction:
                plain_name = "restore" if direction is Direction.RESTORE else "writethrough"
                for variant in variants:
                    case = f"decode-beside-{plain_name}-{size}" + (variant and f"/{variant}")
                    with bench.case(case), opened(setup, VARIANTS[variant]) as copies:
                        beside_rows(
                            bench, case, step, n_steps, setup, copies, flat, stream, direction
                        )


def beside_rows(
    bench: Bench,
    case: str,
    step: DecodeStep,
    n_steps: int,
    setup: Setup,
    copies: CudaCopies,
    flat: torch.Tensor,
    stream: torch.cuda.Stream,
    direction: Direction,
) -> None:
    """Alone, beside plain copy-engine copies, and beside ours, round by round."""
    check_bytes(copies, setup, direction)
    alone, plain, ours, covered = [], [], [], 0
    for _ in range(bench.n_rounds):
        torch.cuda.synchronize()
        alone.append(step.mean_ms(n_steps))
        torch.cuda.synchronize()
        done = plain_copies(setup, flat, stream, direction)
        plain.append(step.mean_ms(n_steps))
        covered += not done.query()  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        for _ in range(2):
            start(copies, setup, direction)
        ours.append(step.mean_ms(n_steps))
        reports = copies.landed()
        covered += len(reports) < 2
        finish(copies, 2 - len(reports), len(setup.host_pages))
    base = statistics.median(alone)
    bench.add(
        case,
        statistics.median(ours),
        "ms",
        ratio=statistics.median(o / a for o, a in zip(ours, alone, strict=True)),
        ceiling=statistics.median(p / a for p, a in zip(plain, alone, strict=True)),
        alone_ms=base,
        beside_plain_ms=statistics.median(plain),
        n_steps=n_steps,
        covered=covered / (2 * bench.n_rounds),
    )


def plain_copies(
    setup: Setup, flat: torch.Tensor, stream: torch.cuda.Stream, direction: Direction
) -> torch.cuda.Event:
    """All pages twice, page by page by the copy engine, into contiguous memory."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    host = setup.host.tensor()
    with torch.cuda.stream(stream):
        for _ in range(2):
            for i, page in enumerate(setup.host_pages):
                if direction is Direction.RESTORE:
                    flat[i].copy_(host[page], non_blocking=True)
                else:
                    host[page].copy_(flat[i], non_blocking=True)
        event.record(stream)
    return event


def bench_duplex(bench: Bench) -> None:
    """Both directions at once: what each keeps of its own rate."""
    layout, n_pages = LAYOUTS["8MiB"]
    with bench.case("duplex-8MiB"), layered_setup(layout, n_pages) as setup:
        half = n_pages // 2
        times = []
        with opened(setup, DEFAULT) as copies:
            for _ in range(bench.n_rounds + 1):
                begin = time.perf_counter()
                copies.start_restore(
                    new_ticket(), setup.host_pages[:half], setup.device_pages[:half]
                )
                copies.start_mirror(
                    new_ticket(), setup.device_pages[half:], setup.host_pages[half:]
                )
                finish(copies, 2, half)
                times.append(time.perf_counter() - begin)
        wall_s = statistics.median(times[1:])
        bench.add("duplex-8MiB", setup.size_bytes / wall_s / 1e9, "GB/s both ways together")


def machine() -> Row:
    try:
        triton = importlib.import_module("triton").__version__ if HAS_TRITON else None
    except ImportError:
        triton = None
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton,
        "python": platform.python_version(),
        "driver": _driver_version(),
        "n_cpus": os.cpu_count(),
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
    }


def _driver_version() -> int:
    """What the CUDA driver supports, 13000 for 13.0."""
    version = ctypes.c_int(0)
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return version.value


def _rounded(value: Any) -> Any:
    return round(value, 4) if isinstance(value, float) else value


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="where the JSON goes")
    parser.add_argument("--rounds", type=int, default=11, help="timed rounds of each case")
    parser.add_argument("--commit", default=None, help="written into the result")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("this bench needs a CUDA device", file=sys.stderr)
        return 2
    bench = Bench(rows=[], n_rounds=max(3, arguments.rounds))
    report = {
        "bench": "copies",
        "machine": machine(),
        "command": " ".join(["python", *sys.argv]),
        "commit": arguments.commit,
        "rows": bench.rows,
    }
    for part in (bench_rates, bench_together, bench_duplex, bench_decode):
        with bench.case(part.__name__):
            part(bench)
        # After each part, so that a run cut short has its rows.
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    n_errors = sum("error" in row for row in bench.rows)
    print(f"{len(bench.rows)} rows, {n_errors} errors: {arguments.out}")
    return 1 if n_errors else 0


if __name__ == "__main__":
    raise SystemExit(main())
