"""What one process remembers of a store that others change too.

Bounded, and not to be trusted: where it is wrong, a read fails.
"""

import threading
from typing import Final

N_KNOWN_MAX: Final = 1 << 18
N_CONDEMNED_MAX: Final = 1 << 12

Identity = tuple[int, int, int]
"""Inode, time of writing (ns) and size of a file: a new file under the same name has another."""


class KnownPages:
    """Keys that were seen or written here, the first ones in go first, and damaged files that
    could not be removed. `has` takes no lock."""

    def __init__(
        self, n_known_max: int = N_KNOWN_MAX, n_condemned_max: int = N_CONDEMNED_MAX
    ) -> None:
        self._n_known_max = n_known_max
        self._n_condemned_max = n_condemned_max
        self._known: dict[bytes, None] = {}
        self._condemned: dict[bytes, Identity] = {}
        self._lock = threading.Lock()

    def has(self, key: bytes) -> bool:
        return key in self._known

    def add(self, key: bytes) -> None:
        with self._lock:
            self._condemned.pop(key, None)
            self._known[key] = None
            if len(self._known) > self._n_known_max:
                del self._known[next(iter(self._known))]

    def discard(self, key: bytes) -> None:
        with self._lock:
            self._known.pop(key, None)

    def clear(self) -> None:
        with self._lock:
            self._known.clear()

    def condemn(self, key: bytes, identity: Identity) -> None:
        """This very file is damaged and could not be removed: it is no page until it is another."""
        with self._lock:
            self._known.pop(key, None)
            self._condemned[key] = identity
            if len(self._condemned) > self._n_condemned_max:
                del self._condemned[next(iter(self._condemned))]

    def is_condemned(self, key: bytes, identity: Identity) -> bool:
        return self._condemned.get(key) == identity
