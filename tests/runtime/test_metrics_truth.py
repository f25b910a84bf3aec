"""The counts of tokens add up to the tokens there are."""

from kvlift.core.prompt import token_bytes
from kvlift.core.tier import Tier
from kvlift.runtime.config import Config
from kvlift.runtime.metrics import Metrics
from kvlift.testing.sim_memory import Mode
from tests.runtime.journal_world import FIELDS, JournalWorld, prompt_of


def retracted(metrics: Metrics) -> JournalWorld:
    """A request of 18 tokens that has decoded one more, and does not run any more."""
    world = JournalWorld(more=(metrics,))
    world.submit("A", prompt_of(18))
    world.tick(8)
    world.call("run", "A")
    world.tick()
    world.call("retract", "A", token_bytes([1, 2]))
    world.tick(6)
    return world


def n_tokens(metrics: Metrics, name: str, **labels: str) -> float:
    found = metrics.registry.get_sample_value(
        f"kvlift_tokens_{name}_total", {"rank": "0", **labels}
    )
    return found or 0.0


def by_tier(metrics: Metrics, name: str, **labels: str) -> list[float]:
    tiers = ("device", "host", "storage")
    return [n_tokens(metrics, name, tier=tier, **labels) for tier in tiers]


def test_the_last_page_of_a_retracted_request_has_as_many_tokens_as_it_holds() -> None:
    metrics = Metrics(Config.parse(FIELDS), rank=0)
    world = retracted(metrics)
    world.call("resume", "A")
    world.tick(8)
    assert world.states["A"] == "ready"
    assert n_tokens(metrics, "received") == 18
    assert by_tier(metrics, "restored") == [16.0, 3.0, 0.0]
    assert n_tokens(metrics, "recomputed") == 0


def test_what_nobody_was_promised_is_not_lost() -> None:
    """A retracted request comes back without its prefill node; what fails is computed again."""
    metrics = Metrics(Config.parse(FIELDS), rank=0)
    world = retracted(metrics)
    world.call("flush", [Tier.DEVICE])
    world.tick()
    copies = world.ranks[0].copies
    copies.restores = Mode.HELD
    world.call("resume", "A")
    world.tick(4)
    for copy in list(copies.running()):
        copies.fail(copy)
    world.tick(8)
    assert n_tokens(metrics, "recomputed") == 19
    assert by_tier(metrics, "promised") == [0.0, 0.0, 0.0]
    assert by_tier(metrics, "lost", cause="copy") == [0.0, 0.0, 0.0]
