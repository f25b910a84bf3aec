"""`kvlift simulate`: seeded runs of the whole runtime with faults, and the command for each."""

import difflib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Final

import click
import msgspec
from attrs import frozen

from kvlift.cli.output import (
    end,
    fail,
    json_option,
    only_the_answer_on_stdout,
    print_json,
    progress_bar,
    say,
    table_console,
)
from kvlift.runtime.demo.trace import TraceError
from kvlift.testing.sim.cast import CannotBeTold
from kvlift.testing.sim.command import command_of
from kvlift.testing.sim.faults import KINDS
from kvlift.testing.sim.plan import N_TICKS, Options
from kvlift.testing.sim.report import Report
from kvlift.testing.sim.run import Result, Violation
from kvlift.testing.sim.shrink import shrunk
from kvlift.testing.sim.story import story_of
from kvlift.testing.sim.worker import SimJob, results
from kvlift.testing.sim.workload import trace_window

N_SEEDS: Final = 100
N_SHRUNK_MAX: Final = 3
"""Seeds whose violation is made smaller; the first ones say enough."""


def _kinds(_ctx: click.Context, _param: click.Parameter, text: str) -> tuple[str, ...] | None:
    """`all` is None: a mix that belongs to the seed."""
    if text == "all":
        return None
    if text == "none":
        return ()
    kinds = tuple(dict.fromkeys(word.strip() for word in text.split(",")))
    for kind in kinds:
        if kind in ("all", "none"):
            raise click.BadParameter(f"{kind!r} stands alone: leave the other kinds out, or it")
        if kind not in KINDS:
            near = difflib.get_close_matches(kind, KINDS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(KINDS)}"
            raise click.BadParameter(f"no fault is called {kind!r}; {hint}")
    return kinds


