"""What leaves a full device first: by the number of uses, by age, by priority."""

from collections.abc import Callable, Sequence
from typing import Final

from attrs import define, field

from kvlift.core.agreed import Agreed
from kvlift.core.index import Segment
from kvlift.core.local import Limits
from kvlift.core.policy import EvictionPolicy, Policy, Switch, WritePolicy
from kvlift.models.claim import AlwaysStep, Claim, Move, SometimesStep
from kvlift.models.memo import memo
from kvlift.models.worlds import goals
from kvlift.models.worlds.ghost import Tag
from kvlift.models.worlds.host import Life, prompt_of
from kvlift.models.worlds.paths import pages_of
from kvlift.models.worlds.situation import Situation
from kvlift.models.worlds.stage import Now
from kvlift.models.worlds.weather import Climate

A = prompt_of(1, 1, 2, 2)
B = prompt_of(1, 1, 3, 3)
C = prompt_of(4, 4, 5, 5, 6, 6)
D = prompt_of(7, 7)
E = prompt_of(8, 8)
F = prompt_of(9, 9)
G = prompt_of(7, 7, 5, 5)

_WORTH: Final[dict[EvictionPolicy, Callable[[Segment], tuple[int, int]]]] = {
    EvictionPolicy.LFU: lambda segment: (segment.n_uses, segment.used),
    EvictionPolicy.FIFO: lambda segment: (segment.born, 0),
    EvictionPolicy.PRIORITY: lambda segment: (segment.priority, segment.used),
}


@define(eq=False)
class Ordered(Situation):
    """A situation that watches what leaves the device, and in which order."""

    _left: Callable[[int, int], tuple[bool, bool, bool]] = field(init=False)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self._left = memo(self._left_of)

    def claims(self) -> Sequence[Claim[Now]]:
        if not self._claims:
            super().claims()
            self._claims += [
                AlwaysStep("what is worth least leaves first", self._asked(0)),
                SometimesStep("a page leaves for another", self._asked(1)),
                SometimesStep("a page leaves before one that was used earlier", self._asked(2)),
            ]
        return self._claims

    def _asked(self, number: int) -> Callable[[Now, Move[Now], Now], bool]:
        def holds(before: Now, move: Move[Now], after: Now) -> bool:
            del move
            if before.agreed == after.agreed:
                return number == 0
            return self._left(before.agreed, after.agreed)[number]

        return holds

    def _left_of(self, before: int, after: int) -> tuple[bool, bool, bool]:
        """Whether the order was kept, whether anything left, whether not by the order of use."""
        worth = _WORTH[self.policy.eviction]
        gone, kept = left_and_kept(self.stage.agreed[before], self.stage.agreed[after])
        is_right = all(worth(one) <= worth(other) for one in gone for other in kept)
        is_odd = any(one.used > other.used for one in gone for other in kept)
        return is_right, bool(gone), is_odd


def left_and_kept(before: Agreed, after: Agreed) -> tuple[list[Segment], list[Segment]]:
    """Idle device pages that are gone; and those that stayed although nothing hung on them.

    As they were before: one value a page."""
    idle: dict[Tag, Segment] = {
        page.tag: page.segment for page in pages_of(before) if page.is_idle_on_device
    }
    still = {page.tag: page for page in pages_of(after)}
    gone, kept = [], []
    for tag, segment in idle.items():
        page = still.get(tag)
        if page is None or page.segment.device is None:
            gone.append(segment)
        elif page.is_idle_on_device and not any(
            other != tag and other.startswith(tag) for other in idle
        ):
            kept.append(segment)
    return gone, kept


def _ordered(name: str, eviction: EvictionPolicy, lives: tuple[Life, ...], n_pages: int) -> Ordered:
    return Ordered(
        name=name,
        lives=lives,
        policy=Policy(
            n_device_pages=n_pages,
            n_host_pages=0,
            write=WritePolicy.NONE,
            persist=Switch.OFF,
            eviction=eviction,
        ),
        limits=Limits(),
        climate=Climate(has_failures=False, has_pieces=False, has_prompt_peer=True),
        preamble=f"world page=2 device={n_pages} host=0\n"
        f"config write=none persist=off eviction={eviction.value}",
        storage=Switch.OFF,
        goals=(goals.READY,),
    )


def rare(*, deep: bool) -> Ordered:
    """Least often used first; a prefix leaves after what hangs on it."""
    lives = (
        Life(rid="A", prompt=A, story="pages=2", n_lives=3 if deep else 2),
        Life(rid="B", prompt=B, story="from=A[0:1] pages=2"),
        Life(rid="C", prompt=C, story="pages=3", n_lives=2 if deep else 1),
        Life(rid="D", prompt=D, story="pages=1"),
    )
    return _ordered("rare", EvictionPolicy.LFU, lives, 3)


def aged(*, deep: bool) -> Ordered:
    """First in, first out, however often it was used since."""
    lives = (
        Life(rid="D", prompt=D, story="pages=1", n_lives=3 if deep else 2),
        Life(rid="E", prompt=E, story="pages=1"),
        Life(rid="F", prompt=F, story="pages=1"),
        Life(rid="G", prompt=G, story="from=D[0:1] pages=2"),  # finds the oldest page of all
    )
    return _ordered("aged", EvictionPolicy.FIFO, lives, 2)


def dear(*, deep: bool) -> Ordered:
    """What was wanted least urgently leaves first."""
    lives = (
        Life(rid="D", prompt=D, story="pages=1", n_lives=2 if deep else 1, priority=1),
        Life(rid="E", prompt=E, story="pages=1"),
        Life(rid="F", prompt=F, story="pages=1"),
    )
    return _ordered("dear", EvictionPolicy.PRIORITY, lives, 2)
