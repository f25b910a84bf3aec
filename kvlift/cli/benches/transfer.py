"""Pages from a prefill node over kvlift's wire, beside a plain socket copy of the same bytes.

Both over loopback, from one process to another, in turns: fresh random pages, each of which is
compared with what was sent. The plain copy is one `sendall` of all pages against `recv_into` the
memory where they belong, so it has neither checksums nor messages.
"""

import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Final

import attrs
import numpy as np
from attrs import define, field, frozen

from kvlift.cli.benches.row import Row, row
from kvlift.core.ids import Attempt, Rid, Ticket
from kvlift.core.keys import KEY_BYTES
from kvlift.core.landed import PagesArrived, PeerFailed
from kvlift.core.prompt import Prompt, token_bytes
from kvlift.effects.device_memory import BlockMemory
from kvlift.effects.host_pool import HostPool
from kvlift.effects.peers import ZmqPeers

FINGERPRINT: Final = "bench transfer"
ANSWER_S: Final = 120.0
GB: Final = 1e9
GO: Final = b"g"


@frozen(kw_only=True)
class Sizes:
    page_bytes: int = 8 << 20
    n_pages: int = 64
    n_rounds: int = 5


TINY: Final = Sizes(page_bytes=1 << 20, n_pages=4, n_rounds=2)


def truth(sizes: Sizes, seed: int) -> np.ndarray:
    """All pages of a round, uint8 `[n_pages, page_bytes]`; both processes make them from a seed."""
    source = np.random.default_rng(seed)
    return source.integers(0, 256, (sizes.n_pages, sizes.page_bytes), dtype=np.uint8)


def measure(progress: Callable[[str], None], *, is_tiny: bool = False) -> list[Row]:
    sizes = TINY if is_tiny else Sizes()
    seed = int.from_bytes(os.urandom(6))
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(ANSWER_S)
    command = [sys.executable, "-m", "kvlift.cli.benches.transfer_sender"]
    fields = [str(value) for value in attrs.astuple(sizes)]
    sender = subprocess.Popen(
        [*command, str(listener.getsockname()[1]), str(seed), *fields], stdout=subprocess.PIPE
    )
    try:
        plain, _ = listener.accept()
        # Two single bytes go out in a row; the second must not wait for a receipt of the first.
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        assert sender.stdout is not None
        address = sender.stdout.readline().decode().strip()
        spent = _rounds(sizes, seed, plain, address, progress)
        plain.close()
    finally:
        listener.close()
        sender.kill()
        sender.wait()
    size = sizes.n_pages * sizes.page_bytes
    wire, ceiling = (size / statistics.median(spent[way]) / GB for way in ("wire", "plain"))
    cpu_s, plain_cpu_s = (
        statistics.median(spent[f"{way}-cpu"]) / (size / GB) for way in ("wire", "plain")
    )
    name = f"transfer-{sizes.page_bytes >> 20}MiB"
    note = (
        f"ceiling: a plain socket copy; the receiver's CPU {cpu_s:.2f} s a GB, "
        f"plain {plain_cpu_s:.2f}"
    )
    return [row(name, wire, "GB/s", ceiling, note)]


def _rounds(
    sizes: Sizes, seed: int, plain: socket.socket, address: str, progress: Callable[[str], None]
) -> dict[str, list[float]]:
    pool = HostPool(sizes.n_pages, sizes.page_bytes, pinned=False)
    receiver = Receiver(sizes, pool, address)
    spent: dict[str, list[float]] = {"plain": [], "wire": [], "plain-cpu": [], "wire-cpu": []}
    for number in range(sizes.n_rounds + 1):
        progress(f"round {number} of {sizes.n_rounds}")
        expected = truth(sizes, seed + number)
        plain.sendall(plain.recv(1))  # the sender has its pages too
        for way in ("plain", "wire"):
            pool.tensor().zero_()
            begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
            _receive_plain(plain, pool) if way == "plain" else receiver.receive(number)
            taken_s = time.perf_counter() - begin_s
            if number:  # the first round warms up
                spent[way].append(taken_s)
                spent[f"{way}-cpu"].append(time.process_time() - begin_cpu_s)
            if not np.array_equal(pool.tensor().numpy(), expected):
                raise RuntimeError(f"{way}: pages came with other bytes")
    receiver.close()
    return spent


def _receive_plain(plain: socket.socket, pool: HostPool) -> None:
    plain.sendall(GO)
    whole = pool.tensor().numpy().reshape(-1).data
    at = 0
    while at < len(whole):
        n_bytes = plain.recv_into(whole[at:])
        if not n_bytes:
            raise RuntimeError("the sender has gone")
        at += n_bytes


@define(eq=False)
class Receiver:
    """Asks a prefill node for all pages of a prompt, into the pages of a pool."""

    sizes: Sizes
    pool: HostPool
    address: str
    peers: ZmqPeers = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.peers = ZmqPeers(BlockMemory(self.pool.tensor()), FINGERPRINT)

    def receive(self, number: int) -> None:
        ticket = Ticket(number)
        n_pages = self.sizes.n_pages
        prompt = Prompt(bytes(KEY_BYTES), token_bytes(range(n_pages)), 1)
        self.peers.send_hold(ticket, Rid(f"r{number}"), Attempt(1), self.address, prompt)
        self.peers.send_want(ticket, 0, range(n_pages), 0)
        until_s = time.monotonic() + ANSWER_S
        while time.monotonic() < until_s:
            for report in self.peers.landed():
                if isinstance(report, PeerFailed):
                    raise ConnectionError(report.reason)
                if isinstance(report, PagesArrived) and report.n_pages == n_pages:
                    self.peers.send_committed(ticket)
                    return
            time.sleep(0.0002)
        raise TimeoutError("the pages have not come")

    def close(self) -> None:
        self.peers.close(5)
