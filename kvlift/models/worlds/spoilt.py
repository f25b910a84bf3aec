"""States that the core has made, damaged in one place: the invariants must notice.

An invariant that nothing can break proves nothing. The states are taken from short walks through
other worlds, one of each shape; each damage is done wherever it can be done.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Final, NamedTuple

from attrs import define, field

from kvlift.core.agreed import Agreed
from kvlift.core.invariants import (
    INVARIANTS,
    LOCAL_INVARIANTS,
    breaches,
    local_breaches,
    name_of,
)
from kvlift.core.local import Limits, Local
from kvlift.models.claim import Always, Claim, Move, Sometimes, World
from kvlift.models.worlds.damage import DAMAGES, LOCAL_DAMAGES
from kvlift.models.worlds.late import late
from kvlift.models.worlds.mirror import mirror
from kvlift.models.worlds.restore import hurry
from kvlift.models.worlds.retract import retract
from kvlift.models.worlds.share import share
from kvlift.models.worlds.situation import Situation
from kvlift.models.worlds.stow import stow

N_STATES: Final = 600
"""Walked of each world: most shapes are met early."""


class Sample(NamedTuple):
    """A whole state: the agreed half, one rank's half, and its limits."""

    agreed: Agreed
    local: Local
    limits: Limits


class Checked(NamedTuple):
    """A sample by number, what was done to it and where, and which invariants notice."""

    number: int
    damage: str = ""
    place: int = 0
    noticed: frozenset[str] = frozenset()


def _shape(sample: Sample) -> Hashable:
    """Samples of one shape can be damaged in the same places."""
    agreed, local = sample.agreed, sample.local
    segments = agreed.index.segments.values()
    return (
        frozenset(type(request.phase) for request in agreed.requests.values()),
        frozenset(type(descent.phase) for descent in agreed.descents),
        frozenset((bool(s.device), bool(s.host), s.parent > 0) for s in segments),
        len(agreed.drains),
        bool(local.parked),
        bool(local.chains),
    )


def samples(situations: Sequence[Situation]) -> tuple[Sample, ...]:
    """One state of each shape that short walks through these situations meet."""
    found: dict[Hashable, Sample] = {}
    for situation in situations:
        stage = situation.stage
        todo = deque(situation.initial())
        met = set(map(situation.canonical, todo))
        while todo and len(met) < N_STATES:
            for move in situation.moves(todo.popleft()):
                key = situation.canonical(move.next)
                if key not in met:
                    met.add(key)
                    todo.append(move.next)
                    local = stage.ranks[move.next.ranks[0]].local
                    sample = Sample(stage.agreed[move.next.agreed], local, situation.limits)
                    found.setdefault(_shape(sample), sample)
    return tuple(found.values())


@define(eq=False)
class Spoilt(World[Checked]):
    """One damage from every sample."""

    name: str
    _samples: tuple[Sample, ...] = field(init=False, default=())

    def claims(self) -> Sequence[Claim[Checked]]:
        names = [*map(name_of, INVARIANTS), *map(name_of, LOCAL_INVARIANTS)]
        return [
            Always(
                "what the core made breaks nothing", lambda one: bool(one.damage or not one.noticed)
            ),
            Always("every damage is noticed", lambda one: bool(not one.damage or one.noticed)),
            *(Sometimes(f"{name}: it is noticed where not", _notices(name)) for name in names),
        ]

    def initial(self) -> Iterator[Checked]:
        if not self._samples:
            worlds = (late, mirror, hurry, retract, share, stow)
            self._samples = samples([world(deep=False) for world in worlds])
        for number, sample in enumerate(self._samples):
            yield Checked(number, noticed=_noticed(sample))

    def moves(self, state: Checked) -> Iterator[Move[Checked]]:
        if state.damage:
            return
        agreed, local, limits = self._samples[state.number]
        for damage in DAMAGES:
            for place, worse in enumerate(damage(agreed)):
                if worse == agreed:
                    continue  # there was nothing to damage
                yield self._move(state, damage.__name__, place, Sample(worse, local, limits))
        for local_damage in LOCAL_DAMAGES:
            for place, less in enumerate(local_damage(local)):
                yield self._move(state, local_damage.__name__, place, Sample(agreed, less, limits))

    def _move(self, state: Checked, damage: str, place: int, sample: Sample) -> Move[Checked]:
        noticed = _noticed(sample)
        label = f"# {damage.replace('_', ' ')}, {place}"
        return Move(label, Checked(state.number, damage, place, noticed))

    def canonical(self, state: Checked) -> Hashable:
        return state


def _notices(name: str) -> Callable[[Checked], bool]:
    return lambda one: bool(one.damage) and name in one.noticed


def _noticed(sample: Sample) -> frozenset[str]:
    found = (*breaches(sample.agreed), *local_breaches(*sample))
    return frozenset(breach.name for breach in found)


def spoilt(*, deep: bool) -> Spoilt:
    """Each invariant is broken on purpose: it must say so."""
    del deep
    return Spoilt(name="spoilt")
