"""The host scheduler's calls one by one: what each starts, what is refused, and in which words."""

import pytest
from attrs import evolve

from kvlift.core.agreed import Kind, Open
from kvlift.core.calls import take_call
from kvlift.core.descent import Reach
from kvlift.core.draft import Draft
from kvlift.core.effect import (
    CancelPrefetch,
    ForgetStorage,
    FreeDevice,
    FreeHost,
    SendHold,
    StartLookup,
    StartMirror,
)
from kvlift.core.ids import NO_TICKET, HostHandle, Rid, Ticket
from kvlift.core.index import Hit, match
from kvlift.core.notice import WasRefused, WasRetracted
from kvlift.core.phase import (
    Asking,
    Filling,
    Phase,
    Retracted,
    Running,
    Waiting,
)
from kvlift.core.plan import Bounds, Lease, Part, Plan
from kvlift.core.policy import Switch
from kvlift.core.prompt import token_bytes
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
)
from kvlift.core.tier import Source, Tier
from tests.core.scenario import prompt_of, submit
from tests.core.test_admission import draft_of, looked_up, put, wait
from tests.core.test_draft import devices, hosts, room

A = Rid("A")
PROMPT = prompt_of(1, 2, 3)
ODD = prompt_of(1, 2, odd=1)


def refusals(draft: Draft) -> list[tuple[str, str, str]]:
    return [(n.rid, n.call, n.phase) for n in draft.notices if isinstance(n, WasRefused)]


def plan_of(n_pages: int, rest: Source = Source.PEER, storage: int = 0) -> Plan:
    bounds = Bounds(device=0, shared=0, host=0, storage=storage)
    return Plan(bounds=bounds, n_pages=n_pages, promise=0, rest=rest)


def running(draft: Draft, n_pages: int = 3, n_shared: int = 0) -> Running:
    """A waits no more: it has pages of its own behind those that it shares."""
    request = wait(draft, "A", PROMPT if n_pages == 3 else ODD)
    if n_shared:
        put(draft, Tier.DEVICE, request.prompt, 0, n_shared)
        draft.index.pin(Tier.DEVICE, request.prompt, 0, n_shared)
    own = draft.take_device(n_pages - n_shared)
    phase = Running(plan=plan_of(n_pages), lease=Lease(n_shared=n_shared, own=own))
    draft.put_phase(request.attempt, phase)
    draft.effects.clear()
    return phase


def phase_of(draft: Draft) -> Phase:
    request = draft.request(A)
    assert request is not None
    return request.phase


# Submit.


def test_the_peer_and_the_storage_hear_of_a_submission_at_once() -> None:
    draft = draft_of()
    put(draft, Tier.HOST, PROMPT, 0, 1)
    draft.effects.clear()
    call = evolve(submit("A", PROMPT, priority=4), n_pages_output=2)
    take_call(draft, call)
    request = draft.requests[draft.attempt_by_rid[A]]
    assert draft.effects == [
        SendHold(ticket=Ticket(1), rid=A, attempt=request.attempt, peer="prefill", prompt=PROMPT),
        StartLookup(ticket=Ticket(2), prompt=PROMPT, start=1, stop=3),
    ]
    assert (request.attempt, draft.next_attempt, request.hold) == (1, 2, 1)
    assert (request.priority, request.n_pages_output, request.n_tokens_prompt) == (4, 2, 6)
    assert request.phase == Asking(lookup=Ticket(2), start=1, n_lookups=1)
    assert draft.tickets[Ticket(1)] == Open(Kind.HOLD, 1, 0)


@pytest.mark.parametrize(
    ("storage", "n_on_host"), [(Switch.OFF, 1), (Switch.ON, 3), (Switch.OFF, 3)]
)
def test_storage_is_not_asked_where_it_is_off_or_has_nothing_to_add(
    storage: Switch, n_on_host: int
) -> None:
    draft = draft_of(storage=storage)
    put(draft, Tier.HOST, PROMPT, 0, n_on_host)
    take_call(draft, submit("A", PROMPT))
    assert looked_up(draft) == []
    assert phase_of(draft) == Waiting(stored_start=n_on_host, stored_stop=n_on_host, n_lookups=0)


@pytest.mark.parametrize("n_given", [0, 2])
def test_what_the_hosts_own_cache_has_is_remembered(n_given: int) -> None:
    draft = draft_of()
    take_call(draft, evolve(submit("A", PROMPT), n_pages_given=n_given))
    request = draft.request(A)
    assert request is not None
    assert request.n_pages_given == n_given


