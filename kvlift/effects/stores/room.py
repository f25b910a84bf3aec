"""The bound of a file store: what may be written, what goes for it, and the books of both.

All processes of a folder keep one account (`usage`). Eviction takes the files whose access time is
the oldest, from a list that one scan gives and that serves until it is used up: an approximation,
since what was touched after the scan is passed over rather than sorted in again.

A page is never stored at the price of a page that was used later. Pages of one run carry access
times that fall with the position (`page_stamp_ns`), so leaves go before their parents, and a run
that is larger than the store ends short instead of eating its own beginning.
"""

import errno
import heapq
import os
from collections import deque
from typing import Final

from attrs import frozen

from kvlift.effects.stores.folder import FileFacts, Folder, is_orphan, now_ns
from kvlift.effects.stores.page_file import is_ahead
from kvlift.effects.stores.usage import Counter, Usage

LOCK_TIMEOUT_S: Final = 30.0
LOCK_TIMEOUT_SHORT_S: Final = 0.1
N_VICTIMS_MIN: Final = 64
STAMP_STEP_NS: Final = 1000


def page_stamp_ns(run_ns: int, position: int) -> int:
    """The access time of a page that was used at `run_ns` in `position` of its prompt."""
    return run_ns - position * STAMP_STEP_NS


@frozen
class OpenFile:
    """A temporary file, open for writing; its whole size is already on the account."""

    path: str
    descriptor: int
    size_bytes: int


class Room:
    """The account of one folder, and eviction. `size_bytes_max` None: no bound. Thread safe."""

    def __init__(self, folder: Folder, size_bytes_max: int | None) -> None:
        self._folder = folder
        self._usage = Usage(folder.usage)
        self._size_bytes_max = size_bytes_max
        self._victims: deque[FileFacts] = deque()

    def open_temporary(self, size_bytes: int, stamp_ns: int, flags: int) -> OpenFile | None:
        """A new file of `size_bytes`; None where there is no room for it. Raises OSError."""
        made: OpenFile | None = None
        try:
            with self._usage.locked(LOCK_TIMEOUT_S) as counter:
                if self._make_room(counter, size_bytes, stamp_ns):
                    made = self._made(counter, size_bytes, flags)
            return made
        except BaseException:
            if made is not None:  # The account could not be given back: nobody would own the file.
                _drop(made)
            raise

    def _made(self, counter: Counter, size_bytes: int, flags: int) -> OpenFile:
        path = self._folder.new_temporary()
        counter.add(size_bytes)
        counter.save()
        try:
            file = OpenFile(path, self._create(path, flags), size_bytes)
        except BaseException:
            counter.add(-size_bytes)
            raise
        try:
            _allocate(file.descriptor, size_bytes)
        except BaseException:
            _drop(file)
            counter.add(-size_bytes)
            raise
        return file

    def publish(self, temporary: str, path: str) -> None:
        """Rename, atomically, over what may be there. Raises OSError; then nothing has changed."""
        with self._usage.locked(LOCK_TIMEOUT_S) as counter:
            replaced_bytes = _size_bytes(path)
            try:
                os.rename(temporary, path)
            except FileNotFoundError:
                os.mkdir(os.path.dirname(path), 0o700)
                os.rename(temporary, path)
            counter.add(-replaced_bytes)

    def remove(self, path: str, timeout_s: float = LOCK_TIMEOUT_S) -> None:
        """Remove one file and book it; a file that is gone is fine. Raises OSError."""
        try:
            with self._usage.locked(timeout_s) as counter:
                _remove(path, counter)
        except TimeoutError:
            # Rather an account that says too much than a damaged page that stays.
            _remove(path, Counter(None))

    def collect_orphans(self) -> int:
        """Remove temporary files of dead writers; how many. Raises OSError."""
        now = now_ns()
        return self.remove_all(
            [file for file in self._folder.temporary_files() if is_orphan(file, now)]
        )

    def remove_all(self, files: list[FileFacts]) -> int:
        """How many of these files were removed. Raises OSError."""
        for file in files:
            self.remove(file.path)
        return len(files)

    def recount(self) -> int:
        """Count all files anew; the bytes that they hold. Raises OSError."""
        with self._usage.locked(LOCK_TIMEOUT_S) as counter:
            return self._rescan(counter)

    def _make_room(self, counter: Counter, size_bytes: int, stamp_ns: int) -> bool:
        used_bytes = counter.used_bytes
        if used_bytes is None:
            used_bytes = self._rescan(counter)
        if self._size_bytes_max is None:
            return True
        n_scans = 0
        while used_bytes + size_bytes > self._size_bytes_max:
            if not self._victims:
                if n_scans:
                    return False
                n_scans += 1
                used_bytes = self._rescan(counter)
                continue
            if _used_ns(self._victims[0]) >= stamp_ns:
                if n_scans:
                    return False
                self._victims.clear()
                continue
            if _is_unchanged(victim := self._victims.popleft()):
                _remove(victim.path, counter)
                used_bytes = counter.used_bytes or 0
                n_scans = 0
        return True

    def _rescan(self, counter: Counter) -> int:
        """Sets the counter to the truth and the victims to the oldest eighth of the pages."""
        used_bytes = 0
        pages: list[FileFacts] = []
        for file in self._folder.scan():
            used_bytes += file.size_bytes
            if file.key is not None:
                pages.append(file)
        n_victims = max(N_VICTIMS_MIN, len(pages) // 8)
        self._victims = deque(heapq.nsmallest(n_victims, pages, key=_used_ns))
        counter.used_bytes = used_bytes
        return used_bytes

    def _create(self, path: str, flags: int) -> int:
        flags |= os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            return os.open(path, flags, 0o600)
        except FileNotFoundError:
            os.mkdir(self._folder.temporary, 0o700)
            return os.open(path, flags, 0o600)


def _drop(file: OpenFile) -> None:
    try:
        os.close(file.descriptor)
    finally:
        os.unlink(file.path)


def _allocate(descriptor: int, size_bytes: int) -> None:
    """The file has its whole size from the start, so that a scan counts what the account counts,
    and its blocks, so that a disk that is nearly full refuses the last pages of a run and not,
    by chance, the first."""
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        os.ftruncate(descriptor, size_bytes)  # This file system can't allocate ahead.


def _remove(path: str, counter: Counter) -> None:
    size_bytes = _size_bytes(path)
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
    counter.add(-size_bytes)


def _used_ns(file: FileFacts) -> int:
    """When it was used last; 0 where a clock that was set back since says so: nobody knows."""
    return 0 if is_ahead(file.accessed_ns) else file.accessed_ns


def _size_bytes(path: str) -> int:
    try:
        return os.lstat(path).st_size
    except FileNotFoundError:
        return 0


def _is_unchanged(file: FileFacts) -> bool:
    try:
        return os.lstat(file.path).st_atime_ns <= file.accessed_ns
    except FileNotFoundError:
        return False
