"""Who follows, who inherits; and what a tick leaves in its digest and in the counts of pages."""

import pytest
from attrs import evolve

from kvlift.core.advance import Decision, _bytes_of, _digest, advance_agreed
from kvlift.core.agreed import Drain, Growth, Kind, Rates, agreed_at_start, is_under_way
from kvlift.core.counts import Counts, device_counts, host_counts, is_conserved
from kvlift.core.descent import Descent, Due, Mirroring, Reach
from kvlift.core.effect import ClosePeer
from kvlift.core.handover import hand_over
from kvlift.core.ids import Attempt, DeviceHandle, Rid, Ticket
from kvlift.core.landed import PeerCause
from kvlift.core.notice import WasRefused
from kvlift.core.phase import Filling, Phase, Ready, Resuming, Retracted, Running
from kvlift.core.plan import Bounds, Follow, Lease, Plan
from kvlift.core.policy import Switch
from kvlift.core.submission import Run
from kvlift.core.tier import Tier
from tests.core.scenario import prompt_of, submit
from tests.core.test_admission import POLICY, draft_of, put, wait
from tests.core.test_draft import devices, hosts
from tests.core.test_invariants_of_pages import agreed_of
from tests.core.test_settling import PROMPT, A, filling, phase_of, tickets, verdict_of

# Followers.


def test_the_first_follower_inherits_what_its_leader_brings() -> None:
    draft = draft_of(evolve(POLICY, n_device_pages=20))
    draft.ledger = evolve(draft.ledger, device_room=30, host_room=30)
    mine = filling(draft, "A")
    leader = draft.request(A)
    assert leader is not None
    follow = Follow(leader=leader.attempt, stop=3)
    theirs = filling(draft, "B", reads=False, follow=follow)
    filling(draft, "C", reads=False, follow=evolve(follow, stop=3))
    filling(draft, "D", reads=False, follow=evolve(follow, stop=4))
    hand_over(draft, leader.attempt)
    heir = draft.request(Rid("B"))
    assert heir is not None
    after = heir.phase
    assert isinstance(after, Filling)
    assert after.parts == mine.parts
    assert after.follow is None
    assert after.plan.bounds == Bounds(device=0, shared=0, host=0, storage=2)
    assert after.lease.own == mine.lease.own[:2] + theirs.lease.own[2:]
    left = phase_of(draft)
    assert isinstance(left, Filling)
    assert left.parts == ()
    assert left.lease.own == theirs.lease.own[:2] + mine.lease.own[2:]
    for kind in (Kind.READ, Kind.COPY):
        (ticket,) = tickets(draft, kind)
        assert draft.tickets[ticket].owner == heir.attempt
    third, fourth = phase_of(draft, "C"), phase_of(draft, "D")
    assert isinstance(third, Filling)
    assert isinstance(fourth, Filling)
    assert third.follow is not None
    assert fourth.follow is not None
    assert third.follow == Follow(leader=heir.attempt, stop=3)
    assert fourth.follow == Follow(leader=leader.attempt, stop=4), "the heir does not go so far"


def test_who_has_no_peer_or_follows_another_inherits_nothing() -> None:
    for spoil in ("gone", "other", "nobody"):
        draft = draft_of()
        mine = filling(draft, "A")
        leader = draft.request(A)
        assert leader is not None
        number = leader.attempt if spoil != "other" else 77
        phase = filling(draft, "B", reads=False, follow=Follow(leader=number, stop=3))
        other = draft.request(Rid("B"))
        assert other is not None
        if spoil == "gone":
            draft.put_phase(other.attempt, evolve(phase, peer_gone=PeerCause.GONE))
        if spoil == "nobody":
            draft.put_phase(other.attempt, evolve(phase, follow=None))
        hand_over(draft, leader.attempt)
        assert phase_of(draft) == mine
        hand_over(draft, other.attempt)
        assert phase_of(draft) == mine


@pytest.mark.parametrize(
    ("stop", "n_good", "start", "n_taken"),
    [(3, 2, 0, 1), (2, 2, 0, 1), (1, 2, 0, 0), (3, 1, 0, 0), (3, 0, 0, 0), (3, 2, 1, 0)],
)
def test_only_whole_flights_that_a_follower_follows_are_inherited(
    stop: int, n_good: int, start: int, n_taken: int
) -> None:
    draft = draft_of()
    mine = filling(draft, "A")
    leader = draft.request(A)
    assert leader is not None
    part = evolve(mine.parts[0], n_good=n_good, start=start, stop=start + 2)
    draft.put_phase(leader.attempt, evolve(mine, parts=(part,)))
    filling(draft, "B", reads=False, follow=Follow(leader=leader.attempt, stop=stop))
    hand_over(draft, leader.attempt)
    heir = phase_of(draft, "B")
    assert isinstance(heir, Filling)
    assert len(heir.parts) == n_taken


