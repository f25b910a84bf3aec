"""Waiting without counting the time in which this very process stood still.

A process under SIGSTOP, or on a machine that is moved, wakes up long after its deadlines. Whoever
it was waiting for may have stood still as well, and gets the rest of the time.
"""

import time
from typing import Final

from attrs import define, field

LOOK_UP_S: Final = 0.05
"""The longest wait of one turn: so often a waiting rank looks whether another one has left."""

TURN_MAX_S: Final = 0.5
"""A turn of so long is still a slow one; in a longer one the process stood still."""


@define(eq=False)
class Pauses:
    """Finds out that this very thread stood still, so that nobody else is blamed for it."""

    _turn_max_s: float
    _last_s: float = field(factory=time.monotonic, init=False)

    def slept_s(self, now: float) -> float:
        """Seconds by which the last turn was longer than it can be by itself."""
        slept = now - self._last_s - self._turn_max_s
        self._last_s = now
        return max(0.0, slept)


@define(eq=False)
class Patience:
    """A deadline, `deadline_s` from now. Ask in every turn of a wait: turns are what is counted."""

    deadline_s: float
    _give_up_at_s: float = field(init=False)
    _pauses: Pauses = field(factory=lambda: Pauses(TURN_MAX_S), init=False)

    def __attrs_post_init__(self) -> None:
        self._give_up_at_s = time.monotonic() + self.deadline_s

    def left_s(self) -> float:
        """Seconds that are left, 0 at the end."""
        now = time.monotonic()
        self._give_up_at_s += self._pauses.slept_s(now)
        return max(0.0, self._give_up_at_s - now)

    def turn_s(self) -> float:
        """How long to wait in this turn."""
        return min(LOOK_UP_S, self.left_s())
