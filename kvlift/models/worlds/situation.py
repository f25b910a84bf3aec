"""A world: requests with their host scheduler, ranks with their weather, and a budget of faults.

Moves are single events; a tick hears all that has happened since the last one.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Final

from attrs import define, field, frozen

from kvlift.core.agreed import Agreed, Kind
from kvlift.core.descent import Due, Mirroring, Persisting, Settled, Stowing
from kvlift.core.ids import Attempt, Ticket
from kvlift.core.invariants import breaches, local_breaches
from kvlift.core.local import Limits
from kvlift.core.policy import Policy, Switch
from kvlift.models.claim import Broken, Claim, Move
from kvlift.models.memo import memo
from kvlift.models.statechart import Edge, edge_name
from kvlift.models.worlds.claims import claims_of
from kvlift.models.worlds.ghost import Rank
from kvlift.models.worlds.host import Call, Life, Stand, calls, heard
from kvlift.models.worlds.opening import Put
from kvlift.models.worlds.stage import Now, Stage
from kvlift.models.worlds.weather import Climate, Event, events

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
    _events: Callable[[int, int], tuple[tuple[Event, int], ...]] = field(init=False)
    _label: Callable[[int, str, Ticket], str] = field(init=False)
    _calls: Callable[[tuple[Stand, ...]], tuple[Call, ...]] = field(init=False)
    _claims: list[Claim[Now]] = field(factory=list, init=False)

    def __attrs_post_init__(self) -> None:
        self.stage = Stage(self.policy, self.limits, self.climate, self.n_ranks)
        self.breaches = memo(self._breaches_of)
        self.local_breaches = memo(self._local_breaches_of)
        self._events = memo(self._events_of)
        self._label = memo(self._label_of)
        self._calls = memo(self._calls_of)

    # World.

    def claims(self) -> Sequence[Claim[Now]]:
        if not self._claims:
            self._claims.extend(claims_of(self))
        return self._claims

    def initial(self) -> Iterable[Now]:
        script = tuple(life.opening() for life in self.lives)
        first = tuple(
            self.stage.number_of_call(life.submit()) for life in self.lives if life.is_first
        )
        for extra in self.openings:
            agreed, ranks = self.stage.opening(self.puts + extra, self.storage)
            yield Now(agreed, -1, script, first, ranks, self.n_faults)

    def canonical(self, state: Now) -> Hashable:
        return state

    def symmetric(self, state: Now) -> Hashable:
        return state._replace(ranks=tuple(sorted(state.ranks)))

    def story_preamble(self) -> str:
        prompts = "".join(f"prompt {life.rid} {life.story}\n" for life in self.lives)
        first = "".join(f"\nsubmit {life.rid}" for life in self.lives if life.is_first)
        without = "\ndetach storage" if self.storage is Switch.OFF else ""
        return f"{self.preamble}\nports held\n{prompts}{self.putting}{without}{first}"

    def edges_taken(self) -> Iterable[str]:
        for arrow in self.stage.arrows:
            yield edge_name("mirror" if arrow[0] in _DESCENTS else "request", arrow)

    def moves(self, state: Now) -> Iterator[Move[Now]]:
        if any(self.stage.ranks[rank].wrong for rank in state.ranks):
            return
        yield self._tick(state)
        if not state.calls:
            yield from self._host(state)
        if state.n_events < self.n_together:
            yield from self._weather(state)

    def _weather(self, state: Now) -> Iterator[Move[Now]]:
        for number, rank in enumerate(state.ranks):
            for event, after in self._events(rank, number):
                if event.cost > state.faults:
                    continue
                label = self._label(state.agreed, event.label, event.ticket)
                changed = state._replace(
                    ranks=(*state.ranks[:number], after, *state.ranks[number + 1 :]),
                    faults=state.faults - event.cost,
                    n_events=state.n_events + 1,
                )
                yield Move(label, changed, event.fair)

    def _tick(self, state: Now) -> Move[Now]:
        try:
            after, decision = self.stage.tick(state)
        except Exception as error:
            raise Broken("tick") from error
        if decision.notices:
            script = heard(self.lives, state.script, decision.notices)
            after = after._replace(script=script)
        return Move("tick", after, "tick")

    def _host(self, state: Now) -> Iterator[Move[Now]]:
        for call in self._calls(state.script):
            if call.cost > state.faults:
                continue
            after = state._replace(faults=state.faults - call.cost)
            if call.then is not None:
                script = (*state.script[: call.life], call.then, *state.script[call.life + 1 :])
                after = after._replace(script=script)
            if call.grows:
                yield self._growth(after, call)
                continue
            said = tuple(self.stage.number_of_call(one) for one in call.says)
            yield Move(call.label, after._replace(calls=state.calls + said), call.fair)

    def _growth(self, state: Now, call: Call) -> Move[Now]:
        try:
            after = self.stage.grown(state, self.lives[call.life].rid, call.grows)
        except LookupError:
            return Move(call.label, state, call.fair)
        except Exception as error:
            raise Broken(call.label) from error
        return Move(call.label, after, call.fair)

    # Memoised.

    def _events_of(self, rank: int, number: int) -> tuple[tuple[Event, int], ...]:
        found = events(self.stage.ranks[rank], number, self.climate)
        return tuple((event, self.stage.number_of_rank(event.after)) for event in found)

    def _calls_of(self, script: tuple[Stand, ...]) -> tuple[Call, ...]:
        found = calls(self.lives, script, self.others, is_calm=self.climate.is_calm)
        return tuple(found)

    def _label_of(self, agreed: int, label: str, ticket: Ticket) -> str:
        return label.format(name=owner_of(self.stage.agreed[agreed], ticket))

    def _breaches_of(self, agreed: int) -> frozenset[str]:
        return frozenset(breach.name for breach in breaches(self.stage.agreed[agreed]))

    def _local_breaches_of(self, agreed: int, rank: int) -> frozenset[str]:
        state, local = self.stage.agreed[agreed], self.stage.ranks[rank].local
        return frozenset(one.name for one in local_breaches(state, local, self.limits))


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
