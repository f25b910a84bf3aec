"""Pages that somebody else has on one rank for a while: they are no room, until they are back."""

from collections.abc import Callable, Sequence
from typing import Final

from attrs import define, field

from kvlift.core.agreed import Agreed
from kvlift.core.ballot import PAIRS
from kvlift.core.effect import StartPrefetch, TakeDevice, TakeHost
from kvlift.core.local import Limits
from kvlift.core.notice import HasGrown
from kvlift.core.phase import Running
from kvlift.core.policy import Policy, Switch, WritePolicy
from kvlift.models.claim import AlwaysStep, Claim, Move, SometimesStep
from kvlift.models.memo import memo
from kvlift.models.worlds import goals
from kvlift.models.worlds.host import Life, prompt_of
from kvlift.models.worlds.opening import Placed, Put
from kvlift.models.worlds.situation import Goal, Situation
from kvlift.models.worlds.stage import Now
from kvlift.models.worlds.weather import Climate

A = prompt_of(1, 1)
B = prompt_of(3, 3, 4, 4)

_AT_ROOM: Final = 2 * len(PAIRS)
"""Where a reduced ballot says how much room there is: on the device, then on the host."""


@define(eq=False)
class Aside(Situation):
    """A situation that compares what is taken with what the ranks have told of their room."""

    _looked: Callable[[int, int, tuple[int, ...]], dict[str, bool]] = field(init=False)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self._looked = memo(self._looked_at)

    def claims(self) -> Sequence[Claim[Now]]:
        if not self._claims:
            super().claims()
            self._claims += [
                AlwaysStep("the room is what the poorest rank has", self._says("told")),
                AlwaysStep("what is taken leaves alone what is set aside", self._says("spared")),
                AlwaysStep("no growth is refused for which there is room", self._says("granted")),
                AlwaysStep("nobody is admitted before a growth that waits", self._says("first")),
                AlwaysStep("a growth that waits has a ballot out", self._has_ballot),
                AlwaysStep("a growth may wait for what is set aside", self._may_wait),
                SometimesStep("pages are taken while others are set aside", self._is("scarce")),
                SometimesStep("a growth gets what was set aside", self._is("grown")),
                SometimesStep("a read is shorter than storage has pages", self._is("shorter")),
            ]
        return self._claims

    def _says(self, name: str) -> Callable[[Now, Move[Now], Now], bool]:
        return lambda before, move, _after: move.label != "tick" or self._seen(before)[name]

    def _is(self, name: str) -> Callable[[Now, Move[Now], Now], bool]:
        return lambda before, move, _after: move.label == "tick" and self._seen(before)[name]

    def _seen(self, now: Now) -> dict[str, bool]:
        return self._looked(now.agreed, now.ballot, now.calls)

    def _looked_at(self, agreed: int, ballot: int, calls: tuple[int, ...]) -> dict[str, bool]:
        """What a tick made of the rooms that it was told."""
        turn = self.stage.turns[self.stage.decide(agreed, ballot, calls)]
        ledger, effects = turn.after.ledger, turn.decision.effects
        rooms = (turn.before.ledger.device_room, turn.before.ledger.host_room)
        if ballot >= 0:
            least, _ = self.stage.ballots[ballot]
            rooms = (least[_AT_ROOM], least[_AT_ROOM + 1])
        takes_device = any(isinstance(effect, TakeDevice) for effect in effects)
        takes_host = any(isinstance(effect, TakeHost) for effect in effects)
        refused = [n for n in turn.decision.notices if isinstance(n, HasGrown) and not n.pages]
        waited = {growth.attempt for growth in turn.before.growths}
        got = [n for n in turn.decision.notices if isinstance(n, HasGrown) and n.pages]
        return {
            "told": (ledger.device_room, ledger.host_room) == rooms,
            "spared": (not takes_device or ledger.device_live <= rooms[0])
            and (not takes_host or ledger.host_live <= rooms[1]),
            "granted": not refused or rooms[0] - ledger.device_live + _n_idle(turn.after) < 1,
            # Of a page each: for one that is admitted there is a page, so there was one for it too.
            "first": not (takes_device and turn.after.growths),
            "scarce": takes_device and rooms[0] < self.policy.n_device_pages,
            "grown": any(notice.attempt in waited for notice in got),
            "shorter": any(
                isinstance(effect, StartPrefetch) and len(effect.host) < B.n_pages
                for effect in effects
            ),
        }

    def _has_ballot(self, before: Now, move: Move[Now], after: Now) -> bool:
        del before
        is_waiting = bool(self.stage.agreed[after.agreed].growths)
        return move.label != "tick" or after.ballot >= 0 or not is_waiting

    def _may_wait(self, before: Now, move: Move[Now], after: Now) -> bool:
        """Refused at once is only what not even all pages of the device would be enough for."""
        if not move.label.startswith("grow"):
            return True
        was, now = self.stage.agreed[before.agreed], self.stage.agreed[after.agreed]
        if _n_owned(now) > _n_owned(was) or len(now.growths) > len(was.growths):
            return True
        return self.policy.n_device_pages - was.ledger.device_live + _n_idle(was) < 1


def _n_idle(agreed: Agreed) -> int:
    """Device pages that only the index has, counted anew."""
    return sum(
        segment.n_pages
        for segment in agreed.index.segments.values()
        if segment.device is not None and segment.device_pins == 0
    )


def _n_owned(agreed: Agreed) -> int:
    return sum(
        len(request.phase.lease.own)
        for request in agreed.requests.values()
        if isinstance(request.phase, Running)
    )


OVERDRAWN = Goal(
    name="more is set aside than is left",
    is_reached=lambda a: a.ledger.device_live > a.ledger.device_room,
)
OVERDRAWN_HOST = Goal(
    name="more host pages are set aside than are left",
    is_reached=lambda a: a.ledger.host_live > a.ledger.host_room,
)


def aside(*, deep: bool) -> Aside:
    """Somebody else takes pages of a rank, used ones too, and gives them back in the end."""
    return Aside(
        name="aside",
        lives=(
            Life(rid="A", prompt=A, story="pages=1", n_growths=1, is_first=True),
            Life(rid="B", prompt=B, story="pages=2"),
        ),
        policy=Policy(
            n_device_pages=3, n_host_pages=2, write=WritePolicy.THROUGH, persist=Switch.OFF
        ),
        limits=Limits(),
        climate=Climate(
            has_pieces=False,
            has_failures=deep,
            has_prompt_peer=True,
            asides=((1, 0), (2, 1), (3, 2)),
        ),
        preamble="world page=2 device=3 host=2\nconfig persist=off",
        putting="\nput B in storage",
        puts=(Put(prompt=B, start=0, stop=2, place=Placed.STORAGE),),
        n_ranks=2 if deep else 1,
        n_faults=2,
        goals=(goals.READY, goals.WAITS, OVERDRAWN, OVERDRAWN_HOST),
    )
