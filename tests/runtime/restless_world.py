"""A decode worker in bad weather: a story's stage, driven by chance instead of by a text.

After every tick it holds all claims of `watch`, the invariants of the core, the agreement of the
ranks, and the chart of every request and descent beside the arrows that the core says it took.
"""

from collections.abc import Sequence

from attrs import define, field

from kvlift.core.advance import Decision, State
from kvlift.core.descent import Settled
from kvlift.core.edges import EDGES, MIRROR_EDGES
from kvlift.core.invariants import breaches, local_breaches
from kvlift.core.landed import Landed, PeerCause, PrefetchProgressed
from kvlift.core.phase import Ended
from kvlift.core.submission import Submission
from kvlift.core.tier import Tier
from kvlift.models.charts import CHARTS
from kvlift.models.statechart import Edge, Follower, build
from kvlift.runtime.observer import SilentObserver
from kvlift.testing.clock import NS_PER_MS
from kvlift.testing.sim_memory import Mode
from kvlift.testing.sim_operation import Kind, Operation
from kvlift.testing.sim_peers import Conversation
from kvlift.testing.sim_store import Damage
from kvlift.testing.story_check import shortfall
from kvlift.testing.story_host import HostRequest
from kvlift.testing.story_land import NothingThereError
from kvlift.testing.story_lines import ExpectThat, Pages, Port, PromptLine, World
from kvlift.testing.story_parse import parse_story
from kvlift.testing.story_play import Player
from kvlift.testing.story_stage import Stage

N_TICKS_TO_END = 400


@define(eq=False)
class Charts(SilentObserver):
    """A chart for each request and descent, fed with the arrows of every decision."""

    followers: dict[tuple[str, int], Follower] = field(factory=dict)
    taken: set[Edge] = field(factory=set)

    def ticked(
        self,
        state: State,
        now_ns: int,
        reports: Sequence[Landed],
        least: tuple[int, ...] | None,
        calls: Sequence[Submission],
        decision: Decision,
    ) -> None:
        self.follow(decision)

    def grew(self, state: State, rid: str, n_pages: int, decision: Decision, now_ns: int) -> None:
        self.follow(decision)

    def follow(self, decision: Decision) -> None:
        """Raises `ChartDisagrees` where the core went a way that no chart has."""
        for mover, arrow in zip(decision.movers, decision.arrows, strict=True):
            name = "request" if arrow in EDGES else "mirror"
            assert arrow in EDGES or arrow in MIRROR_EDGES, f"no table has the arrow {arrow}"
            follower = self.followers.get((name, mover))
            if follower is None:
                chart = CHARTS[name]
                follower = Follower(build(chart.edges, initial=chart.initial))
                self.followers[name, mover] = follower
            follower.feed(*arrow)
            self.taken.add(arrow)
            if arrow[2] in (Ended, Settled):
                self.followers.pop((name, mover)).leave()


