"""The HTTP routes once more, through a real server and real sockets: bytes that are hardly HTTP."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Final

import uvicorn

from kvlift.runtime.worker.http import create_app
from kvlift.runtime.worker.http_body import HttpLimits
from kvlift.runtime.worker.model_config import tiny
from kvlift.runtime.worker.tokenizer import ByteCodec
from tests.fuzz.http_surface import (
    BODY_BYTES_MAX,
    ROUTES,
    STATUS_KNOWN,
    FakeEngine,
    HttpSurface,
)
from tests.fuzz.mutations import mutated_bytes

ANSWER_S_MAX: Final = 5.0
ANSWER_BYTES_MAX: Final = 1 << 20


@contextmanager
def _served() -> Iterator[tuple[str, int]]:
    limits = HttpLimits(body_bytes_max=BODY_BYTES_MAX, prompts_max=8)
    app = create_app(FakeEngine(), ByteCodec(), tiny(), limits)
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        yield listening.getsockname()
    finally:
        server.should_exit = True
        thread.join(10)
        listening.close()


class SocketSurface:
    """An input is what a client says on one connection before it is silent."""

    name = "sockets"

    def __init__(self) -> None:
        self._bodies = HttpSurface()
        self._server = _served()
        self._address = self._server.__enter__()

    def close(self) -> None:
        self._server.__exit__(None, None, None)
        self._bodies.close()

    def made(self, draw: Random) -> bytes:
        said = self._bodies.made(draw)
        path, body = ROUTES[said[0] % len(ROUTES)], said[2:].partition(b"\0")[2]
        size = draw.choice((len(body), len(body), len(body), 0, len(body) + 5, 1 << 62, -3))
        head = (
            f"{draw.choice(('POST', 'POST', 'GET', 'BREW'))} {path} HTTP/1.1\r\nHost: a\r\n"
            f"Content-Length: {size}\r\n"
        )
        if draw.random() < 0.1:
            head += "Transfer-Encoding: chunked\r\n"
        whole = head.encode() + b"Connection: close\r\n\r\n" + body
        return mutated_bytes(draw, whole) if draw.random() < 0.5 else whole

    def fed(self, data: bytes) -> str:
        """Whatever was said: it is answered or closed, and the next one is served."""
        started_s = time.monotonic()
        with socket.create_connection(self._address, timeout=ANSWER_S_MAX) as client:
            heard = b""
            try:
                client.sendall(data)
                client.shutdown(socket.SHUT_WR)
                while (more := client.recv(65_536)) and len(heard) < ANSWER_BYTES_MAX:
                    heard += more
            except (ConnectionResetError, BrokenPipeError):
                return "reset"
        assert time.monotonic() - started_s < ANSWER_S_MAX
        if not heard:
            return "closed"
        status = int(heard.split(b" ", 2)[1])
        assert status in STATUS_KNOWN | {413, 431, 501}, heard[:200]
        return f"status {status}"
