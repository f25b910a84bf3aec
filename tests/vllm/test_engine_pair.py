"""A prefill engine and a decode engine, looked at from inside: what travels, and what is left."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

from tests.vllm.harness_engine import EngineProcess, engine
from tests.vllm.test_engine_alone import BLOCK, EQUAL, apart, assert_at_rest, drawn

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

TO_KEEP = {"do_remote_decode": True, "do_remote_prefill": False}


@attrs.define
class Two:
    prefill: EngineProcess
    decode: EngineProcess

    def kept(self, tokens: list[int]) -> dict[str, Any]:
        """What prefill says of this prompt, which it keeps from now on."""
        params = self.prefill.ask(tokens, n_tokens=1, params=TO_KEEP)["params"]
        assert isinstance(params, dict)
        return params

    def asked(self, tokens: list[int], **said: Any) -> dict[str, Any]:
        return self.decode.ask(tokens, params=self.kept(tokens), **said)

    def forget(self, *tiers: str) -> None:
        self.decode.quiet()
        assert self.decode.do("reset")["is_reset"]
        self.decode.do("flush", tiers=list(tiers))
        self.decode.quiet()

    def counts(self) -> dict[str, int]:
        counts: dict[str, int] = self.decode.look()["counts"]
        return counts

    def at_rest(self) -> None:
        assert_at_rest(self.decode.quiet())
        assert_at_rest(self.prefill.quiet())


@pytest.fixture(scope="module")
def two(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    folder = tmp_path_factory.mktemp("two")
    prefill = engine("prefill", model, folder, "kv_producer", kept_s=3.0, lease_s=5.0)
    decode = engine(
        "decode",
        model,
        folder,
        "kv_consumer",
        host_bytes=64 << 20,
        storage=str(folder / "store"),
        peer_dead_s=2.0,
        driver={"cost_model": "off"},  # which source is quicker here changes from run to run
    )
    with prefill, decode:
        yield Two(prefill.wait_ready(), decode.wait_ready())


def grown(counts: dict[str, int], before: dict[str, int], name: str) -> int:
    return counts.get(name, 0) - before.get(name, 0)


def test_the_whole_prompt_comes_from_prefill(two: Two) -> None:
    tokens = drawn(1, 900)
    before = two.counts()
    answered = two.asked(tokens)
    two.at_rest()
    assert grown(two.counts(), before, "pages_received") == 8
    by_prefill = two.prefill.do("digests")["by_hash"]
    by_decode = two.decode.do("digests")["by_hash"]
    assert len(by_decode) == 7
    assert by_decode.items() <= by_prefill.items()
    two.forget("host", "storage")
    assert apart(answered, two.decode.ask(tokens)) < EQUAL


def test_one_request_is_filled_from_device_host_storage_and_prefill(two: Two) -> None:
    """What vLLM's own connectors cannot: all sources for one request, at the same time."""
    tokens = drawn(2, 1200)
    two.forget("host", "storage")
    two.asked(tokens[: 6 * BLOCK + 5])
    two.forget("host")  # storage has 6 pages
    two.decode.ask(tokens[: 4 * BLOCK + 5])  # host: 4 from storage
    two.forget()
    two.decode.ask(tokens[: 2 * BLOCK + 5])  # device: 2 from the host
    two.decode.quiet()
    before = two.counts()
    answered = two.asked(tokens)
    two.at_rest()
    after = two.counts()
    assert grown(after, before, "pages_restored/host") == 2
    assert grown(after, before, "pages_restored/storage") == 2
    assert grown(after, before, "pages_received") == 4
    two.forget("host", "storage")
    assert apart(answered, two.decode.ask(tokens)) < EQUAL


def test_a_prompt_that_nobody_asks_for_is_freed(two: Two) -> None:
    two.kept(drawn(3, 600))
    assert two.prefill.look()["n_free"] < two.prefill.look()["n_blocks"] - 1
    time.sleep(3.5)
    assert_at_rest(two.prefill.quiet())


