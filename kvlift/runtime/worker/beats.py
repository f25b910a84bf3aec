"""Rank 0's word to the other ranks, once an iteration: the same commands before the same tick.

Private `ipc://` sockets, one a rank. Rank 0 sends without waiting for an answer; the others wait
for it, but only for so long: it says something at least every `SILENCE_S`.
"""

import os
import threading
from pathlib import Path
from typing import Final

import msgspec
import zmq
from attrs import define, field

from kvlift.effects.ports import RankLate, RankLost
from kvlift.runtime.worker.messages import Beat

SILENCE_S: Final = 0.5
LOOK_S: Final = 0.1


def beat_address(folder: str, group: str, rank: int) -> str:
    return f"ipc://{Path(folder) / f'{group}-beat-{rank}'}"


@define(eq=False)
class BeatSender:
    """Rank 0's end. Raises `RankLost` when nobody hears it at the end of another rank's line for
    `deadline_s`, or once this rank was asked to end: libzmq itself would wait there for ever."""

    folder: str
    group: str
    n_ranks: int
    deadline_s: float
    stop: threading.Event
    _context: "zmq.Context[zmq.Socket[bytes]]" = field(factory=zmq.Context, init=False)
    _sockets: "list[zmq.Socket[bytes]]" = field(factory=list, init=False)

    def __attrs_post_init__(self) -> None:
        for rank in range(1, self.n_ranks):
            socket = self._context.socket(zmq.PUSH)
            socket.linger = 1000
            socket.sndhwm = 0
            address = beat_address(self.folder, self.group, rank)
            socket.bind(address)
            os.chmod(address.removeprefix("ipc://"), 0o600)
            self._sockets.append(socket)

    def send(self, beat: Beat) -> None:
        encoded = msgspec.msgpack.encode(beat)
        for rank, socket in enumerate(self._sockets, 1):
            self._wait_for(rank, socket)
            socket.send(encoded, zmq.NOBLOCK)

    def _wait_for(self, rank: int, socket: "zmq.Socket[bytes]") -> None:
        """Until it is there; its queue has no bound, so a rank that is there takes it at once."""
        waited_s = 0.0
        while not socket.poll(int(LOOK_S * 1000), zmq.POLLOUT):
            waited_s += LOOK_S
            if self.stop.is_set() or waited_s > self.deadline_s:
                raise RankLost((rank,), "it does not listen to rank 0 any more")

    def close(self) -> None:
        for socket in self._sockets:
            socket.close()
        self._context.term()


@define(eq=False)
class BeatReceiver:
    """Another rank's end. Raises `RankLate` when rank 0 is silent for `deadline_s`."""

    folder: str
    group: str
    rank: int
    deadline_s: float
    stop: threading.Event
    _context: "zmq.Context[zmq.Socket[bytes]]" = field(factory=zmq.Context, init=False)
    _socket: "zmq.Socket[bytes]" = field(init=False)
    _decoder: msgspec.msgpack.Decoder[Beat] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._decoder = msgspec.msgpack.Decoder(Beat)
        self._socket = self._context.socket(zmq.PULL)
        self._socket.linger = 0
        self._socket.rcvhwm = 0
        self._socket.connect(beat_address(self.folder, self.group, self.rank))

    def receive(self) -> Beat | None:
        """The next beat; None when this rank was asked to end and rank 0 says nothing more."""
        waited_s = 0.0
        while not self._socket.poll(int(LOOK_S * 1000)):
            waited_s += LOOK_S
            if self.stop.is_set() and waited_s > 2 * SILENCE_S:
                return None
            if waited_s > self.deadline_s:
                raise RankLate((0,), self.deadline_s)
        return self._decoder.decode(self._socket.recv())

    def close(self) -> None:
        self._socket.close()
        self._context.term()
