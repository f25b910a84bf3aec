"""Values by number, and ranks in parts: what keeps a world's states small and its memos few.

A rank is what the core knows of it (`Local`) beside what the ghost knows: operations, talks, pages,
storage. Together they have far more values than each by itself, so each part has numbers of its
own, and whatever depends on some of the parts is worked out once for those.
"""

from collections.abc import Callable, Hashable
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from attrs import define, field

from kvlift.core.canonical import local_key
from kvlift.core.ids import Ticket
from kvlift.core.landed import Landed
from kvlift.core.local import Local
from kvlift.models.memo import Numbered
from kvlift.models.worlds.ghost import (
    Aside,
    DevicePage,
    HostPage,
    Operation,
    Rank,
    Tag,
    Talk,
)

V = TypeVar("V")

Pages: TypeAlias = tuple[tuple[DevicePage, ...], tuple[HostPage, ...]]


@define
class Shelf(Generic[V]):
    """Values by number, equal keys having one number."""

    values: list[V] = field(factory=list)
    _numbers: dict[Hashable, int] = field(factory=dict)

    def number(self, key: Hashable, make: Callable[[], V]) -> int:
        number = self._numbers.get(key)
        if number is None:
            value = make()
            number = self._numbers.setdefault(key, len(self.values))
            self.values.append(value)
        return number

    def __getitem__(self, number: int) -> V:
        return self.values[number]

    def __len__(self) -> int:
        return len(self.values)


class Parts(NamedTuple):
    """One rank in numbers. `local`, `operations`, `talks`, `pages`, `stored`, `echoes` are on the
    shelves of `Ranks`; number 0 of `operations`, `talks` and `echoes` is "none"."""

    local: int
    operations: int
    talks: int
    pages: int
    stored: int
    expired: tuple[Ticket, ...] = ()
    echoes: int = 0
    wrong: str = ""
    aside: Aside = (0, 0)


NOTHING = Local()
"""The local half of a rank that is only looked at for its other parts."""


@define(eq=False)
class Ranks:
    """Every rank that was met, by number."""

    locals: Shelf[Local] = field(factory=Shelf, init=False)
    operations: Numbered[tuple[Operation, ...]] = field(factory=Numbered, init=False)
    talks: Numbered[tuple[Talk, ...]] = field(factory=Numbered, init=False)
    pages: Numbered[Pages] = field(factory=Numbered, init=False)
    stored: Numbered[frozenset[Tag]] = field(factory=Numbered, init=False)
    reports: Numbered[tuple[Landed, ...]] = field(factory=Numbered, init=False)
    parts: list[Parts] = field(factory=list, init=False)
    wrong: set[int] = field(factory=set, init=False)
    _number_by_parts: dict[Parts, int] = field(factory=dict, init=False)
    _ranks: dict[int, Rank] = field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        self.operations.number(())
        self.talks.number(())
        self.reports.number(())

    def __getitem__(self, number: int) -> Rank:
        rank = self._ranks.get(number)
        if rank is None:
            rank = self._ranks[number] = self.rank(self.parts[number])
        return rank

    def __len__(self) -> int:
        return len(self.parts)

    def number(self, parts: Parts) -> int:
        number = self._number_by_parts.get(parts)
        if number is None:
            number = self._number_by_parts[parts] = len(self.parts)
            self.parts.append(parts)
            if parts.wrong:
                self.wrong.add(number)
        return number

    def number_of(self, rank: Rank) -> int:
        return self.number(self.parts_of(rank))

    def number_of_local(self, local: Local) -> int:
        return self.locals.number(local_key(local), lambda: local)

    def parts_of(self, rank: Rank) -> Parts:
        return Parts(
            self.number_of_local(rank.local),
            self.operations.number(rank.operations),
            self.talks.number(rank.talks),
            self.pages.number((rank.device, rank.host)),
            self.stored.number(rank.stored),
            rank.expired,
            self.reports.number(rank.echoes),
            rank.wrong,
            rank.aside,
        )

    def rank(self, parts: Parts) -> Rank:
        device, host = self.pages.value(parts.pages)
        return Rank(
            local=self.locals[parts.local],
            operations=self.operations.value(parts.operations),
            talks=self.talks.value(parts.talks),
            device=device,
            host=host,
            stored=self.stored.value(parts.stored),
            expired=parts.expired,
            echoes=self.reports.value(parts.echoes),
            wrong=parts.wrong,
            aside=parts.aside,
        )

    def ghost(
        self, *, pages: int, operations: int = 0, talks: int = 0, stored: int = -1, echoes: int = 0
    ) -> Rank:
        """A rank with some of its parts alone, for what does not look at the others."""
        device, host = self.pages.value(pages)
        return Rank(
            local=NOTHING,
            operations=self.operations.value(operations),
            talks=self.talks.value(talks),
            device=device,
            host=host,
            stored=frozenset() if stored < 0 else self.stored.value(stored),
            echoes=self.reports.value(echoes),
        )
