"""Things go wrong between real processes: no wrong number, no leaked block, no failed request."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vllm import harness_faults as faults
from tests.vllm.conftest import Reference
from tests.vllm.harness import Sizes, running
from tests.vllm.harness_client import TOLERANCE, Client, Script, difference
from tests.vllm.harness_faults import BLOCK_BYTES, RECEIVED, pages_in, storage_of
from tests.vllm.harness_pairs import EAGER, Pair, kvlift_pair, wait_written

pytestmark = [pytest.mark.vllm, pytest.mark.real, pytest.mark.timeout(900)]


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
    faults.no_block_is_held(pair)


def test_a_damaged_page_in_storage_is_asked_of_prefill(pair: Pair, reference: Reference) -> None:
    script = Script.drawn(21, n_turns=2, n_first=900)
    expected = reference(script)
    client = Client(pair.proxy.url)
    script.play(client, expected)
    pair.decode.wait_idle()
    wait_written(storage_of(pair))
    pair.decode.stop()
    pages = pages_in(storage_of(pair), BLOCK_BYTES)
    assert pages, "the conversation was written to storage"
    for path in pages:
        faults.damage(path)
    pair.decode.start().wait_ready()
    again = client.complete(script.prompt(1, expected), script.n_answer)
    assert difference(again, expected[1]) < TOLERANCE
    assert pair.decode.counter(RECEIVED) > 0


def test_an_abort_during_a_load_gives_every_block_back(pair: Pair, reference: Reference) -> None:
    faults.abort_during_a_load(pair, Script.drawn(22, n_turns=1, n_first=1200), reference)


def test_preemption_under_a_full_cache_changes_no_answer(pair: Pair, reference: Reference) -> None:
    """Four requests of 8 blocks fit; with what they generate they do not."""
    scripts = [Script.drawn(30 + it, n_turns=1, n_first=1000, n_answer=300) for it in range(5)]
    faults.preemption(pair, scripts, reference)


def test_prefill_that_was_silent_for_a_moment_is_waited_for(
    pair: Pair, reference: Reference
) -> None:
    faults.silence(pair, Script.drawn(23, n_turns=1, n_first=1100), reference)


def test_a_request_without_prefill_is_computed_by_decode(pair: Pair, reference: Reference) -> None:
    script = Script.drawn(24, n_turns=1)
    answer = Client(pair.decode.url).complete(script.turns[0], script.n_answer)
    assert difference(answer, reference(script)[0]) < TOLERANCE


def test_prefill_that_dies_after_its_promise_costs_time_and_nothing_else(
    pair: Pair, reference: Reference
) -> None:
    """Last but one in this file: there is no prefill instance any more."""
    faults.death_after_the_promise(pair, Script.drawn(25, n_turns=1, n_first=1100), reference)


def test_the_proxy_goes_on_without_prefill(pair: Pair, reference: Reference) -> None:
    faults.life_without_prefill(pair, Script.drawn(26, n_turns=2), reference)
