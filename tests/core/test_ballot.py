"""One MIN reduction: its laws, its proofs, its slots."""

import itertools
from typing import Any

import pytest
from attrs import evolve

from kvlift.core.agreed import Agreed, Kind, Open, Rates, Request, agreed_at_start
from kvlift.core.ballot import (
    PAIRS,
    RankFailed,
    RanksDiverged,
    Room,
    Verdict,
    ballot_length,
    from_wire,
    proofs,
    slots,
    to_wire,
)
from kvlift.core.ids import Attempt, Rid, Ticket
from kvlift.core.observation import Observation, both, is_one_token, of_token
from kvlift.core.phase import Waiting
from kvlift.core.policy import Policy, Switch
from kvlift.core.prompt import Prompt

POLICY = Policy(ballot_slots=8)
SMALL = [Observation(*numbers) for numbers in itertools.product((0, 1, 3), (0, 1), (-2, 0, 3))]


def _agreed(n_tickets: int, **fields: Any) -> Agreed:
    tickets = {Ticket(n): Open(Kind.READ, 1, 9, ceiling=9) for n in range(1, n_tickets + 1)}
    return evolve(agreed_at_start(POLICY, Switch.ON), tickets=tickets, **fields)


def _ballot(agreed: Agreed, seen: tuple[Observation, ...], **fields: Any) -> tuple[int, ...]:
    said: dict[str, Any] = {
        "room": Room(device=10, host=5),
        "rates": Rates(),
        "is_healthy": True,
        "n_submissions": 0,
    }
    return to_wire(proofs(agreed), POLICY, seen=seen, **{**said, **fields})


def _least(*ballots: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(min(numbers) for numbers in zip(*ballots, strict=True))


def test_two_observations_make_one_in_any_order_and_grouping() -> None:
    for one, other in itertools.product(SMALL, SMALL):
        assert both(one, other) == both(other, one)
        assert both(one, one) == one
        for third in SMALL:
            assert both(one, both(other, third)) == both(both(one, other), third)


def test_what_two_ranks_see_becomes_what_both_agree_to() -> None:
    agreed = _agreed(3)
    mine = (Observation(4, 1, 4), Observation(2, 0, 9), Observation(9, 1, 9))
    theirs = (Observation(9, 1, 9), Observation(3, 0, -1), Observation(9, 1, 9))
    verdict = from_wire(_least(_ballot(agreed, mine), _ballot(agreed, theirs)), agreed, POLICY)
    assert verdict.observations == tuple(
        (Ticket(n), both(a, b)) for n, (a, b) in enumerate(zip(mine, theirs, strict=True), 1)
    )


def test_the_poorest_rank_decides_about_room_the_slowest_store_and_the_fastest_peer() -> None:
    agreed = _agreed(0)
    rich = _ballot(agreed, (), room=Room(device=10, host=0), rates=Rates(prefetch_us=3))
    poor = _ballot(
        agreed, (), room=Room(device=4, host=7), rates=Rates(prefetch_us=8, transfer_us=5)
    )
    assert from_wire(_least(rich, poor), agreed, POLICY) == Verdict(
        device_room=4,
        host_room=0,
        rates=Rates(prefetch_us=8, transfer_us=5),
        n_submissions=0,
        observations=(),
    )


def test_all_ballots_of_a_policy_have_one_length() -> None:
    for n_tickets in (0, 1, 8, 30):
        agreed = _agreed(n_tickets)
        seen = tuple(Observation(0, 0, 9) for _ in slots(agreed, POLICY))
        assert len(_ballot(agreed, seen)) == ballot_length(POLICY)


REQUEST = Request(
    rid=Rid("A"),
    attempt=Attempt(1),
    prompt=Prompt(bytes(32), bytes(16), 4),
    n_tokens_prompt=4,
    peer="p",
    priority=0,
    n_pages_output=0,
    hold=Ticket(1),
    phase=Waiting(stored_start=0, stored_stop=0, n_lookups=0),
)


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("tick", _agreed(0, tick=1)),
        ("requests", _agreed(0, requests={Attempt(1): REQUEST})),
        ("state", _agreed(0, digest=b"x" * 16)),
    ],
)
def test_ranks_that_mean_different_things_are_told_what_differs(field: str, other: Agreed) -> None:
    agreed = _agreed(0)
    least = _least(_ballot(agreed, ()), _ballot(other, ()))
    for mine in (agreed, other):
        with pytest.raises(RanksDiverged) as error:
            from_wire(least, mine, POLICY)
        assert error.value.field == field
        assert field in str(error.value)


def test_ballots_that_answer_earlier_orders_are_refused() -> None:
    late = _ballot(_agreed(2, tick=3), ())
    with pytest.raises(RanksDiverged, match="speak of tick 3: carry the answers to the last"):
        from_wire(_least(late, late), _agreed(2, tick=4), POLICY)


def test_every_proof_is_seen_alone() -> None:
    agreed = _agreed(0)
    ballot = _ballot(agreed, ())
    for at, name in enumerate(PAIRS):
        value = ballot[2 * at] + 1
        other = (*ballot[: 2 * at], value, -value, *ballot[2 * at + 2 :])
        with pytest.raises(RanksDiverged) as error:
            from_wire(_least(ballot, other), agreed, POLICY)
        assert error.value.field == name


def test_the_same_requests_in_another_attempt_or_order_differ() -> None:
    second = evolve(REQUEST, rid=Rid("B"), attempt=Attempt(2))
    one = _agreed(0, requests={Attempt(1): REQUEST, Attempt(2): second})
    turned = _agreed(0, requests={Attempt(2): second, Attempt(1): REQUEST})
    again = _agreed(0, requests={Attempt(3): evolve(REQUEST, attempt=Attempt(3))})
    alone = _agreed(0, requests={Attempt(1): REQUEST})
    assert len({proofs(agreed) for agreed in (one, turned, again, alone)}) == 4


def test_a_rank_with_an_error_of_its_own_fails_the_group() -> None:
    agreed = _agreed(0, tick=7)
    with pytest.raises(RankFailed, match="at tick 7"):
        from_wire(
            _least(_ballot(agreed, ()), _ballot(agreed, (), is_healthy=False)), agreed, POLICY
        )


def test_a_vector_of_another_length_is_a_divergence() -> None:
    agreed = _agreed(0)
    with pytest.raises(RanksDiverged, match="length"):
        from_wire(_ballot(agreed, ())[:-1], agreed, POLICY)


@pytest.mark.parametrize("n_tickets", [1, 8, 9, 12, 16, 17, 100])
def test_every_ticket_has_its_turn(n_tickets: int) -> None:
    agreed = _agreed(n_tickets)
    n_rounds = -(-n_tickets // POLICY.ballot_slots)
    for start in range(20):
        seen = [slots(evolve(agreed, tick=start + n), POLICY) for n in range(2 * n_rounds)]
        assert {ticket for turn in seen for ticket in turn} == set(agreed.tickets)
        assert all(len(set(turn)) == len(turn) <= POLICY.ballot_slots for turn in seen)


def test_one_token_is_one_token() -> None:
    for one, other in itertools.product((0, 1, 2**31 - 1), repeat=2):
        assert is_one_token(both(of_token(one), of_token(other))) == (one == other)


def test_a_token_is_one_more_than_its_number_up_and_down() -> None:
    assert of_token(5) == Observation(progress=6, ended=1, ceiling=-6)
