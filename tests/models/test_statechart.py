"""The chart follows the table, and nothing but the table."""

import pytest

from kvlift.models.charts import CHARTS
from kvlift.models.statechart import ChartDisagrees, Edge, Follower, build, edge_name, phases_of


class Closed: ...


class Open: ...


class Broken: ...


class Pushed: ...


class Pulled: ...


class Kicked: ...


DOOR: frozenset[Edge] = frozenset(
    {
        (Closed, Pushed, Open),
        (Open, Pulled, Closed),
        (Open, Kicked, Open),
        (Open, Kicked, Broken),  # it depends on how hard
    }
)


def test_a_life_along_the_arrows_is_followed() -> None:
    machine = build(DOOR, initial=Closed)
    one, other = Follower(machine), Follower(machine)
    one.feed(Closed, Pushed, Open)
    one.feed(Open, Kicked, Open)
    other.feed(Closed, Pushed, Open)
    one.feed(Open, Kicked, Broken)
    other.feed(Open, Pulled, Closed)
    assert one.edges_taken == {
        ("Closed", "Pushed", "Open"),
        ("Open", "Kicked", "Open"),
        ("Open", "Kicked", "Broken"),
    }
    one.leave()
    assert machine.models == [other]


@pytest.mark.parametrize(
    ("edge", "why"),
    [
        ((Open, Pulled, Closed), "the code left Open, but the chart stands in Closed"),
        ((Closed, Pulled, Open), "no arrow Closed --Pulled--> Open"),
        ((Closed, Pushed, Broken), "no arrow Closed --Pushed--> Broken: from there"),
        ((Closed, Pushed, Closed), "no arrow Closed --Pushed--> Closed"),
        ((Closed, Closed, Open), "no arrow Closed --Closed--> Open"),
    ],
)
def test_a_step_beside_the_table_raises_and_leaves_the_chart_where_it_was(
    edge: Edge, why: str
) -> None:
    follower = Follower(build(DOOR, initial=Closed))
    with pytest.raises(ChartDisagrees, match=why):
        follower.feed(*edge)
    assert follower.edges_taken == set()
    follower.feed(Closed, Pushed, Open)


def test_there_are_no_jumps_beside_the_table() -> None:
    machine = build(DOOR, initial=Closed)
    assert sorted(machine.events) == ["Kicked", "Pulled", "Pushed"]


def test_a_chart_needs_an_initial_phase_of_its_own() -> None:
    with pytest.raises(ValueError, match="Pushed is in no arrow"):
        build(DOOR, initial=Pushed)


def test_arrows_and_phases_have_names() -> None:
    assert edge_name("door", (Open, Kicked, Broken)) == "door: Open --Kicked--> Broken"
    assert phases_of(DOOR) == ["Broken", "Closed", "Open"]


@pytest.mark.parametrize("name", list(CHARTS))
def test_the_machines_of_the_core_reach_all_their_phases_and_follow_all_their_arrows(
    name: str,
) -> None:
    chart = CHARTS[name]
    machine = build(chart.edges, initial=chart.initial)
    by_name = {phase.__name__: phase for a, _, b in chart.edges for phase in (a, b)}
    reached = [chart.initial.__name__]
    for phase in reached:  # grows while it is read
        for before, event, after in chart.edges:
            if before.__name__ == phase:
                follower = Follower(machine)
                machine.set_state(phase, model=follower)
                follower.feed(by_name[phase], event, after)
                if after.__name__ not in reached:
                    reached.append(after.__name__)
    assert sorted(reached) == phases_of(chart.edges)
