"""Things go wrong between real processes: no wrong number, no leaked block, no failed request."""

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from examples.vllm_proxy import prefill_body
from tests.vllm.conftest import Reference
from tests.vllm.harness import BLOCK_TOKENS, Server, Sizes, running
from tests.vllm.harness_client import TOLERANCE, Answer, Client, Script, difference
from tests.vllm.harness_model import TINY
from tests.vllm.harness_pairs import EAGER, Pair, kvlift_pair, wait_written

pytestmark = [pytest.mark.vllm, pytest.mark.real, pytest.mark.timeout(900)]

BLOCK_BYTES = TINY.kv_bytes(BLOCK_TOKENS)
RECEIVED = "vllm:kvlift_bytes_received_total"


@pytest.fixture(scope="module")
def pair(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Decode has room for 40 blocks: two long requests and a half."""
    folder = tmp_path_factory.mktemp("faults")
    prefill = Sizes(model, max_len=2048, n_blocks=128)
    decode = Sizes(model, max_len=2048, n_blocks=40)
    found = kvlift_pair(
        prefill,
        decode,
        folder,
        host_bytes=128 * BLOCK_BYTES,
        storage=str(folder / "kv"),
        driver=EAGER,
    )
    with running(*found.processes):
        yield found


@pytest.fixture(autouse=True)
def _nothing_leaks(pair: Pair) -> Iterator[None]:
    yield
    for server in (pair.prefill, pair.decode):
        if server.is_running:
            server.check()
            server.wait_idle()


def kept_by(prefill: Server, prompt: list[int]) -> dict[str, Any]:
    """What the proxy asks of the prefill instance, and what it says."""
    body = prefill_body({"model": "model", "prompt": prompt, "temperature": 0})
    answer = httpx.post(f"{prefill.url}/v1/completions", json=body, timeout=60)
    answer.raise_for_status()
    found: dict[str, Any] = answer.json()["kv_transfer_params"]
    assert found["do_remote_prefill"], "the prefill instance keeps the blocks of this request"
    return found


class Frozen:
    """A server whose processes are stopped: it has promised, and says nothing."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def __enter__(self) -> None:
        self._server.send(signal.SIGSTOP)

    def __exit__(self, *_: object) -> None:
        self._server.send(signal.SIGCONT)


def test_a_damaged_page_in_storage_is_asked_of_prefill(pair: Pair, reference: Reference) -> None:
    script = Script.drawn(21, n_turns=2, n_first=900)
    expected = reference(script)
    client = Client(pair.proxy.url)
    script.play(client, expected)
    pair.decode.wait_idle()
    wait_written(pair.decode.log.parent / "kv")
    pair.decode.stop()
    pages = [path for path in (pair.decode.log.parent / "kv").rglob("*") if path.is_file()]
    pages = [path for path in pages if path.stat().st_size >= BLOCK_BYTES]
    assert pages, "the conversation was written to storage"
    for path in pages:
        with path.open("r+b") as file:
            file.seek(BLOCK_BYTES // 2)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 1]))
    pair.decode.start().wait_ready()
    again = client.complete(script.prompt(1, expected), script.n_answer)
    assert difference(again, expected[1]) < TOLERANCE
    assert pair.decode.counter(RECEIVED) > 0


def test_an_abort_during_a_load_gives_every_block_back(pair: Pair, reference: Reference) -> None:
    script = Script.drawn(22, n_turns=1, n_first=1200)
    prompt = script.prompt(0, [])
    params = kept_by(pair.prefill, prompt)
    body = {"model": "model", "prompt": prompt, "max_tokens": 4, "kv_transfer_params": params}
    with Frozen(pair.prefill):
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{pair.decode.url}/v1/completions", json=body, timeout=1.5)
        time.sleep(1)  # the server notices the client's leave
    pair.decode.wait_idle()
    again = Client(pair.proxy.url).complete(prompt, script.n_answer)
    assert difference(again, reference(script)[0]) < TOLERANCE


def test_preemption_under_a_full_cache_changes_no_answer(pair: Pair, reference: Reference) -> None:
    """Four requests of 8 blocks fit; with what they generate they do not."""
    scripts = [Script.drawn(30 + it, n_turns=1, n_first=1000, n_answer=300) for it in range(5)]
    expected = [reference(script)[0] for script in scripts]
    before = pair.decode.counter("vllm:num_preemptions_total")
    client = Client(pair.proxy.url, timeout_s=300)
    with ThreadPoolExecutor(len(scripts)) as threads:
        asked = [threads.submit(client.complete, it.turns[0], it.n_answer) for it in scripts]
        answers = [one.result() for one in asked]
    assert pair.decode.counter("vllm:num_preemptions_total") > before, "the cache was full"
    worst = max(difference(*both) for both in zip(answers, expected, strict=True))
    assert worst < TOLERANCE


def test_prefill_that_was_silent_for_a_moment_is_waited_for(
    pair: Pair, reference: Reference
) -> None:
    script = Script.drawn(23, n_turns=1, n_first=1100)
    params = kept_by(pair.prefill, script.prompt(0, []))
    with ThreadPoolExecutor(1) as thread:
        with Frozen(pair.prefill):
            late = thread.submit(_decode, pair.decode, script, params)
            time.sleep(1.5)
        assert difference(late.result(), reference(script)[0]) < TOLERANCE


def test_a_request_without_prefill_is_computed_by_decode(pair: Pair, reference: Reference) -> None:
    script = Script.drawn(24, n_turns=1)
    answer = Client(pair.decode.url).complete(script.turns[0], script.n_answer)
    assert difference(answer, reference(script)[0]) < TOLERANCE


def test_prefill_that_dies_after_its_promise_costs_time_and_nothing_else(
    pair: Pair, reference: Reference
) -> None:
    """Last but one in this file: there is no prefill instance any more."""
    script = Script.drawn(25, n_turns=1, n_first=1100)
    params = kept_by(pair.prefill, script.prompt(0, []))
    with ThreadPoolExecutor(1) as thread:
        pair.prefill.send(signal.SIGSTOP)
        late = thread.submit(_decode, pair.decode, script, params)
        time.sleep(1.0)
        pair.prefill.kill()
        assert difference(late.result(), reference(script)[0]) < TOLERANCE


def test_the_proxy_goes_on_without_prefill(pair: Pair, reference: Reference) -> None:
    assert not pair.prefill.is_running
    script = Script.drawn(26, n_turns=2)
    expected = reference(script)
    answers = script.play(Client(pair.proxy.url), expected)
    assert max(difference(*both) for both in zip(answers, expected, strict=True)) < TOLERANCE


def _decode(decode: Server, script: Script, params: dict[str, Any]) -> Answer:
    client = Client(decode.url, timeout_s=180)
    return client.complete(script.turns[0], script.n_answer, kv_transfer_params=params)
