"""A host that says everything at any time: what can't be taken changes nothing and is answered."""

from collections.abc import Callable, Sequence
from typing import Final

from attrs import define

from kvlift.core.local import Limits
from kvlift.core.notice import WasRefused
from kvlift.core.policy import Policy, Switch, WritePolicy
from kvlift.models.claim import AlwaysOf, Claim, SometimesOf
from kvlift.models.worlds import goals
from kvlift.models.worlds.host import Life, prompt_of
from kvlift.models.worlds.situation import Situation
from kvlift.models.worlds.stage import Now
from kvlift.models.worlds.weather import Climate

A = prompt_of(1, 1, 2)

REFUSALS: Final = (
    ("Submit", "Filling"),
    ("Started", "Waiting"),
    ("Started", "Running"),
    ("Finish", "Ready"),
    ("Finish", "Running"),
    ("Retract", "Running"),
    ("Retract", "unknown"),
    ("WantedBack", "Filling"),
    ("Abort", "unknown"),
)
"""(call, phase) of refusals that the world must see."""

_Tick = tuple[int, int, tuple[int, ...]]


@define(eq=False)
class Hasty(Situation):
    """A situation that watches how calls are refused."""

    def claims(self) -> Sequence[Claim[Now]]:
        if not self._claims:
            super().claims()
            self._claims.append(
                AlwaysOf("a call that can't be taken changes nothing", _ticks, self._is_without_end)
            )
            for call, phase in REFUSALS:
                goal = f"{call} is refused in {phase}"
                self._claims.append(SometimesOf(goal, _ticks, self._asks(call, phase)))
        return self._claims

    def _refused(self, tick: _Tick) -> list[WasRefused]:
        decision = self.stage.turns[self.stage.decide(*tick)].decision
        return [notice for notice in decision.notices if isinstance(notice, WasRefused)]

    def _is_without_end(self, tick: _Tick) -> bool:
        """The host says one thing between two ticks, so a refusal is of all that was said."""
        if not self._refused(tick):
            return True
        agreed, ballot, _ = tick
        turns, decide = self.stage.turns, self.stage.decide
        quiet = turns[decide(agreed, ballot, ())]
        return turns[decide(*tick)].number_after == quiet.number_after

    def _asks(self, call: str, phase: str) -> Callable[[_Tick], bool]:
        return lambda tick: any(
            (refusal.call, refusal.phase) == (call, phase) for refusal in self._refused(tick)
        )


def _ticks(now: Now) -> tuple[_Tick, ...]:
    return ((now.agreed, now.ballot, now.calls),) if now.calls else ()


def hasty(*, deep: bool) -> Hasty:
    """Calls too early, too late and twice, growth before it runs, an answer that changes."""
    return Hasty(
        name="hasty",
        lives=(
            Life(
                rid="A",
                prompt=A,
                story="pages=1 tokens=3",
                n_output_pages=1,
                n_retractions=1,
                is_hasty=True,
            ),
        ),
        policy=Policy(
            n_device_pages=2,
            n_host_pages=1,
            write=WritePolicy.NONE,
            persist=Switch.OFF,
        ),
        limits=Limits(),
        climate=Climate(has_failures=False, has_pieces=False, has_prompt_peer=not deep),
        preamble="world page=2 device=2 host=1\nconfig write=none persist=off",
        n_faults=2 if deep else 1,
        storage=Switch.OFF,
        goals=(goals.READY,),
    )
