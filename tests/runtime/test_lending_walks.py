"""Random walks of a host that lends its blocks, over real halves and simulated ports.

A block is free when neither the host nor kvlift holds it, and nothing may touch it then. What a
request is told to stand on is compared with what its tokens say, on every worker.
"""

import random
from collections import Counter
from collections.abc import Sequence

import pytest
from attrs import define, field

from kvlift.core.invariants import breaches
from kvlift.core.keys import Namespace
from kvlift.core.policy import Switch
from kvlift.core.prompt import Prompt, token_bytes
from kvlift.core.tier import Source, Tier
from kvlift.runtime.config import Config
from kvlift.runtime.hosted import Worker
from kvlift.runtime.lending import LendingScheduler
from kvlift.runtime.tick import Ready, Tick
from kvlift.testing.sim_memory import page_value
from kvlift.testing.sim_peers import PrefillNode
from kvlift.testing.sim_rank import SimRank, sim_ranks
from tests.runtime.chance import Chance
from tests.runtime.journal_world import ports_of

PAGE, N_BLOCKS, N_ACTS = 4, 48, 150
SPACE = Namespace(model="m", page_tokens=PAGE).digest()


@define(eq=False)
class Asked:
    """One request: `blocks` are the host's, from its submission or its placing on."""

    rid: str
    prompt: Prompt
    blocks: list[int]
    is_placed: bool = False
    is_leaving: bool = False


