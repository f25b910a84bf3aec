"""Hand-held ends of the wire: they say exactly what a test tells them to, legal or not."""

import time
import zlib
from types import TracebackType
from typing import Self

import zmq

from kvlift.core.ids import Attempt, Rid
from kvlift.effects import wire
from kvlift.effects.wire_security import SharedSecret, expected_proof
from tests.effects.wire_world import LAYOUT, PAGE_BYTES


class RawNode:
    """A ROUTER that greets one decode rank correctly and then does as it is told."""

    def __init__(self, bind: str = "tcp://127.0.0.1:*", lease_s: float = 30.0) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.linger = 0
        self.socket.rcvtimeo = 5_000
        self.socket.bind(bind)
        self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self.incarnation = wire.new_incarnation()
        self.identity = b""
        self._lease_s = lease_s

    def hear(self) -> wire.Heard:
        frames = self.socket.recv_multipart()
        self.identity = frames[0]
        return wire.heard_by_prefill([memoryview(one) for one in frames[1:]], 1 << 20)

    def hear_kind(self, kind: type[wire.Message]) -> wire.Heard:
        while not isinstance((heard := self.hear()).message, kind):
            pass
        return heard

    def say(self, message: wire.Message, *payload: bytes) -> None:
        self.socket.send_multipart([self.identity, wire.encoded(message), *payload])

    def say_raw(self, *frames: bytes) -> None:
        self.socket.send_multipart([self.identity, *frames])

    def page(self, rid: str, position: int, data: bytes, crc32: int | None = None) -> None:
        crc = zlib.crc32(data) if crc32 is None else crc32
        self.say(wire.Page(Rid(rid), Attempt(1), position=position, crc32=crc), data)

    def greet(self) -> None:
        self.hear_kind(wire.Hello)
        self.say(wire.Challenge(self.incarnation, bytes(32), b""))
        self.hear_kind(wire.Proof)
        self.say(wire.Welcome(self._lease_s))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.context.destroy(linger=0)


class RawRank:
    """A DEALER that can greet a node correctly and then does as it is told."""

    def __init__(
        self,
        address: str,
        *,
        rank: int = 0,
        n_ranks: int = 1,
        group: str = "",
        page_bytes: int = PAGE_BYTES,
        lease_s: float = 30.0,
        rcvhwm: int = 1_000,
    ) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.rcvhwm = rcvhwm
        self.socket.rcvtimeo = 5_000
        self.socket.connect(address)
        self.hello = wire.Hello(
            protocol=wire.PROTOCOL_VERSION,
            layout=LAYOUT,
            model="",
            group=group,
            rank=rank,
            n_ranks=n_ranks,
            page_bytes=page_bytes,
            lease_s=lease_s,
            incarnation=wire.new_incarnation(),
            nonce=bytes(32),
        )

    def say(self, message: wire.Message, *payload: bytes) -> None:
        self.socket.send_multipart([wire.encoded(message), *payload])

    def say_raw(self, *frames: bytes) -> None:
        self.socket.send_multipart(list(frames))

    def hear(self, timeout_s: float = 5.0) -> wire.Heard:
        """The next message that is no heartbeat."""
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            if not self.socket.poll(50):
                continue
            frames = self.socket.recv_multipart()
            heard = wire.heard_by_decode([memoryview(one) for one in frames], self.hello.page_bytes)
            if not isinstance(heard.message, wire.Alive):
                return heard
        raise TimeoutError("the node said nothing")

    def greet(self, secret: SharedSecret | None = None) -> wire.Message:
        self.say(self.hello)
        challenge = self.hear().message
        assert isinstance(challenge, wire.Challenge)
        self.say(wire.Proof(expected_proof(secret, "decode", self.hello, challenge)))
        return self.hear().message

    def hold(self, rid: str, tokens: bytes, attempt: int = 1, page_tokens: int = 4) -> None:
        self.say(wire.Hold(Rid(rid), Attempt(attempt), bytes(32), page_tokens), tokens)

    def want(self, rid: str, start: int, n_pages: int, promise: int, attempt: int = 1) -> None:
        self.say(wire.Want(Rid(rid), Attempt(attempt), start, n_pages, promise))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.context.destroy(linger=0)
