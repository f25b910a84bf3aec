"""What a tick tells the host scheduler."""

from typing import TypeAlias

from attrs import frozen

from kvlift.core.ids import Attempt, DeviceHandle, Rid, Ticket
from kvlift.core.landed import PeerCause
from kvlift.core.phase import Outcome
from kvlift.core.plan import Plan


@frozen(kw_only=True)
class BecameReady:
    """`pages`: a handle a page, in order. `hold`: the peer's conversation that brought the token.

    `n_tokens_kept`: tokens whose KV is in place, when fewer than the prompt has (after `Resume`).
    """

    rid: Rid
    attempt: Attempt
    pages: tuple[DeviceHandle, ...]
    hold: Ticket
    plan: Plan
    n_tokens_kept: int | None


@frozen(kw_only=True)
class HasEnded:
    """`n_pages_landed`: leading pages that were on the device on all ranks when filling ended."""

    rid: Rid
    attempt: Attempt
    outcome: Outcome
    cause: PeerCause | None
    hold: Ticket
    peer: str
    n_pages_landed: int = 0


@frozen(kw_only=True)
class HasShrunk:
    """The cached prefix ends at `page` now; the rest is asked of the peer."""

    rid: Rid
    attempt: Attempt
    page: int


@frozen(kw_only=True)
class WasPromised:
    """Admitted: the peer has been told not to send the first `plan.promise` pages."""

    rid: Rid
    attempt: Attempt
    plan: Plan


@frozen(kw_only=True)
class WasRetracted:
    rid: Rid
    attempt: Attempt


@frozen(kw_only=True)
class HasGrown:
    """The outcome of a growth that had to wait: `pages` is empty when it was refused."""

    rid: Rid
    attempt: Attempt
    pages: tuple[DeviceHandle, ...]


@frozen(kw_only=True)
class WasRefused:
    """A call that the request's phase could not take; nothing happened."""

    rid: Rid
    call: str
    phase: str


@frozen(kw_only=True)
class PageLost:
    """A way down that came up short: `n_pages` stay where they are and are not below."""

    tier: str
    n_pages: int


Notice: TypeAlias = (
    BecameReady
    | HasEnded
    | HasShrunk
    | WasPromised
    | WasRetracted
    | HasGrown
    | WasRefused
    | PageLost
)
