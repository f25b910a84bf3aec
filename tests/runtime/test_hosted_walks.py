"""Random walks of one scheduler with many workers, over real halves and simulated ports.

The scheduler tells pages of its own table; each worker has its own. Whatever happens both must say
the same, what a request is told to stand on must be what its tokens say, on every worker, and names
may be used again as soon as they are free.
"""

import random
from typing import Any

import pytest
from attrs import define, field

from kvlift.core.invariants import breaches
from kvlift.core.keys import Namespace
from kvlift.core.policy import Switch
from kvlift.core.prompt import Prompt, n_pages_covering, token_bytes
from kvlift.core.tier import Tier
from kvlift.runtime.config import Config
from kvlift.runtime.errors import RequestLeaving
from kvlift.runtime.hosted import Orders, Scheduler, Worker
from kvlift.runtime.tick import Granted, NoRoom, Pending, Tick
from kvlift.testing.sim_memory import page_value
from kvlift.testing.sim_peers import PrefillNode
from kvlift.testing.sim_rank import SimRank, sim_ranks
from tests.runtime.chance import Chance
from tests.runtime.journal_world import ports_of

PAGE, N_DEVICE, N_ACTS = 4, 20, 150
SPACES = [Namespace(tenant=tenant, page_tokens=PAGE).digest() for tenant in ("t", "u")]


@define(eq=False)
class Asked:
    """One request, as a host with continuous batching knows it. `n_kv`: tokens whose KV is good."""

    rid: str
    prompt: Prompt
    stage: str = "filling"
    pages: list[int] = field(factory=list)
    output: list[int] = field(factory=list)
    n_kv: int = 0

    @property
    def tokens(self) -> bytes:
        return self.prompt.tokens + token_bytes(self.output)

    def all_of_it(self) -> Prompt:
        return Prompt(self.prompt.namespace, self.tokens, PAGE)


