"""The reachable graph in a few flat arrays: about 8 bytes a state and 10 a step.

States are numbered in the order in which breadth-first search finds them, and expanded in that
order, so that a lower number is never farther from the start.
"""

from array import array
from collections.abc import Iterable

from attrs import define, field


@define
class Graph:
    """Parents of all states; steps of the expanded ones, if `keeps_steps`.

    State `n` has the steps `first_step[n]` up to (not with) `first_step[n + 1]`; equal steps are
    kept once. Fairness classes are numbers into `fair_names`; -1: not fair.
    """

    keeps_steps: bool = field(kw_only=True)
    parents: "array[int]" = field(factory=lambda: array("q"))
    first_step: "array[int]" = field(factory=lambda: array("q", [0]))
    targets: "array[int]" = field(factory=lambda: array("q"))
    fair: "array[int]" = field(factory=lambda: array("h"))
    fair_names: list[str] = field(factory=list)
    _fair_by_name: dict[str | None, int] = field(factory=lambda: {None: -1})

    @property
    def n_expanded(self) -> int:
        """How many states have their steps on file."""
        return len(self.first_step) - 1

    def fair_number(self, name: str | None) -> int:
        """The number of a fairness class; -1 for None."""
        number = self._fair_by_name.get(name)
        if number is None:
            assert name is not None
            number = len(self.fair_names)
            self._fair_by_name[name] = number
            self.fair_names.append(name)
        return number

    def add_state(self, parent: int) -> int:
        """A new state, first reached from `parent` (-1: an initial state)."""
        self.parents.append(parent)
        return len(self.parents) - 1

    def close_state(self, steps: Iterable[tuple[int, int]]) -> None:
        """The steps (target, fairness class) of the next state in order: it is expanded now."""
        if self.keeps_steps:
            for target, fair in steps:
                self.targets.append(target)
                self.fair.append(fair)
        self.first_step.append(len(self.targets))

    def path_to(self, state: int) -> list[int]:
        """A shortest path: an initial state first, `state` last."""
        path = [state]
        while (parent := self.parents[path[-1]]) >= 0:
            path.append(parent)
        path.reverse()
        return path
