"""The checker is checked: on puzzles and protocols whose counts others have published."""

import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import TypeVar

import pytest
from attrs import field, frozen

from kvlift.models.claim import (
    Always,
    AlwaysStep,
    Broken,
    Claim,
    Live,
    Move,
    Share,
    Sometimes,
    SometimesStep,
    Trace,
    World,
    as_story,
)
from kvlift.models.explore import NOTHING_RAISED, Limits, Progress, explore
from kvlift.models.memo import Numbered, forget_memos, memo, memo_counts
from kvlift.models.naive import ImpureWorld, explore_naive

S = TypeVar("S")


def replayed(world: World[S], trace: Trace[S]) -> list[S]:
    """The states along a trace; every move must be one that the world offers there."""
    states = [trace.start]
    for move in trace.moves:
        assert move in list(world.moves(states[-1]))
        states.append(move.next)
    return states


def assert_both_engines_count_alike(world: World[S]) -> None:
    fast, slow = explore(world), explore_naive(world)
    assert fast.complete
    assert slow.complete
    assert (fast.n_states, fast.n_transitions, fast.depth) == (
        slow.n_states,
        slow.n_transitions,
        slow.depth,
    )
    about_states = {c.name for c in world.claims() if isinstance(c, Always | Sometimes)}
    broken = {name: len(t.moves) for name, t in fast.always.items() if t and name in about_states}
    reached = {n: len(t.moves) for n, t in fast.sometimes.items() if t and n in about_states}
    assert broken == slow.n_moves_to_violation
    assert reached == slow.n_moves_to_goal


# ---- jugs of 3 and 5 gallons: TLC counts 16 distinct states of 97 generated, 4 gallons in 6 moves

Jugs = tuple[int, int]


@frozen
class DieHard(World[Jugs]):
    name: str = "die hard"

    def claims(self) -> Sequence[Claim[Jugs]]:
        return (
            Always("no jug overflows", lambda s: 0 <= s[0] <= 3 and 0 <= s[1] <= 5),
            Always("never 4 gallons", lambda s: s[1] != 4),
            Sometimes("both are full", lambda s: s == (3, 5)),
            Sometimes("more than there is room for", lambda s: sum(s) > 8),
        )

    def initial(self) -> Iterable[Jugs]:
        return [(0, 0)]

    def moves(self, state: Jugs) -> Iterator[Move[Jugs]]:
        small, big = state
        yield Move("fill small", (3, big))
        yield Move("fill big", (small, 5))
        yield Move("empty small", (0, big))
        yield Move("empty big", (small, 0))
        n_poured = min(small, 5 - big)
        yield Move("pour small into big", (small - n_poured, big + n_poured))
        n_poured = min(big, 3 - small)
        yield Move("pour big into small", (small + n_poured, big - n_poured))

    def canonical(self, state: Jugs) -> Hashable:
        return state

    def story_preamble(self) -> str:
        return "world jugs=3,5"


def test_the_jugs_have_the_states_that_tlc_counts() -> None:
    report = explore(DieHard())
    assert (report.n_states, report.n_transitions + 1) == (16, 97)
    assert report.complete
    assert report.always["no jug overflows"] is None
    assert report.sometimes["more than there is room for"] is None
    assert not report.holds


def test_four_gallons_take_six_moves_and_the_run_is_a_story() -> None:
    trace = explore(DieHard()).always["never 4 gallons"]
    assert trace is not None
    assert replayed(DieHard(), trace)[-1][1] == 4
    assert as_story(DieHard(), trace, claim="never 4 gallons") == (
        "# never 4 gallons\n"
        "world jugs=3,5\n"
        "fill big\n"
        "pour big into small\n"
        "empty small\n"
        "pour big into small\n"
        "fill big\n"
        "pour big into small\n"
    )


def test_both_engines_agree_on_the_jugs() -> None:
    assert_both_engines_count_alike(DieHard())


# ---- two-phase commit: TLC and stateright count 288 states with 3 resource managers, 8,832 with 5

Rms = tuple[str, ...]
Commit = tuple[Rms, str, frozenset[int], frozenset[str]]


