"""Who looks over the driver's shoulder: the journal, the metrics, the log. None of them decides.

An observer must be quick, keep its own faults to itself, and change nothing.
"""

from collections.abc import Sequence
from typing import Literal, Protocol, TypeAlias

from attrs import define, frozen

from kvlift.core.advance import Decision, State
from kvlift.core.landed import Landed
from kvlift.core.prompt import Prompt
from kvlift.core.submission import Submission
from kvlift.core.tier import Tier
from kvlift.runtime.config import Config
from kvlift.runtime.tick import Tick


@frozen
class Adoption:
    """Pages [start, stop) of a prompt that got a place in a tier between two ticks.

    `is_stow`: they are the host's own on the device, and go down from there."""

    tier: Tier
    prompt: Prompt
    start: int
    stop: int
    is_stow: bool = False


During: TypeAlias = Literal["hearing", "waiting", "judging", "deciding", "telling"]
"""How far a tick has come: reports of ports, the verdict of the other ranks, what it says, the
decision, and what follows from it (effects, the next ballot, the host's answer)."""


@define(eq=False)
class Round:
    """A tick under way: what is known so far, in case it raises."""

    now_ns: int
    during: During = "hearing"
    reports: Sequence[Landed] = ()
    least: tuple[int, ...] | None = None
    calls: Sequence[Submission] = ()


class Observer(Protocol):
    """The calls of one tick come in this order; `grew`, `adopted`, `reconfigured` between ticks.

    `state` is always the one after what is told."""

    def began(self) -> None:
        """The host has called `tick`."""

    def waiting(self) -> None:
        """The verdict of the last ballot is taken now; what follows may be a wait."""

    def waited(self) -> None:
        """The verdict is here."""

    def ticked(
        self,
        state: State,
        now_ns: int,
        reports: Sequence[Landed],
        least: tuple[int, ...] | None,
        calls: Sequence[Submission],
        decision: Decision,
    ) -> None:
        """A tick was decided; its effects start now. `least` is the reduced ballot."""

    def told(self, state: State, tick: Tick) -> None:
        """The host gets `tick` now: effects have been started, the next ballot is out."""

    def raised(self, state: State, done: Round, error: Exception) -> None:
        """The tick raises this to the host. `state`: where it stands; decided, while telling."""

    def grew(self, state: State, rid: str, n_pages: int, decision: Decision, now_ns: int) -> None:
        """A growth was answered."""

    def adopted(self, state: State, what: Adoption, decision: Decision, now_ns: int) -> None:
        """Pages were adopted."""

    def reconfigured(self, config: Config) -> None:
        """From the next tick on, and for growths at once, these choices and limits hold."""

    def failed(self, effect: object, error: Exception) -> None:
        """A port raised: a fault of this rank, which all ranks will hear of."""

    def close(self) -> None: ...


class SilentObserver:
    """Looks away. Observers that care about few calls inherit the rest."""

    def began(self) -> None: ...

    def waiting(self) -> None: ...

    def waited(self) -> None: ...

    def ticked(
        self,
        state: State,
        now_ns: int,
        reports: Sequence[Landed],
        least: tuple[int, ...] | None,
        calls: Sequence[Submission],
        decision: Decision,
    ) -> None: ...

    def told(self, state: State, tick: Tick) -> None: ...

    def raised(self, state: State, done: Round, error: Exception) -> None: ...

    def grew(
        self, state: State, rid: str, n_pages: int, decision: Decision, now_ns: int
    ) -> None: ...

    def adopted(self, state: State, what: Adoption, decision: Decision, now_ns: int) -> None: ...

    def reconfigured(self, config: Config) -> None: ...

    def failed(self, effect: object, error: Exception) -> None: ...

    def close(self) -> None: ...


@frozen
class Several:
    """All of these observers, in order."""

    observers: tuple[Observer, ...]

    def began(self) -> None:
        for observer in self.observers:
            observer.began()

    def waiting(self) -> None:
        for observer in self.observers:
            observer.waiting()

    def waited(self) -> None:
        for observer in self.observers:
            observer.waited()

    def ticked(
        self,
        state: State,
        now_ns: int,
        reports: Sequence[Landed],
        least: tuple[int, ...] | None,
        calls: Sequence[Submission],
        decision: Decision,
    ) -> None:
        for observer in self.observers:
            observer.ticked(state, now_ns, reports, least, calls, decision)

    def told(self, state: State, tick: Tick) -> None:
        for observer in self.observers:
            observer.told(state, tick)

    def raised(self, state: State, done: Round, error: Exception) -> None:
        for observer in self.observers:
            observer.raised(state, done, error)

    def grew(self, state: State, rid: str, n_pages: int, decision: Decision, now_ns: int) -> None:
        for observer in self.observers:
            observer.grew(state, rid, n_pages, decision, now_ns)

    def adopted(self, state: State, what: Adoption, decision: Decision, now_ns: int) -> None:
        for observer in self.observers:
            observer.adopted(state, what, decision, now_ns)

    def reconfigured(self, config: Config) -> None:
        for observer in self.observers:
            observer.reconfigured(config)

    def failed(self, effect: object, error: Exception) -> None:
        for observer in self.observers:
            observer.failed(effect, error)

    def close(self) -> None:
        for observer in self.observers:
            observer.close()
