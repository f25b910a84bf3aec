"""What a transition asks the rest of the agreed state to do. `apply` carries them out.

A deed names pages by their place in the request or by handle; it turns into changes of the index
and the ledger, and into effects for the ports.
"""

from typing import TypeAlias

from attrs import frozen

from kvlift.core.ids import DeviceHandle, HostHandle, Ticket
from kvlift.core.landed import PeerCause
from kvlift.core.phase import Outcome


@frozen
class UnpinDevice:
    """Let go of the pages [0, n_pages) in the index."""

    n_pages: int


@frozen
class UnpinHost:
    """Let go of the host copies of the pages [start, stop)."""

    start: int
    stop: int


@frozen
class ReleaseDevice:
    """These device pages are nobody's any more."""

    pages: tuple[DeviceHandle, ...]


@frozen
class ReleaseHost:
    """These host pages are nobody's any more."""

    pages: tuple[HostHandle, ...]


@frozen(kw_only=True)
class KeepHost:
    """What a read brought: the first `n_good` pages from `start` on join the index, or go."""

    start: int
    n_good: int
    pages: tuple[HostHandle, ...]
    host_epoch: int


@frozen(kw_only=True)
class HoldBack:
    """Pages that something may still touch: they come back when all `tickets` have ended.

    `pin_host` is a range of index pages to unpin then, empty when start == stop.
    """

    tickets: tuple[Ticket, ...]
    device: tuple[DeviceHandle, ...] = ()
    host: tuple[HostHandle, ...] = ()
    pin_host_start: int = 0
    pin_host_stop: int = 0


@frozen
class GiveUpRead:
    """Nobody waits for the rest of this read; its first `n_pages_kept` pages are used."""

    ticket: Ticket
    n_pages_kept: int


@frozen
class GiveUpCopy:
    """Don't begin this restore if it has not begun."""

    ticket: Ticket


@frozen
class ForgetStored:
    """The pages [start, stop) are not known to be in storage any more."""

    start: int
    stop: int


@frozen
class KnowStored:
    """The pages [start, stop) are in storage on every rank."""

    start: int
    stop: int


@frozen
class CloseTicket:
    """No report under this ticket matters any more."""

    ticket: Ticket


@frozen
class Commit:
    """The peer may let go: everything is here."""


@frozen(kw_only=True)
class DismissPeer:
    """The peer must stop. `device`: pages that it may still write into, held until it confirms."""

    device: tuple[DeviceHandle, ...]


@frozen
class MirrorPrompt:
    """The prompt's pages are on the device: they may go down (write-through)."""


@frozen
class StowAll:
    """The request has ended well: its full pages, in the index by now, go down."""


@frozen(kw_only=True)
class Announce:
    """The user has the answer. `n_pages_landed`: how far the prompt had come."""

    outcome: Outcome
    cause: PeerCause | None = None
    n_pages_landed: int = 0


@frozen
class AnnounceReady:
    """The host scheduler may run it."""


@frozen
class AnnounceShrunk:
    """The cached prefix of the plan got shorter: it ends at this page now."""

    page: int


Deed: TypeAlias = (
    UnpinDevice
    | UnpinHost
    | ReleaseDevice
    | ReleaseHost
    | KeepHost
    | HoldBack
    | GiveUpRead
    | GiveUpCopy
    | ForgetStored
    | KnowStored
    | CloseTicket
    | Commit
    | DismissPeer
    | MirrorPrompt
    | StowAll
    | Announce
    | AnnounceReady
    | AnnounceShrunk
)
