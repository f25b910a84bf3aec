"""The metrics of a driver: what they count, and that the manual lists them all."""

import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvlift.core.prompt import token_bytes
from kvlift.core.tier import Tier
from kvlift.runtime import metrics as metrics_module
from kvlift.runtime.config import Config
from kvlift.runtime.metrics import Metrics, NoMetrics, metrics_for
from kvlift.runtime.metrics_table import METRICS, manual
from kvlift.testing.sim_memory import Mode
from kvlift.testing.sim_operation import Kind
from tests.runtime.journal_world import FIELDS, TICK_NS, JournalWorld, prompt_of
from tests.source import ROOT


def world_with_metrics(n_ranks: int = 1, **fields: object) -> tuple[JournalWorld, Metrics]:
    metrics = Metrics(Config.parse({**FIELDS, **fields}), rank=0)
    return JournalWorld(n_ranks, fields, more=(metrics,)), metrics


def samples(metrics: Metrics) -> dict[str, float]:
    """`name{label="value"}` without the rank."""
    found = {}
    for family in text_string_to_metric_families(metrics.exposition().decode()):
        for sample in family.samples:
            labels = {k: v for k, v in sorted(sample.labels.items()) if k != "rank"}
            inside = ",".join(f"{k}={v}" for k, v in labels.items())
            found[f"{sample.name}{{{inside}}}" if inside else sample.name] = sample.value
    return found


def test_the_manual_lists_exactly_the_metrics_of_the_registry() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    assert manual() in text
    in_manual = set(re.findall(r"^\| `(kvlift_\w+)`", text, re.MULTILINE))
    registry = Metrics(Config.parse(FIELDS), rank=0).registry
    in_registry = set()
    for family in registry.collect():
        is_counter = family.type == "counter"
        in_registry.add(f"{family.name}_total" if is_counter else family.name)
    assert in_manual == in_registry == {spec.name for spec in METRICS}


def test_a_life_is_counted_by_tier() -> None:
    world, metrics = world_with_metrics(n_ranks=2)
    world.live("A", prompt_of(16))
    world.call("flush", [Tier.DEVICE, Tier.HOST])
    world.tick()
    world.live("B", prompt_of(22))
    seen = samples(metrics)
    assert seen["kvlift_tokens_promised_total{tier=storage}"] == 16
    assert seen["kvlift_tokens_restored_total{tier=storage}"] == 16
    assert seen["kvlift_tokens_received_total"] == 16 + 6
    assert seen["kvlift_requests_ended_total{cause=none,outcome=done}"] == 2
    assert seen["kvlift_calls_total{call=Submit}"] == 2
    assert seen["kvlift_ticks_total"] == world.drivers[0].snapshot().tick
    assert seen["kvlift_tick_seconds_count"] == seen["kvlift_ticks_total"]
    assert seen["kvlift_ballot_wait_seconds_count"] == seen["kvlift_ballots_total"]
    assert 0 < seen["kvlift_ballots_total"] < seen["kvlift_ticks_total"]
    world.close()


def test_gauges_are_those_of_the_snapshot() -> None:
    world, metrics = world_with_metrics()
    world.live("A", prompt_of(16))
    world.submit("B", prompt_of(20))
    world.tick(8)
    seen, snapshot = samples(metrics), world.drivers[0].snapshot()
    for state in ("free", "cached", "owned", "reserved", "draining"):
        assert seen[f"kvlift_pages{{state={state},tier=device}}"] == getattr(snapshot.device, state)
        assert seen[f"kvlift_pages{{state={state},tier=host}}"] == getattr(snapshot.host, state)
    assert seen["kvlift_requests{phase=ready}"] == 1
    assert seen["kvlift_requests{phase=running}"] == 0
    world.close()


def test_tokens_that_a_damaged_read_loses_are_counted_with_their_cause() -> None:
    world, metrics = world_with_metrics()
    world.live("A", prompt_of(16))
    world.call("flush", [Tier.DEVICE, Tier.HOST])
    world.tick()
    rank = world.ranks[0]
    rank.store.reads = Mode.HELD
    world.submit("B", prompt_of(16))
    world.tick(4)
    (read,) = [o for o in rank.store.log if o.is_outstanding and o.kind is Kind.READ]
    rank.store.land(read, 1)
    world.tick(8)
    seen = samples(metrics)
    assert world.states["B"] == "ready"
    assert seen["kvlift_tokens_lost_total{cause=read,tier=storage}"] == 12
    assert seen["kvlift_tokens_promised_total{tier=storage}"] == 16
    assert seen["kvlift_tokens_restored_total{tier=storage}"] == 4
    assert seen["kvlift_tokens_received_total"] == 16 + 12
    world.close()


