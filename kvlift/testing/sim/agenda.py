"""What will happen when: virtual time, and everything that is due in it."""

import heapq
from collections.abc import Callable
from random import Random

from attrs import define, field


@define(eq=False)
class Agenda:
    """Events in order of time, then of being put down. `now_ns` is the time all parts share."""

    now_ns: int = 0
    n_happened: int = 0
    _events: list[tuple[int, int, Callable[[], None]]] = field(factory=list)
    _n_put: int = 0

    def after(self, delay_ns: int, event: Callable[[], None]) -> None:
        self._n_put += 1
        heapq.heappush(self._events, (self.now_ns + max(0, delay_ns), self._n_put, event))

    def next_ns(self) -> int | None:
        """When the next event is due; None if there is none."""
        return self._events[0][0] if self._events else None

    def run_until(self, until_ns: int) -> None:
        """Let everything happen that is due by then; an event may put down others."""
        while self._events and self._events[0][0] <= until_ns:
            due_ns, _number, event = heapq.heappop(self._events)
            self.now_ns = max(self.now_ns, due_ns)
            self.n_happened += 1
            event()
        self.now_ns = max(self.now_ns, until_ns)


def some_of(draw: Random, most_ns: int) -> int:
    """A usual delay: between a fifth of the longest one and the longest one."""
    return draw.randint(most_ns // 5, max(1, most_ns))
