"""Carrying out deeds: what a transition asked of the index, the ledger, the peer and the tickets.

`happen` is how every event reaches a request: step, apply, remember the arrow.
"""

from typing import assert_never

from attrs import evolve

from kvlift.core.agreed import Drain, Request
from kvlift.core.deed import (
    Announce,
    AnnounceReady,
    AnnounceShrunk,
    CloseTicket,
    Commit,
    Deed,
    DismissPeer,
    ForgetStored,
    GiveUpCopy,
    GiveUpRead,
    HoldBack,
    KeepHost,
    KnowStored,
    MirrorPrompt,
    ReleaseDevice,
    ReleaseHost,
    StowAll,
    UnpinDevice,
    UnpinHost,
)
from kvlift.core.descent import Reach
from kvlift.core.draft import Draft
from kvlift.core.effect import (
    CancelPrefetch,
    CancelRestore,
    SendAborted,
    SendCommitted,
)
from kvlift.core.event import Event
from kvlift.core.ids import Attempt, HostHandle
from kvlift.core.index import device_pages, walk
from kvlift.core.notice import BecameReady, HasEnded, HasShrunk
from kvlift.core.phase import Ended, Ready
from kvlift.core.policy import Switch, WritePolicy
from kvlift.core.step import step
from kvlift.core.tier import Source, Tier
from kvlift.core.way_down import begin_descent


def happen(draft: Draft, attempt: Attempt, event: Event) -> None:
    """One event of one request, with everything that it causes at once."""
    request = draft.requests[attempt]
    phase, deeds = step(request.phase, event)
    if phase is not request.phase:
        draft.touched[attempt] = None
        draft.arrows.append((type(request.phase), type(event), type(phase)))
        draft.movers.append(attempt)
        draft.put_phase(attempt, phase)
    for deed in deeds:
        apply(draft, draft.requests[attempt], deed)
    if isinstance(phase, Ended):
        del draft.requests[attempt]


def apply(draft: Draft, request: Request, deed: Deed) -> None:
    """One deed; a line or two each, or a function below."""
    index, prompt = draft.index, request.prompt
    match deed:
        case UnpinDevice(n_pages=n_pages):
            index.unpin(Tier.DEVICE, prompt, 0, n_pages)
        case UnpinHost(start=start, stop=stop):
            index.unpin(Tier.HOST, prompt, start, stop)
        case ReleaseDevice(pages=pages):
            draft.free_device(pages)
        case ReleaseHost(pages=host):
            draft.free_host(host)
        case KeepHost():
            _keep_host(draft, request, deed)
        case HoldBack():
            _hold_back(draft, request, deed)
        case GiveUpRead(ticket=ticket, n_pages_kept=n_kept):
            draft.effects.append(CancelPrefetch(ticket=ticket, n_pages_kept=n_kept))
        case GiveUpCopy(ticket=ticket):
            draft.effects.append(CancelRestore(ticket=ticket))
        case ForgetStored(start=start, stop=stop):
            _mark_stored(draft, request, start, stop, Switch.OFF)
        case KnowStored(start=start, stop=stop):
            _mark_stored(draft, request, start, stop, Switch.ON)
        case CloseTicket(ticket=ticket):
            draft.close_ticket(ticket)
        case Commit():
            draft.effects.append(SendCommitted(ticket=request.hold))
            draft.close_ticket(request.hold)
        case DismissPeer():
            _dismiss_peer(draft, request, deed)
        case MirrorPrompt():
            if draft.policy.write is WritePolicy.THROUGH:
                begin_descent(draft, prompt, prompt.n_pages_full, Reach.HOST)
        case StowAll():
            _stow(draft, request)
        case Announce(outcome=outcome, cause=cause, n_pages_landed=n_landed):
            # The name is free again: a new attempt may come while this one still drains.
            del draft.attempt_by_rid[request.rid]
            draft.notices.append(
                HasEnded(
                    rid=request.rid,
                    attempt=request.attempt,
                    outcome=outcome,
                    cause=cause,
                    hold=request.hold,
                    peer=request.peer,
                    n_pages_landed=n_landed,
                )
            )
        case AnnounceReady():
            _announce_ready(draft, request)
        case AnnounceShrunk(page=page):
            draft.notices.append(HasShrunk(rid=request.rid, attempt=request.attempt, page=page))
        case _:
            assert_never(deed)
    draft.collect_evicted()


