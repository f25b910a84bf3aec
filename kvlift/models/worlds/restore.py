"""One request whose pages come from every tier at once; and the same without any fault."""

from kvlift.core.landed import PeerCause
from kvlift.core.local import Limits
from kvlift.core.policy import Policy, PrefetchPolicy, Switch, WritePolicy
from kvlift.models.worlds import goals
from kvlift.models.worlds.host import Life, prompt_of
from kvlift.models.worlds.opening import Placed, Put
from kvlift.models.worlds.situation import Situation
from kvlift.models.worlds.weather import Climate

A = prompt_of(1, 1, 2, 2, 3, 3, 4, 4)
B = prompt_of(1, 1, 2, 2, 3, 3, 5)
SHORT = prompt_of(1, 1)
OTHER = prompt_of(7, 7)

_PUTS = (
    Put(prompt=A, start=0, stop=1, place=Placed.HOST),
    Put(prompt=A, start=1, stop=3, place=Placed.STORAGE),
)
_PUT_LINES = "\nput A[0:1] in host\nput A[1:3] in storage"


def restore(*, deep: bool) -> Situation:
    """One request, all tiers: landings late, in part or failing, an abort at any moment."""
    return Situation(
        name="restore",
        n_together=2,
        lives=(Life(rid="A", prompt=A, story="pages=4", may_abort=True),),
        policy=Policy(n_device_pages=4, n_host_pages=3, write=WritePolicy.NONE, persist=Switch.OFF),
        limits=Limits(),
        climate=Climate(
            has_silence=True,
            has_echoes=True,
            peer_failures=frozenset({PeerCause.GONE, PeerCause.LOST}),
        ),
        preamble="world page=2 device=4 host=3\nconfig write=none persist=off",
        putting=_PUT_LINES,
        puts=_PUTS,
        n_faults=2 if deep else 1,
        goals=(
            goals.READY,
            goals.DRAINS,
            goals.WIDENS,
            goals.READ_ON,
            goals.QUARANTINE,
            goals.LATE,
            goals.READ_SHORT,
            goals.READ_OVERDUE,
            goals.COPY_SHORT,
            goals.PEER_FAILS,
            goals.PEER_LEFT_EARLY,
        ),
    )


def hurry(*, deep: bool) -> Situation:
    """One read at a time, given up when all else is here (deep: at its deadline)."""
    policy = PrefetchPolicy.DEADLINE if deep else PrefetchPolicy.BEST_EFFORT
    return Situation(
        name="hurry",
        lives=(
            Life(rid="A", prompt=SHORT, story="pages=1", is_first=True, may_abort=deep),
            Life(rid="C", prompt=OTHER, story="pages=1", is_first=True),
        ),
        policy=Policy(
            n_device_pages=4,
            n_host_pages=2,
            write=WritePolicy.NONE,
            persist=Switch.OFF,
            prefetch=policy,
        ),
        limits=Limits(prefetch=policy, prefetches_in_flight_max=1, restores_in_flight_max=1),
        climate=Climate(
            has_silence=True, has_failures=deep, has_pieces=False, has_prompt_peer=True
        ),
        preamble=(
            "world page=2 device=4 host=2\nconfig write=none persist=off "
            f"prefetch={policy.value} prefetches_in_flight_max=1 restores_in_flight_max=1"
        ),
        putting="\nput A[0:1] in storage\nput C[0:1] in storage",
        puts=(
            Put(prompt=SHORT, start=0, stop=1, place=Placed.STORAGE),
            Put(prompt=OTHER, start=0, stop=1, place=Placed.STORAGE),
        ),
        n_faults=2 if deep else 1,
        goals=(goals.READY, goals.READ_ON, goals.READ_OVERDUE),
    )


def calm(*, deep: bool) -> Situation:
    """No fault at all: every request ends well, and the second one uses what the first left."""
    return Situation(
        name="calm",
        n_together=2,
        lives=(
            Life(rid="A", prompt=A, story="pages=4"),
            Life(rid="B", prompt=B, story="from=A[0:3] pages=3 tokens=7", after="A"),
        ),
        policy=Policy(n_device_pages=4, n_host_pages=4),
        limits=Limits(),
        climate=Climate(is_calm=True, has_failures=False, has_pieces=deep),
        preamble="world page=2 device=4 host=4",
        putting=_PUT_LINES,
        puts=_PUTS,
        n_ranks=2 if deep else 1,
        goals=(goals.READY,),
    )
