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
from kvlift.models.charts import CHARTS
from kvlift.models.statechart import Follower, build
from kvlift.runtime.observer import SilentObserver
from kvlift.testing.clock import NS_PER_MS
from kvlift.testing.sim_operation import Kind, Operation
from kvlift.testing.sim_peers import Conversation
from kvlift.testing.sim_store import Damage
from kvlift.testing.story_check import shortfall
from kvlift.testing.story_host import HostRequest
from kvlift.testing.story_lines import ExpectThat, Pages, PromptLine, World
from kvlift.testing.story_parse import parse_story
from kvlift.testing.story_play import Player
from kvlift.testing.story_stage import Stage

N_TICKS_TO_END = 400
NOT_YET = ('pins are needed', 'marks have descents', 'idle pages are nobodys')


@define(eq=False)
class Charts(SilentObserver):
    """A chart for each request and descent, fed with the arrows of every decision."""

    followers: dict[tuple[str, int], Follower] = field(factory=dict)
    n_arrows: int = 0

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
            self.n_arrows += 1
            if arrow[2] in (Ended, Settled):
                self.followers.pop((name, mover)).leave()


def statement_of(text: str) -> object:
    """One line that names no prompt, as the story language reads it."""
    return parse_story(text).lines[0]


@define(eq=False)
class RestlessWorld:
    """`is_calm` until somebody aborts, refuses, fails, is silent, or lets a deadline pass."""

    stage: Stage
    charts: Charts = field(factory=Charts)
    is_calm: bool = True
    given_back: set[str] = field(factory=set)
    started: set[str] = field(factory=set)
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
            if word in self.words(one.prompt.name) and one.prompt.name not in self.started
        ]

    def running(self) -> list[HostRequest]:
        """Running, or taken into the batch before the next tick."""
        return [
            one
            for one in self.alive()
            if all(one.tables)
            and ("running" in self.words(one.prompt.name) or one.prompt.name in self.started)
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

    # What the world does.

    def land(self, rank: int, operation: Operation, n_pages: int | None) -> None:
        if n_pages is not None and operation.kind is Kind.READ:
            self.stage.harbour.docks[rank].end(operation, "land", min(n_pages, 9))
        else:
            self.stage.harbour.docks[rank].end(operation, "land")

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
        sim.store.outbox.put(PrefetchProgressed(operation.ticket, n_good))

    def peer_fails(self, rank: int, talk: Conversation) -> None:
        self.is_calm = False
        reason = f"prefill lost the pages of {talk.rid}"
        self.stage.ranks[rank].peers.fail(talk, PeerCause.GONE, reason)

    def advance(self, ms: int, rank: int | None) -> None:
        for number, sim in enumerate(self.stage.ranks):
            if rank in (None, number):
                sim.clock.advance(ms * NS_PER_MS)

    # Ticks.

    def tick(self) -> None:
        before = {n: one.outcome for n, one in self.stage.requests.by_name.items()}
        self.stage.tick()
        self.started.clear()
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
            found = [one for one in found if one.name not in NOT_YET]
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
                self.started.add(one.prompt.name)
            for one in self.in_state("retracted"):
                self.play(f"resume {one.prompt.name}")
                self.started.add(one.prompt.name)
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
