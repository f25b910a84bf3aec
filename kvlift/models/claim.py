"""What a world is, and what can be claimed of it.

The shape is stateright's (always, sometimes, eventually), with two differences: a claim may look at
a step as well as at a state, and liveness is decided on the strongly connected components of the
whole graph (`models.fair`), so that cycles are not missed.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

from attrs import frozen

S = TypeVar("S")


class Move(NamedTuple, Generic[S]):
    """One thing that may happen next.

    `label`: a line (or lines) of the story language. `fair`: the fairness class; a class that is
    enabled for ever is taken in the end. None: it may be left undone for ever.
    """

    label: str
    next: S
    fair: str | None = None


@frozen
class Always(Generic[S]):
    """True in every reachable state."""

    name: str
    holds: Callable[[S], bool]


@frozen
class AlwaysOf(Generic[S]):
    """True of every part of every reachable state; held against each part once.

    `parts`: what a state is made of, for this claim, as hashable values that name it in full.
    Claims that are given one and the same function are looked at together.
    """

    name: str
    parts: Callable[[S], Iterable[Hashable]]
    holds: Callable[[Any], bool]


@frozen
class SometimesOf(Generic[S]):
    """True of at least one part of a reachable state; `parts` as in `AlwaysOf`."""

    name: str
    parts: Callable[[S], Iterable[Hashable]]
    holds: Callable[[Any], bool]


@frozen
class AlwaysStep(Generic[S]):
    """True of every step that can be taken: (state before, move, state after)."""

    name: str
    holds: Callable[[S, Move[S], S], bool]


@frozen
class Sometimes(Generic[S]):
    """True in at least one reachable state. Without it an `Always` may be true of nothing."""

    name: str
    holds: Callable[[S], bool]


@frozen
class SometimesStep(Generic[S]):
    """True of at least one step that can be taken."""

    name: str
    holds: Callable[[S, Move[S], S], bool]


@frozen
class Live(Generic[S]):
    """From every reachable state on, a state in which `ended` holds follows, under weak fairness.

    For "what begins also ends" let `ended` be true where nothing has begun.
    """

    name: str
    ended: Callable[[S], bool]


@frozen
class Share(Generic[S]):
    """A figure, not a claim: `n_good` of `n_counted`, each summed over all reachable states.

    Guards against a core that is safe and useless: one that fails every request breaks no promise.
    """

    name: str
    n_counted: Callable[[S], int]
    n_good: Callable[[S], int]


Claim: TypeAlias = (
    Always[S]
    | AlwaysOf[S]
    | AlwaysStep[S]
    | Sometimes[S]
    | SometimesOf[S]
    | SometimesStep[S]
    | Live[S]
    | Share[S]
)


class World(Protocol[S]):
    """A small situation around the real core. Inherit from it to get the defaults.

    `moves` must be a pure function of the state and yield its moves in the same order every time.
    It must not repeat a guard of the core: it calls the core and takes what comes.
    """

    name: str

    def claims(self) -> Sequence[Claim[S]]:
        """Names must be unique within the world."""
        ...

    def initial(self) -> Iterable[S]:
        """The states to begin with."""
        ...

    def moves(self, state: S) -> Iterable[Move[S]]:
        """Everything that may happen in `state`."""
        ...

    def canonical(self, state: S) -> Hashable:
        """States with equal keys are one state.

        Equal keys must mean equal futures (the same moves up to names that no label, fairness
        class or claim uses), because liveness is decided on this graph as well.
        """
        ...

    def symmetric(self, state: S) -> Hashable:
        """A coarser key, for instance with the ranks sorted. Used only where no claim is `Live`.

        With symmetry the classes of fairness of two ranks fall together, so that a starving rank
        could hide behind the other one.
        """
        return self.canonical(state)

    def story_preamble(self) -> str:
        """The lines of the story that lead to the initial state."""
        return ""

    def edges_taken(self) -> Iterable[str]:
        """Names (`statechart.edge_name`) of the arrows that the core has taken so far."""
        return ()


class Broken(Exception):
    """Raise it from an error inside `moves` to say which move was being made."""

    def __init__(self, label: str) -> None:
        super().__init__(f"the core raised while it was given: {label}")
        self.label = label


@frozen
class Trace(Generic[S]):
    """A run: where it starts, what happens, and from which move on it repeats for ever.

    `cycle_from` is an index into `moves`; equal to their number: nothing can happen after the last
    move. None: the run was of interest for its last state or step only.
    """

    start: S
    moves: tuple[Move[S], ...]
    cycle_from: int | None = None
    note: str = ""


def as_story(world: World[S], trace: Trace[S], *, claim: str) -> str:
    """The run as a story: it can be saved and replayed with `kvlift story`."""
    lines = [f"# {claim}"]
    lines += [f"# {line}" for line in trace.note.splitlines()]
    lines += world.story_preamble().splitlines()
    for index, move in enumerate(trace.moves):
        if index == trace.cycle_from:
            lines.append("# from here on the same lines repeat for ever")
        lines += move.label.splitlines()
    if trace.cycle_from == len(trace.moves):
        lines.append("# nothing can happen after this, and it has not ended")
    return "\n".join(lines) + "\n"