def test_a_submission_without_a_peer_has_no_conversation() -> None:
    draft = draft_of(storage=Switch.OFF)
    take_call(draft, evolve(submit("A", PROMPT), peer=""))
    assert draft.effects == []
    assert draft.tickets == {}
    request = draft.request(A)
    assert request is not None
    assert request.hold == NO_TICKET


# Refusals.


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (Abort(A), "Abort"),
        (Run(A), "Started"),
        (Finish(A, b""), "Finish"),
        (Retract(A, b""), "Retract"),
        (Resume(A), "WantedBack"),
    ],
)
def test_a_call_that_no_phase_takes_is_refused_by_name(call: Submission, name: str) -> None:
    draft = draft_of()
    take_call(draft, call)
    assert refusals(draft) == [("A", name, "unknown")]
    if not isinstance(call, Abort):
        draft = draft_of()
        wait(draft, "A", PROMPT)
        take_call(draft, call)
        assert refusals(draft) == [("A", name, "Waiting")]
        assert isinstance(phase_of(draft), Waiting)


def test_a_living_name_is_refused() -> None:
    draft = draft_of()
    wait(draft, "A", PROMPT)
    take_call(draft, submit("A", prompt_of(7)))
    assert refusals(draft) == [("A", "Submit", "Waiting")]
    assert len(draft.requests) == 1
    assert draft.next_attempt == 2


def test_an_output_that_does_not_go_on_where_an_earlier_one_ended_is_refused() -> None:
    draft = draft_of()
    running(draft)
    request = draft.request(A)
    assert request is not None
    longer = evolve(request, prompt=request.prompt.with_tokens(token_bytes([7, 8])))
    draft.requests[request.attempt] = longer
    take_call(draft, Finish(A, token_bytes([7, 9])))
    take_call(draft, Retract(A, token_bytes([9, 8])))
    take_call(draft, Finish(A, b""))
    assert refusals(draft) == [
        ("A", "Finish", "Running"),
        ("A", "Retract", "Running"),
        ("A", "Finish", "Running"),
    ]


# Running ends.


def test_a_finished_request_leaves_its_full_pages_and_gives_the_others_back() -> None:
    draft = draft_of()
    running(draft, 3)
    take_call(draft, Finish(A, token_bytes([4, 4])))
    assert A not in draft.attempt_by_rid
    assert match(draft.index.view(), PROMPT.with_tokens(token_bytes([4, 4]))) == Hit(3, 3)
    assert draft.index.n_device_idle == 3
    assert [(d.n_pages, d.reach) for d in draft.descents] == [(3, Reach.BOTH)]
    assert [arrow[1].__name__ for arrow in draft.arrows] == ["Published", "Finished"]


def test_the_last_sampled_token_has_no_page() -> None:
    for tokens, n_full in (([5], 2), ([5, 5], 3), ([5, 6, 7], 3), ([], 2)):
        draft = draft_of()
        running(draft, 3)
        request = draft.request(A)
        assert request is not None
        short = evolve(request, prompt=ODD, n_tokens_prompt=ODD.n_tokens)
        draft.requests[request.attempt] = short
        take_call(draft, Finish(A, token_bytes(tokens)))
        assert draft.index.n_device == n_full


def test_a_retracted_request_pins_its_pages_below_and_sends_the_last_one_after_them() -> None:
    draft = draft_of()
    phase = running(draft, 3)
    request = draft.request(A)
    assert request is not None
    draft.requests[request.attempt] = evolve(request, prompt=ODD, n_tokens_prompt=ODD.n_tokens)
    take_call(draft, Retract(A, token_bytes([])))
    tail = phase.lease.own[2]
    ticket = next(t for t, known in draft.tickets.items() if known.kind is Kind.TAIL)
    assert phase_of(draft) == Retracted(
        plan=phase.plan,
        n_pages_pinned=2,
        tail_device=tail,
        tail_host=HostHandle(0),
        tail_copy=ticket,
    )
    assert draft.tickets[ticket] == Open(Kind.TAIL, request.attempt, 1, ceiling=1)
    mirrors = [e for e in draft.effects if isinstance(e, StartMirror)]
    assert mirrors == [StartMirror(ticket=ticket, device=(tail,), host=hosts(0))]
    assert [(d.n_pages, d.reach) for d in draft.descents] == [(2, Reach.HOST)]
    assert [s.host_pins for s in draft.index.segments.values()] == [1]
    assert draft.notices == [WasRetracted(rid=A, attempt=request.attempt)]


