"""The HTTP server of the reference worker: SGLang's native routes and OpenAI's, on one engine."""

import logging
from collections.abc import Awaitable, Callable
from typing import Final, TypeAlias

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from kvlift.runtime.worker.generation import (
    Engine,
    EngineBusyError,
    EngineDownError,
    EngineRefusedError,
)
from kvlift.runtime.worker.http_body import (
    BadCallError,
    HttpLimits,
    Service,
    body_of,
    convert,
    error_response,
    response_of,
)
from kvlift.runtime.worker.http_native import generate
from kvlift.runtime.worker.http_openai import chat_completions, completions, models
from kvlift.runtime.worker.model_config import ModelConfig
from kvlift.runtime.worker.tokenizer import TextCodec

LOG: Final = logging.getLogger("kvlift.worker.http")

TIERS_FLUSHED: Final = ("device", "host")
"""What `POST /flush_cache` forgets by itself; storage stays unless `?tiers=all` asks for it."""

TIERS_KNOWN: Final = ("device", "host", "storage")

Handler: TypeAlias = Callable[[Service, HttpRequest], Awaitable[Response]]


class AbortBody(msgspec.Struct, kw_only=True):
    rid: str


def create_app(
    engine: Engine, codec: TextCodec, config: ModelConfig, limits: HttpLimits | None = None
) -> Starlette:
    """The ASGI application. It owns nothing: who made the engine closes it."""
    service = Service(
        engine=engine,
        codec=codec,
        model=config.name,
        vocab=config.vocab,
        positions_max=config.positions_max,
        limits=limits or HttpLimits(),
    )

    def route(path: str, handler: Handler, *methods: str) -> Route:
        async def endpoint(http: HttpRequest) -> Response:
            _refuse_other_sites(http)
            return await handler(service, http)

        return Route(path, endpoint, methods=list(methods), name=handler.__name__)

    return Starlette(
        routes=[
            route("/generate", generate, "POST"),
            route("/abort_request", abort_request, "POST"),
            route("/flush_cache", flush_cache, "POST", "GET"),
            route("/server_info", server_info, "GET"),
            route("/get_server_info", server_info, "GET"),
            route("/get_model_info", model_info, "GET"),
            route("/health", health, "GET"),
            route("/health_generate", health, "GET"),
            route("/metrics", metrics, "GET"),
            route("/v1/models", models, "GET"),
            route("/v1/completions", completions, "POST"),
            route("/v1/chat/completions", chat_completions, "POST"),
        ],
        exception_handlers={
            BadCallError: _expected,
            EngineBusyError: _expected,
            EngineDownError: _expected,
            EngineRefusedError: _expected,
            ClientDisconnect: _expected,
            HTTPException: _no_such_route,
            Exception: _unexpected,
        },
    )


def _refuse_other_sites(http: HttpRequest) -> None:
    """A page of another site may send calls from its reader's browser to a server that listens for
    that reader alone, and flush or load it. Browsers say so themselves. Raises `BadCallError`."""
    if http.headers.get("sec-fetch-site") in ("cross-site", "same-site"):
        raise BadCallError("a page of another site has sent this call; it is not served", 403)


async def _expected(_http: HttpRequest, error: Exception) -> Response:
    return response_of(error) or error_response("the server failed", 500)


async def _no_such_route(http: HttpRequest, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    return error_response(f"{http.method} {_path(http)}: {error}", status)


def _path(http: HttpRequest) -> str:
    """As the server has decoded it; `http.url` would read the query, too, which may be no UTF-8."""
    return str(http.scope["path"])


async def _unexpected(http: HttpRequest, error: Exception) -> Response:
    LOG.error("%s %s failed", http.method, _path(http), exc_info=error)
    return error_response("the server failed; its log says why", 500)


async def abort_request(service: Service, http: HttpRequest) -> Response:
    """SGLang's `POST /abort_request` with `{"rid": ...}`; 404 for an id that is not live."""
    raw = await body_of(http, service)
    rid = convert(raw, AbortBody, {}).rid
    if not await service.engine.abort(rid):
        raise BadCallError(f"no request {rid[:64]} is live; it has ended or never was", 404)
    return JSONResponse({"aborted": rid})


async def flush_cache(service: Service, http: HttpRequest) -> Response:
    """Forget device and host; `?tiers=all` or a list (`?tiers=device,storage`) says otherwise."""
    asked = http.query_params.get("tiers")
    tiers = TIERS_FLUSHED if asked is None else tuple(asked.split(","))
    if tiers == ("all",):
        tiers = TIERS_KNOWN
    if not tiers or not set(tiers) <= set(TIERS_KNOWN):
        raise BadCallError("`tiers` is `all` or a list of device, host, storage")
    await service.engine.flush(tiers)
    return PlainTextResponse(f"Cache flushed: {', '.join(tiers)}.\n")


async def server_info(service: Service, _http: HttpRequest) -> Response:
    return JSONResponse(await service.engine.info())


async def model_info(service: Service, _http: HttpRequest) -> Response:
    return JSONResponse({"model_path": service.model, "is_generation": True})


async def health(service: Service, _http: HttpRequest) -> Response:
    """200 while the engine answers, 503 with the reason otherwise."""
    await service.engine.info()
    return Response(status_code=200)


async def metrics(service: Service, _http: HttpRequest) -> Response:
    text = await service.engine.metrics_text()
    return PlainTextResponse(text, media_type="text/plain; version=0.0.4")
