"""The HTTP routes, fed through the ASGI application without a socket.

An input: a byte for the route, a byte for how the call comes (method, pieces, a client that
leaves), a query string up to the first zero, and the body.
"""

import asyncio
import zlib
from collections.abc import AsyncIterator, MutableMapping, Sequence
from random import Random
from typing import Any, Final

import msgspec
from attrs import define, field

from kvlift.runtime.worker.generation import (
    CachedTokens,
    EngineBusyError,
    EngineDownError,
    EngineRefusedError,
    Finish,
    FinishKind,
    Output,
    Request,
)
from kvlift.runtime.worker.http import create_app
from kvlift.runtime.worker.http_body import MESSAGE_CHARACTERS_MAX, HttpLimits
from kvlift.runtime.worker.model_config import tiny
from kvlift.runtime.worker.tokenizer import ByteCodec
from tests.fuzz.mutations import ODD_TEXTS, mutated_bytes, mutated_value

ROUTES: Final = (
    *("/generate", "/generate", "/generate", "/v1/completions", "/v1/completions"),
    *("/v1/chat/completions", "/v1/chat/completions", "/abort_request", "/flush_cache"),
    *("/server_info", "/health", "/metrics", "/v1/models", "/nowhere", "/generate/../x", "//"),
)
BODY_BYTES_MAX: Final = 1 << 16
STATUS_KNOWN: Final = frozenset({200, 307, 400, 404, 405, 413, 429, 499, 503})
IS_GET: Final = 1
IS_PIECES: Final = 2
LEAVES: Final = 4

BODIES: Final[dict[str, tuple[dict[str, Any], ...]]] = {
    "/generate": (
        {
            "input_ids": [1, 2, 3],
            "sampling_params": {
                "max_new_tokens": 3,
                "temperature": 0,
                "top_p": 0.9,
                "top_k": 5,
                "stop": ["ab", "c"],
                "stop_token_ids": [7],
                "ignore_eos": True,
                "sampling_seed": 3,
            },
            "rid": "mine",
            "return_logprob": True,
            "logprob_start_len": 0,
            "stream": False,
            "priority": 1,
            "extra_key": "salt",
            "tenant": "a",
        },
        {"text": ["hello", "you"], "sampling_params": [{}, {"n": 1}], "rid": "x", "stream": True},
        {"input_ids": [[1], [2, 3]], "rid": ["a", "b"], "return_logprob": [True, False]},
        {"text": "once upon a time", "sampling_params": {"max_new_tokens": 2, "min_p": 0}},
    ),
    "/v1/completions": (
        {"model": "tiny", "prompt": "hello", "max_tokens": 3, "logprobs": 1, "temperature": 0},
        {"prompt": ["a", "b"], "stream": True, "stream_options": {"include_usage": True}},
        {"prompt": [[1, 2], [3]], "stop": "x", "seed": 4, "user": "u", "cache_salt": "s"},
    ),
    "/v1/chat/completions": (
        {
            "model": "tiny",
            "messages": [{"role": "user", "content": "hello"}],
            "max_completion_tokens": 2,
            "logprobs": True,
        },
        {
            "messages": [
                {"role": "system", "content": [{"type": "text", "text": "be"}]},
                {"role": "user", "content": "so"},
            ],
            "stream": True,
            "top_p": 0.5,
        },
    ),
    "/abort_request": ({"rid": "mine"},),
}


@define(eq=False)
class FakeEngine:
    """Answers at once; refuses, is busy, is down and fails for some prompts."""

    live: set[str] = field(factory=set)

    async def submit(self, request: Request) -> AsyncIterator[Output]:
        kind = zlib.crc32(repr(request.tokens[:4]).encode()) % 16
        errors = {1: EngineBusyError, 2: EngineRefusedError, 3: EngineDownError}
        if kind in errors:
            raise errors[kind]("this is why")
        if request.rid in self.live:
            raise EngineRefusedError(f"the request id {request.rid[:64]} is in use; choose another")
        assert 0 < len(request.rid) <= 256
        assert all(0 <= token < tiny().vocab for token in request.tokens)
        assert len(request.tokens) + request.sampling.max_new_tokens <= tiny().positions_max
        self.live.add(request.rid)
        try:
            cached = CachedTokens(device=1)
            yield Output(rid=request.rid, tokens=(104,), logprobs=(-0.5,), cached=cached)
            await asyncio.sleep(0)
            ends = (FinishKind.LENGTH, FinishKind.STOP, FinishKind.ERROR, FinishKind.ABORT)
            finish = Finish(kind=ends[kind % 4], message="so it ended", status=503, matched=7)
            yield Output(rid=request.rid, tokens=(105,), logprobs=(-0.25,), finish=finish)
        finally:
            self.live.discard(request.rid)

    async def abort(self, rid: str) -> bool:
        return rid == "mine"

    async def flush(self, tiers: Sequence[str]) -> None:
        assert set(tiers) <= {"device", "host", "storage"}

    async def score(self, tokens: Sequence[int], start: int) -> tuple[float, ...]:
        return (-1.0,) * (len(tokens) - max(start, 1))

    async def info(self) -> dict[str, object]:
        return {"model": "tiny"}

    async def metrics_text(self) -> str:
        return "kvlift_metric 1\n"


