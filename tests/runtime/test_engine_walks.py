"""Random walks of the reference worker's scheduler, in lock step on all ranks, without a model.

Clients come, leave, and use names again; pages are short, so requests are retracted and resumed;
the store, the copies and two prefill nodes have weather. What a row is computed on is compared page
by page, and every request that was submitted is answered with exactly one end.
"""

import random
from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import pytest
from attrs import define, field

from kvlift.core.invariants import breaches
from kvlift.core.keys import Namespace
from kvlift.core.prompt import Prompt, token_bytes
from kvlift.core.tier import Tier
from kvlift.runtime.config import Config
from kvlift.runtime.driver import Driver
from kvlift.runtime.worker.decode_engine import DecodeEngine
from kvlift.runtime.worker.decoding import Row
from kvlift.runtime.worker.generation import Output, Request, Sampling
from kvlift.testing.sim_memory import page_value
from kvlift.testing.sim_peers import PrefillNode
from kvlift.testing.sim_rank import SimRank, sim_ranks
from tests.runtime.chance import Chance
from tests.runtime.journal_world import ports_of

PAGE, N_DEVICE, N_ACTS = 4, 16, 150
N_NEW_MAX = 12


def namespace_of(request: Request) -> bytes:
    return Namespace(tenant=request.tenant, page_tokens=PAGE).digest()


@define(eq=False)
class Walk:
    source: random.Random
    nodes: list[PrefillNode] = field(init=False)
    sims: list[SimRank] = field(init=False)
    chance: Chance = field(init=False)
    engines: list[DecodeEngine] = field(init=False)
    rows: list[list[Row]] = field(init=False)
    sampled: list[tuple[int, float]] = field(factory=list)
    live: set[str] = field(factory=set)
    ends: Counter[str] = field(factory=Counter)
    n_submitted: int = 0
    n_pages_checked: int = 0

    def __attrs_post_init__(self) -> None:
        n_ranks, n_host = self.source.choice([1, 2]), self.source.choice([0, 4, 24])
        config = Config.parse(
            {
                "page_tokens": PAGE,
                "device_pages": N_DEVICE,
                "host_pages": n_host,
                "write": self.source.choice(["through", "none", *(["back"] if n_host else [])]),
                "decode_reserve_pages": self.source.choice([0, 1]),
                "prefetch_min_pages": 1,
            }
        )
        self.nodes = [PrefillNode(name, n_ranks) for name in ("p", "q")]
        self.sims = sim_ranks(n_ranks, N_DEVICE, n_host, None, self.nodes[0])
        for sim in self.sims:
            sim.peers.nodes = {node.name: node for node in self.nodes}
        self.chance = Chance(self.source, self.nodes, self.sims)
        self.engines = [self._engine(sim, config) for sim in self.sims]
        self.rows = [[] for _ in self.sims]

    def _engine(self, sim: SimRank, config: Config) -> DecodeEngine:
        return DecodeEngine(
            Driver(config, ports_of(sim)),
            cast("Any", SimpleNamespace(config=SimpleNamespace(eos_tokens=(5,)))),
            cast("Any", SimpleNamespace(page_tokens=PAGE)),
            cast("Any", SimpleNamespace(look=lambda _request, _ready: None)),
            namespace_of,
            ("p", "q"),
            samples=sim.ranks.rank == 0,
            reuses=True,
            output_reserved_percent=50,
            n_running_max=4,
            chunk_tokens=8,
        )

    # What clients do, and the world.

    def act(self) -> None:
        choice = self.source.random()
        if choice < 0.3:
            self._submit()
        elif choice < 0.38 and self.live:
            rid = self.source.choice(sorted(self.live))
            for engine in self.engines:
                engine.abort(rid)
        elif choice < 0.42:
            tiers = [self.source.choice(list(Tier))]
            for engine in self.engines:
                engine.driver.flush(tiers)
        elif choice < 0.52:
            self.chance.change()
        for _ in range(self.source.randrange(4)):
            self.step()

    def _submit(self) -> None:
        rid = f"r{self.source.randrange(6)}"
        if rid in self.live:
            return
        stem, n_tokens = self.source.randrange(2), self.source.randrange(1, 7 * PAGE)
        request = Request(
            rid=rid,
            tokens=tuple(range(1000 * stem, 1000 * stem + n_tokens)),
            sampling=Sampling(
                max_new_tokens=self.source.randrange(1, N_NEW_MAX),
                temperature=self.source.choice([0.0, 1.0]),
                ignore_eos=self.source.random() < 0.5,
            ),
            tenant=self.source.choice(["t", "u"]),
            priority=self.source.randrange(2),
        )
        self.n_submitted += 1
        self.live.add(rid)
        for engine in self.engines:
            engine.submit(request)

    # Steps: as `RankLoop.run`.

    def step(self) -> None:
        self.chance.land()
        for engine, rows in zip(self.engines, self.rows, strict=True):
            engine.accept(rows, self.sampled)
        outputs = []
        for engine in self.engines:
            engine.tick()
            outputs.append(engine.taken_outputs())
            assert breaches(engine.driver.state.agreed) == ()
        self._answer(outputs[0])
        self.rows = [engine.rows() for engine in self.engines]
        shapes = [[(r.decoding.rid, r.start, r.stop) for r in rows] for rows in self.rows]
        assert all(shape == shapes[0] for shape in shapes), "the ranks compute different rows"
        for sim, rows in zip(self.sims, self.rows, strict=True):
            self._compute(sim, rows)
        n_sampled = sum(row.is_sampled for row in self.rows[0])
        self.sampled = [(self.source.randrange(7), -0.5) for _ in range(n_sampled)]

    def _answer(self, outputs: list[Output]) -> None:
        for output in outputs:
            assert output.rid in self.live, "an answer to nobody"
            if output.finish is not None:
                assert "still alive" not in output.finish.message, "its name was free"
                self.ends[output.finish.kind] += 1
                self.live.remove(output.rid)

    def _compute(self, sim: SimRank, rows: list[Row]) -> None:
        for row in rows:
            decoding = row.decoding
            space = namespace_of(decoding.request)
            whole = Prompt(space, token_bytes(decoding.tokens), PAGE)
            for position in range(row.start // PAGE):
                held = sim.memory.device[decoding.pages[position]]
                assert held == page_value(whole, position), (decoding.rid, position)
                self.n_pages_checked += 1
            for position in range(row.start // PAGE, row.stop // PAGE):
                sim.memory.device[decoding.pages[position]] = page_value(whole, position)

    def end(self) -> None:
        self.chance.calm()
        for _ in range(600):
            self.step()
            self.chance.pass_s(1)
            if not self.live and not any(e.driver.state.agreed.requests for e in self.engines):
                break
        for engine in self.engines:
            assert engine.n_live == 0, engine.n_by_stage()
            assert not engine.driver._inbox._alive
        assert not self.live
        assert sum(self.ends.values()) == self.n_submitted


@pytest.mark.parametrize("seed", range(40))
def test_every_request_ends_once_and_is_computed_on_its_own_pages(seed: int) -> None:
    walk = Walk(random.Random(seed))
    for _ in range(N_ACTS):
        walk.act()
    walk.end()
    assert walk.ends