def test_tokens_that_come_too_late_are_counted_as_late() -> None:
    world, metrics = world_with_metrics(prefetch="deadline", prefetch_deadline_ms=2)
    world.live("A", prompt_of(16))
    world.call("flush", [Tier.DEVICE, Tier.HOST])
    world.tick()
    world.ranks[0].store.reads = Mode.HELD
    world.submit("B", prompt_of(16))
    world.tick(12)
    assert samples(metrics)["kvlift_tokens_lost_total{cause=late,tier=storage}"] == 16
    world.close()


def test_the_time_that_a_transfer_waits_for_its_restore_is_measured() -> None:
    world, metrics = world_with_metrics()
    world.live("A", prompt_of(16))
    world.call("flush", [Tier.DEVICE])
    world.tick()
    world.ranks[0].copies.restores = Mode.HELD
    world.submit("B", prompt_of(24))
    world.tick(6)
    seen = samples(metrics)
    assert seen["kvlift_in_flight{work=restore}"] == 1
    n_ready_before = seen["kvlift_transfer_waited_for_restore_seconds_count"]
    world.ranks[0].copies.restores = Mode.AUTO
    world.tick(4)
    assert world.states["B"] == "ready"
    seen = samples(metrics)
    assert seen["kvlift_transfer_waited_for_restore_seconds_count"] == n_ready_before + 1
    waited_s = seen["kvlift_transfer_waited_for_restore_seconds_sum"]
    assert waited_s >= 3 * TICK_NS / 1e9
    assert seen["kvlift_in_flight{work=restore}"] == 0
    world.close()


def test_what_waits_for_its_turn_is_queued() -> None:
    world, metrics = world_with_metrics(restores_in_flight_max=1)
    for rid, first in (("A", 0), ("B", 1000)):
        world.live(rid, prompt_of(16, first))
    world.call("flush", [Tier.DEVICE])
    world.tick()
    world.ranks[0].copies.restores = Mode.HELD
    for rid, first in (("C", 0), ("D", 1000)):
        world.submit(rid, prompt_of(20, first))
    world.tick(5)
    seen = samples(metrics)
    assert seen["kvlift_in_flight{work=restore}"] == 1
    assert seen["kvlift_queued{work=restore}"] == 1
    world.close()


def test_a_request_whose_prefill_node_refuses_is_counted_with_the_cause() -> None:
    world, metrics = world_with_metrics()
    world.node.refuse("A", "no such model", [])
    world.submit("A", prompt_of(16))
    world.tick(8)
    assert samples(metrics)["kvlift_requests_ended_total{cause=refused,outcome=failed}"] == 1
    world.close()


def test_two_drivers_do_not_share_a_registry() -> None:
    one, metrics = world_with_metrics()
    other, others = world_with_metrics()
    one.tick(3)
    other.tick(1)
    assert samples(metrics)["kvlift_ticks_total"] == 3
    assert samples(others)["kvlift_ticks_total"] == 1


def test_without_the_library_there_are_no_metrics_and_no_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metrics_module, "prometheus", None)
    nothing = metrics_for(Config.parse(FIELDS), rank=0)
    assert isinstance(nothing, NoMetrics)
    world = JournalWorld(more=(nothing,))
    world.live("A", prompt_of(16))
    world.close()
    assert b"pip install" in nothing.exposition()
    assert not list(text_string_to_metric_families(nothing.exposition().decode()))


def test_tokens_of_a_resumed_request_that_must_be_computed_again_are_counted() -> None:
    world, metrics = world_with_metrics(write="none", persist="off", host_pages=0)
    world.submit("A", prompt_of(18))
    world.tick(8)
    world.call("run", "A")
    world.tick()
    world.call("retract", "A", token_bytes([1, 2]))
    world.tick(2)
    world.call("flush", [Tier.DEVICE])
    world.tick(2)
    world.call("resume", "A")
    world.tick(6)
    assert samples(metrics)["kvlift_tokens_recomputed_total"] == 19
    world.close()
