"""A journal's file: lines are encoded and written by a thread of their own, never by the tick.

A full or slow disk is weather: the journal stops with one log line and the driver goes on.
The file is private (0600), since it holds prompts. An older file of that name is kept beside it
with `.1` behind its name, so that a restart does not destroy the journal of a crash.
"""

import logging
import os
import queue
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from kvlift.runtime.journal_lines import Line, encoded

LOG: Final = logging.getLogger("kvlift.journal")

BEHIND_BYTES_MAX: Final = 256 << 20
"""Prompts that may wait for a slow disk; more, and the journal stops."""

BEHIND_LINES_MAX: Final = 65_536


def created(path: Path) -> int:
    """A new private file, its descriptor. Raises `OSError`."""
    if path.exists() or path.is_symlink():
        path.rename(path.with_name(path.name + ".1"))
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)


def write_whole(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def dump(path: Path, lines: Iterable[Line]) -> None:
    """Write a whole journal at once. Raises `OSError`."""
    descriptor = created(path)
    try:
        for line in lines:
            write_whole(descriptor, encoded(line))
    finally:
        os.close(descriptor)


class FileSink:
    """Takes lines without ever waiting. Raises `OSError` when the file can't be made."""

    def __init__(self, path: Path, header: Line, close_deadline_s: float) -> None:
        self.path = path
        self._close_deadline_s = close_deadline_s
        self._descriptor = created(path)
        self._lines: queue.SimpleQueue[tuple[Line, int] | None] = queue.SimpleQueue()
        self._n_bytes_behind = 0
        self._count = threading.Lock()
        self._has_stopped = False
        self._thread = threading.Thread(target=self._write, name="kvlift-journal", daemon=True)
        self.put(header, 0)
        self._thread.start()

    def put(self, line: Line, n_bytes: int) -> None:
        """`n_bytes`: about what the line keeps alive."""
        if self._has_stopped:
            return
        with self._count:
            self._n_bytes_behind += n_bytes
            is_behind = self._n_bytes_behind > BEHIND_BYTES_MAX
        if is_behind or self._lines.qsize() > BEHIND_LINES_MAX:
            self._stop("the disk does not keep up")
            return
        self._lines.put((line, n_bytes))

    def close(self) -> None:
        """Write what is left, up to the deadline."""
        self._lines.put(None)
        self._thread.join(self._close_deadline_s)
        if self._thread.is_alive():
            self._stop("it could not be written to its end in time")

    def _stop(self, why: str) -> None:
        if not self._has_stopped:
            self._has_stopped = True
            LOG.error("the journal %s ends early: %s", self.path, why)

    def _write(self) -> None:
        is_open = True
        while is_open:
            batch = [self._lines.get()]
            while not self._lines.empty():
                batch.append(self._lines.get())
            is_open = None not in batch
            self._write_batch([entry for entry in batch if entry is not None])
        os.close(self._descriptor)

    def _write_batch(self, batch: list[tuple[Line, int]]) -> None:
        if not self._has_stopped:
            try:
                for line, _n_bytes in batch:
                    write_whole(self._descriptor, encoded(line))
            except OSError as error:
                self._stop(str(error))
        with self._count:
            self._n_bytes_behind -= sum(n_bytes for _line, n_bytes in batch)
