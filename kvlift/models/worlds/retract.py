"""A running request gives its pages up for another one, and comes back."""

from kvlift.core.local import Limits
from kvlift.core.policy import Policy, Switch, WritePolicy
from kvlift.models.worlds import goals
from kvlift.models.worlds.host import Life, prompt_of
from kvlift.models.worlds.situation import Situation
from kvlift.models.worlds.weather import Climate

A = prompt_of(1, 1, 2)
B = prompt_of(3, 3, 4, 4)


def retract(*, deep: bool) -> Situation:
    """Full pages, and a partial one of its own, go down; what is lost is computed again."""
    return Situation(
        name="retract",
        lives=(
            Life(
                rid="A",
                prompt=A,
                story="pages=1 tokens=3",
                n_retractions=1,
                n_growths=1,
                may_abort=True,
            ),
            Life(rid="B", prompt=B, story="pages=2"),
        ),
        policy=Policy(
            n_device_pages=3,
            n_host_pages=2,
            write=WritePolicy.THROUGH if deep else WritePolicy.NONE,
            persist=Switch.OFF,
        ),
        limits=Limits(),
        climate=Climate(has_pieces=False),
        preamble="world page=2 device=3 host=2\n"
        f"config write={'through' if deep else 'none'} persist=off",
        n_faults=1,
        others=("flush host",),
        storage=Switch.OFF,
        goals=(
            goals.READY,
            goals.COMES_BACK,
            goals.LOST_PAGES,
            goals.PARTIAL_PAGE,
            goals.TAIL_LANDS_LATE,
        ),
    )
