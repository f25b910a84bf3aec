"""Two requests with one prefix: the second shares the work of the first, until that one goes."""

from collections.abc import Sequence

from attrs import define

from kvlift.core.agreed import Agreed
from kvlift.core.landed import PeerCause
from kvlift.core.local import Limits
from kvlift.core.phase import Filling
from kvlift.core.policy import Policy, Switch, WritePolicy
from kvlift.models.claim import AlwaysOf, Claim
from kvlift.models.worlds import goals
from kvlift.models.worlds.ghost import tag_of
from kvlift.models.worlds.host import Life, prompt_of
from kvlift.models.worlds.opening import Placed, Put
from kvlift.models.worlds.paths import pages_of
from kvlift.models.worlds.situation import Situation
from kvlift.models.worlds.stage import Now
from kvlift.models.worlds.weather import Climate

A = prompt_of(1, 1, 2, 2, 3)
B = prompt_of(1, 1, 2, 2, 4)


@define(eq=False)
class Sharing(Situation):
    """A situation in which nobody waits for a page that is there."""

    def claims(self) -> Sequence[Claim[Now]]:
        if not self._claims:
            super().claims()
            agreed = self.stage.agreed
            self._claims.append(
                AlwaysOf(
                    "a follower has all that its leader has brought",
                    lambda now: (now.agreed,),
                    lambda number: _all_is_shared(agreed[number]),
                )
            )
        return self._claims


def _all_is_shared(agreed: Agreed) -> bool:
    """No follower's next page is on the device."""
    here = {
        page.tag
        for page in pages_of(agreed)
        if page.segment.device is not None and not page.segment.device_stale
    }
    return not any(
        isinstance(r.phase, Filling)
        and r.phase.follow is not None
        and tag_of(r.prompt, r.phase.lease.n_shared) in here
        for r in agreed.requests.values()
    )


def share(*, deep: bool) -> Sharing:
    """A follower, a leader that is aborted or fails, and the flight that changes hands."""
    return Sharing(
        name="share",
        lives=(
            Life(rid="A", prompt=A, story="pages=2 tokens=5", is_first=True, may_abort=True),
            Life(
                rid="B",
                prompt=B,
                story="from=A[0:2] pages=2 tokens=5",
                # So it leads where both come at once, and the first by number follows.
                priority=1,
                may_abort=deep,
            ),
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
