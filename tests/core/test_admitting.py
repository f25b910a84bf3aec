"""An admission in full: what is pinned, reserved, started and promised, to the last field."""

import pytest
from attrs import evolve

from kvlift.core.admission import admit
from kvlift.core.agreed import Kind, Open
from kvlift.core.draft import Draft
from kvlift.core.effect import (
    FreeHost,
    SendWant,
    StartPrefetch,
    StartRestore,
    TakeDevice,
    TakeHost,
)
from kvlift.core.ids import HostHandle, Rid, Ticket
from kvlift.core.index import Hit, match
from kvlift.core.notice import WasPromised
from kvlift.core.phase import Filling, Resuming, Waiting
from kvlift.core.plan import Bounds, Follow, Lease, Part, Plan, Span
from kvlift.core.policy import Switch
from kvlift.core.prompt import Prompt
from kvlift.core.tier import Source, Tier
from tests.core.scenario import prompt_of
from tests.core.test_admission import POLICY, draft_of, put, wait
from tests.core.test_draft import devices, hosts

PROMPT = prompt_of(1, 2, 3, 4, odd=1)


def filled(draft: Draft, rid: str = "A") -> Filling:
    request = draft.request(Rid(rid))
    assert request is not None
    assert isinstance(request.phase, Filling)
    return request.phase


def test_a_request_with_pages_in_every_tier_is_admitted_with_all_of_them() -> None:
    draft = draft_of()
    put(draft, Tier.DEVICE, PROMPT, 0, 1)
    put(draft, Tier.HOST, PROMPT, 1, 2)
    draft.host_epoch = 3
    draft.clock = 40
    request = wait(draft, "A", PROMPT, stored=(2, 4), priority=6)
    draft.effects.clear()
    admit(draft)
    hold, copy, read, chained, token = (Ticket(n) for n in range(1, 6))
    own = devices(1, 2, 3, 4)
    lease = Lease(n_shared=1, own=own)
    plan = Plan(bounds=Bounds(device=1, shared=1, host=2, storage=4), n_pages=5, promise=4)
    assert filled(draft) == Filling(
        plan=plan,
        lease=lease,
        parts=(
            Part(source=Source.HOST, start=1, stop=2, n_good=1, copy=copy),
            Part(
                source=Source.STORAGE,
                start=2,
                stop=4,
                n_good=2,
                copy=chained,
                read=read,
                host=hosts(1, 2),
                host_epoch=3,
            ),
        ),
        wanted=(Span(4, 5),),
        n_arrived=0,
        token=token,
    )
    assert draft.effects == [
        TakeDevice(pages=own),
        StartRestore(ticket=copy, host=hosts(0), device=own[:1]),
        TakeHost(pages=hosts(1, 2)),
        StartPrefetch(
            ticket=read,
            prompt=PROMPT,
            start=2,
            host=hosts(1, 2),
            restore=chained,
            device=own[1:3],
        ),
        SendWant(ticket=hold, start=4, device=own[3:], promise=4, token=token),
    ]
    assert {t: draft.tickets[t] for t in (copy, read, chained, token)} == {
        copy: Open(Kind.COPY, request.attempt, 1, ceiling=1),
        read: Open(Kind.READ, request.attempt, 2, ceiling=2),
        chained: Open(Kind.COPY, request.attempt, 2, ceiling=2),
        token: Open(Kind.TOKEN, request.attempt, 0),
    }
    assert draft.notices == [WasPromised(rid=Rid("A"), attempt=request.attempt, plan=plan)]
    first, second = draft.index.segments.values()
    assert (first.device_pins, first.host_pins) == (1, 0)
    assert (second.device_pins, second.host_pins) == (0, 1)
    assert {(s.used, s.n_uses, s.priority) for s in (first, second)} == {(41, 1, 6)}


def test_a_whole_prompt_in_the_cache_wants_nothing_but_the_token() -> None:
    for first_token in Switch:
        draft = draft_of(evolve(POLICY, first_token=first_token))
        whole = prompt_of(1, 2)
        put(draft, Tier.DEVICE, whole, 0, 2)
        wait(draft, "A", whole)
        draft.effects.clear()
        admit(draft)
        token = Ticket(2) if first_token is Switch.ON else None
        assert filled(draft).wanted == ()
        assert filled(draft).token == token
        assert filled(draft).parts == ()
        assert draft.effects == [
            SendWant(ticket=Ticket(1), start=2, device=(), promise=2, token=token)
        ]


def test_a_request_without_a_peer_computes_the_rest_itself() -> None:
    draft = draft_of()
    put(draft, Tier.HOST, PROMPT, 0, 1)
    request = evolve(wait(draft, "A", PROMPT), peer="")
    draft.requests[request.attempt] = request
    draft.effects.clear()
    admit(draft)
    phase = filled(draft)
    assert (phase.plan.rest, phase.wanted, phase.token) == (Source.RECOMPUTE, (), None)
    assert phase.plan.promise == 1
    assert [type(effect).__name__ for effect in draft.effects] == ["TakeDevice", "StartRestore"]


