"""`kvlift check`: everything that can happen in small worlds, on the real core."""

import importlib
import importlib.util
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import click
from attrs import frozen
from rich.progress import Progress as Bar
from rich.progress import TaskID
from rich.table import Table

from kvlift.cli.finite import Finite
from kvlift.cli.output import (
    INTERRUPTED,
    end,
    fail,
    json_option,
    only_the_answer_on_stdout,
    print_json,
    progress_bar,
    say,
    table_console,
)
from kvlift.models.branches import Branches, can_measure, together
from kvlift.models.charts import all_edge_names
from kvlift.models.explore import Progress
from kvlift.models.jobs import Jobs, WorkerFailed
from kvlift.models.worker import Job, Result
from kvlift.models.worlds import CALM_SHARE

REGISTRY: Final = "kvlift.models.worlds"
MUTANTS: Final = "kvlift.models.mutants"

_SECONDS, _SECONDS_DEEP = 300.0, 3600.0
_STATES, _STATES_DEEP = 1_000_000, 20_000_000
_IN_TURN: Final = "[{:,.0f}; with --deep {:,.0f}]"
_SECONDS_ALL: Final = 170.0
"""Branches are measured by default in what the worlds leave of this time."""

_SECONDS_A_LINE: Final = 20.0
"""Between two lines about a deep world, where there is no terminal for a bar."""

_SECONDS_TO_MEASURE: Final = 5.0
"""A world is measured for at least so long."""


class MutantResult(Protocol):
    """One seeded fault: whether a world found it, by which claim, and after how many moves."""

    name: str
    killed: bool
    by: str | None
    steps: int | None


@frozen(kw_only=True)
class Findings:
    """What `check` has to say. `branches` and `mutants` are None where they were not asked for."""

    results: Sequence[Result]
    branches: Branches | None
    mutants: Sequence[MutantResult] | None
    was_interrupted: bool = False

    @property
    def incomplete(self) -> list[str]:
        """Worlds of which a limit has left something unexplored: nothing is proved of them."""
        return [result.world for result in self.results if not result.complete]

    @property
    def holds(self) -> bool:
        """Whether all worlds were explored to their end, no claim is broken, no goal was missed
        and no mutant lives."""
        lives = any(not mutant.killed for mutant in self.mutants or ())
        is_broken = any(result.n_broken for result in self.results)
        return not lives and not is_broken and not self.incomplete


