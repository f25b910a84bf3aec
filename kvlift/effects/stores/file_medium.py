"""Pages in the files of one folder: `Medium` for runs. Every OSError ends here, as weather."""

import errno
import fcntl
import os
import stat
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Final

from kvlift.effects.stores.folder import Folder, now_ns
from kvlift.effects.stores.known import Identity, KnownPages
from kvlift.effects.stores.medium import Draft
from kvlift.effects.stores.page_file import (
    HEADER_BYTES,
    O_DIRECT,
    Caching,
    DamagedPageError,
    is_aligned,
    read_page,
    touch,
    write_page,
)
from kvlift.effects.stores.room import LOCK_TIMEOUT_SHORT_S, OpenFile, Room
from kvlift.effects.stores.weather import WeatherLog

DIRECT_BYTES_MIN: Final = 256 << 10
"""Below this, going past the page cache costs more than it saves."""


class Fsync(Enum):
    """What is waited for before a page counts as stored.

    A page that a power cut tears is found by its checksum, so OFF loses pages, never truth."""

    OFF = "off"
    PAGE = "page"
    FOLDER = "folder"


class FileMedium:
    """Thread safe. `page_bytes` is the size of every page here."""

    def __init__(
        self, folder: Folder, room: Room, page_bytes: int, fsync: Fsync, caching: Caching
    ) -> None:
        self._folder = folder
        self._room = room
        self._file_bytes = HEADER_BYTES + page_bytes
        self._fsync = fsync
        self._is_direct = (
            caching is Caching.AUTO
            and O_DIRECT != 0
            and page_bytes % HEADER_BYTES == 0
            and page_bytes >= DIRECT_BYTES_MIN
        )
        self._known = KnownPages()
        self.weather = WeatherLog(str(folder.root))

    def has(self, key: bytes) -> bool:
        if self._known.has(key):
            return True
        try:
            facts = os.lstat(self._folder.page_path(key))
        except FileNotFoundError:
            return False
        except OSError as error:
            self.weather.tell("looking for a page", error)
            return False
        if not self._is_whole(key, facts):
            return False
        self._known.add(key)
        return True

    def read(self, key: bytes, namespace: bytes, into: memoryview, stamp_ns: int) -> bool:
        path = self._folder.page_path(key)
        try:
            self._read(path, key, namespace, into, stamp_ns)
        except FileNotFoundError:
            self._known.discard(key)
            return False
        except DamagedPageError as reason:
            self.weather.tell("reading a page", f"damaged: {reason}")
            self._condemn(path, key)
            return False
        except OSError as error:
            self.weather.tell("reading a page", error)
            self._known.discard(key)
            if error.errno in (errno.EIO, errno.ELOOP):  # Unreadable for good, or a link.
                self._condemn(path, key)
            return False
        self._known.add(key)
        return True

    def draft(self, key: bytes, namespace: bytes, stamp_ns: int) -> Draft | None:
        path = self._folder.page_path(key)
        try:
            facts = _facts(path)
            if facts is not None and self._is_whole(key, facts):
                touch(path, facts, stamp_ns)
                self._known.add(key)
                return StoredPage()
            file = self._open_temporary(stamp_ns)
        except OSError as error:
            self.weather.tell("making room for a page", error)
            return None
        if file is None:
            self.weather.tell("making room for a page", "the store is full of newer pages")
            return None
        return PageDraft(self, file, path, key, namespace, stamp_ns)

    def withdraw(self, key: bytes) -> None:
        self._known.discard(key)
        try:
            self._room.remove(self._folder.page_path(key))
        except OSError as error:
            self.weather.tell("removing a page", error)

    def refresh(self, keys: Sequence[bytes], stamps_ns: Sequence[int]) -> None:
        for key, stamp_ns in zip(keys, stamps_ns, strict=True):
            if not self._known.has(key):
                continue
            path = self._folder.page_path(key)
            try:
                facts = _facts(path)
                if facts is None:
                    self._known.discard(key)
                else:
                    touch(path, facts, stamp_ns)
            except OSError as error:
                self.weather.tell("noting the use of a page", error)
                return

    def forget(self, before_ns: int) -> None:
        self._known.clear()
        try:
            # A time that is yet to come is of a clock that was set back: written before as well.
            files = [
                file
                for file in self._folder.page_files()
                if not before_ns < file.written_ns <= now_ns()
            ]
            self._room.remove_all(files)
        except OSError as error:
            self.weather.tell("removing all pages", error)
        self._known.clear()

    def forget_known(self) -> None:
        self._known.clear()

    def collect_orphans(self) -> None:
        try:
            self._room.collect_orphans()
        except OSError as error:
            self.weather.tell("removing leftovers of dead writers", error)

    def _read(
        self, path: str, key: bytes, namespace: bytes, into: memoryview, stamp_ns: int
    ) -> None:
        if self._is_direct and is_aligned(into):
            try:
                return read_page(path, namespace, key, into, O_DIRECT, stamp_ns)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._is_direct = False  # This file system can't; ask no more.
        return read_page(path, namespace, key, into, 0, stamp_ns)

    def _open_temporary(self, stamp_ns: int) -> OpenFile | None:
        if self._is_direct:
            try:
                return self._room.open_temporary(self._file_bytes, stamp_ns, O_DIRECT)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._is_direct = False
        return self._room.open_temporary(self._file_bytes, stamp_ns, 0)

    def write_draft(self, draft: "PageDraft", data: memoryview) -> None:
        descriptor = draft.file.descriptor
        if not is_aligned(data):
            _set_buffered(descriptor)
        try:
            write_page(descriptor, draft.namespace, draft.key, data)
        except OSError as error:
            if error.errno != errno.EINVAL or not self._is_direct:
                raise
            self._is_direct = False
            _set_buffered(descriptor)
            write_page(descriptor, draft.namespace, draft.key, data)
        if self._fsync is not Fsync.OFF:
            os.fsync(descriptor)
        os.utime(descriptor, ns=(draft.stamp_ns, now_ns()))

    def publish_draft(self, draft: "PageDraft") -> None:
        self._room.publish(draft.file.path, draft.path)
        self._known.add(draft.key)
        if self._fsync is Fsync.FOLDER:
            _sync_folder(os.path.dirname(draft.path))

    def remove_draft(self, draft: "PageDraft") -> None:
        self._room.remove(draft.file.path)

    def _is_whole(self, key: bytes, facts: os.stat_result) -> bool:
        return (
            stat.S_ISREG(facts.st_mode)
            and facts.st_size == self._file_bytes
            and not self._known.is_condemned(key, _identity(facts))
        )

    def _condemn(self, path: str, key: bytes) -> None:
        """A damaged page must not be a hit again before it has been written again."""
        self._known.discard(key)
        try:
            facts = _facts(path)
            if facts is None:
                return
            self._known.condemn(key, _identity(facts))
            self._room.remove(path, LOCK_TIMEOUT_SHORT_S)
        except OSError as error:
            self.weather.tell("removing a damaged page", error)


