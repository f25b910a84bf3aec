"""A decode rank and a prefill node in one process, joined by real sockets."""

import hashlib
import time
from typing import Any

from kvlift.core.ids import Attempt, Rid
from kvlift.effects.peers import ZmqPeers
from kvlift.runtime.prefill import PrefillNode
from kvlift.runtime.prefill_requests import Asked, Ended

LAYOUT = "layout-1"
PAGE_BYTES = 96 * 1024
"""Above the size from which pyzmq sends without copying (64 KiB)."""


def page_content(rid: str, position: int, rank: int = 0, page_bytes: int = PAGE_BYTES) -> bytes:
    seed = hashlib.sha256(f"{rid}/{position}/{rank}".encode()).digest()
    return seed * (page_bytes // 32)


class PlainMemory:
    """Device pages as one bytearray each."""

    def __init__(self, n_pages: int = 16, page_bytes: int = PAGE_BYTES) -> None:
        self.pages = [bytearray(page_bytes) for _ in range(n_pages)]
        self.page_bytes = page_bytes
        self.n_pages = n_pages
        self.written: list[int] = []

    def write_page(self, device_page: int, data: memoryview) -> None:
        self.pages[device_page][:] = data
        self.written.append(device_page)

    def read_page(self, device_page: int, into: memoryview) -> None:
        into[:] = self.pages[device_page]


class PlainPages:
    """A page source that makes each page's bytes from its name."""

    def __init__(self, page_bytes: int = PAGE_BYTES) -> None:
        self.page_bytes = page_bytes
        self.asked: list[tuple[str, int, int]] = []

    def page_bytes_for(self, rid: Rid, position: int, rank: int, n_ranks: int) -> bytes:
        self.asked.append((rid, position, rank))
        return page_content(rid, position, rank, self.page_bytes)


class Node:
    """A prefill node and what its engine has heard so far."""

    def __init__(
        self, bind: str = "tcp://127.0.0.1:*", layout: str = LAYOUT, **options: Any
    ) -> None:
        self.pages = PlainPages(options.pop("page_bytes", PAGE_BYTES))
        options.setdefault("heartbeat_s", 0.1)
        self.node = PrefillNode(bind, layout, options.pop("source", self.pages), **options)
        self.address = self.node.address
        self.asked: list[Asked] = []
        self.ended: list[Ended] = []

    def hear(self) -> None:
        self.asked += self.node.poll()
        self.ended += self.node.ended()

    def knows(self, rid: str, attempt: int = 1) -> bool:
        self.hear()
        key = (rid, attempt)
        n_asked = sum((one.rid, one.attempt) == key for one in self.asked)
        n_ended = sum((one.rid, one.attempt) == key for one in self.ended)
        assert n_asked - n_ended in (0, 1), "a request is announced once, and ends once"
        return n_asked > n_ended


def zmq_peers(memory: PlainMemory | None = None, **options: Any) -> ZmqPeers:
    options.setdefault("heartbeat_s", 0.1)
    options.setdefault("connect_timeout_s", 3.0)
    layout = options.pop("layout", LAYOUT)
    return ZmqPeers(memory or PlainMemory(), layout, **options)


class ZmqWorld:
    """A `PeersWorld` over tcp loopback."""

    def __init__(self) -> None:
        self.memory = PlainMemory()
        self.node = Node()
        self.address = self.node.address
        self.peers = zmq_peers(self.memory)
        self._is_silent = False

    def device_page(self, page: int) -> bytes:
        return bytes(self.memory.pages[page])

    def expected(self, rid: Rid, position: int) -> bytes:
        return page_content(rid, position)

    def compute(self, rid: Rid, attempt: Attempt, n_pages: int) -> None:
        self.node.node.page_ready(rid, attempt, n_pages)

    def sample(self, rid: Rid, attempt: Attempt, token: int, logprob: float) -> None:
        self.node.node.first_token(rid, attempt, token, logprob)

    def reject(self, rid: Rid, attempt: Attempt, reason: str) -> None:
        self.node.node.reject(rid, attempt, reason)

    def expire(self, rid: Rid, attempt: Attempt) -> None:
        self.node.node.expire(rid, attempt)

    def silence(self) -> None:
        """Keep the node's thread from doing anything, as a stopped process would."""
        import threading

        self._is_silent = True
        self._released = threading.Event()
        stopped = threading.Event()

        def stand_still(_desk: object) -> None:
            stopped.set()
            self._released.wait(10)

        self.node.node._command(stand_still)
        assert stopped.wait(5)

    def kill(self) -> None:
        self.node.hear()
        assert self.node.node.close(5)

    def revive(self) -> None:
        self.node = Node(self.address)

    def knows(self, rid: Rid, attempt: Attempt) -> bool:
        return self.node.knows(rid, attempt)

    def step(self) -> None:
        time.sleep(0.005)

    def close(self) -> None:
        if self._is_silent:
            self._released.set()
        assert self.peers.close(5)
        assert self.node.node.close(5)