@frozen
class TwoPhaseCommit(World[Commit]):
    n: int
    is_symmetric: bool = field(default=False, kw_only=True)
    commits_early: bool = field(default=False, kw_only=True)
    name: str = "two-phase commit"

    def claims(self) -> Sequence[Claim[Commit]]:
        return (
            Always(
                "nobody commits what another one aborts",
                lambda s: len({"committed", "aborted"} & set(s[0])) < 2,
            ),
            AlwaysStep("a decision is final", self._keeps_decisions),
            Sometimes("all commit", lambda s: set(s[0]) == {"committed"}),
            Sometimes("all abort", lambda s: set(s[0]) == {"aborted"}),
            SometimesStep(
                "the last one commits",
                lambda before, _move, after: set(after[0]) == {"committed"} != set(before[0]),
            ),
        )

    @staticmethod
    def _keeps_decisions(before: Commit, _move: Move[Commit], after: Commit) -> bool:
        return all(
            old == new
            for old, new in zip(before[0], after[0], strict=True)
            if old in {"committed", "aborted"}
        )

    def initial(self) -> Iterable[Commit]:
        return [(("working",) * self.n, "init", frozenset(), frozenset())]

    def moves(self, state: Commit) -> Iterator[Move[Commit]]:
        rms, tm, prepared, sent = state
        if tm == "init":
            if len(prepared) >= self.n - self.commits_early:
                yield Move("tm commits", (rms, "committed", prepared, sent | {"commit"}))
            yield Move("tm aborts", (rms, "aborted", prepared, sent | {"abort"}))
        for i in range(self.n):

            def turned(to: str, i: int = i) -> Rms:
                return (*rms[:i], to, *rms[i + 1 :])

            if tm == "init" and f"prepared {i}" in sent:
                yield Move(f"tm hears {i}", (rms, tm, prepared | {i}, sent))
            if rms[i] == "working":
                heard = sent | {f"prepared {i}"}
                yield Move(f"{i} prepares", (turned("prepared"), tm, prepared, heard))
                yield Move(f"{i} aborts", (turned("aborted"), tm, prepared, sent))
            if "commit" in sent:
                yield Move(f"{i} hears commit", (turned("committed"), tm, prepared, sent))
            if "abort" in sent:
                yield Move(f"{i} hears abort", (turned("aborted"), tm, prepared, sent))

    def canonical(self, state: Commit) -> Hashable:
        return state

    def symmetric(self, state: Commit) -> Hashable:
        if not self.is_symmetric:
            return state
        rms, tm, prepared, sent = state
        rows = [(rms[i], i in prepared, f"prepared {i}" in sent) for i in range(self.n)]
        return tuple(sorted(rows)), tm, sent & {"commit", "abort"}


def renamed(state: Commit, new: tuple[int, ...]) -> Commit:
    rms, tm, prepared, sent = state
    swapped = [""] * len(rms)
    for i, rm in enumerate(rms):
        swapped[new[i]] = rm
    heard = {f"prepared {new[i]}" for i in range(len(rms)) if f"prepared {i}" in sent}
    return (
        tuple(swapped),
        tm,
        frozenset(new[i] for i in prepared),
        frozenset(heard) | (sent & {"commit", "abort"}),
    )


@pytest.mark.parametrize(("n", "n_states"), [(3, 288), (5, 8832)])
def test_two_phase_commit_has_the_published_number_of_states(n: int, n_states: int) -> None:
    report = explore(TwoPhaseCommit(n))
    assert report.n_states == n_states
    assert report.holds
    all_commit = report.sometimes["all commit"]
    assert all_commit is not None
    assert len(all_commit.moves) == report.depth == 3 * n + 1


def test_both_engines_agree_on_two_phase_commit() -> None:
    assert_both_engines_count_alike(TwoPhaseCommit(3))
    assert_both_engines_count_alike(TwoPhaseCommit(3, is_symmetric=True))
    assert_both_engines_count_alike(TwoPhaseCommit(3, commits_early=True))


def test_symmetry_leaves_one_state_of_each_orbit() -> None:
    world = TwoPhaseCommit(4)
    seen = {next(iter(world.initial()))}
    todo = list(seen)
    while todo:
        for move in world.moves(todo.pop()):
            if move.next not in seen:
                seen.add(move.next)
                todo.append(move.next)
    permutations = list(itertools.permutations(range(4)))
    orbits = {frozenset(renamed(state, new) for new in permutations) for state in seen}
    report = explore(TwoPhaseCommit(4, is_symmetric=True))
    assert len(seen) == explore(world).n_states
    assert report.n_states == len(orbits) < len(seen) / 8
    assert report.holds


