"""One engine with host and storage tiers, looked at from inside: bytes of blocks, leases, leaks."""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.harness_engine import EngineProcess, engine

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

BLOCK = 128
EQUAL = 1e-4


def drawn(seed: int, n_tokens: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(3, 1000) for _ in range(n_tokens)]


def apart(one: dict[str, Any], other: dict[str, Any]) -> float:
    """How far two answers are from each other; equal tokens alone would prove little."""
    if one["tokens"] != other["tokens"]:
        return float("inf")
    pairs = zip(one["logprobs"], other["logprobs"], strict=True)
    return float(max(abs(a - b) for a, b in pairs))


def assert_at_rest(seen: dict[str, Any], n_host: int | None = None) -> None:
    """The block pool is back to its size, and nothing in kvlift holds or waits."""
    assert seen["n_free"] == seen["n_blocks"] - 1, seen  # vLLM's null block is never free
    kvlift = dict(seen["kvlift"])
    host_live, n_in_index = kvlift.pop("host_live"), kvlift.pop("n_host")
    assert not any(kvlift.values()), seen
    assert host_live == n_in_index, seen
    if n_host is not None:
        assert n_in_index == n_host, seen


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engine") / "store"


@pytest.fixture(scope="module")
def one(model: Path, store: Path) -> Iterator[EngineProcess]:
    single = engine("one", model, store.parent, "kv_both", host_bytes=64 << 20, storage=str(store))
    single.options = {"num_gpu_blocks_override": 24, "max_model_len": 2048}
    with single:
        yield single.wait_ready()


def pages_of(store: Path) -> list[Path]:
    return [path for path in store.rglob("*") if path.is_file() and path.stat().st_size > 100_000]


def forgotten(one: EngineProcess, *tiers: str) -> None:
    one.quiet()
    assert one.do("reset")["is_reset"]
    one.do("flush", tiers=list(tiers))
    one.quiet()


def damage(paths: Sequence[Path]) -> None:
    for path in paths:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 0xFF
        path.write_bytes(content)


def test_the_host_gives_blocks_back_bit_by_bit(one: EngineProcess) -> None:
    tokens = drawn(1, 900)
    computed = one.ask(tokens)
    assert computed["n_cached"] == 0
    one.quiet()
    before = one.do("digests")["by_hash"]
    assert len(before) == 7
    assert one.do("reset")["is_reset"]
    assert one.do("digests")["by_hash"] == {}

    loaded = one.ask(tokens)
    assert loaded["n_cached"] == 7 * BLOCK
    assert apart(computed, loaded) < EQUAL
    seen = one.quiet()
    assert one.do("digests")["by_hash"] == before
    assert seen["counts"]["pages_restored/host"] == 7
    assert_at_rest(seen, n_host=7)


def test_storage_gives_blocks_back_bit_by_bit(one: EngineProcess) -> None:
    tokens = drawn(2, 900)
    computed = one.ask(tokens)
    one.quiet()
    before = one.do("digests")["by_hash"]
    n_before = one.look()["counts"].get("pages_restored/storage", 0)
    forgotten(one, "host")

    loaded = one.ask(tokens)
    assert loaded["n_cached"] == 7 * BLOCK
    assert apart(computed, loaded) < EQUAL
    seen = one.quiet()
    assert one.do("digests")["by_hash"].items() <= before.items()
    assert seen["counts"]["pages_restored/storage"] == n_before + 7
    assert_at_rest(seen)


def test_a_block_that_was_damaged_on_the_device_is_seen(one: EngineProcess) -> None:
    """The negative control: without it, equal answers would prove nothing."""
    tokens = drawn(3, 700)
    forgotten(one)
    computed = one.ask(tokens)
    one.quiet()
    before = one.do("digests")["by_hash"]
    one.do("damage", at=2)
    assert one.do("digests")["by_hash"] != before
    assert apart(computed, one.ask(tokens)) > 10 * EQUAL
    forgotten(one)
    assert apart(computed, one.ask(tokens)) < EQUAL


