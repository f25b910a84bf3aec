"""Decisions by measured cost and by reserve: a slow read is declined, growth has its pages."""

from collections.abc import Sequence

from attrs import define

from kvlift.core.agreed import Agreed
from kvlift.core.local import Limits
from kvlift.core.phase import Filling, Ready, Running
from kvlift.core.policy import Policy, Switch, WritePolicy
from kvlift.models.claim import AlwaysStep, Claim, Move
from kvlift.models.worlds import goals
from kvlift.models.worlds.host import Life, prompt_of
from kvlift.models.worlds.opening import Placed, Put
from kvlift.models.worlds.situation import Goal, Situation
from kvlift.models.worlds.stage import Now
from kvlift.models.worlds.weather import Climate

A = prompt_of(1, 1, 2)
B = prompt_of(3, 3, 4)
C = prompt_of(5, 5)

_INSIDE = (Filling, Ready, Running)


def price(*, deep: bool) -> Situation:
    """Reads are measured to take longer than transfers: from then on the peer sends all."""
    return Situation(
        name="price",
        lives=(
            Life(rid="A", prompt=A, story="pages=1 tokens=3"),
            Life(rid="B", prompt=B, story="pages=1 tokens=3"),
        ),
        policy=Policy(
            n_device_pages=4,
            n_host_pages=2,
            write=WritePolicy.NONE,
            persist=Switch.OFF,
            cost_model=Switch.ON,
            cost_threshold_percent=50,
        ),
        limits=Limits(cost_threshold_percent=50),
        climate=Climate(has_pieces=False, has_failures=deep),
        preamble="world page=2 device=4 host=2\n"
        "config write=none persist=off cost_model=on cost_threshold_percent=50",
        putting="\nput A[0:1] in storage\nput B[0:1] in storage",
        puts=(
            Put(prompt=A, start=0, stop=1, place=Placed.STORAGE),
            Put(prompt=B, start=0, stop=1, place=Placed.STORAGE),
        ),
        n_ranks=2 if deep else 1,
        n_faults=1 if deep else 0,
        goals=(goals.READY, DECLINED),
    )


DECLINED = Goal(
    name="a read is declined",
    is_reached=lambda a: (
        bool(a.rates.prefetch_us and a.rates.transfer_us)
        and any(
            isinstance(r.phase, Filling) and r.rid == "B" and not r.phase.parts
            for r in a.requests.values()
        )
    ),
)


@define(eq=False)
class Reserved(Situation):
    """A situation in which admission must leave pages for the growth of those that run."""

    def claims(self) -> Sequence[Claim[Now]]:
        if not self._claims:
            super().claims()
            self._claims.append(
                AlwaysStep("who is admitted leaves the reserve alone", self._leaves_reserve)
            )
        return self._claims

    def _leaves_reserve(self, before: Now, move: Move[Now], after: Now) -> bool:
        del move
        was, now = self.stage.agreed[before.agreed], self.stage.agreed[after.agreed]
        if len(_inside(now) - _inside(was)) != 1:
            return True
        n_left = now.ledger.device_room - now.ledger.device_live + now.index.n_device_idle
        n_further = len(_inside(now)) - 1
        return n_left >= n_further * self.policy.decode_reserve_pages


def _inside(agreed: Agreed) -> set[str]:
    return {r.rid for r in agreed.requests.values() if isinstance(r.phase, _INSIDE)}


def reserve(*, deep: bool) -> Reserved:
    """A page is kept for each of those that are admitted; they grow into it, others wait."""
    return Reserved(
        name="reserve",
        lives=(
            Life(rid="A", prompt=A, story="pages=1 tokens=3", n_growths=2, is_first=True),
            Life(rid="C", prompt=C, story="pages=1", n_growths=1),
            Life(rid="B", prompt=B, story="pages=1 tokens=3", n_growths=int(deep)),
        ),
        policy=Policy(
            n_device_pages=5,
            n_host_pages=0,
            write=WritePolicy.NONE,
            persist=Switch.OFF,
            decode_reserve_pages=1,
            first_token=Switch.OFF,
        ),
        limits=Limits(),
        climate=Climate(has_pieces=False, has_failures=False),
        preamble="world page=2 device=5 host=0\n"
        "config write=none persist=off decode_reserve_pages=1 first_token=off",
        storage=Switch.OFF,
        goals=(goals.READY, KEPT),
    )


KEPT = Goal(
    name="a request waits for pages that are kept for others",
    is_reached=lambda a: (
        len(a.requests) > len(_inside(a)) > 0 and a.ledger.device_room - a.ledger.device_live >= 2
    ),
)
