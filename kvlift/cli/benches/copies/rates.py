"""Rates of restores and write-through beside one contiguous copy, and a page's submission."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Final

import torch
from attrs import evolve

from kvlift.cli.benches.copies.recorder import Recorder
from kvlift.cli.benches.copies.setup import (
    DEVICE,
    LAYOUTS,
    MIB,
    PAGE_8MIB,
    Setup,
    check_bytes,
    layered_setup,
    opened,
    setup_around,
    timed_ceiling,
    timed_copy,
)
from kvlift.effects.copies_cuda import CudaOptions, LayeredBy
from kvlift.effects.copies_jobs import Direction
from kvlift.effects.device_memory import BlockMemory
from kvlift.effects.layout import PageLayout

SUBMIT_US_A_PAGE: Final = 5.0

OTHER_LAYOUTS: Final[dict[str, tuple[PageLayout, int]]] = {
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
ROWS = evolve(DEFAULT, layered_by=LayeredBy.ROWS, takes_turns=False)
STAGED = evolve(DEFAULT, layered_by=LayeredBy.STAGED)
VARIANTS: dict[str, CudaOptions] = {
    "": DEFAULT,
    "rows": ROWS,
    "rows-lanes-2": evolve(ROWS, n_lanes=2),
    "rows-one-by-one": evolve(ROWS, batch_rows=False),
    "rows-one-by-one-lanes-2": evolve(ROWS, batch_rows=False, n_lanes=2),
    "rows-chunk-16MiB": evolve(ROWS, chunk_bytes=16 * MIB),
    "rows-chunk-8MiB": evolve(ROWS, chunk_bytes=8 * MIB),
    "rows-chunk-128MiB": evolve(ROWS, chunk_bytes=128 * MIB),
    "rows-chunk-256MiB": evolve(ROWS, chunk_bytes=256 * MIB),
    "rows-lanes-2-chunk-128MiB": evolve(ROWS, n_lanes=2, chunk_bytes=128 * MIB),
    **{
        f"rows-turns-{size}MiB": evolve(ROWS, takes_turns=True, chunk_bytes=size * MIB)
        for size in (8, 16, 32, 64)
    },
    "rows-window-128MiB": evolve(ROWS, chunk_bytes=32 * MIB, in_flight_bytes_max=128 * MIB),
    "rows-without-hint": evolve(ROWS, prefers_overlap=False),
    "staged": STAGED,
    "staged-one-by-one": evolve(STAGED, batch_below_bytes=0),
    "staged-chunk-32MiB": evolve(STAGED, chunk_bytes=32 * MIB),
    "staged-programs-8": evolve(STAGED, n_programs=8),
}
BLOCK_VARIANTS: dict[str, CudaOptions] = {
    "": DEFAULT,
    "one-lane": evolve(DEFAULT, takes_turns=False),
    "lanes-2": evolve(DEFAULT, takes_turns=False, n_lanes=2),
    "one-by-one": evolve(DEFAULT, takes_turns=False, batch_below_bytes=0),
    "one-by-one-lanes-2": evolve(DEFAULT, takes_turns=False, batch_below_bytes=0, n_lanes=2),
}


def rate_rows(
    bench: Recorder,
    setup: Setup,
    direction: Direction,
    size: str,
    options: Mapping[str, CudaOptions],
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
        bench.add(
            f"submit-{name}",
            cpu_us,
            "us/page",
            ceiling=SUBMIT_US_A_PAGE,
            ratio=cpu_us / SUBMIT_US_A_PAGE,
            note="ceiling: the target",
        )


def add_rate(
    bench: Recorder,
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
        note="ceiling: one contiguous copy of the same bytes",
        best_ratio=min(ceilings) / min(wall for wall, _ in rounds),
        submit_us_a_page=statistics.median(cpu for _, cpu in rounds) * 1e6 / n_pages,
    )


def main_rates(bench: Recorder, n_pages_by_size: Mapping[str, int]) -> None:
    """The figures of the targets: the default options, both directions."""
    for size, n_pages in n_pages_by_size.items():
        with bench.case(f"rates-{size}"), layered_setup(LAYOUTS[size][0], n_pages) as setup:
            for direction in Direction:
                rate_rows(bench, setup, direction, size, {"": DEFAULT})


def variant_rates(bench: Recorder, variants: Sequence[str]) -> None:
    """Both page sizes and directions, shuffled pages."""
    for size, (layout, n_pages) in LAYOUTS.items():
        with bench.case(f"rates-{size}"), layered_setup(layout, n_pages) as setup:
            for direction in Direction:
                chosen = {name: VARIANTS[name] for name in variants}
                rate_rows(bench, setup, direction, size, chosen)


def other_rates(bench: Recorder) -> None:
    """Adjacent pages, contiguous device pages, other layouts."""
    for size, (layout, n_pages) in LAYOUTS.items():
        with bench.case(f"rates-{size}"), layered_setup(layout, n_pages) as setup:
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