def test_flights_that_follow_each_other_are_inherited_together() -> None:
    draft = draft_of()
    mine = filling(draft, "A")
    leader = draft.request(A)
    assert leader is not None
    whole = mine.parts[0]
    first = evolve(whole, stop=1, n_good=1, host=whole.host[:1])
    second = evolve(
        whole,
        start=1,
        n_good=1,
        host=whole.host[1:],
        read=draft.open_ticket(Kind.READ, leader.attempt, 1),
        copy=draft.open_ticket(Kind.COPY, leader.attempt, 1),
    )
    draft.put_phase(leader.attempt, evolve(mine, parts=(first, second)))
    filling(draft, "B", reads=False, follow=Follow(leader=leader.attempt, stop=2))
    hand_over(draft, leader.attempt)
    heir = phase_of(draft, "B")
    assert isinstance(heir, Filling)
    assert heir.parts == (first, second)


# The digest, counts, and whether anything is under way.


NOTHING = Decision(effects=(), notices=(), closed=(), arrows=(), movers=())
BEFORE = bytes(range(16))


def test_a_tick_that_decided_nothing_has_the_digest_of_the_one_before() -> None:
    assert _digest(BEFORE, None, (), NOTHING) is BEFORE
    assert _digest(BEFORE, verdict_of(), (), NOTHING) is BEFORE
    assert _digest(BEFORE, None, (), evolve(NOTHING, closed=(Ticket(1),))) is BEFORE


def test_each_thing_that_a_tick_hears_or_decides_is_in_its_digest() -> None:
    effect = ClosePeer(ticket=Ticket(1))
    notice = WasRefused(rid=A, call="Run", phase="unknown")
    some = {
        "news": _digest(BEFORE, verdict_of((1, (1, 0, 1))), (), NOTHING),
        "other news": _digest(BEFORE, verdict_of((1, (1, 0, 2))), (), NOTHING),
        "call": _digest(BEFORE, None, (Run(A),), NOTHING),
        "other call": _digest(BEFORE, None, (Run(Rid("B")),), NOTHING),
        "prompt": _digest(BEFORE, None, (submit("A", prompt_of(1)),), NOTHING),
        "other prompt": _digest(BEFORE, None, (submit("A", prompt_of(2)),), NOTHING),
        "effect": _digest(BEFORE, None, (), evolve(NOTHING, effects=(effect,))),
        "notice": _digest(BEFORE, None, (), evolve(NOTHING, notices=(notice,))),
        "arrow": _digest(BEFORE, None, (), evolve(NOTHING, arrows=((Ready, Ready, Ready),))),
        "mover": _digest(
            BEFORE, None, (), evolve(NOTHING, arrows=((Ready, Ready, Ready),), movers=(1,))
        ),
        "closed": _digest(
            BEFORE, None, (), evolve(NOTHING, effects=(effect,), closed=(Ticket(1),))
        ),
        "verdict": _digest(BEFORE, verdict_of(), (Run(A),), NOTHING),
        "past": _digest(bytes(16), None, (Run(A),), NOTHING),
    }
    assert len({BEFORE, *some.values()}) == 1 + len(some)
    assert {len(digest) for digest in some.values()} == {16}


def test_ranks_that_keep_other_shards_of_a_prompt_have_one_digest() -> None:
    shards = [evolve(prompt_of(1), namespace=bytes([rank] * 32)) for rank in range(2)]
    first, second = (_digest(BEFORE, None, (submit("A", one),), NOTHING) for one in shards)
    assert first == second


def test_every_number_of_a_verdict_is_in_its_bytes() -> None:
    base = verdict_of((3, (1, 0, 2)))
    others = [
        evolve(base, device_room=1),
        evolve(base, host_room=1),
        evolve(base, n_submissions=1),
        *(verdict_of((3, n)) for n in ((0, 0, 2), (1, 1, 2), (1, 0, -2))),
        verdict_of((4, (1, 0, 2))),
    ]
    assert len({_bytes_of(one) for one in (base, *others)}) == 8
    assert len(_bytes_of(base)) == 7 * 8


