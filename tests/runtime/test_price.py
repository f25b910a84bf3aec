"""What reads from storage cost is measured, and measured again."""

from kvlift.core.prompt import token_bytes
from kvlift.core.tier import Tier
from kvlift.testing.sim_memory import Mode
from kvlift.testing.sim_operation import Kind
from tests.runtime.journal_world import JournalWorld, prompt_of

STALL_NS = 500_000_000
N_LATER = 600


def test_one_read_that_stalled_is_not_the_last_one_for_ever() -> None:
    world = JournalWorld(fields={"cost_model": "on", "device_pages": 16, "host_pages": 32})
    [rank] = world.ranks

    def flush() -> None:
        world.call("flush", [Tier.DEVICE, Tier.HOST])
        world.tick(2)

    def n_reads() -> int:
        return sum(one.kind is Kind.READ for one in rank.store.log)

    world.live("A", prompt_of(32))
    flush()
    rank.store.reads = Mode.HELD
    world.submit("B", prompt_of(36))
    world.tick(4)
    rank.clock.advance(STALL_NS)
    for one in rank.store.log:
        if one.is_outstanding:
            rank.store.land(one)
    rank.store.reads = Mode.AUTO
    world.tick(6)
    world.call("run", "B")
    world.tick()
    world.call("finish", "B", token_bytes([1]))
    world.tick(8)
    flush()
    n_before = n_reads()
    for number in range(N_LATER):
        world.live(f"C{number}", prompt_of(36))
        flush()
        if n_reads() > n_before + 10:
            return
    raise AssertionError("storage is as fast as ever, and is not asked any more")
