"""Waiting without counting the time in which this very process stood still.

A process under SIGSTOP, or on a machine that is moved, wakes up long after its deadlines. Whoever
it was waiting for may have stood still as well, and gets the rest of the time.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from attrs import define, field

LOOK_UP_S: Final = 0.05
"""The longest wait of one turn: so often a waiting rank looks whether another one has left."""

LATE_MAX_S: Final = 0.25
"""A wait that ends later than asked by so much is still a slow one; later, it stood still."""


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
    """A deadline, `deadline_s` after it was made, that waits in turns:

        while not is_done() and patience.left_s():
            with patience.turn() as turn_s:
                wait(turn_s)

    Only such a wait is looked at: what else takes its time is counted, as by any clock.
    """

    deadline_s: float
    _give_up_at_s: float = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._give_up_at_s = time.monotonic() + self.deadline_s

    def left_s(self) -> float:
        """Seconds that are left, 0 at the end."""
        return max(0.0, self._give_up_at_s - time.monotonic())

    @contextmanager
    def turn(self, longest_s: float = LOOK_UP_S) -> Iterator[float]:
        """One wait, and how long it may be, in seconds."""
        turn_s = min(longest_s, self.left_s())
        began_s = time.monotonic()
        try:
            yield turn_s
        finally:
            late_s = time.monotonic() - began_s - turn_s
            if late_s > LATE_MAX_S:
                self._give_up_at_s += late_s
