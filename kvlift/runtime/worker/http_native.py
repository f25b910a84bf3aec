"""SGLang's native route: `POST /generate`."""

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from types import EllipsisType
from typing import Annotated, Final

import msgspec
from attrs import frozen
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse

from kvlift.runtime.worker.answer import Answer
from kvlift.runtime.worker.generation import FinishKind, Request, Sampling
from kvlift.runtime.worker.http_body import (
    NAME_CHARACTERS_MAX,
    RID_CHARACTERS_MAX,
    STOP_TOKENS_MAX,
    BadCallError,
    Service,
    body_of,
    checked_tokens,
    collect,
    convert,
    failure_of,
    grow,
    response_of,
    stop_texts,
)

Token = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Rid = Annotated[str, msgspec.Meta(min_length=1, max_length=RID_CHARACTERS_MAX)]
StopTokens = Annotated[list[Token], msgspec.Meta(max_length=STOP_TOKENS_MAX)]
Name = Annotated[str, msgspec.Meta(max_length=NAME_CHARACTERS_MAX)]
Bounded = Annotated[int, msgspec.Meta(ge=-(1 << 31), lt=1 << 31)]

BODY_NEUTRAL: Final[dict[str, object | EllipsisType]] = {
    "top_logprobs_num": 0,
    "return_text_in_logprobs": ...,
    "background": False,
    "bootstrap_host": ...,
    "bootstrap_port": ...,
    "bootstrap_room": ...,
}
SAMPLING_NEUTRAL: Final[dict[str, object | EllipsisType]] = {
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "min_p": 0,
    "min_new_tokens": 0,
    "n": 1,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
}


class SamplingBody(msgspec.Struct, kw_only=True):
    """`sampling_params`, SGLang's names."""

    max_new_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0.0, le=100.0)] = 1.0
    top_p: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=-1, lt=1 << 31)] = -1
    stop: str | list[str] = []
    stop_token_ids: StopTokens = []
    ignore_eos: bool = False
    sampling_seed: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)] = 0


class GenerateBody(msgspec.Struct, kw_only=True):
    """The body of `/generate`; exactly one of `text` and `input_ids`."""

    text: str | list[str] | None = None
    input_ids: list[Token | list[Token]] | None = None
    sampling_params: dict[str, object] | list[dict[str, object]] = {}
    rid: Rid | list[Rid] | None = None
    return_logprob: bool | list[bool] = False
    logprob_start_len: Bounded | list[Bounded] = -1
    stream: bool = False
    priority: Bounded = 0
    extra_key: Name = ""
    tenant: Name = ""


@frozen(eq=False)
class Call:
    """One prompt of a `/generate` call."""

    answer: Answer
    wants_logprobs: bool
    logprob_start: int
    index: int | None
    started_s: float

    @property
    def n_scored(self) -> int:
        """Tokens of its prompt that a forward is needed for, to tell their log-probabilities."""
        n_tokens = len(self.answer.request.tokens)
        is_scored = self.wants_logprobs and 0 <= self.logprob_start < n_tokens
        return n_tokens if is_scored else 0

    def shown(self, input_logprobs: list[list[object]] | None = None) -> dict[str, object]:
        """The JSON object of SGLang's answer, as far as it has grown."""
        answer = self.answer
        cached = answer.cached
        meta: dict[str, object] = {
            "id": answer.request.rid,
            "finish_reason": finish_reason(answer),
            "prompt_tokens": len(answer.request.tokens),
            "completion_tokens": len(answer.tokens),
            "cached_tokens": cached.total,
            "cached_tokens_details": {
                "device": cached.device,
                "host": cached.host,
                "storage": cached.storage,
            },
            "e2e_latency": time.monotonic() - self.started_s,
        }
        if self.wants_logprobs:
            pairs = zip(answer.logprobs, answer.tokens, strict=True)
            meta["output_token_logprobs"] = [[logprob, token, None] for logprob, token in pairs]
            meta["input_token_logprobs"] = input_logprobs or []
        shown: dict[str, object] = {
            "text": answer.text,
            "output_ids": list(answer.tokens),
            "meta_info": meta,
        }
        if self.index is not None:
            shown["index"] = self.index
        return shown