class StoredPage:
    """The draft of a page that is there already."""

    def fill(self, _load: Callable[[], memoryview | None]) -> bool:
        return True

    def publish(self) -> bool:
        return True

    def discard(self) -> None:
        return None


class PageDraft:
    """A temporary file until it is published."""

    def __init__(
        self,
        medium: FileMedium,
        file: OpenFile,
        path: str,
        key: bytes,
        namespace: bytes,
        stamp_ns: int,
    ) -> None:
        self._medium = medium
        self._is_open = True
        self.file = file
        self.path = path
        self.key = key
        self.namespace = namespace
        self.stamp_ns = stamp_ns

    def fill(self, load: Callable[[], memoryview | None]) -> bool:
        data = load()
        if data is None:
            return False
        try:
            self._medium.write_draft(self, data)
            self._close()
        except OSError as error:
            self._medium.weather.tell("writing a page", error)
            return False
        return True

    def publish(self) -> bool:
        try:
            self._medium.publish_draft(self)
        except OSError as error:
            self._medium.weather.tell("putting a page in its place", error)
            self.discard()
            return False
        return True

    def discard(self) -> None:
        try:
            self._close()
        except OSError as error:
            self._medium.weather.tell("closing a temporary file", error)
        try:
            self._medium.remove_draft(self)
        except OSError as error:
            self._medium.weather.tell("removing a temporary file", error)

    def _close(self) -> None:
        # Not twice: by then the number may be somebody else's file. Network file systems report
        # failed writes here, and the descriptor is gone all the same.
        if self._is_open:
            self._is_open = False
            os.close(self.file.descriptor)


def _facts(path: str) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except FileNotFoundError:
        return None


def _identity(facts: os.stat_result) -> Identity:
    return facts.st_ino, facts.st_mtime_ns, facts.st_size


def _set_buffered(descriptor: int) -> None:
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    if flags & O_DIRECT:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~O_DIRECT)


def _sync_folder(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
