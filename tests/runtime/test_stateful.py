"""Whole drivers under faults: hypothesis chooses what host, ports, peer and clocks do."""

import os
import random

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from kvlift.core.tier import Tier
from kvlift.models.statechart import Edge
from kvlift.testing.story_lines import Port, World
from tests.runtime.restless_acts import HOST, WEATHER, WORLD, act, chosen
from tests.runtime.restless_world import RestlessWorld

pytestmark = pytest.mark.slow

PAGE = 4
N_STEPS_OF_WALK = 100
WALKS_A_BLOCK = 20
N_ARROWS_MIN = 38
N_EXAMPLES, N_STEPS, N_WALKS = (2500, 80, 5000) if os.environ.get("KVLIFT_DEEP") else (80, 40, 60)
"""KVLIFT_DEEP=1 for the long run before a release."""

WORLDS = st.builds(
    World,
    n_ranks=st.integers(1, 3),
    page_tokens=st.just(PAGE),
    n_device_pages=st.integers(4, 14),
    n_host_pages=st.integers(0, 12),
    n_storage_pages=st.one_of(st.none(), st.integers(2, 12)),
)
CHOICES = {
    "prefetch": ["wait_complete", "deadline", "best_effort"],
    "write": ["through", "back", "none"],
    "persist": ["on", "off"],
    "eviction": ["lru", "lfu", "fifo", "priority"],
    "decode_reserve_pages": ["0", "1", "2"],
    "prefetch_min_pages": ["1", "2"],
    "bypass_max": ["0", "1", "16"],
    "first_token": ["on", "on", "off"],
    "ballot_slots": ["8", "256"],
    "restores_in_flight_max": ["1", "16"],
    "mirrors_in_flight_max": ["1", "16"],
    "persists_in_flight_max": ["1", "16"],
    "prefetches_in_flight_max": ["1", "16"],
    "cost_model": ["off", "on"],
}
CONFIGS: st.SearchStrategy[dict[str, str]] = st.fixed_dictionaries(
    {name: st.sampled_from(values) for name, values in CHOICES.items()}
)
CHOICE = st.integers(0, 63)
N_PAGES = st.integers(0, 4)
TICKS = st.sampled_from([0, 1, 1, 2])
PROMPTS = st.lists(
    st.tuples(
        st.integers(1, 9 * PAGE), CHOICE, st.integers(0, 8), st.sampled_from(["", "", "", "blue"])
    ),
    min_size=3,
    max_size=7,
)
HELD = st.sets(st.sampled_from(list(Port)))


class Weather(RuleBasedStateMachine):
    """One rule with many cases: hypothesis leaves out whole rules, and then little happens."""

    world: RestlessWorld

    @initialize(
        world=WORLDS, fields=CONFIGS, held=HELD, low_water=st.integers(0, 3), prompts=PROMPTS
    )
    def begin(
        self,
        world: World,
        fields: dict[str, str],
        held: set[Port],
        low_water: int,
        prompts: list[tuple[int, int, int, str]],
    ) -> None:
        if fields["write"] == "back" and world.n_host_pages == 0:
            fields = {**fields, "write": "none"}
        if fields["write"] == "back":
            fields = {**fields, "write_back_low_water_pages": str(low_water)}
        self.world = RestlessWorld.of(world, fields)
        for n_tokens, parent, n_shared, tenant in prompts:
            known = list(self.world.stage.prompts.by_name)
            begins = chosen(known, parent) if n_shared else None
            self.world.new_prompt(n_tokens, begins, n_shared, tenant)
        self.world.hold(held)
        for parent in (prompts[0][1], prompts[1][1]):
            name = chosen(list(self.world.stage.prompts.by_name), parent)
            assert name is not None
            self.world.put(name, 0, prompts[2][2], Tier.STORAGE)

    @rule(
        what=st.sampled_from(HOST + HOST + WORLD + WEATHER),
        rank=CHOICE,
        choice=CHOICE,
        n_pages=N_PAGES,
        n_ticks=TICKS,
        held=HELD,
    )
    def step(
        self, what: str, rank: int, choice: int, n_pages: int, n_ticks: int, held: set[Port]
    ) -> None:
        act(self.world, what, rank, choice, n_pages, held)
        for _ in range(n_ticks):
            self.world.tick()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.end_everything()


def _walk(seed: int) -> set[Edge]:
    """The same world, with dice that keep no memory."""
    dice = random.Random(seed)
    write = dice.choice(["through", "back", "none"])
    n_host = dice.choice([0, 2, 4, 8, 16, 40]) if write != "back" else dice.choice([1, 3, 8, 40])
    n_storage = dice.choice([None, None, 4, 9])
    size = World(
        n_ranks=dice.choice([1, 2, 2, 3]),
        page_tokens=PAGE,
        n_device_pages=dice.choice([6, 9, 13, 20, 40]),
        n_host_pages=n_host,
        n_storage_pages=n_storage,
    )
    fields = {name: dice.choice(values) for name, values in CHOICES.items()}
    world = RestlessWorld.of(size, {**fields, "write": write})
    for _ in range(dice.randint(4, 8)):
        known = list(world.stage.prompts.by_name)
        begins = dice.choice(known) if known and dice.random() < 0.7 else None
        name = world.new_prompt(dice.randint(1, 7 * PAGE), begins, dice.randint(1, 8), "")
        if dice.random() < 0.5:
            world.put(name, 0, dice.randint(1, 6), Tier.STORAGE)
    ports = list(Port)
    world.hold(set(dice.sample(ports, dice.randint(0, 4))))
    acts = HOST * dice.randint(3, 6) + WORLD * dice.randint(1, 4) + WEATHER * dice.choice([0, 1, 2])
    if dice.random() < 0.3:
        acts = [what for what in acts if what not in (*WEATHER, "abort")]  # all must be done
    for _ in range(N_STEPS_OF_WALK):
        held = set(dice.sample(ports, dice.randint(0, 4)))
        numbers = dice.randrange(64), dice.randrange(64), dice.randint(0, 4)
        act(world, dice.choice(acts), *numbers, held)
        for _ in range(dice.choice([0, 1, 1, 2])):
            world.tick()
    world.end_everything()
    return world.charts.taken


@pytest.mark.timeout(600)
@pytest.mark.parametrize("block", range(N_WALKS // WALKS_A_BLOCK))
def test_drivers_keep_every_claim_on_random_walks(block: int) -> None:
    taken: set[Edge] = set()
    for seed in range(WALKS_A_BLOCK * block, WALKS_A_BLOCK * (block + 1)):
        try:
            taken |= _walk(seed)
        except Exception as error:
            raise AssertionError(f"walk {seed}: {error}") from error
    assert len(taken) >= N_ARROWS_MIN, "so little happens that nothing is shown"


Weather.TestCase.settings = settings(
    max_examples=N_EXAMPLES,
    stateful_step_count=N_STEPS,
    deadline=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)
test_drivers_keep_every_claim_in_bad_weather = Weather.TestCase
