"""What the runs of a store need of the place where pages lie. Blocking; called by worker threads.

Weather never raises here: a page that can't be read is not there, one that can't be written is not
stored. What does raise is a bug.
"""

from collections.abc import Callable, Sequence
from typing import Protocol


class Draft(Protocol):
    """One page on its way in. Either published or discarded, once."""

    def fill(self, load: Callable[[], memoryview | None]) -> bool:
        """Write the page that `load` gives, unless it need not be written. False: it failed, or
        `load` has none to give any more."""

    def publish(self) -> bool:
        """Make the page visible under its key, whole, at once. False: it failed and is gone."""

    def discard(self) -> None:
        """Leave nothing behind."""


class Medium(Protocol):
    """Pages by key. `namespace` and `key` have 32 bytes; `stamp_ns` orders pages by last use."""

    def has(self, key: bytes) -> bool: ...

    def read(self, key: bytes, namespace: bytes, into: memoryview, stamp_ns: int) -> bool:
        """Whether `into` now holds the page, verified. False: it is missing or damaged."""

    def draft(self, key: bytes, namespace: bytes, stamp_ns: int) -> Draft | None:
        """Room for one page; None where there is none."""

    def withdraw(self, key: bytes) -> None:
        """Remove one page."""

    def refresh(self, keys: Sequence[bytes], stamps_ns: Sequence[int]) -> None:
        """These pages were used, though not read: those that are known here get their stamps."""

    def forget(self, before_ns: int) -> None:
        """Remove every page that was written before this instant."""
