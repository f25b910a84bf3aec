"""What the weather may do to a rank between two ticks, worked out once for each part of it."""

from collections.abc import Callable
from typing import NamedTuple

from attrs import define, field

from kvlift.core.ids import Ticket
from kvlift.models.memo import memo
from kvlift.models.worlds.ghost import Rank
from kvlift.models.worlds.shelf import NOTHING, Parts, Ranks
from kvlift.models.worlds.weather import (
    Climate,
    Event,
    events,
    events_of_clock,
    events_of_neighbour,
)


class Happening(NamedTuple):
    """An event of one rank. `label` has `{name}` where the request's name belongs."""

    label: str
    ticket: Ticket
    after: int
    fair: str | None
    cost: int


class _Ghostly(NamedTuple):
    """An event of the ghost's parts: what of them it leaves."""

    event: Event
    operations: int
    talks: int
    pages: int
    stored: int
    echoes: int


@define(eq=False)
class Sky:
    """Everything that may happen to any of `ranks`."""

    climate: Climate
    ranks: Ranks
    happenings: Callable[[int, int], tuple[Happening, ...]] = field(init=False)
    _silent: Callable[[int, int], tuple[int, int]] = field(init=False)
    _of_operations: Callable[[int, int, int, int, int], tuple[_Ghostly, ...]] = field(init=False)
    _of_talks: Callable[[int, int, int], tuple[_Ghostly, ...]] = field(init=False)
    _of_clock: Callable[[int, tuple[Ticket, ...], int, int, int], tuple[Event, ...]] = field(
        init=False
    )

    def __attrs_post_init__(self) -> None:
        self.happenings = memo(self._happenings_of)
        self._silent = memo(self._silent_of)
        self._of_operations = memo(self._of_operations_of)
        self._of_talks = memo(self._of_talks_of)
        self._of_clock = memo(self._of_clock_of)

    def _happenings_of(self, number: int, place: int) -> tuple[Happening, ...]:
        """Everything that may happen to this rank, the `place`-th of its group."""
        parts = self.ranks.parts[number]
        found: list[Happening] = []
        for event, operations, _, pages, stored, echoes in (
            self._of_operations(parts.operations, parts.pages, parts.stored, parts.echoes, place)
            if parts.operations
            else ()
        ):
            after = parts._replace(operations=operations, pages=pages, stored=stored, echoes=echoes)
            found.append(self._happening(event, after))
        if parts.talks:
            for event, _, talks, pages, _, _ in self._of_talks(parts.talks, parts.pages, place):
                found.append(self._happening(event, parts._replace(talks=talks, pages=pages)))
        if self.climate.has_silence:
            silent = self._silent(parts.operations, parts.talks)
            for event in self._of_clock(parts.local, parts.expired, *silent, place):
                after = parts._replace(expired=event.after.expired)
                found.append(self._happening(event, after))
        if self.climate.asides:
            rank = Rank(local=NOTHING, aside=parts.aside)
            found += [
                self._happening(event, parts._replace(aside=event.after.aside))
                for event in events_of_neighbour(rank, place, self.climate)
            ]
        return tuple(found)

    def _happening(self, event: Event, after: Parts) -> Happening:
        number = self.ranks.number(after)
        return Happening(event.label, event.ticket, number, event.fair, event.cost)

    def _of_operations_of(
        self, operations: int, pages: int, stored: int, echoes: int, place: int
    ) -> tuple[_Ghostly, ...]:
        rank = self.ranks.ghost(operations=operations, pages=pages, stored=stored, echoes=echoes)
        return self._ghostly(rank, place)

    def _of_talks_of(self, talks: int, pages: int, place: int) -> tuple[_Ghostly, ...]:
        return self._ghostly(self.ranks.ghost(talks=talks, pages=pages), place)

    def _ghostly(self, rank: Rank, place: int) -> tuple[_Ghostly, ...]:
        ranks = self.ranks
        return tuple(
            _Ghostly(
                event,
                ranks.operations.number(event.after.operations),
                ranks.talks.number(event.after.talks),
                ranks.pages.number((event.after.device, event.after.host)),
                ranks.stored.number(event.after.stored),
                ranks.reports.number(event.after.echoes),
            )
            for event in events(rank, place, self.climate)
        )

    def _silent_of(self, operations: int, talks: int) -> tuple[int, int]:
        """What has fallen silent and still waits: the clocks depend on nothing else of these."""
        ranks = self.ranks
        mute = [o for o in ranks.operations.value(operations) if o.is_silent and o.landed is None]
        dumb = [t for t in ranks.talks.value(talks) if t.is_silent and not t.has_let_go]
        return ranks.operations.number(tuple(mute)), ranks.talks.number(tuple(dumb))

    def _of_clock_of(
        self, local: int, expired: tuple[Ticket, ...], operations: int, talks: int, place: int
    ) -> tuple[Event, ...]:
        rank = Rank(
            local=self.ranks.locals[local],
            operations=self.ranks.operations.value(operations),
            talks=self.ranks.talks.value(talks),
            expired=expired,
        )
        return tuple(events_of_clock(rank, place, self.climate))
