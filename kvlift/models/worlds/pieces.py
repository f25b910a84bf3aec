"""A restore behind a read: its pieces go up while the rest is read, one after the other."""

from collections.abc import Sequence

from attrs import define

from kvlift.core.agreed import Agreed
from kvlift.core.local import Chain, Limits
from kvlift.core.phase import Draining
from kvlift.core.policy import Policy, PrefetchPolicy, Switch, WritePolicy
from kvlift.models.claim import AlwaysOf, Claim
from kvlift.models.worlds import goals
from kvlift.models.worlds.ghost import Doing, Rank
from kvlift.models.worlds.host import Life, prompt_of
from kvlift.models.worlds.opening import Placed, Put
from kvlift.models.worlds.situation import Goal, Situation
from kvlift.models.worlds.stage import Now
from kvlift.models.worlds.weather import Climate

A = prompt_of(1, 1, 2, 2, 3, 3, 4)
B = prompt_of(7, 7)


def _has(rank: Rank, doing: Doing) -> bool:
    return any(one.doing is doing and one.landed is None for one in rank.operations)


def _copying(rank: Rank) -> list[Chain]:
    """Restores behind a read of which a piece is under way."""
    return [one for one in rank.local.chains.values() if one.start < one.stop]


BESIDE = Goal(
    name="a page goes up while the next one is read",
    is_reached_on=lambda rank: _has(rank, Doing.READ) and _has(rank, Doing.RESTORE),
)
SECOND = Goal(
    name="a second piece goes up",
    is_reached_on=lambda rank: any(one.start > 0 for one in _copying(rank)),
)
LAST = Goal(
    name="a restore is given up while a piece of it runs",
    is_reached_on=lambda rank: any(
        one.read is None and one.n_read < one.stop for one in _copying(rank)
    ),
)
PARKED = Goal(
    name="a piece waits for its turn",
    is_reached_on=lambda rank: any(one.ticket in rank.local.chains for one in rank.local.parked),
)


@define(eq=False)
class Piecewise(Situation):
    """A situation in which nothing is copied any more for who has the answer."""

    def claims(self) -> Sequence[Claim[Now]]:
        if not self._claims:
            super().claims()
            agreed, ranks = self.stage.agreed, self.stage.ranks
            self._claims.append(
                AlwaysOf(
                    "no piece follows for a request that has ended",
                    lambda now: [(now.agreed, rank) for rank in now.ranks],
                    lambda part: not _goes_on(agreed[part[0]], ranks[part[1]]),
                )
            )
        return self._claims


def _goes_on(agreed: Agreed, rank: Rank) -> bool:
    draining = {
        attempt
        for attempt, request in agreed.requests.items()
        if isinstance(request.phase, Draining)
    }
    return any(
        chain.n_read > chain.stop and agreed.tickets[restore].owner in draining
        for restore, chain in rank.local.chains.items()
    )


def pieces(*, deep: bool) -> Situation:
    """Three stored pages that come in pieces, one restore at a time; reports come twice, copies
    fail, the read is late."""
    return Piecewise(
        name="pieces",
        n_together=2,
        lives=(
            Life(rid="A", prompt=A, story="pages=3 tokens=7", is_first=True, may_abort=True),
            Life(rid="B", prompt=B, story="pages=1", is_first=True),
        ),
        policy=Policy(
            n_device_pages=6 if deep else 5,
            n_host_pages=4,
            write=WritePolicy.NONE,
            persist=Switch.OFF,
            prefetch=PrefetchPolicy.DEADLINE,
        ),
        limits=Limits(prefetch=PrefetchPolicy.DEADLINE, restores_in_flight_max=1),
        climate=Climate(has_silence=True, has_echoes=True, has_prompt_peer=True),
        preamble=(
            f"world page=2 device={6 if deep else 5} host=4\nconfig write=none persist=off "
            "prefetch=deadline restores_in_flight_max=1"
        ),
        putting="\nput A[0:3] in storage\nput B[0:1] in host",
        puts=(
            Put(prompt=A, start=0, stop=3, place=Placed.STORAGE),
            Put(prompt=B, start=0, stop=1, place=Placed.HOST),
        ),
        n_faults=2 if deep else 1,
        goals=(
            goals.READY,
            goals.COPY_SHORT,
            goals.READ_SHORT,
            goals.READ_OVERDUE,
            BESIDE,
            SECOND,
            LAST,
            PARKED,
        ),
    )