@define(eq=False)
class Walk:
    source: random.Random
    core: LendingScheduler = field(init=False)
    node: PrefillNode = field(init=False)
    ranks: list[SimRank] = field(init=False)
    workers: list[Worker] = field(init=False)
    chance: Chance = field(init=False)
    references: Counter[int] = field(factory=Counter)
    asked: dict[str, Asked] = field(factory=dict)
    ballots: list[tuple[int, ...]] = field(factory=list)
    n_asked: int = 0
    n_ready: int = 0

    def __attrs_post_init__(self) -> None:
        n_workers, n_host = self.source.choice([1, 2]), self.source.choice([0, 2, 6, 24])
        has_storage = self.source.random() < 0.7
        given = {
            "page_tokens": PAGE,
            "device_pages": 1 << 20,
            "host_pages": n_host,
            "device_tier": "off",
            "first_token": "off",
            "decode_reserve_pages": 0,
            "prefetch_min_pages": 1,
        }
        config = Config.parse(given)
        self.core = LendingScheduler(
            config,
            storage=Switch.ON if has_storage else Switch.OFF,
            held=self.references.update,
            released=self._release,
        )
        self.node = PrefillNode("p", n_ranks=n_workers)
        self.ranks = sim_ranks(n_workers, N_BLOCKS, n_host, None, self.node)
        self.workers = [
            Worker(config, ports_of(rank, has_storage=has_storage)) for rank in self.ranks
        ]
        self.chance = Chance(self.source, [self.node], self.ranks)

    # The host's blocks.

    def _take(self, n: int) -> list[int] | None:
        free = [block for block in range(N_BLOCKS) if not self.references[block]]
        if len(free) < n:
            return None
        taken = self.source.sample(free, n)
        self.references.update(taken)
        return taken

    def _release(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            assert self.references[block] > 0, f"block {block} was given back twice"
            self.references[block] -= 1
            if not self.references[block]:
                self._is_free(block)

    def _is_free(self, block: int) -> None:
        for rank in self.ranks:
            for access in (*rank.copies.accesses(), *rank.peers.accesses()):
                is_used = access.tier is Tier.DEVICE and block in access.pages
                assert not is_used, f"block {block} is free, and {access} goes on"
            rank.memory.device[block] = None

    def _compute(self, prompt: Prompt, blocks: Sequence[int], start: int) -> None:
        for position, block in enumerate(blocks[start:], start):
            for rank in self.ranks:
                rank.memory.device[block] = page_value(prompt, position)

    # What the host does.

    def act(self) -> None:
        choice = self.source.random()
        if choice < 0.25:
            self._submit()
        elif choice < 0.5:
            self._place()
        elif choice < 0.58 and self.asked:
            self._leave(self.source.choice(list(self.asked.values())))
        elif choice < 0.62:
            self.core.flush(self.source.choice([(Tier.HOST,), (Tier.STORAGE,)]))
        elif choice < 0.72:
            self.chance.change()
        for _ in range(self.source.randrange(3)):
            self.step()

    def _submit(self) -> None:
        self.n_asked += 1
        stem, n_tokens = self.source.randrange(3), self.source.randrange(1, 7 * PAGE)
        prompt = Prompt(SPACE, token_bytes(range(1000 * stem, 1000 * stem + n_tokens)), PAGE)
        n_given = self.source.choice([0, 0, self.source.randrange(prompt.n_pages_full + 1)])
        blocks = self._take(n_given)
        if blocks is None:
            return
        self._compute(prompt, blocks, 0)
        rid, peer = f"r{self.n_asked}", self.source.choice(["p", "p", "p", ""])
        self.core.submit(rid, prompt, peer=peer, n_pages_given=n_given)
        self.asked[rid] = Asked(rid, prompt, blocks)

    def _place(self) -> None:
        for one in list(self.asked.values()):
            plan = self.core.plan_of(one.rid)
            if one.is_placed or one.is_leaving or plan is None:
                continue
            n_pages = plan.n_pages if plan.rest is Source.PEER else plan.bounds.storage
            more = self._take(n_pages - len(one.blocks))
            if more is not None:
                one.blocks, one.is_placed = [*one.blocks, *more], True
                self.core.place(one.rid, one.blocks)
            return

    def _leave(self, one: Asked) -> None:
        """Its blocks go back when nothing writes into them any more."""
        one.is_leaving = True
        if self.core.is_known(one.rid):
            self.core.abort(one.rid)

    def _is_ready(self, ready: Ready) -> None:
        one = self.asked[ready.rid]
        if one.is_leaving:
            return
        n_good = one.prompt.n_pages
        if ready.needs_prefill_from is not None:
            n_good = min(n_good, ready.needs_prefill_from // PAGE)
        assert n_good <= len(one.blocks), "ready without its blocks"
        for position, block in enumerate(one.blocks[:n_good]):
            for rank in self.ranks:
                assert rank.memory.device[block] == page_value(one.prompt, position)
        self.n_ready += 1
        self.core.run(one.rid)
        self.core.finish(one.rid, b"")
        missing = self._take(one.prompt.n_pages - len(one.blocks))
        if missing is not None:
            one.blocks += missing
            self._compute(one.prompt, one.blocks, n_good)
            self.core.stow(one.prompt, 0, one.blocks[: one.prompt.n_pages_full])
        self._release(self.asked.pop(one.rid).blocks)

    # Steps.

    def step(self) -> None:
        tick, orders = self.core.tick(self.ballots)
        self._hear(tick)
        self.chance.land()
        ballots = [worker.obey(orders) for worker in self.workers]
        self.ballots = ballots if orders.is_awaited else []
        assert breaches(self.core.state.agreed) == ()

    def _hear(self, tick: Tick) -> None:
        for ready in tick.ready:
            self._is_ready(ready)
        for ended in tick.ended:
            if ended.rid in self.asked:
                self.asked[ended.rid].is_leaving = True
        for one in list(self.asked.values()):
            if one.is_leaving and not self.core.is_known(one.rid) and self.core.is_over(one.rid):
                self._release(self.asked.pop(one.rid).blocks)

    def end(self) -> None:
        self.chance.calm()
        for _ in range(200):
            self._place()
            self.step()
            self.chance.pass_s(1)
            if not self.asked and not self.core.is_busy() and not self.core.has_news():
                return
        raise AssertionError(f"after 200 steps of good weather: {self.core.state.agreed.requests}")


@pytest.mark.parametrize("seed", range(60))
def test_whatever_happens_blocks_are_right_while_they_are_used_and_come_back(seed: int) -> None:
    walk = Walk(random.Random(seed))
    for _ in range(N_ACTS):
        walk.act()
    walk.end()
    assert walk.n_ready
    assert not +walk.references
    assert not walk.core.state.agreed.tickets
    places = walk.core._places
    assert not places._kept
    assert not places._void
    assert not places._placed
    assert not places._rid_by_hold
