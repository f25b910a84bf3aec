"""Tables of what `kvlift check --json` and the fuzzers have found, for `benches/figures.py`."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvlift.models.mutants.document import by_kind
from kvlift.models.worlds import WORLDS

Result = Mapping[str, Any]

MIB = 2**20
ARROWS_NAMED_MAX = 5


def worlds_table(result: Result) -> list[str]:
    """One row a world, and in words what was held against all of them."""
    worlds = result["worlds"]
    lines = [
        "| world | what happens in it | states | transitions | depth | complete |",
        "|---|---|---:|---:|---:|---|",
    ]
    for world in worlds:
        counts = " | ".join(f"{world[key]:,}" for key in ("states", "transitions", "depth"))
        is_complete = "yes" if world["complete"] else "no: a limit was reached"
        lines.append(f"| {world['name']} | {_about(world['name'])} | {counts} | {is_complete} |")
    n_states, n_transitions = (sum(w[key] for w in worlds) for key in ("states", "transitions"))
    n_complete = sum(world["complete"] for world in worlds)
    lines.append(
        f"| **all {len(worlds)}** | | **{n_states:,}** | **{n_transitions:,}** | | "
        f"{n_complete} of {len(worlds)} |"
    )
    return [*lines, "", " ".join(_sentences(result))]


def fuzz_table(result: Result) -> list[str]:
    """One row a surface: how much was fed, by whom, and what came of it."""
    lines = [
        "| surface | inputs | by | kinds of answer | slowest | memory grew by | found |",
        "|---|---:|---|---:|---:|---:|---:|",
    ]
    for seen in result["surfaces"]:
        by = ", ".join(f"{engine} {n:,}" for engine, n in seen["engines"].items() if n)
        lines.append(
            f"| {seen['surface']} | {seen['inputs']:,} | {by} | {len(seen['outcomes'])} | "
            f"{seen['slowest_ms']:.0f} ms | {seen['peak_rss_growth_mib']} MiB | "
            f"{len(seen['failures'])} |"
        )
    return lines


def _about(name: str) -> str:
    """The first line of what the world says of itself."""
    if name not in WORLDS:
        raise ValueError(f"there is no world {name!r} any more: run the check again")
    return (WORLDS[name].__doc__ or "").strip().split("\n")[0]


def _sentences(result: Result) -> list[str]:
    """Claims, arrows, branches, seeded faults and effort; what does not hold is said as loudly."""
    worlds = result["worlds"]
    said = []
    if result["interrupted"]:
        said.append("**The run was interrupted: worlds that had not begun are missing.**")
    for kind, words in (
        ("always", "claims that hold in every state or step"),
        ("live", "liveness claims"),
        ("sometimes", "corners that must be reached"),
    ):
        values = [value for world in worlds for value in world[kind].values()]
        n_true = sum(value is True for value in values)
        said.append(f"{n_true:,} of {len(values):,} {words}.")
    names = {name for world in worlds for kind in ("always", "live") for name in world[kind]}
    said.append(f"{len(names)} different claims.")
    said.append(f"Arrows of the charts taken: {result['edges_covered']} of {result['edges_total']}")
    said[-1] += f"{_arrows(result['edges_missing'])}."
    if result["core_branch_coverage"] is not None:
        said.append(f"Branches of the core reached: {result['core_branch_coverage']:.2%}.")
    if result["calm_done_from_cache"] is not None:
        said.append(f"Calm requests done from the cache: {result['calm_done_from_cache']:.0%}.")
    if "mutants" in result:
        said.append(_of_mutants(result["mutants"]))
    seconds = sum(world["seconds"] for world in worlds)
    rss = max(world["rss_bytes"] for world in worlds) / MIB
    said.append(f"{seconds:,.0f} s in all worlds together, at most {rss:,.0f} MiB a process.")
    return said


def _arrows(missing: Sequence[str]) -> str:
    """Which ones are missing, where a reader would want to know."""
    if len(missing) > ARROWS_NAMED_MAX:
        return ""
    return f", not: {', '.join(missing)}" if missing else ""


def _of_mutants(mutants: Sequence[Mapping[str, Any]]) -> str:
    n_killed = sum(mutant["killed"] for mutant in mutants)
    longest = max(mutant["steps"] or 0 for mutant in mutants)
    first = by_kind(mutant["by"] for mutant in mutants)
    return (
        f"Seeded faults found: {n_killed} of {len(mutants)}: {first} "
        f"(whichever comes first, see docs/mutants.md); the longest run has {longest} moves."
    )