@define(eq=False)
class Walk:
    source: random.Random
    core: Scheduler = field(init=False)
    node: PrefillNode = field(init=False)
    ranks: list[SimRank] = field(init=False)
    workers: list[Worker] = field(init=False)
    chance: Chance = field(init=False)
    asked: dict[str, Asked] = field(factory=dict)
    ballots: list[tuple[int, ...]] = field(factory=list)
    n_tokens: int = 0
    n_done: int = 0

    def __attrs_post_init__(self) -> None:
        n_workers, n_host = self.source.choice([1, 2]), self.source.choice([0, 4, 24])
        has_storage = self.source.random() < 0.7
        write = self.source.choice(["through", "none", *(["back"] if n_host else [])])
        given: dict[str, Any] = {
            "page_tokens": PAGE,
            "device_pages": N_DEVICE,
            "host_pages": n_host,
            "write": write,
            "persist": self.source.choice(["on", "off"]),
            "prefetch": self.source.choice(["wait_complete", "best_effort", "deadline"]),
            "decode_reserve_pages": self.source.choice([0, 1]),
            "prefetch_min_pages": 1,
        }
        config = Config.parse(given)
        self.core = Scheduler(config, storage=Switch.ON if has_storage else Switch.OFF)
        self.node = PrefillNode("p", n_ranks=n_workers)
        self.ranks = sim_ranks(n_workers, N_DEVICE, n_host, None, self.node)
        self.workers = [
            Worker(config, ports_of(rank, has_storage=has_storage)) for rank in self.ranks
        ]
        self.chance = Chance(self.source, [self.node], self.ranks)

    # What the host does.

    def act(self) -> None:
        choice = self.source.random()
        if choice < 0.25:
            self._submit()
        elif choice < 0.32 and self.asked:
            one = self.source.choice(list(self.asked.values()))
            if one.stage != "leaving":
                self.core.abort(one.rid)
                one.stage = "leaving"
        elif choice < 0.42:
            self._retract_or_resume()
        elif choice < 0.46:
            self.core.flush([self.source.choice(list(Tier))])
        elif choice < 0.56:
            self.chance.change()
        for _ in range(self.source.randrange(3)):
            self.step()

    def _submit(self) -> None:
        rid = f"r{self.source.randrange(6)}"  # few names, used again and again
        if rid in self.asked:
            return
        stem, n_tokens = self.source.randrange(2), self.source.randrange(1, 7 * PAGE)
        tokens = token_bytes(range(1000 * stem, 1000 * stem + n_tokens))
        prompt = Prompt(self.source.choice(SPACES), tokens, PAGE)
        self.core.submit(rid, prompt, peer="p", priority=self.source.randrange(2))
        self.asked[rid] = Asked(rid, prompt)

    def _retract_or_resume(self) -> None:
        for one in self.asked.values():
            if one.stage == "running" and one.n_kv >= len(one.tokens) // 4 - 1:
                self.core.retract(one.rid, token_bytes(one.output))
                one.stage, one.pages = "retracted", []
                return
        for one in self.asked.values():
            if one.stage == "retracted":
                self.core.resume(one.rid)
                one.stage = "resuming"
                return

    def _decode(self) -> None:
        """A step of the model: the KV of every token but the last, then one token more."""
        for one in list(self.asked.values()):
            if one.stage != "running":
                continue
            n_kv = max(one.prompt.n_tokens, len(one.tokens) // 4 - 1)
            if n_pages_covering(n_kv, PAGE) > len(one.pages) and not self._grows(one, n_kv):
                continue
            self._check(one, one.n_kv // PAGE)
            self._compute(one, n_kv)
            if len(one.output) >= 9 or self.source.random() < 0.1:
                self.core.finish(one.rid, token_bytes(one.output))
                one.stage = "leaving"
                self.n_done += 1
            else:
                self.n_tokens += 1
                one.output.append(self.n_tokens % 3)

    def _grows(self, one: Asked, n_kv: int) -> bool:
        n_missing = n_pages_covering(n_kv, PAGE) - len(one.pages)
        try:
            growth = self.core.grow(one.rid, n_missing)
        except RequestLeaving:
            return False
        match growth:
            case Granted(device_pages=pages):
                one.pages.extend(pages)
                return True
            case Pending():
                one.stage = "growing"
            case NoRoom():
                pass
        return False

    def _compute(self, one: Asked, n_kv: int) -> None:
        whole = one.all_of_it()
        for position in range(one.n_kv // PAGE, n_pages_covering(n_kv, PAGE)):
            if (position + 1) * PAGE > len(one.tokens) // 4:
                break
            if (position + 1) * PAGE > n_kv:
                break
            for rank in self.ranks:
                rank.memory.device[one.pages[position]] = page_value(whole, position)
        one.n_kv = n_kv

    def _check(self, one: Asked, n_pages: int) -> None:
        whole = one.all_of_it()
        for position in range(n_pages):
            for rank in self.ranks:
                held = rank.memory.device[one.pages[position]]
                assert held == page_value(whole, position), (one.rid, position)

    # Steps.

    def step(self) -> None:
        tick, orders = self.core.tick(self.ballots)
        self._hear(tick)
        self._carry(orders)
        self._decode()

    def _carry(self, orders: Orders) -> None:
        self.chance.land()
        ballots = [worker.obey(orders) for worker in self.workers]
        self.ballots = ballots if orders.is_awaited else []
        assert breaches(self.core.state.agreed) == ()
        for worker in self.workers:
            assert worker._half.fault is None
            assert worker._half.device.live() == self.core._device.live()
            assert worker._half.device.free_pages() == self.core._device.free_pages()

    def _hear(self, tick: Tick) -> None:
        for grown in tick.grown:
            one = self.asked.get(grown.rid)
            if one is not None and one.stage == "growing":
                one.stage = "running"
                one.pages.extend(grown.device_pages)
        for ready in tick.ready:
            one = self.asked[ready.rid]
            if one.stage == "leaving":
                continue
            one.pages = list(ready.device_pages)
            n_whole = max(one.prompt.n_tokens, len(one.tokens) // 4 - 1)
            one.n_kv = n_whole if ready.needs_prefill_from is None else ready.needs_prefill_from
            self._check(one, one.n_kv // PAGE)
            self.core.run(one.rid)
            if not one.output:
                one.output.append(1)
            one.stage = "starting"
        for ended in tick.ended:
            del self.asked[ended.rid]
        for one in self.asked.values():
            if one.stage == "starting" and not any(r.rid == one.rid for r in tick.ready):
                one.stage = "running"

    def end(self) -> None:
        self.chance.calm()
        for one in self.asked.values():
            if one.stage != "leaving":
                self.core.abort(one.rid)
                one.stage = "leaving"
        for _ in range(300):
            self.step()
            self.chance.pass_s(1)
            if not self.asked and not self.ballots and not self.core.state.agreed.requests:
                return
        raise AssertionError(f"after 300 steps of good weather: {self.core.state.agreed.requests}")


@pytest.mark.parametrize("seed", range(60))
def test_the_scheduler_and_its_workers_say_the_same_whatever_happens(seed: int) -> None:
    walk = Walk(random.Random(seed))
    for _ in range(N_ACTS):
        walk.act()
    walk.end()
    assert not walk.core.state.agreed.tickets
    for worker in walk.workers:
        local = worker._half.local
        assert not local.watches
        assert not local.chains
        assert not local.parked
        assert {*local.tokens, *local.reasons} <= set(local.leaving), "kept for ever"
