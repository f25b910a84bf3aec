"""Clients and peers that ask too much, lie or dawdle: a bound, a sentence, no harm to others."""

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import uvicorn
from attrs import define, field, frozen

from kvlift.core.ids import Attempt, Rid, Ticket
from kvlift.core.landed import PagesArrived
from kvlift.core.prompt import Prompt
from kvlift.runtime.hosts.vllm_peers import PeersOfRank, peer_words
from kvlift.runtime.worker.answer import Answer
from kvlift.runtime.worker.generation import Output, Request, Sampling
from kvlift.runtime.worker.http import create_app
from kvlift.runtime.worker.http_body import BODY_BYTES_SMALL, HttpLimits, Intake, Service
from kvlift.runtime.worker.http_connections import bounded_connections
from kvlift.runtime.worker.http_native import grown
from kvlift.runtime.worker.loading import ModelSource
from kvlift.runtime.worker.model_config import ModelRefusedError, config_from_folder
from kvlift.runtime.worker.plain_engine import PlainEngine
from kvlift.runtime.worker.sampling import sample
from kvlift.runtime.worker.tokenizer import (
    ByteCodec,
    ChatTemplate,
    TemplateRefusedError,
    _template,
)
from tests.effects.wire_world import Node, PlainMemory, zmq_peers

torch.set_num_threads(1)
SOURCE = ModelSource("tiny", seed=5)
NO_HEADS = json.dumps(
    {
        "architectures": ["LlamaForCausalLM"],
        "num_attention_heads": 0,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "vocab_size": 9,
    }
)
ONE = {"max_new_tokens": 1}
LOGITS = torch.tensor([0.5, 3.0, -2.0, 2.9])


@frozen
class NotingCodec(ByteCodec):
    """Notes the texts that it is given."""

    texts: list[str] = field(factory=list)

    def encode(self, text: str, *, is_chat: bool = False) -> list[int]:
        self.texts.append(text)
        return super().encode(text, is_chat=is_chat)


@contextlib.asynccontextmanager
async def client_of(
    limits: HttpLimits | None = None, codec: ByteCodec | None = None
) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(PlainEngine(SOURCE.decoder()), codec or ByteCodec(), SOURCE.config(), limits)
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://worker") as client:
        yield client


async def refusal(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> str:
    reply = await client.post(path, json=body, timeout=30)
    assert reply.status_code == 400, reply.text
    return str(reply.json()["error"]["message"])


# -- sampling --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "how",
    [
        {"top_p": 1e-300},
        {"top_p": 5e-324, "top_k": 1 << 30},
        {"temperature": 1e-300},
        {"temperature": 5e-324, "top_p": 1e-300},
        {"temperature": 1e-7},
    ],
)
def test_however_little_is_left_to_draw_from_the_likeliest_is_drawn(how: dict[str, Any]) -> None:
    for place in range(20):
        assert sample(LOGITS, Sampling(**how), place)[0] == 1


def test_logits_that_are_no_numbers_end_no_worker() -> None:
    for bad in (float("nan"), float("inf")):
        token, _logprob = sample(torch.tensor([0.0, bad, 1.0]), Sampling(), 3)
        assert token == 1


# -- bodies ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": "a", "sampling_params": {"stop_token_ids": [1] * 1025, **ONE}}),
        ("/v1/completions", {"prompt": "a", "stop_token_ids": [1] * 1025, "max_tokens": 1}),
        ("/v1/chat/completions", {"messages": [{"role": "a"}] * 4097, "max_tokens": 1}),
    ],
)
def test_a_list_that_is_kept_has_a_bound(path: str, body: dict[str, Any]) -> None:
    async def inner() -> None:
        async with client_of() as client:
            assert "malformed" in await refusal(client, path, body)

    asyncio.run(inner())


def test_a_page_of_another_site_can_make_a_browser_call_nothing() -> None:
    async def inner() -> None:
        async with client_of() as client:
            for site, status in (("cross-site", 403), ("same-site", 403), ("same-origin", 200)):
                headers = {"Sec-Fetch-Site": site}
                reply = await client.get("/flush_cache?tiers=all", headers=headers)
                assert reply.status_code == status
            assert (await client.get("/flush_cache")).status_code == 200

    asyncio.run(inner())


