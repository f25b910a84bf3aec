"""The HTTP server in front of a real engine: both dialects, streams, errors, clients that leave."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import tokenizers
import torch
import uvicorn

from kvlift.runtime.worker.answer import Answer
from kvlift.runtime.worker.generation import Output, Request, Sampling
from kvlift.runtime.worker.http import create_app
from kvlift.runtime.worker.http_body import HttpLimits
from kvlift.runtime.worker.loading import ModelSource
from kvlift.runtime.worker.model_config import ModelRefusedError
from kvlift.runtime.worker.plain_engine import PlainEngine, plain_scores
from kvlift.runtime.worker.tokenizer import (
    BYTE_BOS,
    ByteCodec,
    ChatTemplate,
    TemplateRefusedError,
    codec_from_folder,
)

torch.set_num_threads(1)
SOURCE = ModelSource("tiny", seed=5)
GREEDY = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
PROMPT = [3, 500, 77, 1000, 12]


def engine_of(n_requests_max: int = 64) -> PlainEngine:
    return PlainEngine(SOURCE.decoder(), n_requests_max=n_requests_max)


def client_of(engine: PlainEngine, limits: HttpLimits | None = None) -> httpx.AsyncClient:
    app = create_app(engine, ByteCodec(), SOURCE.config(), limits)
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://worker", timeout=30)


def run(test: Callable[[httpx.AsyncClient], Awaitable[None]]) -> None:
    async def inner() -> None:
        async with client_of(engine_of()) as client:
            await test(client)

    asyncio.run(inner())


def wanted_tokens(prompt: list[int], n_new_tokens: int) -> list[int]:
    decoder = SOURCE.decoder()
    tokens = list(prompt)
    for _ in range(n_new_tokens):
        tokens.append(int(decoder.plain_forward(torch.tensor(tokens))[0][-1].argmax()))
    return tokens[len(prompt) :]


async def until_running(engine: PlainEngine, n_requests: int) -> None:
    for _ in range(1000):
        if (await engine.info())["running"] == n_requests:
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"never {n_requests} running")


def events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_generate_gives_the_tokens_and_log_probabilities_of_the_model() -> None:
    async def test(client: httpx.AsyncClient) -> None:
        body = {"input_ids": PROMPT, "sampling_params": GREEDY, "return_logprob": True}
        reply = await client.post("/generate", json={**body, "rid": "mine"})
        assert reply.status_code == 200
        shown = reply.json()
        assert shown["output_ids"] == wanted_tokens(PROMPT, 6)
        meta = shown["meta_info"]
        assert meta["id"] == "mine"
        assert (meta["prompt_tokens"], meta["completion_tokens"]) == (5, 6)
        assert meta["cached_tokens"] == 0
        assert meta["cached_tokens_details"] == {"device": 0, "host": 0, "storage": 0}
        assert meta["finish_reason"] == {"type": "length", "length": 6}
        whole = [*PROMPT, *shown["output_ids"]]
        scores = plain_scores(SOURCE.decoder(), whole, len(PROMPT))
        found = [entry[0] for entry in meta["output_token_logprobs"]]
        assert found == pytest.approx(scores, abs=1e-4)
        assert [entry[1] for entry in meta["output_token_logprobs"]] == shown["output_ids"]

    run(test)


def test_logprob_start_len_adds_the_prompt_s_log_probabilities() -> None:
    async def test(client: httpx.AsyncClient) -> None:
        body = {"input_ids": PROMPT, "sampling_params": GREEDY, "return_logprob": True}
        scores = plain_scores(SOURCE.decoder(), PROMPT, 0)
        whole = (await client.post("/generate", json={**body, "logprob_start_len": 0})).json()
        found = whole["meta_info"]["input_token_logprobs"]
        assert found[0] == [None, PROMPT[0], None]
        assert [entry[0] for entry in found[1:]] == pytest.approx(scores)
        part = (await client.post("/generate", json={**body, "logprob_start_len": 3})).json()
        found = part["meta_info"]["input_token_logprobs"]
        assert [entry[1] for entry in found] == PROMPT[3:]
        assert [entry[0] for entry in found] == pytest.approx(scores[2:])

    run(test)


def test_a_list_of_prompts_is_a_list_of_answers_in_order() -> None:
    async def test(client: httpx.AsyncClient) -> None:
        prompts = [[1, 2, 3], [900], [44, 45]]
        sampling = [{**GREEDY, "max_new_tokens": n} for n in (2, 3, 4)]
        body = {"input_ids": prompts, "sampling_params": sampling, "rid": ["a", "b", "c"]}
        shown = (await client.post("/generate", json=body)).json()
        assert [each["meta_info"]["id"] for each in shown] == ["a", "b", "c"]
        for each, prompt, n in zip(shown, prompts, (2, 3, 4), strict=True):
            assert each["output_ids"] == wanted_tokens(prompt, n)
        texts = {"text": ["hi", "yo"], "sampling_params": GREEDY, "rid": "pair"}
        shown = (await client.post("/generate", json=texts)).json()
        assert [each["meta_info"]["id"] for each in shown] == ["pair-0", "pair-1"]
        assert shown[1]["output_ids"] == wanted_tokens([BYTE_BOS, *b"yo"], 6)

    run(test)


def test_a_stream_grows_to_the_same_answer_and_ends_with_done() -> None:
    async def test(client: httpx.AsyncClient) -> None:
        body = {"input_ids": PROMPT, "sampling_params": GREEDY, "stream": True}
        reply = await client.post("/generate", json=body)
        assert reply.headers["content-type"].startswith("text/event-stream")
        grown = events(reply.text)
        wanted = wanted_tokens(PROMPT, 6)
        assert [each["output_ids"] for each in grown] == [wanted[: n + 1] for n in range(6)]
        reasons = [each["meta_info"]["finish_reason"] for each in grown]
        assert reasons[:-1] == [None] * 5
        assert reasons[-1]["type"] == "length"
        both = await client.post("/generate", json={**body, "input_ids": [PROMPT, [9]]})
        last = {each["index"]: each["output_ids"] for each in events(both.text)}
        assert last == {0: wanted, 1: wanted_tokens([9], 6)}

    run(test)


def test_stop_tokens_and_stop_texts_end_an_answer() -> None:
    async def test(client: httpx.AsyncClient) -> None:
        wanted = wanted_tokens(PROMPT, 6)
        sampling = {**GREEDY, "stop_token_ids": [wanted[2]]}
        body = {"input_ids": PROMPT, "sampling_params": sampling}
        shown = (await client.post("/generate", json=body)).json()
        assert shown["output_ids"] == wanted[:3]
        assert shown["meta_info"]["finish_reason"] == {"type": "stop", "matched": wanted[2]}

    run(test)


def test_a_stop_text_is_cut_off_and_never_shown_in_part() -> None:
    request = Request(rid="r", tokens=(1,), sampling=Sampling())
    answer = Answer(request, ByteCodec(), ("END", "ENOUGH"))
    shown = []
    for byte in b"go EN, then END of it":
        if not answer.is_done:
            answer.add(Output(rid="r", tokens=(byte,), logprobs=(-1.0,)))
            shown.append(answer.text)
    assert shown[:6] == ["g", "go", "go ", "go ", "go ", "go EN,"]
    assert answer.text == "go EN, then "
    assert answer.is_done
    assert answer.stopped_by == "END"


def test_a_character_split_over_tokens_is_shown_whole() -> None:
    answer = Answer(Request(rid="r", tokens=(1,), sampling=Sampling()), ByteCodec())
    shown = []
    for byte in "né→!".encode():
        answer.add(Output(rid="r", tokens=(byte,), logprobs=(-1.0,)))
        shown.append(answer.text)
    assert shown == ["n", "n", "né", "né", "né", "né→", "né→!"]


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/generate", {"sampling_params": {}}, 400, "exactly one of"),
        ("/generate", {"text": "a", "input_ids": [1]}, 400, "exactly one of"),
        ("/generate", {"input_ids": []}, 400, "empty"),
        ("/generate", {"input_ids": [5000]}, 400, "below 1024"),
        ("/generate", {"input_ids": [-1]}, 400, "malformed"),
        ("/generate", {"input_ids": [1, [2]]}, 400, "mixes"),
        ("/generate", {"input_ids": ["x"]}, 400, "malformed"),
        ("/generate", {"text": "a", "sampling_params": {"temperature": -1}}, 400, "temperature"),
        ("/generate", {"text": "a", "sampling_params": {"n": 2}}, 400, "`n`"),
        ("/generate", {"text": "a", "sampling_params": {"regex": "a+"}}, 400, "`regex`"),
        ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 10**9}}, 400, "at most"),
        ("/generate", {"text": "a" * 3000}, 413, "larger than"),
        ("/generate", {"text": "a", "lora_path": "x"}, 400, "`lora_path`"),
        ("/generate", {"text": ["a", "b"], "rid": ["one"]}, 400, "1 entries for 2 prompts"),
        ("/generate", {"text": ["a"] * 9}, 400, "1 to 8 prompts"),
        ("/abort_request", {"rid": "nobody"}, 404, "no request nobody"),
        ("/v1/completions", {"prompt": "a", "model": "gpt-9"}, 404, "gpt-9"),
        ("/v1/completions", {"prompt": []}, 400, "empty"),
        ("/v1/chat/completions", {"messages": []}, 400, "empty"),
        ("/v1/chat/completions", {"messages": [{"content": "x"}]}, 400, "role"),
        ("/flush_cache?tiers=attic", {}, 400, "device, host, storage"),
        ("/nowhere", {}, 404, "/nowhere"),
    ],
)
def test_a_bad_call_gets_a_sentence(
    path: str, body: dict[str, object], status: int, words: str
) -> None:
    async def inner() -> None:
        limits = HttpLimits(body_bytes_max=2048, prompts_max=8)
        async with client_of(engine_of(), limits) as client:
            reply = await client.post(path, json=body)
            assert reply.status_code == status
            assert words in reply.json()["error"]["message"]

    asyncio.run(inner())


@pytest.mark.parametrize("raw", [b"", b"{", b"[1]", b'"x"', b"\xff", b"[" * 2000])
def test_a_body_that_is_no_json_object_is_refused(raw: bytes) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        reply = await client.post("/generate", content=raw)
        assert reply.status_code == 400
        assert "JSON" in reply.json()["error"]["message"]

    run(test)


def test_a_full_queue_answers_429_and_a_used_id_400() -> None:
    async def inner() -> None:
        engine = engine_of(n_requests_max=1)
        async with client_of(engine) as client:
            body = {"input_ids": PROMPT, "sampling_params": {**GREEDY, "max_new_tokens": 60}}
            first = asyncio.create_task(client.post("/generate", json={**body, "rid": "x"}))
            await until_running(engine, 1)
            busy = await client.post("/generate", json=body)
            assert busy.status_code == 429
            assert busy.headers["retry-after"] == "1"
            engine.n_requests_max = 2
            used = await client.post("/generate", json={**body, "rid": "x"})
            assert used.status_code == 400
            assert "in use" in used.json()["error"]["message"]
            aborted = await client.post("/abort_request", json={"rid": "x"})
            assert aborted.status_code == 200
            assert (await first).json()["meta_info"]["finish_reason"]["type"] == "abort"
            assert (await engine.info())["running"] == 0

    asyncio.run(inner())


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_aborts_its_request(*, stream: bool) -> None:
    async def inner() -> None:
        engine = engine_of()
        app = create_app(engine, ByteCodec(), SOURCE.config())
        sampling = {**GREEDY, "max_new_tokens": 4000}
        raw = json.dumps({"input_ids": PROMPT, "sampling_params": sampling, "stream": stream})
        left = asyncio.Event()
        messages = [{"type": "http.request", "body": raw.encode(), "more_body": False}]

        async def receive() -> dict[str, object]:
            if messages:
                return dict(messages.pop())
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            pass

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/generate",
            "headers": [],
            "query_string": b"",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
        }
        serving = asyncio.create_task(app(scope, receive, send))
        await until_running(engine, 1)
        left.set()
        await asyncio.wait_for(serving, 10)
        await until_running(engine, 0)

    asyncio.run(inner())


async def served(test: Callable[[openai.AsyncOpenAI], Awaitable[None]]) -> None:
    """The client over a real socket."""
    app = create_app(engine_of(), ByteCodec(), SOURCE.config())
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    port = listening.getsockname()[1]
    try:
        async with openai.AsyncOpenAI(
            api_key="none", base_url=f"http://127.0.0.1:{port}/v1", max_retries=0
        ) as client:
            await test(client)
    finally:
        server.should_exit = True
        await serving


def test_the_openai_client_understands_completions() -> None:
    async def test(client: openai.AsyncOpenAI) -> None:
        assert [model.id async for model in client.models.list()] == ["tiny"]
        done = await client.completions.create(
            model="tiny", prompt=[PROMPT], max_tokens=5, temperature=0, logprobs=1
        )
        assert done.usage is not None
        assert done.usage.completion_tokens == 5
        assert done.usage.prompt_tokens_details is not None
        assert done.usage.prompt_tokens_details.cached_tokens == 0
        logprobs = done.choices[0].logprobs
        assert logprobs is not None
        wanted = plain_scores(SOURCE.decoder(), PROMPT + wanted_tokens(PROMPT, 5), 5)
        assert logprobs.token_logprobs == pytest.approx(wanted, abs=1e-4)

    asyncio.run(served(test))


def test_the_openai_client_understands_chat() -> None:
    text = ByteCodec().decode(wanted_tokens([BYTE_BOS, *b"user: hello\nassistant: "], 7))

    async def test(client: openai.AsyncOpenAI) -> None:
        chat = await client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
            max_completion_tokens=7,
            temperature=0,
            logprobs=True,
        )
        assert chat.choices[0].message.content == text
        assert chat.choices[0].finish_reason == "length"
        pieces = await client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "hello"}],
            max_tokens=7,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in pieces]
        parts = [chunk.choices[0].delta.content or "" for chunk in chunks[:-1]]
        assert "".join(parts) == text
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 7
        picture: Any = {"type": "image_url", "image_url": {"url": "data:"}}
        with pytest.raises(openai.BadRequestError, match="text only"):
            await client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": [picture]}]
            )

    asyncio.run(served(test))


def test_health_info_metrics_and_flush_answer() -> None:
    async def test(client: httpx.AsyncClient) -> None:
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/server_info")).json()["model"] == "tiny"
        await client.post("/generate", json={"text": "a", "sampling_params": GREEDY})
        metrics = await client.get("/metrics")
        assert "kvlift_worker_tokens_total 6" in metrics.text
        flushed = await client.post("/flush_cache")
        assert "device, host" in flushed.text
        assert "storage" in (await client.post("/flush_cache?tiers=all")).text
        assert (await client.get("/generate")).status_code == 405

    run(test)


class Failing(PlainEngine):
    """A real engine whose model breaks in the middle of an answer."""

    async def submit(self, request: Request) -> AsyncIterator[Output]:
        n_outputs = 0
        async for output in PlainEngine.submit(self, request):
            n_outputs += 1
            if n_outputs == 3:
                raise RuntimeError("the secret inside of the engine")
            yield output


def test_a_bug_in_the_engine_is_a_500_that_tells_nothing() -> None:
    async def inner() -> None:
        async with client_of(Failing(SOURCE.decoder())) as client:
            body = {"input_ids": PROMPT, "sampling_params": GREEDY}
            reply = await client.post("/generate", json=body)
            assert reply.status_code == 500
            assert "secret" not in reply.text
            assert "log" in reply.json()["error"]["message"]

    asyncio.run(inner())


def test_a_folder_brings_its_tokenizer_and_chat_template(tmp_path: Path) -> None:
    words = {"<s>": 0, "you": 1, "and": 2, "me": 3, "<unk>": 4}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    template = "{% for m in messages %}{{ bos_token }}{{ m.content }}{% endfor %}"
    settings = {"chat_template": template, "bos_token": {"content": "<s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    codec = codec_from_folder(tmp_path)
    assert codec.encode("you and me") == [0, 1, 2, 3]
    assert codec.decode([0, 1, 2]) == "you and"
    text = codec.chat([{"role": "user", "content": "you and me"}])
    assert codec.encode(text, is_chat=True) == [0, 1, 2, 3]


def test_a_folder_without_a_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelRefusedError, match=r"tokenizer\.json"):
        codec_from_folder(tmp_path)


def test_a_chat_template_runs_in_a_sandbox() -> None:
    harmless = ChatTemplate("{{ bos_token }}{{ messages[0].content }}", {"bos_token": "<s>"})
    assert harmless.render([{"role": "user", "content": "hi"}]) == "<s>hi"
    for source in (
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages.append(1) }}",
    ):
        with pytest.raises(TemplateRefusedError):
            ChatTemplate(source, {}).render([{"role": "user", "content": "x"}])