def finish_reason(answer: Answer) -> dict[str, object] | None:
    """SGLang's object, or None while the answer grows."""
    finish = answer.finish
    if finish is None:
        return None
    match finish.kind:
        case FinishKind.STOP:
            return {"type": "stop", "matched": answer.stopped_by or finish.matched}
        case FinishKind.LENGTH:
            return {"type": "length", "length": len(answer.tokens)}
        case FinishKind.ABORT:
            return {"type": "abort", "message": finish.message or "aborted"}
        case FinishKind.ERROR:
            return {"type": "abort", "message": finish.message, "status_code": finish.status}


def sampling_of(service: Service, raw: dict[str, object]) -> tuple[Sampling, tuple[str, ...]]:
    """Sampling and stop texts. Raises `BadCallError`."""
    body = convert(raw, SamplingBody, SAMPLING_NEUTRAL)
    n_new_tokens = body.max_new_tokens or service.limits.new_tokens_default
    if n_new_tokens > service.limits.new_tokens_max:
        raise BadCallError(f"max_new_tokens is at most {service.limits.new_tokens_max}")
    sampling = Sampling(
        max_new_tokens=n_new_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        stop_tokens=tuple(body.stop_token_ids),
        ignore_eos=body.ignore_eos,
        seed=body.sampling_seed,
    )
    return sampling, stop_texts(body.stop)


def prompts_of(service: Service, body: GenerateBody) -> tuple[list[list[int]], bool]:
    """Token ids of each prompt, and whether the call was a list. Raises `BadCallError`."""
    if (body.text is None) == (body.input_ids is None):
        raise BadCallError("give exactly one of `text` and `input_ids`")
    prompts: list[list[int]] = []
    if body.text is not None:
        texts = [body.text] if isinstance(body.text, str) else body.text
        check_n_prompts(service, len(texts))
        prompts = [service.codec.encode(text) for text in texts]
        is_list = not isinstance(body.text, str)
    else:
        prompts, is_list = rows_of(body.input_ids or [])
    check_n_prompts(service, len(prompts))
    return prompts, is_list


def check_n_prompts(service: Service, n_prompts: int) -> None:
    """Raises `BadCallError`. Before any of them is looked at more closely."""
    if not 0 < n_prompts <= service.limits.prompts_max:
        raise BadCallError(f"a call holds 1 to {service.limits.prompts_max} prompts")


def rows_of(given: Sequence[int | list[int]]) -> tuple[list[list[int]], bool]:
    """Token ids, or lists of them, as rows; and whether they were lists. Raises `BadCallError`."""
    rows = [item for item in given if isinstance(item, list)]
    flat = [item for item in given if isinstance(item, int)]
    if rows and flat:
        raise BadCallError("the prompt mixes token ids and lists of them; give one or the other")
    return (rows, True) if rows else ([flat], False)


def each(value: object, n_prompts: int, what: str) -> list[object]:
    """One value a prompt: a list must have as many. Raises `BadCallError`."""
    if not isinstance(value, list):
        return [value] * n_prompts
    if len(value) != n_prompts:
        raise BadCallError(f"`{what}` has {len(value)} entries for {n_prompts} prompts")
    return value


