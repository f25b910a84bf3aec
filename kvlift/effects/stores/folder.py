"""Where a file store keeps its files, whose they are, and which of them are leftovers.

    DIR/kvlift-store.json             says what this folder is
    DIR/v1/usage                      lock and byte counter, shared by all processes (`usage`)
    DIR/v1/unfinished/ORIGIN-PID-...  pages being written
    DIR/v1/pages/ab/abcd....page      finished pages, named by key

The format's version is a part of the path: two versions of kvlift can share a folder, and never
meet.
"""

import errno
import hashlib
import itertools
import json
import os
import re
import secrets
import socket
import stat
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

from attrs import frozen

from kvlift.core.policy import Switch
from kvlift.effects.stores.page_file import FORMAT_VERSION

MARKER: Final = "kvlift-store.json"
FORMAT: Final = "kvlift file store"
MARKER_BYTES_MAX: Final = 4096
ORPHAN_AGE_S: Final = 3600.0
"""Age at which a temporary file of another machine, whose processes can't be seen, is an orphan."""

_OPEN_SAFE: Final = os.O_CLOEXEC | os.O_NOFOLLOW

_PAGE_NAME: Final = re.compile(r"([0-9a-f]{64})\.page")
_FAN_NAME: Final = re.compile(r"[0-9a-f]{2}")
_TEMPORARY_NAME: Final = re.compile(r"([0-9a-f]{16})-(\d{1,10})-(\d{1,20})-[0-9a-f]{8}-\d+\.tmp")


class StoreRefusedError(ValueError):
    """This folder can't be a store; the message says what to do."""


@frozen(kw_only=True)
class FileFacts:
    """A page file or a temporary file, as a scan saw it. `key` is None for a temporary file."""

    path: str
    key: bytes | None
    size_bytes: int
    accessed_ns: int
    written_ns: int


