"""One request whose pages come from every tier at once."""

from kvlift.core.agreed import Kind
from kvlift.core.landed import PeerCause
from kvlift.core.local import Limits
from kvlift.core.phase import Draining, Filling
from kvlift.core.policy import Policy, Switch, WritePolicy
from kvlift.models.worlds.host import Life, prompt_of
from kvlift.models.worlds.situation import Goal, Situation
from kvlift.models.worlds.stage import Placed, Put
from kvlift.models.worlds.weather import Climate

A = prompt_of(1, 1, 2, 2, 3, 3, 4, 4)


def restore(*, deep: bool) -> Situation:
    """One request, all tiers: landings late, in part or failing, an abort at any moment."""
    puts = (
        Put(prompt=A, start=0, stop=1, place=Placed.HOST),
        Put(prompt=A, start=1, stop=3, place=Placed.STORAGE),
    )
    return Situation(
        name="restore",
        lives=(Life(rid="A", prompt=A, story="pages=4", may_abort=True),),
        policy=Policy(
            n_device_pages=4, n_host_pages=3, write=WritePolicy.NONE, persist=Switch.OFF
        ),
        limits=Limits(),
        climate=Climate(
            deadlines=frozenset({Kind.READ, Kind.HOLD, Kind.LOOKUP, Kind.TOKEN}),
            peer_failures=frozenset({PeerCause.GONE, PeerCause.LOST}),
        ),
        preamble="world page=2 device=4 host=3\nconfig write=none persist=off",
        puts=puts,
        n_faults=3 if deep else 1,
    )