def test_a_request_follows_the_one_that_brings_the_most() -> None:
    draft = draft_of()
    other, leader = wait(draft, "A", prompt_of(1, 2, 9)), wait(draft, "B", prompt_of(1, 2, 3))
    admit(draft)
    follower = wait(draft, "C", prompt_of(1, 2, 3, 4))
    wait(draft, "D", prompt_of(1, 7))
    admit(draft)
    assert filled(draft, "B").follow == Follow(leader=other.attempt, stop=2)
    phase = filled(draft, "C")
    assert phase.follow == Follow(leader=leader.attempt, stop=3)
    assert phase.plan.bounds == Bounds(device=0, shared=3, host=3, storage=3)
    assert phase.wanted == (Span(3, 4),)
    assert filled(draft, "D").follow == Follow(leader=other.attempt, stop=1)
    assert follower.attempt == 3


def test_who_computes_again_leads_nobody() -> None:
    draft = draft_of()
    request = evolve(wait(draft, "A", prompt_of(1, 2, 3)), peer="")
    draft.requests[request.attempt] = request
    admit(draft)
    wait(draft, "B", prompt_of(1, 2, 4))
    admit(draft)
    assert filled(draft, "B").follow is None


# Coming back.


def resuming(draft: Draft, prompt: Prompt, n_pinned: int, tail: HostHandle | None) -> None:
    request = wait(draft, "A", prompt)
    plan = Plan(
        bounds=Bounds(device=0, shared=0, host=0, storage=0), n_pages=prompt.n_pages, promise=7
    )
    phase = Resuming(
        plan=plan, n_pages_pinned=n_pinned, tail_device=None, tail_host=tail, tail_copy=None
    )
    draft.put_phase(request.attempt, phase)
    draft.index.pin(Tier.HOST, prompt, 0, n_pinned)
    draft.effects.clear()


def test_a_retracted_request_comes_back_with_its_last_page() -> None:
    draft = draft_of()
    prompt = prompt_of(1, 2, odd=1)
    put(draft, Tier.HOST, prompt, 0, 2)
    (tail,) = draft.take_host(1)
    resuming(draft, prompt, 2, tail)
    admit(draft)
    copy, last = Ticket(2), Ticket(3)
    assert filled(draft) == Filling(
        plan=Plan(
            bounds=Bounds(device=0, shared=0, host=3, storage=3),
            n_pages=3,
            promise=7,
            rest=Source.RECOMPUTE,
        ),
        lease=Lease(n_shared=0, own=devices(0, 1, 2)),
        parts=(
            Part(source=Source.HOST, start=0, stop=2, n_good=2, copy=copy),
            Part(source=Source.HOST, start=2, stop=3, n_good=1, copy=last, host=(tail,)),
        ),
        wanted=(),
        n_arrived=0,
        token=None,
    )
    assert draft.tickets[last] == Open(Kind.COPY, 1, 1, ceiling=1)
    assert [e for e in draft.effects if isinstance(e, StartRestore)] == [
        StartRestore(ticket=copy, host=hosts(0, 1), device=devices(0, 1)),
        StartRestore(ticket=last, host=(tail,), device=devices(2)),
    ]
    assert [s.host_pins for s in draft.index.segments.values()] == [1], "its copy's, alone"
    assert draft.notices == []


@pytest.mark.parametrize("n_on_host", [0, 1])
def test_a_last_page_without_its_prefix_is_given_back(n_on_host: int) -> None:
    draft = draft_of()
    prompt = prompt_of(1, 2, odd=1)
    put(draft, Tier.HOST, prompt, 0, n_on_host)
    (tail,) = draft.take_host(1)
    resuming(draft, prompt, n_on_host, tail)
    admit(draft)
    phase = filled(draft)
    assert phase.plan.bounds.storage == n_on_host
    assert FreeHost(pages=(tail,)) in draft.effects
    assert len(phase.parts) == n_on_host


def test_a_retracted_request_is_neither_a_follower_nor_a_reader() -> None:
    draft = draft_of()
    wait(draft, "L", prompt_of(1, 2, 3))
    admit(draft)
    resuming(draft, prompt_of(1, 2), 0, None)
    admit(draft)
    phase = filled(draft)
    assert (phase.follow, phase.parts, phase.wanted) == (None, (), ())
    assert phase.plan.bounds == Bounds(device=0, shared=0, host=0, storage=0)


def test_who_fits_is_admitted_up_to_the_last_page_and_evicts_for_it() -> None:
    draft = draft_of()
    old = prompt_of(7, 8)
    put(draft, Tier.DEVICE, old, 0, 2)
    draft.ledger = evolve(draft.ledger, device_room=3)
    wait(draft, "A", prompt_of(1, 2))
    admit(draft)
    assert filled(draft).lease.own == devices(2, 3)
    assert match(draft.index.view(), old) == Hit(1, 1)
    request = wait(draft, "B", prompt_of(3, 4))
    admit(draft)
    assert isinstance(draft.requests[request.attempt].phase, Waiting)


@pytest.mark.parametrize("n_given", [0, 1, 2])
def test_pages_of_the_hosts_own_cache_are_here_already(n_given: int) -> None:
    draft = draft_of(evolve(POLICY, device_tier=Switch.OFF))
    wait(draft, "L", prompt_of(1, 2, 4))
    admit(draft)
    request = evolve(wait(draft, "A", prompt_of(1, 2, 3)), n_pages_given=n_given)
    draft.requests[request.attempt] = request
    admit(draft)
    phase = filled(draft)
    given = Part(
        source=Source.DEVICE, start=0, stop=n_given, n_good=n_given, copy=None, n_landed=n_given
    )
    assert phase.parts == ((given,) if n_given else ())
    assert phase.plan.bounds.device == n_given
    assert (phase.lease.n_shared, phase.follow) == (0, None)
    assert len(phase.lease.own) == 3
