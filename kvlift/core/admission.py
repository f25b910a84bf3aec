"""Who may start: match -> vote -> lease -> promise.

Runs only in a tick with a verdict, since the verdict says how much room the poorest rank has.
A request is admitted when every page that it will need until it can run can be reserved at once, on
top of the reserve for the growth of those that are further; so no request that holds pages ever
waits for pages. The head of the line may be overtaken `bypass_max` times, then it holds the line.
"""

from bisect import insort
from collections.abc import Sequence
from itertools import takewhile

from attrs import evolve, frozen

from kvlift.core.agreed import Kind, Request
from kvlift.core.apply import happen
from kvlift.core.dirty import is_going_down, n_device_dirty, start_down
from kvlift.core.draft import Draft
from kvlift.core.effect import SendWant, StartLookup, StartPrefetch, StartRestore
from kvlift.core.event import Admitted, AskedAgain
from kvlift.core.ids import Attempt
from kvlift.core.index import Hit, Index, host_hit, host_pages, match, walk
from kvlift.core.notice import WasPromised
from kvlift.core.phase import Filling, Ready, Resuming, Running, Waiting
from kvlift.core.plan import Bounds, Follow, Lease, Part, Plan, Span
from kvlift.core.policy import Policy, Switch
from kvlift.core.prompt import Prompt
from kvlift.core.tier import Source, Tier

N_TRIED_MAX = 64
"""Requests looked at in one tick; a longer queue goes on in the next."""


@frozen(kw_only=True)
class Offer:
    """What a request would get if it were admitted now."""

    bounds: Bounds
    leader: Attempt | None
    n_device: int
    n_fetch: int


def admit(draft: Draft) -> None:
    """Admit what fits, in order of priority, then of submission."""
    n_passed_over = 0
    line = _queue(draft)
    further = further_ones(draft) if line else []
    for request in line[:N_TRIED_MAX]:
        phase = request.phase
        assert isinstance(phase, Waiting | Resuming)
        if isinstance(phase, Resuming) and phase.tail_copy is not None:
            continue
        if isinstance(phase, Waiting) and _must_ask_again(draft, request, phase):
            continue
        offer = offer_for(draft, request, further)
        if offer is None:
            if not is_going_down(draft):
                start_down(draft, request.prompt.n_pages)
            if phase.n_bypassed >= draft.policy.bypass_max:
                return
            n_passed_over += 1
            continue
        if n_passed_over:
            _count_bypass(draft, line, request)
        _admit(draft, request, offer)
        insort(further, draft.requests[request.attempt], key=lambda admitted: admitted.attempt)


def further_ones(draft: Draft) -> list[Request]:
    """Those that have been admitted, in order of submission: they grow, and bring pages."""
    return [r for r in draft.requests.values() if isinstance(r.phase, Filling | Ready | Running)]


def _queue(draft: Draft) -> list[Request]:
    waiting = [r for r in draft.requests.values() if isinstance(r.phase, Waiting | Resuming)]
    return sorted(waiting, key=lambda r: (-r.priority, r.attempt))


def _count_bypass(draft: Draft, line: Sequence[Request], winner: Request) -> None:
    """Everyone who still waits ahead of the winner has been overtaken once more."""
    for request in takewhile(lambda ahead: ahead.attempt != winner.attempt, line):
        phase = draft.requests[request.attempt].phase
        if isinstance(phase, Waiting | Resuming):
            draft.put_phase(request.attempt, evolve(phase, n_bypassed=phase.n_bypassed + 1))


def _must_ask_again(draft: Draft, request: Request, phase: Waiting) -> bool:
    """Pages in front of the stored ones have left the index meanwhile: storage may have them."""
    if draft.storage is Switch.OFF or phase.n_lookups >= draft.policy.lookups_again_max:
        return False
    start = hit_of(draft, request.prompt, request.n_pages_given).host
    if start >= phase.stored_start or start >= request.prompt.n_pages_full:
        return False
    ask_storage(draft, request, start)
    return True


def ask_storage(draft: Draft, request: Request, start: int) -> None:
    """Look up the pages from `start` on; the phase that waits for the answer."""
    stop = request.prompt.n_pages_full
    ticket = draft.open_ticket(Kind.LOOKUP, request.attempt, stop - start)
    draft.effects.append(StartLookup(ticket=ticket, prompt=request.prompt, start=start, stop=stop))
    happen(draft, request.attempt, AskedAgain(ticket, start))


# The offer.


def hit_of(draft: Draft, prompt: Prompt, n_given: int) -> Hit:
    return hit_in(draft.index.view(), prompt, n_given, draft.policy)


def hit_in(index: Index, prompt: Prompt, n_given: int, policy: Policy) -> Hit:
    """What is where. With the host's own cache on the device, that is what it says it has."""
    if policy.device_tier is Switch.ON:
        return match(index, prompt)
    return Hit(n_given, host_hit(index, prompt, n_given))


