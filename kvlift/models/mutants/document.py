"""Writes docs/mutants.md from a run of all mutants: `python -m kvlift.models.mutants.document`."""

import sys
import time
from collections.abc import Iterable, Sequence

from kvlift.models.mutants.mutant import CORE, Killed, Mutant
from kvlift.models.mutants.run import MUTANTS, N_PROCESSES, run

_HEAD = """\
# Seeded faults

How strong are the claims of `kvlift check`? Each line below is a wrong core: one small change of
the real source that is a real bug of such systems. Worlds, stories and random walks of whole
drivers are let loose on it, and must find it. `kvlift check --mutants` does this again;
`tests/models/test_mutants.py` does it for a sample, and sees to it that each change still fits the
source. This page is written by `python -m kvlift.models.mutants.document`.

A killer without `.story` is a world and the claim that breaks in it first. Moves are what happens
in the run that shows it, in a story the lines that do something; `-` stands where a claim is about
a whole world: a goal that is not reached any more, say.

The hunt for a fault ends with the first that finds it. Each fault names a world or a story to begin
with; after that come four quick worlds, all stories, the other worlds, and the walks. So a fault
that a story has found may be one that no world finds, and the other way round.

"""
_TABLE = "\n| fault | what it is | found by | moves |\n|---|---|---|---:|\n"


def document(mutants: Sequence[Mutant], found: Sequence[Killed], *, wall_s: float) -> str:
    """The page. `wall_s`: how long the run took."""
    n_killed = sum(one.killed for one in found)
    cpu_s = sum(one.cpu_s for one in found)
    steps = [one.steps for one in found if one.steps is not None]
    summary = (
        f"Last run on {time.strftime('%Y-%m-%d')}: {n_killed} of {len(found)} found, "
        f"{by_kind(one.by for one in found)}; "
        f"the longest run has {max(steps, default=0)} moves. "
        f"{cpu_s:.0f} s of processor time, {wall_s:.0f} s in {N_PROCESSES} processes.\n"
    )
    rows = [_row(mutant, one) for mutant, one in zip(mutants, found, strict=True)]
    return _HEAD + summary + _TABLE + "".join(rows)


def by_kind(finders: Iterable[str | None]) -> str:
    """How many faults a world, a story and a random walk were the first to find; None: nobody."""
    named = [by for by in finders if by is not None]
    n_by_story = sum(".story: " in by for by in named)
    n_by_walk = sum(by.startswith("walk ") for by in named)
    n_by_world = len(named) - n_by_story - n_by_walk
    return f"{n_by_world} by a world, {n_by_story} by a story, {n_by_walk} by a random walk"


def _row(mutant: Mutant, one: Killed) -> str:
    by = (one.by or "lives").replace("|", "/")
    steps = "-" if one.steps is None else str(one.steps)
    return f"| {mutant.name} | {mutant.why} | {by} | {steps} |\n"


def main() -> None:
    """Run all mutants, say how far it is, and write the page."""
    began_s = time.monotonic()

    def on_progress(n_done: int, n_all: int) -> None:
        print(f"\r{n_done} of {n_all}", end="", file=sys.stderr, flush=True)

    found = run(on_progress)
    print(file=sys.stderr)
    page = document(MUTANTS, found, wall_s=time.monotonic() - began_s)
    (CORE.parents[1] / "docs" / "mutants.md").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
