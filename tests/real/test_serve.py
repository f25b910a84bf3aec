"""`kvlift serve` as its users see it: curl, the openai client, Ctrl-C."""

import json
import re
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from kvlift.runtime.worker.model import Decoder
from tests.real.harm_server import Server, serving
from tests.real.harm_world import PAGE, WAIT_S, is_alive, likeliest, prompt_of, whole_decoder
from tests.source import ROOT

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("serve")) as running:
        yield running


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return whole_decoder()


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        api_key="none", base_url=f"{server.address}/v1", max_retries=0, timeout=WAIT_S
    ) as made:
        yield made


def body_of(prompt: tuple[int, ...], **fields: Any) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    return {"input_ids": list(prompt), "sampling_params": sampling, **fields}


def logprobs_of(answer: dict[str, Any]) -> list[float]:
    return [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]


def tiers_of(answer: dict[str, Any]) -> tuple[int, int, int]:
    details = answer["meta_info"]["cached_tokens_details"]
    assert sum(details.values()) == answer["meta_info"]["cached_tokens"]
    return details["device"], details["host"], details["storage"]


def test_the_calls_of_the_readme_give_what_it_says(server: Server) -> None:
    block = re.search(r"```sh\n(body=.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert block is not None
    script = block[1].replace("localhost:30000", server.address)
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, check=True, timeout=WAIT_S
    )
    promised = re.findall(r"# (.*)", block[1])
    answers = done.stdout.splitlines()
    assert len(promised) == len(answers) == 4
    for part, answer in zip(promised, answers, strict=True):
        assert part in answer


def test_the_same_prompt_again_and_after_a_flush_is_the_same_answer_from_device_and_storage(
    server: Server, decoder: Decoder
) -> None:
    prompt = prompt_of(900, 100)
    body = body_of(prompt, return_logprob=True)
    first = server.call("/generate", body)
    again = server.call("/generate", body)
    server.ranks_at_rest()
    server.call("/flush_cache", {})
    flushed = server.call("/generate", body)
    full = len(prompt) // PAGE * PAGE
    assert [tiers_of(each) for each in (first, again, flushed)] == [
        (0, 0, 0),
        (full, 0, 0),
        (0, 0, full),
    ]
    assert first["output_ids"] == likeliest(decoder, prompt, first["output_ids"])
    for other in (again, flushed):
        assert other["output_ids"] == first["output_ids"]
        assert other["text"] == first["text"]
        assert logprobs_of(other) == pytest.approx(logprobs_of(first), abs=1e-4)
    scored = server.call("/generate", {**body, "logprob_start_len": 0})["meta_info"]
    assert [entry[1] for entry in scored["input_token_logprobs"]] == list(prompt)
    server.ranks_at_rest()


def test_a_stream_brings_the_same_tokens_one_after_the_other(server: Server) -> None:
    body = body_of(prompt_of(901, 50))
    whole = server.call("/generate", body)["output_ids"]
    data = json.dumps({**body, "stream": True}).encode()
    request = urllib.request.Request(f"{server.address}/generate", data=data)
    with urllib.request.urlopen(request, timeout=WAIT_S) as reply:
        lines = [line.decode().strip() for line in reply if line.strip()]
    assert lines[-1] == "data: [DONE]"
    grown = [json.loads(line.removeprefix("data: "))["output_ids"] for line in lines[:-1]]
    assert grown[-1] == whole
    assert len(grown) > 1
    assert all(whole[: len(each)] == each for each in grown)


def test_the_openai_client_completes_in_one_piece_and_in_a_stream(
    server: Server, client: openai.OpenAI
) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": "Once upon a time, " * 4, "temperature": 0}
    cold = client.completions.create(**asked, max_tokens=9, logprobs=1)
    warm = client.completions.create(**asked, max_tokens=9, logprobs=1)
    assert cold.choices[0].text == warm.choices[0].text
    assert cold.choices[0].logprobs is not None
    assert warm.choices[0].logprobs is not None
    assert warm.choices[0].logprobs.token_logprobs == pytest.approx(
        cold.choices[0].logprobs.token_logprobs, abs=1e-4
    )
    for answer, n_cached in ((cold, 0), (warm, 72)):
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == n_cached
    pieces = [
        piece.choices[0].text
        for piece in client.completions.create(**asked, max_tokens=9, stream=True)
    ]
    assert "".join(pieces) == cold.choices[0].text
    assert [model.id for model in client.models.list()] == ["tiny"]


def test_the_openai_client_chats_and_the_next_turn_reuses_the_last(
    server: Server, client: openai.OpenAI
) -> None:
    turns: list[Any] = [{"role": "user", "content": "Tell me about caches, please."}]
    first = client.chat.completions.create(
        model="tiny", messages=turns, max_tokens=8, temperature=0, logprobs=True
    )
    said = first.choices[0].message.content
    assert said is not None
    assert first.choices[0].logprobs is not None
    turns += [{"role": "assistant", "content": said}, {"role": "user", "content": "And then?"}]
    stream = client.chat.completions.create(
        model="tiny",
        messages=turns,
        max_tokens=8,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens_details is not None
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens is not None
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    whole = client.chat.completions.create(
        model="tiny", messages=turns, max_tokens=8, temperature=0
    )
    assert whole.choices[0].message.content == streamed


def test_health_info_and_metrics_tell_about_the_worker(server: Server) -> None:
    assert server.answer("/health") == (200, "")
    info = server.call("/server_info")
    assert (info["n_ranks"], info["page_tokens"], info["model"]) == (2, PAGE, "tiny")
    metrics = server.call("/metrics")
    assert "kvlift_worker_requests_total" in metrics
    assert "kvlift_ballots_total" in metrics


def test_ctrl_c_ends_with_130_and_leaves_no_process_and_no_file(server: Server) -> None:
    """The last one: it ends the server, with a request under way."""
    endless = body_of(prompt_of(902, 40), stream=True)
    endless["sampling_params"]["max_new_tokens"] = 3000
    data = json.dumps(endless).encode()
    request = urllib.request.Request(f"{server.address}/generate", data=data)
    with urllib.request.urlopen(request, timeout=WAIT_S) as reply:
        assert reply.readline().startswith(b"data: ")
        children = server.children()
        assert len(children) == 3
        assert list(server.home.iterdir())
        # Twice, as an impatient hand does it: the second must not cut the clearing up short.
        for _ in range(2):
            server.process.send_signal(signal.SIGINT)
            time.sleep(0.05)
        last_words = [line for line in reply if line.strip()][-2:]
    assert server.process.wait(WAIT_S) == 130
    assert b"the worker is being ended" in last_words[0]
    assert last_words[1].strip() == b"data: [DONE]"
    assert not [child for child in children if is_alive(child)]
    assert not list(server.home.iterdir())
    said = "".join(server.said)
    assert said.endswith("kvlift: interrupted\n"), said
    assert "Traceback" not in said, said
