"""The machines of the core by name: their arrows, and the phase in which each begins."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from attrs import frozen

from kvlift.core.descent import Due
from kvlift.core.edges import EDGES, MIRROR_EDGES
from kvlift.core.phase import Waiting
from kvlift.models.statechart import Edge, edge_name


@frozen(kw_only=True)
class Chart:
    """One machine. `about`: one line for a reader of its drawing."""

    edges: frozenset[Edge]
    initial: type
    about: str


CHARTS: Final[Mapping[str, Chart]] = MappingProxyType(
    {
        "request": Chart(edges=EDGES, initial=Waiting, about="The life of a request"),
        "mirror": Chart(edges=MIRROR_EDGES, initial=Due, about="The way down of finished pages"),
    }
)


def all_edge_names() -> frozenset[str]:
    """The arrows of every machine, as coverage reports name them."""
    return frozenset(
        edge_name(name, edge) for name, chart in CHARTS.items() for edge in chart.edges
    )
