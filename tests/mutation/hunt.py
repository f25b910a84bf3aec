"""A pytest plugin that runs tests against mutants, each mutant in a fork of the loaded process.

First each test is run alone under coverage. Against a mutant go only the tests that reach its
lines, the quickest first; the first that fails kills it.
"""

import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Final

import pytest
from _pytest.runner import runtestprotocol
from attrs import define, field, frozen

from tests.mutation.breed import Mutant
from tests.mutation.forks import Answer, Task, Tell, forked, limit_cpu
from tests.mutation.luck import Luck
from tests.mutation.reach import lines_run, statement_lines
from tests.mutation.swap import remembering, swap_in

SLACK_S: Final = 5.0
SLOWER: Final = 8.0
"""A test that takes so many times longer than alone, and a little, has reached its limit."""


@frozen
class Fate:
    """What became of a mutant.

    `how`: killed, survived, timeout, or unreached (no test runs its lines). `by`: the test."""

    how: str
    by: str | None
    n_tests: int
    cpu_s: float


@frozen
class Reach:
    """One test: its time alone, under coverage, and the lines of the core that it runs by file."""

    cpu_s: float
    lines: Mapping[str, Sequence[int]]


@define
class Hunt:
    """The plugin. `tests` may be filled by an earlier run; `left_out` says why of each other.

    `seconds_max`: tests that take longer alone are left out."""

    root: Path
    mutants: Sequence[Mutant]
    n_processes: int
    seconds_max: float
    cpu_s_max: float
    on_measured: Callable[[], None]
    on_fate: Callable[[Mutant, Fate], None]
    tests: dict[str, Reach] = field(factory=dict)
    left_out: dict[str, str] = field(factory=dict)
    luck: Luck = field(factory=Luck)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        known = {**self.tests, **self.left_out}
        self._measure([item for name, item in items.items() if name not in known])
        self.on_measured()
        self._hunt(items)
        return True

    def _measure(self, items: Sequence[pytest.Item]) -> None:
        def on_answer(number: int, answer: Answer) -> None:
            name, said = items[number].nodeid, answer.said[-1] if answer.said else {}
            if answer.ended_by or "cpu_s" not in said:
                self.left_out[name] = said.get("raised", f"ended by signal {answer.ended_by}")
            elif said["outcome"] != "passed":
                self.left_out[name] = said["outcome"]
            elif said["cpu_s"] > self.seconds_max:
                self.left_out[name] = f"takes {said['cpu_s']:.0f} s"
            else:
                self.tests[name] = Reach(said["cpu_s"], said["lines"])

        tasks = [partial(self._measured, item) for item in items]
        lines_run(self.root, lambda: None)  # what it imports, forks need not
        forked(tasks, self.n_processes, on_answer)

    def _measured(self, item: pytest.Item, tell: Tell) -> None:
        """In a fork: one test under coverage."""
        outcomes: list[str] = []
        limit_cpu(3 * self.seconds_max)
        lines = lines_run(self.root, lambda: outcomes.append(outcome_of(item)))
        tell({"outcome": outcomes[0], "cpu_s": time.process_time(), "lines": lines})

    def _hunt(self, items: Mapping[str, pytest.Item]) -> None:
        plans: list[list[pytest.Item]] = []

        def tasks() -> Iterator[Task]:
            caches = remembering()
            for mutant in self.mutants:
                plans.append([items[name] for name in self.tests_for(mutant) if name in items])
                yield partial(self._hunted, mutant, plans[-1], caches)

        def on_answer(number: int, answer: Answer) -> None:
            mutant, fate = self.mutants[number], fate_of(plans[number], answer)
            for item in plans[number][: fate.n_tests]:
                killed = item.nodeid == fate.by
                self.luck.learn(mutant.file, mutant.function, item.nodeid, killed=killed)
            self.on_fate(mutant, fate)

        forked(tasks(), self.n_processes, on_answer)

    def _hunted(
        self,
        mutant: Mutant,
        plan: Sequence[pytest.Item],
        caches: Sequence[Callable[[], None]],
        tell: Tell,
    ) -> None:
        """In a fork: tests against one mutant, to the first that fails."""
        swap_in(mutant, self.root)
        for forget in caches:
            forget()
        for number, item in enumerate(plan):
            limit_cpu(SLOWER * self.tests[item.nodeid].cpu_s + SLACK_S)
            tell({"at": number})
            if outcome_of(item) == "failed":
                tell({"at": number, "failed": True})
                return
        tell({"survived": True})

    def tests_for(self, mutant: Mutant) -> list[str]:
        """The names of the tests that run its lines.

        First those that are the likeliest to kill it, for their time."""
        lines = statement_lines(self.root / mutant.file, mutant.lines)
        names = [
            name
            for name, reach in self.tests.items()
            if not lines.isdisjoint(reach.lines.get(mutant.file, ()))
        ]

        def rank(name: str) -> float:
            chance = self.luck.chance(mutant.file, mutant.function, name)
            return -chance / (self.tests[name].cpu_s + 0.01)

        ranked = sorted(names, key=rank)
        spent_s = accumulate(self.tests[name].cpu_s for name in ranked)
        return [name for name, s in zip(ranked, spent_s, strict=True) if s <= self.cpu_s_max]


def outcome_of(item: pytest.Item) -> str:
    """Run one test with its fixtures: passed, failed or skipped."""
    outcomes = {report.outcome for report in runtestprotocol(item, log=False, nextitem=None)}
    return next((bad for bad in ("failed", "skipped") if bad in outcomes), "passed")


def fate_of(plan: Sequence[pytest.Item], answer: Answer) -> Fate:
    """Raises RuntimeError for a fork that could not begin, or that ended without a reason."""
    if not answer.said or "raised" in answer.said[-1]:
        raise RuntimeError(f"a mutant was not hunted: {answer.said}, signal {answer.ended_by}")
    last = answer.said[-1]
    if "survived" in last:
        return Fate("survived" if plan else "unreached", None, len(plan), answer.cpu_s)
    by = plan[last["at"]].nodeid
    slow = answer.ended_by in (signal.SIGPROF, signal.SIGKILL)
    return Fate("timeout" if slow else "killed", by, last["at"] + 1, answer.cpu_s)
