"""What follows from the state alone, without any news: sharing, publishing, widening, readiness.

Runs after the events of a tick, for the requests that something happened to and for those that
share their work. An event says what happened; `settle` says what that makes possible.
"""

from kvlift.core.agreed import Request
from kvlift.core.apply import happen
from kvlift.core.draft import Draft
from kvlift.core.effect import SendWant
from kvlift.core.event import (
    AllLanded,
    Drained,
    LeaderLost,
    Published,
    ReadOverdue,
    SharedCame,
    Widened,
)
from kvlift.core.ids import Attempt
from kvlift.core.index import match
from kvlift.core.phase import Draining, Filling
from kvlift.core.plan import Lease
from kvlift.core.policy import PrefetchPolicy, Switch
from kvlift.core.publish import published
from kvlift.core.step_filling import n_pages_landed, n_pages_wanted, spans_owed
from kvlift.core.tier import Source, Tier


def settle(draft: Draft) -> None:
    """Bring what was touched to where nothing more follows; each step moves forward, so it ends."""
    followers, leaders = _sharing(draft)
    while draft.touched:
        touched, draft.touched = draft.touched, {}
        for attempt in sorted({**touched, **followers}):
            request = draft.requests.get(attempt)
            if request is None:
                continue
            if isinstance(request.phase, Filling):
                _settle_filling(draft, attempt, leaders)
            elif isinstance(request.phase, Draining) and not _is_draining(draft, attempt):
                happen(draft, attempt, Drained())


def _sharing(draft: Draft) -> tuple[dict[Attempt, None], dict[int, None]]:
    """Who follows, and who is followed."""
    followers: dict[Attempt, None] = {}
    leaders: dict[int, None] = {}
    for attempt, request in draft.requests.items():
        phase = request.phase
        if isinstance(phase, Filling) and phase.follow is not None:
            followers[attempt] = None
            leaders[phase.follow.leader] = None
    return followers, leaders


def _is_draining(draft: Draft, attempt: Attempt) -> bool:
    return any(drain.attempt == attempt for drain in draft.drains)


def _filling(draft: Draft, attempt: Attempt) -> tuple[Request, Filling] | None:
    request = draft.requests.get(attempt)
    if request is None or not isinstance(request.phase, Filling):
        return None
    return request, request.phase


def _settle_filling(draft: Draft, attempt: Attempt, leaders: dict[int, None]) -> None:
    _share(draft, attempt)
    _publish(draft, attempt, leaders)
    _give_up_late_reads(draft, attempt)
    _widen(draft, attempt)
    _become_ready(draft, attempt)


def _share(draft: Draft, attempt: Attempt) -> None:
    """What the leader has brought is pinned; what it will not bring is this request's own again."""
    found = _filling(draft, attempt)
    if found is None or found[1].follow is None:
        return
    request, phase = found
    follow, lease = phase.follow, phase.lease
    assert follow is not None
    hit = match(draft.index.view(), request.prompt)
    stop = min(hit.device, follow.stop)
    if stop > lease.n_shared:
        draft.index.pin(Tier.DEVICE, request.prompt, lease.n_shared, stop)
        n_more = stop - lease.n_shared
        draft.free_device(lease.own[:n_more])
        shared = Lease(n_shared=stop, own=lease.own[n_more:])
        happen(draft, attempt, SharedCame(shared))
    found = _filling(draft, attempt)
    if found is None or found[1].follow is None:
        return
    leader = draft.requests.get(Attempt(follow.leader))
    if leader is None or not isinstance(leader.phase, Filling):
        happen(draft, attempt, LeaderLost())


def _publish(draft: Draft, attempt: Attempt, leaders: dict[int, None]) -> None:
    """The cached prefix joins the index when all of it is here, the rest when the rest is.

    While another request waits for these pages they join as they come."""
    found = _filling(draft, attempt)
    if found is None:
        return
    request, phase = found
    if draft.policy.device_tier is Switch.OFF:
        return  # they are in the host's own cache then
    n_landed = min(n_pages_landed(phase), request.prompt.n_pages_full)
    if n_landed <= phase.lease.n_shared:
        return
    is_whole = n_landed == request.prompt.n_pages_full
    is_prefix = phase.lease.n_shared < phase.plan.bounds.storage <= n_landed
    if is_whole or is_prefix or attempt in leaders:
        lease = published(draft, request, phase.lease, n_landed)
        if lease is not phase.lease:
            happen(draft, attempt, Published(lease))


def _give_up_late_reads(draft: Draft, attempt: Attempt) -> None:
    """`best_effort`: a read is given up when everything else of the request is here."""
    found = _filling(draft, attempt)
    if found is None or draft.policy.prefetch is not PrefetchPolicy.BEST_EFFORT:
        return
    _request, phase = found
    reads = [part for part in phase.parts if part.read is not None]
    copies = [part for part in phase.parts if part.copy is not None and part.read is None]
    is_all_else_here = (
        not copies
        and phase.follow is None
        and phase.token is None
        and phase.n_arrived == n_pages_wanted(phase)
    )
    if is_all_else_here:
        for part in reads:
            assert part.read is not None
            progress = draft.tickets[part.read].progress
            if progress < part.n_good:  # otherwise there is nothing to give up (any more)
                happen(draft, attempt, ReadOverdue(part.read, progress))


def _widen(draft: Draft, attempt: Attempt) -> None:
    found = _filling(draft, attempt)
    if found is None:
        return
    request, phase = found
    owed = spans_owed(phase)
    if not owed or phase.peer_gone is not None:
        return
    promise = phase.plan.bounds.storage
    for span in owed:
        draft.effects.append(
            SendWant(
                ticket=request.hold,
                start=span.start,
                device=phase.lease.pages(span.start, span.stop),
                promise=promise,
            )
        )
    happen(draft, attempt, Widened(owed, promise))


def _become_ready(draft: Draft, attempt: Attempt) -> None:
    found = _filling(draft, attempt)
    if found is None:
        return
    _request, phase = found
    if phase.token is not None or phase.follow is not None:
        return
    if any(part.copy is not None for part in phase.parts):
        return
    n_needed = phase.plan.n_pages
    if phase.plan.rest is Source.RECOMPUTE:
        n_needed = phase.plan.bounds.storage
    if n_pages_landed(phase) >= n_needed:
        happen(draft, attempt, AllLanded())