@pytest.mark.parametrize(("path", "name"), [("/generate", "text"), ("/v1/completions", "prompt")])
def test_texts_are_counted_before_they_are_tokenized(path: str, name: str) -> None:
    async def inner() -> None:
        codec = NotingCodec()
        async with client_of(codec=codec) as client:
            assert "1 to 256" in await refusal(client, path, {name: ["a"] * 257})
        assert codec.texts == []

    asyncio.run(inner())


def test_log_probabilities_of_long_prompts_are_refused_before_anything_is_computed() -> None:
    async def inner() -> None:
        body = {"input_ids": [[1] * 50] * 2, "return_logprob": True, "logprob_start_len": 49}
        async with client_of(HttpLimits(scored_tokens_max=99)) as client:
            assert "at most 99" in await refusal(client, "/generate", body)
            body["input_ids"], body["sampling_params"] = [[1] * 50], ONE
            assert (await client.post("/generate", json=body)).status_code == 200

    asyncio.run(inner())


def test_large_bodies_that_do_not_end_leave_room_for_small_calls_and_end_by_a_deadline() -> None:
    limits = HttpLimits(bodies_bytes_max=1 << 20, body_s_max=1.0)
    call = json.dumps({"input_ids": [1], "sampling_params": ONE}).encode()
    has_sent = asyncio.Event()

    async def endless() -> AsyncIterator[bytes]:
        yield b" " * (BODY_BYTES_SMALL + (1 << 20))
        has_sent.set()
        await asyncio.sleep(60)

    async def inner() -> None:
        async with client_of(limits) as client:
            slow = asyncio.create_task(client.post("/generate", content=endless(), timeout=30))
            await has_sent.wait()
            large = b" " * BODY_BYTES_SMALL + call
            reply = await client.post("/generate", content=large)
            assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
            assert (await client.post("/generate", content=call)).status_code == 200
            assert (await slow).status_code == 408
            assert (await client.post("/generate", content=large)).status_code == 200

    asyncio.run(inner())


# -- answers and connections -----------------------------------------------------------------------


class Hasty:
    """An engine that has given everything before the client reads again."""

    async def submit(self, request: Request) -> AsyncIterator[Output]:
        async for output in PlainEngine(SOURCE.decoder()).submit(request):
            yield output


def test_a_client_that_reads_slowly_is_told_each_state_once() -> None:
    async def inner() -> None:
        sampling = Sampling(temperature=0.0, max_new_tokens=6, ignore_eos=True)
        answer = Answer(Request(rid="a", tokens=(1, 2), sampling=sampling), ByteCodec())
        config = SOURCE.config()
        engine: Any = Hasty()
        service = Service(
            engine=engine,
            codec=ByteCodec(),
            model=config.name,
            vocab=config.vocab,
            positions_max=config.positions_max,
            limits=HttpLimits(),
            intake=Intake(),
        )
        states = []
        async for index in grown(service, [answer]):
            assert index == 0
            states.append((len(answer.tokens), answer.is_done))
            if len(states) == 1:
                while not answer.is_done:  # noqa: ASYNC110 - a property is all it tells
                    await asyncio.sleep(0.01)
        assert states[-1] == (6, True)
        assert len(states) == 2

    asyncio.run(inner())


def test_silent_connections_are_bounded_and_closed_and_busy_ones_stay() -> None:
    async def inner() -> None:
        loop = asyncio.get_running_loop()
        app = create_app(PlainEngine(SOURCE.decoder()), ByteCodec(), SOURCE.config())
        config = uvicorn.Config(
            app, http=bounded_connections(3, 0.4), lifespan="off", log_level="error"
        )
        server = uvicorn.Server(config)
        listening = socket.create_server(("127.0.0.1", 0))
        address = listening.getsockname()
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        while not server.started:  # noqa: ASYNC110 - a field is all it tells
            await asyncio.sleep(0.01)
        begun = loop.time()
        pairs = [await asyncio.open_connection(*address) for _ in range(3)]
        body = b'{"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}'
        head = b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body)
        pairs[0][1].write(head)  # its call has begun; the rest of it comes late
        pairs[1][1].write(head[:-9])  # a call that never begins
        await asyncio.sleep(0.1)
        fourth, _writer = await asyncio.open_connection(*address)
        with contextlib.suppress(ConnectionError):
            assert await fourth.read() == b""
        assert loop.time() - begun < 0.35
        for reader, _writer in pairs[1:]:
            with contextlib.suppress(ConnectionError):
                assert await asyncio.wait_for(reader.read(), 5) == b""
        await asyncio.sleep(0.5)
        pairs[0][1].write(body)
        assert b" 200 " in await asyncio.wait_for(pairs[0][0].readline(), 10)
        async with httpx.AsyncClient() as client:
            url = f"http://{address[0]}:{address[1]}/health"
            assert (await client.get(url)).status_code == 200
        server.should_exit = True
        await serving

    asyncio.run(inner())


