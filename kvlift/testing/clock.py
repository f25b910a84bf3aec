"""A clock that moves only when it is told to."""

from attrs import define

NS_PER_MS = 1_000_000


@define
class ManualClock:
    """The clock port for tests: starts at `ns` and stands still between `advance` calls."""

    ns: int = 0

    def now_ns(self) -> int:
        return self.ns

    def advance(self, by_ns: int) -> None:
        """Move forward by `by_ns` nanoseconds. A monotonic clock never goes back."""
        if by_ns < 0:
            raise ValueError(f"a clock cannot go back by {-by_ns} ns; give a span of 0 or more")
        self.ns += by_ns
