"""Which test to try first: the chance that it kills a mutant, for its time."""

from collections import Counter

from attrs import define, field


@define
class Luck:
    """Of each test how often it was tried and how often it killed: of a function, a file, at all.

    What is known of the larger group stands for `_WEIGHT` tries in the smaller one."""

    tried: Counter[tuple[str, str]] = field(factory=Counter)
    killed: Counter[tuple[str, str]] = field(factory=Counter)

    def learn(self, file: str, function: str, test: str, *, killed: bool) -> None:
        for group in _groups(file, function):
            self.tried[group, test] += 1
            self.killed[group, test] += killed

    def chance(self, file: str, function: str, test: str) -> float:
        chance = _AT_FIRST
        for group in _groups(file, function):
            n_tried, n_killed = self.tried[group, test], self.killed[group, test]
            chance = (n_killed + _WEIGHT * chance) / (n_tried + _WEIGHT)
        return chance


_AT_FIRST = 0.1
_WEIGHT = 2.0


def _groups(file: str, function: str) -> tuple[str, str, str]:
    return "", file, f"{file}:{function}"
