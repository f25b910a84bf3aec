"""The connections of the HTTP server: bounded in number, and closed where nobody speaks.

Each is an open file of the process that also starts and watches the ranks. uvicorn by itself takes
as many as come and lets one that says nothing stay; then nothing else can be opened any more.
"""

import asyncio
import resource
from typing import Final

from uvicorn.protocols.http.h11_impl import H11Protocol

SILENT_S_MAX: Final = 15.0
ACCEPTED_A_TURN_MAX: Final = 16
"""asyncio takes as many as its `backlog` says before it looks at the first, and so may overshoot
the bound; the kernel's own queue is made longer afterwards."""

OPEN_FILES_WANTED: Final = 1 << 14


def connections_max() -> int:
    """Half of the files that this process may open, whose limit is raised as far as that goes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    there = OPEN_FILES_WANTED if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES_WANTED)
    if soft != resource.RLIM_INFINITY and soft < there:
        resource.setrlimit(resource.RLIMIT_NOFILE, (there, hard))
    return max(1, there // 2)


def bounded_connections(n_max: int, silent_s: float = SILENT_S_MAX) -> type[H11Protocol]:
    """uvicorn's protocol for at most `n_max` connections at a time; one more is closed at once.

    One that has no call under way is closed when none begins for `silent_s` (up to twice that).
    """

    class Connection(H11Protocol):
        _seen: object = None
        _look: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > n_max:
                transport.abort()
                return
            self._look = self.loop.call_later(silent_s, self._close_if_silent)

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            if self._look is not None:
                self._look.cancel()

        def _close_if_silent(self) -> None:
            is_idle = self.cycle is None or self.cycle.response_complete
            if is_idle and self.cycle is self._seen:
                self.transport.abort()
                return
            self._seen = self.cycle if is_idle else self
            self._look = self.loop.call_later(silent_s, self._close_if_silent)

    return Connection