def test_output_pages_are_found_again(one: EngineProcess) -> None:
    tokens = drawn(4, 250)
    first = one.ask(tokens, n_tokens=140)
    forgotten(one)
    longer = tokens + first["tokens"]
    second = one.ask(longer)
    assert second["n_cached"] == 3 * BLOCK  # 250 + 139 tokens have KV
    forgotten(one, "host", "storage")
    assert apart(second, one.ask(longer)) < EQUAL


def test_a_damaged_page_in_storage_is_computed_again(one: EngineProcess, store: Path) -> None:
    tokens = drawn(5, 900)
    forgotten(one, "host", "storage")
    computed = one.ask(tokens)
    forgotten(one, "host")
    assert len(pages_of(store)) == 7
    damage(sorted(pages_of(store), key=lambda path: path.stat().st_mtime_ns)[3:4])

    n_short = one.look()["counts"].get("loads_short", 0)
    answered = one.ask(tokens)
    assert answered["reason"] == "length"
    assert apart(computed, answered) < EQUAL
    seen = one.quiet()
    assert seen["counts"]["loads_short"] == n_short + 1
    assert_at_rest(seen)


def test_when_every_page_is_damaged_all_is_computed(one: EngineProcess, store: Path) -> None:
    tokens = drawn(6, 900)
    forgotten(one, "host", "storage")
    computed = one.ask(tokens)
    forgotten(one, "host")
    damage(pages_of(store))
    assert apart(computed, one.ask(tokens)) < EQUAL
    assert_at_rest(one.quiet())


def test_an_abort_during_a_load_leaks_nothing(one: EngineProcess) -> None:
    tokens = drawn(7, 900)
    computed = one.ask(tokens)
    forgotten(one)
    one.do("slow", what="restore", seconds=0.2)
    try:
        one.send("ask", tokens=tokens, name="hasty")
        for _ in range(200):
            if "WAITING_FOR_REMOTE_KVS" in str(one.look()["status"]):
                break
        else:
            pytest.fail("the load never began")
        one.do("abort", name="hasty")
        seen = one.look()
        assert seen["n_free"] < seen["n_blocks"] - 1, "blocks went back under a running copy"
        assert_at_rest(one.quiet())
    finally:
        one.do("slow", what="restore", seconds=0)
    assert apart(computed, one.ask(tokens)) < EQUAL


def test_preemption_under_a_full_cache_changes_no_answer(one: EngineProcess) -> None:
    """Five requests of up to 7 blocks in a pool of 23: vLLM preempts and asks again."""
    prompts = [drawn(20 + n, 500 + 10 * n) for n in range(5)]
    forgotten(one, "host", "storage")
    alone = [one.ask(tokens, n_tokens=300) for tokens in prompts]
    forgotten(one, "host", "storage")
    numbers = [one.send("ask", tokens=tokens, n_tokens=300) for tokens in prompts]
    most = 0
    answers = []
    for number in numbers:
        while number not in one.answered():
            most = max(most, one.look()["n_preempted"])
        answers.append(one.answer(number))
    assert most > 0, "nothing was preempted: the test proves nothing"
    assert all(answer["reason"] == "length" for answer in answers)
    assert max(map(apart, alone, answers)) < EQUAL
    assert_at_rest(one.quiet())


def test_two_salts_never_meet(one: EngineProcess) -> None:
    tokens = drawn(8, 700)
    one.ask(tokens, salt="ours")
    forgotten(one)
    assert one.ask(tokens, salt="theirs")["n_cached"] == 0
    forgotten(one)
    assert one.ask(tokens, salt="ours")["n_cached"] == 5 * BLOCK


def test_the_storage_folder_may_vanish(one: EngineProcess, store: Path) -> None:
    tokens = drawn(9, 900)
    computed = one.ask(tokens)
    forgotten(one, "host")
    store.rename(store.with_name("elsewhere"))
    answered = one.ask(tokens)
    assert answered["reason"] == "length"
    assert apart(computed, answered) < EQUAL
    assert one.ask(drawn(10, 700))["reason"] == "length"
    assert_at_rest(one.quiet())
