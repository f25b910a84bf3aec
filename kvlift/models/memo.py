"""Memoised pure functions and numbered values: what makes exploring the real core fast.

In a run of millions of states the core sees only some ten thousand different arguments. A world
memoises what it calls and keeps numbers of values, not values, in its states.
"""

from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Generic, ParamSpec, TypeVar, cast
from weakref import WeakSet

from attrs import define, field, frozen

P = ParamSpec("P")
R = TypeVar("R")
V = TypeVar("V", bound=Hashable)


@frozen
class MemoCount:
    """How often a memoised function was called, and how often it really ran."""

    n_calls: int
    n_runs: int


# Weak, so that a memo of a world's method goes when the world goes.
_memos: "WeakSet[Callable[..., object]]" = WeakSet()


def memo(function: Callable[P, R]) -> Callable[P, R]:
    """The same function, run once for each distinct argument. Arguments must be hashable."""
    cached = lru_cache(maxsize=None)(function)
    _memos.add(cached)
    return cast("Callable[P, R]", cached)


def memo_counts() -> dict[str, MemoCount]:
    """Of all living memos, by the qualified name of the function; equal names are summed."""
    counts: dict[str, MemoCount] = {}
    for cached in list(_memos):
        info = cached.cache_info()  # type: ignore[attr-defined]
        name = f"{cached.__module__}.{cached.__qualname__}"
        before = counts.get(name, MemoCount(0, 0))
        counts[name] = MemoCount(
            before.n_calls + info.hits + info.misses, before.n_runs + info.misses
        )
    return dict(sorted(counts.items()))


def forget_memos() -> None:
    """Empty all memos: the next call of each function runs it. Shows impure functions."""
    for cached in list(_memos):
        cached.cache_clear()  # type: ignore[attr-defined]


@define
class Numbered(Generic[V]):
    """Values and small numbers for them, in the order in which the values were first seen.

    Numbers depend on the order of exploration: they are for states and keys, never for a story.
    """

    _number_by_value: dict[V, int] = field(factory=dict, init=False)
    _values: list[V] = field(factory=list, init=False)

    def number(self, value: V) -> int:
        """The number of an equal value, or the next free one."""
        number = self._number_by_value.setdefault(value, len(self._values))
        if number == len(self._values):
            self._values.append(value)
        return number

    def value(self, number: int) -> V:
        """The value that was given this number; IndexError if there is none."""
        return self._values[number]

    def __len__(self) -> int:
        return len(self._values)
