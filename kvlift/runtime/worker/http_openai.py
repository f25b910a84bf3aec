"""OpenAI's routes: `/v1/completions`, `/v1/chat/completions`, `/v1/models`."""

import time
import uuid
from collections.abc import AsyncIterator
from types import EllipsisType
from typing import Annotated, Final

import msgspec
from attrs import define, field
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse

from kvlift.runtime.worker.answer import Answer
from kvlift.runtime.worker.generation import FinishKind, Request, Sampling
from kvlift.runtime.worker.http_body import (
    BadCallError,
    Service,
    body_of,
    checked_tokens,
    collect,
    convert,
    failure_of,
    response_of,
    stop_texts,
)
from kvlift.runtime.worker.http_native import (
    Name,
    StopTokens,
    Token,
    check_n_prompts,
    grown,
    rows_of,
)
from kvlift.runtime.worker.tokenizer import TemplateRefusedError

NEUTRAL: Final[dict[str, object | EllipsisType]] = {
    "n": 1,
    "best_of": 1,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "user": ...,
    "metadata": ...,
    "store": ...,
    "parallel_tool_calls": ...,
    "top_logprobs": 0,
    "response_format": {"type": "text"},
}
COMPLETION_TOKENS_DEFAULT: Final = 16
MESSAGES_MAX: Final = 4096


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    include_usage: bool = False


class CommonBody(msgspec.Struct, kw_only=True):
    """What both routes take."""

    model: str = ""
    temperature: Annotated[float, msgspec.Meta(ge=0.0, le=100.0)] = 1.0
    top_p: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] = 1.0
    stop: str | list[str] = []
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    seed: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)] = 0
    stop_token_ids: StopTokens = []
    ignore_eos: bool = False
    cache_salt: Name = ""
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None


class CompletionBody(CommonBody, kw_only=True):
    prompt: str | list[str | Token | list[Token]]
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=1)] | None = None


class TextPart(msgspec.Struct, kw_only=True):
    type: str
    text: str = ""


class ChatMessage(msgspec.Struct, kw_only=True):
    role: str
    content: str | list[TextPart] = ""


class ChatBody(CommonBody, kw_only=True):
    messages: Annotated[list[ChatMessage], msgspec.Meta(max_length=MESSAGES_MAX)]
    max_completion_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    logprobs: bool = False


@define(eq=False)
class Completion:
    """One call of either route: its answers and how to show them."""

    service: Service
    answers: list[Answer]
    is_chat: bool
    wants_logprobs: bool
    wants_usage: bool
    id: str = field(factory=lambda: f"cmpl-{uuid.uuid4().hex}")
    created_s: int = field(factory=lambda: int(time.time()))

    def envelope(self, choices: list[dict[str, object]], *, is_chunk: bool) -> dict[str, object]:
        kind = "text_completion"
        if self.is_chat:
            kind = "chat.completion.chunk" if is_chunk else "chat.completion"
        return {
            "id": self.id,
            "object": kind,
            "created": self.created_s,
            "model": self.service.model,
            "choices": choices,
        }

    def usage(self) -> dict[str, object]:
        n_prompt = sum(len(answer.request.tokens) for answer in self.answers)
        n_new = sum(len(answer.tokens) for answer in self.answers)
        n_cached = sum(answer.cached.total for answer in self.answers)
        return {
            "prompt_tokens": n_prompt,
            "completion_tokens": n_new,
            "total_tokens": n_prompt + n_new,
            "prompt_tokens_details": {"cached_tokens": n_cached},
        }

    def choice(self, index: int) -> dict[str, object]:
        answer = self.answers[index]
        shown: dict[str, object] = {
            "index": index,
            "finish_reason": finish_word(answer),
            "logprobs": self.logprobs(answer, 0) if self.wants_logprobs else None,
        }
        if self.is_chat:
            shown["message"] = {"role": "assistant", "content": answer.text}
        else:
            shown["text"] = answer.text
        return shown

    def piece(self, index: int, seen: "Seen") -> dict[str, object]:
        """What is new since the last piece of this answer."""
        answer = self.answers[index]
        text = answer.text
        new_text, seen.text = text[len(seen.text) :], text
        shown: dict[str, object] = {
            "index": index,
            "finish_reason": finish_word(answer),
            "logprobs": self.logprobs(answer, seen.n_tokens) if self.wants_logprobs else None,
        }
        if self.is_chat:
            role = {"role": "assistant"} if seen.n_tokens == 0 else {}
            shown["delta"] = {**role, "content": new_text}
        else:
            shown["text"] = new_text
        seen.n_tokens = len(answer.tokens)
        return shown

    def logprobs(self, answer: Answer, first: int) -> dict[str, object]:
        names = [answer.codec.decode([token]) for token in answer.tokens[first:]]
        values = answer.logprobs[first:]
        if self.is_chat:
            content = [
                {"token": name, "logprob": value, "bytes": list(name.encode()), "top_logprobs": []}
                for name, value in zip(names, values, strict=True)
            ]
            return {"content": content, "refusal": None}
        offsets, at = [], 0
        for name in names:
            offsets.append(at)
            at += len(name)
        return {
            "tokens": names,
            "token_logprobs": values,
            "text_offset": offsets,
            "top_logprobs": None,
        }


@define(eq=False)
class Seen:
    """What a client of a stream has been sent of one answer."""

    text: str = ""
    n_tokens: int = 0


def finish_word(answer: Answer) -> str | None:
    """OpenAI knows `stop` and `length`; an abort is shown as `stop`, an error as `error`."""
    if answer.finish is None:
        return None
    match answer.finish.kind:
        case FinishKind.LENGTH:
            return "length"
        case FinishKind.STOP | FinishKind.ABORT:
            return "stop"
        case FinishKind.ERROR:
            return "error"


