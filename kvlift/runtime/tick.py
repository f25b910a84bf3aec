"""What a tick tells the host scheduler, in physical pages and plain words."""

from collections.abc import Mapping

from attrs import frozen

from kvlift.core.phase import Outcome
from kvlift.core.tier import Source


@frozen(kw_only=True)
class Ready:
    """Every page is in place on every rank. `device_pages` are this rank's, in order of position.

    `token` and `logprob`: the first token, sampled by the prefill node; None after a resume, or
    where first tokens are switched off. `needs_prefill_from`: after a resume, the token position
    from which the host has to compute KV again; None when nothing is missing.
    """

    rid: str
    device_pages: tuple[int, ...]
    token: int | None
    logprob: float | None
    needs_prefill_from: int | None
    n_pages_by_source: Mapping[Source, int]


@frozen(kw_only=True)
class Ended:
    """The user has the answer. `retryable`: another prefill node may be tried.

    `n_pages_landed`: leading pages of its prompt that were in place on every rank by then."""

    rid: str
    outcome: Outcome
    reason: str
    retryable: bool
    n_pages_landed: int = 0


@frozen(kw_only=True)
class Shrunk:
    """The cached prefix ends at `page`, earlier than was promised; the peer sends the rest."""

    rid: str
    page: int


@frozen(kw_only=True)
class Grew:
    """The outcome of a growth that was pending; `device_pages` is empty when it was refused."""

    rid: str
    device_pages: tuple[int, ...]


@frozen(kw_only=True)
class Refused:
    """A call that came too late for its request: nothing happened."""

    rid: str
    call: str
    phase: str


@frozen(kw_only=True)
class Tick:
    """Everything since the last tick. `is_busy`: a ballot is under way, keep ticking."""

    number: int
    ready: tuple[Ready, ...] = ()
    ended: tuple[Ended, ...] = ()
    shrunk: tuple[Shrunk, ...] = ()
    grown: tuple[Grew, ...] = ()
    retracted: tuple[str, ...] = ()
    refused: tuple[Refused, ...] = ()
    is_busy: bool = False


@frozen(kw_only=True)
class Granted:
    """The running request has these pages more; physical, in order."""

    device_pages: tuple[int, ...]


@frozen
class Pending:
    """Pages are on their way down; `Tick.grown` tells the outcome within 3 ticks."""


@frozen
class NoRoom:
    """Nobody can give these pages now: retract or finish something, then ask again."""


Growth = Granted | Pending | NoRoom
