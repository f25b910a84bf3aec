"""A smaller run with the same violation: fewer ticks, kinds of faults, requests and ranks.

Every candidate is played; one is kept when the same checker still objects.
"""

import time
from collections.abc import Callable, Iterator
from typing import Final

from attrs import evolve, frozen

from kvlift.testing.sim.plan import Options
from kvlift.testing.sim.run import Result, play

SECONDS_MAX: Final = 20.0


@frozen
class Shrunk:
    """The smallest run that was found, and how many were played to find it."""

    options: Options
    result: Result
    n_played: int


def shrunk(
    result: Result,
    options: Options,
    *,
    seconds_max: float = SECONDS_MAX,
    clock: Callable[[], float] = time.monotonic,
) -> Shrunk:
    """Raises `ValueError` for a run without a violation."""
    if not result.violations:
        raise ValueError(f"seed {result.seed} has no violation to shrink")
    checker = checker_of(result)
    best, best_result, n_played = options, result, 0
    end_s = clock() + seconds_max
    is_smaller = True
    while is_smaller and clock() < end_s:
        is_smaller = False
        for candidate in _smaller(best, best_result):
            if clock() >= end_s:
                break
            found = play(result.seed, candidate)
            n_played += 1
            if found.violations and checker_of(found) == checker:
                best, best_result, is_smaller = candidate, found, True
                break
    return Shrunk(best, best_result, n_played)


def checker_of(result: Result) -> str:
    return result.violations[0].claim.partition(":")[0]


def _smaller(options: Options, result: Result) -> Iterator[Options]:
    """Candidates, the boldest first."""
    tick = result.violations[0].tick
    if tick < options.n_ticks:
        yield evolve(options, n_ticks=tick)
    kinds = tuple(result.faults)
    if options.faults is None or len(kinds) < len(options.faults):
        yield evolve(options, faults=kinds)
    if kinds:
        yield evolve(options, faults=())
    n_requests = result.n_requests if options.n_requests_max is None else options.n_requests_max
    for n_fewer in (n_requests // 2, n_requests - 1):
        if 0 < n_fewer < n_requests:
            yield evolve(options, n_requests_max=n_fewer)
    for n_ranks in range(1, result.n_ranks):
        yield evolve(options, n_ranks=n_ranks)
    for kind in kinds:
        yield evolve(options, faults=tuple(other for other in kinds if other != kind))
    for n_ticks in (options.n_ticks // 2, options.n_ticks * 9 // 10):
        if 0 < n_ticks < options.n_ticks:
            yield evolve(options, n_ticks=n_ticks)
