"""Two requests with one prefix: the second shares the work of the first, until that one goes."""

from kvlift.core.landed import PeerCause
from kvlift.core.local import Limits
from kvlift.core.policy import Policy, Switch, WritePolicy
from kvlift.models.worlds import goals
from kvlift.models.worlds.host import Life, prompt_of
from kvlift.models.worlds.opening import Placed, Put
from kvlift.models.worlds.situation import Situation
from kvlift.models.worlds.weather import Climate

A = prompt_of(1, 1, 2, 2, 3)
B = prompt_of(1, 1, 2, 2, 4)


def share(*, deep: bool) -> Situation:
    """A follower, a leader that is aborted or fails, and the flight that changes hands."""
    return Situation(
        name="share",
        lives=(
            Life(rid="A", prompt=A, story="pages=2 tokens=5", is_first=True, may_abort=True),
            Life(rid="B", prompt=B, story="from=A[0:2] pages=2 tokens=5", may_abort=deep),
        ),
        policy=Policy(n_device_pages=6, n_host_pages=2, write=WritePolicy.NONE, persist=Switch.OFF),
        limits=Limits(),
        climate=Climate(
            has_pieces=False,
            has_failures=deep,
            has_silence=deep,
            peer_failures=frozenset({PeerCause.LOST}),
        ),
        preamble="world page=2 device=6 host=2\nconfig write=none persist=off",
        putting="\nput A[0:1] in storage",
        puts=(Put(prompt=A, start=0, stop=1, place=Placed.STORAGE),),
        n_faults=1,
        goals=(
            goals.READY,
            goals.FOLLOWS,
            goals.SHARED,
            goals.HANDED_OVER,
            goals.LEADER_LOST,
            goals.DRAINS,
        ),
    )


def orphan(*, deep: bool) -> Situation:
    """A follower whose own peer has gone when its leader goes as well: two faults, two requests."""
    return Situation(
        name="orphan",
        lives=(
            Life(rid="A", prompt=A, story="pages=2 tokens=5", is_first=True, may_abort=True),
            Life(rid="B", prompt=B, story="from=A[0:2] pages=2 tokens=5", is_first=True),
        ),
        policy=Policy(n_device_pages=6, n_host_pages=2, write=WritePolicy.NONE, persist=Switch.OFF),
        limits=Limits(),
        climate=Climate(
            has_pieces=False,
            has_failures=False,
            has_silence=deep,
            has_prompt_peer=True,
            peer_failures=frozenset({PeerCause.LOST}),
        ),
        preamble="world page=2 device=6 host=2\nconfig write=none persist=off",
        putting="\nput A[0:1] in storage",
        puts=(Put(prompt=A, start=0, stop=1, place=Placed.STORAGE),),
        openings=((), (Put(prompt=A, start=1, stop=2, place=Placed.STORAGE),)),
        n_faults=2,
        goals=(goals.READY, goals.FOLLOWS, goals.HANDED_OVER, goals.PEER_LEFT_EARLY),
    )