def test_pages_are_counted_where_they_are() -> None:
    draft = draft_of()
    put(draft, Tier.DEVICE, PROMPT, 0, 3)
    put(draft, Tier.HOST, PROMPT, 0, 2)
    draft.index.pin(Tier.DEVICE, PROMPT, 0, 1)
    filling(draft, "A")
    for rid, phase in (
        ("B", Ready(plan=_plan(), lease=Lease(n_shared=0, own=devices(70)))),
        ("C", Running(plan=_plan(), lease=Lease(n_shared=0, own=devices(71)))),
        ("D", _retracted(Retracted)),
        ("E", _retracted(Resuming)),
    ):
        draft.put_phase(wait(draft, rid, PROMPT).attempt, phase)
    draft.drains.append(
        Drain(
            attempt=Attempt(9),
            prompt=PROMPT,
            tickets=(Ticket(1),),
            device=devices(80, 81),
            host=hosts(80),
            pin_host_start=0,
            pin_host_stop=0,
        )
    )
    mirroring = Mirroring(ticket=Ticket(7), positions=(0,), host=hosts(90), host_epoch=0)
    draft.descents.append(
        Descent(id=1, prompt=PROMPT, n_pages=1, reach=Reach.HOST, phase=mirroring)
    )
    agreed = agreed_of(draft)
    assert device_counts(agreed) == Counts(free=5, cached=2, owned=9, reserved=0, draining=2)
    assert host_counts(agreed) == Counts(free=8, cached=2, owned=2, reserved=3, draining=1)
    assert is_conserved(Counts(free=1, cached=2, owned=4, reserved=8, draining=16), 31)
    assert not is_conserved(Counts(free=1, cached=2, owned=4, reserved=8, draining=16), 30)


def _plan() -> Plan:
    return Plan(bounds=Bounds(device=0, shared=0, host=0, storage=0), n_pages=1, promise=0)


def _retracted(kind: type[Retracted] | type[Resuming]) -> Phase:
    return kind(
        plan=_plan(),
        n_pages_pinned=0,
        tail_device=DeviceHandle(60),
        tail_host=hosts(60)[0],
        tail_copy=None,
    )


def test_ranks_have_to_agree_while_something_waits_or_moves() -> None:
    idle = agreed_at_start(POLICY, Switch.ON)
    assert not is_under_way(idle)
    draft = draft_of()
    request = wait(draft, "A", PROMPT)
    waiting = evolve(agreed_of(draft), tickets={})
    assert is_under_way(waiting)
    for kind, under_way in ((Retracted, False), (Resuming, True)):
        draft.put_phase(request.attempt, _retracted(kind))
        assert is_under_way(evolve(agreed_of(draft), tickets={})) is under_way
    assert is_under_way(evolve(idle, tickets=draft.tickets))
    assert is_under_way(evolve(idle, growths=(Growth(attempt=Attempt(1), n_pages=1, deadline=1),)))
    due = Descent(id=1, prompt=PROMPT, n_pages=1, reach=Reach.HOST, phase=Due())
    assert is_under_way(evolve(idle, descents=(due,)))
    assert is_under_way(evolve(idle, drains=(None,)))  # type: ignore[arg-type]


def test_a_tick_counts_and_keeps_what_it_does_not_decide() -> None:
    draft = draft_of()
    request = wait(draft, "R", PROMPT)
    draft.put_phase(request.attempt, Running(plan=_plan(), lease=Lease(n_shared=0, own=())))
    before = evolve(
        agreed_of(draft),
        tick=4,
        host_epoch=3,
        clock=8,
        storage=Switch.OFF,
        rates=Rates(prefetch_us=3, transfer_us=4),
        growths=(Growth(attempt=request.attempt, n_pages=50, deadline=9),),
        drains=(
            Drain(
                attempt=Attempt(9),
                prompt=PROMPT,
                tickets=(Ticket(70),),
                device=(),
                host=(),
                pin_host_start=0,
                pin_host_stop=0,
            ),
        ),
    )
    after, decision = advance_agreed(before, None, (), POLICY)
    assert after == evolve(before, tick=5)
    assert decision == NOTHING
    after, decision = advance_agreed(before, None, (submit("A", PROMPT),), POLICY)
    assert (after.tick, after.host_epoch, after.storage) == (5, 3, Switch.OFF)
    assert after.digest != before.digest
    assert [type(e).__name__ for e in decision.effects] == ["SendHold"]
