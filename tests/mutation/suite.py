"""What is run against mutants besides the ordinary tests: worlds, and walks one by one.

No part of `make test`, which runs both in other forms.
"""

from typing import Final

import pytest

from kvlift.models.explore import Limits, explore
from kvlift.models.worlds import WORLDS
from tests.runtime.test_stateful import _walk

N_WALKS: Final = 60
QUICK: Final = ("calm", "orphan", "late", "widen", "retract")
"""Worlds of about a second."""


@pytest.mark.parametrize("name", QUICK)
def test_the_world_holds(name: str) -> None:
    world = WORLDS[name](deep=False)
    report = explore(world, Limits(seconds_max=1000.0, stops_at_violation=True))
    broken = [claim for claim, trace in {**report.always, **report.live}.items() if trace]
    assert broken == []
    assert report.complete
    assert [goal for goal, trace in report.sometimes.items() if trace is None] == []
    assert all(n_good == n_counted for n_good, n_counted in report.shares.values())


@pytest.mark.parametrize("seed", range(N_WALKS))
def test_the_walk_ends_well(seed: int) -> None:
    _walk(seed)
