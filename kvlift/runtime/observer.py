"""Who looks over the driver's shoulder: the journal, the metrics, the log. None of them decides."""

from collections.abc import Sequence
from typing import Protocol

from attrs import frozen

from kvlift.core.advance import Decision, State
from kvlift.core.landed import Landed
from kvlift.core.submission import Submission


class Observer(Protocol):
    def ticked(
        self,
        state: State,
        now_ns: int,
        reports: Sequence[Landed],
        least: tuple[int, ...] | None,
        calls: Sequence[Submission],
        decision: Decision,
    ) -> None:
        """A tick was decided: `state` is the one after it, `least` the reduced ballot."""

    def grew(self, rid: str, n_pages: int, decision: Decision, now_ns: int) -> None:
        """A growth was answered between two ticks."""

    def failed(self, effect: object, error: Exception) -> None:
        """A port raised: a fault of this rank, which all ranks will hear of."""

    def close(self) -> None: ...


class SilentObserver:
    """Looks away."""

    def ticked(
        self,
        state: State,
        now_ns: int,
        reports: Sequence[Landed],
        least: tuple[int, ...] | None,
        calls: Sequence[Submission],
        decision: Decision,
    ) -> None: ...

    def grew(self, rid: str, n_pages: int, decision: Decision, now_ns: int) -> None: ...

    def failed(self, effect: object, error: Exception) -> None: ...

    def close(self) -> None: ...


@frozen
class Several:
    """All of these observers, in order."""

    observers: tuple[Observer, ...]

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

    def grew(self, rid: str, n_pages: int, decision: Decision, now_ns: int) -> None:
        for observer in self.observers:
            observer.grew(rid, n_pages, decision, now_ns)

    def failed(self, effect: object, error: Exception) -> None:
        for observer in self.observers:
            observer.failed(effect, error)

    def close(self) -> None:
        for observer in self.observers:
            observer.close()