def offer_for(draft: Draft, request: Request, further: Sequence[Request]) -> Offer | None:
    """What the request would get, or None where it does not fit. Changes nothing.

    `further`: `further_ones`, counted once a tick: a queue may be very long."""
    prompt = request.prompt
    n_given = request.n_pages_given
    hit = hit_of(draft, prompt, n_given)
    leader: Attempt | None = None
    shared = hit.device
    if isinstance(request.phase, Waiting) and draft.policy.device_tier is Switch.ON:
        leader, shared = _leader(request, hit.device, further)
    host = max(hit.host, shared)
    n_fetch = 0
    if isinstance(request.phase, Waiting):
        n_fetch = _n_pages_to_fetch(draft, request, request.phase, shared, host)
    n_pinned = hit.device - n_given
    n_device = prompt.n_pages - n_pinned
    n_newly_pinned = _n_idle(draft, prompt, Tier.DEVICE, 0, n_pinned)
    room = draft.n_device_free() + draft.index.n_device_idle - n_newly_pinned
    room -= n_device_dirty(draft)
    if n_device > room - _n_reserved_for_growth(draft.policy, further):
        return None
    bounds = Bounds(device=hit.device, shared=shared, host=host, storage=host + n_fetch)
    return Offer(bounds=bounds, leader=leader, n_device=n_device, n_fetch=n_fetch)


def _n_reserved_for_growth(policy: Policy, further: Sequence[Request]) -> int:
    return policy.decode_reserve_pages * len(further)


def _n_idle(draft: Draft, prompt: Prompt, tier: Tier, start: int, stop: int) -> int:
    """Pages of [start, stop) that a pin would take out of the idle ones."""
    n_pages = 0
    for segment, first, n_common in walk(draft.index.view(), prompt):
        pins = segment.device_pins if tier is Tier.DEVICE else segment.host_pins
        copy = segment.device if tier is Tier.DEVICE else segment.host
        if copy is not None and pins == 0:
            n_pages += max(0, min(first + n_common, stop) - max(first, start))
    return n_pages


def _leader(
    request: Request, n_device: int, further: Sequence[Request]
) -> tuple[Attempt | None, int]:
    """Who brings the most pages of this prompt already, and up to which page."""
    best: Attempt | None = None
    shared = n_device
    for other in further:
        if not isinstance(other.phase, Filling) or other.phase.plan.rest is not Source.PEER:
            continue
        n_common = n_pages_in_common(request.prompt, other.prompt, shared)
        if n_common > shared:
            best, shared = other.attempt, n_common
    return best, shared


def n_pages_in_common(one: Prompt, other: Prompt, at_least: int) -> int:
    """Full pages with which both begin, if more than `at_least`; else `at_least`."""
    if one.namespace != other.namespace:
        return at_least
    size = one.page_bytes()
    low, high = at_least, min(one.n_pages_full, other.n_pages_full)
    if high <= low or not other.tokens.startswith(one.tokens[: (low + 1) * size]):
        return at_least
    low += 1
    while low < high:
        middle = (low + high + 1) // 2
        if other.tokens.startswith(one.tokens[: middle * size]):
            low = middle
        else:
            high = middle - 1
    return low


def _n_pages_to_fetch(
    draft: Draft, request: Request, phase: Waiting, shared: int, host: int
) -> int:
    """Pages behind `host` that storage has, as far as the host has room for them."""
    if draft.storage is Switch.OFF or not phase.stored_start <= host < phase.stored_stop:
        return 0
    n_pinned = _n_idle(draft, request.prompt, Tier.HOST, shared, host)
    room = draft.n_host_free() + draft.index.n_host_idle - n_pinned
    n_pages = min(phase.stored_stop - host, room)
    if n_pages < draft.policy.prefetch_min_pages or _is_slower_than_peer(draft):
        return 0
    return n_pages


def _is_slower_than_peer(draft: Draft) -> bool:
    if draft.policy.cost_model is Switch.OFF:
        return False
    return draft.rates.is_read_dearer(draft.policy.cost_threshold_percent)


# The lease.


