"""A storage that takes writes and never ends them: the device's pages are called back."""

from collections.abc import Sequence

from attrs import define

from kvlift.core.agreed import Kind
from kvlift.core.local import Limits
from kvlift.core.policy import Policy, WritePolicy
from kvlift.models.claim import AlwaysOf, Claim, SometimesOf
from kvlift.models.worlds import goals
from kvlift.models.worlds.ghost import Doing, Rank
from kvlift.models.worlds.host import Life, prompt_of
from kvlift.models.worlds.situation import Goal, Situation
from kvlift.models.worlds.stage import Now
from kvlift.models.worlds.weather import Climate

A = prompt_of(1, 1, 2, 2)
B = prompt_of(3, 3)
C = prompt_of(5, 5, 6, 6, 7, 7)

CALLED_BACK = Goal(
    name="a write that never ends is called back",
    is_reached_on=lambda rank: any(
        one.doing is Doing.PERSIST and one.is_cancelled and one.is_silent for one in rank.operations
    ),
)
WAITED_IN_VAIN = Goal(
    name="a write is late that has not begun",
    is_reached_on=lambda rank: any(
        ticket in rank.expired and watch.kind is Kind.PERSIST and not watch.has_begun
        for ticket, watch in rank.local.watches.items()
    ),
)


@define(eq=False)
class Stuck(Situation):
    """A situation in which no write from the device may be without a deadline."""

    def claims(self) -> Sequence[Claim[Now]]:
        if not self._claims:
            super().claims()
            ranks = self.stage.ranks
            self._claims.append(
                AlwaysOf(
                    "a write from the device has a deadline, or was called back",
                    lambda now: now.ranks,
                    lambda rank: _has_deadlines(ranks[rank]),
                )
            )
            self._claims.append(
                SometimesOf(
                    "device pages are free again after a write that stuck",
                    lambda now: ((now.agreed, now.faults),),
                    lambda part: part[1] < self.n_faults and self._is_quiet(part[0]),
                )
            )
        return self._claims

    def _is_quiet(self, number: int) -> bool:
        agreed = self.stage.agreed[number]
        return not (agreed.requests or agreed.tickets) and bool(agreed.index.segments)


def _has_deadlines(rank: Rank) -> bool:
    writes = [o for o in rank.operations if o.doing is Doing.PERSIST and o.device]
    watches = rank.local.watches
    return all(
        one.is_cancelled
        or one.ticket not in watches
        or watches[one.ticket].has_ended
        or watches[one.ticket].timeout_ms is not None
        for one in writes
    )


def stuck(*, deep: bool) -> Stuck:
    """One write at a time, from the device; another request needs the pages that it holds."""
    return Stuck(
        name="stuck",
        lives=(
            Life(rid="A", prompt=A, story="pages=2", is_first=True),
            Life(rid="B", prompt=B, story="pages=1", is_first=True),
            Life(rid="C", prompt=C, story="pages=3", after="A"),
        ),
        policy=Policy(n_device_pages=3, n_host_pages=0, write=WritePolicy.NONE),
        limits=Limits(persists_in_flight_max=1),
        climate=Climate(
            has_pieces=False,
            has_failures=deep,
            has_prompt_peer=True,
            has_silence=True,
            has_stuck_writes=True,
        ),
        preamble="world page=2 device=3 host=0\nconfig write=none persists_in_flight_max=1",
        n_ranks=2 if deep else 1,
        n_faults=2,
        goals=(goals.READY, goals.WAITS, CALLED_BACK, WAITED_IN_VAIN),
    )
