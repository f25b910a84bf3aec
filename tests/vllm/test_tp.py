"""Tensor parallel 2 on both sides: every rank sends, keeps and restores its own half."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vllm.conftest import Reference
from tests.vllm.harness import BLOCK_TOKENS, Sizes, running
from tests.vllm.harness_client import TOLERANCE, Client, Script, difference
from tests.vllm.harness_model import TINY
from tests.vllm.harness_pairs import EAGER, Pair, kvlift_pair, wait_written

pytestmark = [pytest.mark.vllm, pytest.mark.real, pytest.mark.timeout(900)]

RECEIVED = "vllm:kvlift_bytes_received_total"
CACHED = "vllm:prompt_tokens_cached_by_source_total"


@pytest.fixture(scope="module")
def pair(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("tp")
    sizes = Sizes(model, max_len=2048, n_blocks=64, n_ranks=2)
    found = kvlift_pair(
        sizes,
        sizes,
        folder,
        name="tp",
        host_bytes=64 * TINY.kv_bytes(BLOCK_TOKENS),
        storage=str(folder / "kv"),
        driver=EAGER,
    )
    with running(*found.processes):
        yield found


def test_two_ranks_answer_as_one_does(pair: Pair, reference: Reference) -> None:
    script = Script.drawn(61)
    expected = reference(script)
    client = Client(pair.proxy.url)
    n_known = 0
    for turn, wanted in enumerate(expected):
        prompt = script.prompt(turn, expected)
        before = pair.decode.counter(RECEIVED)
        assert difference(client.complete(prompt, script.n_answer), wanted) < TOLERANCE
        n_new = len(prompt) - n_known // BLOCK_TOKENS * BLOCK_TOKENS
        received = pair.decode.counter(RECEIVED) - before
        assert abs(received - TINY.kv_bytes(n_new)) <= TINY.kv_bytes(BLOCK_TOKENS)
        n_known = len(prompt) + script.n_answer - 1
    pair.decode.wait_idle()
    pair.prefill.wait_idle()


def test_two_ranks_get_back_what_they_had(pair: Pair, reference: Reference) -> None:
    script = Script.drawn(62)
    expected = reference(script)
    client = Client(pair.proxy.url)
    script.play(client, expected)
    pair.decode.wait_idle()
    prompt = script.prompt(5, expected)
    n_full = len(prompt) // BLOCK_TOKENS * BLOCK_TOKENS
    host = pair.decode.counter(f'{CACHED}{{source="host"}}')
    assert difference(client.complete(prompt, script.n_answer), expected[5]) < TOLERANCE
    assert pair.decode.counter(f'{CACHED}{{source="host"}}') - host >= n_full - BLOCK_TOKENS
    pair.decode.wait_idle()
    wait_written(pair.decode.log.parent / "kv")
    pair.decode.stop()
    pair.decode.start().wait_ready()
    assert difference(client.complete(prompt, script.n_answer), expected[5]) < TOLERANCE
    assert pair.decode.counter(f'{CACHED}{{source="disk"}}') >= n_full - BLOCK_TOKENS
    pair.decode.wait_idle()
