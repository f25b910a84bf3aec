"""Verdicts and what follows from them, one rule at a time, on a draft."""

import pytest
from attrs import evolve

from kvlift.core.advance import advance_agreed
from kvlift.core.agreed import Drain, Kind, Rates
from kvlift.core.ballot import RanksDiverged, Verdict
from kvlift.core.draft import Draft
from kvlift.core.effect import CancelPrefetch, ClosePeer, FreeDevice, FreeHost, SendWant
from kvlift.core.ids import Attempt, Rid, Ticket
from kvlift.core.landed import PeerCause
from kvlift.core.notice import HasEnded
from kvlift.core.observation import OVERDUE, Observation
from kvlift.core.phase import Draining, Filling, Outcome, Phase, Ready
from kvlift.core.plan import Bounds, Follow, Lease, Part, Plan, Span
from kvlift.core.policy import PrefetchPolicy
from kvlift.core.prompt import Prompt
from kvlift.core.settle import settle
from kvlift.core.tier import Source, Tier
from kvlift.core.verdicts import take_verdict
from tests.core.scenario import prompt_of, submit
from tests.core.test_admission import POLICY, draft_of, put, wait
from tests.core.test_draft import devices, hosts
from tests.core.test_invariants_of_pages import agreed_of

PROMPT = prompt_of(1, 2, 3, 4)
A = Rid("A")


def verdict_of(*seen: tuple[int, tuple[int, int, int]]) -> Verdict:
    return Verdict(
        device_room=12,
        host_room=12,
        rates=Rates(),
        n_submissions=0,
        observations=tuple((Ticket(t), Observation(*numbers)) for t, numbers in seen),
    )


def filling(
    draft: Draft,
    rid: str = "A",
    *,
    reads: bool = True,
    token: bool = False,
    follow: Follow | None = None,
    prompt: Prompt = PROMPT,
) -> Filling:
    """Pages 0 and 1 come from storage, 2 and 3 from the peer."""
    request = wait(draft, rid, prompt)
    attempt = request.attempt
    parts: tuple[Part, ...] = ()
    if reads:
        host = draft.take_host(2)
        parts = (
            Part(
                source=Source.STORAGE,
                start=0,
                stop=2,
                n_good=2,
                read=draft.open_ticket(Kind.READ, attempt, 2),
                copy=draft.open_ticket(Kind.COPY, attempt, 2),
                host=host,
            ),
        )
    stop = 2 if reads else follow.stop if follow else 0
    phase = Filling(
        plan=Plan(
            bounds=Bounds(
                device=0, shared=0 if reads else stop, host=0 if reads else stop, storage=stop
            ),
            n_pages=4,
            promise=stop,
        ),
        lease=Lease(n_shared=0, own=draft.take_device(4)),
        parts=parts,
        wanted=(Span(stop, 4),) if stop < 4 else (),
        n_arrived=0,
        token=draft.open_ticket(Kind.TOKEN, attempt, 0) if token else None,
        follow=follow,
    )
    draft.put_phase(attempt, phase)
    draft.effects.clear()
    draft.touched.clear()
    return phase


def phase_of(draft: Draft, rid: str = "A") -> Phase:
    request = draft.request(Rid(rid))
    assert request is not None
    return request.phase


def tickets(draft: Draft, kind: Kind) -> list[Ticket]:
    return [ticket for ticket, known in draft.tickets.items() if known.kind is kind]


def arrows(draft: Draft) -> list[str]:
    return [arrow[1].__name__ for arrow in draft.arrows]


# Verdicts.


def test_a_verdict_brings_rooms_and_rates_and_news_in_the_order_of_tickets() -> None:
    draft = draft_of()
    filling(draft)
    (read,), (copy,) = tickets(draft, Kind.READ), tickets(draft, Kind.COPY)
    rates = Rates(prefetch_us=3, transfer_us=4)
    verdict = evolve(
        verdict_of((copy, (2, 1, 2)), (read, (2, 1, 2)), (99, (1, 1, 1))),
        rates=rates,
        device_room=9,
        host_room=8,
    )
    take_verdict(draft, verdict)
    assert (draft.ledger.device_room, draft.ledger.host_room, draft.rates) == (9, 8, rates)
    assert arrows(draft) == ["ReadEnded", "CopyEnded"]
    assert draft.closed == [read, copy]
    assert Ticket(99) not in draft.tickets


