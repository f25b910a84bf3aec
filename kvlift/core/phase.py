"""The phases of a request, one type each, with only the fields that mean something in it."""

from enum import Enum
from typing import TypeAlias

from attrs import frozen

from kvlift.core.ids import DeviceHandle, HostHandle, Ticket
from kvlift.core.landed import PeerCause
from kvlift.core.plan import Follow, Lease, Part, Plan, Span


class Outcome(Enum):
    """How a request ended for its user."""

    DONE = "done"
    ABORTED = "aborted"
    FAILED = "failed"


@frozen(kw_only=True)
class Asking:
    """Storage was asked whether it holds the pages from `start` on."""

    lookup: Ticket
    start: int
    n_lookups: int


@frozen(kw_only=True)
class Waiting:
    """Waits for room. Storage holds the pages [stored_start, stored_stop)."""

    stored_start: int
    stored_stop: int
    n_lookups: int
    n_bypassed: int = 0


@frozen(kw_only=True)
class Filling:
    """Holds its lease; its pages are on their way from several sources at once.

    `wanted`: what the peer was asked for, in order; the first `n_arrived` pages of it are here.
    `token`: the ticket of the first token, None when it is here or not awaited. `peer_gone`: the
    peer can't give anything more; that matters only when something more is needed.
    """

    plan: Plan
    lease: Lease
    parts: tuple[Part, ...]
    wanted: tuple[Span, ...]
    n_arrived: int
    token: Ticket | None
    follow: Follow | None = None
    peer_gone: PeerCause | None = None


@frozen(kw_only=True)
class Ready:
    """Every page is on the device on every rank."""

    plan: Plan
    lease: Lease


@frozen(kw_only=True)
class Running:
    """The host scheduler decodes it."""

    plan: Plan
    lease: Lease


@frozen(kw_only=True)
class Retracted:
    """Given up by the scheduler; its full pages are in the index and pinned on the host.

    `n_pages_pinned`: the places [0, n) in the index whose host copies may not leave.
    `tail_device`, `tail_host`, `tail_copy`: its last,
    partial page, which is nobody else's; the copy goes from device to host.
    """

    plan: Plan
    n_pages_pinned: int
    tail_device: DeviceHandle | None
    tail_host: HostHandle | None
    tail_copy: Ticket | None


@frozen(kw_only=True)
class Resuming:
    """Wanted back by the scheduler; waits for room like a new request, but never for a peer."""

    plan: Plan
    n_pages_pinned: int
    tail_device: DeviceHandle | None
    tail_host: HostHandle | None
    tail_copy: Ticket | None
    n_bypassed: int = 0


@frozen(kw_only=True)
class Draining:
    """Ended for its user; something may still write into or read from its pages (`Drain`)."""

    outcome: Outcome


@frozen(kw_only=True)
class Ended:
    """Ended; its pages are back. The record leaves the state in the same tick."""

    outcome: Outcome


Phase: TypeAlias = (
    Asking | Waiting | Filling | Ready | Running | Retracted | Resuming | Draining | Ended
)
