"""Components against scipy, fair runs against brute force over every set of states."""

import random
from collections.abc import Iterable

import numpy as np
import pytest
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components

from kvlift.models.fair import Lasso, components, fair_lasso
from kvlift.models.graph import Graph

Step = tuple[int, int, str | None]  # from, to, fairness class


def graph_of(n_states: int, steps: Iterable[Step]) -> Graph:
    """A graph whose states hang on a path 0, 1, 2, ... that its steps need not contain."""
    graph = Graph(keeps_steps=True)
    by_state: list[list[tuple[int, int]]] = [[] for _ in range(n_states)]
    for source, target, fair in steps:
        by_state[source].append((target, graph.fair_number(fair)))
    for state in range(n_states):
        graph.add_state(state - 1)
        graph.close_state(dict.fromkeys(by_state[state]))
    return graph


def random_steps(seed: int, n_states: int, n_steps: int, fairs: list[str | None]) -> list[Step]:
    draw = random.Random(seed)
    return [
        (draw.randrange(n_states), draw.randrange(n_states), draw.choice(fairs))
        for _ in range(n_steps)
    ]


def assert_is_fair_lasso(lasso: Lasso, steps: list[Step], ended: bytearray) -> None:
    """The cycle is made of real steps, never ends, and is weakly fair."""
    graph = graph_of(len(ended), steps)
    numbered = {(s, t, graph.fair_number(fair)) for s, t, fair in steps}
    start = at = lasso.stem[-1]
    if not lasso.cycle:
        assert not any(source == start for source, _, _ in steps)
        assert not ended[start]
        return
    visited, taken = [], set()
    for target, fair in lasso.cycle:
        assert (at, target, fair) in numbered
        assert not ended[target]
        at = target
        visited.append(at)
        taken.add(fair)
    assert at == start
    enabled = [{fair for s, _, fair in numbered if s == state and fair >= 0} for state in visited]
    assert set.intersection(*enabled) <= taken


def has_fair_run(n_states: int, steps: list[Step], ended: bytearray) -> bool:
    """By brute force: some set of states, strongly connected, in which a fair run may stay."""
    for bits in range(1, 1 << n_states):
        members = {n for n in range(n_states) if bits >> n & 1}
        if any(ended[n] for n in members):
            continue
        if len(members) == 1 and not any(source in members for source, _, _ in steps):
            return True
        inner = [step for step in steps if step[0] in members and step[1] in members]
        if not inner or not all(reaches(n, inner) >= members for n in members):
            continue
        enabled = [{f for s, _, f in steps if s == n and f is not None} for n in members]
        if set.intersection(*enabled) <= {fair for _, _, fair in inner}:
            return True
    return False


def reaches(start: int, steps: list[Step]) -> set[int]:
    found: set[int] = set()
    todo = [start]
    while todo:
        at = todo.pop()
        for source, target, _ in steps:
            if source == at and target not in found:
                found.add(target)
                todo.append(target)
    return found


@pytest.mark.parametrize("seed", range(20))
def test_components_are_those_of_scipy(seed: int) -> None:
    n_states = 200
    steps = random_steps(seed, n_states, 150 + 20 * seed, [None])
    draw = random.Random(seed)
    inside = bytearray(draw.random() < 0.8 for _ in range(n_states))
    kept = [(s, t) for s, t, _ in steps if inside[s] and inside[t]]
    sources, targets = zip(*kept, strict=True)
    matrix = csr_array((np.ones(len(kept)), (sources, targets)), shape=(n_states, n_states))
    _, labels = connected_components(matrix, directed=True, connection="strong")
    expected = {
        frozenset(map(int, np.flatnonzero(labels == label)))
        for label in set(labels.tolist())
        if inside[int(np.flatnonzero(labels == label)[0])]
    }
    found = list(components(graph_of(n_states, steps), inside))
    assert {frozenset(component) for component in found} == expected
    assert sum(map(len, found)) == sum(inside)


def test_components_of_a_long_chain_need_no_recursion() -> None:
    n_states = 50_000
    steps: list[Step] = [(n, n + 1, None) for n in range(n_states - 1)]
    steps.append((n_states - 1, 0, None))
    (component,) = components(graph_of(n_states, steps), bytearray(b"\1" * n_states))
    assert len(component) == n_states


def test_fair_runs_are_those_of_brute_force() -> None:
    n_found = n_clear = 0
    for seed in range(400):
        n_states = 2 + seed % 5
        steps = random_steps(seed, n_states, 2 + seed % 11, [None, "a", "b", "c"])
        draw = random.Random(-seed - 1)
        ended = bytearray(draw.random() < 0.3 for _ in range(n_states))
        lasso = fair_lasso(graph_of(n_states, steps), ended)
        assert (lasso is not None) == has_fair_run(n_states, steps, ended), (seed, steps)
        if lasso is None:
            n_clear += 1
        else:
            n_found += 1
            assert_is_fair_lasso(lasso, steps, ended)
    assert min(n_found, n_clear) > 50  # both answers were put to the test


def test_a_class_that_is_always_enabled_and_never_taken_makes_a_cycle_unfair() -> None:
    steps: list[Step] = [(0, 1, None), (1, 0, None), (0, 2, "go"), (1, 2, "go"), (2, 2, None)]
    ended = bytearray([0, 0, 1])
    assert fair_lasso(graph_of(3, steps), ended) is None


def test_a_class_that_is_disabled_now_and_then_does_not() -> None:
    steps: list[Step] = [(0, 1, None), (1, 0, None), (0, 2, "go"), (2, 2, None)]
    ended = bytearray([0, 0, 1])
    assert fair_lasso(graph_of(3, steps), ended) == Lasso((0,), ((1, -1), (0, -1)))


def test_a_class_that_is_taken_inside_does_not() -> None:
    steps: list[Step] = [(0, 0, "go"), (0, 1, "go"), (1, 1, None)]
    assert fair_lasso(graph_of(2, steps), bytearray([0, 1])) == Lasso((0,), ((0, 0),))


def test_the_cycle_goes_round_until_every_class_has_had_its_turn() -> None:
    # a figure of eight: the short way round alone would starve "b"
    steps: list[Step] = [(0, 0, "a"), (0, 1, None), (1, 0, "b"), (1, 0, "a"), (0, 1, "b")]
    lasso = fair_lasso(graph_of(2, steps), bytearray(2))
    assert lasso is not None
    assert {fair for _, fair in lasso.cycle} == {0, 1}
    assert_is_fair_lasso(lasso, steps, bytearray(2))


def test_a_state_without_steps_that_has_not_ended_is_a_lasso_without_a_cycle() -> None:
    steps: list[Step] = [(0, 1, "a"), (1, 2, "a")]
    assert fair_lasso(graph_of(3, steps), bytearray(3)) == Lasso((0, 1, 2), ())
    assert fair_lasso(graph_of(3, steps), bytearray([0, 0, 1])) is None


def test_states_that_were_not_expanded_are_no_dead_ends() -> None:
    graph = Graph(keeps_steps=True)
    for parent in (-1, 0):
        graph.add_state(parent)
    graph.close_state([(1, -1)])
    assert fair_lasso(graph, bytearray(2)) is None
