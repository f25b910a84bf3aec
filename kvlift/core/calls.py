"""The host scheduler's calls, in the order in which every rank was given them.

A call that the request's phase can't take (it was aborted a moment ago, say) changes nothing and is
answered by `WasRefused`: which calls a phase takes is read off `EDGES`.
"""

from typing import TypeGuard, assert_never

from kvlift.core.admission import ask_storage, hit_of
from kvlift.core.agreed import Kind, Request
from kvlift.core.apply import happen, with_prompt
from kvlift.core.descent import Reach
from kvlift.core.draft import Draft
from kvlift.core.edges import takes
from kvlift.core.effect import ForgetStorage, SendHold, StartMirror
from kvlift.core.event import (
    Aborted,
    Event,
    Finished,
    GivenUp,
    Published,
    ReadOverdue,
    Started,
    StorageAnswered,
    WantedBack,
)
from kvlift.core.handover import hand_over
from kvlift.core.ids import NO_TICKET, Attempt, Rid
from kvlift.core.notice import WasRefused, WasRetracted
from kvlift.core.phase import Asking, Filling, Running, Waiting
from kvlift.core.policy import Switch
from kvlift.core.prompt import n_pages_covering
from kvlift.core.publish import published
from kvlift.core.submission import (
    Abort,
    AttachStorage,
    DetachStorage,
    Finish,
    Flush,
    Resume,
    Retract,
    Run,
    Submission,
    Submit,
)
from kvlift.core.tier import Tier
from kvlift.core.way_down import begin_descent, forget_stored


def take_call(draft: Draft, call: Submission) -> None:
    match call:
        case Submit():
            _submit(draft, call)
        case Abort(rid=rid):
            _abort(draft, rid)
        case Run(rid=rid):
            _call(draft, rid, Started())
        case Finish(rid=rid, output=output):
            _finish(draft, rid, output)
        case Retract(rid=rid, output=output):
            _retract(draft, rid, output)
        case Resume(rid=rid):
            _call(draft, rid, WantedBack())
        case Flush(tier=tier):
            _flush(draft, tier)
        case DetachStorage():
            _detach(draft)
        case AttachStorage():
            draft.storage = Switch.ON
        case _:
            assert_never(call)


def _call(draft: Draft, rid: Rid, event: Event) -> None:
    request = draft.request(rid)
    if request is None or not takes(type(request.phase), type(event)):
        _refuse(draft, rid, request, type(event).__name__)
        return
    happen(draft, request.attempt, event)


def _refuse(draft: Draft, rid: Rid, request: Request | None, call: str) -> None:
    phase = "unknown" if request is None else type(request.phase).__name__
    draft.notices.append(WasRefused(rid=rid, call=call, phase=phase))


def _submit(draft: Draft, call: Submit) -> None:
    """The peer hears of the request at once; storage is asked at once."""
    if call.rid in draft.attempt_by_rid:
        _refuse(draft, call.rid, draft.request(call.rid), "Submit")
        return
    attempt = Attempt(draft.next_attempt)
    draft.next_attempt += 1
    start = hit_of(draft, call.prompt, call.n_pages_given).host
    request = Request(
        rid=call.rid,
        attempt=attempt,
        prompt=call.prompt,
        n_tokens_prompt=call.prompt.n_tokens,
        peer=call.peer,
        priority=call.priority,
        n_pages_output=call.n_pages_output,
        hold=draft.open_ticket(Kind.HOLD, attempt, 0) if call.peer else NO_TICKET,
        phase=Waiting(stored_start=start, stored_stop=start, n_lookups=0),
        n_pages_given=call.n_pages_given,
    )
    draft.requests[attempt] = request
    draft.attempt_by_rid[call.rid] = attempt
    if call.peer:
        draft.effects.append(
            SendHold(
                ticket=request.hold,
                rid=call.rid,
                attempt=attempt,
                peer=call.peer,
                prompt=call.prompt,
            )
        )
    if draft.storage is Switch.ON and start < call.prompt.n_pages_full:
        ask_storage(draft, request, start)


def _abort(draft: Draft, rid: Rid) -> None:
    request = draft.request(rid)
    if request is None:
        _refuse(draft, rid, None, "Abort")
        return
    hand_over(draft, request.attempt)
    happen(draft, request.attempt, Aborted())


