"""Which physical page of this rank stands behind each handle of the agreed state.

The core draws handles and counts; this table obeys and checks: a handle is taken once, freed once,
and a tier never gives more pages than it has.
"""

from collections.abc import Iterable


class PageTable:
    """Physical pages `0 .. n_pages - 1` of one tier on this rank."""

    def __init__(self, n_pages: int) -> None:
        self.n_pages = n_pages
        self._free = list(range(n_pages - 1, -1, -1))
        self._page_by_handle: dict[int, int] = {}

    @property
    def n_free(self) -> int:
        return len(self._free)

    def take(self, handles: Iterable[int]) -> None:
        """Raises `AssertionError` where the core has counted wrongly: a bug, never weather."""
        for handle in handles:
            if handle in self._page_by_handle or not self._free:
                raise AssertionError(f"no page for handle {handle}: {len(self._free)} are free")
            self._page_by_handle[handle] = self._free.pop()

    def free(self, handles: Iterable[int]) -> None:
        for handle in handles:
            self._free.append(self._page_by_handle.pop(handle))

    def resolve(self, handles: Iterable[int]) -> list[int]:
        """Physical pages of live handles, in order."""
        table = self._page_by_handle
        return [table[handle] for handle in handles]

    def live(self) -> dict[int, int]:
        """A copy of the table, handle to physical page; for checks and snapshots."""
        return dict(self._page_by_handle)

    def free_pages(self) -> frozenset[int]:
        """Physical pages that nobody has; for checks."""
        return frozenset(self._free)