@pytest.mark.parametrize(("n_free", "n_idle", "kept"), [(1, 0, 1), (0, 1, 1), (0, 0, 0)])
def test_the_last_page_is_kept_where_the_host_has_room(n_free: int, n_idle: int, kept: int) -> None:
    draft = draft_of()
    running(draft, 3)
    request = draft.request(A)
    assert request is not None
    draft.requests[request.attempt] = evolve(request, prompt=ODD, n_tokens_prompt=ODD.n_tokens)
    put(draft, Tier.HOST, prompt_of(9), 0, n_idle)
    room(draft, host=n_free)
    take_call(draft, Retract(A, token_bytes([])))
    phase = phase_of(draft)
    assert isinstance(phase, Retracted)
    assert (phase.tail_host is not None) == bool(kept)
    assert (phase.tail_device is not None) == bool(kept)


def test_a_request_of_full_pages_has_no_last_page() -> None:
    draft = draft_of()
    running(draft, 3)
    take_call(draft, Retract(A, token_bytes([])))
    phase = phase_of(draft)
    assert isinstance(phase, Retracted)
    assert (phase.n_pages_pinned, phase.tail_device, phase.tail_copy) == (3, None, None)


# Flush, detach, attach.


@pytest.mark.parametrize("tier", list(Tier))
def test_a_flush_forgets_one_tier(tier: Tier) -> None:
    draft = draft_of()
    put(draft, Tier.DEVICE, PROMPT, 0, 3)
    put(draft, Tier.HOST, PROMPT, 0, 3)
    for segment in list(draft.index.segments.values()):
        draft.index.mark_stored(segment, Switch.ON)
    draft.effects.clear()
    take_call(draft, Flush(tier))
    match_after = {Tier.DEVICE: Hit(0, 3), Tier.HOST: Hit(3, 3), Tier.STORAGE: Hit(3, 3)}
    assert match(draft.index.view(), PROMPT) == match_after[tier]
    (segment,) = draft.index.segments.values()
    assert (segment.device is None) == (tier is Tier.DEVICE)
    assert (segment.host is None) == (tier is Tier.HOST)
    assert segment.stored == (tier is not Tier.STORAGE)
    assert draft.host_epoch == (tier is Tier.HOST)
    effects = {
        Tier.DEVICE: [FreeDevice(pages=devices(0, 1, 2))],
        Tier.HOST: [FreeHost(pages=hosts(0, 1, 2))],
        Tier.STORAGE: [ForgetStorage()],
    }
    assert draft.effects == effects[tier]


def test_each_flush_of_the_host_is_another_one() -> None:
    draft = draft_of()
    take_call(draft, Flush(Tier.HOST))
    take_call(draft, Flush(Tier.HOST))
    assert draft.host_epoch == 2


def test_a_page_that_was_grown_and_not_written_is_no_tail() -> None:
    draft = draft_of()
    phase = running(draft)
    request = draft.request(A)
    assert request is not None
    grown = evolve(phase.lease, own=phase.lease.own + draft.take_device(1))
    draft.put_phase(request.attempt, evolve(phase, lease=grown))
    take_call(draft, Retract(A, b""))
    after = draft.requests[request.attempt].phase
    assert isinstance(after, Retracted)
    assert (after.n_pages_pinned, after.tail_device, after.tail_copy) == (3, None, None)


def test_storage_that_is_detached_is_asked_and_read_no_more() -> None:
    draft = draft_of()
    take_call(draft, submit("B", prompt_of(7, 8)))
    request = wait(draft, "A", PROMPT)
    read, copy = draft.open_ticket(Kind.READ, 2, 3), draft.open_ticket(Kind.COPY, 2, 3)
    draft.tickets[read] = evolve(draft.tickets[read], progress=1)
    part = Part(
        source=Source.STORAGE, start=0, stop=3, n_good=3, copy=copy, read=read, host=hosts(0, 1, 2)
    )
    other = Part(source=Source.HOST, start=0, stop=0, n_good=0, copy=None)
    filling = Filling(
        plan=plan_of(3, storage=3),
        lease=Lease(n_shared=0, own=devices(0, 1, 2)),
        parts=(other, part),
        wanted=(),
        n_arrived=0,
        token=None,
    )
    draft.put_phase(request.attempt, filling)
    lookup = next(t for t, known in draft.tickets.items() if known.kind is Kind.LOOKUP)
    take_call(draft, DetachStorage())
    assert lookup in draft.closed
    asked = draft.request(Rid("B"))
    assert asked is not None
    assert asked.phase == Waiting(stored_start=0, stored_stop=0, n_lookups=1)
    after = phase_of(draft)
    assert isinstance(after, Filling)
    assert after.plan.bounds.storage == 1
    assert CancelPrefetch(ticket=read, n_pages_kept=1) in draft.effects
    seen = [draft.storage]
    take_call(draft, AttachStorage())
    assert [*seen, draft.storage] == [Switch.OFF, Switch.ON]
