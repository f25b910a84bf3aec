"""What a journal holds of a run, kept in memory: enough to tell the run as a story.

One scribe watches one rank. Tickets are named by what they are for, so that another run that is
nearly the same (a story's) can be compared with this one.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from attrs import define, field, frozen

from kvlift.core.advance import Decision, State
from kvlift.core.agreed import Agreed, Kind
from kvlift.core.ballot import PAIRS
from kvlift.core.ids import Attempt, Ticket
from kvlift.core.landed import Landed
from kvlift.core.submission import Submission
from kvlift.runtime.observer import Round, SilentObserver

ROOM_AT: Final = 2 * len(PAIRS)
"""Where a reduced ballot says how many pages of the device, then of the host, every rank has."""


@frozen
class Errand:
    """What a ticket is for: the n-th of its kind for this request (empty: for nobody's)."""

    kind: Kind
    rid: str
    number: int


@define(eq=False)
class Errands:
    """Names tickets as they are opened. `opened`: in which tick."""

    by_ticket: dict[Ticket, Errand] = field(factory=dict)
    opened: dict[Errand, int] = field(factory=dict)
    _n_known: Counter[tuple[Kind, str]] = field(factory=Counter)
    _last: Mapping[Ticket, object] = field(factory=dict)

    def look(self, agreed: Agreed) -> None:
        """After a tick, or a growth."""
        if agreed.tickets is self._last:
            return
        self._last = agreed.tickets
        for ticket, known in agreed.tickets.items():
            if ticket in self.by_ticket:
                continue
            request = agreed.requests.get(Attempt(known.owner))
            is_way_down = known.kind in (Kind.MIRROR, Kind.PERSIST)
            rid = "" if request is None or is_way_down else request.rid
            self._n_known[known.kind, rid] += 1
            errand = Errand(known.kind, rid, self._n_known[known.kind, rid])
            self.by_ticket[ticket] = errand
            self.opened[errand] = agreed.tick


@frozen(kw_only=True)
class Entry:
    """One tick of one rank. `room`: of the device and of the host, as the ballot told."""

    tick: int
    now_ns: int
    reports: tuple[Landed, ...]
    calls: tuple[Submission, ...]
    room: tuple[int, int] | None


@define(eq=False)
class Scribe(SilentObserver):
    """`grown`: (the tick before it, request, pages) of every growth that was asked for."""

    entries: list[Entry] = field(factory=list)
    grown: list[tuple[int, str, int]] = field(factory=list)
    errands: Errands = field(factory=Errands)

    def ticked(
        self,
        state: State,
        now_ns: int,
        reports: Sequence[Landed],
        least: tuple[int, ...] | None,
        calls: Sequence[Submission],
        decision: Decision,
    ) -> None:
        self._write(state.agreed.tick, now_ns, reports, least, calls)
        self.errands.look(state.agreed)

    def raised(self, state: State, done: Round, error: Exception) -> None:
        if done.during != "telling":
            self._write(state.agreed.tick + 1, done.now_ns, done.reports, done.least, done.calls)

    def grew(self, state: State, rid: str, n_pages: int, decision: Decision, now_ns: int) -> None:
        self.grown.append((state.agreed.tick, rid, n_pages))
        self.errands.look(state.agreed)

    def _write(
        self,
        tick: int,
        now_ns: int,
        reports: Sequence[Landed],
        least: tuple[int, ...] | None,
        calls: Sequence[Submission],
    ) -> None:
        room = None if least is None else (least[ROOM_AT], least[ROOM_AT + 1])
        self.entries.append(
            Entry(tick=tick, now_ns=now_ns, reports=tuple(reports), calls=tuple(calls), room=room)
        )