@click.command(
    epilog="Example: kvlift check restore ranks --seconds 20",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.argument("worlds", nargs=-1, metavar="[WORLD]...")
@click.option("--list", "lists", is_flag=True, help="Say which worlds there are.")
@click.option(
    "--seconds",
    type=Finite(0, min_open=True),
    help=f"At most, a world. {_IN_TURN.format(_SECONDS, _SECONDS_DEEP)}",
)
@click.option(
    "--max-states",
    type=click.IntRange(min=1),
    help=f"At most, a world. {_IN_TURN.format(_STATES, _STATES_DEEP)}",
)
@click.option("--deep", is_flag=True, help="Larger worlds: minutes each, gigabytes of memory.")
@click.option("--mutants", "mutates", is_flag=True, help="Seed faults: each must be found.")
@click.option(
    "--coverage/--no-coverage",
    default=None,
    help="Measure which branches of the core are reached. By default if nothing else is asked for.",
)
@click.option(
    "--jobs",
    type=click.IntRange(min=1, max=64),
    default=lambda: min(2, os.cpu_count() or 1),
    show_default="2",
    help="Processes.",
)
@json_option
def check(
    *,
    worlds: tuple[str, ...],
    lists: bool,
    seconds: float | None,
    max_states: int | None,
    deep: bool,
    mutates: bool,
    coverage: bool | None,
    jobs: int,
    as_json: bool,
) -> None:
    """Explore small worlds exhaustively on the real core.

    A world is a small situation with everything that can happen in it. A claim that does not hold
    is printed as a story; save it and replay it with `kvlift story`.

    Ends with 0 if every world was explored to its end and all its claims hold, and with 1 if one
    does not hold or a limit was reached first.
    """
    known: Mapping[str, object] = importlib.import_module(REGISTRY).WORLDS
    if not known:
        fail("this installation has no worlds: reinstall kvlift")
    if lists:
        _list(known, as_json=as_json)
        return
    for name in worlds:
        if name not in known:
            raise click.UsageError(f"no world is called {name!r}: there are {', '.join(known)}")
    if coverage and not can_measure():
        fail("--coverage needs the library coverage: pip install 'kvlift[check]'")
    if mutates and importlib.util.find_spec(MUTANTS) is None:
        fail("--mutants needs kvlift.models.mutants, which this installation lacks: reinstall it")
    asked = [
        Job(
            world=name,
            deep=deep,
            seconds_max=seconds or (_SECONDS_DEEP if deep else _SECONDS),
            n_states_max=max_states or (_STATES_DEEP if deep else _STATES),
            registry=REGISTRY,
        )
        for name in dict.fromkeys(worlds or known)
    ]
    by_default = not worlds and not deep and not mutates
    measures = coverage if coverage is not None else by_default
    with only_the_answer_on_stdout(as_json=as_json):
        try:
            findings = _findings(asked, jobs, mutates=mutates, measures=measures, insists=coverage)
        except WorkerFailed as error:
            fail(str(error))
    if as_json:
        print_json(_as_json(findings))
    else:
        _print(findings)
    if findings.was_interrupted:
        raise click.exceptions.Exit(INTERRUPTED)
    if findings.incomplete:
        say(_of_incomplete(findings))
    end(holds=findings.holds)


def _list(known: Mapping[str, object], *, as_json: bool) -> None:
    """The worlds, with the first line of what their factory says about them."""
    about = {name: (world.__doc__ or "").strip().split("\n")[0] for name, world in known.items()}
    if as_json:
        print_json({"worlds": [{"name": name, "about": text} for name, text in about.items()]})
        return
    width = max(map(len, about))
    for name, text in about.items():
        click.echo(f"{name:{width}}  {text}".rstrip())


def _findings(
    asked: Sequence[Job], n_processes: int, *, mutates: bool, measures: bool, insists: bool | None
) -> Findings:
    """Run everything; `insists`: measure branches whatever time is left."""
    began_s = time.monotonic()
    branches: Branches | None = None
    with progress_bar() as bar:
        results, was_interrupted = _run(asked, n_processes, bar, "{world}")
        if was_interrupted:
            return Findings(results=results, branches=None, mutants=None, was_interrupted=True)
        if measures and can_measure():
            left_s = _SECONDS_ALL - (time.monotonic() - began_s)
            share_s = max(_SECONDS_TO_MEASURE, left_s * n_processes / len(asked))
            branches = _branches(asked, results, n_processes, bar, None if insists else share_s)
        mutants = _mutants(bar) if mutates else None
    return Findings(results=results, branches=branches, mutants=mutants)


def _branches(
    asked: Sequence[Job],
    results: Sequence[Result],
    n_processes: int,
    bar: Bar,
    seconds_max: float | None,
) -> Branches:
    """The branches of the core that the worlds reach, small worlds first. What is reached only
    grows, so nothing is left to measure once everything is reached."""
    n_states = {result.world: result.n_states for result in results}
    jobs = [
        Job(
            world=job.world,
            deep=job.deep,
            n_states_max=job.n_states_max,
            seconds_max=min(job.seconds_max, seconds_max or job.seconds_max),
            measures_branches=True,
            registry=job.registry,
        )
        for job in sorted(asked, key=lambda job: n_states.get(job.world, 0))
    ]

    def reached(measured: Sequence[Result]) -> Branches:
        return together(r.branches for r in measured if r.branches is not None)

    measured, _ = _run(
        jobs, n_processes, bar, "branches of {world}", lambda found: not reached(found).missing
    )
    return reached(measured)


def _run(
    jobs: Sequence[Job],
    n_processes: int,
    bar: Bar,
    title: str,
    is_enough: Callable[[Sequence[Result]], bool] = lambda _found: False,
) -> tuple[list[Result], bool]:
    """All jobs, each with a bar of its own: states expanded of states found. What came out, and
    whether that was cut short by an interrupt; `is_enough` looks at what has come and ends it too.

    Without a terminal a deep world says now and then how far it is."""
    tasks: dict[str, TaskID] = {}
    results: list[Result] = []
    said_s: dict[str, float] = {}

    def on_progress(job: Job, progress: Progress) -> None:
        now_s = time.monotonic()
        if job.deep and bar.disable and now_s - said_s.get(job.world, 0.0) > _SECONDS_A_LINE:
            said_s[job.world] = now_s
            say(
                f"{job.world}: {progress.n_states:,} states, {progress.n_transitions:,} "
                f"transitions, depth {progress.depth}, {progress.n_waiting:,} waiting"
            )
        bar.update(
            tasks[job.world],
            completed=progress.n_states - progress.n_waiting,
            total=progress.n_states,
            visible=True,
        )

    def on_result(job: Job, result: Result) -> None:
        results.append(result)
        bar.remove_task(tasks[job.world])
        if is_enough(results):
            running.interrupt()

    for job in jobs:
        tasks[job.world] = bar.add_task(title.format(world=job.world), total=None, visible=False)
    with Jobs(n_processes, on_progress) as running:
        running.run(jobs, on_result)
        return results, running.interrupted.is_set()


def _mutants(bar: Bar) -> Sequence[MutantResult]:
    """`mutants.run(on_progress)` seeds every fault and explores until a claim breaks."""
    task = bar.add_task("mutants", total=None)

    def on_progress(n_done: int, n_all: int) -> None:
        bar.update(task, completed=n_done, total=n_all)

    found: Sequence[MutantResult] = importlib.import_module(MUTANTS).run(on_progress)
    return found


def _calm_share(results: Sequence[Result]) -> float | None:
    """Of all calm requests those that ended well and used the cache; None without calm requests."""
    shares = [result.shares[CALM_SHARE] for result in results if CALM_SHARE in result.shares]
    n_good, n_counted = (sum(share[i] for share in shares) for i in (0, 1))
    return n_good / n_counted if n_counted else None


def _edges_covered(results: Sequence[Result]) -> frozenset[str]:
    known = all_edge_names()
    return frozenset(name for result in results for name in result.edges_taken if name in known)


def _as_json(findings: Findings) -> dict[str, Any]:
    def claims(stories: Mapping[str, str | None]) -> dict[str, str | bool]:
        return {name: True if story is None else story for name, story in stories.items()}

    value: dict[str, Any] = {
        "interrupted": findings.was_interrupted,
        "worlds": [
            {
                "name": result.world,
                "states": result.n_states,
                "transitions": result.n_transitions,
                "depth": result.depth,
                "complete": result.complete,
                "seconds": result.seconds,
                "rss_bytes": result.rss_bytes,
                "always": claims(result.always),
                "sometimes": dict(result.sometimes),
                "live": claims(result.live),
                "states_per_second": result.n_states / max(result.seconds, 1e-6),
                "core_calls": result.n_runs,
            }
            for result in findings.results
        ],
        "edges_covered": len(_edges_covered(findings.results)),
        "edges_total": len(all_edge_names()),
        "edges_missing": sorted(all_edge_names() - _edges_covered(findings.results)),
        "core_branch_coverage": None if findings.branches is None else findings.branches.fraction,
        "branches_missing": [] if findings.branches is None else findings.branches.missing,
        "calm_done_from_cache": _calm_share(findings.results),
    }
    if findings.mutants is not None:
        value["mutants"] = [
            {"name": m.name, "killed": m.killed, "by": m.by, "steps": m.steps}
            for m in findings.mutants
        ]
    return value


def _print(findings: Findings) -> None:
    table = Table("world", "states", "transitions", "depth", "complete", "states/s", "claims")
    for column in table.columns[1:4]:
        column.justify = "right"
    for result in findings.results:
        table.add_row(
            result.world,
            f"{result.n_states:,}",
            f"{result.n_transitions:,}",
            str(result.depth),
            "yes" if result.complete else "no: limit reached",
            f"{result.n_states / max(result.seconds, 1e-6):,.0f}",
            _in_short(result),
        )
    table_console().print(table)
    if findings.was_interrupted:
        click.echo("interrupted: this is what was explored until then")
    for result in findings.results:
        _print_broken(result)
    n_total = len(all_edge_names())
    click.echo(f"arrows taken: {len(_edges_covered(findings.results))} of {n_total}")
    if findings.branches is not None:
        click.echo(f"branches of the core reached: {findings.branches.fraction:.1%}")
        for file, line, after in findings.branches.missing:
            click.echo(f"  not taken: {file}, from line {line} to {after}")
    calm = _calm_share(findings.results)
    if calm is not None:
        click.echo(f"{CALM_SHARE}: {calm:.1%}")
    for mutant in findings.mutants or ():
        fate = f"found by {mutant.by!r} after {mutant.steps} moves" if mutant.killed else "LIVES"
        click.echo(f"mutant {mutant.name}: {fate}")


def _of_incomplete(findings: Findings) -> str:
    n_all, n_left = len(findings.results), len(findings.incomplete)
    return (
        f"kvlift: {n_left} of {n_all} worlds reached a limit and were not explored to their end "
        f"({', '.join(findings.incomplete)}), so this is no pass: give more --seconds or "
        "--max-states"
    )


def _in_short(result: Result) -> str:
    n_claims = len(result.always) + len(result.sometimes) + len(result.live)
    if result.n_broken:
        return f"{result.n_broken} of {n_claims} broken"
    return f"{n_claims} hold" if result.complete else f"{n_claims}, none broken so far"


def _print_broken(result: Result) -> None:
    for kind, stories in (("always", result.always), ("live", result.live)):
        for name, story in stories.items():
            if story is not None:
                click.echo(f"\n{result.world}: {kind} {name!r} does not hold:\n\n{story}")
    for name, is_reached in result.sometimes.items():
        if not is_reached:
            why = "is never reached" if result.complete else "was not reached before the limit"
            click.echo(f"\n{result.world}: sometimes {name!r} {why}")
