"""Breadth-first search over everything that can happen in a world.

The search keeps one number a state, the number of its parent, and (where a claim is `Live`) its
steps. A violated claim is answered with a shortest run, made by walking the world again along the
parents. `explore_naive` is a second engine without numbers, memos or graph: equal counts of the two
are a test of both, and of the purity of what they run.
"""

import gc
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final, Generic, TypeVar

from attrs import define, field, frozen

from kvlift.models.claim import (
    Always,
    AlwaysOf,
    AlwaysStep,
    Broken,
    Live,
    Move,
    Sometimes,
    SometimesOf,
    SometimesStep,
    Trace,
    World,
)
from kvlift.models.fair import Lasso, fair_lasso
from kvlift.models.graph import Graph
from kvlift.models.judge import Judge, Spot

S = TypeVar("S")

_LOOKS_EVERY: Final = 64
"""Expanded states between two looks at the clock and the limits."""

NOTHING_RAISED: Final = "nothing raises"
"""The claim that every world makes without saying so."""


@frozen(kw_only=True)
class Limits:
    """Where to stop. A search that reaches a limit reports `complete=False`."""

    n_states_max: int = 1_000_000
    seconds_max: float = 60.0
    stops_at_violation: bool = False


@frozen(kw_only=True)
class Progress:
    """How far a search is. `n_waiting`: states that were found and not yet expanded."""

    n_states: int
    n_transitions: int
    depth: int
    n_waiting: int


@frozen(kw_only=True)
class Report(Generic[S]):
    """What a search found. In `always` and `live` None means that the claim holds.

    `sometimes` holds the shortest run to each goal, None where it was never reached. `shares` are
    (n_good, n_counted). With `complete=False` all of this is about the explored part alone.
    `depth` is the greatest distance of a state from the start, in moves.
    """

    world: str
    n_states: int
    n_transitions: int
    depth: int
    complete: bool
    seconds: float
    always: Mapping[str, Trace[S] | None]
    sometimes: Mapping[str, Trace[S] | None]
    live: Mapping[str, Trace[S] | None]
    shares: Mapping[str, tuple[int, int]]

    @property
    def holds(self) -> bool:
        """Whether no claim is broken and every goal was reached."""
        broken = [*self.always.values(), *self.live.values()]
        return all(t is None for t in broken) and all(
            t is not None for t in self.sometimes.values()
        )


def explore(
    world: World[S],
    limits: Limits = Limits(),
    on_progress: Callable[[Progress], None] | None = None,
    shall_stop: Callable[[], bool] = lambda: False,
) -> Report[S]:
    """Everything reachable in `world`, up to `limits`; `on_progress` hears of it 5 times a second.

    `shall_stop` is asked now and then: True ends the search where it is, as a limit does.
    Raises ValueError for a world with two claims of one name or without an initial state.
    """
    search = _Search(world, limits, on_progress, shall_stop)
    with _without_collector():
        search.run()
        return search.report()


def key_of(world: World[S]) -> Callable[[S], Hashable]:
    """The key that tells the states of this world apart: coarse only where nothing is `Live`."""
    has_live = any(isinstance(claim, Live) for claim in world.claims())
    return world.canonical if has_live else world.symmetric


