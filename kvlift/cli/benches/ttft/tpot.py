"""Decode's step time in one mode against mode `none`, at equal batch.

A step's time depends on how many requests it has and on their context. A plane is laid through the
steps of mode none (weights, rows, context), and of every step of both modes its time is divided by
what that plane says for its batch. A request's figure is the mean over its steps; the two figures
of one request are a pair. The interval is Student's, over the pairs.
"""

import math
import statistics
from collections.abc import Sequence

import numpy as np
from attrs import frozen

from kvlift.cli.benches.ttft.batch import StepTime
from kvlift.cli.benches.ttft.play import Played

N_REQUESTS_MIN = 3


@frozen
class Change:
    """A fraction (0.01: a hundredth longer) and its 95 % interval."""

    mean: float
    low: float
    high: float


def change_at_equal_batch(played: Played, none: Played) -> Change | None:
    """None where there are too few requests for an interval."""
    plane = _plane(none.times)
    now, before = _by_request(played, plane), _by_request(none, plane)
    changes = [now[rid] / before[rid] - 1 for rid in now if rid in before]
    if len(changes) < N_REQUESTS_MIN:
        return None
    mean = statistics.mean(changes)
    half = _student(len(changes) - 1) * statistics.stdev(changes) / math.sqrt(len(changes))
    return Change(round(mean, 5), round(mean - half, 5), round(mean + half, 5))


def _by_request(played: Played, plane: np.ndarray) -> dict[str, float]:
    """The mean of (time / what the plane says) over each request's steps, by request id."""
    ratios = np.array([step.ms for step in played.times]) / (_batches(played.times) @ plane)
    return {one.turn.rid: float(ratios[one.steps].mean()) for one in played.served if one.steps}


def _batches(times: Sequence[StepTime]) -> np.ndarray:
    return np.array([(1.0, step.n_rows, step.n_tokens) for step in times])


def _plane(times: Sequence[StepTime]) -> np.ndarray:
    """Least squares, once more without the steps that are far off (a first launch, a pause)."""
    batches = _batches(times)
    taken = np.array([step.ms for step in times])
    plane = np.linalg.lstsq(batches, taken, rcond=None)[0]
    ratios = taken / (batches @ plane)
    is_near = np.abs(ratios - np.median(ratios)) < 0.5
    return np.asarray(np.linalg.lstsq(batches[is_near], taken[is_near], rcond=None)[0])


def _student(n_free: int) -> float:
    """The 97.5 % point of Student's distribution (Cornish and Fisher's expansion)."""
    z = 1.959964
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    return z + first / n_free + second / n_free**2