@define(eq=False)
class Answer:
    """What the application has sent."""

    status: int = 0
    headers: list[tuple[bytes, bytes]] = field(factory=list)
    body: bytearray = field(factory=bytearray)
    is_over: bool = False

    async def take(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            assert not self.status
            self.status, self.headers = message["status"], list(message["headers"])
        else:
            self.body += message.get("body", b"")
            self.is_over = not message.get("more_body", False)


class HttpSurface:
    name = "http"

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._engine = FakeEngine()
        limits = HttpLimits(body_bytes_max=BODY_BYTES_MAX, prompts_max=8)
        self._app = create_app(self._engine, ByteCodec(), tiny(), limits)

    def close(self) -> None:
        self._loop.close()

    def made(self, draw: Random) -> bytes:
        route = draw.randrange(len(ROUTES))
        how = draw.choice((*(0,) * 8, IS_PIECES, IS_PIECES, IS_GET, LEAVES, LEAVES | IS_PIECES))
        query = b""
        if ROUTES[route] == "/flush_cache":
            tiers = draw.choice(("all", "device", "host,storage", "attic", *ODD_TEXTS))
            query = b"tiers=" + tiers.encode().replace(b"\0", b"")
        examples = BODIES.get(ROUTES[route])
        if examples is None:
            how |= draw.choice((0, IS_GET, IS_GET))
            return bytes([route, how]) + query + b"\0"
        value: Any = draw.choice(examples)
        for _ in range(draw.choice((0, 1, 1, 1, 2, 3))):
            value = mutated_value(draw, value)
        body = msgspec.json.encode(value)
        if draw.random() < 0.15:
            body = mutated_bytes(draw, body)
        return bytes([route, how]) + query + b"\0" + body

    def fed(self, data: bytes) -> str:
        route, how = (data[0] if data else 0), (data[1] if len(data) > 1 else 0)
        query, _, body = data[2:].partition(b"\0")
        answer = Answer()
        path = ROUTES[route % len(ROUTES)]
        self._loop.run_until_complete(self._call(path, how, query, body, answer))
        assert answer.is_over
        assert not self._engine.live, "a request outlives its call"
        assert answer.status in STATUS_KNOWN, f"status {answer.status}"
        if answer.status != 200:
            check_refusal(answer)
        return f"status {answer.status}"

    async def _call(self, path: str, how: int, query: bytes, body: bytes, answer: Answer) -> None:
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "GET" if how & IS_GET else "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query,
            "root_path": "",
            "headers": [(b"host", b"worker"), (b"content-type", b"application/json")],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }
        size = 7 if how & IS_PIECES and len(body) < 2_000 else max(1, len(body))
        pieces = [body[at : at + size] for at in range(0, len(body), size)] or [b""]
        if how & LEAVES:
            pieces = pieces[: len(pieces) // 2]
        coming = iter(
            {"type": "http.request", "body": piece, "more_body": at < len(pieces) - 1}
            for at, piece in enumerate(pieces)
        )
        is_over = asyncio.Event()

        async def receive() -> dict[str, Any]:
            message = next(coming, None)
            if message is not None:
                return message
            if not how & LEAVES:
                await is_over.wait()
            return {"type": "http.disconnect"}

        try:
            await self._app(scope, receive, answer.take)
        finally:
            is_over.set()


def check_refusal(answer: Answer) -> None:
    """A refusal is a short sentence, and shows nothing of the inside."""
    if answer.status == 307:
        return
    message = msgspec.json.decode(bytes(answer.body))["error"]["message"]
    assert isinstance(message, str)
    assert 0 < len(message) <= MESSAGE_CHARACTERS_MAX, f"a message of {len(message)} characters"
    assert "Traceback" not in message
