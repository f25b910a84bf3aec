"""The real clock: monotonic nanoseconds, unaffected by changes of the wall clock."""

import time

from attrs import frozen


@frozen
class MonotonicClock:
    """Implements `ports.Clock`. Comparable within one process only: never put it into a ballot."""

    def now_ns(self) -> int:
        return time.monotonic_ns()
