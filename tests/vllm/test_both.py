"""One vLLM instance with kvlift's host and storage tiers, and no peer."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vllm.conftest import Reference
from tests.vllm.harness import BLOCK_TOKENS, Server, Sizes, running
from tests.vllm.harness_client import TOLERANCE, Client, Script, difference
from tests.vllm.harness_model import TINY
from tests.vllm.harness_pairs import EAGER, kvlift_both, wait_written

pytestmark = [pytest.mark.vllm, pytest.mark.real, pytest.mark.timeout(900)]

CACHED = "vllm:prompt_tokens_cached_by_source_total"


@pytest.fixture(scope="module")
def both(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("both")
    found = kvlift_both(
        Sizes(model, max_len=2048, n_blocks=64),
        folder,
        host_bytes=128 * TINY.kv_bytes(BLOCK_TOKENS),
        storage=str(folder / "kv"),
        driver=EAGER,
    )
    with running(found):
        yield found


def n_hit(server: Server, source: str) -> float:
    return server.counter(f'{CACHED}{{source="{source}"}}')


def test_the_host_gives_a_conversation_back(both: Server, reference: Reference) -> None:
    script = Script.drawn(41)
    expected = reference(script)
    client = Client(both.url)
    answers = script.play(client, expected)
    assert max(difference(*it) for it in zip(answers, expected, strict=True)) < TOLERANCE
    both.wait_idle()  # it forgets the device's prefix cache, too
    before = n_hit(both, "host")
    again = client.complete(script.prompt(5, expected), script.n_answer)
    assert difference(again, expected[5]) < TOLERANCE
    n_full = len(script.prompt(5, expected)) // BLOCK_TOKENS * BLOCK_TOKENS
    assert n_hit(both, "host") - before >= n_full - BLOCK_TOKENS


def test_many_conversations_at_a_time_are_answered_as_one_by_one(
    both: Server, reference: Reference
) -> None:
    scripts = [Script.drawn(50 + it, n_turns=3) for it in range(6)]
    expected = [reference(script) for script in scripts]
    client = Client(both.url)
    for turn in range(3):
        for script, answers in zip(scripts, expected, strict=True):
            answer = client.complete(script.prompt(turn, answers), script.n_answer)
            assert difference(answer, answers[turn]) < TOLERANCE
    both.wait_idle()


def test_storage_gives_a_conversation_back_after_a_restart(
    both: Server, reference: Reference
) -> None:
    script = Script.drawn(42)
    expected = reference(script)
    client = Client(both.url)
    script.play(client, expected)
    both.wait_idle()
    wait_written(both.log.parent / "kv")
    both.stop()
    both.start().wait_ready()
    again = client.complete(script.prompt(5, expected), script.n_answer)
    assert difference(again, expected[5]) < TOLERANCE
    n_full = len(script.prompt(5, expected)) // BLOCK_TOKENS * BLOCK_TOKENS
    assert n_hit(both, "disk") >= n_full - BLOCK_TOKENS
    both.wait_idle()
