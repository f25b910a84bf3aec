"""Prefill and decode as two vLLM processes with kvlift between them."""

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.vllm.conftest import Reference
from tests.vllm.harness import BLOCK_TOKENS, Server, Sizes, running
from tests.vllm.harness_client import TOLERANCE, Answer, Client, Script, difference
from tests.vllm.harness_model import TINY
from tests.vllm.harness_pairs import EAGER, Pair, kvlift_pair, wait_written

pytestmark = [pytest.mark.vllm, pytest.mark.real, pytest.mark.timeout(900)]

BLOCK_BYTES = TINY.kv_bytes(BLOCK_TOKENS)
RECEIVED = "vllm:kvlift_bytes_received_total"
CACHED = "vllm:prompt_tokens_cached_by_source_total"


@pytest.fixture(scope="module")
def pair(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("pair")
    sizes = Sizes(model, max_len=2048, n_blocks=128)
    found = kvlift_pair(
        sizes, sizes, folder, host_bytes=256 * BLOCK_BYTES, storage=str(folder / "kv"), driver=EAGER
    )
    with running(*found.processes):
        yield found


def cached(server: Server, source: str) -> float:
    return server.counter(f'{CACHED}{{source="{source}"}}')


def worst(answers: Sequence[Answer], reference: Sequence[Answer]) -> float:
    return max(difference(*both) for both in zip(answers, reference, strict=True))


def test_a_conversation_is_answered_as_without_a_connector_and_only_the_suffix_travels(
    pair: Pair, reference: Reference
) -> None:
    script = Script.drawn(11)
    expected = reference(script)
    client = Client(pair.proxy.url)
    answers: list[Answer] = []
    n_known = 0
    for turn in range(len(script.turns)):
        prompt = script.prompt(turn, expected)
        before = pair.decode.counter(RECEIVED)
        answers.append(client.complete(prompt, script.n_answer))
        n_new = len(prompt) - n_known // BLOCK_TOKENS * BLOCK_TOKENS
        received = pair.decode.counter(RECEIVED) - before
        assert abs(received - TINY.kv_bytes(n_new)) <= BLOCK_BYTES, f"turn {turn + 1}"
        n_known = len(prompt) + script.n_answer - 1
    assert worst(answers, expected) < TOLERANCE
    pair.decode.wait_idle()
    pair.prefill.wait_idle()


def test_what_came_from_prefill_is_what_prefill_has(pair: Pair) -> None:
    script = Script.drawn(12, n_turns=1, n_first=1000)
    before = set(pair.decode.blocks().values())
    script.play(Client(pair.proxy.url))
    new = set(pair.decode.blocks().values()) - before
    common = new & set(pair.prefill.blocks().values())
    assert len(common) >= len(script.turns[0]) // BLOCK_TOKENS


def test_a_damaged_block_is_seen_by_the_comparison(pair: Pair, reference: Reference) -> None:
    script = Script.drawn(13, n_turns=2)
    expected = reference(script)
    client = Client(pair.proxy.url)
    before = pair.decode.blocks()
    assert difference(client.complete(script.turns[0], script.n_answer), expected[0]) < TOLERANCE
    after = pair.decode.blocks()
    changed = sorted(block for block in after if after[block] != before.get(block))
    for block in changed:
        pair.decode.call("probe_damage", block)
    prompt = script.prompt(1, expected)
    assert difference(client.complete(prompt, script.n_answer), expected[1]) > TOLERANCE
    pair.decode.wait_idle()


def test_the_host_gives_the_prefix_back_after_the_device_forgot_it(
    pair: Pair, reference: Reference
) -> None:
    script = Script.drawn(14)
    expected = reference(script)
    client = Client(pair.proxy.url)
    script.play(client, expected)
    pair.decode.wait_idle()  # it forgets the device's prefix cache, too
    host, received = cached(pair.decode, "host"), pair.decode.counter(RECEIVED)
    again = client.complete(script.prompt(5, expected), script.n_answer)
    assert difference(again, expected[5]) < TOLERANCE
    n_full = len(script.prompt(5, expected)) // BLOCK_TOKENS * BLOCK_TOKENS
    assert cached(pair.decode, "host") - host >= n_full - BLOCK_TOKENS
    assert pair.decode.counter(RECEIVED) - received <= 2 * BLOCK_BYTES


def test_one_request_is_filled_from_device_host_and_prefill(
    pair: Pair, reference: Reference
) -> None:
    script = Script.drawn(15, n_first=700, n_next=500, n_turns=3, n_answer=16)
    expected = reference(script)
    client = Client(pair.proxy.url)
    client.complete(script.turns[0], script.n_answer)
    client.complete(script.prompt(1, expected), script.n_answer)
    pair.decode.wait_idle()
    client.complete(script.turns[0], 1)  # the device has the first part again, the host has both
    names = ("device", "host", "p2p")
    before = {name: cached(pair.decode, name) for name in names}
    last = client.complete(script.prompt(2, expected), script.n_answer)
    assert difference(last, expected[2]) < TOLERANCE
    found = {name: cached(pair.decode, name) - before[name] for name in names}
    assert all(n_tokens >= BLOCK_TOKENS for n_tokens in found.values()), found


def test_storage_gives_the_prefix_back_after_a_restart_of_decode(
    pair: Pair, reference: Reference
) -> None:
    script = Script.drawn(16)
    expected = reference(script)
    client = Client(pair.proxy.url)
    script.play(client, expected)
    pair.decode.wait_idle()
    wait_written(pair.decode.log.parent / "kv")
    pair.decode.stop()
    pair.decode.start().wait_ready()
    again = client.complete(script.prompt(5, expected), script.n_answer)
    assert difference(again, expected[5]) < TOLERANCE
    n_full = len(script.prompt(5, expected)) // BLOCK_TOKENS * BLOCK_TOKENS
    assert cached(pair.decode, "disk") >= n_full - BLOCK_TOKENS
    assert pair.decode.counter(RECEIVED) <= 2 * BLOCK_BYTES
    pair.decode.wait_idle()


def test_the_storage_folder_may_vanish(pair: Pair, reference: Reference) -> None:
    """Last in this file: nobody writes into that folder again."""
    script = Script.drawn(17, n_turns=3)
    expected = reference(script)
    client = Client(pair.proxy.url)
    client.complete(script.turns[0], script.n_answer)
    shutil.rmtree(pair.decode.log.parent / "kv")
    pair.decode.wait_idle()
    answers = script.play(client, expected)
    assert worst(answers, expected) < TOLERANCE
    pair.decode.wait_idle()
    pair.prefill.wait_idle()
