"""One world in a process of its own: `python -m kvlift.models.worker JSON`.

Only names and numbers go in (one JSON argument, a `Job`) and only JSON lines come out (`Line`, the
result last), so that nothing of ours has to travel between processes as an object.
"""

import gc
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import msgspec
from attrs import frozen

import kvlift.core
from kvlift.models.branches import Branches, coverage_of
from kvlift.models.claim import Trace, World, as_story
from kvlift.models.explore import Limits, Progress, Report, explore
from kvlift.models.memo import memo_counts

CORE: Final = Path(next(iter(kvlift.core.__path__)))
"""The folder whose branches are measured."""


@frozen(kw_only=True)
class Job:
    """What to explore. `registry`: the module whose `WORLDS` has the world."""

    world: str
    deep: bool = False
    n_states_max: int = 1_000_000
    seconds_max: float = 60.0
    measures_branches: bool = False
    registry: str = "kvlift.models.worlds"


@frozen(kw_only=True)
class Result:
    """What came out. Stories stand where a claim is broken, None where it holds.

    `sometimes`: whether each goal was reached. `branches` is None where they were not measured.
    `n_calls` and `n_runs`: calls of memoised functions, and how many of them really ran.
    `rss_bytes`: the most memory that this process has had.
    """

    world: str
    n_states: int
    n_transitions: int
    depth: int
    complete: bool
    seconds: float
    always: Mapping[str, str | None]
    sometimes: Mapping[str, bool]
    live: Mapping[str, str | None]
    shares: Mapping[str, tuple[int, int]]
    edges_taken: frozenset[str]
    n_calls: int
    n_runs: int
    rss_bytes: int
    branches: Branches | None = None

    @property
    def n_broken(self) -> int:
        """Claims that don't hold: broken ones, and goals that a complete search never reached."""
        stories = [*self.always.values(), *self.live.values()]
        n_missed = sum(not reached for reached in self.sometimes.values()) if self.complete else 0
        return sum(story is not None for story in stories) + n_missed


def run_job(
    job: Job, on_progress: Callable[[Progress], None], shall_stop: Callable[[], bool]
) -> Result:
    """Explore in this process. Raises KeyError for a world that the registry does not have."""
    world: World[Any] = import_module(job.registry).WORLDS[job.world](deep=job.deep)
    limits = Limits(n_states_max=job.n_states_max, seconds_max=job.seconds_max)
    reports: list[Report[Any]] = []
    branches = None

    def search() -> None:
        reports.append(explore(world, limits, on_progress, shall_stop))

    if job.measures_branches:
        branches = coverage_of(CORE, search)
    else:
        search()
    (report,) = reports

    def stories(traces: Mapping[str, Trace[Any] | None]) -> dict[str, str | None]:
        return {
            name: None if trace is None else as_story(world, trace, claim=name)
            for name, trace in traces.items()
        }

    counts = memo_counts().values()
    return Result(
        world=job.world,
        n_states=report.n_states,
        n_transitions=report.n_transitions,
        depth=report.depth,
        complete=report.complete,
        seconds=report.seconds,
        always=stories(report.always),
        sometimes={name: trace is not None for name, trace in report.sometimes.items()},
        live=stories(report.live),
        shares=report.shares,
        edges_taken=frozenset(world.edges_taken()),
        n_calls=sum(count.n_calls for count in counts),
        n_runs=sum(count.n_runs for count in counts),
        rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        branches=branches,
    )


@frozen(kw_only=True)
class Line:
    """What a worker prints: one of the two."""

    progress: Progress | None = None
    result: Result | None = None


def main() -> None:
    """Run the job in the first argument. An interrupt ends the search, and what it has found until
    then is the result."""
    interrupts: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _frame: interrupts.append(number))
    gc.disable()  # as in `explore`; and not switched on again afterwards, for what is left to do
    job = msgspec.json.decode(sys.argv[1], type=Job)

    def tell(line: Line) -> None:
        print(msgspec.json.encode(line).decode(), flush=True)

    def on_progress(progress: Progress) -> None:
        tell(Line(progress=progress))

    tell(Line(result=run_job(job, on_progress, lambda: bool(interrupts))))


if __name__ == "__main__":
    main()