@pytest.mark.parametrize(
    ("numbers", "events"),
    [
        ((1, 0, 2), []),
        ((0, 0, 1), ["ReadShort"]),
        ((1, 0, OVERDUE), ["ReadOverdue"]),
        ((0, 0, 0), ["ReadShort"]),
        ((2, 1, 2), ["ReadEnded"]),
        ((1, 1, 1), ["ReadShort", "ReadEnded"]),
    ],
)
def test_what_a_read_says_is_told_once(numbers: tuple[int, int, int], events: list[str]) -> None:
    draft = draft_of()
    filling(draft)
    (read,) = tickets(draft, Kind.READ)
    take_verdict(draft, verdict_of((read, numbers)))
    assert arrows(draft) == events
    if numbers[1] == 0:
        known = draft.tickets[read]
        assert (known.kind, known.n_pages) == (Kind.READ, 2)
        assert (known.progress, known.ceiling) == (numbers[0], numbers[2])
        take_verdict(draft, verdict_of((read, numbers)))
        assert arrows(draft) == events


@pytest.mark.parametrize(
    ("numbers", "events"),
    [((1, 0, 2), []), ((0, 0, 1), ["CopyShort"]), ((0, 0, 0), ["CopyShort"]), ((0, 0, -1), [])],
)
def test_a_copy_is_short_where_a_rank_says_how_much(
    numbers: tuple[int, int, int], events: list[str]
) -> None:
    draft = draft_of()
    filling(draft)
    (copy,) = tickets(draft, Kind.COPY)
    take_verdict(draft, verdict_of((copy, numbers)))
    assert arrows(draft) == events


def test_a_lookup_is_answered_at_its_end_or_by_the_rank_that_has_nothing() -> None:
    for numbers, stop in (((2, 1, 2), 3), ((0, 0, 0), 1), ((0, 0, 1), None)):
        draft = draft_of()
        put(draft, Tier.HOST, PROMPT, 0, 1)
        agreed, _ = advance_agreed(agreed_of(draft), None, (submit("A", PROMPT),), POLICY)
        draft = Draft(agreed, POLICY)
        (lookup,) = tickets(draft, Kind.LOOKUP)
        take_verdict(draft, verdict_of((lookup, numbers)))
        if stop is None:
            assert arrows(draft) == []
            assert draft.closed == []
        else:
            assert phase_of(draft).stored_stop == stop  # type: ignore[union-attr]
            assert draft.closed == [lookup]


def test_tokens_that_differ_are_a_divergence() -> None:
    draft = draft_of()
    filling(draft, token=True)
    (token,) = tickets(draft, Kind.TOKEN)
    take_verdict(draft, verdict_of((token, (0, 0, 0))))
    assert arrows(draft) == []
    with pytest.raises(RanksDiverged, match="'first token' at tick 0"):
        take_verdict(draft, verdict_of((token, (3, 1, -4))))
    take_verdict(draft, verdict_of((token, (3, 1, -3))))
    assert arrows(draft) == ["TokenCame"]


@pytest.mark.parametrize(
    ("numbers", "cause"),
    [
        ((0, 0, PeerCause.GONE), PeerCause.GONE),
        ((0, 1, 0), PeerCause.LOST),
        ((0, 1, PeerCause.GONE), PeerCause.GONE),
        ((1, 0, 0), None),
    ],
)
def test_a_peer_that_lets_go_without_a_word_is_lost(
    numbers: tuple[int, int, int], cause: PeerCause | None
) -> None:
    draft = draft_of()
    filling(draft)
    request = draft.request(A)
    assert request is not None
    take_verdict(draft, verdict_of((request.hold, numbers)))
    ended = [n.cause for n in draft.notices if isinstance(n, HasEnded)]
    assert ended == ([cause] if cause is not None else [])