def test_a_request_that_decode_drops_gives_its_lease_back(two: Two) -> None:
    """Long before the time that prefill would wait for it."""
    tokens = drawn(4, 900)
    two.forget("host", "storage")
    two.prefill.do("slow", what="serve", seconds=0.3)
    try:
        two.decode.send("ask", tokens=tokens, params=two.kept(tokens), name="hasty")
        for _ in range(400):
            if "WAITING_FOR_REMOTE_KVS" in str(two.decode.look()["status"]):
                break
        else:
            pytest.fail("the load never began")
        two.decode.do("abort", name="hasty")
        began = time.monotonic()
        two.at_rest()
        assert time.monotonic() - began < 3.0
    finally:
        two.prefill.do("slow", what="serve", seconds=0)


def test_all_on_the_device_gives_the_lease_back_too(two: Two) -> None:
    tokens = drawn(5, 4 * BLOCK + 1)
    first = two.asked(tokens)
    before = two.counts()
    again = two.asked(tokens)
    assert apart(first, again) < EQUAL
    began = time.monotonic()
    two.at_rest()
    assert time.monotonic() - began < 2.5, "prefill kept it until nobody came"
    assert grown(two.counts(), before, "bytes_received") == 0


def test_a_prompt_that_prefill_does_not_keep_is_computed(two: Two) -> None:
    tokens = drawn(6, 700)
    params = two.kept(tokens) | {"remote_request_id": "nobody"}
    answered = two.decode.ask(tokens, params=params)
    assert answered["reason"] == "length"
    two.forget("host", "storage")
    assert apart(answered, two.decode.ask(tokens)) < EQUAL


def test_another_prompt_under_the_same_name_is_not_believed(two: Two) -> None:
    tokens, others = drawn(7, 700), drawn(8, 700)
    two.forget("host", "storage")
    answered = two.decode.ask(others, params=two.kept(tokens))
    two.forget("host", "storage")
    assert apart(answered, two.decode.ask(others)) < EQUAL


@pytest.mark.parametrize(
    "wrong",
    [
        {"kvlift_addresses": "tcp://127.0.0.1:1"},
        {"kvlift_addresses": []},
        {"kvlift_addresses": [None, 7]},
        {"remote_request_id": 5},
        {"remote_request_id": "x" * 5000},
        {"kvlift_namespace": "00" * 32},
        {"kvlift_addresses": ["file:///etc/passwd"]},
        {"kvlift_addresses": ["tcp://127.0.0.1:1"]},
    ],
)
def test_a_word_of_the_wrong_kind_is_no_peer(two: Two, wrong: dict[str, Any]) -> None:
    tokens = drawn(9, 300)
    params = {
        "do_remote_prefill": True,
        "remote_request_id": "r",
        "kvlift_addresses": ["tcp://127.0.0.1:9"],
    }
    known = two.kept(tokens)
    answered = two.decode.ask(tokens, params={**known, **params, **wrong}, timeout_s=60)
    assert answered["reason"] == "length"


def test_prefill_that_dies_under_a_transfer_costs_nothing_but_time(two: Two) -> None:
    """Last: it takes the prefill engine away."""
    tokens = drawn(10, 1200)
    two.forget("host", "storage")
    computed = two.decode.ask(tokens)
    two.forget("host", "storage")
    two.decode.ask(tokens[: 3 * BLOCK + 1])
    two.forget()
    two.prefill.do("slow", what="serve", seconds=0.4)
    number = two.decode.send("ask", tokens=tokens, params=two.kept(tokens))
    for _ in range(400):
        if "WAITING_FOR_REMOTE_KVS" in str(two.decode.look()["status"]):
            break
    time.sleep(0.9)
    two.prefill.kill()
    answered = two.decode.answer(number)
    assert answered["reason"] == "length"
    assert apart(computed, answered) < EQUAL
    seen = two.decode.quiet()
    assert seen["counts"]["loads_short"] >= 1
    assert_at_rest(seen)
    # Nobody is there any more: the next one does without from the start.
    assert two.decode.ask(drawn(11, 300))["reason"] == "length"
