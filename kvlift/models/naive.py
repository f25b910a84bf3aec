"""The second engine: slow, obvious, and distrustful.

No numbers, no graph, no memo that outlives a state; every state is expanded twice and the answers
are compared. It decides claims about states alone. Its counts must equal those of `explore`.
"""

from collections import deque
from collections.abc import Hashable
from typing import TypeVar

from attrs import frozen

from kvlift.models.claim import Always, AlwaysOf, Sometimes, SometimesOf, World
from kvlift.models.explore import key_of
from kvlift.models.memo import forget_memos

S = TypeVar("S")


class ImpureWorld(Exception):
    """The same state gave different moves when it was asked again."""


@frozen(kw_only=True)
class NaiveReport:
    """The counts, and the length of a shortest run to each violation or goal that was met."""

    n_states: int
    n_transitions: int
    depth: int
    complete: bool
    n_moves_to_violation: dict[str, int]
    n_moves_to_goal: dict[str, int]


def _holds(claim: Always[S] | AlwaysOf[S], state: S) -> bool:
    if isinstance(claim, Always):
        return claim.holds(state)
    return all(claim.holds(part) for part in claim.parts(state))


def _is_reached(goal: Sometimes[S] | SometimesOf[S], state: S) -> bool:
    if isinstance(goal, Sometimes):
        return goal.holds(state)
    return any(goal.holds(part) for part in goal.parts(state))


def explore_naive(world: World[S], *, n_states_max: int = 100_000) -> NaiveReport:
    """All of a small world. Raises ImpureWorld, and whatever the world raises."""
    key = key_of(world)
    always = [claim for claim in world.claims() if isinstance(claim, Always | AlwaysOf)]
    sometimes = [claim for claim in world.claims() if isinstance(claim, Sometimes | SometimesOf)]
    violations: dict[str, int] = {}
    goals: dict[str, int] = {}
    seen: set[Hashable] = set()
    todo: deque[tuple[S, int]] = deque()
    n_transitions = depth = 0

    def meet(state: S, distance: int) -> None:
        if key(state) in seen:
            return
        seen.add(key(state))
        todo.append((state, distance))
        for claim in always:
            if not _holds(claim, state):
                violations.setdefault(claim.name, distance)
        for goal in sometimes:
            if _is_reached(goal, state):
                goals.setdefault(goal.name, distance)

    for state in world.initial():
        meet(state, 0)
    while todo and len(seen) <= n_states_max:
        state, depth = todo.popleft()
        forget_memos()
        moves = list(world.moves(state))
        forget_memos()
        again = list(world.moves(state))
        if [(m.label, m.fair, key(m.next)) for m in moves] != [
            (m.label, m.fair, key(m.next)) for m in again
        ]:
            raise ImpureWorld(f"world {world.name}: asked twice, {state!r} has different moves")
        n_transitions += len(moves)
        for move in moves:
            meet(move.next, depth + 1)
    return NaiveReport(
        n_states=len(seen),
        n_transitions=n_transitions,
        depth=depth,
        complete=not todo,
        n_moves_to_violation=violations,
        n_moves_to_goal=goals,
    )