def test_a_silent_peer_is_closed_and_nothing_else() -> None:
    draft = draft_of()
    filling(draft)
    request = draft.request(A)
    assert request is not None
    take_verdict(draft, verdict_of((request.hold, (0, 0, PeerCause.SILENT))))
    assert draft.effects == [ClosePeer(ticket=request.hold)]
    assert draft.arrows == []


def test_held_pages_come_back_with_the_last_of_their_tickets() -> None:
    draft = draft_of()
    filling(draft)
    (read,), (copy,) = tickets(draft, Kind.READ), tickets(draft, Kind.COPY)
    request = draft.request(A)
    assert request is not None
    put(draft, Tier.HOST, PROMPT, 2, 4)
    draft.index.pin(Tier.HOST, PROMPT, 2, 4)
    draft.take_device(1)
    draft.put_phase(request.attempt, Draining(outcome=Outcome.DONE))
    drain = Drain(
        attempt=request.attempt,
        prompt=PROMPT,
        tickets=(read, copy),
        device=devices(4),
        host=hosts(0, 1),
        pin_host_start=2,
        pin_host_stop=4,
    )
    other = evolve(drain, tickets=(Ticket(90),), attempt=Attempt(9))
    draft.drains = [other, drain]
    draft.effects.clear()
    draft.touched.clear()
    take_verdict(draft, verdict_of((read, (0, 1, 0))))
    assert draft.drains == [other, evolve(drain, tickets=(copy,))]
    assert draft.effects == []
    assert draft.touched == {request.attempt: None}
    take_verdict(draft, verdict_of((copy, (0, 1, 0))))
    assert draft.drains == [other]
    assert draft.effects == [FreeDevice(pages=devices(4)), FreeHost(pages=hosts(0, 1))]
    assert draft.index.n_host_idle == 2


# What follows.


def test_each_of_the_touched_is_settled() -> None:
    draft = draft_of()
    filling(draft, "A")
    theirs = filling(draft, "B", reads=False, prompt=prompt_of(6, 7, 8, 9))
    other = draft.request(Rid("B"))
    assert other is not None
    draft.put_phase(other.attempt, evolve(theirs, n_arrived=4))
    draft.touched = {Attempt(0): None, Attempt(1): None, other.attempt: None}
    settle(draft)
    assert isinstance(phase_of(draft, "A"), Filling)
    assert isinstance(phase_of(draft, "B"), Ready)


def test_what_has_no_source_any_more_is_asked_of_the_peer() -> None:
    draft = draft_of()
    phase = filling(draft)
    request = draft.request(A)
    assert request is not None
    over = evolve(phase.parts[0], copy=None, read=None, host=(), n_good=1, n_landed=1)
    bounds = evolve(phase.plan.bounds, storage=1)
    short = evolve(phase, parts=(over,), plan=evolve(phase.plan, bounds=bounds))
    draft.put_phase(request.attempt, short)
    draft.touched = {request.attempt: None}
    settle(draft)
    (want,) = (e for e in draft.effects if isinstance(e, SendWant))
    assert (want.start, want.device, want.promise) == (1, phase.lease.own[1:2], 1)
    after = phase_of(draft)
    assert isinstance(after, Filling)
    assert after.wanted == (Span(2, 4), Span(1, 2))
    assert after.plan.promise == 1


def test_a_request_is_ready_when_nothing_is_awaited() -> None:
    for token, follow, copying, n_arrived, ready in (
        (None, None, False, 2, True),
        (Ticket(9), None, False, 2, False),
        (None, None, True, 2, False),
        (None, None, False, 1, False),
    ):
        draft = draft_of()
        phase = filling(draft)
        request = draft.request(A)
        assert request is not None
        over = (
            phase.parts[0]
            if copying
            else evolve(phase.parts[0], copy=None, read=None, host=(), n_landed=2)
        )
        after = evolve(phase, parts=(over,), token=token, n_arrived=n_arrived, follow=follow)
        draft.put_phase(request.attempt, after)
        draft.touched = {request.attempt: None}
        settle(draft)
        assert isinstance(phase_of(draft), Ready) is ready