def answer_of(service: Service, body: CommonBody, tokens: list[int], n_new_tokens: int) -> Answer:
    """Raises `BadCallError`."""
    if n_new_tokens > service.limits.new_tokens_max:
        raise BadCallError(f"max_tokens is at most {service.limits.new_tokens_max}")
    sampling = Sampling(
        max_new_tokens=n_new_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        stop_tokens=tuple(body.stop_token_ids),
        ignore_eos=body.ignore_eos,
        seed=body.seed,
    )
    request = Request(
        rid=uuid.uuid4().hex,
        tokens=checked_tokens(service, tokens, n_new_tokens),
        sampling=sampling,
        salt=body.cache_salt,
    )
    return Answer(request, service.codec, stop_texts(body.stop))


def completion_of(service: Service, raw: dict[str, object]) -> tuple[Completion, bool]:
    """The call of `/v1/completions`, and whether it wants a stream. Raises `BadCallError`."""
    body = convert(raw, CompletionBody, {**NEUTRAL, "echo": False})
    check_model(service, body.model)
    given = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    if any(isinstance(item, str) for item in given):
        check_n_prompts(service, len(given))
    encoded = [service.codec.encode(item) if isinstance(item, str) else item for item in given]
    prompts, _ = rows_of(encoded)
    check_n_prompts(service, len(prompts))
    n_new_tokens = body.max_tokens or COMPLETION_TOKENS_DEFAULT
    answers = [answer_of(service, body, tokens, n_new_tokens) for tokens in prompts]
    return (
        Completion(
            service,
            answers,
            is_chat=False,
            wants_logprobs=body.logprobs is not None,
            wants_usage=body.stream_options.include_usage,
        ),
        body.stream,
    )


def chat_of(service: Service, raw: dict[str, object]) -> tuple[Completion, bool]:
    """The call of `/v1/chat/completions`, and whether it wants a stream. Raises `BadCallError`."""
    body = convert(raw, ChatBody, NEUTRAL)
    check_model(service, body.model)
    if not body.messages:
        raise BadCallError("`messages` is empty; give at least one")
    messages = [{"role": each.role, "content": plain_content(each)} for each in body.messages]
    try:
        text = service.codec.chat(messages)
    except TemplateRefusedError as error:
        raise BadCallError(str(error)) from error
    n_new_tokens = (
        body.max_completion_tokens or body.max_tokens or service.limits.new_tokens_default
    )
    tokens = service.codec.encode(text, is_chat=True)
    return (
        Completion(
            service,
            [answer_of(service, body, tokens, n_new_tokens)],
            is_chat=True,
            wants_logprobs=body.logprobs,
            wants_usage=body.stream_options.include_usage,
        ),
        body.stream,
    )


def plain_content(message: ChatMessage) -> str:
    """Raises `BadCallError` for parts that are not text."""
    if isinstance(message.content, str):
        return message.content
    for part in message.content:
        if part.type != "text":
            raise BadCallError(f"this worker takes text only, not `{part.type}`")
    return "".join(part.text for part in message.content)


def check_model(service: Service, model: str) -> None:
    """Raises `BadCallError` (404) for a model that is not served here."""
    if model and model not in (service.model, "default"):
        raise BadCallError(f"the model {model} is not served here, {service.model} is", 404)


async def answered(http: HttpRequest, completion: Completion, *, is_stream: bool) -> Response:
    """Both routes' way to the answer. Raises what `response_of` knows."""
    if is_stream:
        return StreamingResponse(streamed(completion), media_type="text/event-stream")
    await collect(http, completion.service.engine, completion.answers)
    for answer in completion.answers:
        failure = failure_of(answer)
        if failure is not None:
            raise failure
    choices = [completion.choice(index) for index in range(len(completion.answers))]
    return JSONResponse(
        {**completion.envelope(choices, is_chunk=False), "usage": completion.usage()}
    )


async def streamed(completion: Completion) -> AsyncIterator[bytes]:
    """Server-sent events with what is new; usage at the end where it was asked for; then DONE."""
    seen = [Seen() for _ in completion.answers]
    async for index in grown(completion.service, completion.answers):
        if isinstance(index, Exception):
            response = response_of(index)
            if response is None:
                raise index
            yield b"data: " + bytes(response.body) + b"\n\n"
            continue
        failure = failure_of(completion.answers[index])
        if failure is not None:
            response = response_of(failure)
            yield b"data: " + bytes(response.body if response else b"{}") + b"\n\n"
            continue
        piece = completion.piece(index, seen[index])
        yield b"data: " + msgspec.json.encode(completion.envelope([piece], is_chunk=True)) + b"\n\n"
    if completion.wants_usage:
        last = {**completion.envelope([], is_chunk=True), "usage": completion.usage()}
        yield b"data: " + msgspec.json.encode(last) + b"\n\n"
    yield b"data: [DONE]\n\n"


async def completions(service: Service, http: HttpRequest) -> Response:
    completion, is_stream = completion_of(service, await body_of(http, service))
    return await answered(http, completion, is_stream=is_stream)


async def chat_completions(service: Service, http: HttpRequest) -> Response:
    completion, is_stream = chat_of(service, await body_of(http, service))
    return await answered(http, completion, is_stream=is_stream)


async def models(service: Service, _http: HttpRequest) -> Response:
    listed = {"id": service.model, "object": "model", "created": 0, "owned_by": "kvlift"}
    return JSONResponse({"object": "list", "data": [listed]})
