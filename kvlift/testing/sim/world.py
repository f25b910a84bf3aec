"""A run's world: ranks with drivers, clocks and ports, prefill nodes, virtual time."""

from collections import deque
from collections.abc import Mapping, Sequence
from random import Random
from typing import Final

from attrs import define, field, frozen

from kvlift.core.prompt import Prompt
from kvlift.core.tier import Tier
from kvlift.runtime.driver import Driver
from kvlift.runtime.interpret import Ports
from kvlift.runtime.observer import Observer, Several, SilentObserver
from kvlift.testing.clock import ManualClock
from kvlift.testing.sim.agenda import Agenda
from kvlift.testing.sim.excuses import Excuses
from kvlift.testing.sim.faults import Faults
from kvlift.testing.sim.landings import Landings
from kvlift.testing.sim.plan import Plan
from kvlift.testing.sim.wires import Wires
from kvlift.testing.sim_copies import SimCopies
from kvlift.testing.sim_memory import Mode, SimMemory, page_value
from kvlift.testing.sim_peers import Conversation, PrefillNode, SimPeers
from kvlift.testing.sim_rank import SimRank
from kvlift.testing.sim_ranks import SimRanks, in_process_ranks
from kvlift.testing.sim_store import SimStore

LOG_LENGTH: Final = 2048
PPM: Final = 1_000_000


@frozen
class BugObserver(SilentObserver):
    """Notes what a port or a page table has raised: always a bug."""

    bugs: list[str]

    def failed(self, effect: object, error: Exception) -> None:
        self.bugs.append(f"{type(error).__name__} in {type(effect).__name__}: {error}")


@define(eq=False)
class World:
    """Everything outside the drivers, and the drivers. Nothing lands but from the agenda."""

    plan: Plan
    faults: Faults
    first_tokens: Mapping[str, int]
    scribes: Sequence[Observer] = ()
    agenda: Agenda = field(factory=Agenda)
    excuses: Excuses = field(factory=Excuses)
    bugs: list[str] = field(factory=list)
    asides: list[dict[Tier, int]] = field(init=False)
    nodes: dict[str, PrefillNode] = field(init=False)
    ranks: list[SimRank] = field(init=False)
    landings: list[Landings] = field(init=False)
    wires: list[Wires] = field(init=False)
    drivers: list[Driver] = field(init=False)

    def __attrs_post_init__(self) -> None:
        plan = self.plan
        names = [f"prefill-{number}" for number in range(plan.n_nodes)]
        self.nodes = {
            name: PrefillNode(name, plan.n_ranks, Mode.HELD, first_token=lambda _rid, _prompt: None)
            for name in names
        }
        self.asides = [{} for _ in range(plan.n_ranks)]
        ends = in_process_ranks(plan.n_ranks)
        self.ranks = [self._rank(number, ends[number]) for number in range(plan.n_ranks)]
        self.landings = [
            Landings(plan, self.faults, self.agenda, rank, Random(f"{plan.seed}/landings/{number}"))
            for number, rank in enumerate(self.ranks)
        ]
        self.wires = [
            Wires(
                plan,
                self.faults,
                self.agenda,
                self.excuses,
                rank,
                Random(f"{plan.seed}/wires/{number}"),
                self._token_of,
            )
            for number, rank in enumerate(self.ranks)
        ]
        self.set_clocks()
        self.drivers = [
            Driver(
                plan.config,
                Ports(
                    copies=rank.copies,
                    store=rank.store,
                    peers=rank.peers,
                    ranks=rank.ranks,
                    clock=rank.clock,
                ),
                Several((BugObserver(self.bugs), *self.scribes[number : number + 1])),
            )
            for number, rank in enumerate(self.ranks)
        ]

    def _rank(self, number: int, ends: SimRanks) -> SimRank:
        config = self.plan.config
        memory = SimMemory(config.device_pages, config.host_pages)
        store = SimStore(memory, self.plan.n_storage_pages, Mode.HELD, Mode.HELD, is_silent=True)
        store.log = deque(maxlen=LOG_LENGTH)
        copies = SimCopies(memory, Mode.HELD, Mode.HELD, deque(maxlen=LOG_LENGTH))
        peers = SimPeers(self.nodes, number, memory, deque(maxlen=LOG_LENGTH))
        return SimRank(memory, copies, store, peers, ends, ManualClock())

    def _token_of(self, talk: Conversation) -> int:
        return self.first_tokens[talk.rid]

    def set_clocks(self) -> None:
        """Every rank's clock shows virtual time with its own skew and drift."""
        for rank, (ahead_ns, ppm) in zip(self.ranks, self.plan.skews, strict=True):
            now_ns = self.agenda.now_ns
            rank.clock.ns = max(rank.clock.ns, ahead_ns + now_ns + now_ns * ppm // PPM)

    def next_deadline_ns(self) -> int | None:
        """The virtual time of the next deadline that some rank waits for."""
        found = []
        for driver, (ahead_ns, ppm) in zip(self.drivers, self.plan.skews, strict=True):
            deadline_ns = driver.state.local.deadline_ns
            if deadline_ns < 1 << 62:
                found.append((deadline_ns - ahead_ns) * PPM // (PPM + ppm) + PPM)
        return min(found, default=None)

    def look(self) -> None:
        """After a tick: put everything that was started on its way."""
        for landings in self.landings:
            landings.look()
        for wires in self.wires:
            wires.look()

    def set_aside(self, number: int, tier: Tier, n_pages: int) -> None:
        """Pages of a tier are somebody else's on one rank."""
        self.asides[number][tier] = n_pages
        self.drivers[number].set_aside(tier, n_pages)

    def give_all_back(self) -> None:
        for number in range(len(self.drivers)):
            for tier in (Tier.DEVICE, Tier.HOST):
                self.set_aside(number, tier, 0)

    def warm_up(self, prompts: Sequence[Prompt], draw: Random) -> None:
        """Storage as an earlier life left it; here and there a rank lacks a page."""
        for prompt in prompts:
            for position in range(prompt.n_pages_full):
                for rank in self.ranks:
                    if draw.random() < 0.99:
                        rank.store.put(page_value(prompt, position))

    def memories(self) -> list[SimMemory]:
        return [rank.memory for rank in self.ranks]

    # What becomes of nodes.

    def kill(self, node: PrefillNode, losses_ns: Sequence[int]) -> None:
        """The node is gone; each rank notices when its connection breaks."""
        node.is_alive = False
        self.excuses.node_is_bad(node.name, self.agenda.now_ns, "its prefill node died")
        incarnation = node.incarnation
        for wires, delay_ns in zip(self.wires, losses_ns, strict=True):

            def lose(wires: Wires = wires) -> None:
                if node.incarnation == incarnation:
                    wires.lose(node)

            self.agenda.after(delay_ns, lose)

    def revive(self, node: PrefillNode) -> None:
        """A new incarnation; what the old one had promised is lost on all ranks by now."""
        if not node.is_alive:
            for wires in self.wires:
                wires.lose(node)
            node.attempts.clear()
            node.revive()
            self.excuses.node_is_well(node.name, self.agenda.now_ns)

    def silence(self, node: PrefillNode) -> None:
        node.is_silent = True

    def speak(self, node: PrefillNode) -> None:
        """What is owed is on its way again."""
        node.is_silent = False
        for wires in self.wires:
            wires.look()


def first_token_of(answer: bytes) -> int:
    return int.from_bytes(answer[:4], "little")
