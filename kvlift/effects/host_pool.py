"""The host tier's memory: one allocation of equal pages, in huge pages, pinned where there is CUDA.

Private anonymous memory with transparent huge pages, because direct reads into shared maps or into
4 KiB pages run at a third to a half of their rate.
"""

import logging
from typing import Final

import torch

from kvlift.effects.host_mapping import CudaHostRegistry, HostMapping, HostRegistry, retire_with

_log = logging.getLogger(__name__)

_POOL_BYTES_MAX: Final = 1 << 46


class HostPool:
    """`n_pages` host pages of `page_bytes` bytes each, in one mapping.

    `pinned=None` pins the memory exactly when CUDA is there; `registry` is who pins it (None: the
    CUDA runtime). Raises `ValueError` for impossible sizes, `OSError` when the memory is not to be
    had, `RuntimeError` when it can't be pinned.

    Whoever reads or writes pages outside the interpreter's sight (a running copy) brackets that
    with `lend()` and `take_back()`: while something is lent, the memory stays mapped and pinned,
    even when the pool is lost. A pool that is lost otherwise gives everything back.
    """

    def __init__(
        self,
        n_pages: int,
        page_bytes: int,
        *,
        pinned: bool | None = None,
        registry: HostRegistry | None = None,
    ) -> None:
        if n_pages < 1 or page_bytes < 1:
            raise ValueError(f"a host pool needs pages: {n_pages} of {page_bytes} bytes")
        self._n_pages = n_pages
        self._page_bytes = page_bytes
        size_bytes = n_pages * page_bytes
        if size_bytes > _POOL_BYTES_MAX:
            raise ValueError(f"{size_bytes} bytes is above the limit of {_POOL_BYTES_MAX}")
        self._mapping = HostMapping(size_bytes)
        retire_with(self, self._mapping)
        self._tensor = self._mapping.tensor().view(n_pages, page_bytes)
        self._view = self._mapping.view()
        if torch.cuda.is_available() if pinned is None else pinned:
            self._mapping.register(registry or CudaHostRegistry())
            _log.info("pinned %d host pages of %d bytes", n_pages, page_bytes)

    @property
    def n_pages(self) -> int:
        return self._n_pages

    @property
    def page_bytes(self) -> int:
        return self._page_bytes

    @property
    def is_pinned(self) -> bool:
        return self._mapping.is_registered

    @property
    def n_lent(self) -> int:
        """How many copies hold the memory at this moment."""
        return self._mapping.n_lent

    @property
    def address(self) -> int:
        """Of page 0; page `i` is `i * page_bytes` bytes further."""
        return self._mapping.address

    def page_view(self, host_page: int) -> memoryview:
        """The bytes of one page, writable. Raises `IndexError` outside the pool."""
        if not 0 <= host_page < self._n_pages:
            raise IndexError(f"host page {host_page} is outside a pool of {self._n_pages} pages")
        start = host_page * self._page_bytes
        return self._view[start : start + self._page_bytes]

    def tensor(self) -> torch.Tensor:
        """All pages as uint8 `[n_pages, page_bytes]`; a view, not a copy."""
        return self._tensor

    def lend(self) -> None:
        """A copy begins to use the memory. Raises `RuntimeError` after `close()`."""
        self._mapping.lend()

    def take_back(self) -> None:
        """A copy has ended. Raises `RuntimeError` when nothing was lent."""
        self._mapping.take_back()

    def close(self) -> bool:
        """Give the memory back, unpinned first; nothing can be lent afterwards.

        False when a copy or a view still uses it: then it stays mapped. May be called again.
        """
        if not self._mapping.retire():
            return False
        self._tensor = torch.empty((0, self._page_bytes), dtype=torch.uint8)
        self._view.release()
        return self._mapping.let_go()
