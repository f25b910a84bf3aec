"""More than one follower: who takes a flight over, and what becomes of the others."""

from kvlift.core.landed import PeerCause
from kvlift.core.local import Limits
from kvlift.core.phase import Filling
from kvlift.core.policy import Policy, Switch, WritePolicy
from kvlift.models.worlds import goals
from kvlift.models.worlds.host import Life, prompt_of
from kvlift.models.worlds.opening import Placed, Put
from kvlift.models.worlds.situation import Goal, Situation
from kvlift.models.worlds.weather import Climate

A = prompt_of(1, 1, 2, 2, 3, 3)
B = prompt_of(1, 1, 2, 2, 4)
C = prompt_of(1, 1, 2, 2, 5, 5)
D = prompt_of(1, 1, 2, 2, 3, 3, 6)

NEW_LEADER = Goal(
    name="a follower follows the heir",
    is_reached=lambda a: any(
        isinstance(r.phase, Filling) and r.phase.follow is not None and r.phase.follow.leader != 1
        for r in a.requests.values()
    ),
)


def heirs(*, deep: bool) -> Situation:
    """A leader with three followers goes: one takes over, one shares with it, one is alone."""
    return Situation(
        name="heirs",
        lives=(
            Life(rid="A", prompt=A, story="pages=3", is_first=True, may_abort=True),
            Life(rid="B", prompt=B, story="from=A[0:2] pages=2 tokens=5", is_first=True),
            Life(rid="C", prompt=C, story="from=A[0:2] pages=3", is_first=True),
            Life(rid="D", prompt=D, story="from=A[0:3] pages=3 tokens=7", is_first=deep),
        ),
        policy=Policy(
            n_device_pages=14, n_host_pages=2, write=WritePolicy.NONE, persist=Switch.OFF
        ),
        limits=Limits(),
        climate=Climate(
            has_pieces=False,
            has_prompt_peer=True,
            peer_failures=frozenset({PeerCause.LOST}) if deep else frozenset(),
        ),
        preamble="world page=2 device=14 host=2\nconfig write=none persist=off",
        putting="\nput A[0:2] in storage",
        puts=(Put(prompt=A, start=0, stop=2, place=Placed.STORAGE),),
        n_faults=2,
        goals=(
            goals.READY,
            goals.FOLLOWS,
            goals.SHARED,
            goals.HANDED_OVER,
            goals.LEADER_LOST,
            goals.READ_SHORT,
            NEW_LEADER,
        ),
    )


def unfound(*, deep: bool) -> Situation:
    """The leader's pages are flushed under it: who comes later follows it and finds nothing."""
    return Situation(
        name="unfound",
        lives=(
            Life(rid="A", prompt=B, story="pages=2 tokens=5", is_first=True, may_abort=True),
            Life(rid="B", prompt=C, story="from=A[0:2] pages=3", may_abort=deep),
        ),
        policy=Policy(n_device_pages=8, n_host_pages=2, write=WritePolicy.NONE, persist=Switch.OFF),
        limits=Limits(),
        climate=Climate(has_pieces=False, has_failures=deep),
        preamble="world page=2 device=8 host=2\nconfig write=none persist=off",
        putting="\nput A[0:1] in storage",
        puts=(Put(prompt=B, start=0, stop=1, place=Placed.STORAGE),),
        n_faults=2,
        others=("flush device",),
        goals=(
            goals.READY,
            goals.FOLLOWS,
            goals.LEADER_LOST,
            Goal(
                name="a page that a leader stands on is flushed",
                is_reached=lambda a: (
                    any(
                        isinstance(r.phase, Filling) and r.phase.follow is not None
                        for r in a.requests.values()
                    )
                    and any(s.device_stale for s in a.index.segments.values())
                ),
            ),
        ),
    )
