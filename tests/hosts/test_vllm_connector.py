"""kvlift in vLLM, with a double of the engine: every byte that a request stands on is compared."""

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvlift.cli.main import main
from kvlift.core.invariants import breaches
from kvlift.core.tier import Tier
from kvlift.runtime.config import ConfigError
from tests.hosts.vllm_double import BLOCK, PAGE_BYTES, Engine, Request
from tests.hosts.vllm_stand_in import CacheHitSource, connector_class

TO_KEEP = {"do_remote_decode": True, "do_remote_prefill": False}

Make = Callable[..., Engine]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Make]:
    made: list[Engine] = []
    known = connector_class(monkeypatch)

    def one(role: str = "kv_both", **named: Any) -> Engine:
        sizes = {name: named.pop(name) for name in ("n_blocks", "n_ranks") if name in named}
        extra: dict[str, Any] = {} if role == "kv_producer" else {"host_bytes": 40 * PAGE_BYTES}
        engine = Engine(known, role, {**extra, **named}, name=f"{len(made)}", **sizes)
        made.append(engine)
        return engine

    yield one
    for engine in made:
        engine.close()


def drawn(seed: int, n_tokens: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(1000) for _ in range(n_tokens)]


def run(*engines: Engine, until: Callable[[], bool] | None = None) -> None:
    """Step until nobody has anything to do, or until it is so."""
    deadline = time.monotonic() + 20
    while True:
        if until is not None and until():
            return
        busy = [engine for engine in engines if engine.has_requests()]
        if not busy and until is None:
            return
        for engine in engines if until else busy:
            engine.step()
            core = engine.connector._scheduler.core
            assert breaches(core.state.agreed) == ()
        if time.monotonic() > deadline:
            raise AssertionError([(r.request_id, r.status) for e in engines for r in e.waiting])
        time.sleep(0.0005)


def asked(engine: Engine, tokens: list[int], name: str = "", **said: Any) -> Request:
    named = name or f"r{random.random()}"
    return engine.add(Request(named, tokens, said.pop("max_tokens", 3), **said))


def answered(engine: Engine, tokens: list[int], **said: Any) -> Request:
    """A request from its beginning to the end of everything it caused."""
    request = asked(engine, tokens, **said)
    run(engine)
    assert request.answer is not None
    return request


def assert_at_rest(engine: Engine) -> None:
    assert len(engine.pool.free) == len(engine.pool.blocks) - 1
    agreed = engine.connector._scheduler.core.state.agreed
    assert not agreed.requests
    assert not agreed.tickets
    assert agreed.ledger.device_live == 0
    assert agreed.ledger.host_live == agreed.index.n_host
    assert all(not segment.host_pins for segment in agreed.index.segments.values())
    side = engine.connector._scheduler
    assert not [*side._loads, *side._tracked, *side._draining, *side._given_back]


def forget(engine: Engine, *tiers: Tier) -> None:
    assert engine.pool.reset()
    engine.connector._scheduler.core.flush(tiers)
    run(engine)


def files(folder: Path) -> list[Path]:
    """Finished pages; one that is being written may be renamed at any moment."""
    found = []
    for path in folder.rglob("*.page"):
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_size > 300:
                found.append(path)
    return found


def test_the_host_gives_a_prompt_back(make: Make) -> None:
    engine, tokens = make(), drawn(1, 30)
    first = answered(engine, tokens)
    forget(engine)
    second = answered(engine, tokens)
    assert second.n_external == 7 * BLOCK
    assert second.output == first.output
    assert engine.stats["pages_restored/host"] == 7
    assert_at_rest(engine)


def test_storage_gives_a_prompt_back_to_another_engine(make: Make, tmp_path: Path) -> None:
    tokens, store = drawn(1, 30), tmp_path / "store"
    first = answered(make(storage=str(store)), tokens)
    other = make(storage=str(store))
    second = answered(other, tokens)
    assert second.n_external == 7 * BLOCK
    assert second.output == first.output
    assert other.stats["pages_restored/storage"] == 7
    assert_at_rest(other)


def test_two_ranks_keep_their_shards_apart(make: Make, tmp_path: Path) -> None:
    tokens, store = drawn(1, 30), tmp_path / "store"
    engine = make(storage=str(store), n_ranks=2)
    answered(engine, tokens)
    assert len(files(store)) == 16  # 30 tokens and 2 of the answer have KV
    forget(engine, Tier.HOST)
    second = answered(engine, tokens)
    assert second.n_external == 7 * BLOCK
    assert_at_rest(engine)


