"""Everything that the ports can report. Each report carries the ticket of the effect it answers.

These are facts of one rank. They never change the agreed state by themselves: `local.hear` turns
them into observations, a ballot carries the observations, and the verdict of all ranks decides.
Counts are cumulative, so that a report that comes twice says nothing new.
"""

from enum import IntEnum
from typing import TypeAlias

from attrs import frozen

from kvlift.core.ids import Ticket


class PeerCause(IntEnum):
    """Why a peer can't give the pages. Order matters: under MIN the lowest one is believed."""

    SILENT = -7
    LOST = -6
    REFUSED = -5
    MISMATCH = -4
    GONE = -3
    TOKEN_OVERDUE = -2
    OVERDUE = -1


@frozen
class LookupAnswered:
    """Storage holds `n_pages` of the pages asked for, counted to the first hole."""

    ticket: Ticket
    n_pages: int


@frozen
class PrefetchProgressed:
    """The first `n_pages` of a read are on the host and verified; the read goes on."""

    ticket: Ticket
    n_pages: int


@frozen
class PrefetchEnded:
    """A read has ended and writes nothing any more: its first `n_pages` are good, no others."""

    ticket: Ticket
    n_pages: int


@frozen
class RestoreEnded:
    """A copy host to device has ended: its first `n_pages` are good. Fewer than asked: failed.

    `start` is that of its `StartRestore`."""

    ticket: Ticket
    n_pages: int
    start: int = 0


@frozen
class MirrorEnded:
    """A copy device to host has ended: its first `n_pages` are good."""

    ticket: Ticket
    n_pages: int


@frozen
class PersistEnded:
    """A write to storage has ended and reads nothing any more: its first `n_pages` are stored."""

    ticket: Ticket
    n_pages: int


@frozen
class PagesArrived:
    """The prefill node has delivered `n_pages` of all pages wanted under this ticket, so far."""

    ticket: Ticket
    n_pages: int


@frozen
class TokenArrived:
    """The first token, sampled by the prefill node, with its log-probability."""

    ticket: Ticket
    token: int
    logprob: float


@frozen
class PeerFailed:
    """The prefill node can't or won't give (more) pages. It may still be writing."""

    ticket: Ticket
    cause: PeerCause
    reason: str


@frozen
class PeerLetGo:
    """Proof that the prefill node writes nothing any more: it said so, or is disconnected."""

    ticket: Ticket


Landed: TypeAlias = (
    LookupAnswered
    | PrefetchProgressed
    | PrefetchEnded
    | RestoreEnded
    | MirrorEnded
    | PersistEnded
    | PagesArrived
    | TokenArrived
    | PeerFailed
    | PeerLetGo
)
