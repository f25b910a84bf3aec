"""A read that is given up half-way: what it has brought is used while the rest still runs."""

from collections.abc import Sequence
from typing import Final

from attrs import define

from kvlift.core.local import Limits
from kvlift.core.policy import Policy, PrefetchPolicy, Switch, WritePolicy
from kvlift.models.claim import Always, Claim
from kvlift.models.worlds import goals
from kvlift.models.worlds.ghost import Rank
from kvlift.models.worlds.host import Life, prompt_of
from kvlift.models.worlds.opening import Placed, Put
from kvlift.models.worlds.situation import Goal, Situation
from kvlift.models.worlds.stage import Now
from kvlift.models.worlds.weather import Climate

A = prompt_of(1, 1, 2, 2, 3)


def _waits_for_nothing(rank: Rank) -> bool:
    reads = rank.local.restore_by_read
    return not any(one.is_cancelled and one.ticket in reads for one in rank.operations)


USED_HALF: Final = Goal(
    name="a part of a read is used while the rest still runs",
    is_reached_on=lambda rank: any(
        one.is_cancelled and one.n_done and one.landed is None for one in rank.operations
    ),
)


@define(eq=False)
class Impatient(Situation):
    """A situation in which nobody may wait for what has been given up."""

    def claims(self) -> Sequence[Claim[Now]]:
        if not self._claims:
            super().claims()
            ranks = self.stage.ranks
            self._claims.append(
                Always(
                    "no copy waits for a read that was cancelled",
                    lambda now: all(_waits_for_nothing(ranks[rank]) for rank in now.ranks),
                )
            )
        return self._claims


def pair(*, deep: bool) -> Impatient:
    """The same on two ranks, one of which has only the first page, or never says so."""
    return Impatient(
        name="pair",
        lives=(Life(rid="A", prompt=A, story="pages=2 tokens=5", is_first=True, may_abort=deep),),
        policy=Policy(
            n_device_pages=3,
            n_host_pages=2,
            write=WritePolicy.NONE,
            persist=Switch.OFF,
            prefetch=PrefetchPolicy.DEADLINE,
        ),
        limits=Limits(prefetch=PrefetchPolicy.DEADLINE),
        climate=Climate(has_silence=True, has_failures=deep, has_prompt_peer=True),
        preamble="world ranks=2 page=2 device=3 host=2\n"
        "config write=none persist=off prefetch=deadline",
        openings=(
            (Put(prompt=A, start=0, stop=2, place=Placed.STORAGE),),
            (
                Put(prompt=A, start=0, stop=1, place=Placed.STORAGE, rank=0),
                Put(prompt=A, start=0, stop=2, place=Placed.STORAGE, rank=1),
            ),
        ),
        n_ranks=2,
        n_faults=2 if deep else 1,
        goals=(goals.READY, goals.READ_ON, goals.READ_OVERDUE, goals.APART),
    )


def late(*, deep: bool) -> Impatient:
    """Two stored pages, of which one comes before the deadline passes."""
    return Impatient(
        name="late",
        n_together=2,
        lives=(Life(rid="A", prompt=A, story="pages=2 tokens=5", is_first=True, may_abort=deep),),
        policy=Policy(
            n_device_pages=3,
            n_host_pages=2,
            write=WritePolicy.NONE,
            persist=Switch.OFF,
            prefetch=PrefetchPolicy.DEADLINE,
        ),
        limits=Limits(prefetch=PrefetchPolicy.DEADLINE),
        climate=Climate(has_silence=True, has_failures=deep, has_prompt_peer=True),
        preamble="world page=2 device=3 host=2\nconfig write=none persist=off prefetch=deadline",
        putting="\nput A[0:2] in storage",
        puts=(Put(prompt=A, start=0, stop=2, place=Placed.STORAGE),),
        n_ranks=2 if deep else 1,
        n_faults=2 if deep else 1,
        goals=(goals.READY, goals.READ_ON, goals.READ_OVERDUE, USED_HALF),
    )
