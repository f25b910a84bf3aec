"""The proxy between two servers that only look like vLLM; runs without vLLM."""

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from examples.vllm_proxy import ASK_TO_KEEP, Proxy
from tests.vllm.harness import free_port

pytestmark = pytest.mark.real

KEPT = {"do_remote_prefill": True, "kvlift_addresses": ["tcp://127.0.0.1:1"]}


@attrs.define
class Fake:
    """An instance that notes what it is asked."""

    params: dict[str, Any] | None = None
    status: int = 200
    is_endless: bool = False
    asked: list[dict[str, Any]] = attrs.field(factory=list)
    ids: list[str] = attrs.field(factory=list)
    has_left: threading.Event = attrs.field(factory=threading.Event)

    async def complete(self, request: Request) -> Response:
        body = await request.json()
        self.asked.append(body)
        self.ids.append(request.headers["x-request-id"])
        if self.status != 200:
            return JSONResponse({"error": "no"}, status_code=self.status)
        if body.get("stream"):
            return StreamingResponse(self._events(), media_type="text/event-stream")
        return JSONResponse({"choices": [], "kv_transfer_params": self.params})

    async def _events(self) -> AsyncIterator[str]:
        try:
            yield "data: 1\n\n"
            while self.is_endless:
                await asyncio.sleep(0.02)
                yield "data: more\n\n"
            yield "data: [DONE]\n\n"
        finally:
            self.has_left.set()

    def app(self) -> Starlette:
        async def health(_request: Request) -> Response:
            return Response()

        complete = Route("/v1/completions", self.complete, methods=["POST"])
        return Starlette(routes=[complete, Route("/health", health)])


@contextmanager
def served(app: Starlette) -> Iterator[str]:
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        deadline = time.monotonic() + 20
        while not server.started and time.monotonic() < deadline:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


@contextmanager
def proxied(prefill: Fake | None, decode: Fake) -> Iterator[str]:
    """The URL of a proxy; without a prefill instance it is given one that is not there."""
    with served(decode.app()) as decode_url:
        if prefill is None:
            nobody = f"http://127.0.0.1:{free_port()}"
            with served(Proxy([nobody], decode_url, 20).app()) as url:
                yield url
            return
        with (
            served(prefill.app()) as prefill_url,
            served(Proxy([prefill_url], decode_url, 20).app()) as url,
        ):
            yield url


BODY = {"prompt": [1, 2], "max_tokens": 9, "stream": True, "stream_options": {}, "min_tokens": 3}


def ask(url: str, body: dict[str, Any] = BODY) -> httpx.Response:
    return httpx.post(f"{url}/v1/completions", json=body, timeout=20)


def test_prefill_is_asked_for_one_token_and_decode_gets_what_it_says() -> None:
    prefill, decode = Fake(params=KEPT), Fake()
    with proxied(prefill, decode) as url:
        answer = ask(url)
    assert answer.text == "data: 1\n\ndata: [DONE]\n\n"
    assert answer.headers["content-type"].startswith("text/event-stream")
    one_token = {"prompt": [1, 2], "max_tokens": 1, "stream": False}
    assert prefill.asked == [one_token | {"kv_transfer_params": ASK_TO_KEEP}]
    assert decode.asked == [BODY | {"kv_transfer_params": KEPT}]
    assert prefill.ids == decode.ids


def test_a_client_cannot_name_the_instance_that_its_prompt_is_fetched_from() -> None:
    theirs = {"do_remote_prefill": True, "kvlift_addresses": ["tcp://10.0.0.7:1"]}
    for prefill in (None, Fake(status=500), Fake(params=None)):
        decode = Fake()
        with proxied(prefill, decode) as url:
            assert ask(url, BODY | {"kv_transfer_params": theirs}).status_code == 200
        assert decode.asked == [BODY]


@pytest.mark.parametrize("prefill", [None, Fake(status=500)])
def test_decode_computes_by_itself_where_no_prefill_instance_can(prefill: Fake | None) -> None:
    decode = Fake()
    with proxied(prefill, decode) as url:
        assert ask(url).status_code == 200
    assert decode.asked == [BODY]


def test_a_wrong_request_is_refused_once() -> None:
    prefill, decode = Fake(status=422), Fake()
    with proxied(prefill, decode) as url:
        assert ask(url).status_code == 422
        no_json = httpx.post(f"{url}/v1/completions", content=b"[", timeout=20)
    assert decode.asked == []
    assert no_json.status_code == 400
    assert "no JSON object" in json.loads(no_json.text)["error"]["message"]


def test_a_decode_instance_that_is_gone_is_named() -> None:
    nobody = f"http://127.0.0.1:{free_port()}"
    with served(Proxy([], nobody, 20).app()) as url:
        answer = ask(url)
        assert httpx.get(f"{url}/health", timeout=20).status_code == 503
    assert answer.status_code == 502
    assert nobody in answer.json()["error"]["message"]


def test_a_client_that_hangs_up_ends_the_request_at_decode() -> None:
    prefill, decode = Fake(params=KEPT), Fake(is_endless=True)
    with proxied(prefill, decode) as url:
        with httpx.stream("POST", f"{url}/v1/completions", json=BODY, timeout=20) as answer:
            lines = answer.iter_lines()  # kept: the connection is closed with the iterator
            assert next(lines) == "data: 1"
            assert not decode.has_left.is_set()
        assert decode.has_left.wait(10)
        decode.is_endless = False