@click.command(
    epilog="Example: kvlift simulate --seeds 20 --faults peer_dies,store_slow",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.option("--seed", type=click.IntRange(min=0), help="The first seed; alone, the only one.")
@click.option("--seeds", type=click.IntRange(1, 10_000_000), help=f"How many. [{N_SEEDS}]")
@click.option(
    "--jobs",
    type=click.IntRange(1, 64),
    default=lambda: min(2, os.cpu_count() or 1),
    show_default="2",
    help="Processes.",
)
@click.option(
    "--ticks",
    type=click.IntRange(1, 1_000_000),
    default=N_TICKS,
    show_default=True,
    help="Ticks of the phase in which anything may fail; then all must finish.",
)
@click.option("--ranks", type=click.IntRange(1, 16), help="Decode ranks. By default drawn.")
@click.option(
    "--faults",
    default="all",
    metavar="all|none|KIND,...",
    callback=_kinds,
    help="Kinds that may strike; all: a mix that is drawn from the seed.",
)
@click.option(
    "--trace",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Play requests of this Mooncake-format trace.",
)
@click.option(
    "--requests",
    type=click.IntRange(min=1),
    help="Arrivals at most, a seed; one that is tried again is counted again.",
)
@click.option(
    "--repeat-every",
    type=click.IntRange(min=0),
    default=10,
    show_default=True,
    help="Play each n-th seed twice: it must decide the same. 0: none.",
)
@click.option(
    "--stories",
    type=click.Path(path_type=Path, file_okay=False, writable=True),
    help="Folder for stories of violations, made if it is missing; by default the system's for "
    "temporary files.",
)
@json_option
def simulate(
    *,
    seed: int | None,
    seeds: int | None,
    jobs: int,
    ticks: int,
    ranks: int | None,
    faults: tuple[str, ...] | None,
    trace: Path | None,
    requests: int | None,
    repeat_every: int,
    stories: Path | None,
    as_json: bool,
) -> None:
    """Run seeded simulations of the whole runtime, with faults.

    One seed is one run: ranks, clocks, stores, prefill nodes and a scheduler. Ends with 1 if a
    checker objects, and prints the seed, the tick, the command that plays the run again, and the
    path of a story that shows the same, where one could be made.
    """
    options = Options(
        n_ticks=ticks,
        n_ranks=ranks,
        faults=faults,
        n_requests_max=requests,
        trace=None if trace is None else str(trace),
    )
    first = seed or 0
    n_seeds = seeds or (N_SEEDS if seed is None else 1)
    if stories is not None:
        _make(stories)
    with only_the_answer_on_stdout(as_json=as_json):
        try:
            if trace is not None:
                trace_window(str(trace), first)
            report = _play(range(first, first + n_seeds), options, jobs, repeat_every)
            told = _violations(report, options, stories)
        except (TraceError, SimulationFailed) as error:
            fail(str(error))
    if as_json:
        print_json({**report.as_json(), "violations": told})
    else:
        _print(report, told)
    end(holds=not report.violations)


def _make(folder: Path) -> None:
    """Before anything is played, so that a long run does not end without its stories."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        fail(f"{folder} can't be made ({error.strerror}): name a folder for stories elsewhere")


class SimulationFailed(Exception):
    """A worker process ended without all its results."""


def _play(seeds: range, options: Options, n_jobs: int, repeat_every: int) -> Report:
    """All seeds, spread over processes; one process plays them here."""
    n_jobs = min(n_jobs, len(seeds))
    if n_jobs == 1:
        job = SimJob(seeds=tuple(seeds), options=options, repeat_every=repeat_every)
        found: Iterator[Result] = results(job)
    else:
        found = _from_processes(seeds, options, n_jobs, repeat_every)
    done: dict[int, Result] = {}
    with progress_bar() as bar:
        task = bar.add_task("seeds", total=len(seeds))
        for result in found:
            done[result.seed] = result
            bar.advance(task)
            if result.violations and sys.stderr.isatty():
                say(f"seed {result.seed}: {result.violations[0].claim}")
    return Report.of(seeds[0], (done[seed] for seed in seeds))


def _from_processes(
    seeds: range, options: Options, n_jobs: int, repeat_every: int
) -> Iterator[Result]:
    """Results as they come. Every process ends with this iterator."""
    heard: SimpleQueue[Result | None] = SimpleQueue()
    jobs = [
        SimJob(seeds=tuple(seeds[number::n_jobs]), options=options, repeat_every=repeat_every)
        for number in range(n_jobs)
    ]
    processes: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryFile() as complaints, ThreadPoolExecutor(n_jobs) as threads:
        try:
            processes.extend(_worker(job, complaints) for job in jobs)
            hearing = [threads.submit(_hear, process, heard) for process in processes]
            n_left, n_open = len(seeds), n_jobs
            while n_open:
                result = heard.get()
                if result is None:
                    n_open -= 1
                    continue
                n_left -= 1
                yield result
            wait(hearing, return_when=FIRST_EXCEPTION)
            if n_left:
                complaints.seek(0)
                last = complaints.read().decode(errors="replace").strip().splitlines()[-1:]
                raise SimulationFailed(f"{n_left} seeds were not played: {''.join(last)}")
        finally:
            for process in processes:
                process.kill()
                process.wait()


def _worker(job: SimJob, complaints: IO[bytes]) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-m", "kvlift.testing.sim.worker", msgspec.json.encode(job)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=complaints,
    )


def _hear(process: "subprocess.Popen[bytes]", heard: "SimpleQueue[Result | None]") -> None:
    assert process.stdout is not None
    try:
        with process.stdout:
            for line in process.stdout:
                heard.put(msgspec.json.decode(line, type=Result))
    finally:
        heard.put(None)


@frozen
class Small:
    """What was made of a violation: a shorter command, and a story's path or why there is none."""

    command: str | None = None
    story: str | None = None
    no_story: str | None = None


def _violations(report: Report, options: Options, folder: Path | None) -> list[dict[str, object]]:
    """Every violation with the command that plays its run again, the first ones made smaller."""
    told: list[dict[str, object]] = []
    by_seed: dict[int, list[Violation]] = {}
    for violation in report.violations:
        by_seed.setdefault(violation.seed, []).append(violation)
    for number, (seed, violations) in enumerate(by_seed.items()):
        small = Small(no_story=f"only the first {N_SHRUNK_MAX} seeds are told as stories")
        if number < N_SHRUNK_MAX:
            small = _made_smaller(seed, options, folder)
        told += [
            {
                "seed": seed,
                "tick": violation.tick,
                "claim": violation.claim,
                "command": command_of(seed, options),
                "smaller": small.command,
                "story": small.story,
                "no_story": small.no_story,
            }
            for violation in violations
        ]
    return told


def _made_smaller(seed: int, options: Options, folder: Path | None) -> Small:
    """A smaller run with the same violation, and a story that shows it."""
    [result] = results(SimJob(seeds=(seed,), options=options))
    if not result.violations:
        return Small(no_story="the run is sound when it is played again")
    found = shrunk(result, options)
    command = None if found.options == options else command_of(seed, found.options)
    try:
        story = story_of(seed, found.options)
    except CannotBeTold as reason:
        return Small(command, no_story=str(reason))
    return Small(command, story=_written(seed, story.text, folder))


def _written(seed: int, text: str, folder: Path | None) -> str:
    """The path of a new file, private like all that holds what was played."""
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix=f"seed-{seed}-", suffix=".story", dir=folder, delete=False
        ) as file:
            file.write(text)
    except OSError as error:
        where = folder or tempfile.gettempdir()
        fail(f"no story can be written to {where} ({error.strerror}): name another --stories")
    return file.name


def _print(report: Report, told: Sequence[dict[str, object]]) -> None:
    console = table_console()
    json = report.as_json()
    faults = json.pop("faults")
    assert isinstance(faults, dict)
    for name, value in json.items():
        if isinstance(value, dict):
            value = "  ".join(f"{key} {n}" for key, n in value.items())
        console.print(f"{name.replace('_', ' '):16} {value}")
    struck = "  ".join(f"{kind} {n}" for kind, n in faults.items())
    console.print(f"{'faults':16} {struck or 'none'}")
    for violation in told:
        console.print(f"\nseed {violation['seed']}, tick {violation['tick']}: {violation['claim']}")
        console.print(f"  {violation['command']}")
        if violation["smaller"] is not None:
            console.print(f"  smaller: {violation['smaller']}")
        if violation["story"] is not None:
            console.print(f"  story: kvlift story {violation['story']}")
        else:
            console.print(f"  no story: {violation['no_story']}")
