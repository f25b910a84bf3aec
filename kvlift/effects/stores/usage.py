"""How many bytes a store folder holds: one counter, shared by all processes under one lock.

The counter is raised before a file is made and lowered after one is gone, so a process that dies
between the two leaves it too high, never too low; a rescan (`room`) puts it right.
"""

import errno
import fcntl
import os
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from attrs import define, field

_RECORD: Final = struct.Struct("<8sQ")
_SEAL: Final = struct.Struct("<I")
_MAGIC: Final = b"KVLIFTUS"
_PAUSE_MIN_S: Final = 0.0002
_PAUSE_MAX_S: Final = 0.005


@define
class Counter:
    """`used_bytes` of all page and temporary files; None: nobody knows, count them."""

    used_bytes: int | None
    _descriptor: int | None = None
    _saved_bytes: int | None = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._saved_bytes = self.used_bytes

    def add(self, size_bytes: int) -> None:
        if self.used_bytes is not None:
            self.used_bytes = max(0, self.used_bytes + size_bytes)

    def save(self) -> None:
        """Now, and not only when the lock is given back. Raises OSError."""
        if self._descriptor is None or self.used_bytes is None:
            return
        if self.used_bytes != self._saved_bytes:
            _save(self._descriptor, self.used_bytes)
            self._saved_bytes = self.used_bytes


class Usage:
    """The lock and the counter of one folder."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._threads = threading.Lock()

    @contextmanager
    def locked(self, timeout_s: float) -> Iterator[Counter]:
        """The counter, alone: no other thread or process has it. Changes are kept, also after an
        exception. Raises OSError; TimeoutError (which is one) where another holds it too long."""
        deadline = time.monotonic() + timeout_s
        if not self._threads.acquire(timeout=timeout_s):
            raise TimeoutError(errno.ETIMEDOUT, "the store's lock is held by another thread")
        try:
            descriptor = self._lock(deadline)
            try:
                counter = Counter(_load(descriptor), descriptor)
                try:
                    yield counter
                finally:
                    counter.save()
            finally:
                os.close(descriptor)
        finally:
            self._threads.release()

    def _lock(self, deadline: float) -> int:
        while True:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            descriptor = os.open(self._path, flags, 0o600)
            try:
                _wait_for(descriptor, deadline)
                if os.fstat(descriptor).st_nlink:
                    return descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)  # Somebody removed the file while we waited: take the new one.


def _wait_for(descriptor: int, deadline: float) -> None:
    # Polled, since a blocking flock() has no deadline and its holder may be stopped.
    pause_s = _PAUSE_MIN_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    errno.ETIMEDOUT, "the store's lock is held by another process"
                ) from None
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_MAX_S)


def _load(descriptor: int) -> int | None:
    data = os.pread(descriptor, _RECORD.size + _SEAL.size, 0)
    record, seal = data[: _RECORD.size], data[_RECORD.size :]
    if len(record) != _RECORD.size or seal != _SEAL.pack(zlib.crc32(record)):
        return None
    magic, used_bytes = _RECORD.unpack(record)
    return int(used_bytes) if magic == _MAGIC else None


def _save(descriptor: int, used_bytes: int) -> None:
    record = _RECORD.pack(_MAGIC, used_bytes)
    os.pwrite(descriptor, record + _SEAL.pack(zlib.crc32(record)), 0)
