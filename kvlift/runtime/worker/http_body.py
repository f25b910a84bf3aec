"""What both HTTP dialects share: bounded bodies, clear errors, runs of answers that can be left."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Final, TypeVar, cast

import msgspec
from attrs import define, field, frozen
from attrs.validators import ge, gt
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from kvlift.runtime.worker.answer import Answer
from kvlift.runtime.worker.generation import (
    Engine,
    EngineBusyError,
    EngineDownError,
    EngineRefusedError,
    FinishKind,
)
from kvlift.runtime.worker.tokenizer import TextCodec

Body = TypeVar("Body", bound=msgspec.Struct)

RID_CHARACTERS_MAX: Final = 200
NAME_CHARACTERS_MAX: Final = 1024
STOP_TEXTS_MAX: Final = 16
STOP_CHARACTERS_MAX: Final = 1024
STOP_TOKENS_MAX: Final = 1024
BODY_BYTES_SMALL: Final = 1 << 16
"""So much of a body is always read, however much others have sent."""

CLIENT_CLOSED_REQUEST: Final = 499
MESSAGE_CHARACTERS_MAX: Final = 1000
"""Of an error: a message may quote what the client has sent, and that may be long."""


@frozen(kw_only=True)
class HttpLimits:
    """Bounds of what one HTTP call may ask for."""

    body_bytes_max: int = field(default=16 << 20, validator=ge(1))
    bodies_bytes_max: int = field(default=256 << 20, validator=ge(1))
    """Of all bodies that are being read, what is beyond `BODY_BYTES_SMALL` of each."""

    body_s_max: float = field(default=60.0, validator=gt(0))
    prompts_max: int = field(default=256, validator=ge(1))
    new_tokens_default: int = field(default=128, validator=ge(1))
    new_tokens_max: int = field(default=1 << 17, validator=ge(1))
    scored_tokens_max: int = field(default=8_192, validator=ge(1))
    """Prompt tokens of a call that get log-probabilities: the time for it is quadratic."""


@define(eq=False)
class Intake:
    """Bytes of the bodies that are being read now, as far as they count."""

    n_bytes: int = 0


@frozen(kw_only=True, eq=False)
class Service:
    """Everything a route needs."""

    engine: Engine
    codec: TextCodec
    model: str
    vocab: int
    positions_max: int
    limits: HttpLimits
    intake: Intake = field(factory=Intake)


class BadCallError(Exception):
    """The call cannot be served as it is; `status` is the HTTP status."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


def error_response(message: str, status: int, *, kind: str | None = None) -> Response:
    """OpenAI's shape of an error, which SGLang's clients read as well."""
    ours = {429: "rate_limit_error"} | dict.fromkeys(
        (400, 403, 404, 405, 408, 413), "invalid_request_error"
    )
    body = {
        "error": {
            "message": message[:MESSAGE_CHARACTERS_MAX],
            "type": kind or ours.get(status, "server_error"),
            "param": None,
            "code": status,
        }
    }
    headers = {"Retry-After": "1"} if status in (429, 503) else None
    return JSONResponse(body, status, headers=headers)


def response_of(error: Exception) -> Response | None:
    """The answer for an expected error; None for one that is a bug."""
    match error:
        case BadCallError():
            return error_response(str(error), error.status)
        case EngineRefusedError():
            return error_response(str(error), 400)
        case EngineBusyError():
            return error_response(str(error), 429)
        case EngineDownError():
            return error_response(str(error), 503)
        case ClientDisconnect():
            return error_response("the client left", CLIENT_CLOSED_REQUEST)
        case _:
            return None


async def body_of(http: HttpRequest, service: Service) -> dict[str, object]:
    """The JSON object of a call, read up to the limits. Raises `BadCallError`."""
    collected = await _whole_body(http, service.limits, service.intake)
    try:
        decoded = msgspec.json.decode(collected)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise BadCallError(f"the body is not JSON: {error}") from error
    if not isinstance(decoded, dict):
        raise BadCallError("the body must be a JSON object")
    return cast("dict[str, object]", decoded)


