"""The multi-turn benchmark: TTFT and TPOT over a link of given rate, by tiers in use.

Prompts that grow over six rounds, several conversations at once, the KV and the computing of an
8-billion-parameter model with random weights; prefill with a prefix cache of its own, on the second
GPU where there is one; transfers stream while prefill computes; decoding batches continuously
through kvlift's driver, copies, host pool and file store. Without a GPU, or with `--tiny`, the same
in small, on the CPU: then only the counts mean something.

Storage's files lie in `KVLIFT_BENCH_DIR` (a folder in memory is fine), else in the temporary
folder.
"""

import os
from collections.abc import Callable
from pathlib import Path

import attrs
import torch

from kvlift.cli.benches.row import Row
from kvlift.cli.benches.ttft.machine import Machine
from kvlift.cli.benches.ttft.play import Play, Played
from kvlift.cli.benches.ttft.report import rate_rows, row_of
from kvlift.cli.benches.ttft.sizes import FULL, TINY, Sizes
from kvlift.cli.benches.ttft.workload import fresh_tokens, turns_of


def measure(
    progress: Callable[[str], None],
    *,
    is_tiny: bool = False,
    sizes: Sizes | None = None,
    on_row: Callable[[Row], None] = lambda _row: None,
) -> list[Row]:
    """All plays. `on_row` is told each row when it is there, so that a run cut short has them."""
    is_small = is_tiny or not torch.cuda.is_available()
    sizes = sizes or (TINY if is_small else FULL)
    place = os.environ.get("KVLIFT_BENCH_DIR")
    rows: list[Row] = []

    def told(row: Row) -> None:
        rows.append(row)
        on_row(row)

    with Machine.opened(sizes, Path(place) if place else None, progress) as machine:
        tokens = fresh_tokens(sizes)
        rates = machine.measured(tokens, progress)
        for row in rate_rows(rates, machine):
            told(row)
        turns = turns_of(sizes, tokens, rates.prefill_s_by_round)
        for gbps in sizes.rates_gbps:
            none: Played | None = None
            for mode in sizes.modes:
                progress(f"{gbps:g} Gb/s, mode {mode}")
                played = Play(machine, turns, mode, gbps).run()
                none = played if mode == "none" else none
                row = row_of(played, none, sizes, rates)
                where = "two GPUs" if machine.n_gpus > 1 else "one GPU for both"
                told(attrs.evolve(row, note=f"{row.note}; {where if machine.n_gpus else 'CPU'}"))
    return rows
