"""Faults of a pair with tensor parallel 2: whatever one rank meets, both come to the same."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vllm import harness_faults as faults
from tests.vllm.conftest import Reference
from tests.vllm.harness import BLOCK_TOKENS, Sizes, running
from tests.vllm.harness_client import TOLERANCE, Client, Script, difference
from tests.vllm.harness_faults import BLOCK_BYTES, FROM_STORAGE, RECEIVED, SHORT
from tests.vllm.harness_pairs import EAGER, Pair, kvlift_pair

pytestmark = [pytest.mark.vllm, pytest.mark.real, pytest.mark.timeout(1200)]

N_RANKS = 2
N_HOST = 24
"""Pages of the host tier: less than two long prompts, so older ones are on storage only."""

PEER_DEAD_S = 20.0
"""Six processes of two engines share two cores: what lives may not get to speak for seconds."""

KEPT_S = 120.0
"""So long prefill keeps a prompt whose decode instance has given it up and says nothing."""


@pytest.fixture(scope="module")
def pair(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """One for the whole file; decode has room for 40 blocks, prefill for 128."""
    folder = tmp_path_factory.mktemp("tp-faults")
    prefill = Sizes(model, max_len=2048, n_blocks=128, n_ranks=N_RANKS)
    decode = Sizes(model, max_len=2048, n_blocks=40, n_ranks=N_RANKS)
    found = kvlift_pair(
        prefill,
        decode,
        folder,
        name="tp-faults",
        host_bytes=N_HOST * BLOCK_BYTES // N_RANKS,
        storage=str(folder / "kv"),
        peer_dead_s=PEER_DEAD_S,
        driver=EAGER,
    )
    with running(*found.processes):
        yield found


@pytest.fixture(autouse=True)
def _nothing_leaks(pair: Pair) -> Iterator[None]:
    yield
    faults.no_block_is_held(pair, KEPT_S + 30)


def digests(pair: Pair) -> list[set[str]]:
    """What lies in decode's blocks, by rank."""
    return [set(pair.decode.blocks(rank).values()) for rank in range(N_RANKS)]


def counted(pair: Pair, name: str, least: float, timeout_s: float = 10.0) -> dict[str, float]:
    """Decode's counters, with what its workers say in a step after the answer's last one."""
    deadline_s = time.monotonic() + timeout_s
    while (counters := pair.decode.counters()).get(name, 0.0) < least:
        if time.monotonic() > deadline_s:
            break
        time.sleep(0.2)
    return counters


def test_a_page_that_one_rank_cannot_read_is_asked_of_prefill_by_both(
    pair: Pair, reference: Reference
) -> None:
    """One page of seven, on one rank: damaged on the first, damaged on the second, gone."""
    scripts = [
        Script.drawn(seed, n_turns=2, n_first=4 * BLOCK_TOKENS, n_next=464) for seed in (71, 72, 73)
    ]
    files, blocks = [], []
    for script in scripts:
        old = digests(pair)
        faults.written(pair, script, 0, reference, 4, N_RANKS)
        files.append(faults.written(pair, script, 1, reference, 3, N_RANKS))
        blocks.append([new - old[rank] for rank, new in enumerate(digests(pair))])
    faults.pushed_out_of_host(pair, (74, 75, 76))
    faults.damage(files[0][0][1])
    faults.damage(files[1][1][1])
    files[2][1][1].unlink()
    client = Client(pair.proxy.url)
    for script, on_device in zip(scripts, blocks, strict=True):
        before = pair.decode.counters()
        answer = client.complete(script.prompt(1, reference(script)), script.n_answer)
        assert difference(answer, reference(script)[1]) < TOLERANCE
        after = counted(pair, RECEIVED, before[RECEIVED] + 2 * BLOCK_BYTES)
        new = {name: n - before.get(name, 0.0) for name, n in after.items() if "kvlift" in name}
        received = new[RECEIVED]
        assert received >= 2 * BLOCK_BYTES, f"the page, and the one that is not full: {new}"
        assert received % BLOCK_BYTES == 0, "as many pages in all as for whole blocks"
        restored = after[FROM_STORAGE] - before.get(FROM_STORAGE, 0.0)
        assert restored >= 4, "storage gave what both ranks could read"
        for mine, known in zip(digests(pair), on_device, strict=True):
            assert len(known & mine) >= 7, "the blocks of before, bit by bit"


def test_an_abort_during_a_load_gives_the_blocks_of_both_ranks_back(
    pair: Pair, reference: Reference
) -> None:
    faults.abort_during_a_load(pair, Script.drawn(77, n_turns=1, n_first=1200), reference)


def test_preemption_under_a_full_cache_changes_no_answer_of_two_ranks(
    pair: Pair, reference: Reference
) -> None:
    scripts = [Script.drawn(80 + it, n_turns=1, n_first=1000, n_answer=300) for it in range(5)]
    faults.preemption(pair, scripts, reference)


@pytest.mark.parametrize("rank", [None, 0, 1], ids=["all", "rank-0", "rank-1"])
def test_prefill_ranks_that_were_silent_for_a_moment_are_waited_for(
    pair: Pair, reference: Reference, rank: int | None
) -> None:
    script = Script.drawn(85 + (2 if rank is None else rank), n_turns=1, n_first=1100)
    faults.silence(pair, script, reference, rank)


def test_the_storage_folder_of_two_ranks_may_vanish(pair: Pair, reference: Reference) -> None:
    """From here on nobody writes into that folder again."""
    script = Script.drawn(90, n_turns=3, n_first=1000)
    expected = reference(script)
    client = Client(pair.proxy.url)
    faults.written(pair, script, 0, reference, 7, N_RANKS)
    faults.pushed_out_of_host(pair, (91, 92))
    faults.vanished(pair)
    before = pair.decode.counters()
    answers = script.play(client, expected)
    after = pair.decode.counters()
    received = after[RECEIVED] - before[RECEIVED]
    n_short = after.get(SHORT, 0.0) - before.get(SHORT, 0.0)
    assert received >= 7 * BLOCK_BYTES or n_short, "prefill gave the first prompt, or decode did"
    assert after.get(FROM_STORAGE, 0.0) == before.get(FROM_STORAGE, 0.0)
    assert faults.worst(answers, expected) < TOLERANCE


def test_a_rank_of_prefill_that_stays_silent_is_done_without_by_both(
    pair: Pair, reference: Reference
) -> None:
    """Longer than decode waits for a peer: rank 0 gets its pages, rank 1 never does."""
    script = Script.drawn(93, n_turns=1, n_first=1100)
    faults.silence(pair, script, reference, 1, for_s=PEER_DEAD_S + 4)


def test_prefill_of_two_ranks_that_dies_after_its_promise_costs_time_and_nothing_else(
    pair: Pair, reference: Reference
) -> None:
    """Last but one in this file: there is no prefill instance any more."""
    faults.death_after_the_promise(pair, Script.drawn(94, n_turns=1, n_first=1100), reference)


def test_the_proxy_goes_on_without_prefill_of_two_ranks(pair: Pair, reference: Reference) -> None:
    faults.life_without_prefill(pair, Script.drawn(95, n_turns=2), reference)
