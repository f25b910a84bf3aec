"""Who waits in line: nobody is overtaken more often than allowed, the urgent go first."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from attrs import define, field

from kvlift.core.agreed import Agreed, Request
from kvlift.core.ids import Attempt, Rid
from kvlift.core.local import Limits
from kvlift.core.phase import Filling, Ready, Resuming, Running, Waiting
from kvlift.core.policy import Policy, Switch, WritePolicy
from kvlift.models.claim import Always, AlwaysStep, Claim, Move, SometimesStep
from kvlift.models.memo import memo
from kvlift.models.worlds import goals
from kvlift.models.worlds.host import Life, prompt_of
from kvlift.models.worlds.situation import Situation
from kvlift.models.worlds.stage import Now
from kvlift.models.worlds.weather import Climate

A = prompt_of(1, 1, 2, 2)
B = prompt_of(3, 3, 4, 4, 5, 5)
C = prompt_of(6, 6)
D = prompt_of(7, 7)
E = prompt_of(8, 8, 9, 9)

_INSIDE: Final = (Filling, Ready, Running)
"""Admitted, and holding pages; one whose pages are all cached is ready at once."""


@define(eq=False)
class Line(Situation):
    """A situation that watches its queue. No prefix of one request may be of use to another."""

    _moved: Callable[[int, int], tuple[bool, bool, bool]] = field(init=False)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self._moved = memo(self._moved_of)

    def claims(self) -> Sequence[Claim[Now]]:
        if not self._claims:
            super().claims()
            agreed, most = self.stage.agreed, self.policy.bypass_max
            self._claims += [
                AlwaysStep("who is overtaken is counted once for each", self._asked(0)),
                AlwaysStep("the more urgent goes first where it needs no more", self._asked(1)),
                SometimesStep("somebody is overtaken", self._asked(2)),
                Always(
                    "nobody is overtaken more often than allowed",
                    lambda now: all(n <= most for n in _bypasses(agreed[now.agreed].requests)),
                ),
            ]
        return self._claims

    def _asked(self, number: int) -> Callable[[Now, Move[Now], Now], bool]:
        def holds(before: Now, move: Move[Now], after: Now) -> bool:
            del move
            if before.agreed == after.agreed:
                return number < 2
            return self._moved(before.agreed, after.agreed)[number]

        return holds

    def _moved_of(self, before: int, after: int) -> tuple[bool, bool, bool]:
        """Bypasses are counted right; the urgent went first; there was a bypass."""
        was = _alive(self.stage.agreed[before])
        now = _alive(self.stage.agreed[after])
        admitted = [
            request
            for rid, request in now.items()
            if isinstance(request.phase, _INSIDE)
            and not (rid in was and isinstance(was[rid].phase, _INSIDE))
        ]
        stayed = [now[rid] for rid in now if rid in was and _waits(was[rid]) and _waits(now[rid])]
        is_counted = is_urgent_first = True
        n_all = 0
        for one in stayed:
            n_passed = sum(_place(other) > _place(one) for other in admitted)
            n_all += n_passed
            is_counted &= _n_bypassed(one) == _n_bypassed(was[one.rid]) + n_passed
            is_urgent_first &= not any(
                one.priority > other.priority and one.prompt.n_pages <= other.prompt.n_pages
                for other in admitted
            )
        return is_counted, is_urgent_first, n_all > 0


def _alive(agreed: Agreed) -> dict[Rid, Request]:
    return {rid: agreed.requests[attempt] for rid, attempt in agreed.attempt_by_rid.items()}


def _waits(request: Request) -> bool:
    return isinstance(request.phase, Waiting | Resuming)


def _place(request: Request) -> tuple[int, int]:
    return (-request.priority, request.attempt)


def _n_bypassed(request: Request) -> int:
    return request.phase.n_bypassed if isinstance(request.phase, Waiting | Resuming) else 0


def _bypasses(requests: Mapping[Attempt, Request]) -> list[int]:
    return [_n_bypassed(request) for request in requests.values()]


def _line(name: str, lives: tuple[Life, ...], *, n_pages: int, deep: bool) -> Line:
    return Line(
        name=name,
        lives=lives,
        policy=Policy(
            n_device_pages=n_pages,
            n_host_pages=0,
            write=WritePolicy.NONE,
            persist=Switch.OFF,
            first_token=Switch.OFF,
            bypass_max=1,
        ),
        limits=Limits(),
        climate=Climate(has_failures=False, has_pieces=False),
        preamble=f"world page=2 device={n_pages} host=0\n"
        "config write=none persist=off first_token=off bypass_max=1",
        n_faults=1 if deep else 0,
        storage=Switch.OFF,
        goals=(goals.READY, goals.WAITS, goals.BYPASSED),
    )


def queue(*, deep: bool) -> Line:
    """Three requests, a full device: a large head of line is overtaken once, and then no more."""
    lives = (
        Life(rid="A", prompt=A, story="pages=2", is_first=True),
        Life(rid="B", prompt=B, story="pages=3", may_abort=deep),
        Life(rid="C", prompt=C, story="pages=1", n_lives=3),
    )
    return _line("queue", lives, n_pages=3, deep=deep)


def urgent(*, deep: bool) -> Line:
    """The most urgent goes first, also when it came last."""
    lives = (
        Life(rid="A", prompt=A, story="pages=2", is_first=True),
        Life(rid="B", prompt=B, story="pages=3", priority=1, may_abort=deep),
        Life(rid="C", prompt=C, story="pages=1", n_lives=2),
        Life(rid="D", prompt=D, story="pages=1", priority=2),
    )
    return _line("urgent", lives, n_pages=3, deep=deep)


def behind(*, deep: bool) -> Line:
    """Three wait until one has room: who stands behind the winner has not been overtaken."""
    lives = (
        Life(rid="A", prompt=A, story="pages=2", is_first=True),
        Life(rid="D", prompt=D, story="pages=1", is_first=True),
        Life(rid="B", prompt=B, story="pages=3", may_abort=deep),
        Life(rid="C", prompt=C, story="pages=1"),
        Life(rid="E", prompt=E, story="pages=2"),
    )
    return _line("behind", lives, n_pages=3, deep=deep)