def test_a_manager_that_commits_early_is_found_with_a_shortest_run_also_under_symmetry() -> None:
    lengths = []
    for is_symmetric in (False, True):
        world = TwoPhaseCommit(3, commits_early=True, is_symmetric=is_symmetric)
        trace = explore(world).always["nobody commits what another one aborts"]
        assert trace is not None
        assert {"committed", "aborted"} <= set(replayed(world, trace)[-1][0])
        lengths.append(len(trace.moves))
    assert lengths == [7, 7]  # two prepare, both are heard, commit, one commits, one aborts


# ---- Peterson's mutual exclusion

Peterson = tuple[tuple[str, str], tuple[bool, bool], int]


@frozen
class PetersonLock(World[Peterson]):
    is_fair: bool = field(default=True, kw_only=True)
    is_polite: bool = field(default=True, kw_only=True)
    name: str = "peterson"

    def claims(self) -> Sequence[Claim[Peterson]]:
        return (
            Always("one at a time", lambda s: s[0] != ("inside", "inside")),
            Sometimes("both wait", lambda s: s[0] == ("waits", "waits")),
            Live("0 gets in", lambda s: s[0][0] in {"away", "inside"}),
            Live("1 gets in", lambda s: s[0][1] in {"away", "inside"}),
        )

    def initial(self) -> Iterable[Peterson]:
        return [(("away", "away"), (False, False), turn) for turn in (0, 1)]

    def moves(self, state: Peterson) -> Iterator[Move[Peterson]]:
        at, wants, turn = state
        for i in (0, 1):
            other = 1 - i

            def now(
                place: str, *, want: bool, i: int = i
            ) -> tuple[tuple[str, str], tuple[bool, bool]]:
                places, flags = list(at), list(wants)
                places[i], flags[i] = place, want
                return (places[0], places[1]), (flags[0], flags[1])

            fair = f"process {i}" if self.is_fair else None
            match at[i]:
                case "away":  # nobody has to want in: not fair
                    yield Move(f"{i} wants", (*now("asks", want=True), turn))
                case "asks":
                    yields_to = other if self.is_polite else i
                    yield Move(f"{i} yields", (*now("waits", want=True), yields_to), fair)
                case "waits" if not wants[other] or turn == i:
                    yield Move(f"{i} enters", (*now("inside", want=True), turn), fair)
                case "waits":
                    yield Move(f"{i} spins", state, fair)
                case "inside":
                    yield Move(f"{i} leaves", (*now("away", want=False), turn), fair)
                case _:
                    raise AssertionError(at)

    def canonical(self, state: Peterson) -> Hashable:
        return state


def test_petersons_lock_is_safe_and_nobody_waits_for_ever() -> None:
    report = explore(PetersonLock())
    assert report.holds
    # (places) x turns: both away 2, one asks 4, both ask 2, both wait 2, one waits and the other is
    # away or asks 4, one is inside and the other is away, asks or waits 6
    assert report.n_states == 20
    assert_both_engines_count_alike(PetersonLock())


def test_without_fairness_petersons_lock_starves() -> None:
    report = explore(PetersonLock(is_fair=False))
    assert report.always["one at a time"] is None
    for i, claim in enumerate(("0 gets in", "1 gets in")):
        trace = report.live[claim]
        assert trace is not None
        assert trace.cycle_from is not None
        states = replayed(PetersonLock(is_fair=False), trace)
        assert states[trace.cycle_from] == states[-1]
        assert len(states) - 1 > trace.cycle_from
        assert all(s[0][i] in {"asks", "waits"} for s in states[trace.cycle_from :])


def test_an_impolite_lock_lets_two_in() -> None:
    world = PetersonLock(is_polite=False)
    trace = explore(world).always["one at a time"]
    assert trace is not None
    assert len(trace.moves) == 6
    assert replayed(world, trace)[-1][0] == ("inside", "inside")
    assert_both_engines_count_alike(world)


# ---- dining philosophers

Table = tuple[int, ...]  # forks in the hand of each: 0, 1, 2 (eats)


