"""A table of arrows as a `transitions` machine that watches the real `step` and never decides.

The machine is built from the same `EDGES` that the drawing and the coverage report use. It follows
one request through its life and raises when `step` goes a way that is not in the table.
"""

from collections.abc import Callable, Iterable
from typing import Final, TypeAlias

from attrs import define, field
from transitions import EventData, Machine, MachineError

Edge: TypeAlias = tuple[type, type, type]
"""(phase before, event, phase after), each by its class."""

_WANTED: Final = "wanted"


class ChartDisagrees(Exception):
    """The code took an arrow that the table doesn't have. One of the two is wrong."""


def edge_name(machine: str, edge: Edge) -> str:
    """One arrow in words, for coverage reports: `request: Waiting --Admitted--> Filling`."""
    before, event, after = (part.__name__ for part in edge)
    return f"{machine}: {before} --{event}--> {after}"


def phases_of(edges: Iterable[Edge]) -> list[str]:
    """The names of all phases in a table, sorted."""
    return sorted({phase.__name__ for before, _, after in edges for phase in (before, after)})


def build(edges: Iterable[Edge], *, initial: type) -> Machine:
    """The machine of a table, without a model. Its triggers are the names of the events.

    An event may lead from one phase to several (it depends on what else the phase knows). The
    trigger therefore takes the phase that the code went to as the keyword `wanted`, and the arrow
    to any other phase is closed. Raises ValueError if `initial` is in no arrow.
    """
    table = sorted(tuple(part.__name__ for part in edge) for edge in set(edges))
    states = sorted({name for before, _, after in table for name in (before, after)})
    if initial.__name__ not in states:
        raise ValueError(f"{initial.__name__} is in no arrow of this table: it has {states}")
    machine = Machine(
        model=None,
        states=list(states),
        initial=initial.__name__,
        auto_transitions=False,  # no jumps beside the table
        send_event=True,
    )
    for before, event, after in table:
        machine.add_transition(event, before, after, conditions=_leads_to(after))
    return machine


def _leads_to(phase: str) -> Callable[[EventData], bool]:
    """Open if the code went to this phase."""
    return lambda event: bool(event.kwargs[_WANTED] == phase)


@define(slots=False, eq=False)
class Follower:
    """One life in lock step with the code. `state` is the phase that the machine believes in."""

    machine: Machine = field(repr=False)
    edges_taken: set[tuple[str, str, str]] = field(factory=set, init=False)

    def __attrs_post_init__(self) -> None:
        self.machine.add_model(self)

    def feed(self, before: type, event: type, after: type) -> None:
        """The code went from `before` to `after` on `event`.

        Leave out events that changed nothing (`step` returned the same object): old news has no
        arrow. Raises ChartDisagrees when the machine can't follow; its state is then unchanged.
        """
        names = (before.__name__, event.__name__, after.__name__)
        believed = str(self.state)  # type: ignore[attr-defined]
        if names[0] != believed:
            raise ChartDisagrees(f"the code left {names[0]}, but the chart stands in {believed}")
        try:
            followed = self.trigger(names[1], **{_WANTED: names[2]})  # type: ignore[attr-defined]
        except (MachineError, AttributeError) as error:
            # transitions answers an event that it knows nowhere with AttributeError
            raise ChartDisagrees(f"no arrow {_arrow(names)}: {error}") from error
        if not followed:
            raise ChartDisagrees(f"no arrow {_arrow(names)}: from there it leads elsewhere")
        self.edges_taken.add(names)

    def leave(self) -> None:
        """This life is over: the machine forgets it."""
        self.machine.remove_model(self)


def _arrow(names: tuple[str, str, str]) -> str:
    return f"{names[0]} --{names[1]}--> {names[2]}"
