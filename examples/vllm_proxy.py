"""A proxy in front of vLLM: each request goes to a prefill instance, then to a decode instance.

    python examples/vllm_proxy.py --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200

The prefill instance computes the prompt, keeps its KV under a lease, and answers with
`kv_transfer_params`; the decode instance is given them unchanged and fetches what it does not have
itself. That is vLLM's own convention: the proxy works with any connector that follows it. Where no
prefill instance answers, the decode instance computes the prompt by itself. Needs starlette, httpx
and uvicorn, which vLLM brings.
"""

import argparse
import logging
import math
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

LOG = logging.getLogger("vllm_proxy")

ASK_TO_KEEP = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
TO_BE_PASSED_ON = ("authorization", "content-type")


def prefill_body(body: dict[str, Any]) -> dict[str, Any]:
    """The same prompt for the prefill instance: one token, not streamed, KV kept for another."""
    asked = {
        key: value for key, value in body.items() if key not in {"stream_options", "min_tokens"}
    }
    asked |= {"max_tokens": 1, "stream": False, "kv_transfer_params": ASK_TO_KEEP}
    if "max_completion_tokens" in body:
        asked["max_completion_tokens"] = 1
    return asked


class Proxy:
    """Prefill instances are tried in order of turn; there is one decode instance."""

    def __init__(
        self,
        prefill: Sequence[str],
        decode: str,
        timeout_s: float,
        connect_timeout_s: float = 5.0,
    ) -> None:
        self._prefill = list(prefill)
        self._decode = decode
        self._n_requests = 0
        # A kept connection may be closed by the server in the moment in which it is used again,
        # and a POST is not safe to repeat.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._http = httpx.AsyncClient(
            timeout=httpx.Timeout(timeout_s, connect=connect_timeout_s), limits=limits
        )

    async def complete(self, request: Request) -> Response:
        try:
            body = await request.json()
        except ValueError:
            body = None
        if not isinstance(body, dict):
            return refused(400, "the body of the request is no JSON object")
        # Which prefill instance a prompt is fetched from: this proxy says it, not a client.
        body.pop("kv_transfer_params", None)
        headers = {
            name: request.headers[name] for name in TO_BE_PASSED_ON if name in request.headers
        }
        headers["x-request-id"] = request.headers.get("x-request-id") or uuid.uuid4().hex
        kept = await self._prefilled(request.url.path, body, headers)
        if isinstance(kept, Response):
            return kept
        if kept:
            body["kv_transfer_params"] = kept
        asked = self._http.build_request(
            "POST", self._decode + request.url.path, json=body, headers=headers
        )
        try:
            answer = await self._http.send(asked, stream=True)
        except httpx.HTTPError as error:
            return refused(502, f"the decode instance {self._decode} does not answer: {error!r}")
        return StreamingResponse(
            answer.aiter_raw(),
            status_code=answer.status_code,
            media_type=answer.headers.get("content-type"),
            background=BackgroundTask(answer.aclose),
        )

    async def _prefilled(
        self, path: str, body: dict[str, Any], headers: dict[str, str]
    ) -> dict[str, Any] | Response | None:
        """What the prefill instance says about the KV it keeps; None where there is none.

        A request that it calls wrong (4xx) is answered at once: decode would say the same.
        """
        first = self._n_requests
        self._n_requests += 1
        for turn in range(len(self._prefill)):
            url = self._prefill[(first + turn) % len(self._prefill)]
            try:
                answer = await self._http.post(url + path, json=prefill_body(body), headers=headers)
            except httpx.HTTPError as error:
                LOG.warning("the prefill instance %s does not answer: %r", url, error)
                continue
            if answer.status_code == 200:
                return kept_in(answer)
            if answer.status_code < 500:
                media = answer.headers.get("content-type")
                return Response(answer.content, status_code=answer.status_code, media_type=media)
            LOG.warning("the prefill instance %s failed: %s", url, answer.text[:200])
        if self._prefill:
            LOG.warning("no prefill instance: %s computes the prompt itself", self._decode)
        return None

    async def health(self, _request: Request) -> Response:
        try:
            answer = await self._http.get(f"{self._decode}/health")
        except httpx.HTTPError as error:
            return refused(503, f"the decode instance {self._decode} does not answer: {error!r}")
        return Response(status_code=answer.status_code)

    @asynccontextmanager
    async def lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        async with self._http:
            yield

    def app(self) -> Starlette:
        paths = ("/v1/completions", "/v1/chat/completions")
        routes = [Route(path, self.complete, methods=["POST"]) for path in paths]
        return Starlette(routes=[*routes, Route("/health", self.health)], lifespan=self.lifespan)


def kept_in(answer: httpx.Response) -> dict[str, Any] | None:
    """Nothing, too, where the address is that of something else than a vLLM."""
    try:
        body = answer.json()
    except ValueError:
        body = None
    kept = body.get("kv_transfer_params") if isinstance(body, dict) else None
    return kept if isinstance(kept, dict) else None


def refused(status: int, message: str) -> Response:
    """An error in the words of OpenAI's API."""
    return JSONResponse({"error": {"message": message, "code": status}}, status_code=status)


def url(text: str) -> str:
    """`http://HOST:PORT`, without the slash at its end that some like: paths begin with theirs."""
    try:
        parsed = httpx.URL(text)
    except httpx.InvalidURL:
        parsed = httpx.URL()
    if parsed.scheme not in {"http", "https"} or not parsed.host:
        raise argparse.ArgumentTypeError(f"{text!r} is no address: write http://HOST:PORT")
    return text.rstrip("/")


def port(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 65_535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port: write one from 1 to 65535")
    return int(text)


def seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no time: write a number of seconds above 0")
    return number


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--prefill", type=url, action="append", default=[], help="URL; may be given again"
    )
    parser.add_argument("--decode", type=url, required=True, help="URL")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=port, default=8000)
    parser.add_argument("--timeout-s", type=seconds, default=600)
    parser.add_argument("--connect-timeout-s", type=seconds, default=5)
    chosen = parser.parse_args(args)
    proxy = Proxy(chosen.prefill, chosen.decode, chosen.timeout_s, chosen.connect_timeout_s)
    uvicorn.run(proxy.app(), host=chosen.host, port=chosen.port, log_level="warning")


if __name__ == "__main__":
    main()
