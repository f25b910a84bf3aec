"""The driver's state for people and tests: one value, read from the core, changing nothing."""

from collections.abc import Mapping

from attrs import evolve, frozen

from kvlift.core.agreed import Agreed, Request
from kvlift.core.counts import Counts, device_counts, host_counts
from kvlift.core.index import device_pages
from kvlift.core.phase import (
    Asking,
    Draining,
    Ended,
    Filling,
    Ready,
    Resuming,
    Retracted,
    Running,
    Waiting,
)
from kvlift.core.tier import Source


@frozen(kw_only=True)
class RequestView:
    """`state`: queued, admitted, filling, ready, running, retracted or draining (of the outcome).

    `device_handles` are this request's pages in order, shared ones first; empty while queued."""

    rid: str
    attempt: int
    state: str
    outcome: str | None
    promise: int
    n_pages_by_source: Mapping[Source, int]
    device_handles: tuple[int, ...]


@frozen(kw_only=True)
class Snapshot:
    """`device` and `host` as this rank sees them: what it has set aside counts as owned."""

    tick: int
    digest: str
    device: Counts
    host: Counts
    requests: tuple[RequestView, ...]
    n_tickets: int
    n_drains: int
    n_descents: int
    n_growths: int
    n_device_pins: int
    n_host_pins: int
    n_ballots_last_tick: int
    effects_last_tick: Mapping[str, int]
    n_stale_reports: int
    n_device_aside: int
    n_host_aside: int

    def request(self, rid: str) -> RequestView | None:
        """The latest attempt of a request, if it still has a record."""
        return next((r for r in reversed(self.requests) if r.rid == rid), None)

    def is_idle(self) -> bool:
        """Nothing queued, filling or draining; no ticket, pin or reservation."""
        resting = {"running", "retracted", "ready"}
        return (
            all(request.state in resting for request in self.requests)
            and self.n_tickets == self.n_drains == self.n_descents == self.n_growths == 0
        )


def view_of(agreed: Agreed, request: Request) -> RequestView:
    phase = request.phase
    state, outcome = _word(request)
    plan = (
        phase.plan if isinstance(phase, Filling | Ready | Running | Retracted | Resuming) else None
    )
    handles: tuple[int, ...] = ()
    if isinstance(phase, Filling | Ready | Running):
        shared = device_pages(agreed.index, request.prompt, phase.lease.n_shared)
        handles = (*shared, *phase.lease.own)
    return RequestView(
        rid=request.rid,
        attempt=request.attempt,
        state=state,
        outcome=outcome,
        promise=plan.promise if plan else 0,
        n_pages_by_source=plan.n_pages_by_source() if plan else {},
        device_handles=handles,
    )


def _word(request: Request) -> tuple[str, str | None]:
    match request.phase:
        case Asking() | Waiting() | Resuming():
            return "queued", None
        case Filling():
            is_moving = any(part.copy is not None for part in request.phase.parts)
            is_waiting = request.phase.n_arrived < sum(s.n_pages for s in request.phase.wanted)
            return ("filling" if is_moving or is_waiting else "admitted"), None
        case Ready():
            return "ready", None
        case Running():
            return "running", None
        case Retracted():
            return "retracted", None
        case Draining(outcome=outcome) | Ended(outcome=outcome):
            return "draining", outcome.value


def counts_of_rank(counts: Counts, n_pages: int, n_aside: int) -> Counts:
    """The agreed counts, with what this rank has set aside as owned, and its own free pages."""
    used = counts.cached + counts.owned + counts.reserved + counts.draining
    n_aside = min(n_aside, n_pages - used)
    return evolve(counts, free=n_pages - used - n_aside, owned=counts.owned + n_aside)


def snapshot_of(
    agreed: Agreed,
    *,
    device_pages_rank: int,
    host_pages_rank: int,
    device_aside: int,
    host_aside: int,
    n_ballots: int,
    effects: Mapping[str, int],
    n_stale: int,
) -> Snapshot:
    device = counts_of_rank(device_counts(agreed), device_pages_rank, device_aside)
    host = counts_of_rank(host_counts(agreed), host_pages_rank, host_aside)
    segments = agreed.index.segments.values()
    return Snapshot(
        tick=agreed.tick,
        digest=agreed.digest.hex(),
        device=device,
        host=host,
        requests=tuple(view_of(agreed, request) for request in agreed.requests.values()),
        n_tickets=len(agreed.tickets),
        n_drains=len(agreed.drains),
        n_descents=len(agreed.descents),
        n_growths=len(agreed.growths),
        n_device_pins=sum(s.device_pins for s in segments),
        n_host_pins=sum(s.host_pins for s in segments),
        n_ballots_last_tick=n_ballots,
        effects_last_tick=effects,
        n_stale_reports=n_stale,
        n_device_aside=device_aside,
        n_host_aside=host_aside,
    )
