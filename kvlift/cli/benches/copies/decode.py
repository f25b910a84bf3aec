"""A decode step beside a running copy, beside plain copy-engine copies, and alone."""

import itertools
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch
from attrs import frozen

from kvlift.cli.benches.copies.rates import VARIANTS
from kvlift.cli.benches.copies.recorder import Recorder
from kvlift.cli.benches.copies.setup import (
    DEVICE,
    LAYOUTS,
    AnyCopies,
    Setup,
    check_bytes,
    finish,
    layered_setup,
    opened,
    start,
)
from kvlift.core.landed import Landed
from kvlift.effects.copies_jobs import Direction

BESIDE: Final[Mapping[str, tuple[str, ...]]] = {
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

WITH_INPUT: Final[Mapping[str, tuple[str, ...]]] = {
    "8MiB": ("", *(f"rows-turns-{size}MiB" for size in (8, 16, 32, 64))),
}
MAIN: Final[Mapping[str, tuple[str, ...]]] = {"8MiB": ("",)}


@frozen
class Took:
    """Of several steps in a row, in ms."""

    mean: float
    longest: float


class DecodeStep:
    """16 products of a batch of 64 with matrices of 8192 by 8192, bf16, as one CUDA graph.

    With `has_input`, each step first copies 1 MiB from pinned memory, as engines copy the tokens
    and page tables of a step: on the same way as a restore."""

    def __init__(
        self, n_products: int = 16, width: int = 8192, batch: int = 64, *, has_input: bool = False
    ) -> None:
        shape = (n_products, width, width)
        self._weights = torch.randn(shape, dtype=torch.bfloat16, device=DEVICE) / width**0.5
        self._input = torch.randn((batch, width), dtype=torch.bfloat16, device=DEVICE)
        self._fresh = self._input.cpu().pin_memory() if has_input else None
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

    def took(self, n_steps: int, meanwhile: Callable[[], object] = lambda: None) -> Took:
        """Of `n_steps` steps in a row, by events on the device; the first two are left out."""
        events = [
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(n_steps + 1)
        ]
        events[0].record()
        for number, event in enumerate(events[1:]):
            if self._fresh is not None:
                self._input.copy_(self._fresh, non_blocking=True)
            self._replay()
            event.record()
            # As an engine does: one step queued behind the running one.
            while not events[max(0, number - 1)].query():  # type: ignore[no-untyped-call]
                meanwhile()
        events[-1].synchronize()
        each = [float(a.elapsed_time(b)) for a, b in itertools.pairwise(events[2:])]
        return Took(statistics.mean(each), max(each))


def decode_beside(
    bench: Recorder,
    variants_by_size: Mapping[str, tuple[str, ...]],
    *,
    has_input: bool = False,
) -> None:
    """Both directions of each size and variant; `decode-beside-restore` is the default's."""
    name = "decode-with-input" if has_input else "decode"
    for size, variants in variants_by_size.items():
        layout, n_pages = LAYOUTS[size]
        with bench.case(f"decode-beside-{size}"), layered_setup(layout, n_pages) as setup:
            step = DecodeStep(has_input=has_input)
            alone_ms = step.took(20).mean
            # Two passes over all pages last about 40 ms: the steps must be over before them.
            n_steps = max(6, min(40, int(24.0 / alone_ms)))
            flat = torch.empty((n_pages, layout.page_bytes), dtype=torch.uint8, device=DEVICE)
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            for direction in Direction:
                plain_name = "restore" if direction is Direction.RESTORE else "writethrough"
                for variant in variants:
                    case = f"{name}-beside-{plain_name}" + ("" if size == "8MiB" else f"-{size}")
                    case += variant and f"/{variant}"
                    with bench.case(case), opened(setup, VARIANTS[variant]) as copies:
                        beside_rows(
                            bench, case, step, n_steps, setup, copies, flat, stream, direction
                        )


def beside_rows(
    bench: Recorder,
    case: str,
    step: DecodeStep,
    n_steps: int,
    setup: Setup,
    copies: AnyCopies,
    flat: torch.Tensor,
    stream: torch.cuda.Stream,
    direction: Direction,
) -> None:
    """Alone, beside plain copy-engine copies, and beside ours, round by round."""
    check_bytes(copies, setup, direction)
    alone: list[Took] = []
    plain: list[Took] = []
    ours: list[Took] = []
    covered = 0
    for _ in range(bench.n_rounds):
        torch.cuda.synchronize()
        alone.append(step.took(n_steps))
        torch.cuda.synchronize()
        done = plain_copies(setup, flat, stream, direction)
        plain.append(step.took(n_steps))
        covered += not done.query()  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        for _ in range(2):
            start(copies, setup, direction)
        reports: list[Landed] = []
        ours.append(step.took(n_steps, lambda: reports.extend(copies.landed())))  # noqa: B023
        reports += copies.landed()
        covered += len(reports) < 2
        finish(copies, 2 - len(reports), len(setup.host_pages))
    bench.add(
        case,
        statistics.median(each.mean for each in ours),
        "ms",
        ratio=_median_ratio(ours, alone),
        ceiling=_median_ratio(plain, alone),
        note="ratio: the step beside it / the step alone; ceiling: this ratio beside plain copies",
        alone_ms=statistics.median(each.mean for each in alone),
        beside_plain_ms=statistics.median(each.mean for each in plain),
        longest_ms=max(each.longest for each in ours),
        longest_beside_plain_ms=max(each.longest for each in plain),
        longest_alone_ms=max(each.longest for each in alone),
        n_steps=n_steps,
        covered=covered / (2 * bench.n_rounds),
    )


def _median_ratio(some: Sequence[Took], alone: Sequence[Took]) -> float:
    """Round by round."""
    return statistics.median(s.mean / a.mean for s, a in zip(some, alone, strict=True))


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
