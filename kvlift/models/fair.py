"""Liveness under weak fairness, by strongly connected components.

A run that never reaches its goal stays, from some point on, inside one strongly connected set of
states without the goal. A weakly fair scheduler allows that only if every fairness class is taken
inside the set, or disabled in one of its states. It is enough to look at maximal components: what
a subset takes or disables, the component does as well, and a run can go round all of a component.
"""

from array import array
from collections import deque
from collections.abc import Callable, Iterator

from attrs import frozen

from kvlift.models.graph import Graph


@frozen
class Lasso:
    """Numbers of states on the way (`stem`, the start of the cycle last) and the cycle's steps.

    `cycle` is a sequence of (target, fairness class), back to where the stem ends. Empty: the last
    state of the stem has no step at all.
    """

    stem: tuple[int, ...]
    cycle: tuple[tuple[int, int], ...]


def fair_lasso(graph: Graph, ended: bytearray) -> Lasso | None:
    """A fair run that never ends, or None. `ended[n]` is 1 where state `n` has reached the goal.

    Only expanded states are looked at, so that what is found is real also where the exploration
    was cut short. The one that starts at the lowest state number is returned.
    """
    first = graph.first_step
    inside = bytearray(n < graph.n_expanded and not ended[n] for n in range(len(graph.parents)))
    worst: tuple[int, list[int]] | None = None
    for n in range(graph.n_expanded):
        if inside[n] and first[n] == first[n + 1]:
            worst = (n, [])
            break
    for component in components(graph, inside):
        lowest = min(component)
        if (worst is None or lowest < worst[0]) and _may_stay(graph, component):
            worst = (lowest, component)
    if worst is None:
        return None
    lowest, component = worst
    cycle = tuple(_cycle(graph, lowest, frozenset(component))) if component else ()
    return Lasso(tuple(graph.path_to(lowest)), cycle)


def components(graph: Graph, inside: bytearray) -> Iterator[list[int]]:
    """The strongly connected components of the states with `inside[n] == 1`, sinks first.

    Tarjan's algorithm without recursion: `todo` holds the states on the current path, `at` how far
    the steps of each have been followed.
    """
    first, targets = graph.first_step, graph.targets
    n_states = len(inside)
    order = array("q", bytes(8 * n_states))  # 0: not visited yet
    low = array("q", bytes(8 * n_states))
    at = array("q", bytes(8 * n_states))
    on_stack = bytearray(n_states)
    stack: list[int] = []
    n_visited = 0
    for root in range(n_states):
        if not inside[root] or order[root]:
            continue
        todo = [root]
        while todo:
            state = todo[-1]
            if not order[state]:
                n_visited += 1
                order[state] = low[state] = n_visited
                at[state] = first[state]
                stack.append(state)
                on_stack[state] = 1
            for step in range(at[state], first[state + 1]):
                target = targets[step]
                if not inside[target]:
                    continue
                if not order[target]:
                    at[state] = step  # looked at once more on the way back, for its `low`
                    todo.append(target)
                    break
                if on_stack[target] and low[target] < low[state]:
                    low[state] = low[target]
            else:
                todo.pop()
                if low[state] == order[state]:
                    component: list[int] = []
                    while not component or component[-1] != state:
                        component.append(stack.pop())
                        on_stack[component[-1]] = 0
                    yield component


def _may_stay(graph: Graph, component: list[int]) -> bool:
    """Whether a weakly fair scheduler may stay in this component for ever."""
    members = frozenset(component)
    taken, always_enabled = 0, -1
    has_inner_step = False
    for state in component:
        enabled = 0
        for step in range(graph.first_step[state], graph.first_step[state + 1]):
            fair = graph.fair[step]
            bit = 1 << fair if fair >= 0 else 0
            enabled |= bit
            if graph.targets[step] in members:
                has_inner_step = True
                taken |= bit
        always_enabled &= enabled
    return has_inner_step and not always_enabled & ~taken


def _cycle(graph: Graph, start: int, members: frozenset[int]) -> list[tuple[int, int]]:
    """A short cycle through `start` that is fair: each class is taken on it, or disabled on it."""
    owed = _enabled(graph, start)
    walk: list[tuple[int, int]] = []
    at = start

    def go(wanted: Callable[[int, int], bool]) -> None:
        nonlocal at, owed
        for target, fair in _shortest(graph, at, members, wanted):
            walk.append((target, fair))
            at = target
            owed &= _enabled(graph, target) & ~(1 << fair if fair >= 0 else 0)

    while owed:
        debt = owed

        def pays(target: int, fair: int, debt: int = debt) -> bool:
            return bool(debt & ~_enabled(graph, target) or (fair >= 0 and debt >> fair & 1))

        go(pays)
    if at != start or not walk:
        go(lambda target, _fair: target == start)
    return walk


def _enabled(graph: Graph, state: int) -> int:
    """The fairness classes that can be taken in a state, as bits."""
    bits = 0
    for step in range(graph.first_step[state], graph.first_step[state + 1]):
        if graph.fair[step] >= 0:
            bits |= 1 << graph.fair[step]
    return bits


def _shortest(
    graph: Graph, start: int, members: frozenset[int], wanted: Callable[[int, int], bool]
) -> list[tuple[int, int]]:
    """The shortest sequence of inner steps whose last one (target, class) is wanted."""
    came: dict[int, tuple[int, int]] = {}  # state: (from state, by class)
    todo = deque([start])
    while todo:
        state = todo.popleft()
        for step in range(graph.first_step[state], graph.first_step[state + 1]):
            target, fair = graph.targets[step], graph.fair[step]
            if target not in members:
                continue
            if wanted(target, fair):
                walk = [(target, fair)]
                while state != start:
                    before, by = came[state]
                    walk.append((state, by))
                    state = before
                walk.reverse()
                return walk
            if target not in came and target != start:
                came[target] = (state, fair)
                todo.append(target)
    raise AssertionError("a strongly connected component has a path to each of its steps")
