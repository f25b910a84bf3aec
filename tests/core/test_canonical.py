"""New names: which ones, for what, and that nothing else is changed by them."""

from collections.abc import Callable

import pytest
from attrs import evolve

from kvlift.core.advance import State
from kvlift.core.agreed import Agreed, Growth, Kind, Open, Rates
from kvlift.core.canonical import (
    Name,
    Naming,
    agreed_key,
    canonical,
    local_key,
    naming_of,
    renamed_agreed,
    renamed_local,
)
from kvlift.core.descent import Descent, Mirroring, Reach
from kvlift.core.ids import Attempt, DeviceHandle, HostHandle, Rid, Ticket
from kvlift.core.index import Index
from kvlift.core.local import Local, Watch
from kvlift.core.phase import Filling
from kvlift.core.plan import Follow
from kvlift.core.policy import Policy, Switch
from tests.core.test_invariants import GOOD, ONLY, POLICY, STATE, opened

COSTLY = evolve(POLICY, cost_model=Switch.ON)
LATE = opened(first_ticket=40, first_handle=100)


def _descent(number: int) -> Descent:
    mirroring = Mirroring(ticket=Ticket(41), positions=(0,), host=(HostHandle(100),), host_epoch=7)
    return Descent(
        id=number, prompt=GOOD.requests[ONLY].prompt, n_pages=1, reach=Reach.BOTH, phase=mirroring
    )


def _spread(state: State) -> State:
    """The same situation after a longer past: instants, segments and flushes have other numbers."""
    agreed = state.agreed
    segments = {
        10 + key: evolve(s, id=10 + s.id, used=s.used + 70, born=s.born + 70)
        for key, s in agreed.index.segments.items()
    }
    index = evolve(
        agreed.index,
        segments=segments,
        child_by_key={k: 10 + child for k, child in agreed.index.child_by_key.items()},
        next_id=agreed.index.next_id + 10,
    )
    phase = agreed.requests[ONLY].phase
    assert isinstance(phase, Filling)
    parts = tuple(evolve(part, host_epoch=9) for part in phase.parts)
    request = evolve(agreed.requests[ONLY], phase=evolve(phase, parts=parts))
    after = evolve(
        agreed, index=index, clock=agreed.clock + 70, host_epoch=9, requests={ONLY: request}
    )
    return evolve(state, agreed=after)


def test_names_are_numbered_from_one_in_their_order() -> None:
    naming = naming_of(_spread(LATE).agreed)
    assert naming.names[Name.TICKET] == {
        old: new for new, old in enumerate(sorted(LATE.agreed.tickets), 1)
    }
    assert naming.names[Name.SEGMENT] == {10 + s: 1 for s in LATE.agreed.index.segments}
    assert naming.names[Name.EPOCH] == {9: 1}
    assert not naming.is_identity
    assert set(naming.names[Name.ATTEMPT].values()) == {1}
    n_device = len(naming.names[Name.DEVICE])
    assert sorted(naming.names[Name.DEVICE].values()) == list(range(1, 1 + n_device))
    assert min(naming.names[Name.DEVICE]) >= 100
    assert naming.names[Name.HOST] == {101: 1, 100: 2}, "as they are met: the core never compares"


def test_a_longer_past_does_not_matter() -> None:
    assert canonical(_spread(STATE), POLICY) == canonical(STATE, POLICY)
    assert canonical(_spread(LATE), POLICY) == canonical(STATE, POLICY)


def test_what_has_been_renamed_is_renamed_to_itself() -> None:
    naming = naming_of(LATE.agreed)
    once = renamed_agreed(LATE.agreed, naming, POLICY)
    again = naming_of(once)
    assert again.is_identity
    assert renamed_agreed(once, again, POLICY) == once
    local = renamed_local(LATE.local, naming, POLICY, 5)
    assert renamed_local(local, again, POLICY, 5) == local
    copy = again.copy()
    assert copy.is_identity
    assert copy.names == again.names
    assert copy.names[0] is not again.names[0]


def test_a_name_that_nobody_gave_is_below_zero_and_stays() -> None:
    naming = Naming([{} for _ in Name])
    assert naming.is_identity is False
    assert [naming(Name.TICKET, old) for old in (7, 9, 7, 3)] == [-1, -2, -1, -3]
    assert naming(Name.HOST, 7) == -1
    naming.names[Name.HOST][8] = 4
    assert naming(Name.HOST, 9) == -2


