"""What every process of a cluster does: take orders from a pipe, speak on a channel, end in order.

Orders come on standard input, which stays open as long as the launcher lives: when it closes, the
launcher is gone, however it died, and the process ends too.
"""

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Final

import msgspec
import torch
import zmq
from attrs import define, field

from kvlift.core.ballot import RankFailed
from kvlift.effects.ports import RankLate, RankLost
from kvlift.runtime.worker.messages import Command, News
from kvlift.runtime.worker.settings import ProcessOrders

LOG: Final = logging.getLogger("kvlift.worker")

ORDERS_BYTES_MAX: Final = 1 << 20
MESSAGES_A_TURN_MAX: Final = 256
ORPHAN_GRACE_S: Final = 5.0
EXIT_FAILED: Final = 3
EXIT_FOLLOWED: Final = 4
"""The end of a rank whose group is over because of another rank."""


@define(eq=False)
class Channel:
    """A child's end of its private socket to the launcher. Used by one thread."""

    address: str
    _context: "zmq.Context[zmq.Socket[bytes]]" = field(factory=zmq.Context, init=False)
    socket: "zmq.Socket[bytes]" = field(init=False)
    _decoder: msgspec.msgpack.Decoder[Command] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._decoder = msgspec.msgpack.Decoder(Command)
        self.socket = self._context.socket(zmq.PAIR)
        self.socket.linger = 1000
        self.socket.sndhwm = 0
        self.socket.connect(self.address)

    def tell(self, news: News) -> None:
        self.socket.send(msgspec.msgpack.encode(news))

    def commands(self, timeout_s: float) -> list[Command]:
        """What has come, after at most `timeout_s` of waiting for the first."""
        heard: list[Command] = []
        if not self.socket.poll(int(timeout_s * 1000)):
            return heard
        while len(heard) < MESSAGES_A_TURN_MAX:
            try:
                heard.append(self._decoder.decode(self.socket.recv(zmq.NOBLOCK)))
            except zmq.Again:
                break
        return heard

    def close(self) -> None:
        self.socket.close()
        self._context.term()


def read_orders() -> ProcessOrders:
    """The first line of standard input."""
    line = sys.stdin.buffer.readline(ORDERS_BYTES_MAX)
    return msgspec.json.decode(line, type=ProcessOrders)


def live(
    work: Callable[[ProcessOrders, threading.Event], None],
    name_of: Callable[[ProcessOrders], str],
) -> int:
    """Run `work` with its orders and a flag that asks it to end; the exit code.

    A failure's last line on standard error is its reason: the launcher reads it there.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher hears Ctrl-C and ends us in order
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda _number, _frame: stop.set())
    orders = read_orders()
    name = name_of(orders)
    logging.basicConfig(
        level=os.environ.get("KVLIFT_LOG", "WARNING").upper(),
        format=f"{name}: %(levelname)s %(name)s: %(message)s",
    )
    torch.set_num_threads(1)
    threading.Thread(target=_outlive_nobody, args=(stop,), name="orphan", daemon=True).start()
    try:
        work(orders, stop)
    except Exception as error:
        LOG.debug("the process fails", exc_info=True)
        cause = error.__cause__
        why = "" if cause is None else f" ({str(cause) or type(cause).__name__})"
        print(f"{name}: {type(error).__name__}: {error}{why}", file=sys.stderr, flush=True)
        # A collective that hangs would keep the interpreter from ending.
        os._exit(EXIT_FOLLOWED if is_anothers(error) else EXIT_FAILED)
    return 0


def is_anothers(error: Exception) -> bool:
    """Whether a rank ends with this error because another rank failed, was late or lost."""
    if isinstance(error, RankFailed):
        return error.__cause__ is None  # a rank's own failure is the cause of its `RankFailed`
    return isinstance(error, RankLate | RankLost)


def _outlive_nobody(stop: threading.Event) -> None:
    while sys.stdin.buffer.read(1):
        pass
    stop.set()
    # A step that hangs in a collective does not see the flag.
    threading.Timer(ORPHAN_GRACE_S, os._exit, (EXIT_FAILED,)).start()
