"""What both ends of the wire need of ZeroMQ and of the operating system."""

import logging
import socket
import time
from typing import Final, TypeAlias

import zmq
from attrs import define, field

Socket: TypeAlias = zmq.Socket[bytes]
Context: TypeAlias = zmq.Context[zmq.Socket[bytes]]

LOG_EVERY_S: Final = 10.0


class Waker:
    """Wakes a thread that polls `fileno`. Any thread may `wake`; it never blocks."""

    def __init__(self) -> None:
        self._inner, self._outer = socket.socketpair()
        self._inner.settimeout(0.0)
        self._outer.settimeout(0.0)

    def fileno(self) -> int:
        return self._inner.fileno()

    def wake(self) -> None:
        try:
            self._outer.send(b"\0")
        except OSError:
            return  # full: the thread is being woken; closed: there is no thread any more

    def rest(self) -> None:
        """Take all wake-ups so far."""
        try:
            while len(self._inner.recv(4096)) == 4096:
                pass
        except BlockingIOError:
            return

    def close(self) -> None:
        self._inner.close()
        self._outer.close()


@define(eq=False)
class QuietLog:
    """At most one warning in `LOG_EVERY_S`, with the number of those that were left out."""

    _logger: logging.Logger
    n_events: int = field(default=0, init=False)
    _n_left_out: int = field(default=0, init=False)
    _next_s: float = field(default=0.0, init=False)

    def warn(self, what: str) -> None:
        self.n_events += 1
        now = time.monotonic()
        if now < self._next_s:
            self._n_left_out += 1
            return
        more = f" ({self._n_left_out} more were not logged)" if self._n_left_out else ""
        self._logger.warning("%s%s", what, more)
        self._n_left_out = 0
        self._next_s = now + LOG_EVERY_S


def frames_of_next(source: Socket, n_frames_max: int) -> list[zmq.Frame] | None:
    """The next message without waiting, or None. Frames beyond `n_frames_max + 1` are dropped.

    A message that is too long in frames therefore still shows itself by its length.
    """
    try:
        frame = source.recv(zmq.NOBLOCK, copy=False)
    except zmq.Again:
        return None
    frames = [frame]
    while frame.more:
        frame = source.recv(copy=False)
        if len(frames) <= n_frames_max:
            frames.append(frame)
    return frames


def views(frames: list[zmq.Frame]) -> list[memoryview]:
    """The frames' bytes, not copied; they live as long as the frames."""
    return [memoryview(frame.buffer) for frame in frames]
