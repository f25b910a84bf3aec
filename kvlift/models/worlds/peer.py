"""The prefill node: it is asked for more, falls silent, ends the lease, dies, and comes back."""

from kvlift.core.landed import PeerCause
from kvlift.core.local import Limits
from kvlift.core.policy import Policy, Switch, WritePolicy
from kvlift.models.worlds import goals
from kvlift.models.worlds.host import Life, prompt_of
from kvlift.models.worlds.opening import Placed, Put
from kvlift.models.worlds.situation import Situation
from kvlift.models.worlds.weather import Climate

A = prompt_of(1, 1, 2)
B = prompt_of(1, 1, 2, 2)

_ALL = frozenset({PeerCause.GONE, PeerCause.LOST})


def peer(*, deep: bool) -> Situation:
    """Two lives of one name, a tight device: late writes must find pages that are still theirs."""
    return Situation(
        name="peer",
        lives=(Life(rid="A", prompt=A, story="pages=1 tokens=3", n_lives=2, may_abort=True),),
        policy=Policy(n_device_pages=3, n_host_pages=0, write=WritePolicy.NONE, persist=Switch.OFF),
        limits=Limits(),
        climate=Climate(has_silence=True, has_failures=False, peer_failures=_ALL),
        preamble="world page=2 device=3 host=0\nconfig write=none persist=off",
        n_faults=3 if deep else 2,
        storage=Switch.OFF,
        goals=(
            goals.READY,
            goals.DRAINS,
            goals.QUARANTINE,
            goals.LATE,
            goals.CLOSED,
            goals.PEER_FAILS,
        ),
    )


def widen(*, deep: bool) -> Situation:
    """A copy fails, the peer is asked for more, and has ended the lease or is silent."""
    return _short("widen", Placed.HOST, deep=deep)


def shortfall(*, deep: bool) -> Situation:
    """A read comes up short or late, the peer is asked for more, and is not there any more."""
    return _short("shortfall", Placed.STORAGE, deep=deep)


def _short(name: str, place: Placed, *, deep: bool) -> Situation:
    return Situation(
        name=name,
        n_together=3 if deep else 2,
        lives=(Life(rid="A", prompt=B, story="pages=2", may_abort=True),),
        policy=Policy(n_device_pages=2, n_host_pages=1, write=WritePolicy.NONE, persist=Switch.OFF),
        limits=Limits(),
        climate=Climate(has_silence=True, has_pieces=deep, peer_failures=_ALL),
        preamble="world page=2 device=2 host=1\nconfig write=none persist=off",
        putting=f"\nput A[0:1] in {place.value}",
        puts=(Put(prompt=B, start=0, stop=1, place=place),),
        n_faults=3 if deep else 2,
        goals=(
            goals.READY,
            goals.DRAINS,
            goals.WIDENS,
            goals.QUARANTINE,
            goals.PEER_FAILS,
            goals.PEER_LEFT_EARLY,
        ),
    )