def test_counters_are_as_low_as_they_can_be() -> None:
    rates = Rates(prefetch_us=5, transfer_us=6)
    growth = Growth(attempt=ONLY, n_pages=1, deadline=12)
    agreed = evolve(
        _spread(LATE).agreed, tick=9, digest=bytes(range(16)), rates=rates, growths=(growth,)
    )
    naming = naming_of(agreed)
    after = renamed_agreed(agreed, naming, POLICY)
    assert (after.tick, after.digest) == (0, bytes(16))
    assert after.next_ticket == 1 + len(agreed.tickets)
    assert after.next_attempt == 2
    assert after.index.next_id == 1 + len(agreed.index.segments)
    assert after.host_epoch == 1
    assert after.growths == (evolve(growth, attempt=Attempt(1), deadline=3),)
    assert after.ledger.next_device == 1 + len(naming.names[Name.DEVICE])
    assert after.ledger.next_host == 1 + len(naming.names[Name.HOST])
    assert after.clock == len(naming.names[Name.INSTANT])
    assert after.rates == Rates()
    assert renamed_agreed(agreed, naming, COSTLY).rates == rates
    empty = Naming([{} for _ in Name], is_identity=True)
    empty.names[Name.EPOCH][9] = 1
    bare = renamed_agreed(agreed, empty, POLICY)
    assert (bare.clock, bare.next_ticket, bare.next_attempt) == (0, 1, 1)
    assert (bare.ledger.next_device, bare.ledger.next_host) == (1, 1)
    assert bare.requests is agreed.requests
    nothing = evolve(GOOD, index=Index())
    assert renamed_agreed(nothing, naming_of(LATE.agreed), POLICY).index.next_id == 1


def test_every_part_of_a_state_gets_its_new_names() -> None:
    agreed = _spread(LATE).agreed
    descents = (_descent(400), _descent(300))
    phase = agreed.requests[ONLY].phase
    assert isinstance(phase, Filling)
    followed = evolve(phase, follow=Follow(leader=Attempt(88), stop=1))
    agreed = evolve(
        agreed,
        descents=descents,
        requests={ONLY: evolve(agreed.requests[ONLY], phase=followed)},
        tickets={**agreed.tickets, Ticket(90): Open(Kind.MIRROR, 300, 1)},
    )
    naming = naming_of(agreed)
    after = renamed_agreed(agreed, naming, POLICY)
    one, other = (descent.id for descent in after.descents)
    assert one == other + 1, "the order of instants stays"
    assert after.tickets[Ticket(naming.names[Name.TICKET][90])].owner == other
    owners = {known.owner for known in after.tickets.values() if known.kind is not Kind.MIRROR}
    assert owners == {1}
    first = after.descents[0].phase
    assert isinstance(first, Mirroring)
    assert first.host_epoch == 1
    assert first.host == (HostHandle(naming.names[Name.HOST][HostHandle(100)]),)
    request = after.requests[Attempt(1)]
    assert isinstance(request.phase, Filling)
    assert request.phase.follow == Follow(leader=Attempt(2), stop=1)
    assert after.attempt_by_rid == {Rid("A"): 1}
    assert request.phase.lease.own == tuple(
        DeviceHandle(naming.names[Name.DEVICE][h]) for h in phase.lease.own
    )


AGREED: dict[str, Callable[[Agreed], Agreed]] = {
    "storage": lambda a: evolve(a, storage=Switch.OFF),
    "host_epoch": lambda a: evolve(a, host_epoch=9),
    "clock": lambda a: evolve(a, clock=99),
    "requests": lambda a: evolve(a, requests={}),
    "attempt_by_rid": lambda a: evolve(a, attempt_by_rid={}),
    "tickets": lambda a: evolve(a, tickets={}),
    "drains": lambda a: evolve(a, drains=(None,)),  # type: ignore[arg-type]
    "descents": lambda a: evolve(a, descents=(_descent(1),)),
    "growths": lambda a: evolve(a, growths=(Growth(attempt=ONLY, n_pages=1, deadline=1),)),
    "index": lambda a: evolve(a, index=evolve(a.index, segments={})),
    "ledger": lambda a: evolve(a, ledger=evolve(a.ledger, host_live=0)),
    "rates": lambda a: evolve(a, rates=Rates(prefetch_us=3, transfer_us=3)),
}