@contextmanager
def _without_collector() -> Iterator[None]:
    """Millions of small values without a cycle: looking for cycles is a third of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@define
class _Search(Generic[S]):
    """One exploration. `numbers` maps the key of each state that was found to its number."""

    world: World[S]
    limits: Limits
    on_progress: Callable[[Progress], None] | None
    shall_stop: Callable[[], bool]
    judge: Judge[S] = field(factory=Judge, init=False)
    key: Callable[[S], Hashable] = field(init=False)
    graph: Graph = field(init=False)
    numbers: dict[Hashable, int] = field(factory=dict, init=False)
    starts: list[S] = field(factory=list, init=False)
    fresh: list[S] = field(factory=list, init=False)
    n_transitions: int = field(default=0, init=False)
    depth: int = field(default=0, init=False)
    is_complete: bool = field(default=False, init=False)
    began_s: float = field(factory=time.monotonic, init=False)
    told_s: float = field(factory=time.monotonic, init=False)

    def __attrs_post_init__(self) -> None:
        claims = self.world.claims()
        names = [NOTHING_RAISED, *(claim.name for claim in claims)]
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"world {self.world.name} claims {twice!r} twice: rename one of them")
        self.judge.take(claims)
        self.key = key_of(self.world)
        self.graph = Graph(keeps_steps=bool(self.judge.live))

    def run(self) -> None:
        """Explore, level by level, until nothing is left or a limit is reached."""
        for state in self.world.initial():
            key = self.key(state)
            if key not in self.numbers:
                self.starts.append(state)
                self._meet(state, key, parent=-1)
        if not self.starts:
            raise ValueError(f"world {self.world.name} has no initial state")
        n_left = 0
        while self.fresh:
            level, self.fresh = self.fresh, []
            for state in level:
                if self._is_enough() or (n_left == 0 and self._is_over_time()):
                    return
                n_left = n_left - 1 if n_left else _LOOKS_EVERY
                self._expand(state)
            self.depth += bool(self.fresh)
        self.is_complete = True

    def _is_enough(self) -> bool:
        return len(self.numbers) > self.limits.n_states_max or (
            self.judge.is_violated and self.limits.stops_at_violation
        )

    def _is_over_time(self) -> bool:
        """Looks at the clock, tells how far the search is, and asks whether it shall stop."""
        now_s = time.monotonic()
        if self.on_progress is not None and now_s - self.told_s > 0.2:
            self.told_s = now_s
            self.on_progress(
                Progress(
                    n_states=len(self.numbers),
                    n_transitions=self.n_transitions,
                    depth=self.depth,
                    n_waiting=len(self.numbers) - self.graph.n_expanded,
                )
            )
        return now_s - self.began_s > self.limits.seconds_max or self.shall_stop()

    def _meet(self, state: S, key: Hashable, *, parent: int) -> int:
        """Number a state that was not seen before."""
        number = self.numbers[key] = self.graph.add_state(parent)
        self.fresh.append(state)
        self.judge.meet(number, state)
        return number

    def _expand(self, state: S) -> None:
        """Make all moves of the lowest state that is not expanded yet: `state`."""
        graph, numbers, key_of_state, judge = self.graph, self.numbers, self.key, self.judge
        looks_at_steps = judge.looks_at_steps
        number = graph.n_expanded
        steps: dict[tuple[int, int], None] = {}
        moves = self._moves(number, state)
        self.n_transitions += len(moves)
        for move in moves:
            key = key_of_state(move.next)
            target = numbers.get(key)
            if target is None:
                target = self._meet(move.next, key, parent=number)
            if looks_at_steps:
                judge.look(number, state, move)
            if graph.keeps_steps:
                steps[target, graph.fair_number(move.fair)] = None
        graph.close_state(steps)

    def _moves(self, number: int, state: S) -> list[Move[S]]:
        """The moves of a state, up to the one on which the core raises, if it does."""
        moves: list[Move[S]] = []
        try:
            for move in self.world.moves(state):
                moves.append(move)  # noqa: PERF402 (those before an error are kept)
        except Exception as error:  # noqa: BLE001 (a bug of the core is a finding: it gets a story)
            move_made = Move(error.label, state) if isinstance(error, Broken) else None
            cause = error.__cause__ or error
            note = f"{type(cause).__name__}: {cause}"
            self.judge.violate(NOTHING_RAISED, Spot(number, move_made, note))
            self.judge.excuse(number)
        return moves

    def report(self) -> Report[S]:
        """What was found; decides the live claims and builds the runs."""
        always: dict[str, Trace[S] | None] = {NOTHING_RAISED: self._trace(NOTHING_RAISED)}
        sometimes: dict[str, Trace[S] | None] = {}
        live: dict[str, Trace[S] | None] = {}
        for claim in self.world.claims():
            if isinstance(claim, Always | AlwaysOf | AlwaysStep):
                always[claim.name] = self._trace(claim.name)
            elif isinstance(claim, Sometimes | SometimesOf | SometimesStep):
                sometimes[claim.name] = self._trace(claim.name)
        for goal, ended in self.judge.live:
            lasso = fair_lasso(self.graph, ended)
            live[goal.name] = None if lasso is None else self._lasso_trace(lasso)
        return Report(
            world=self.world.name,
            n_states=len(self.numbers),
            n_transitions=self.n_transitions,
            depth=self.depth,
            complete=self.is_complete,
            seconds=time.monotonic() - self.began_s,
            always=always,
            sometimes=sometimes,
            live=live,
            shares={share.name: (sums[0], sums[1]) for share, sums in self.judge.shares},
        )

    def _trace(self, name: str) -> Trace[S] | None:
        spot = self.judge.spots.get(name)
        if spot is None:
            return None
        path = self.graph.path_to(spot.number)
        moves, _ = self._walk(path)
        last = () if spot.move is None else (spot.move,)
        return Trace(self.starts[path[0]], (*moves, *last), None, spot.note)

    def _lasso_trace(self, lasso: Lasso) -> Trace[S]:
        moves, state = self._walk(list(lasso.stem))
        n_stem = len(moves)
        for target, fair in lasso.cycle:
            moves.append(self._move_to(state, target, fair))
            state = moves[-1].next
        return Trace(self.starts[lasso.stem[0]], tuple(moves), n_stem)

    def _walk(self, path: list[int]) -> tuple[list[Move[S]], S]:
        """The moves along a path of the search tree, and the state at its end."""
        state = self.starts[path[0]]
        moves: list[Move[S]] = []
        for target in path[1:]:
            moves.append(self._move_to(state, target, None))
            state = moves[-1].next
        return moves, state

    def _move_to(self, state: S, target: int, fair: int | None) -> Move[S]:
        """The first move from `state` to the state of that number (and of that fairness class)."""
        for move in self.world.moves(state):
            if self.numbers.get(self.key(move.next)) == target and (
                fair is None or self.graph.fair_number(move.fair) == fair
            ):
                return move
        raise AssertionError(
            f"world {self.world.name}: a move cannot be made a second time. Either `moves` is not "
            "a pure function, or the key joins states with different futures"
        )
