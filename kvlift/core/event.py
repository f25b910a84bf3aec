"""Everything that can happen to a request, as all ranks have agreed that it did.

Reports of one rank (`landed`) become events by a verdict; calls of the host scheduler become events
by a submission; what follows from the state alone becomes an event in `settle`.
"""

from typing import TypeAlias

from attrs import frozen

from kvlift.core.ids import DeviceHandle, HostHandle, Ticket
from kvlift.core.landed import PeerCause
from kvlift.core.phase import Filling
from kvlift.core.plan import Follow, Lease, Part, Span


@frozen
class Report:
    """A verdict brought it. May be old news: of a ticket that the request has left behind."""


@frozen
class Call:
    """The host scheduler or the user wants it."""


@frozen
class Consequence:
    """It follows from the state; `settle` and `admission` find it."""


@frozen
class StorageAnswered(Report):
    """The lookup found `n_pages` on every rank, counted to the worst rank's first hole."""

    ticket: Ticket
    n_pages: int


@frozen
class AskedAgain(Consequence):
    """The index lost pages in front of the stored ones: storage is asked again, from `start`."""

    lookup: Ticket
    start: int


@frozen
class Admitted(Consequence):
    """Room was found; the lease is held on every rank."""

    filling: Filling


@frozen
class ReadShort(Report):
    """On some rank no more than `n_good` pages of this read will be good."""

    ticket: Ticket
    n_good: int


@frozen
class ReadOverdue(Report):
    """Some rank gives this read up; `n_good` of its pages have come on every rank."""

    ticket: Ticket
    n_good: int


@frozen
class ReadEnded(Report):
    """The read writes nothing any more on any rank. How much of it is good was told before."""

    ticket: Ticket


@frozen
class CopyShort(Report):
    """On some rank no more than `n_good` pages of this restore will be good."""

    ticket: Ticket
    n_good: int


@frozen
class CopyEnded(Report):
    """The restore writes nothing any more on any rank. How much is good was told before."""

    ticket: Ticket


@frozen
class PagesCame(Report):
    """The peer has delivered `n_pages` of everything wanted so far, on every rank."""

    n_pages: int


@frozen
class TokenCame(Report):
    """The first token is here on every rank, and it is the same one."""


@frozen
class PeerStopped(Report):
    """On some rank the peer can't or won't give more."""

    cause: PeerCause


@frozen
class SharedCame(Consequence):
    """Pages of the leader are in the index now, up to `lease.n_shared`."""

    lease: Lease


@frozen
class LeaderLost(Consequence):
    """The leader will not bring the rest: this request asks its own peer."""


@frozen
class HandedOver(Consequence):
    """The leader has ended; its restores, and their pages, are this request's from now on."""

    lease: Lease
    parts: tuple[Part, ...]
    host: int
    storage: int
    follow: Follow | None


@frozen
class Published(Consequence):
    """Landed pages have joined the index; the lease shares them from now on."""

    lease: Lease


@frozen
class Widened(Consequence):
    """The peer was asked for these pages too; `promise` is what it was told last."""

    spans: tuple[Span, ...]
    promise: int


@frozen
class AllLanded(Consequence):
    """Nothing is under way any more and nothing is missing."""


@frozen
class Aborted(Call):
    """The user has hung up."""


@frozen
class Started(Call):
    """The scheduler took the request into its batch."""


@frozen
class Grown(Call):
    """The running request has more pages."""

    pages: tuple[DeviceHandle, ...]


@frozen
class Finished(Call):
    """Decoding has ended."""


@frozen
class GivenUp(Call):
    """The scheduler retracts the running request; its partial page may be copied to the host."""

    n_pages_pinned: int
    tail_device: DeviceHandle | None
    tail_host: HostHandle | None
    tail_copy: Ticket | None


@frozen
class TailEnded(Report):
    """The copy of the partial page has ended; without `is_good` its tokens must be recomputed."""

    ticket: Ticket
    n_good: int


@frozen
class WantedBack(Call):
    """The scheduler resumes the request."""


@frozen
class Drained(Report):
    """Nothing writes into or reads from the request's pages any more."""


Event: TypeAlias = (
    StorageAnswered
    | AskedAgain
    | Admitted
    | ReadShort
    | ReadOverdue
    | ReadEnded
    | CopyShort
    | CopyEnded
    | PagesCame
    | TokenCame
    | PeerStopped
    | SharedCame
    | LeaderLost
    | HandedOver
    | Published
    | Widened
    | AllLanded
    | Aborted
    | Started
    | Grown
    | Finished
    | GivenUp
    | TailEnded
    | WantedBack
    | Drained
)
