"""Hunts all seeded faults, two at a time."""

import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Final

import msgspec

from kvlift.models.mutants.admission import ADMISSION
from kvlift.models.mutants.calls import CALLS
from kvlift.models.mutants.filling import FILLING
from kvlift.models.mutants.mutant import Killed, Mutant
from kvlift.models.mutants.pages import PAGES
from kvlift.models.mutants.peers import PEERS
from kvlift.models.mutants.ranks import RANKS
from kvlift.models.mutants.way_down import WAY_DOWN

MUTANTS: Final[tuple[Mutant, ...]] = (
    *ADMISSION,
    *FILLING,
    *PEERS,
    *PAGES,
    *WAY_DOWN,
    *CALLS,
    *RANKS,
)
N_PROCESSES: Final = 2
CPU_S_MAX: Final = 90.0
"""For one mutant: far more than all worlds and stories take together."""


def run(
    on_progress: Callable[[int, int], None], mutants: Sequence[Mutant] = MUTANTS
) -> Sequence[Killed]:
    """What became of each mutant, in their order. `on_progress` is given (n_done, n_all)."""
    on_progress(0, len(mutants))
    with ThreadPoolExecutor(max_workers=N_PROCESSES) as threads:
        hunts = [threads.submit(hunted, mutant) for mutant in mutants]
        try:
            for n_done, _ in enumerate(as_completed(hunts), 1):
                on_progress(n_done, len(mutants))
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            raise
        return [hunt.result() for hunt in hunts]


def hunted(mutant: Mutant, cpu_s_max: float = CPU_S_MAX) -> Killed:
    """One mutant in a process of its own. One that reaches the time limit was not found.

    Raises RuntimeError when its process ends without an answer, with what it said last."""
    task = {"mutant": mutant, "cpu_s_max": cpu_s_max}
    done = subprocess.run(
        [sys.executable, "-m", "kvlift.models.mutants.hunt", msgspec.json.encode(task)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    if done.stdout:
        return msgspec.json.decode(done.stdout, type=Killed)
    if done.returncode < 0:
        return Killed(name=mutant.name, killed=False, by=None, steps=None, cpu_s=cpu_s_max)
    last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
    raise RuntimeError(f"mutant {mutant.name!r} was not hunted: {last[0] if last else 'no reason'}")
