"""What the driver's ticks cost the scheduler's thread, by their two halves."""

import time
from collections.abc import Sequence

from attrs import frozen

from kvlift.core.advance import Decision, State
from kvlift.core.landed import Landed
from kvlift.core.submission import Submission
from kvlift.runtime.observer import SilentObserver
from kvlift.runtime.tick import Tick


@frozen
class TickTime:
    """`deciding_ms`: hearing, agreeing and deciding; `starting_ms`: effects and the ballot."""

    deciding_ms: float
    starting_ms: float
    n_effects: int

    @property
    def total_ms(self) -> float:
        return self.deciding_ms + self.starting_ms


class Stopwatch(SilentObserver):
    def __init__(self) -> None:
        self.ticks: list[TickTime] = []
        self._began_s = self._decided_s = 0.0
        self._n_effects = 0

    def began(self) -> None:
        self._began_s = time.perf_counter()

    def ticked(
        self,
        state: State,
        now_ns: int,
        reports: Sequence[Landed],
        least: tuple[int, ...] | None,
        calls: Sequence[Submission],
        decision: Decision,
    ) -> None:
        self._decided_s = time.perf_counter()
        self._n_effects = len(decision.effects) + len(reports)

    def told(self, state: State, tick: Tick) -> None:
        now_s = time.perf_counter()
        self.ticks.append(
            TickTime(
                (self._decided_s - self._began_s) * 1e3,
                (now_s - self._decided_s) * 1e3,
                self._n_effects,
            )
        )