def calls_of(service: Service, raw: dict[str, object]) -> tuple[list[Call], GenerateBody, bool]:
    """Every prompt of the call, checked. Raises `BadCallError`."""
    body = convert(raw, GenerateBody, BODY_NEUTRAL)
    prompts, is_list = prompts_of(service, body)
    n = len(prompts)
    if is_list and isinstance(body.rid, str):
        rids: list[object] = [f"{body.rid}-{index}" for index in range(n)]
    else:
        rids = [rid or uuid.uuid4().hex for rid in each(body.rid, n, "rid")]
    given = body.sampling_params
    if isinstance(given, dict):
        samplings = [sampling_of(service, given)] * n
    else:
        each(given, n, "sampling_params")
        samplings = [sampling_of(service, one) for one in given]
    logprobs = each(body.return_logprob, n, "return_logprob")
    starts = each(body.logprob_start_len, n, "logprob_start_len")
    calls = []
    for index, tokens in enumerate(prompts):
        sampling, stops = samplings[index]
        request = Request(
            rid=str(rids[index]),
            tokens=checked_tokens(service, tokens, sampling.max_new_tokens),
            sampling=sampling,
            tenant=body.tenant,
            salt=body.extra_key,
            priority=body.priority,
        )
        start = starts[index]
        calls.append(
            Call(
                answer=Answer(request, service.codec, stops),
                wants_logprobs=bool(logprobs[index]),
                logprob_start=start if isinstance(start, int) else -1,
                index=index if is_list else None,
                started_s=time.monotonic(),
            )
        )
    return calls, body, is_list


async def input_logprobs(service: Service, call: Call) -> list[list[object]] | None:
    """From `logprob_start_len` on (-1: none); the first token of a prompt has none."""
    tokens = call.answer.request.tokens
    if not call.n_scored:
        return None
    scores = await service.engine.score(tokens, call.logprob_start)
    head: list[list[object]] = [[None, tokens[0], None]] if call.logprob_start == 0 else []
    first = max(call.logprob_start, 1)
    pairs = zip(scores, tokens[first:], strict=True)
    return head + [[score, token, None] for score, token in pairs]


async def generate(service: Service, http: HttpRequest) -> Response:
    """`POST /generate`. Raises what `response_of` knows."""
    calls, body, is_list = calls_of(service, await body_of(http, service))
    if sum(call.n_scored for call in calls) > service.limits.scored_tokens_max:
        raise BadCallError(
            f"at most {service.limits.scored_tokens_max} prompt tokens of a call get "
            "log-probabilities; leave logprob_start_len out, or send less at a time"
        )
    inputs = [await input_logprobs(service, call) for call in calls]
    if body.stream:
        return StreamingResponse(streamed(service, calls, inputs), media_type="text/event-stream")
    await collect(http, service.engine, [call.answer for call in calls])
    shown = [call.shown(given) for call, given in zip(calls, inputs, strict=True)]
    if is_list:
        return JSONResponse(shown)
    failure = failure_of(calls[0].answer)
    if failure is not None:
        raise failure
    return JSONResponse(shown[0])


async def streamed(
    service: Service, calls: list[Call], inputs: list[list[list[object]] | None]
) -> AsyncIterator[bytes]:
    """Server-sent events: one a growth of one answer, text and ids from the start; then DONE."""
    async for index in grown(service, [call.answer for call in calls]):
        if isinstance(index, Exception):
            response = response_of(index)
            if response is None:
                raise index
            yield b"data: " + bytes(response.body) + b"\n\n"
            continue
        yield b"data: " + msgspec.json.encode(calls[index].shown(inputs[index])) + b"\n\n"
    yield b"data: [DONE]\n\n"


async def grown(service: Service, answers: list[Answer]) -> AsyncIterator[int | Exception]:
    """Which answer has grown; an engine's error in place of the index. An answer that grows more
    than once while the client reads is told of once.

    Leaving early aborts all of them.
    """
    news: asyncio.Queue[int | Exception | None] = asyncio.Queue()
    untold: set[int] = set()

    async def follow(index: int) -> None:
        try:
            growing = grow(service.engine, answers[index])
            async with contextlib.aclosing(growing):  # type: ignore[type-var]
                async for _ in growing:
                    if index not in untold:
                        untold.add(index)
                        news.put_nowait(index)
        except Exception as error:  # noqa: BLE001  # told to the client by the reader of the queue
            news.put_nowait(error)
        finally:
            news.put_nowait(None)

    tasks = [asyncio.create_task(follow(index)) for index in range(len(answers))]
    n_open = len(tasks)
    try:
        while n_open:
            item = await news.get()
            if item is None:
                n_open -= 1
                continue
            if isinstance(item, int):
                untold.discard(item)
            yield item
    finally:
        for task in tasks:
            task.cancel()
