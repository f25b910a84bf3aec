"""Drivers on simulated ports, their journals kept in memory, and a host that acts by chance."""

from contextlib import suppress
from random import Random

from attrs import define, evolve, field

from kvlift.core.keys import Namespace
from kvlift.core.prompt import Prompt, token_bytes
from kvlift.core.tier import Tier
from kvlift.runtime.config import Config
from kvlift.runtime.driver import Driver
from kvlift.runtime.errors import RequestLeaving
from kvlift.runtime.interpret import Ports
from kvlift.runtime.journal import Journal, header_of
from kvlift.runtime.journal_lines import Line, encoded
from kvlift.runtime.observer import Observer, Several
from kvlift.runtime.tick import Tick
from kvlift.testing.sim_memory import Mode
from kvlift.testing.sim_peers import PrefillNode
from kvlift.testing.sim_rank import SimRank, sim_ranks
from kvlift.testing.sim_store import Damage

TICK_NS = 500_000

FIELDS: dict[str, object] = {
    "page_tokens": 4,
    "device_pages": 16,
    "host_pages": 16,
    "prefetch_min_pages": 1,
    "decode_reserve_pages": 0,
    "cost_model": "off",
}


def prompt_of(n_tokens: int, first: int = 0, tenant: str = "") -> Prompt:
    namespace = Namespace(tenant=tenant, page_tokens=4).digest()
    return Prompt(namespace, token_bytes(range(first, first + n_tokens)), 4)


@define(eq=False)
class Lines:
    """A sink that keeps everything."""

    lines: list[Line] = field(factory=list)

    def put(self, line: Line, n_bytes: int) -> None:
        self.lines.append(line)

    def flush(self, deadline_s: float) -> None: ...

    def close(self) -> None: ...


@define(eq=False)
class JournalWorld:
    """`more`: further observers of rank 0."""

    n_ranks: int = 1
    fields: dict[str, object] = field(factory=dict)
    more: tuple[Observer, ...] = ()
    node: PrefillNode = field(init=False)
    ranks: list[SimRank] = field(init=False)
    drivers: list[Driver] = field(factory=list, init=False)
    sinks: list[Lines] = field(factory=list, init=False)
    states: dict[str, str] = field(factory=dict, init=False)
    n_output: dict[str, int] = field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        config = Config.parse({**FIELDS, **self.fields})
        self.node = PrefillNode("p", n_ranks=self.n_ranks)
        self.ranks = sim_ranks(
            self.n_ranks, config.device_pages, config.host_pages, None, self.node
        )
        for number, rank in enumerate(self.ranks):
            header = header_of(config, has_storage=True, rank=number, n_ranks=self.n_ranks)
            sink = Lines([header])
            journal: Observer = Journal(header, sink)
            if number == 0 and self.more:
                journal = Several((journal, *self.more))
            self.sinks.append(sink)
            self.drivers.append(Driver(config, ports_of(rank), journal))

    def close(self) -> None:
        for driver in self.drivers:
            driver.close()

    def journal(self, rank: int = 0) -> list[bytes]:
        return [encoded(line) for line in self.sinks[rank].lines]

    def call(self, name: str, *values: object, **named: object) -> list[object]:
        """The same call on every rank."""
        return [getattr(driver, name)(*values, **named) for driver in self.drivers]

    def submit(self, rid: str, prompt: Prompt) -> None:
        self.call("submit", rid, prompt, peer="p")
        self.states[rid] = "submitted"

    def tick(self, n_ticks: int = 1) -> Tick:
        tick = None
        for _ in range(n_ticks):
            for rank in self.ranks:
                rank.clock.advance(TICK_NS)
            tick, *_others = [driver.tick() for driver in self.drivers]
            for ready in tick.ready:
                self.states[ready.rid] = "ready"
            for ended in tick.ended:
                del self.states[ended.rid]
        assert tick is not None
        return tick

    def live(self, rid: str, prompt: Prompt, n_tokens: int = 1) -> None:
        """A whole life in good weather."""
        self.submit(rid, prompt)
        self.tick(8)
        assert self.states[rid] == "ready"
        self.call("run", rid)
        self.tick()
        self.call("finish", rid, token_bytes(range(n_tokens)))
        self.tick(8)
        assert rid not in self.states

    # Chance.

    def act_by_chance(self, random: Random, n_actions: int) -> None:
        for number in range(n_actions):
            self._one_action(random, number)
            if random.random() < 0.7:
                self.tick(random.choice((1, 1, 1, 2, 5)))
        self.node.mode = Mode.AUTO
        for rank in self.ranks:
            rank.copies.restores = rank.copies.mirrors = Mode.AUTO
            rank.store.reads = rank.store.writes = Mode.AUTO
        self.tick(30)

    def _one_action(self, random: Random, number: int) -> None:
        rid = random.choice(sorted(self.states)) if self.states else None
        state = self.states.get(rid or "")
        chance = random.random()
        if rid is None or (chance < 0.35 and len(self.states) < 6):
            first = random.choice((0, 0, 0, 1000))
            self.submit(f"r{number}", prompt_of(random.randint(1, 40), first))
        elif chance < 0.42:
            self.call("abort", rid)
        elif chance < 0.5:
            self._bad_weather(random)
        elif chance < 0.54:
            self.call(
                "flush", random.choice(([Tier.DEVICE], [Tier.HOST], [Tier.DEVICE, Tier.HOST]))
            )
        elif chance < 0.57:
            config = evolve(self.drivers[0].config, bypass_max=random.randint(0, 3))
            self.call("reconfigure", config)
        elif state == "ready":
            self.call("run", rid)
            self.states[rid] = "running"
            self.n_output[rid] = 1
            self.tick()
        elif state == "running":
            self._decode(random, rid)
        elif state == "retracted":
            self.call("resume", rid)
            self.states[rid] = "resumed"

    def _decode(self, random: Random, rid: str) -> None:
        view = self.drivers[0].snapshot().request(rid)
        if view is None or view.state != "running":
            return
        output = token_bytes([7] * random.randint(1, 3))
        chance = random.random()
        if chance < 0.4:
            with suppress(RequestLeaving):  # on every rank alike, before anything happened
                self.call("grow", rid, random.randint(1, 6))
        elif chance < 0.75:
            self.call("finish", rid, output)
            self.states[rid] = "finished"
        else:
            self.call("retract", rid, output)
            self.states[rid] = "retracted"

    def _bad_weather(self, random: Random) -> None:
        rank = random.choice(self.ranks)
        match random.randrange(5):
            case 0:
                rank.store.reads = random.choice((Mode.AUTO, Mode.HELD))
            case 1:
                rank.copies.restores = random.choice((Mode.AUTO, Mode.HELD))
            case 2:
                self.node.mode = random.choice((Mode.AUTO, Mode.HELD))
            case 3 if rank.store.pages:
                rank.store.damage(random.choice(list(rank.store.pages)), Damage.CORRUPT)
            case _:
                for one in [o for o in rank.store.log if o.is_outstanding][:1]:
                    rank.store.fail(one)


def ports_of(rank: SimRank, *, has_storage: bool = True) -> Ports:
    return Ports(
        copies=rank.copies,
        peers=rank.peers,
        ranks=rank.ranks,
        clock=rank.clock,
        store=rank.store if has_storage else None,
    )
