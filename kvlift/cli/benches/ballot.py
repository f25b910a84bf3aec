"""How long a tick waits for the verdict of a ballot whose reduction ran beside a decode step.

Two real processes with gloo; the ballot has the length of the default config. A step is modelled by
sleeping, as the host's thread does while the device works. Ceiling: one blocking reduction of the
same vector, taken in the same run in turns.
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import click
import msgspec

from kvlift.cli.benches.row import Row, row
from kvlift.core.ballot import ballot_length
from kvlift.effects.ranks_gloo import GlooRanks, join_store, open_store
from kvlift.runtime.config import Config

N_RANKS = 2
N_ROUNDS = 150
STEPS_MS = (20, 5, 0)


class Waits(msgspec.Struct):
    """Microseconds of each wait, by step length in ms; `blocking`: send and verdict at once."""

    blocking: list[float]
    by_step_ms: dict[str, list[float]]


def measure(progress: Callable[[str], None]) -> list[Row]:
    progress(f"{N_RANKS} ranks, {N_ROUNDS} rounds")
    store = open_store()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "kvlift.cli.benches.ballot", str(rank), str(store.port)],
            stdout=subprocess.PIPE,
        )
        for rank in range(N_RANKS)
    ]
    try:
        told = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    waits = msgspec.json.decode(told[0], type=Waits)
    blocking_us = statistics.median(waits.blocking)
    rows = [row("blocking", blocking_us, "us")]
    for step_ms in STEPS_MS:
        wait_us = statistics.median(waits.by_step_ms[str(step_ms)])
        case = f"wait-step{step_ms}ms" if step_ms else "wait-empty-batch"
        rows.append(row(case, wait_us, "us", blocking_us, "ceiling: one blocking reduction"))
    return rows


@click.command()
@click.argument("rank", type=int)
@click.argument("port", type=int)
def one_rank(rank: int, port: int) -> None:
    """One process of the bench; prints its waits."""
    n_ints = ballot_length(Config().policy())
    ranks = GlooRanks(
        rank, N_RANKS, join_store("127.0.0.1", port), deadline_s=20, ballot_length=n_ints
    )
    waits = Waits(blocking=[], by_step_ms={str(step_ms): [] for step_ms in STEPS_MS})
    for number in range(N_ROUNDS):
        ballot = [number] * n_ints
        begin_s = time.perf_counter()
        ranks.send(ballot)
        least = ranks.verdict()
        waits.blocking.append((time.perf_counter() - begin_s) * 1e6)
        assert least[0] == least[-1] == number
        for step_ms in STEPS_MS:
            ranks.send(ballot)
            if step_ms:
                time.sleep(step_ms / 1000)
            begin_s = time.perf_counter()
            assert ranks.verdict()[0] == number
            waits.by_step_ms[str(step_ms)].append((time.perf_counter() - begin_s) * 1e6)
    ranks.close()
    click.echo(msgspec.json.encode(waits))


if __name__ == "__main__":
    one_rank()
