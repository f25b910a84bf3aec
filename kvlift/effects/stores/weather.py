"""Storage that fails is weather: it is told in the log, once in a while, and never raised."""

import errno
import logging
import threading
import time
from typing import Final

PAUSE_S: Final = 60.0

_log = logging.getLogger("kvlift.storage")


class WeatherLog:
    """One line a kind of failure and `pause_s` seconds. Names no page: keys are the users'."""

    def __init__(self, place: str, pause_s: float = PAUSE_S) -> None:
        self._place = place
        self._pause_s = pause_s
        self._told_s: dict[tuple[str, str], float] = {}
        self._n_untold: dict[tuple[str, str], int] = {}
        self._lock = threading.Lock()

    def tell(self, action: str, reason: OSError | str) -> None:
        """`action`: what was tried, for instance "reading a page"."""
        text = _plain(reason) if isinstance(reason, OSError) else reason
        kind = (action, text)
        now_s = time.monotonic()
        with self._lock:
            told_s = self._told_s.get(kind)
            if told_s is not None and now_s - told_s < self._pause_s:
                self._n_untold[kind] = self._n_untold.get(kind, 0) + 1
                return
            self._told_s[kind] = now_s
            n_untold = self._n_untold.pop(kind, 0)
        more = f" ({n_untold} more since the last such line)" if n_untold else ""
        _log.warning("storage %s: %s failed: %s%s", self._place, action, text, more)


def _plain(error: OSError) -> str:
    # Without the file's name, which is a page's key; a new name would also be a new kind.
    name = errno.errorcode.get(error.errno or 0, type(error).__name__)
    return f"{error.strerror or 'unknown'} [{name}]"