def _admit(draft: Draft, request: Request, offer: Offer) -> None:
    """Pin, reserve, start everything, and only then tell the peer what it need not send."""
    prompt, bounds, now = request.prompt, offer.bounds, draft.moment()
    draft.index.touch(prompt, bounds.host, now=now, priority=request.priority)
    n_shared = bounds.device - request.n_pages_given
    draft.index.pin(Tier.DEVICE, prompt, 0, n_shared)
    draft.index.pin(Tier.HOST, prompt, bounds.shared, bounds.host)
    own = draft.take_device(offer.n_device)
    lease = Lease(n_shared=n_shared, own=own)
    parts = (
        *_given(request),
        *_restore(draft, request, lease, bounds),
        *_fetch(draft, request, lease, bounds),
    )
    if isinstance(request.phase, Resuming):
        _admit_resumed(draft, request, lease, bounds, parts)
        return
    token = None
    if draft.policy.first_token is Switch.ON and request.peer:
        token = draft.open_ticket(Kind.TOKEN, request.attempt, 0)
    plan = Plan(bounds=bounds, n_pages=prompt.n_pages, promise=bounds.storage)
    rest = Span(bounds.storage, prompt.n_pages)
    if not request.peer:
        plan = evolve(plan, rest=Source.RECOMPUTE)
        rest = Span(prompt.n_pages, prompt.n_pages)
    filling = Filling(
        plan=plan,
        lease=lease,
        parts=parts,
        wanted=(rest,) if rest.n_pages else (),
        n_arrived=0,
        token=token,
        follow=None if offer.leader is None else Follow(leader=offer.leader, stop=bounds.shared),
    )
    happen(draft, request.attempt, Admitted(filling))
    if request.peer:
        draft.effects.append(
            SendWant(
                ticket=request.hold,
                start=rest.start,
                device=lease.pages(rest.start, rest.stop),
                promise=plan.promise,
                token=token,
            )
        )
    draft.notices.append(WasPromised(rid=request.rid, attempt=request.attempt, plan=plan))


def _given(request: Request) -> tuple[Part, ...]:
    """What the host's own cache has is here already, in places that it will name."""
    n_given = request.n_pages_given
    if n_given == 0:
        return ()
    return (
        Part(
            source=Source.DEVICE, start=0, stop=n_given, n_good=n_given, copy=None, n_landed=n_given
        ),
    )


def _restore(draft: Draft, request: Request, lease: Lease, bounds: Bounds) -> tuple[Part, ...]:
    """Host copies go up; pages that lie side by side are one copy."""
    start, stop = bounds.shared, bounds.host
    if start >= stop:
        return ()
    ticket = draft.open_ticket(Kind.COPY, request.attempt, stop - start)
    draft.effects.append(
        StartRestore(
            ticket=ticket,
            host=host_pages(draft.index.view(), request.prompt, start, stop),
            device=lease.pages(start, stop),
        )
    )
    return (Part(source=Source.HOST, start=start, stop=stop, n_good=stop - start, copy=ticket),)


def _fetch(draft: Draft, request: Request, lease: Lease, bounds: Bounds) -> tuple[Part, ...]:
    """Storage pages come into reserved host pages, and go up from there."""
    start, stop = bounds.host, bounds.storage
    if start >= stop:
        return ()
    n_pages = stop - start
    host = draft.take_host(n_pages)
    read = draft.open_ticket(Kind.READ, request.attempt, n_pages)
    copy = draft.open_ticket(Kind.COPY, request.attempt, n_pages)
    draft.effects.append(
        StartPrefetch(
            ticket=read,
            prompt=request.prompt,
            start=start,
            host=host,
            restore=copy,
            device=lease.pages(start, stop),
        )
    )
    return (
        Part(
            source=Source.STORAGE,
            start=start,
            stop=stop,
            n_good=n_pages,
            copy=copy,
            read=read,
            host=host,
            host_epoch=draft.host_epoch,
        ),
    )


def _admit_resumed(
    draft: Draft, request: Request, lease: Lease, bounds: Bounds, parts: tuple[Part, ...]
) -> None:
    """A retracted request comes back: what is gone is computed again by the host scheduler."""
    phase, prompt = request.phase, request.prompt
    assert isinstance(phase, Resuming)
    draft.index.unpin(Tier.HOST, prompt, 0, phase.n_pages_pinned)
    draft.collect_evicted()
    if phase.tail_host is not None and bounds.host == prompt.n_pages_full:
        tail = prompt.n_pages_full
        ticket = draft.open_ticket(Kind.COPY, request.attempt, 1)
        draft.effects.append(
            StartRestore(ticket=ticket, host=(phase.tail_host,), device=lease.pages(tail, tail + 1))
        )
        part = Part(
            source=Source.HOST,
            start=tail,
            stop=tail + 1,
            n_good=1,
            copy=ticket,
            host=(phase.tail_host,),
        )
        parts = (*parts, part)
        bounds = evolve(bounds, host=tail + 1, storage=tail + 1)
    elif phase.tail_host is not None:
        draft.free_host((phase.tail_host,))
    plan = Plan(
        bounds=bounds,
        n_pages=prompt.n_pages,
        promise=phase.plan.promise,
        rest=Source.RECOMPUTE,
    )
    filling = Filling(plan=plan, lease=lease, parts=parts, wanted=(), n_arrived=0, token=None)
    happen(draft, request.attempt, Admitted(filling))