def test_one_engine_of_two_ranks_and_one_of_one_never_share_a_page(
    make: Make, tmp_path: Path
) -> None:
    tokens, store = drawn(1, 30), tmp_path / "store"
    answered(make(storage=str(store), n_ranks=2), tokens)
    assert answered(make(storage=str(store)), tokens).n_external == 0


def test_one_token_is_left_to_compute(make: Make) -> None:
    engine, tokens = make(), drawn(1, 8 * BLOCK)
    answered(engine, tokens, max_tokens=1)
    forget(engine)
    assert answered(engine, tokens, max_tokens=1).n_external == 7 * BLOCK


def test_the_device_hit_is_not_loaded_again(make: Make) -> None:
    engine, tokens = make(), drawn(1, 40)
    answered(engine, tokens)
    forget(engine)
    answered(engine, tokens[:17])
    assert answered(engine, tokens).n_external == 5 * BLOCK
    assert_at_rest(engine)


def test_output_is_found_again_by_the_next_turn(make: Make) -> None:
    engine, tokens = make(), drawn(1, 21)
    first = answered(engine, tokens, max_tokens=12)
    forget(engine)
    second = answered(engine, tokens + first.output + drawn(2, 6))
    assert second.n_external == 8 * BLOCK  # 21 + 11 tokens have KV


def test_salts_never_meet(make: Make, tmp_path: Path) -> None:
    engine, tokens = make(storage=str(tmp_path / "store")), drawn(1, 30)
    answered(engine, tokens, cache_salt="ours")
    forget(engine)
    assert answered(engine, tokens, cache_salt="theirs").n_external == 0
    assert answered(engine, tokens).n_external == 0
    forget(engine)
    assert answered(engine, tokens, cache_salt="ours").n_external == 7 * BLOCK


@pytest.mark.parametrize("at", [0, 3, 6])
def test_a_damaged_page_in_storage_is_computed_again(make: Make, tmp_path: Path, at: int) -> None:
    store = tmp_path / "store"
    engine, tokens = make(storage=str(store)), drawn(1, 30)
    answered(engine, tokens)
    forget(engine, Tier.HOST)
    path = sorted(files(store), key=lambda path: path.stat().st_mtime_ns)[at]
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    answered(engine, tokens)
    assert engine.stats["loads_short"] >= 1
    assert_at_rest(engine)


def test_a_wrong_byte_is_seen_by_the_oracle(make: Make) -> None:
    engine, tokens = make(), drawn(1, 30)
    answered(engine, tokens)
    forget(engine)
    worker = engine.workers[0]
    pool = worker.connector._worker._pool
    pool.page_view(next(iter(range(pool.n_pages))))[3] ^= 1
    with pytest.raises(AssertionError, match="is wrong"):
        answered(engine, tokens)


