"""The prefill node: it is asked for more, falls silent, ends the lease, dies, and comes back."""

from kvlift.core.landed import PeerCause
from kvlift.core.local import Limits
from kvlift.core.policy import Policy, Switch, WritePolicy
from kvlift.models.worlds import goals
from kvlift.models.worlds.host import Life, prompt_of
from kvlift.models.worlds.situation import Situation
from kvlift.models.worlds.stage import Placed, Put
from kvlift.models.worlds.weather import Climate

A = prompt_of(1, 1, 2, 2, 3)


def peer(*, deep: bool) -> Situation:
    """Two lives of one name, a tight device: late writes must find pages that are still theirs."""
    return Situation(
        name="peer",
        lives=(
            Life(rid="A", prompt=A, story="pages=2 tokens=5", n_lives=2, may_abort=True),
        ),
        policy=Policy(n_device_pages=4, n_host_pages=1, write=WritePolicy.NONE, persist=Switch.OFF),
        limits=Limits(),
        climate=Climate(
            has_silence=True,
            has_pieces=True,
            peer_failures=frozenset({PeerCause.GONE, PeerCause.LOST}),
        ),
        preamble="world page=2 device=4 host=1\nconfig write=none persist=off",
        putting="\nput A[0:1] in host",
        puts=(Put(prompt=A, start=0, stop=1, place=Placed.HOST),),
        n_faults=3 if deep else 2,
        storage=Switch.OFF,
        goals=(
            goals.READY,
            goals.DRAINS,
            goals.WIDENS,
            goals.QUARANTINE,
            goals.LATE,
            goals.CLOSED,
            goals.WAITS,
            goals.PEER_FAILS,
            goals.PEER_LEFT_EARLY,
        ),
    )
