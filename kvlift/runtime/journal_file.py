"""A journal's files: lines are encoded and written by a thread of their own, never by the tick.

A full or slow disk is weather: the journal stops with one log line and the driver goes on.
Files are private (0600), since they hold prompts. `run.ndjson` is the one that is written now. When
it is full, or a new run begins, it becomes `run.ndjson.1`, that one `run.ndjson.2`, and so on; the
oldest is deleted. So a restart does not destroy the journal of a crash, and the disk has a bound.
"""

import logging
import os
import queue
import threading
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Final

from attrs import frozen
from msgspec.structs import replace

from kvlift.runtime.journal_lines import ConfigLine, Header, Line, encoded

LOG: Final = logging.getLogger("kvlift.journal")

BEHIND_BYTES_MAX: Final = 256 << 20
"""Prompts that may wait for a slow disk; more, and the journal stops."""

BEHIND_LINES_MAX: Final = 65_536


def created(path: Path, n_files_max: int) -> int:
    """A new private file, its descriptor; earlier ones move on. Raises `OSError`."""
    names = [path, *(earlier(path, number) for number in range(1, n_files_max))]
    if path.exists() or path.is_symlink():
        for older, newer in pairwise(reversed(names)):
            if newer.exists() or newer.is_symlink():
                newer.rename(older)
        path.unlink(missing_ok=True)  # it is still there where only one file may be kept
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)


def earlier(path: Path, number: int) -> Path:
    """The name of the file before this one, of the one before that, and so on."""
    return path.with_name(f"{path.name}.{number}")


def write_whole(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def dump(path: Path, lines: Iterable[Line], *, n_files_max: int) -> None:
    """Write a whole journal at once. Raises `OSError`."""
    descriptor = created(path, n_files_max)
    try:
        for line in lines:
            write_whole(descriptor, encoded(line))
    finally:
        os.close(descriptor)


@frozen(kw_only=True)
class Bounds:
    """How large one file may become (it ends before the line that would not fit), and how many are
    kept of one name, the newest included."""

    n_bytes_max: int
    n_files_max: int


class FileSink:
    """Takes lines without ever waiting. Raises `OSError` when the file can't be made."""

    def __init__(self, path: Path, header: Header, bounds: Bounds, close_deadline_s: float) -> None:
        self.path = path
        self._bounds = bounds
        self._close_deadline_s = close_deadline_s
        self._lines: queue.SimpleQueue[tuple[Line, int] | threading.Event | None]
        self._lines = queue.SimpleQueue()
        self._n_bytes_behind = 0
        self._count = threading.Lock()
        self._has_stopped = False
        # The writing thread's own, from here on.
        self._header = header
        self._n_lines = self._n_bytes = 0
        self._descriptor = created(path, bounds.n_files_max)
        self._write_line(header)
        self._thread = threading.Thread(target=self._write, name="kvlift-journal", daemon=True)
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

    def flush(self, deadline_s: float) -> None:
        written = threading.Event()
        self._lines.put(written)
        written.wait(deadline_s)

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
        while (entry := self._lines.get()) is not None:
            if isinstance(entry, threading.Event):
                entry.set()
                continue
            line, n_bytes = entry
            if not self._has_stopped:
                try:
                    self._write_line(line)
                except OSError as error:
                    self._stop(str(error))
                except Exception as error:  # noqa: BLE001 - a line nobody can write: told, not silent
                    self._stop(f"{type(error).__name__}: {error}")
            with self._count:
                self._n_bytes_behind -= n_bytes
        os.close(self._descriptor)

    def _write_line(self, line: Line) -> None:
        data = encoded(line)
        if self._n_lines and self._n_bytes + len(data) > self._bounds.n_bytes_max:
            self._begin_part()
        write_whole(self._descriptor, data)
        self._n_bytes += len(data)
        if not isinstance(line, Header):
            self._n_lines += 1
        if isinstance(line, ConfigLine):
            self._header = replace(self._header, config=line.config)

    def _begin_part(self) -> None:
        """Another file of the same run; its header says how much is in front of it."""
        header = replace(
            self._header,
            part=self._header.part + 1,
            n_lost=self._header.n_lost + self._n_lines,
        )
        descriptor = created(self.path, self._bounds.n_files_max)
        os.close(self._descriptor)
        self._descriptor, self._header = descriptor, header
        self._n_lines = self._n_bytes = 0
        self._write_line(header)