def test_an_abort_during_a_load_gives_every_block_back(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvlift.effects.copies_cpu import CpuCopies

    engine, tokens = make(), drawn(1, 30)
    answered(engine, tokens)
    forget(engine)
    copy_page = CpuCopies._copy_page

    def slow(self: CpuCopies, *args: Any) -> None:
        time.sleep(0.02)
        copy_page(self, *args)

    monkeypatch.setattr(CpuCopies, "_copy_page", slow)
    request = asked(engine, tokens)
    run(engine, until=lambda: request.n_external > 0)
    engine.step()
    engine.abort(request.request_id)
    engine.step()
    assert len(engine.pool.free) < len(engine.pool.blocks) - 1
    run(engine)
    assert_at_rest(engine)


def test_preemption_changes_nothing(make: Make) -> None:
    engine = make(n_blocks=30)
    requests = [asked(engine, drawn(n, 20), max_tokens=30) for n in range(4)]
    run(engine)
    assert engine.n_preempted > 0
    assert all(len(request.output) == 30 for request in requests)
    assert_at_rest(engine)


def test_a_lease_without_blocks_is_given_back(make: Make) -> None:
    engine, tokens = make(n_blocks=20, unplaced_steps_max=30), drawn(1, 30)
    answered(engine, tokens)
    forget(engine)
    others = [asked(engine, drawn(9, 60), max_tokens=1, name=f"o{n}") for n in range(1)]
    engine.pool.touch(list(engine.pool.free)[:4])
    held = [block for block in engine.pool.blocks[1:] if block.ref_cnt]
    request = asked(engine, tokens)
    core = engine.connector._scheduler.core

    def n_pins() -> int:
        return sum(s.host_pins for s in core.state.agreed.index.segments.values())

    pins = set()
    for _ in range(200):
        engine.step()
        pins.add(n_pins() > 0)
        time.sleep(0.0005)
    assert pins == {True, False}, "the lease was never taken, or never given back"
    engine.pool.free_blocks(held)
    run(engine)
    assert request.answer is not None
    assert all(other.answer is not None for other in others)
    assert_at_rest(engine)


# A prefill engine and a decode engine.


def kept(prefill: Engine, tokens: list[int]) -> dict[str, Any]:
    request = asked(prefill, tokens, max_tokens=1, kv_transfer_params=dict(TO_KEEP))
    run(prefill, until=lambda: request.answer is not None)
    prefill.step()
    assert request.answer is not None
    params: dict[str, Any] = request.answer["params"]
    return params


@pytest.mark.parametrize("n_ranks", [1, 2])
def test_only_the_suffix_travels(make: Make, n_ranks: int) -> None:
    prefill = make("kv_producer", n_ranks=n_ranks)
    decode = make("kv_consumer", n_ranks=n_ranks)
    tokens = drawn(1, 40)
    first = asked(decode, tokens[:21], kv_transfer_params=kept(prefill, tokens[:21]))
    run(prefill, decode)
    assert first.n_external == 20
    assert decode.stats["pages_received"] == 5
    forget(decode)
    answered(decode, tokens[:9])  # two pages on the device
    second = asked(decode, tokens, kv_transfer_params=kept(prefill, tokens))
    run(prefill, decode)
    assert second.n_external == 39 - 8
    assert decode.stats["pages_received"] == 5 + 5
    assert decode.stats["bytes_received"] == 10 * PAGE_BYTES * n_ranks
    assert_at_rest(prefill)
    assert_at_rest(decode)


def test_a_prompt_that_is_kept_under_another_salt_is_not_given(make: Make) -> None:
    """A client that has two names for a prompt claims, of one, that it is the other's."""
    prefill, decode = make("kv_producer"), make("kv_consumer")
    tokens = drawn(1, 40)
    salted = asked(prefill, tokens, max_tokens=1, cache_salt="x", kv_transfer_params=dict(TO_KEEP))
    run(prefill, until=lambda: salted.answer is not None)
    prefill.step()
    assert salted.answer is not None
    plain = kept(prefill, tokens)
    forged = salted.answer["params"] | {"kvlift_namespace": plain["kvlift_namespace"]}
    victim = asked(decode, tokens, kv_transfer_params=forged)
    run(decode)
    assert victim.answer is not None
    assert not decode.stats.get("pages_received")
    assert_at_rest(decode)


def test_hits_are_told_by_tier(make: Make) -> None:
    prefill, decode = make("kv_producer"), make("kv_consumer")
    tokens = drawn(1, 40)
    answered(decode, tokens[:21])
    forget(decode)
    told: list[dict[CacheHitSource, int]] = []
    known = decode.connector.get_external_cache_hit_sources

    def listened(*args: Any) -> dict[CacheHitSource, int]:
        told.append(known(*args))
        return told[-1]

    decode.connector.get_external_cache_hit_sources = listened
    asked(decode, tokens, kv_transfer_params=kept(prefill, tokens))
    run(prefill, decode)
    assert told == [{CacheHitSource.HOST: 20, CacheHitSource.P2P: 19}]


def test_prefill_that_falls_silent_after_the_promise_is_done_without(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvlift.runtime.hosts.vllm_prefill import KeptPrompts

    prefill, decode = make("kv_producer"), make("kv_consumer", peer_dead_s=0.4)
    tokens, may_go_on, is_there = drawn(1, 40), threading.Event(), threading.Event()
    page_bytes_for = KeptPrompts.page_bytes_for

    def stuck(self: KeptPrompts, rid: Any, position: int, *args: int) -> bytearray:
        if position == 4:
            is_there.set()
            may_go_on.wait(15)
        return page_bytes_for(self, rid, position, *args)

    monkeypatch.setattr(KeptPrompts, "page_bytes_for", stuck)
    request = asked(decode, tokens, kv_transfer_params=kept(prefill, tokens))
    run(decode, until=is_there.is_set)
    run(decode)
    may_go_on.set()
    assert request.answer is not None
    assert decode.stats["loads_short"] == 1
    assert_at_rest(decode)


def test_a_dropped_request_gives_its_lease_back(make: Make) -> None:
    prefill, decode = make("kv_producer"), make("kv_consumer")
    tokens = drawn(1, 40)
    for n, n_steps in enumerate((0, 1, 2, 3, 5, 8)):
        request = asked(decode, tokens, f"r{n}", kv_transfer_params=kept(prefill, tokens))
        for _ in range(n_steps):
            decode.step()
        decode.abort(request.request_id)
        began = time.monotonic()
        run(prefill, decode)
        assert time.monotonic() - began < 5
        assert_at_rest(prefill)
        assert_at_rest(decode)


def test_a_prompt_that_nobody_wants_is_freed_in_time(make: Make) -> None:
    prefill = make("kv_producer", kept_s=0.2)
    kept(prefill, drawn(1, 40))
    assert len(prefill.pool.free) < len(prefill.pool.blocks) - 1
    run(prefill)
    assert_at_rest(prefill)


def test_a_peer_of_another_scale_is_refused_and_the_prompt_computed(make: Make) -> None:
    prefill, decode = make("kv_producer"), make("kv_consumer", n_ranks=2, peer_dead_s=0.5)
    tokens = drawn(1, 40)
    request = asked(decode, tokens, kv_transfer_params=kept(prefill, tokens))
    run(decode)
    assert request.answer is not None
    assert request.n_external == 0
    assert_at_rest(decode)


def test_a_journal_of_what_was_decided_can_be_replayed(make: Make, tmp_path: Path) -> None:
    path, tokens = tmp_path / "journal", drawn(1, 30)
    engine = make(driver={"journal": "file", "journal_path": str(path)})
    answered(engine, tokens)
    forget(engine)
    answered(engine, tokens)
    engine.close()
    engine.connector.shutdown()
    assert main(["replay", str(path)]) == 0


# What is refused, and what is said.


def test_an_unknown_key_is_named(make: Make) -> None:
    with pytest.raises(ConfigError, match="did you mean 'host_bytes'"):
        make(host_byte=1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("host_bytes", "many"),
        ("host_bytes", -1),
        ("lease_s", 0),
        ("driver", ["prefetch"]),
        ("driver", {"page_tokens": 16}),
        ("driver", {"no_such": 1}),
        ("secret_file", "/no/such/file"),
        ("storage", 5),
    ],
)
def test_a_value_that_cannot_be_is_refused(make: Make, name: str, value: object) -> None:
    with pytest.raises(ConfigError):
        make(**{name: value})


def test_every_metric_has_its_name_and_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    import prometheus_client

    known = connector_class(monkeypatch)
    registry = prometheus_client.CollectorRegistry()

    def made(kind: Any) -> Callable[..., Any]:
        return lambda **named: kind(registry=registry, **named)

    kinds = {kind: made(kind) for kind in (prometheus_client.Counter, prometheus_client.Gauge)}
    metrics = known.build_prom_metrics(None, kinds, ["engine"], {0: ["0"]})
    metrics.observe({"pages_restored/host": 3, "bytes_received": 7, "leases": 2, "unknown": 1})
    text = prometheus_client.generate_latest(registry).decode()
    assert 'vllm:kvlift_pages_restored_total{engine="0",tier="host"} 3.0' in text
    assert 'vllm:kvlift_bytes_received_total{engine="0"} 7.0' in text
    assert 'vllm:kvlift_leases{engine="0"} 2.0' in text


def test_a_name_that_is_used_again_at_once_is_another_request(make: Make) -> None:
    engine, tokens = make(), drawn(1, 30)
    answered(engine, tokens)
    forget(engine)
    asked(engine, tokens, name="r")
    engine.step()
    engine.abort("r")
    again = asked(engine, tokens, name="r")
    run(engine)
    assert again.answer is not None
    assert again.n_external == 7 * BLOCK
    assert_at_rest(engine)


def test_more_requests_than_kvlift_takes_are_computed(make: Make) -> None:
    engine, prompts = make(driver={"requests_max": 2}), [drawn(n, 30) for n in range(6)]
    for tokens in prompts:
        answered(engine, tokens)
    forget(engine)
    all_of_them = [asked(engine, tokens) for tokens in prompts]
    run(engine)
    assert all(request.answer is not None for request in all_of_them)
    assert any(request.n_external for request in all_of_them)
    assert_at_rest(engine)
