"""One wrong core in a process of its own: `python -m kvlift.models.mutants.hunt JSON`.

Worlds, stories and random walks are tried until one of them finds the fault. Everything that loads
the core is imported after the fault has been seeded, and by name.
"""

import os
import resource
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import msgspec
from attrs import frozen

from kvlift.models.mutants.load import seed
from kvlift.models.mutants.mutant import CORE, Killed, Mutant

_ROOT: Final = CORE.parents[1]
_STORIES: Final = (_ROOT / "tests" / "stories", _ROOT.parent / "shared" / "stories")
_WALKS: Final = "tests.runtime.test_stateful"
_N_WALKS: Final = 60
_N_STATES_MAX: Final = 150_000
_SECONDS_A_WORLD: Final = 60.0
_WORDS_MAX: Final = 160

QUICK: Final = ("calm", "orphan", "restore", "back")
"""Worlds that take a second or two. All stories take two seconds; the other worlds take longer."""


@frozen(kw_only=True)
class Hunt:
    """What to look for, and for how long: `cpu_s_max` seconds of processor time."""

    mutant: Mutant
    cpu_s_max: float


@frozen
class Kill:
    by: str
    steps: int | None


def hunt(mutant: Mutant) -> Killed:
    """Seed the fault in this process and look for it."""
    seed(mutant)
    kill = next(_kills(mutant.expects), None)
    return Killed(
        name=mutant.name,
        killed=kill is not None,
        by=None if kill is None else kill.by,
        steps=None if kill is None else kill.steps,
        cpu_s=round(time.process_time(), 1),
    )


def _kills(expects: str) -> Iterator[Kill]:
    """Where the fault shows, the likeliest place first."""
    worlds: set[str] = set(import_module("kvlift.models.worlds").WORLDS)
    stories = {file.name: file for folder in _STORIES for file in sorted(folder.glob("*.story"))}
    if expects in stories:
        yield from _in_story(stories.pop(expects))
    first = [name for name in (expects, *QUICK) if name in worlds]
    for name in dict.fromkeys(first):
        yield from _in_world(name)
    for file in stories.values():
        yield from _in_story(file)
    for name in sorted(worlds.difference(first)):
        yield from _in_world(name)
    yield from _in_walks()


def _in_world(name: str) -> Iterator[Kill]:
    """Claims that break in a world; after them goals that it does not reach any more."""
    exploring = import_module("kvlift.models.explore")
    limits = exploring.Limits(
        n_states_max=_N_STATES_MAX, seconds_max=_SECONDS_A_WORLD, stops_at_violation=True
    )
    try:
        world = import_module("kvlift.models.worlds").WORLDS[name](deep=False)
        report = exploring.explore(world, limits)
    except Exception as error:  # noqa: BLE001 (a core that raises has been found out)
        yield Kill(f"{name}: raises {type(error).__name__}", None)
        return
    traces = {**report.always, **report.live}
    broken = [(len(trace.moves), claim) for claim, trace in traces.items() if trace is not None]
    for n_moves, claim in sorted(broken):
        yield Kill(f"{name}: {claim}", n_moves)
    if report.complete:
        for goal, trace in report.sometimes.items():
            if trace is None:
                yield Kill(f"{name}: sometimes {goal}", None)
        for share, (n_good, n_counted) in report.shares.items():
            if n_good < n_counted:
                yield Kill(f"{name}: {share}", None)


def _in_story(file: Path) -> Iterator[Kill]:
    verdict: Any = import_module("kvlift.testing.story_run").run_file(file)
    if verdict.exit_code:
        lines = file.read_text(encoding="utf-8").splitlines()[: verdict.line]
        message = verdict.message.split("; ")[0]
        yield Kill(f"{file.name}: {message}"[:_WORDS_MAX], sum(map(_is_move, lines)))


def _is_move(line: str) -> bool:
    """Whether something happens in this line of a story."""
    first = line.split("#", maxsplit=1)[0].split()[:1]
    return bool(first) and first[0] not in ("world", "config", "prompt", "put", "ports", "expect")


def _in_walks() -> Iterator[Kill]:
    """Random walks of whole drivers, where the tests are installed."""
    sys.path.insert(0, str(_ROOT))
    try:
        walk = import_module(_WALKS)._walk
    except ImportError:
        return
    for number in range(_N_WALKS):
        try:
            walk(number)
        except Exception as error:  # noqa: BLE001 (as above)
            yield Kill(f"walk {number}: {error}"[:_WORDS_MAX], None)


def main() -> None:
    """Run the hunt in the first argument; print what came out as JSON, alone on standard output."""
    task = msgspec.json.decode(sys.argv[1], type=Hunt)
    seconds = int(task.cpu_s_max)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    answer = os.dup(1)
    os.dup2(2, 1)  # whatever else is printed is no answer
    os.write(answer, msgspec.json.encode(hunt(task.mutant)))


if __name__ == "__main__":
    main()
