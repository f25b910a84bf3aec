"""Whole drivers under faults: hypothesis chooses what host, ports, peer and clocks do."""

import os
from typing import Any

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from kvlift.core.tier import Tier
from kvlift.testing.sim_memory import Mode
from kvlift.testing.sim_operation import Kind
from kvlift.testing.story_lines import Port, World
from tests.runtime.restless_world import RestlessWorld

PAGE = 4
N_EXAMPLES, N_STEPS = (2500, 80) if os.environ.get("KVLIFT_DEEP") else (120, 40)
"""KVLIFT_DEEP=1 for the long run before a release."""

N_ALIVE_MAX = 12
ALL_KINDS = {Kind.LOOKUP, Kind.READ, Kind.PERSIST, Kind.RESTORE, Kind.MIRROR}
WORLDS = st.builds(
    World,
    n_ranks=st.integers(1, 3),
    page_tokens=st.just(PAGE),
    n_device_pages=st.integers(4, 14),
    n_host_pages=st.integers(0, 12),
    n_storage_pages=st.one_of(st.none(), st.integers(2, 12)),
)
CONFIGS: st.SearchStrategy[dict[str, str]] = st.fixed_dictionaries(
    {
        "prefetch": st.sampled_from(["wait_complete", "deadline", "best_effort"]),
        "write": st.sampled_from(["through", "back", "none"]),
        "persist": st.sampled_from(["on", "off"]),
        "eviction": st.sampled_from(["lru", "lfu", "fifo", "priority"]),
        "decode_reserve_pages": st.sampled_from(["0", "1", "2"]),
        "prefetch_min_pages": st.sampled_from(["1", "2"]),
        "bypass_max": st.sampled_from(["0", "1", "16"]),
        "first_token": st.sampled_from(["on", "on", "off"]),
        "ballot_slots": st.sampled_from(["8", "256"]),
        "restores_in_flight_max": st.sampled_from(["1", "16"]),
        "mirrors_in_flight_max": st.sampled_from(["1", "16"]),
        "persists_in_flight_max": st.sampled_from(["1", "16"]),
        "prefetches_in_flight_max": st.sampled_from(["1", "16"]),
        "cost_model": st.sampled_from(["off", "on"]),
    }
)
CHOICE = st.integers(0, 63)


def _chosen(options: list[Any], choice: int) -> Any:
    return options[choice % len(options)] if options else None


