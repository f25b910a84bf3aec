"""Ranks that part: one misses a call, is behind, is of another version, fails, hears otherwise."""

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from attrs import define, evolve, field

from kvlift.core.agreed import Agreed
from kvlift.core.ballot import (
    RankFailed,
    RanksDiverged,
    Room,
    body_of,
    from_wire,
    header_of,
    proofs,
)
from kvlift.core.local import Limits
from kvlift.core.policy import Policy, Switch, WritePolicy
from kvlift.models.claim import Always, Broken, Claim, Live, Move, SometimesStep
from kvlift.models.memo import memo
from kvlift.models.worlds import goals
from kvlift.models.worlds.host import Life, prompt_of
from kvlift.models.worlds.situation import Situation
from kvlift.models.worlds.stage import Now
from kvlift.models.worlds.weather import Climate

A = prompt_of(1, 1, 2)

NOTICED: Final = 1000
UNNOTICED: Final = 1001
"""Numbers of events where the ranks have parted; nothing happens after that."""

MISSED: Final = "a rank misses what the host says"
BEHIND: Final = "a rank is a tick behind"
OTHER_VERSION: Final = "a rank is of another version"
OTHER_LENGTH: Final = "a ballot of another length comes back"
FAILED: Final = "a rank reports a failure of its own"
OTHER_TOKEN: Final = "the ranks are sent different tokens"

_Tick = tuple[int, int, tuple[int, ...]]


@define(eq=False)
class Split(Situation):
    """A situation in which one rank may part from the others, once."""

    _parted: Callable[[int, int, tuple[int, ...]], tuple[tuple[str, bool], ...]] = field(init=False)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self._parted = memo(self._parted_of)

    def claims(self) -> Sequence[Claim[Now]]:
        if not self._claims:
            super().claims()
            self._claims[:] = [_until_parted(claim) for claim in self._claims]
            self._claims.append(
                Always("ranks that part are told so by the next ballot",
                       lambda now: now.n_events != UNNOTICED))  # fmt: skip
            for way in (MISSED, BEHIND, OTHER_VERSION, OTHER_LENGTH, FAILED, OTHER_TOKEN):
                self._claims.append(SometimesStep(way, _is_labelled(way)))
        return self._claims

    def moves(self, state: Now) -> Iterator[Move[Now]]:
        if state.n_events in (NOTICED, UNNOTICED):
            return
        yield from super().moves(state)
        if state.faults:
            for way, is_noticed in self._parted(state.agreed, state.ballot, state.calls):
                end = NOTICED if is_noticed else UNNOTICED
                then = state._replace(calls=(), faults=state.faults - 1, n_events=end)
                yield Move(f"# {way}", then)

    def _tick(self, state: Now) -> Move[Now]:
        try:
            return super()._tick(state)
        except Broken as broken:
            if not isinstance(broken.__cause__, RanksDiverged):
                raise
            return Move(f"# {OTHER_TOKEN}", state._replace(calls=(), n_events=NOTICED))

    def _parted_of(
        self, agreed: int, ballot: int, calls: tuple[int, ...]
    ) -> tuple[tuple[str, bool], ...]:
        """Each way in which the next ballot may be wrong, and whether it is noticed."""
        turn = self.stage.turns[self.stage.decide(agreed, ballot, calls)]
        mine = self._wire(turn.after)
        found = [
            (BEHIND, self._is_noticed(turn.after, mine, self._wire(turn.before))),
            (OTHER_VERSION, self._is_noticed(turn.after, mine, self._wire(turn.after, schema=1))),
            (OTHER_LENGTH, self._is_noticed(turn.after, mine[:-1], mine[:-1])),
            (FAILED, self._is_noticed(turn.after, mine, self._wire(turn.after, health=0))),
        ]
        without = self.stage.turns[self.stage.decide(agreed, ballot, ())]
        if without.decision != turn.decision:
            other = self._wire(without.after)
            found.append((MISSED, self._is_noticed(turn.after, mine, other)))
        return tuple(found)

    def _wire(self, agreed: Agreed, *, schema: int = 0, health: int = 1) -> tuple[int, ...]:
        tick, mine, requests, state = proofs(agreed)
        room = Room(device=self.policy.n_device_pages, host=self.policy.n_host_pages)
        header = header_of(
            (tick, mine + schema, requests, state),
            room=room,
            rates=agreed.rates,
            is_healthy=bool(health),
            n_submissions=0,
        )
        return header + body_of((), self.policy)

    def _is_noticed(self, agreed: Agreed, one: tuple[int, ...], other: tuple[int, ...]) -> bool:
        least = tuple(map(min, one, other))
        try:
            from_wire(least, agreed, self.policy)
        except (RanksDiverged, RankFailed):
            return True
        return False


def _is_labelled(way: str) -> Callable[[Now, Move[Now], Now], bool]:
    return lambda before, move, after: move.label == f"# {way}"


def _until_parted(claim: Claim[Now]) -> Claim[Now]:
    """Ranks that have parted are ended by their host: what is alive then ends with them."""
    if not isinstance(claim, Live):
        return claim
    ended = claim.ended
    return evolve(claim, ended=lambda now: now.n_events == NOTICED or ended(now))


def split(*, deep: bool) -> Split:
    """Two ranks, one way to part: nothing is decided on what only one of them has heard."""
    return Split(
        name="split",
        n_together=2,
        lives=(Life(rid="A", prompt=A, story="pages=1 tokens=3", may_abort=deep, n_retractions=1),),
        policy=Policy(n_device_pages=2, n_host_pages=2, write=WritePolicy.NONE, persist=Switch.OFF),
        limits=Limits(),
        climate=Climate(has_pieces=False, has_failures=False, has_other_tokens=True),
        preamble="world ranks=2 page=2 device=2 host=2\nconfig write=none persist=off",
        n_ranks=2,
        n_faults=1,
        storage=Switch.OFF,
        goals=(goals.READY,),
    )
