"""Everything that the core can ask for, each with one sentence.

Effects name pages by handle; the interpreter (`runtime.interpret`) resolves them to physical pages
of its rank and calls the port. `ANSWERS` says which reports may answer which effect.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, TypeAlias

from attrs import field, frozen

from kvlift.core.ids import Attempt, DeviceHandle, HostHandle, Rid, Ticket
from kvlift.core.landed import (
    Landed,
    LookupAnswered,
    MirrorEnded,
    PagesArrived,
    PeerFailed,
    PeerLetGo,
    PersistEnded,
    PrefetchEnded,
    PrefetchProgressed,
    RestoreEnded,
    TokenArrived,
)
from kvlift.core.prompt import Prompt


@frozen(kw_only=True)
class TakeDevice:
    """Give each handle a physical device page."""

    pages: tuple[DeviceHandle, ...]


@frozen(kw_only=True)
class FreeDevice:
    """The physical pages of these handles are free again."""

    pages: tuple[DeviceHandle, ...]


@frozen(kw_only=True)
class TakeHost:
    """Give each handle a physical host page."""

    pages: tuple[HostHandle, ...]


@frozen(kw_only=True)
class FreeHost:
    """The physical pages of these handles are free again."""

    pages: tuple[HostHandle, ...]


@frozen(kw_only=True)
class StartLookup:
    """Ask storage how many of the pages [start, stop) it holds, counted to the first hole."""

    ticket: Ticket
    prompt: Prompt
    start: int
    stop: int


@frozen(kw_only=True)
class StartPrefetch:
    """Read the pages from `start` on from storage into `host`, in order, verified.

    What has come is restored while the rest is read, on each rank by itself: `restore` is the
    ticket of that copy and `device` are its places. `local` starts it, in pieces; the storage port
    knows nothing of it.
    """

    ticket: Ticket
    prompt: Prompt
    start: int
    host: tuple[HostHandle, ...]
    restore: Ticket
    device: tuple[DeviceHandle, ...]


@frozen(kw_only=True)
class CancelPrefetch:
    """Nobody waits for this read any more. Best effort: it is over when `PrefetchEnded` says so.

    Its first `n_pages_kept` pages have come on every rank and are restored all the same.
    """

    ticket: Ticket
    n_pages_kept: int


@frozen(kw_only=True)
class StartRestore:
    """Copy host pages to device pages.

    Behind a read it comes in pieces under one ticket, one after the other: this one's first page is
    number `start` of the whole restore.
    """

    ticket: Ticket
    host: tuple[HostHandle, ...]
    device: tuple[DeviceHandle, ...]
    # Not in the repr, which a decision's digest is made of: what is agreed always starts at 0.
    start: int = field(default=0, repr=False)


@frozen(kw_only=True)
class CancelRestore:
    """Drop what has not begun of this copy on this rank; what runs is left alone."""

    ticket: Ticket


@frozen(kw_only=True)
class StartMirror:
    """Copy device pages to host pages (write-through, write-back, retraction)."""

    ticket: Ticket
    device: tuple[DeviceHandle, ...]
    host: tuple[HostHandle, ...]


@frozen(kw_only=True)
class StartPersist:
    """Write pages to storage, in order, each atomically, from the host or from the device.

    `positions` are the pages' places in the prompt; exactly one of `host` and `device` is given.
    """

    ticket: Ticket
    prompt: Prompt
    positions: tuple[int, ...]
    host: tuple[HostHandle, ...] = ()
    device: tuple[DeviceHandle, ...] = ()


@frozen(kw_only=True)
class CancelPersist:
    """A write from the device that makes no progress must let go of the device's pages."""

    ticket: Ticket


@frozen(kw_only=True)
class SendHold:
    """Tell the prefill node that a request exists here, so that it keeps the request's pages."""

    ticket: Ticket
    rid: Rid
    attempt: Attempt
    peer: str
    prompt: Prompt


@frozen(kw_only=True)
class SendWant:
    """Ask the prefill node for the pages [start, start + len(device)), into these places.

    `promise` is the number of pages that it has been told not to send, with this message. `token`
    is the ticket under which the first token is awaited from now on, with the first want only.
    """

    ticket: Ticket
    start: int
    device: tuple[DeviceHandle, ...]
    promise: int
    token: Ticket | None = None


@frozen(kw_only=True)
class SendCommitted:
    """Everything is here: the prefill node may let go of the request."""

    ticket: Ticket


@frozen(kw_only=True)
class SendAborted:
    """Nobody wants the request any more: stop writing, confirm, and let go."""

    ticket: Ticket


@frozen(kw_only=True)
class ClosePeer:
    """The prefill node under this ticket was silent for too long: close its connection."""

    ticket: Ticket


@frozen(kw_only=True)
class ForgetStorage:
    """Forget every page of storage (`flush all`)."""


Effect: TypeAlias = (
    TakeDevice
    | FreeDevice
    | TakeHost
    | FreeHost
    | StartLookup
    | StartPrefetch
    | CancelPrefetch
    | StartRestore
    | CancelRestore
    | StartMirror
    | StartPersist
    | CancelPersist
    | SendHold
    | SendWant
    | SendCommitted
    | SendAborted
    | ClosePeer
    | ForgetStorage
)

_PEER: Final[frozenset[type[Landed]]] = frozenset(
    {PagesArrived, TokenArrived, PeerFailed, PeerLetGo}
)
_NOTHING: Final[frozenset[type[Landed]]] = frozenset()

ANSWERS: Final[Mapping[type[Effect], frozenset[type[Landed]]]] = MappingProxyType(
    {
        TakeDevice: _NOTHING,
        FreeDevice: _NOTHING,
        TakeHost: _NOTHING,
        FreeHost: _NOTHING,
        StartLookup: frozenset({LookupAnswered}),
        StartPrefetch: frozenset({PrefetchProgressed, PrefetchEnded}),
        CancelPrefetch: _NOTHING,
        StartRestore: frozenset({RestoreEnded}),
        CancelRestore: _NOTHING,
        StartMirror: frozenset({MirrorEnded}),
        StartPersist: frozenset({PersistEnded}),
        CancelPersist: _NOTHING,
        SendHold: _PEER,
        SendWant: _PEER,
        SendCommitted: _NOTHING,
        SendAborted: frozenset({PeerLetGo}),
        ClosePeer: frozenset({PeerFailed, PeerLetGo}),
        ForgetStorage: _NOTHING,
    }
)
