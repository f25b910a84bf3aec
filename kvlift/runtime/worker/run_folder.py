"""The private folder of a running cluster: its sockets lie there, and it goes with it.

A launcher that is killed cannot clear its folder away. So a living launcher holds a lock on a file
in its folder, and the next one removes the folders of this user whose lock nobody holds any more.
The kernel lets go of a lock with its holder, however that one has died.
"""

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import Final, Self

from attrs import define

PREFIX: Final = "kvlift-"
LOCK: Final = "launcher"
FOLDERS_LOOKED_AT_MAX: Final = 1000


@define(eq=False)
class RunFolder:
    path: Path
    _lock: int

    @classmethod
    def made(cls) -> Self:
        """A new one, in the place for temporary files; leftovers of dead launchers go first."""
        remove_leftovers(Path(tempfile.gettempdir()))
        path = Path(tempfile.mkdtemp(prefix=PREFIX))
        # Locked before it has its name: whoever looks at it in between sees no lock file at all.
        unnamed = path / f"{LOCK}.new"
        lock = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        unnamed.rename(path / LOCK)
        return cls(path, lock)

    def remove(self) -> None:
        """May be called again."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def remove_leftovers(place: Path) -> int:
    """Remove the folders in `place` whose launchers are gone; how many."""
    n_removed = 0
    with contextlib.suppress(OSError):
        for path in sorted(place.glob(f"{PREFIX}*"))[:FOLDERS_LOOKED_AT_MAX]:
            n_removed += _remove_if_left(path)
    return n_removed


def _remove_if_left(path: Path) -> bool:
    try:
        facts = path.lstat()
        if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid():
            return False
        lock = os.open(path / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False  # somebody else's, just being made, or gone already
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
        return True
    except OSError:
        return False  # its launcher lives
    finally:
        os.close(lock)