@pytest.mark.parametrize("field", AGREED)
def test_each_field_of_the_agreed_half_is_part_of_its_key(field: str) -> None:
    assert agreed_key(AGREED[field](GOOD)) != agreed_key(GOOD)
    assert agreed_key(evolve(GOOD)) == agreed_key(GOOD)
    hash(agreed_key(GOOD))


LOCAL: dict[str, Callable[[Local], Local]] = {
    "watches": lambda one: evolve(one, watches={}),
    "chains": lambda one: evolve(one, chains={}),
    "parked": lambda one: evolve(one, parked=(None,)),  # type: ignore[arg-type]
    "n_in_flight": lambda one: evolve(one, n_in_flight={Kind.READ: 9}),
    "token_by_hold": lambda one: evolve(one, token_by_hold={}),
    "tokens": lambda one: evolve(one, tokens={Ticket(1): (3, 0.5)}),
    "dismissed": lambda one: evolve(one, dismissed=(Ticket(1),)),
    "rates": lambda one: evolve(one, rates=Rates(prefetch_us=3, transfer_us=3)),
}


@pytest.mark.parametrize("field", LOCAL)
def test_each_field_of_the_local_half_is_part_of_its_key(field: str) -> None:
    assert local_key(LOCAL[field](STATE.local)) != local_key(STATE.local)
    hash(local_key(STATE.local))


def test_the_key_of_a_local_half_has_no_order_that_its_past_gave_it() -> None:
    local = STATE.local
    back = evolve(
        local,
        watches=dict(reversed(list(local.watches.items()))),
        n_in_flight=dict(reversed(list(local.n_in_flight.items()))),
        dismissed=(Ticket(2), Ticket(1)),
    )
    assert local_key(back) == local_key(evolve(local, dismissed=(Ticket(1), Ticket(2))))


def test_what_waits_has_no_age_and_what_is_over_is_gone() -> None:
    hold = next(t for t, watch in STATE.local.watches.items() if watch.kind is Kind.HOLD)
    gone = Ticket(77)
    rates = Rates(prefetch_us=5, transfer_us=6)
    local = evolve(
        STATE.local,
        watches={t: evolve(w, since_ns=3, begun_ns=2) for t, w in STATE.local.watches.items()},
        tokens={hold: (4, 0.5), gone: (5, 0.5)},
        token_by_hold={**STATE.local.token_by_hold, gone: gone},
        reasons={hold: "odd"},
        leaving=(gone,),
        n_stale=4,
        deadline_ns=1,
        rates=rates,
    )
    after = renamed_local(local, naming_of(GOOD), POLICY, 50)
    assert {(w.since_ns, w.begun_ns) for w in after.watches.values()} == {(50, 50)}
    assert list(after.tokens.values()) == [(4, 0.5)]
    assert after.token_by_hold.keys() == STATE.local.token_by_hold.keys()
    assert (dict(after.reasons), after.leaving, after.n_stale) == ({}, (), 0)
    assert after.deadline_ns != 1
    assert after.rates == Rates()
    assert renamed_local(local, naming_of(GOOD), COSTLY, 50).rates == rates


def test_a_watch_that_is_as_young_as_can_be_stays_the_same_object() -> None:
    young = Watch(kind=Kind.HOLD, n_pages=0, ceiling=0, since_ns=7, begun_ns=7)
    old = evolve(young, since_ns=6)
    older = evolve(young, begun_ns=6)
    local = evolve(Local(), watches={Ticket(1): young, Ticket(2): old, Ticket(3): older})
    naming = Naming([{1: 1, 2: 2, 3: 3}, *({} for _ in range(6))], is_identity=True)
    after = renamed_local(local, naming, Policy(n_device_pages=1), 7)
    assert after.watches[Ticket(1)] is young
    assert after.watches[Ticket(2)] == after.watches[Ticket(3)] == young


def test_who_grows_has_its_new_name() -> None:
    growth = Growth(attempt=Attempt(5), n_pages=1, deadline=12)
    agreed = evolve(LATE.agreed, growths=(growth,))
    after = renamed_agreed(agreed, naming_of(agreed), POLICY)
    assert [each.attempt for each in after.growths] == [2]


def test_a_token_stands_under_the_new_name_of_its_conversation() -> None:
    naming = naming_of(LATE.agreed)
    hold = max(LATE.local.watches)
    local = evolve(LATE.local, tokens={hold: (5, -1.0)})
    assert hold != naming.names[Name.TICKET][hold]
    after = renamed_local(local, naming, POLICY, 0)
    assert dict(after.tokens) == {naming.names[Name.TICKET][hold]: (5, -1.0)}