@define(eq=False)
class RestlessWorld:
    """`is_calm` until somebody aborts, refuses, fails, is silent, or lets a deadline pass."""

    stage: Stage
    charts: Charts = field(factory=Charts)
    is_calm: bool = True
    given_back: set[str] = field(factory=set)
    called: set[str] = field(factory=set)
    n_prompts: int = 0
    outcomes: list[str] = field(factory=list)

    @classmethod
    def of(cls, world: World, fields: dict[str, str]) -> "RestlessWorld":
        made = cls(Stage(world))
        made.stage.configure(tuple(fields.items()))
        drivers = made.stage.started()
        drivers[0]._observer = made.charts
        return made

    # What is there.

    def words(self, name: str) -> frozenset[str]:
        views = self.stage.views
        return views[0].words.get(name, frozenset()) if views else frozenset()

    def alive(self) -> list[HostRequest]:
        """Requests whose end the host has neither heard of nor brought about."""
        return [
            one
            for name, one in self.stage.requests.by_name.items()
            if one.outcome is None and name not in self.given_back
        ]

    def in_state(self, word: str) -> list[HostRequest]:
        return [
            one
            for one in self.alive()
            if word in self.words(one.prompt.name) and one.prompt.name not in self.called
        ]

    def running(self) -> list[HostRequest]:
        """Running, or taken into the batch before the next tick."""
        return [
            one
            for one in self.alive()
            if all(one.tables)
            and ("running" in self.words(one.prompt.name) or one.prompt.name in self.called)
        ]

    def operations(self, rank: int, kinds: set[Kind]) -> list[Operation]:
        """What is outstanding on a rank and would answer."""
        sim = self.stage.ranks[rank]
        found = [one for one in (*sim.store.log, *sim.copies.log) if one.is_outstanding]
        silent = {Kind.LOOKUP, Kind.READ, Kind.PERSIST} if sim.store.is_silent else set()
        return [one for one in found if one.kind in kinds - silent]

    def talks(self, rank: int) -> list[Conversation]:
        return [talk for node, talk in self.stage.ranks[rank].peers.open_talks() if node]

    def play(self, text: str) -> None:
        """A line of the story language."""
        names = "".join(f"prompt {name} tokens=1\n" for name in self.stage.prompts.by_name)
        world = f"world ranks={len(self.stage.ranks)}\n"
        line = parse_story(world + names + text).lines[-1]
        Player(self.stage).play(line)

    # What the host does.

    def new_prompt(self, n_tokens: int, parent: str | None, n_shared: int, tenant: str) -> str:
        name = f"P{self.n_prompts}"
        self.n_prompts += 1
        begins = None
        if parent is not None:
            n_shared = min(n_shared, n_tokens // self.stage.world.page_tokens)
            begins = Pages(parent, 0, n_shared)
        namespace = (("tenant", tenant),) if tenant and begins is None else ()
        line = PromptLine(name=name, n_tokens=n_tokens, begins=begins, namespace=namespace)
        self.stage.prompts.add(line)
        return name

    def submit(self, name: str, priority: int) -> None:
        self.given_back.discard(name)
        self.play(f"submit {name} priority={priority}")

    def give_back(self, name: str, text: str) -> None:
        """A call after which the pages are not the host's any more."""
        self.play(text)
        self.given_back.add(name)

    def fits(self, request: HostRequest, n_output_pages: int) -> bool:
        n_sampled = request.n_sampled_for(n_output_pages)
        return request.n_pages_missing(n_sampled) == 0

    def schedule(self, what: str, choice: int, n_pages: int) -> bool:
        """One call of the scheduler, about a request that can take it; False where none can."""
        states = {"run": "ready", "grow": "running", "resume": "retracted"}
        if what in states:
            able = self.in_state(states[what])
        else:
            able = self.alive() if what == "abort" else self.running()
            if what == "abort" and choice % 2:
                able = self.in_state("filling")
        if what == "retract":
            able = [one for one in able if one.n_pages_missing(one.n_sampled_in_table()) == 0]
        if not able:
            return False
        request = able[choice % len(able)]
        name = request.prompt.name
        match what:
            case "grow":
                self.play(f"grow {name} {max(1, n_pages)}")
            case "finish":
                n_output = next((n for n in range(n_pages, 0, -1) if self.fits(request, n)), 0)
                self.give_back(name, f"finish {name} output={n_output}")
            case "abort":
                self.is_calm = False
                self.give_back(name, f"abort {name}")
            case _:
                self.play(f"{what} {name}")
                self.called.add(name)
        return True

    # What the world does.

    def put(self, name: str, start: int, n_pages: int, tier: Tier) -> None:
        """Pages that are good already, on every rank."""
        stop = min(start + n_pages, self.stage.prompts.by_name[name].prompt.n_pages_full)
        if start < stop:
            try:
                self.play(f"put {name}[{start}:{stop}] in {tier.value}")
            except NothingThereError:
                return  # the tier is full

    def hurt(self, name: str, verb: str, page: int, rank: int) -> None:
        store = self.stage.ranks[rank].store
        if self.stage.prompts.by_name[name].value(page) in store.pages:
            where = "from" if verb == "lose" else "in"
            self.play(f"{verb} {name}[{page}] {where} storage rank={rank}")

    def peer_says(self, rank: int, talk: Conversation, what: str, n_pages: int) -> None:
        peers, node = self.stage.ranks[rank].peers, self.stage.node
        self.is_calm = self.is_calm and what not in ("peer fails", "expire", "reject")
        match what:
            case "peer sends":
                if node.is_alive and not node.is_silent:
                    peers.send_rest(node, talk, n_pages)
            case "peer fails":
                peers.fail(talk, PeerCause.GONE, f"prefill lost the pages of {talk.rid}")
            case "peer again":
                peers.repeat(talk)
            case "ack":
                peers.acknowledge(talk)
            case "reject":
                node.refuse(talk.rid, "full", [talk])
            case _:
                node.expire(talk.rid, [talk])

    def hold(self, held: set[Port]) -> None:
        self.stage.set_ports(tuple(port for port in Port if port not in held), Mode.AUTO)
        self.stage.set_ports(tuple(port for port in Port if port in held), Mode.HELD)

    def land(self, rank: int, operation: Operation, what: str, n_pages: int) -> None:
        """4 pages are all."""
        dock = self.stage.harbour.docks[rank]
        if what == "progress":
            self.progress(rank, operation, n_pages)
        elif operation.kind is Kind.READ and n_pages < 4:
            dock.end(operation, what, min(n_pages, len(operation.values)))
        else:
            dock.end(operation, what)

    def ended_operations(self, rank: int) -> list[Operation]:
        sim = self.stage.ranks[rank]
        return [one for one in (*sim.store.log, *sim.copies.log) if one.report is not None]

    def names_to_submit(self) -> list[str]:
        """Prompts that are no living request."""
        by_name = self.stage.requests.by_name
        names = list(self.stage.prompts.by_name)
        return [name for name in names if name not in by_name or by_name[name].outcome is not None]

    def progress(self, rank: int, operation: Operation, n_pages: int) -> None:
        """The first pages of a read are there and good, and the read says so."""
        sim = self.stage.ranks[rank]
        n_good = 0
        for value, target in zip(operation.values, operation.targets, strict=True):
            stored = sim.store.pages.get(value) if value is not None else None
            if n_good == n_pages or stored is None or stored.damage is not Damage.NONE:
                break
            sim.memory.host[target] = stored.content
            n_good += 1
        operation.n_landed = max(operation.n_landed, n_good)  # not written again
        sim.store.outbox.put(PrefetchProgressed(operation.ticket, n_good))

    def advance(self, ms: int, rank: int | None) -> None:
        self.is_calm = self.is_calm and ms < 31_000
        for number, sim in enumerate(self.stage.ranks):
            if rank in (None, number):
                sim.clock.advance(ms * NS_PER_MS)

    # Ticks.

    def tick(self) -> None:
        before = {n: one.outcome for n, one in self.stage.requests.by_name.items()}
        self.stage.tick()
        self.called.clear()
        for name, outcome in before.items():
            now = self.stage.requests.by_name[name].outcome
            if outcome is None and now is not None:
                self.outcomes.append(now)
        self.check()

    def check(self) -> None:
        said = shortfall(self.stage, ExpectThat("agree"))
        assert said is None, said
        for number, driver in enumerate(self.stage.drivers):
            state, limits = driver.state, driver.config.limits()
            found = [*breaches(state.agreed), *local_breaches(state.agreed, state.local, limits)]
            assert not found, f"rank {number}: {found}"

    def end_everything(self) -> None:
        """Good weather, and a host that runs and finishes what it has: nothing may be left."""
        stage = self.stage
        stage.node.revive()
        stage.node.refusals.clear()
        for rank in stage.ranks:
            rank.store.is_silent = False
        for text in ("ports auto", "unwedge host", "unwedge device", "attach storage"):
            self.play(text)
        for n_ticks in range(N_TICKS_TO_END):
            for one in self.in_state("ready"):
                self.play(f"run {one.prompt.name}")
                self.called.add(one.prompt.name)
            for one in self.in_state("retracted"):
                self.play(f"resume {one.prompt.name}")
                self.called.add(one.prompt.name)
            for one in self.in_state("running"):
                name = one.prompt.name
                self.give_back(name, f"finish {name}")
            self.advance(1000, None)
            self.tick()
            if n_ticks > 2 and shortfall(stage, ExpectThat("idle")) is None:
                break
        left = shortfall(stage, ExpectThat("idle"))
        assert left is None, f"left after {N_TICKS_TO_END} ticks of good weather: {left}"
        unheard = [n for n, one in stage.requests.by_name.items() if one.outcome is None]
        assert not unheard, f"the host has never heard of the end of {unheard}"
        assert not self.charts.followers, f"lives without an end: {self.charts.followers}"
        if self.is_calm:
            assert set(self.outcomes) <= {"done"}, f"in good weather: {self.outcomes}"