@frozen
class Philosophers(World[Table]):
    n: int
    last_is_left_handed: bool = field(default=False, kw_only=True)
    name: str = "philosophers"

    def claims(self) -> Sequence[Claim[Table]]:
        return (
            Always(
                "neighbours do not eat together",
                lambda s: not any(s[i] == 2 == s[(i + 1) % self.n] for i in range(self.n)),
            ),
            Sometimes("two eat", lambda s: sum(held == 2 for held in s) == 2),
            Live("somebody eats", lambda s: 2 in s),
        )

    def initial(self) -> Iterable[Table]:
        return [(0,) * self.n]

    def _forks(self, i: int) -> tuple[int, int]:
        forks = (i, (i + 1) % self.n)
        return forks[::-1] if self.last_is_left_handed and i == self.n - 1 else forks

    def moves(self, state: Table) -> Iterator[Move[Table]]:
        taken = {fork for i in range(self.n) for fork in self._forks(i)[: state[i]]}
        for i, held in enumerate(state):
            after = (*state[:i], (held + 1) % 3, *state[i + 1 :])
            if held == 2:
                yield Move(f"{i} puts both back", after, f"philosopher {i}")
            elif self._forks(i)[held] not in taken:
                yield Move(f"{i} takes fork {self._forks(i)[held]}", after, f"philosopher {i}")

    def canonical(self, state: Table) -> Hashable:
        return state


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_philosophers_who_reach_the_same_way_get_stuck_after_one_fork_each(n: int) -> None:
    world = Philosophers(n)
    report = explore(world)
    trace = report.live["somebody eats"]
    assert trace is not None
    assert len(trace.moves) == trace.cycle_from == n
    assert list(world.moves(replayed(world, trace)[-1])) == []
    story = as_story(world, trace, claim="somebody eats")
    assert story.splitlines()[-1] == "# nothing can happen after this, and it has not ended"
    assert report.always["neighbours do not eat together"] is None


def test_one_left_handed_philosopher_keeps_them_fed() -> None:
    world = Philosophers(5, last_is_left_handed=True)
    report = explore(world)
    assert report.live == {"somebody eats": None}
    assert report.holds
    assert_both_engines_count_alike(world)


# ---- the 2x3 sliding puzzle: 6!/2 = 360 states, 21 moves deep