class Folder:
    """The paths of one store. Holds no descriptors, so a folder that comes back is used again."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.base = str(root / f"v{FORMAT_VERSION}")
        self.pages = f"{self.base}/pages"
        self.temporary = f"{self.base}/unfinished"
        self.usage = f"{self.base}/usage"
        self._counter = itertools.count()

    def page_path(self, key: bytes) -> str:
        name = key.hex()
        return f"{self.pages}/{name[:2]}/{name}.page"

    def new_temporary(self) -> str:
        pid = os.getpid()
        name = f"{_origin()}-{pid}-{_started(pid)}-{secrets.token_hex(4)}-{next(self._counter)}"
        return f"{self.temporary}/{name}.tmp"

    def is_store(self) -> bool:
        try:
            found = json.loads(_beginning(self.root / MARKER))
        except (OSError, ValueError, RecursionError):
            return False
        return isinstance(found, dict) and found.get("format") == FORMAT

    def create(self, trust_folder: Switch) -> None:
        """Make what is missing. Raises StoreRefusedError with a sentence."""
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.check_private(trust_folder)
            for folder in (self.base, self.pages, self.temporary):
                os.makedirs(folder, mode=0o700, exist_ok=True)
            # Made here, so that whoever looks after the folder later doesn't become its owner.
            os.close(os.open(self.usage, os.O_RDWR | os.O_CREAT | _OPEN_SAFE, 0o600))
            if not self.is_store():
                self._write_marker()
        except OSError as error:
            raise StoreRefusedError(
                f"the storage folder {self.root} can't be used ({_plain(error)}): "
                "name a folder that this user may write to"
            ) from error

    def check_private(self, trust_folder: Switch) -> None:
        """Raises StoreRefusedError where somebody else could put pages in, and OSError."""
        for folder in (str(self.root), self.base, self.pages, self.temporary):
            try:
                facts = os.stat(folder)
            except FileNotFoundError:
                continue
            if not stat.S_ISDIR(facts.st_mode):
                raise StoreRefusedError(f"{folder} is not a folder: name another one as storage")
            if trust_folder is Switch.ON:
                continue
            if facts.st_uid != os.geteuid():
                raise StoreRefusedError(
                    f"the storage folder {folder} belongs to user {facts.st_uid}, who could put "
                    "false pages in: use a folder of your own"
                )
            if facts.st_mode & 0o022:
                raise StoreRefusedError(
                    f"others may write to the storage folder {folder}, and so put false pages in: "
                    f"run chmod 700 {folder}"
                )

    def scan(self) -> Iterator[FileFacts]:
        """Every page and temporary file of this store, in no order; what vanishes is left out.

        Files that don't have kvlift's names are not ours, and never touched. Raises OSError."""
        yield from self.page_files()
        yield from self.temporary_files()

    def page_files(self) -> Iterator[FileFacts]:
        for fan in _entries(self.pages):
            if not _FAN_NAME.fullmatch(fan.name):
                continue
            for entry in _entries(fan.path):
                match = _PAGE_NAME.fullmatch(entry.name)
                if match and match[1].startswith(fan.name):
                    yield from _facts(entry, bytes.fromhex(match[1]))

    def temporary_files(self) -> Iterator[FileFacts]:
        for entry in _entries(self.temporary):
            if _TEMPORARY_NAME.fullmatch(entry.name):
                yield from _facts(entry, None)

    def _write_marker(self) -> None:
        path = self.new_temporary()
        text = json.dumps({"format": FORMAT, "version": FORMAT_VERSION}) + "\n"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _OPEN_SAFE, 0o600)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)
        os.replace(path, self.root / MARKER)


def is_orphan(file: FileFacts, now_ns: int) -> bool:
    """Whether the writer of this temporary file is gone.

    A process of this machine is looked up, with its start time, since pids are used again; of
    other machines (or containers) only the age tells."""
    match = _TEMPORARY_NAME.fullmatch(os.path.basename(file.path))
    if match is None:
        return False
    if match[1] == _origin():
        return _started(int(match[2])) != int(match[3])
    return now_ns - file.written_ns > ORPHAN_AGE_S * 1e9


@cache
def _origin() -> str:
    """16 hex digits that name this machine, its boot and its process namespace."""
    parts = [socket.gethostname()]
    try:
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    except OSError:
        pass  # Not Linux: the name of the machine has to do.
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _started(pid: int) -> int:
    """Start time of a process in clock ticks since boot; -1: there is none; 0: it can't be seen."""
    try:
        line = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ESRCH) and os.path.exists("/proc/self/stat"):
            return -1
        return _alive_elsewhere(pid)
    # The second field, the command, may hold blanks and brackets; the rest follows its last one.
    fields = line[line.rindex(b")") + 2 :].split()
    return -1 if fields[0] in (b"Z", b"X") else int(fields[19])


def _alive_elsewhere(pid: int) -> int:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return -1
    except PermissionError:
        return 0
    return 0


def _beginning(path: Path) -> bytes:
    """The first bytes of a regular file, however long it is; nothing of anything else."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | _OPEN_SAFE)
    try:
        is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
        return os.read(descriptor, MARKER_BYTES_MAX) if is_file else b""
    finally:
        os.close(descriptor)


def _entries(folder: str) -> Iterator["os.DirEntry[str]"]:
    try:
        with os.scandir(folder) as entries:
            yield from entries
    except (FileNotFoundError, NotADirectoryError):
        return


def _facts(entry: "os.DirEntry[str]", key: bytes | None) -> Iterator[FileFacts]:
    try:
        facts = entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return
    yield FileFacts(
        path=entry.path,
        key=key,
        size_bytes=facts.st_size,
        accessed_ns=facts.st_atime_ns,
        written_ns=facts.st_mtime_ns,
    )


def now_ns() -> int:
    """Wall time: the only clock that processes and restarts share, as file times do.

    A clock that jumps changes the order of eviction, nothing else."""
    return time.time_ns()


def _plain(error: OSError) -> str:
    return error.strerror or type(error).__name__