def _finish(draft: Draft, rid: Rid, output: bytes) -> None:
    """The answer's full pages join the index with the prompt's, then everything is let go."""
    request = draft.request(rid)
    if not _is_decoded(request, output):
        _refuse(draft, rid, request, "Finish")
        return
    _publish_decoded(draft, request, output)
    happen(draft, request.attempt, Finished())


def _is_decoded(request: Request | None, output: bytes) -> TypeGuard[Request]:
    """A running request, and an output that goes on where an earlier one ended."""
    if request is None or not isinstance(request.phase, Running):
        return False
    n_before = request.prompt.n_tokens - request.n_tokens_prompt
    return output.startswith(request.prompt.last_tokens(n_before))


def _publish_decoded(draft: Draft, request: Request, output: bytes) -> Running:
    attempt = request.attempt
    longer = with_prompt(draft, attempt, request, output)
    phase = longer.phase
    assert isinstance(phase, Running)
    n_here = phase.lease.n_shared + len(phase.lease.own)
    if draft.policy.device_tier is Switch.OFF:
        n_here = phase.lease.n_shared  # what the host has computed it stows by itself
    lease = published(draft, longer, phase.lease, min(longer.prompt.n_pages_full, n_here))
    if lease is not phase.lease:
        happen(draft, attempt, Published(lease))
    after = draft.requests[attempt].phase
    assert isinstance(after, Running)
    return after


def _retract(draft: Draft, rid: Rid, output: bytes) -> None:
    """Full pages go down by the way of all finished pages, the partial one as a private page.

    It always succeeds: what finds no room below stays on the device until somebody needs the room,
    and is computed again if it has gone by then.
    """
    request = draft.request(rid)
    if not _is_decoded(request, output):
        _refuse(draft, rid, request, "Retract")
        return
    phase = _publish_decoded(draft, request, output)
    request = draft.requests[request.attempt]
    n_full = phase.lease.n_shared
    draft.index.pin(Tier.HOST, request.prompt, 0, n_full)
    begin_descent(draft, request.prompt, n_full, Reach.HOST)
    happen(draft, request.attempt, _given_up(draft, request, phase, n_full))
    draft.notices.append(WasRetracted(rid=rid, attempt=request.attempt))


def _given_up(draft: Draft, request: Request, phase: Running, n_full: int) -> GivenUp:
    prompt = request.prompt
    n_used = n_pages_covering(prompt.n_tokens, prompt.page_tokens)
    has_tail = n_full == prompt.n_pages_full and n_used > n_full and len(phase.lease.own) > 0
    if not has_tail or draft.n_host_free() + draft.index.n_host_idle < 1:
        return GivenUp(n_full, None, None, None)
    device = phase.lease.own[0]
    host = draft.take_host(1)
    ticket = draft.open_ticket(Kind.TAIL, request.attempt, 1)
    draft.effects.append(StartMirror(ticket=ticket, device=(device,), host=host))
    return GivenUp(n_full, device, host[0], ticket)


def _flush(draft: Draft, tier: Tier) -> None:
    """Forget what nothing uses, at once; the rest as soon as it is let go. Never an error."""
    match tier:
        case Tier.DEVICE:
            draft.index.flush(tier)
        case Tier.HOST:
            draft.host_epoch += 1
            draft.index.flush(tier)
        case Tier.STORAGE:
            forget_stored(draft)
            draft.effects.append(ForgetStorage())
            _give_up_lookups(draft)
        case _:
            assert_never(tier)
    draft.collect_evicted()


def _give_up_lookups(draft: Draft) -> None:
    """What a lookup that is under way has seen is in storage no more: it has found nothing."""
    for attempt, request in list(draft.requests.items()):
        if isinstance(request.phase, Asking):
            lookup = request.phase.lookup
            happen(draft, attempt, StorageAnswered(lookup, 0))
            draft.close_ticket(lookup)


def _detach(draft: Draft) -> None:
    """Storage is gone for decisions from now on; reads that run are given up where they are."""
    draft.storage = Switch.OFF
    forget_stored(draft)
    _give_up_lookups(draft)
    for attempt, request in list(draft.requests.items()):
        phase = request.phase
        if isinstance(phase, Filling):
            for part in phase.parts:
                if part.read is not None:
                    n_good = draft.tickets[part.read].progress
                    happen(draft, attempt, ReadOverdue(part.read, n_good))
