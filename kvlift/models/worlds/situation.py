"""A world: requests with their host scheduler, ranks with their weather, and a budget of faults.

Moves are single events; a tick hears all that has happened since the last one.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from attrs import define, field, frozen

from kvlift.core.agreed import Agreed, Kind
from kvlift.core.descent import Due, Mirroring, Persisting, Settled, Stowing
from kvlift.core.ids import Attempt, Ticket
from kvlift.core.invariants import breaches, local_breaches
from kvlift.core.local import Limits
from kvlift.core.notice import Notice
from kvlift.core.policy import Policy, Switch
from kvlift.models.claim import Broken, Claim, Move
from kvlift.models.memo import memo
from kvlift.models.statechart import Edge, edge_name
from kvlift.models.worlds.claims import claims_of
from kvlift.models.worlds.ghost import Rank
from kvlift.models.worlds.host import Call, Life, calls, heard
from kvlift.models.worlds.opening import Put
from kvlift.models.worlds.stage import Now, Stage
from kvlift.models.worlds.weather import Climate

_DESCENTS: Final = (Due, Mirroring, Stowing, Persisting, Settled)


@frozen(kw_only=True)
class Goal:
    """A dangerous corner that must be reached: seen in the agreed state, on one of the ranks,
    between them, or by an arrow that was taken."""

    name: str
    is_reached: Callable[[Agreed], bool] | None = None
    is_reached_on: Callable[[Rank], bool] | None = None
    is_reached_between: Callable[[tuple[Rank, ...]], bool] | None = None
    arrow: Edge | None = None


class Said(NamedTuple):
    """What the host may say, with the numbers of what it says and of the script after it."""

    call: Call
    says: tuple[int, ...]
    script: int


@define(eq=False)
class Situation:
    """One world.

    `preamble` and `putting` are the lines of its story before and after the prompts. `openings`:
    what is put in place beside `puts`, one initial state each. `n_together`: how much can happen
    between two ticks beside what the host says. `others`: what the host may do beside its
    requests, each for one fault.
    """

    name: str
    lives: tuple[Life, ...]
    policy: Policy
    limits: Limits
    climate: Climate
    preamble: str
    putting: str = ""
    puts: tuple[Put, ...] = ()
    openings: tuple[tuple[Put, ...], ...] = ((),)
    n_ranks: int = 1
    n_faults: int = 0
    n_together: int = 1
    others: tuple[str, ...] = ()
    goals: tuple[Goal, ...] = ()
    storage: Switch = Switch.ON
    stage: Stage = field(init=False)
    breaches: Callable[[int], frozenset[str]] = field(init=False)
    local_breaches: Callable[[int, int], frozenset[str]] = field(init=False)
    _label: Callable[[int, str, Ticket], str] = field(init=False)
    _calls: Callable[[int], tuple[Said, ...]] = field(init=False)
    _heard: Callable[[int, tuple[Notice, ...]], int] = field(init=False)
    _claims: list[Claim[Now]] = field(factory=list, init=False)

    def __attrs_post_init__(self) -> None:
        self.stage = Stage(self.policy, self.limits, self.climate, self.n_ranks)
        self.breaches = memo(self._breaches_of)
        self.local_breaches = memo(self._local_breaches_of)
        self._label = memo(self._label_of)
        self._calls = memo(self._calls_of)
        self._heard = memo(self._heard_of)

    # World.

    def claims(self) -> Sequence[Claim[Now]]:
        if not self._claims:
            self._claims.extend(claims_of(self))
        return self._claims

    def initial(self) -> Iterable[Now]:
        script = self.stage.scripts.number(tuple(life.opening() for life in self.lives))
        first = tuple(
            self.stage.number_of_call(life.submit()) for life in self.lives if life.is_first
        )
        for extra in self.openings:
            agreed, ranks = self.stage.opening(self.puts + extra, self.storage)
            yield Now(agreed, -1, script, first, ranks, self.n_faults)

    def canonical(self, state: Now) -> Hashable:
        return self.stage.packed(state)

    def symmetric(self, state: Now) -> Hashable:
        return self.stage.packed(state._replace(ranks=tuple(sorted(state.ranks))))

    def story_preamble(self) -> str:
        prompts = "".join(f"prompt {life.rid} {life.story}\n" for life in self.lives)
        first = "".join(f"\nsubmit {life.rid}" for life in self.lives if life.is_first)
        without = "\ndetach storage" if self.storage is Switch.OFF else ""
        return f"{self.preamble}\nports held\n{prompts}{self.putting}{without}{first}"

    def edges_taken(self) -> Iterable[str]:
        for arrow in self.stage.arrows:
            yield edge_name("mirror" if arrow[0] in _DESCENTS else "request", arrow)

    def moves(self, state: Now) -> Iterator[Move[Now]]:
        wrong = self.stage.ranks.wrong
        if wrong and not wrong.isdisjoint(state.ranks):
            return
        yield self._tick(state)
        if not state.calls:
            yield from self._host(state)
        if state.n_events < self.n_together:
            yield from self._weather(state)

    def _weather(self, state: Now) -> Iterator[Move[Now]]:
        agreed, ballot, script, calls, ranks, faults, n_events = state
        happenings, label_of = self.stage.sky.happenings, self._label
        for place, rank in enumerate(ranks):
            before, behind = ranks[:place], ranks[place + 1 :]
            for label, ticket, after, fair, cost in happenings(rank, place):
                if cost <= faults:
                    changed = (*before, after, *behind)
                    left = faults - cost
                    then = Now(agreed, ballot, script, calls, changed, left, n_events + 1)
                    yield Move(label_of(agreed, label, ticket), then, fair)

    def _tick(self, state: Now) -> Move[Now]:
        try:
            after, decision = self.stage.tick(state)
        except Exception as error:
            raise Broken("tick") from error
        if decision.notices:
            after = after._replace(script=self._heard(state.script, decision.notices))
        return Move("tick", after, "tick")

    def _host(self, state: Now) -> Iterator[Move[Now]]:
        for call, says, script in self._calls(state.script):
            if call.cost > state.faults:
                continue
            after = state._replace(
                faults=state.faults - call.cost,
                script=script,
                calls=state.calls if call.grows else state.calls + says,
            )
            yield self._growth(after, call) if call.grows else Move(call.label, after, call.fair)

    def _growth(self, state: Now, call: Call) -> Move[Now]:
        try:
            after = self.stage.grown(state, self.lives[call.life].rid, call.grows)
        except LookupError:
            return Move(call.label, state, call.fair)
        except Exception as error:
            raise Broken(call.label) from error
        return Move(call.label, after, call.fair)

    # Memoised.

    def _calls_of(self, script: int) -> tuple[Said, ...]:
        stands = self.stage.scripts.value(script)
        found = []
        for call in calls(self.lives, stands, self.others, is_calm=self.climate.is_calm):
            then = script
            if call.then is not None:
                after = (*stands[: call.life], call.then, *stands[call.life + 1 :])
                then = self.stage.scripts.number(after)
            says = tuple(self.stage.number_of_call(one) for one in call.says)
            found.append(Said(call, says, then))
        return tuple(found)

    def _heard_of(self, script: int, notices: tuple[Notice, ...]) -> int:
        after = heard(self.lives, self.stage.scripts.value(script), notices)
        return self.stage.scripts.number(after)

    def _label_of(self, agreed: int, label: str, ticket: Ticket) -> str:
        return label.format(name=owner_of(self.stage.agreed[agreed], ticket))

    def _breaches_of(self, agreed: int) -> frozenset[str]:
        return frozenset(breach.name for breach in breaches(self.stage.agreed[agreed]))

    def _local_breaches_of(self, agreed: int, local: int) -> frozenset[str]:
        state, here = self.stage.agreed[agreed], self.stage.ranks.locals[local]
        return frozenset(one.name for one in local_breaches(state, here, self.limits))


def owner_of(agreed: Agreed, ticket: Ticket) -> str:
    """The name of the request that a ticket belongs to, as far as the agreed state tells."""
    known = agreed.tickets.get(ticket)
    if known is None:
        return "?"
    if known.kind in (Kind.MIRROR, Kind.PERSIST):
        prompts = [descent.prompt for descent in agreed.descents if descent.id == known.owner]
        rids = [r.rid for r in agreed.requests.values() if r.prompt in prompts]
        return rids[0] if rids else ""
    request = agreed.requests.get(Attempt(known.owner))
    return "?" if request is None else request.rid
