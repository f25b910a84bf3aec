"""The host tier's memory as the kernel and the CUDA driver see it: mapped, registered, lent.

A registration outlives its mapping: memory that goes away while it is registered leaves its address
registered, and a later mapping at that address can't be pinned (CUDA error 712). So the order is
kept here: what is lent stays as it is, what is registered is unregistered before it is unmapped,
and an owner that is lost without `close()` gives its registration back too.
"""

import contextlib
import ctypes
import logging
import mmap
import os
import threading
import weakref
from typing import Final, Protocol

import torch

_log = logging.getLogger(__name__)

HUGE_BYTES: Final = 2 << 20
_MADV_POPULATE_WRITE: Final = 23  # Linux 5.14; the mmap module does not name it
_PORTABLE: Final = 1
_ALREADY_REGISTERED: Final = 712
_NOT_REGISTERED: Final = 713


class HostRegistry(Protocol):
    """Who pins memory. Both calls answer with a CUDA error code, 0 for success."""

    def register(self, address: int, size_bytes: int) -> int: ...

    def unregister(self, address: int) -> int: ...


class CudaHostRegistry:
    """The CUDA runtime, by way of torch."""

    def __init__(self) -> None:
        torch.cuda.init()  # type: ignore[no-untyped-call]

    def register(self, address: int, size_bytes: int) -> int:
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        return _noted(int(runtime.cudaHostRegister(address, size_bytes, _PORTABLE)))

    def unregister(self, address: int) -> int:
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        return _noted(int(runtime.cudaHostUnregister(address)))


class HostMapping:
    """`size_bytes` of private anonymous memory in huge pages, aligned to one, faulted in.

    Raises `OSError` when the memory is not to be had.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._lock = threading.Lock()
        self._n_lent = 0
        self._is_closed = False
        self._registry: HostRegistry | None = None
        self._process = os.getpid()
        # Room to begin at a huge page's border, which older kernels do not align by themselves.
        self._map: mmap.mmap | None = mmap.mmap(
            -1, size_bytes + HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        self._mapped = weakref.ref(self._map)
        begin = torch.frombuffer(self._map, dtype=torch.uint8, count=1).data_ptr()
        self._start = -begin % HUGE_BYTES
        self.address = begin + self._start
        self._populate(self._map)

    @property
    def n_lent(self) -> int:
        return self._n_lent

    @property
    def is_registered(self) -> bool:
        return self._registry is not None

    def tensor(self) -> torch.Tensor:
        """uint8 `[size_bytes]`; while it or a view of it lives, the memory stays mapped."""
        return torch.frombuffer(
            self._whole(), dtype=torch.uint8, offset=self._start, count=self.size_bytes
        )

    def view(self) -> memoryview:
        """The same as a memoryview, until it is released."""
        return memoryview(self._whole())[self._start : self._start + self.size_bytes]

    def register(self, registry: HostRegistry) -> None:
        """Pin the memory. Raises `RuntimeError` saying what to do when that is refused."""
        # After a fork the parent's next write would move to other physical pages than the device's.
        with contextlib.suppress(OSError):
            self._whole().madvise(mmap.MADV_DONTFORK)
        code = registry.register(self.address, self.size_bytes)
        if code == _ALREADY_REGISTERED and registry.unregister(self.address) == 0:
            # This mapping is new, so what was registered here has been unmapped before.
            _log.warning("memory at this address was unmapped while registered; taken over")
            code = registry.register(self.address, self.size_bytes)
        if code == _ALREADY_REGISTERED:
            raise RuntimeError(
                f"pinning {self.size_bytes} bytes failed (CUDA error {code}): other memory of this "
                "process was unmapped at these addresses while it was registered. Close what "
                "registered it (cudaHostUnregister) before it is unmapped"
            )
        if code != 0:
            raise RuntimeError(
                f"pinning {self.size_bytes} bytes failed (CUDA error {code}): "
                "raise the limit of locked memory (ulimit -l) or use fewer host pages"
            )
        self._registry = registry

    def lend(self) -> None:
        """A copy begins to use the memory. Raises `RuntimeError` after `retire()`."""
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

    def retire(self) -> bool:
        """No new use; unregister. False while copies run or the driver keeps its registration."""
        with self._lock:
            if self._n_lent:
                return False
            self._is_closed = True
            if self._registry is None:
                return True
            # A child of a fork has neither the memory nor the registration.
            code = self._registry.unregister(self.address) if self._process == os.getpid() else 0
            if code not in (0, _NOT_REGISTERED):
                _log.error("unregistering host memory failed (CUDA error %d): it is kept", code)
                return False
            self._registry = None
        return True

    def let_go(self) -> bool:
        """After `retire()`. False while a view lives: the mapping goes with the last of them.

        `mmap.close()` would unmap under a tensor, which holds the object but not its buffer.
        """
        self._map = None
        return self._mapped() is None

    def _whole(self) -> mmap.mmap:
        if self._map is None:
            raise RuntimeError("the host pool is closed: its memory has been given back")
        return self._map

    def _populate(self, whole: mmap.mmap) -> None:
        """Fault everything in now: a first touch costs as much as reading the page from disk."""
        with contextlib.suppress(OSError):
            whole.madvise(mmap.MADV_HUGEPAGE)
        try:
            whole.madvise(_MADV_POPULATE_WRITE)
        except OSError:
            self.tensor().zero_()


def retire_with(owner: object, mapping: HostMapping) -> None:
    """When `owner` is lost, retire `mapping`; memory that must stay is kept until the process ends.

    Not at the interpreter's exit: threads may still use it then, and the kernel takes it anyway.
    """
    weakref.finalize(owner, _retire_lost, mapping).atexit = False


_kept: list[HostMapping] = []


def _retire_lost(mapping: HostMapping) -> None:
    if not mapping.retire():
        _log.warning("a host pool was lost in use: %d bytes stay mapped", mapping.size_bytes)
        _kept.append(mapping)


def _noted(code: int) -> int:
    """Clear the runtime's error: else torch's next launch would raise it as its own."""
    if code != 0 and torch.version.cuda is not None:
        name = f"libcudart.so.{torch.version.cuda.split('.')[0]}"
        # The runtime that torch has loaded; a torch with one inside has nothing to ask.
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(name).cudaGetLastError()
    return code
