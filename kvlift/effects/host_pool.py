"""The host tier's memory: one allocation of equal pages, in huge pages, pinned where there is CUDA.

Private anonymous memory with transparent huge pages, because direct reads into shared maps or into
4 KiB pages run at a third to a half of their rate.
"""

import contextlib
import logging
import mmap
import threading
from typing import Final

import torch

_log = logging.getLogger(__name__)

_HUGE_BYTES: Final = 2 << 20
_POOL_BYTES_MAX: Final = 1 << 46
_MADV_POPULATE_WRITE: Final = 23  # Linux 5.14; the mmap module does not name it
_HOST_REGISTER_PORTABLE: Final = 1


class HostPool:
    """`n_pages` host pages of `page_bytes` bytes each, in one mapping.

    `pinned=None` pins the memory exactly when CUDA is there. Raises `ValueError` for impossible
    sizes, `OSError` when the memory is not to be had, `RuntimeError` when it can't be pinned.

    Whoever reads or writes pages outside the interpreter's sight (a running copy) brackets that
    with `lend()` and `take_back()`: while something is lent, `close()` leaves the memory mapped.
    """

    def __init__(self, n_pages: int, page_bytes: int, *, pinned: bool | None = None) -> None:
        if n_pages < 1 or page_bytes < 1:
            raise ValueError(f"a host pool needs pages: {n_pages} of {page_bytes} bytes")
        self._n_pages = n_pages
        self._page_bytes = page_bytes
        size_bytes = n_pages * page_bytes
        if size_bytes > _POOL_BYTES_MAX:
            raise ValueError(f"{size_bytes} bytes is above the limit of {_POOL_BYTES_MAX}")
        self._lock = threading.Lock()
        self._n_lent = 0
        self._is_closed = False
        # Room to begin at a huge page's border, which older kernels do not align by themselves.
        self._map = mmap.mmap(
            -1, size_bytes + _HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        whole = torch.frombuffer(self._map, dtype=torch.uint8)
        start = -whole.data_ptr() % _HUGE_BYTES
        self._tensor = whole[start : start + size_bytes].view(n_pages, page_bytes)
        self._view = memoryview(self._map)[start : start + size_bytes]
        self._address = self._tensor.data_ptr()
        self._populate()
        self._is_pinned = torch.cuda.is_available() if pinned is None else pinned
        if self._is_pinned:
            self._pin(size_bytes)

    @property
    def n_pages(self) -> int:
        return self._n_pages

    @property
    def page_bytes(self) -> int:
        return self._page_bytes

    @property
    def is_pinned(self) -> bool:
        return self._is_pinned

    @property
    def n_lent(self) -> int:
        """How many copies hold the memory at this moment."""
        return self._n_lent

    @property
    def address(self) -> int:
        """Of page 0; page `i` is `i * page_bytes` bytes further."""
        return self._address

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
        with self._lock:
            if self._is_closed:
                raise RuntimeError("the host pool is closed: start no copies after close()")
            self._n_lent += 1

    def take_back(self) -> None:
        """A copy has ended. Raises `RuntimeError` when nothing was lent."""
        with self._lock:
            if self._n_lent == 0:
                raise RuntimeError("take_back() without a lend() before it")
            self._n_lent -= 1

    def close(self) -> bool:
        """Give the memory back; nothing can be lent afterwards.

        False when a copy or a view still uses it: then it stays mapped. May be called again.
        """
        with self._lock:
            if self._n_lent:
                return False
            self._is_closed = True
        if self._map.closed:
            return True
        if self._is_pinned:
            torch.cuda.cudart().cudaHostUnregister(self._address)  # type: ignore[no-untyped-call]
            self._is_pinned = False
        self._tensor = torch.empty((0, self._page_bytes), dtype=torch.uint8)
        try:
            self._view.release()
            self._map.close()
        except BufferError:
            # Somebody holds a page_view() or a tensor: the mapping goes with the last of them.
            return False
        return True

    def _populate(self) -> None:
        """Fault everything in now: a first touch costs as much as reading the page from disk."""
        with contextlib.suppress(OSError):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        try:
            self._map.madvise(_MADV_POPULATE_WRITE)
        except OSError:
            self._tensor.zero_()

    def _pin(self, size_bytes: int) -> None:
        # After a fork the parent's next write would move to other physical pages than the device's.
        with contextlib.suppress(OSError):
            self._map.madvise(mmap.MADV_DONTFORK)
        torch.cuda.init()  # type: ignore[no-untyped-call]
        answer = torch.cuda.cudart().cudaHostRegister(  # type: ignore[no-untyped-call]
            self._address, size_bytes, _HOST_REGISTER_PORTABLE
        )
        if int(answer) != 0:
            self._is_pinned = False
            raise RuntimeError(
                f"pinning {size_bytes} bytes failed (CUDA error {int(answer)}): "
                "raise the limit of locked memory (ulimit -l) or use fewer host pages"
            )
        _log.info("pinned %d host pages of %d bytes", self._n_pages, self._page_bytes)
