"""What a simulated port has been asked to do, and the reports that it gives back."""

from collections import deque
from collections.abc import Callable, Iterable
from enum import Enum

from attrs import define, field

from kvlift.core.ids import Ticket
from kvlift.core.landed import Landed
from kvlift.core.prompt import Prompt
from kvlift.core.tier import Tier
from kvlift.testing.sim_memory import Content

LOG_LENGTH = 65_536
"""Operations that a port remembers; a story has a few hundred, a long simulation has no end."""


class Kind(Enum):
    """What an operation is; the value is the class name of the effect that starts it."""

    LOOKUP = "StartLookup"
    READ = "StartPrefetch"
    PERSIST = "StartPersist"
    RESTORE = "StartRestore"
    MIRROR = "StartMirror"


@define(eq=False)
class Operation:
    """One started effect. `values` are its pages' contents: as they were in the source when it
    started, or, for storage, as they must be. `is_void`: it will end without having done anything.
    `n_landed`: the first pages of a read that are there already. `start`: of a restore's piece.
    """

    ticket: Ticket
    kind: Kind
    values: tuple[Content, ...]
    sources: tuple[int, ...] = ()
    targets: tuple[int, ...] = ()
    source_tier: Tier | None = None
    prompt: Prompt | None = None
    is_outstanding: bool = True
    is_void: bool = False
    n_landed: int = 0
    start: int = 0
    report: Landed | None = None


@define
class Outbox:
    """Reports on their way to the tick, in the order in which things ended.

    `last` are those that were drained last.
    """

    waiting: list[Landed] = field(factory=list)
    last: list[Landed] = field(factory=list)

    def put(self, report: Landed) -> None:
        self.waiting.append(report)

    def drain(self) -> list[Landed]:
        self.last, self.waiting = self.waiting, []
        return list(self.last)


@define
class Calls:
    """What the port was asked for since the last `clear`: an effect class name a call, in order.

    `tickets` are those of effects that begin something; `pieces` are restores that came in pieces,
    as (ticket, start, n_pages), the first ones among the tickets.
    """

    names: list[str] = field(factory=list)
    tickets: list[Ticket] = field(factory=list)
    pieces: list[tuple[Ticket, int, int]] = field(factory=list)

    def add(self, name: str) -> None:
        self.names.append(name)

    def begin(self, name: str, ticket: Ticket) -> None:
        self.names.append(name)
        self.tickets.append(ticket)

    def begin_piece(self, name: str, ticket: Ticket, start: int, n_pages: int) -> None:
        self.names.append(name)
        self.pieces.append((ticket, start, n_pages))
        if start == 0:
            self.tickets.append(ticket)

    def clear(self) -> None:
        self.names.clear()
        self.tickets.clear()
        self.pieces.clear()


def operation_log() -> deque[Operation]:
    return deque(maxlen=LOG_LENGTH)


def outstanding(
    operations: Iterable[Operation], wanted: Callable[[Operation], bool]
) -> list[Operation]:
    """The operations that have not ended and are wanted, oldest first."""
    return [one for one in operations if one.is_outstanding and wanted(one)]
