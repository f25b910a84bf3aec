"""The counts of a run, as they are committed; and the survivors, as a person reads them."""

import os
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from tests.mutation.breed import Mutant
from tests.mutation.explained import key_of, reasons
from tests.mutation.hunt import Fate

ALIVE: Final = ("survived", "unreached")
"""Fates of mutants that no test has noticed."""


def result_of(
    mutants: Sequence[Mutant], fates: Mapping[str, Fate], *, command: str, n_tests: int
) -> dict[str, Any]:
    """Counts by file and in all. Shares are of the mutants that have a fate: mypy's, or a test's.

    `equivalents` are not taken off: a survivor is a survivor."""
    by_file: dict[str, Counter[str]] = {}
    for mutant in mutants:
        counts = by_file.setdefault(mutant.file, Counter())
        counts["generated"] += 1
        counts[_fate_of(mutant, fates)] += 1
    all_of_them: Counter[str] = sum(by_file.values(), Counter())
    alive = alive_of(mutants, fates)
    known = reasons()
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": command,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, shared",
        "python": platform.python_version(),
        "n_tests": n_tests,
        "all": _counts(all_of_them),
        "files": {file: _counts(counts) for file, counts in sorted(by_file.items())},
        "explained": sum(key_of(mutant) in known for mutant in alive),
        "alive": [mutant.name for mutant in alive],
    }


def alive_of(mutants: Sequence[Mutant], fates: Mapping[str, Fate]) -> list[Mutant]:
    return [mutant for mutant in mutants if _fate_of(mutant, fates) in ALIVE]


def _fate_of(mutant: Mutant, fates: Mapping[str, Fate]) -> str:
    if mutant.errors:
        return "mypy"
    fate = fates.get(mutant.name)
    return "not_run" if fate is None else fate.how


def _counts(counts: Counter[str]) -> dict[str, int | float | None]:
    n_alive = sum(counts[how] for how in ALIVE)
    n_noticed = counts["killed"] + counts["timeout"]
    n_run = n_noticed + n_alive
    share = n_noticed / n_run if n_run else None
    n_right = counts["generated"] - counts["mypy"]
    score = None
    if share is not None or not n_right:
        score = round((counts["mypy"] + (share or 0.0) * n_right) / counts["generated"], 4)
    return {
        "generated": counts["generated"],
        "killed_by_mypy": counts["mypy"],
        "killed_by_tests": counts["killed"],
        "timeout": counts["timeout"],
        "survived": counts["survived"],
        "unreached": counts["unreached"],
        "not_run": counts["not_run"],
        "share_of_type_correct": None if share is None else round(share, 4),
        "score": score,
    }


def listed(mutants: Sequence[Mutant], fates: Mapping[str, Fate]) -> str:
    """Every mutant that lives, with what it changes, and whether that is explained."""
    known = reasons()
    lines: list[str] = []
    for mutant in alive_of(mutants, fates):
        fate = fates[mutant.name]
        why = known.get(key_of(mutant), "not explained")
        lines.append(f"{mutant.name}  ({fate.how}, {fate.n_tests} tests): {why}")
        lines += [f"    {line}" for line in mutant.diff()]
    return "\n".join(lines)


def write(file: Path, text: str) -> None:
    """Whole, or not at all."""
    new = file.with_name(file.name + ".new")
    new.write_text(text, encoding="utf-8")
    new.replace(file)