def _keep_host(draft: Draft, request: Request, deed: KeepHost) -> None:
    """Host copies that a read brought stay if the index has a place and no copy of its own."""
    n_good = min(deed.n_good, request.prompt.n_pages_full - deed.start)
    if deed.host_epoch != draft.host_epoch or n_good <= 0:
        draft.free_host(deed.pages)
        return
    stop = deed.start + n_good
    draft.index.extend(request.prompt, stop, now=draft.moment(), priority=request.priority)
    useless: list[HostHandle] = list(deed.pages[n_good:])
    page = deed.start
    for segment in list(draft.index.cover(request.prompt, deed.start, stop)):
        handles = deed.pages[page - deed.start : page - deed.start + segment.n_pages]
        if segment.host is None:
            draft.index.set_host(draft.index.segments[segment.id], handles)
        else:
            useless.extend(handles)
        page += segment.n_pages
    draft.free_host(tuple(useless))


def _hold_back(draft: Draft, request: Request, deed: HoldBack) -> None:
    draft.drains.append(
        Drain(
            attempt=request.attempt,
            prompt=request.prompt,
            tickets=deed.tickets,
            device=deed.device,
            host=deed.host,
            pin_host_start=deed.pin_host_start,
            pin_host_stop=deed.pin_host_stop,
        )
    )


def _mark_stored(draft: Draft, request: Request, start: int, stop: int, known: Switch) -> None:
    """Pages that have no place in the index are not remembered: a lookup will tell."""
    n_placed = 0
    for _segment, first, n_common in walk(draft.index.view(), request.prompt):
        n_placed = first + n_common
    stop = min(stop, n_placed)
    if start >= stop:
        return
    for segment in list(draft.index.cover(request.prompt, start, stop)):
        draft.index.mark_stored(segment, known)


def _dismiss_peer(draft: Draft, request: Request, deed: DismissPeer) -> None:
    """Tell the peer to stop. Pages that it may write into wait for its word, or for its end."""
    if not request.peer:
        return
    draft.effects.append(SendAborted(ticket=request.hold))
    if not deed.device:
        draft.close_ticket(request.hold)
        return
    draft.drains.append(
        Drain(
            attempt=request.attempt,
            prompt=request.prompt,
            tickets=(request.hold,),
            device=deed.device,
            host=(),
            pin_host_start=0,
            pin_host_stop=0,
        )
    )


def _stow(draft: Draft, request: Request) -> None:
    """A finished request's pages go as far down as the policy says."""
    to_host = draft.policy.write is WritePolicy.THROUGH
    to_storage = draft.policy.persist is Switch.ON
    prompt = request.prompt
    if to_host or to_storage:
        reach = Reach.BOTH if to_host and to_storage else Reach.HOST if to_host else Reach.STORAGE
        begin_descent(draft, prompt, prompt.n_pages_full, reach)


def _announce_ready(draft: Draft, request: Request) -> None:
    phase = request.phase
    assert isinstance(phase, Ready)
    lease, plan = phase.lease, phase.plan
    shared = device_pages(draft.index.view(), request.prompt, lease.n_shared)
    n_kept = None
    if plan.rest is Source.RECOMPUTE and plan.bounds.storage < plan.n_pages:
        n_kept = plan.bounds.storage * request.prompt.page_tokens
    draft.notices.append(
        BecameReady(
            rid=request.rid,
            attempt=request.attempt,
            pages=shared + lease.own,
            hold=request.hold,
            plan=plan,
            n_tokens_kept=n_kept,
        )
    )


def with_prompt(draft: Draft, attempt: Attempt, request: Request, tokens: bytes) -> Request:
    """The request with everything that has been decoded, as far as it has KV.

    The last sampled token has no KV yet: it has not been fed to the model."""
    whole = request.prompt.first_tokens(request.n_tokens_prompt).with_tokens(tokens)
    n_with_kv = max(request.prompt.n_tokens, whole.n_tokens - 1)
    longer = evolve(request, prompt=whole.first_tokens(n_with_kv))
    draft.requests[attempt] = longer
    return longer
