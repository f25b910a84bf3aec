"""The engine on the real core: it counts as the naive one does and asks about each part once."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import pytest
from attrs import define, evolve, field

from kvlift.core.policy import Switch
from kvlift.models.claim import AlwaysOf, Claim, Move, SometimesOf, World
from kvlift.models.explore import Limits, explore
from kvlift.models.naive import explore_naive
from kvlift.models.worlds.late import late
from kvlift.models.worlds.mirror import back
from kvlift.models.worlds.ranks import ranks
from kvlift.models.worlds.restore import calm, restore
from kvlift.models.worlds.situation import Situation


def calm_one() -> Situation:
    return calm(deep=False)


def quiet_restore() -> Situation:
    """One request that may be aborted, with faults left out and everything landing on its own."""
    whole = restore(deep=False)
    climate = evolve(whole.climate, has_pieces=False, has_silence=False, has_echoes=False)
    return remade(whole, climate=climate, n_together=1)


def calm_pair() -> Situation:
    """Two ranks that differ in what they have in storage, and in nothing else."""
    whole = ranks(deep=False)
    climate = evolve(whole.climate, has_silence=False, has_failures=False)
    return remade(whole, climate=climate, n_faults=0, goals=())


def remade(whole: Situation, **changes: Any) -> Situation:
    """The same situation with some of its settings changed."""
    names = (
        *("name", "lives", "policy", "limits", "climate", "preamble", "putting", "puts"),
        *("openings", "n_ranks", "n_faults", "n_together", "others", "goals", "storage"),
    )
    settings = {name: getattr(whole, name) for name in names}
    return Situation(**{**settings, **changes})


@pytest.mark.slow
@pytest.mark.parametrize("build", [calm_one, quiet_restore, calm_pair])
def test_the_naive_engine_finds_the_same_states(build: Callable[[], Situation]) -> None:
    fast, slow = explore(build(), Limits(seconds_max=120.0)), explore_naive(build())
    assert fast.complete
    assert slow.complete
    assert (fast.n_states, fast.n_transitions, fast.depth) == (
        slow.n_states,
        slow.n_transitions,
        slow.depth,
    )
    assert slow.n_moves_to_violation == {}
    reached = {name: len(t.moves) for name, t in fast.sometimes.items() if t is not None}
    assert reached.items() >= slow.n_moves_to_goal.items()


def test_a_state_is_packed_without_loss() -> None:
    world = quiet_restore()
    states = [next(iter(world.initial()))]
    while len(states) < 300:
        states += [move.next for state in states for move in world.moves(state)]
    assert len({world.canonical(state) for state in states}) == len(set(states)) > 5
    assert all(isinstance(world.canonical(state), bytes) for state in states)


def test_two_ranks_are_one_pair_only_where_nothing_is_live() -> None:
    world = calm_pair()
    state = next(iter(world.initial()))
    there, here = state._replace(ranks=(1, 2)), state._replace(ranks=(2, 1))
    assert world.canonical(there) != world.canonical(here)
    assert world.symmetric(there) == world.symmetric(here)


def test_a_path_that_cannot_go_down_leaves_the_tree_whole() -> None:
    limits = Limits(n_states_max=3_000, stops_at_violation=True)
    report = explore(back(deep=True), limits)
    assert [name for name, trace in report.always.items() if trace is not None] == []


def test_a_read_that_is_late_behind_the_boundary_is_given_up() -> None:
    """The run that `late --deep` found: one rank's read has ended short when another's is late."""
    world = late(deep=True)
    state = next(iter(world.initial()))
    for label in (
        *["tick"] * 3,
        "# page 1 of the read of A comes, rank=0",
        "land store A pages=1 rank=1",
        "tick",
        "# storage may never answer A any more, rank=0",
        "advance 1001ms rank=0",
        "tick",
        "tick",
    ):
        state = next(move.next for move in world.moves(state) if move.label == label)
    held = world.stage.ranks[state.ranks[0]]
    waiting = held.local.restore_by_read
    assert waiting == {}, "the copy of what has come waits for a silent storage"


# Claims about parts.


@define(eq=False)
class Grid(World[tuple[int, int]]):
    """Two counters; `looked_at`: what the claims were asked of, in order."""

    n: int
    name: str = "grid"
    looked_at: list[int] = field(factory=list)

    def claims(self) -> Sequence[Claim[tuple[int, int]]]:
        return (
            AlwaysOf("below", _both, self._is_below),
            SometimesOf("at the end", _both, lambda number: number == self.n),
            SometimesOf("beyond", _both, lambda number: number > self.n),
        )

    def _is_below(self, number: int) -> bool:
        self.looked_at.append(number)
        return number < self.n

    def initial(self) -> Iterable[tuple[int, int]]:
        return [(0, 0)]

    def moves(self, state: tuple[int, int]) -> Iterator[Move[tuple[int, int]]]:
        left, right = state
        if left < self.n:
            yield Move("left", (left + 1, right))
        if right < self.n:
            yield Move("right", (left, right + 1))

    def canonical(self, state: tuple[int, int]) -> Hashable:
        return state


def _both(state: tuple[int, int]) -> tuple[int, int]:
    return state


def test_a_claim_about_parts_is_held_against_each_part_once() -> None:
    world = Grid(4)
    report = explore(world)
    assert report.n_states == 25
    assert world.looked_at == [0, 1, 2, 3, 4]
    broken, reached = report.always["below"], report.sometimes["at the end"]
    assert broken is not None
    assert reached is not None
    assert len(broken.moves) == len(reached.moves) == 4
    assert report.sometimes["beyond"] is None


def test_both_engines_agree_on_claims_about_parts() -> None:
    slow = explore_naive(Grid(4))
    assert slow.n_states == 25
    assert slow.n_moves_to_violation == {"below": 4}
    assert slow.n_moves_to_goal == {"at the end": 4}


def test_a_search_ends_where_it_is_when_it_is_asked_to() -> None:
    report = explore(Grid(400), shall_stop=lambda: True)
    assert not report.complete
    assert 0 < report.n_states < 1_000


def test_storage_that_was_detached_is_said_in_the_story() -> None:
    assert "detach storage" in back(deep=True).story_preamble()
    assert back(deep=True).storage is Switch.OFF