@frozen
class SlidingPuzzle(World[str]):
    name: str = "sliding puzzle"

    def claims(self) -> Sequence[Claim[str]]:
        return (Share("first tile at home", lambda _s: 1, lambda s: s[0] == "1"),)

    def initial(self) -> Iterable[str]:
        return ["12345 "]

    def moves(self, state: str) -> Iterator[Move[str]]:
        hole = state.index(" ")
        row, column = divmod(hole, 3)
        for other in (hole - 3, hole + 3, hole - 1, hole + 1):
            if 0 <= other < 6 and (other // 3 == row or other % 3 == column):
                tiles = list(state)
                tiles[hole], tiles[other] = tiles[other], " "
                yield Move(f"slide {state[other]}", "".join(tiles))

    def canonical(self, state: str) -> Hashable:
        return state


def test_the_sliding_puzzle_is_360_states_and_21_moves_deep() -> None:
    report = explore(SlidingPuzzle())
    assert (report.n_states, report.depth) == (360, 21)
    assert report.shares == {"first tile at home": (60, 360)}
    assert_both_engines_count_alike(SlidingPuzzle())


# ---- the rest of the contract


@frozen
class Counter(World[int]):
    """Counts up for ever, unless it is told to break."""

    breaks_at: int | None = None
    says_where: bool = field(default=True, kw_only=True)
    extra: tuple[Claim[int], ...] = ()
    key: Callable[[int], Hashable] = int
    name: str = "counter"

    def claims(self) -> Sequence[Claim[int]]:
        return self.extra

    def initial(self) -> Iterable[int]:
        return [0]

    def moves(self, state: int) -> Iterator[Move[int]]:
        yield Move("wait", state)
        if state == self.breaks_at:
            problem = ZeroDivisionError(f"broke at {state}")
            if not self.says_where:
                raise problem
            raise Broken("add 1") from problem
        yield Move("add 1", state + 1)

    def canonical(self, state: int) -> Hashable:
        return self.key(state)


def test_a_search_stops_at_its_limits_and_says_that_it_is_not_complete() -> None:
    by_states = explore(Counter(), Limits(n_states_max=500))
    assert not by_states.complete
    assert by_states.n_states == 501
    by_time = explore(Counter(), Limits(seconds_max=0.05, n_states_max=10**9))
    assert not by_time.complete
    assert 0.05 <= by_time.seconds < 1
    assert not explore_naive(Counter(), n_states_max=50).complete


def test_a_search_can_stop_at_the_first_violation() -> None:
    world = Counter(extra=(Always("small", lambda n: n < 10), Live("ends", lambda n: n > 5)))
    report = explore(world, Limits(n_states_max=1000, stops_at_violation=True))
    assert report.n_states == 11
    trace = report.always["small"]
    assert trace is not None
    assert [move.label for move in trace.moves] == ["add 1"] * 10


def test_progress_is_reported_while_a_search_runs() -> None:
    told: list[Progress] = []
    explore(Counter(), Limits(n_states_max=10**9, seconds_max=0.5), told.append)
    assert 1 <= len(told) <= 3
    assert all(p.n_states == p.n_waiting + p.depth for p in told)


@pytest.mark.parametrize("says_where", [True, False])
def test_an_error_of_the_core_is_a_violation_with_a_story(*, says_where: bool) -> None:
    world = Counter(breaks_at=2, says_where=says_where, extra=(Live("ends", lambda n: n == 9),))
    report = explore(world)
    trace = report.always[NOTHING_RAISED]
    assert trace is not None
    labels = ["add 1"] * (3 if says_where else 2)
    assert [move.label for move in trace.moves] == labels
    assert as_story(world, trace, claim=NOTHING_RAISED).splitlines()[:2] == [
        "# nothing raises",
        "# ZeroDivisionError: broke at 2",
    ]
    assert report.complete
    assert report.n_states == 3


def test_waiting_for_ever_is_no_end() -> None:
    world = Counter(breaks_at=3, extra=(Live("ends", lambda n: n == 9),))
    trace = explore(world).live["ends"]
    assert trace is not None
    assert (trace.cycle_from, [move.label for move in trace.moves]) == (0, ["wait"])
    assert "# from here on the same lines repeat for ever\nwait\n" in as_story(
        world, trace, claim="ends"
    )


def test_two_claims_of_one_name_and_a_world_without_a_start_are_refused() -> None:
    twice: tuple[Claim[int], ...] = (
        Always("it", lambda _n: True),
        Sometimes("it", lambda _n: True),
    )
    with pytest.raises(ValueError, match="claims 'it' twice"):
        explore(Counter(extra=twice))

    class Nowhere(Counter):
        def initial(self) -> Iterable[int]:
            return []

    with pytest.raises(ValueError, match="no initial state"):
        explore(Nowhere())


def test_a_key_that_joins_different_futures_is_found_out() -> None:
    # 0 and 4 are one state for this key, but only the way through 4 leads on to the goal
    world = Counter(breaks_at=6, key=lambda n: n % 4, extra=(Sometimes("five", lambda n: n == 5),))
    assert explore(world).sometimes["five"] is None

    class Fickle(Counter):
        asked: set[int] = set()  # noqa: RUF012

        def moves(self, state: int) -> Iterator[Move[int]]:
            if state in self.asked:
                return
            self.asked.add(state)
            yield from super().moves(state)

    with pytest.raises(AssertionError, match="cannot be made a second time"):
        explore(Fickle(breaks_at=6, extra=(Always("small", lambda n: n < 3),)))


def test_an_impure_world_is_found_by_the_naive_engine() -> None:
    calls: list[int] = []

    @memo
    def impure(n: int) -> int:
        calls.append(n)
        return n + len(calls)

    class Impure(Counter):
        def moves(self, state: int) -> Iterator[Move[int]]:
            yield Move("add", impure(state))

    with pytest.raises(ImpureWorld, match="asked twice, 0 has different moves"):
        explore_naive(Impure())


def test_a_memo_runs_a_function_once_for_each_argument_and_counts() -> None:
    runs: list[tuple[int, int]] = []

    @memo
    def added(a: int, b: int) -> int:
        runs.append((a, b))
        return a + b

    assert [added(1, 2), added(1, 2), added(2, 1)] == [3, 3, 3]
    assert runs == [(1, 2), (2, 1)]
    name = next(name for name in memo_counts() if name.endswith("added"))
    assert (memo_counts()[name].n_calls, memo_counts()[name].n_runs) == (3, 2)
    forget_memos()
    assert added(1, 2) == 3
    assert len(runs) == 3


def test_numbers_are_given_in_order_of_first_sight() -> None:
    numbered: Numbered[str] = Numbered()
    assert [numbered.number(word) for word in ("b", "a", "b", "c")] == [0, 1, 0, 2]
    assert [numbered.value(n) for n in range(len(numbered))] == ["b", "a", "c"]
