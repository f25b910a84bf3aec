"""The vector, integer by integer."""

from hashlib import blake2b

import pytest
from attrs import evolve

from kvlift.core.agreed import Kind, Open, Rates
from kvlift.core.ballot import (
    BIG,
    N_HEADER,
    RankFailed,
    RanksDiverged,
    Room,
    ballot_length,
    body_of,
    digest_of_requests,
    first_difference,
    from_wire,
    header_of,
    proofs,
    slots,
    to_wire,
)
from kvlift.core.ids import Attempt, Rid, Ticket
from kvlift.core.observation import Observation
from tests.core.test_ballot import POLICY, REQUEST, _agreed

ROOM = Room(device=10, host=5)
HEADER = {"room": ROOM, "rates": Rates(), "is_healthy": True, "n_submissions": 0}


def test_the_header_has_each_proof_twice_and_then_what_the_poorest_decides() -> None:
    rates = Rates(prefetch_us=3, transfer_us=4)
    assert header_of((7, 1, 5, 9), room=ROOM, rates=rates, is_healthy=False, n_submissions=2) == (
        7,
        -7,
        1,
        -1,
        5,
        -5,
        9,
        -9,
        10,
        5,
        -3,
        4,
        0,
        2,
    )
    plain = header_of((7, 1, 5, 9), room=ROOM, rates=Rates(), is_healthy=True, n_submissions=0)
    assert plain[-4:] == (0, BIG, 1, 0)
    assert len(plain) == N_HEADER


def test_slots_that_are_not_in_use_are_zero() -> None:
    seen = (Observation(1, 0, 3), Observation(2, 1, -1))
    body = body_of(seen, POLICY)
    assert body == (1, 0, 3, 2, 1, -1, *[0] * (3 * (POLICY.ballot_slots - 2)))
    assert len(body) + N_HEADER == ballot_length(POLICY)
    assert len(body_of((Observation(1, 1, 1),) * 8, POLICY)) == len(body)


def test_proofs_are_numbers_of_62_bits() -> None:
    agreed = _agreed(0, tick=3, digest=bytes([255] * 8 + [1] * 8))
    tick, schema, requests, state = proofs(agreed)
    assert (tick, schema) == (3, 1)
    assert requests == digest_of_requests(agreed)
    assert state == (2**64 - 1) % BIG == BIG - 1
    assert proofs(evolve(agreed, digest=bytes([1] + [0] * 15)))[3] == 1
    assert proofs(evolve(agreed, digest=bytes([0] * 7 + [1] + [0] * 8)))[3] == 2**56
    named = _agreed(0, requests={REQUEST.attempt: REQUEST})
    assert 0 <= digest_of_requests(named) < BIG
    assert digest_of_requests(named) != requests
    second = evolve(REQUEST, rid=Rid("B"), attempt=Attempt(2))
    two = _agreed(0, requests={REQUEST.attempt: REQUEST, second.attempt: second})
    eight = blake2b(b"1:A\x002:B", digest_size=8).digest()
    assert digest_of_requests(two) == int.from_bytes(eight, "little") % BIG


def test_the_first_proof_that_differs_is_named() -> None:
    same = header_of((7, 1, 5, 9), **HEADER)  # type: ignore[arg-type]
    assert first_difference(same) is None
    for at, name in enumerate(("tick", "schema", "requests", "state")):
        for place in (2 * at, 2 * at + 1):
            differs = (*same[:place], same[place] - 1, *same[place + 1 :])
            assert first_difference(differs) == name


def test_only_news_are_in_a_verdict() -> None:
    agreed = _agreed(4)
    tickets = {
        **agreed.tickets,
        Ticket(1): Open(Kind.READ, 1, 9, progress=2, ceiling=9),
        Ticket(2): Open(Kind.READ, 1, 9, progress=2, ceiling=9),
    }
    agreed = evolve(agreed, tickets=tickets)
    seen = (Observation(2, 0, 9), Observation(2, 1, 9), Observation(0, 0, 8), Observation(1, 0, 9))
    ballot = to_wire(proofs(agreed), POLICY, seen=seen, **HEADER)  # type: ignore[arg-type]
    verdict = from_wire(ballot, agreed, POLICY)
    assert verdict.observations == tuple((Ticket(n), seen[n - 1]) for n in (2, 3, 4))
    assert (verdict.device_room, verdict.host_room, verdict.rates) == (10, 5, Rates())


def test_a_ballot_of_another_tick_or_length_says_what_is_wrong() -> None:
    agreed = _agreed(0, tick=7)
    ballot = to_wire(proofs(agreed), POLICY, seen=(), **HEADER)  # type: ignore[arg-type]
    with pytest.raises(RanksDiverged) as error:
        from_wire(ballot, evolve(agreed, tick=8), POLICY)
    assert str(error.value) == (
        "ranks differ in 'tick' at tick 8: the ballots speak of tick 7: carry the answers to the"
        " last orders"
    )
    assert (error.value.field, error.value.tick) == ("tick", 8)
    with pytest.raises(RanksDiverged) as error:
        from_wire(ballot[:-1], agreed, POLICY)
    assert str(error.value) == (
        f"ranks differ in 'length' at tick 7: {len(ballot) - 1} integers came back"
    )
    assert str(RanksDiverged("state", 4)) == "ranks differ in 'state' at tick 4"
    assert str(RankFailed(4)) == "a rank reported a failure of its own at tick 4"
    assert RankFailed(4).tick == 4


def test_more_tickets_than_slots_take_turns_by_tick() -> None:
    agreed = _agreed(10)
    assert slots(agreed, POLICY) == tuple(range(1, 9))
    assert slots(evolve(agreed, tick=1), POLICY) == (9, 10, 1, 2, 3, 4, 5, 6)
    assert slots(evolve(agreed, tick=2), POLICY) == (7, 8, 9, 10, 1, 2, 3, 4)
    assert slots(_agreed(8, tick=5), POLICY) == tuple(range(1, 9)), "all fit: in their order"
    assert slots(_agreed(3, tick=5), POLICY) == (1, 2, 3)
