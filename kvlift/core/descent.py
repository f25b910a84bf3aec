"""The way down, a machine of its own: finished pages go to the host, then to storage.

A descent is one path of the index. It mirrors the pages that the host lacks, then, if the request
has ended, persists those that storage lacks, parents before children. A page that could not be
stored ends the descent: what hangs on it is not written, so that no stored page lies behind a hole.

    Due --MirrorStarted--> Mirroring --MirrorOver--> Stowing --PersistStarted--> Persisting
                                                        ^                            |
                                                        |--------PersistOver---------|
    and from each to Settled when there is nothing (more) to do
"""

from enum import Enum
from typing import TypeAlias, assert_never

from attrs import evolve, frozen

from kvlift.core.ids import HostHandle, Ticket
from kvlift.core.illegal import IllegalEvent
from kvlift.core.policy import Switch
from kvlift.core.prompt import Prompt


class Reach(Enum):
    """How far down the pages go."""

    HOST = "host"
    STORAGE = "storage"
    BOTH = "both"


@frozen
class Due:
    """The host has not been looked at yet."""


@frozen(kw_only=True)
class Mirroring:
    """Pages at `positions` are being copied into `host`, one handle a position."""

    ticket: Ticket
    positions: tuple[int, ...]
    host: tuple[HostHandle, ...]
    host_epoch: int


@frozen
class Stowing:
    """The host has what it will get; storage is next."""


@frozen(kw_only=True)
class Persisting:
    """Pages at `positions` are being written to storage, in order.

    `counts` is OFF when storage was flushed or detached meanwhile: what this write still brings
    there is not believed."""

    ticket: Ticket
    positions: tuple[int, ...]
    from_host: bool
    counts: Switch = Switch.ON


@frozen
class Settled:
    """Nothing more to do; the record leaves the state in the same tick."""


DescentPhase: TypeAlias = Due | Mirroring | Stowing | Persisting | Settled


@frozen(kw_only=True)
class Descent:
    """`prompt` is the path; its first `n_pages` pages go down as far as `reach` says."""

    id: int
    prompt: Prompt
    n_pages: int
    reach: Reach
    phase: DescentPhase


@frozen
class MirrorStarted:
    mirroring: Mirroring


@frozen
class MirrorSkipped:
    """Nothing to copy, or no room for it."""


@frozen
class MirrorOver:
    """The copy has ended on all ranks; its first `n_good` pages are on the host."""

    ticket: Ticket
    n_good: int


@frozen
class PersistStarted:
    persisting: Persisting


@frozen
class PersistOver:
    """The write has ended on all ranks; its first `n_good` pages are stored."""

    ticket: Ticket
    n_good: int


@frozen
class NothingLeft:
    """Storage has everything, or can't have more."""


DescentEvent: TypeAlias = (
    MirrorStarted | MirrorSkipped | MirrorOver | PersistStarted | PersistOver | NothingLeft
)


@frozen
class Mirrored:
    """Deed: the first `n_good` pages of the copy are the index's, the other host pages go."""

    mirroring: Mirroring
    n_good: int


@frozen
class Persisted:
    """Deed: the first `n_good` pages of the write are known to be stored."""

    persisting: Persisting
    n_good: int


DescentDeed: TypeAlias = Mirrored | Persisted
DescentStep: TypeAlias = tuple[DescentPhase, tuple[DescentDeed, ...]]


def after_mirror(descent: Descent) -> DescentPhase:
    return Settled() if descent.reach is Reach.HOST else Stowing()


def descend(descent: Descent, event: DescentEvent) -> tuple[Descent, tuple[DescentDeed, ...]]:
    """The descent after the event, and what has to be done about it."""
    phase, deeds = _step(descent, event)
    return evolve(descent, phase=phase), deeds


def _step(descent: Descent, event: DescentEvent) -> DescentStep:
    phase = descent.phase
    match phase:
        case Due():
            return _from_due(descent, event)
        case Mirroring():
            return _from_mirroring(descent, phase, event)
        case Stowing():
            return _from_stowing(phase, event)
        case Persisting():
            return _from_persisting(phase, event)
        case Settled():
            raise IllegalEvent(phase, event)
        case _:
            assert_never(phase)


def _from_due(descent: Descent, event: DescentEvent) -> DescentStep:
    match event:
        case MirrorStarted(mirroring=mirroring):
            return mirroring, ()
        case MirrorSkipped():
            return after_mirror(descent), ()
        case MirrorOver() | PersistOver() | PersistStarted() | NothingLeft():
            raise IllegalEvent(descent.phase, event)
        case _:
            assert_never(event)


def _from_mirroring(descent: Descent, phase: Mirroring, event: DescentEvent) -> DescentStep:
    match event:
        case MirrorOver(ticket=ticket, n_good=n_good) if ticket == phase.ticket:
            return after_mirror(descent), (Mirrored(phase, n_good),)
        case (
            MirrorOver()
            | PersistOver()
            | PersistStarted()
            | MirrorStarted()
            | MirrorSkipped()
            | NothingLeft()
        ):
            raise IllegalEvent(phase, event)
        case _:
            assert_never(event)


def _from_stowing(phase: Stowing, event: DescentEvent) -> DescentStep:
    match event:
        case PersistStarted(persisting=persisting):
            return persisting, ()
        case NothingLeft():
            return Settled(), ()
        case MirrorOver() | PersistOver() | MirrorStarted() | MirrorSkipped():
            raise IllegalEvent(phase, event)
        case _:
            assert_never(event)


def _from_persisting(phase: Persisting, event: DescentEvent) -> DescentStep:
    match event:
        case PersistOver(ticket=ticket, n_good=n_good) if ticket == phase.ticket:
            is_whole = n_good >= len(phase.positions)
            return (Stowing() if is_whole else Settled()), (Persisted(phase, n_good),)
        case (
            MirrorOver()
            | PersistOver()
            | PersistStarted()
            | MirrorStarted()
            | MirrorSkipped()
            | NothingLeft()
        ):
            raise IllegalEvent(phase, event)
        case _:
            assert_never(event)
