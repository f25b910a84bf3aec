"""A story's world while it runs: ranks, drivers, the prefill node, and what the host knows."""

from collections.abc import Callable, Mapping

from attrs import define, field, frozen

from kvlift.core.ballot import RanksDiverged
from kvlift.core.tier import Tier
from kvlift.runtime.config import Config
from kvlift.runtime.driver import Driver
from kvlift.runtime.interpret import Ports
from kvlift.runtime.observer import SilentObserver
from kvlift.runtime.tick import Tick
from kvlift.testing.sim_memory import Mode, PageValue
from kvlift.testing.sim_peers import PrefillNode
from kvlift.testing.sim_rank import SimRank, hold, restarted, sim_ranks
from kvlift.testing.story_hear import differences, hear, note_owners, wrong_tokens
from kvlift.testing.story_host import HostRequests
from kvlift.testing.story_land import Dock, Harbour
from kvlift.testing.story_lines import Port, World
from kvlift.testing.story_prompts import Prompts
from kvlift.testing.story_trace import tick_lines
from kvlift.testing.story_view import RankView, rank_view
from kvlift.testing.watch import Watch

PEER = "prefill"

DEFAULTS: Mapping[str, str] = {
    "prefetch": "wait_complete",
    "prefetch_deadline_ms": "1000",
    "prefetch_stall_ms": "30000",
    "transfer_deadline_ms": "60000",
    "quarantine_max_ms": "300000",
    "prefetch_min_pages": "1",
    "write": "through",
    "persist": "on",
    "eviction": "lru",
    "decode_reserve_pages": "0",
    "cost_model": "off",
    "prefetches_in_flight_max": "16",
    "restores_in_flight_max": "16",
    "mirrors_in_flight_max": "16",
    "persists_in_flight_max": "16",
}


class StoryFailedError(Exception):
    """What the story expects, or what is always expected, does not hold."""


@frozen
class FaultObserver(SilentObserver):
    """Notes what a port or a page table has raised: always a bug."""

    faults: list[str]

    def failed(self, effect: object, error: Exception) -> None:
        self.faults.append(f"{type(error).__name__} in {effect}: {error}")


@define(eq=False)
class Stage:
    """One story under way. The drivers come into being when something needs them."""

    world: World
    trace: Callable[[str], None] | None = None
    fields: dict[str, str] = field(factory=lambda: dict(DEFAULTS))
    prompts: Prompts = field(init=False)
    node: PrefillNode = field(init=False)
    ranks: list[SimRank] = field(init=False)
    harbour: Harbour = field(init=False)
    requests: HostRequests = field(init=False)
    drivers: list[Driver] = field(factory=list)
    views: list[RankView] = field(factory=list)
    watch: Watch = field(factory=Watch)
    put_on: dict[tuple[Tier, PageValue], set[int]] = field(factory=dict)
    entered: list[int] = field(factory=list)
    n_ticks: int = 0
    n_ballots: int = 0
    diverged: str | None = None
    faults: list[str] = field(factory=list)

    def __attrs_post_init__(self) -> None:
        world = self.world
        self.prompts = Prompts(world.page_tokens)
        self.node = PrefillNode(PEER, world.n_ranks, first_token=self._first_token)
        self.ranks = sim_ranks(
            world.n_ranks,
            world.n_device_pages,
            world.n_host_pages,
            world.n_storage_pages,
            self.node,
        )
        self.harbour = Harbour([Dock(rank) for rank in self.ranks], self.node)
        self.requests = HostRequests(world.n_ranks)

    def config(self) -> Config:
        """Raises `ValueError` with a sentence where the story's fields are no config."""
        sizes = {
            "page_tokens": str(self.world.page_tokens),
            "device_pages": str(self.world.n_device_pages),
            "host_pages": str(self.world.n_host_pages),
        }
        return Config.parse({**self.fields, **sizes})

    def started(self) -> list[Driver]:
        """The drivers, one a rank."""
        if not self.drivers:
            config = self.config()
            for rank in self.ranks:
                ports = Ports(
                    copies=rank.copies,
                    store=rank.store,
                    peers=rank.peers,
                    ranks=rank.ranks,
                    clock=rank.clock,
                )
                self.drivers.append(Driver(config, ports, FaultObserver(self.faults)))
            self.look()
        return self.drivers

    def configure(self, fields: tuple[tuple[str, str], ...]) -> None:
        """Set fields of the config; of running drivers too, where they can change."""
        self.fields.update(fields)
        config = self.config()
        for driver in self.drivers:
            driver.reconfigure(config)

    def set_ports(self, ports: tuple[Port, ...], mode: Mode) -> None:
        for rank in self.ranks:
            hold(rank, self.node, tuple(port.value for port in ports), mode)

    def enter(self, number: int) -> None:
        """One rank enters its tick; the tick runs when all of them have."""
        self.started()
        if number not in self.entered:
            self.entered.append(number)
        if len(self.entered) == self.world.n_ranks:
            self._run_round()

    def tick(self) -> None:
        """One round: every rank that is not in its tick yet enters it."""
        for number in [n for n in range(self.world.n_ranks) if n not in self.entered]:
            self.enter(number)

    def look(self) -> None:
        """Read the drivers' snapshots again."""
        self.views = [rank_view(driver) for driver in self.drivers]
        for rid, sources in self.views[0].sources.items():
            self.requests.by_name[rid].sources = sources

    def restart(self) -> None:
        """Device and host are empty, storage stays, every request of the decode side has ended."""
        for request in self.requests.by_name.values():
            if request.outcome is None:
                request.outcome, request.reason = "failed", "the decode worker was restarted"
            request.leave_all()
        self.ranks = restarted(self.ranks)
        self.harbour = Harbour([Dock(rank) for rank in self.ranks], self.node)
        self.drivers, self.entered = [], []
        self.watch.forget()
        self.started()

    def _first_token(self, rid: str, _prompt: object) -> tuple[int, float]:
        prompt = self.prompts.by_name[rid]
        return prompt.stream.token_at(prompt.prompt.n_tokens), -0.5

    def _run_round(self) -> None:
        order, self.entered = self.entered, []
        self.n_ticks += 1
        if self.diverged is not None:
            return
        for rank in self.ranks:
            rank.clear_effects()
        n_sent = self.ranks[0].ranks.n_sent
        ticks: dict[int, Tick] = {}
        for number in order:
            try:
                ticks[number] = self.drivers[number].tick()
            except RanksDiverged as diverged:
                self.diverged = str(diverged)
        self.n_ballots = self.ranks[0].ranks.n_sent - n_sent
        before = [view.words for view in self.views]
        for number, tick in sorted(ticks.items()):
            hear(self.requests, number, tick, self.ranks[number].memory)
        self.look()
        for dock, view in zip(self.harbour.docks, self.views, strict=True):
            note_owners(dock, view, self.requests)
        if self.trace is not None:
            for line in tick_lines(self.n_ticks, self.ranks, before, self.views):
                self.trace(line)
        if self.faults:
            raise StoryFailedError("expected no fault of a rank, found " + "; ".join(self.faults))
        if self.diverged is None:
            broken = [*differences(ticks), *wrong_tokens(self.requests), *self.claims()]
            if broken:
                raise StoryFailedError("; ".join(broken))

    def claims(self) -> list[str]:
        """What is always expected and does not hold now."""
        facts = [view.facts for view in self.views]
        return self.watch.broken(self.ranks, facts, self.requests.by_name.values())