class Weather(RuleBasedStateMachine):
    """Every rule chooses among what is there; with nothing there it does nothing."""

    world: RestlessWorld

    @initialize(world=WORLDS, fields=CONFIGS, held=st.booleans(), low_water=st.integers(0, 3))
    def begin(self, world: World, fields: dict[str, str], held: bool, low_water: int) -> None:
        if fields["write"] == "back" and world.n_host_pages == 0:
            fields = {**fields, "write": "none"}
        if fields["write"] == "back":
            fields = {**fields, "write_back_low_water_pages": str(low_water)}
        self.world = RestlessWorld.of(world, fields)
        if held:
            self.world.stage.set_ports(tuple(Port), Mode.HELD)

    # The host.

    @rule(
        n_tokens=st.integers(1, 9 * PAGE),
        parent=CHOICE,
        n_shared=st.integers(0, 6),
        tenant=st.sampled_from(["", "", "blue"]),
        priority=st.sampled_from([0, 0, 0, 1]),
    )
    def submit(
        self, n_tokens: int, parent: int, n_shared: int, tenant: str, priority: int
    ) -> None:
        if len(self.world.alive()) >= N_ALIVE_MAX:
            return
        known = list(self.world.stage.prompts.by_name)
        begins = _chosen(known, parent) if n_shared else None
        name = self.world.new_prompt(n_tokens, begins, n_shared, tenant)
        self.world.submit(name, priority)

    @rule(choice=CHOICE)
    def submit_again(self, choice: int) -> None:
        name = _chosen(list(self.world.stage.prompts.by_name), choice)
        if name is not None:
            request = self.world.stage.requests.by_name.get(name)
            if request is not None and request.outcome is None:
                return
            self.world.submit(name, 0)

    @rule(choice=CHOICE)
    def abort(self, choice: int) -> None:
        request = _chosen(self.world.alive(), choice)
        if request is not None:
            self.world.is_calm = False
            self.world.give_back(request.prompt.name, f"abort {request.prompt.name}")

    @rule(choice=CHOICE)
    def run(self, choice: int) -> None:
        request = _chosen(self.world.in_state("ready"), choice)
        if request is not None:
            self.world.play(f"run {request.prompt.name}")
            self.world.started.add(request.prompt.name)

    @rule(choice=CHOICE, n_pages=st.integers(1, 3))
    def grow(self, choice: int, n_pages: int) -> None:
        request = _chosen(self.world.in_state("running"), choice)
        if request is not None:
            self.world.play(f"grow {request.prompt.name} {n_pages}")

    @rule(choice=CHOICE, n_output=st.integers(0, 2))
    def finish(self, choice: int, n_output: int) -> None:
        request = _chosen(self.world.running(), choice)
        if request is not None:
            while n_output and not self.world.fits(request, n_output):
                n_output -= 1
            if self.world.fits(request, n_output):
                name = request.prompt.name
                self.world.give_back(name, f"finish {name} output={n_output}")

    @rule(choice=CHOICE)
    def retract(self, choice: int) -> None:
        request = _chosen(self.world.running(), choice)
        if request is not None and request.n_pages_missing(request.n_sampled_in_table()) == 0:
            self.world.play(f"retract {request.prompt.name}")
            self.world.started.discard(request.prompt.name)

    @rule(choice=CHOICE)
    def resume(self, choice: int) -> None:
        request = _chosen(self.world.in_state("retracted"), choice)
        if request is not None:
            self.world.play(f"resume {request.prompt.name}")
            self.world.started.add(request.prompt.name)

    @rule(what=st.sampled_from(["device", "host", "all"]))
    def flush(self, what: str) -> None:
        self.world.play(f"flush {what}")

    @rule(verb=st.sampled_from(["detach", "attach", "attach"]))
    def storage(self, verb: str) -> None:
        self.world.play(f"{verb} storage")

    # Landings.

    @rule(n_ticks=st.integers(1, 4))
    def tick(self, n_ticks: int) -> None:
        for _ in range(n_ticks):
            self.world.tick()

    @rule()
    def land_all_and_tick(self) -> None:
        self.world.play("land all")
        self.world.tick()

    @rule(ports=st.sets(st.sampled_from(list(Port)), min_size=1), mode=st.sampled_from(list(Mode)))
    def hold_or_let_go(self, ports: set[Port], mode: Mode) -> None:
        self.world.stage.set_ports(tuple(ports), mode)

    @rule(rank=CHOICE, choice=CHOICE, n_pages=st.one_of(st.none(), st.integers(0, 4)))
    def land(self, rank: int, choice: int, n_pages: int | None) -> None:
        rank %= len(self.world.stage.ranks)
        operation = _chosen(self.world.operations(rank, ALL_KINDS - {Kind.LOOKUP}), choice)
        if operation is not None:
            self.world.land(rank, operation, n_pages)

    @rule(rank=CHOICE, choice=CHOICE, n_pages=st.integers(0, 4))
    def make_progress(self, rank: int, choice: int, n_pages: int) -> None:
        rank %= len(self.world.stage.ranks)
        operation = _chosen(self.world.operations(rank, {Kind.READ}), choice)
        if operation is not None:
            self.world.progress(rank, operation, n_pages)

    @rule(rank=CHOICE, choice=CHOICE)
    def fail(self, rank: int, choice: int) -> None:
        rank %= len(self.world.stage.ranks)
        operation = _chosen(self.world.operations(rank, ALL_KINDS), choice)
        if operation is not None:
            self.world.stage.harbour.docks[rank].end(operation, "fail")

    @rule(rank=CHOICE, choice=CHOICE)
    def say_it_again(self, rank: int, choice: int) -> None:
        rank %= len(self.world.stage.ranks)
        sim = self.world.stage.ranks[rank]
        said = [one for one in (*sim.store.log, *sim.copies.log) if one.report is not None]
        operation = _chosen(said, choice)
        if operation is not None:
            self.world.stage.harbour.docks[rank].repeat(operation)

    @rule(rank=CHOICE, choice=CHOICE, n_pages=st.integers(1, 5))
    def peer_sends(self, rank: int, choice: int, n_pages: int) -> None:
        rank %= len(self.world.stage.ranks)
        node = self.world.stage.node
        talk = _chosen(self.world.talks(rank), choice)
        if talk is not None and node.is_alive and not node.is_silent:
            self.world.stage.ranks[rank].peers.send_rest(node, talk, n_pages)

    # Bad weather.

    @rule(rank=CHOICE, choice=CHOICE, what=st.sampled_from(["fail", "again", "ack", "expire"]))
    def peer_says(self, rank: int, choice: int, what: str) -> None:
        rank %= len(self.world.stage.ranks)
        peers = self.world.stage.ranks[rank].peers
        talk = _chosen(self.world.talks(rank), choice)
        if talk is None:
            return
        match what:
            case "fail":
                self.world.peer_fails(rank, talk)
            case "again":
                peers.repeat(talk)
            case "ack":
                peers.acknowledge(talk)
            case _:
                self.world.is_calm = False
                self.world.stage.node.expire(talk.rid, [talk])

    @rule(choice=CHOICE)
    def peer_refuses(self, choice: int) -> None:
        request = _chosen(self.world.alive(), choice)
        if request is not None:
            self.world.is_calm = False
            self.world.play(f'reject peer {request.prompt.name} reason="full"')

    @rule(what=st.sampled_from(["kill", "silence", "revive", "revive"]))
    def peer_goes(self, what: str) -> None:
        self.world.is_calm = False
        self.world.play(f"{what} peer")

    @rule(rank=CHOICE, is_silent=st.sampled_from([True, False, False]))
    def store_is_silent(self, rank: int, is_silent: bool) -> None:
        ranks = self.world.stage.ranks
        ranks[rank % len(ranks)].store.is_silent = is_silent

    @rule(
        rank=CHOICE,
        choice=CHOICE,
        verb=st.sampled_from(["lose", "corrupt", "truncate", "put"]),
        page=st.integers(0, 7),
    )
    def storage_changes(self, rank: int, choice: int, verb: str, page: int) -> None:
        ranks = self.world.stage.ranks
        name = _chosen(list(self.world.stage.prompts.by_name), choice)
        if name is None:
            return
        prompt = self.world.stage.prompts.by_name[name]
        store, value = ranks[rank % len(ranks)].store, prompt.value(page)
        if verb == "put" and page < prompt.prompt.n_pages_full:
            for each in ranks:
                each.store.put(value)
        elif value in store.pages:
            self.world.play(f"{verb} {name}[{page}] {'from' if verb == 'lose' else 'in'} storage")

    @rule(tier=st.sampled_from([Tier.DEVICE, Tier.HOST]), rank=CHOICE, n_pages=st.integers(0, 4))
    def set_aside(self, tier: Tier, rank: int, n_pages: int) -> None:
        self.world.stage.drivers[rank % len(self.world.stage.ranks)].set_aside(tier, n_pages)

    @rule(ms=st.sampled_from([1, 400, 1001, 31_000, 61_000, 301_000]), rank=CHOICE)
    def clock_jumps(self, ms: int, rank: int) -> None:
        ranks = [None, *range(len(self.world.stage.ranks))]
        self.world.is_calm = self.world.is_calm and ms < 61_000
        self.world.advance(ms, _chosen(ranks, rank))

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.end_everything()


Weather.TestCase.settings = settings(
    max_examples=N_EXAMPLES,
    stateful_step_count=N_STEPS,
    deadline=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)
test_drivers_keep_every_claim_in_bad_weather = Weather.TestCase