def test_what_is_computed_again_is_not_awaited() -> None:
    draft = draft_of()
    phase = filling(draft)
    request = draft.request(A)
    assert request is not None
    over = evolve(phase.parts[0], copy=None, read=None, host=(), n_landed=2)
    plan = evolve(phase.plan, rest=Source.RECOMPUTE)
    draft.put_phase(request.attempt, evolve(phase, parts=(over,), plan=plan, wanted=()))
    draft.touched = {request.attempt: None}
    settle(draft)
    assert isinstance(phase_of(draft), Ready)


@pytest.mark.parametrize(
    ("policy", "n_arrived", "token", "progress", "given_up"),
    [
        (PrefetchPolicy.BEST_EFFORT, 2, None, 1, True),
        (PrefetchPolicy.BEST_EFFORT, 1, None, 1, False),
        (PrefetchPolicy.BEST_EFFORT, 2, 9, 1, False),
        (PrefetchPolicy.BEST_EFFORT, 2, None, 2, False),
        (PrefetchPolicy.WAIT_COMPLETE, 2, None, 1, False),
        (PrefetchPolicy.DEADLINE, 2, None, 1, False),
    ],
)
def test_a_late_read_is_given_up_when_all_else_is_here(
    policy: PrefetchPolicy, n_arrived: int, token: int | None, progress: int, *, given_up: bool
) -> None:
    draft = draft_of(evolve(POLICY, prefetch=policy))
    phase = filling(draft)
    request = draft.request(A)
    assert request is not None
    (read,) = tickets(draft, Kind.READ)
    draft.tickets[read] = evolve(draft.tickets[read], progress=progress)
    ticket = None if token is None else Ticket(token)
    draft.put_phase(request.attempt, evolve(phase, n_arrived=n_arrived, token=ticket))
    draft.touched = {request.attempt: None}
    settle(draft)
    cancelled = [e for e in draft.effects if isinstance(e, CancelPrefetch)]
    assert cancelled == ([CancelPrefetch(ticket=read, n_pages_kept=1)] if given_up else [])


def test_a_read_waits_for_the_other_copies() -> None:
    draft = draft_of(evolve(POLICY, prefetch=PrefetchPolicy.BEST_EFFORT))
    phase = filling(draft)
    request = draft.request(A)
    assert request is not None
    restore = Part(source=Source.HOST, start=0, stop=0, n_good=0, copy=Ticket(50))
    draft.put_phase(request.attempt, evolve(phase, n_arrived=2, parts=(restore, *phase.parts)))
    draft.touched = {request.attempt: None}
    settle(draft)
    assert draft.effects == []


def test_pages_of_a_leader_join_as_they_come_and_those_of_others_together() -> None:
    for is_followed, n_shared in ((False, 0), (True, 1)):
        draft = draft_of()
        phase = filling(draft, reads=False)
        request = draft.request(A)
        assert request is not None
        if is_followed:
            filling(draft, "B", reads=False, follow=Follow(leader=request.attempt, stop=4))
        draft.put_phase(request.attempt, evolve(phase, n_arrived=1))
        draft.touched = {request.attempt: None}
        settle(draft)
        after = phase_of(draft)
        assert isinstance(after, Filling)
        assert after.lease.n_shared == n_shared


def test_a_cached_prefix_joins_when_all_of_it_is_here() -> None:
    draft = draft_of()
    phase = filling(draft)
    request = draft.request(A)
    assert request is not None
    for n_good, n_shared in ((1, 0), (2, 2)):
        over = evolve(phase.parts[0], copy=None, read=None, host=(), n_good=n_good, n_landed=n_good)
        draft.put_phase(request.attempt, evolve(phase, parts=(over,)))
        draft.touched = {request.attempt: None}
        settle(draft)
        after = phase_of(draft)
        assert isinstance(after, Filling)
        assert after.lease.n_shared == n_shared