async def _whole_body(http: HttpRequest, limits: HttpLimits, intake: Intake) -> bytearray:
    collected = bytearray()
    n_counted = 0
    try:
        async with asyncio.timeout(limits.body_s_max):
            async for chunk in http.stream():
                collected += chunk
                n_large = max(0, len(collected) - BODY_BYTES_SMALL)
                intake.n_bytes += n_large - n_counted
                n_counted = n_large
                if len(collected) > limits.body_bytes_max:
                    raise BadCallError(
                        f"the body is larger than {limits.body_bytes_max} bytes", 413
                    )
                if n_counted and intake.n_bytes > limits.bodies_bytes_max:
                    raise BadCallError("too many large bodies are being read; come back later", 503)
    except TimeoutError:
        raise BadCallError(f"the body did not end within {limits.body_s_max:g} s", 408) from None
    finally:
        intake.n_bytes -= n_counted
    return collected


def convert(raw: Mapping[str, object], kind: type[Body], neutral: Mapping[str, object]) -> Body:
    """`raw` as `kind`. A field that `kind` lacks is refused unless it asks for nothing:
    null, false, empty, or its value in `neutral`. Raises `BadCallError`."""
    known = {name.encode_name for name in msgspec.structs.fields(kind)}
    for name, value in raw.items():
        asks = value not in (None, False, "", [], {}) and name not in known
        if asks and not (name in neutral and neutral[name] in (value, ...)):
            raise BadCallError(f"this worker does not support `{name}`; leave it out")
    given = {name: value for name, value in raw.items() if name in known and value is not None}
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise BadCallError(f"the call is malformed: {error}") from error


def stop_texts(stop: str | list[str]) -> tuple[str, ...]:
    """Raises `BadCallError` for too many or too long ones."""
    texts = (stop,) if isinstance(stop, str) else tuple(stop)
    if len(texts) > STOP_TEXTS_MAX or any(len(text) > STOP_CHARACTERS_MAX for text in texts):
        raise BadCallError(
            f"at most {STOP_TEXTS_MAX} stop texts of {STOP_CHARACTERS_MAX} characters are taken"
        )
    return tuple(text for text in texts if text)


def checked_tokens(service: Service, tokens: list[int], n_new_tokens: int) -> tuple[int, ...]:
    """Raises `BadCallError` for an empty or too long prompt, or an id outside the vocabulary."""
    if not tokens:
        raise BadCallError("the prompt is empty; give at least one token")
    if len(tokens) + n_new_tokens > service.positions_max:
        raise BadCallError(
            f"prompt and answer have {len(tokens)} + {n_new_tokens} tokens, the model takes "
            f"{service.positions_max}; shorten one of them"
        )
    if min(tokens) < 0 or max(tokens) >= service.vocab:
        raise BadCallError(f"token ids must be at least 0 and below {service.vocab}")
    return tuple(tokens)


async def grow(engine: Engine, answer: Answer) -> AsyncIterator[Answer]:
    """The answer after each output, until it is done. Leaving early aborts the request."""
    async with contextlib.aclosing(engine.submit(answer.request)) as outputs:  # type: ignore[type-var]
        async for output in outputs:
            answer.add(output)
            yield answer
            if answer.is_done:
                return


async def collect(http: HttpRequest, engine: Engine, answers: list[Answer]) -> None:
    """Let all answers grow to their end, unless the client leaves: then they are aborted.

    Raises the first engine error, and `ClientDisconnect`.
    """

    async def whole(answer: Answer) -> None:
        async with contextlib.aclosing(grow(engine, answer)) as growing:  # type: ignore[type-var]
            async for _ in growing:
                pass

    async def left() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    work = [asyncio.create_task(whole(answer)) for answer in answers]
    watch = asyncio.create_task(left())
    try:
        while not all(task.done() for task in work):
            waited = {watch, *(task for task in work if not task.done())}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if watch.done():
                raise ClientDisconnect
            for task in work:
                if task.done():
                    task.result()
    finally:
        watch.cancel()
        for task in work:
            task.cancel()
        await asyncio.gather(watch, *work, return_exceptions=True)


def failure_of(answer: Answer) -> BadCallError | None:
    """The error of an answer that the engine could not finish, with its HTTP status."""
    finish = answer.finish
    if finish is None or finish.kind is not FinishKind.ERROR:
        return None
    return BadCallError(finish.message, finish.status)