# -- a model's folder ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("[" * 100_000, "is not JSON"),
        (NO_HEADS, "out of bounds"),
    ],
    ids=["deep", "no heads"],
)
def test_a_config_that_cannot_be_is_a_sentence(tmp_path: Path, config: str, words: str) -> None:
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ModelRefusedError, match=words):
        config_from_folder(tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config.json", b"{nope"),
        ("tokenizer_config.json", b"[" * 100_000),
        ("tokenizer_config.json", b"\xff\xfe"),
        ("chat_template.jinja", b"\xff\xfe"),
    ],
)
def test_a_damaged_chat_template_is_a_sentence(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelRefusedError, match=name):
        _template(tmp_path)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].content.index('x') }}",
        "{{ 1 // (messages | length - 1) }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{{ ''.__class__.__mro__ }}",
        "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
    ],
)
def test_a_template_that_fails_refuses_the_messages(template: str) -> None:
    with pytest.raises(TemplateRefusedError):
        ChatTemplate(template, {}).render([{"role": "user", "content": "hello"}])


# -- peers -----------------------------------------------------------------------------------------


def test_two_workers_may_be_given_one_request_id_at_one_node() -> None:
    prompts = [Prompt(bytes(32), bytes([n]) * 4 * 4, 4) for n in (1, 2)]
    node = Node()
    workers = [zmq_peers(PlainMemory(), group=name) for name in ("decode-0", "decode-1")]
    try:
        for worker, prompt in zip(workers, prompts, strict=True):
            worker.send_hold(Ticket(1), Rid("same"), Attempt(1), node.address, prompt)
            worker.send_want(Ticket(1), 0, [0], 0)
        landed: list[list[Any]] = [[], []]
        until = time.monotonic() + 10
        while time.monotonic() < until and not all(landed):
            for asked in node.node.poll():
                node.node.page_ready(asked.rid, asked.attempt, 1)
            for worker, heard in zip(workers, landed, strict=True):
                heard.extend(worker.landed())
            time.sleep(0.01)
        assert landed == [[PagesArrived(Ticket(1), 1)]] * 2
    finally:
        for worker in workers:
            worker.close(2.0)
        node.node.close()


@define
class Heard:
    """Peers that only note where they are sent."""

    addresses: list[str] = field(factory=list)

    def send_hold(
        self, ticket: Ticket, rid: Rid, attempt: Attempt, peer: str, prompt: Prompt
    ) -> None:
        self.addresses.append(peer)


@pytest.mark.parametrize(
    "address",
    [
        "tcp://10.0.0.7:5555",
        "tcp://node.example:5555",
        "tcp://127.0.0.1:0;10.0.0.7:5555",
        "tcp://10.0.0.7:0;127.0.0.1:5555",
    ],
)
def test_without_a_secret_a_client_cannot_name_a_node_of_another_machine(address: str) -> None:
    prompt = Prompt(bytes(32), bytes(16), 4)
    for has_secret, wanted in ((False, ""), (True, address)):
        inner: Any = Heard()
        peers = PeersOfRank(inner, 0, has_secret=has_secret)
        for named in (address, "tcp://127.0.0.1:5555", "ipc:///run/kv"):
            peers.send_hold(Ticket(1), Rid("x"), Attempt(1), peer_words([named], "a"), prompt)
        assert inner.addresses == [wanted, "tcp://127.0.0.1:5555", "ipc:///run/kv"]
