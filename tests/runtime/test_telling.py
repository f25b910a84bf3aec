"""What a tick tells the host of each request is that request's own, and so."""

from kvlift.core.ids import Rid
from kvlift.core.phase import Outcome
from kvlift.core.prompt import token_bytes
from kvlift.core.tier import Tier
from kvlift.runtime.tick import Ended, Ready, Shrunk, Tick
from kvlift.testing.sim_memory import Mode
from kvlift.testing.sim_operation import Kind
from kvlift.testing.sim_peers import token_after
from tests.runtime.journal_world import JournalWorld, prompt_of


def ticks(world: JournalWorld, n_ticks: int) -> list[Tick]:
    return [world.tick() for _ in range(n_ticks)]


def ended(told: list[Tick]) -> dict[str, Ended]:
    return {one.rid: one for tick in told for one in tick.ended}


def ready(told: list[Tick]) -> dict[str, Ready]:
    return {one.rid: one for tick in told for one in tick.ready}


def shrunk(told: list[Tick]) -> list[Shrunk]:
    return [one for tick in told for one in tick.shrunk]


def test_a_prefix_that_became_shorter_is_told_with_its_new_end() -> None:
    world = JournalWorld()
    world.live("A", prompt_of(16))
    world.call("flush", [Tier.DEVICE, Tier.HOST])
    world.tick()
    store = world.ranks[0].store
    store.reads = Mode.HELD
    world.submit("B", prompt_of(24))
    assert shrunk(ticks(world, 4)) == []
    [read] = [one for one in store.log if one.is_outstanding and one.kind is Kind.READ]
    store.land(read, 3)
    assert shrunk(ticks(world, 8)) == [Shrunk(rid="B", page=3)]


def test_the_first_token_is_the_one_of_this_prompt_with_its_probability() -> None:
    world = JournalWorld(n_ranks=2)
    prompts = {rid: prompt_of(8, first) for rid, first in (("A", 0), ("B", 1000), ("C", 2000))}
    for rid, prompt in prompts.items():
        world.submit(rid, prompt)
    found = ready(ticks(world, 8))
    for rid, prompt in prompts.items():
        assert (found[rid].token, found[rid].logprob) == token_after(Rid(rid), prompt)


def test_only_what_has_failed_may_be_tried_again_elsewhere() -> None:
    world = JournalWorld()
    world.node.refuse("failed", "not today", [])
    for rid in ("aborted", "done", "failed"):
        world.submit(rid, prompt_of(8))
    told = ticks(world, 6)
    world.call("abort", "aborted")
    world.call("run", "done")
    told += ticks(world, 1)
    world.call("finish", "done", token_bytes([1]))
    said = ended(told + ticks(world, 8))
    assert {rid: (one.outcome, one.retryable) for rid, one in said.items()} == {
        "aborted": (Outcome.ABORTED, False),
        "done": (Outcome.DONE, False),
        "failed": (Outcome.FAILED, True),
    }


def test_the_reason_of_a_failure_is_what_the_node_has_said_of_this_request() -> None:
    world = JournalWorld()
    world.node.refuse("A", "no such model", [])
    world.node.refuse("B", "out of memory", [])
    for rid, first in (("A", 0), ("B", 1000)):
        world.submit(rid, prompt_of(8, first))
    said = ended(ticks(world, 8))
    assert "no such model" in said["A"].reason
    assert "out of memory" in said["B"].reason
    assert "out of memory" not in said["A"].reason


def test_how_far_a_request_had_come_is_told_at_its_end() -> None:
    world = JournalWorld()
    world.node.mode = Mode.HELD
    world.submit("A", prompt_of(16))
    told = ticks(world, 4)
    peers = world.ranks[0].peers
    [(_node, talk)] = peers.open_talks()
    peers.land(talk, 3)
    told += ticks(world, 3)
    world.call("abort", "A")
    assert ended(told + ticks(world, 3))["A"].n_pages_landed == 3
