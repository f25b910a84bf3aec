"""The host tier's memory, as the parts that read and write it from outside the copies see it."""

from typing import Protocol


class HostPages(Protocol):
    """A pool of equal pages of plain memory; a host page is an int `0 <= page < n_pages`."""

    @property
    def page_bytes(self) -> int: ...

    @property
    def n_pages(self) -> int: ...

    def page_view(self, host_page: int) -> memoryview:
        """The bytes of one page: writable, contiguous, format 'B', `page_bytes` long."""
