"""Each invariant holds in a state that the core has made, and notices when that state is spoilt."""

from collections.abc import Callable

import pytest
from attrs import evolve

from kvlift.core.adopt import adopt_agreed
from kvlift.core.advance import State, advance_agreed
from kvlift.core.agreed import Agreed, Growth, Kind, Open, agreed_at_start
from kvlift.core.ballot import Verdict
from kvlift.core.canonical import canonical
from kvlift.core.effect import StartRestore
from kvlift.core.hear import hear, order
from kvlift.core.ids import Attempt, DeviceHandle, Rid, Ticket
from kvlift.core.index import Segment
from kvlift.core.invariants import (
    INVARIANTS,
    LOCAL_INVARIANTS,
    breaches,
    local_breaches,
    name_of,
)
from kvlift.core.keys import Namespace
from kvlift.core.landed import LookupAnswered
from kvlift.core.local import Limits, Local
from kvlift.core.observation import Observation
from kvlift.core.phase import Draining, Filling, Outcome, Phase
from kvlift.core.plan import Follow, Plan, Span
from kvlift.core.policy import Policy, Switch
from kvlift.core.prompt import Prompt, token_bytes
from kvlift.core.submission import Submit
from kvlift.core.tier import Tier

POLICY = Policy(n_device_pages=8, n_host_pages=8)
LIMITS = Limits()
PROMPT = Prompt(Namespace(page_tokens=2).digest(), token_bytes([1, 1, 2, 2, 3, 3, 4, 4]), 2)


def opened(first_ticket: int = 1, first_handle: int = 0) -> State:
    """One request that restores a page, reads one, and takes two from its peer."""
    agreed = agreed_at_start(POLICY, Switch.ON)
    ledger = evolve(agreed.ledger, next_device=first_handle, next_host=first_handle)
    agreed = evolve(agreed, next_ticket=first_ticket, ledger=ledger)
    agreed, _, _ = adopt_agreed(agreed, Tier.HOST, PROMPT, 0, 1, POLICY)
    local = Local()
    agreed, local = _ticked(agreed, local, None, Submit(rid=Rid("A"), prompt=PROMPT, peer="p"))
    lookup = next(t for t, known in agreed.tickets.items() if known.kind is Kind.LOOKUP)
    local, _ = hear(local, LIMITS, [LookupAnswered(lookup, 1)], 0)
    verdict = Verdict(
        device_room=8,
        host_room=8,
        rates=agreed.rates,
        n_submissions=0,
        observations=((lookup, Observation(1, 1, 1)),),
    )
    agreed, local = _ticked(agreed, local, verdict)
    return State(agreed=agreed, local=local)


def _ticked(
    agreed: Agreed, local: Local, verdict: Verdict | None, *calls: Submit
) -> tuple[Agreed, Local]:
    agreed, decision = advance_agreed(agreed, verdict, calls, POLICY)
    local, _ = order(local, LIMITS, decision.effects, decision.closed, 0)
    return agreed, local


STATE = opened()
GOOD = STATE.agreed
ONLY = next(iter(GOOD.requests))

GROWTH = Growth(attempt=ONLY, n_pages=1, deadline=9)


def _filling() -> Filling:
    phase = GOOD.requests[ONLY].phase
    assert isinstance(phase, Filling)
    return phase


def _with_phase(phase: Phase) -> Agreed:
    request = evolve(GOOD.requests[ONLY], phase=phase)
    return evolve(GOOD, requests={ONLY: request})


def _with_segment(change: Callable[[Segment], Segment]) -> Agreed:
    key, segment = next(iter(GOOD.index.segments.items()))
    return evolve(GOOD, index=evolve(GOOD.index, segments={key: change(segment)}))


def _with_lease(own: tuple[DeviceHandle, ...]) -> Agreed:
    phase = _filling()
    return _with_phase(evolve(phase, lease=evolve(phase.lease, own=own)))


def _with_plan(change: Callable[[Plan], Plan]) -> Agreed:
    phase = _filling()
    return _with_phase(evolve(phase, plan=change(phase.plan)))


def _with_part_page_twice() -> Agreed:
    phase = _filling()
    parts = tuple(evolve(part, host=part.host * 2) for part in phase.parts)
    return _with_phase(evolve(phase, parts=parts))


SPOILT: dict[str, Callable[[], Agreed]] = {
    "device is conserved": lambda: evolve(GOOD, ledger=evolve(GOOD.ledger, device_live=1)),
    "host is conserved": lambda: evolve(GOOD, ledger=evolve(GOOD.ledger, host_live=5)),
    "counts are right": lambda: evolve(GOOD, index=evolve(GOOD.index, n_host_idle=3)),
    "no device page has two owners": lambda: _with_lease((DeviceHandle(0),) * 4),
    "no host page has two owners": _with_part_page_twice,
    "pins are needed": lambda: _with_segment(lambda s: evolve(s, host_pins=2)),
    "idle pages are nobodys": lambda: _with_segment(lambda s: evolve(s, host_pins=0)),
    "marks have descents": lambda: _with_segment(lambda s: evolve(s, mirroring=True)),
    "the tree is whole": lambda: _with_segment(lambda s: evolve(s, n_children=1)),
    "a name means one living attempt": lambda: evolve(GOOD, attempt_by_rid={}),
    "nothing ended stays": lambda: _with_phase(Draining(outcome=Outcome.DONE)),
    "leases are whole": lambda: _with_lease(()),
    "bounds never cross": lambda: _with_plan(
        lambda plan: evolve(plan, bounds=evolve(plan.bounds, host=7))
    ),
    "every page has one source": lambda: _with_phase(evolve(_filling(), wanted=())),
    "the promise is leased": lambda: _with_plan(lambda plan: evolve(plan, promise=4)),
    "nothing arrives unasked": lambda: _with_phase(evolve(_filling(), n_arrived=9)),
    "followers have a leader": lambda: _with_phase(
        evolve(_filling(), follow=Follow(leader=9, stop=1))
    ),
    "growths are of running requests": lambda: evolve(GOOD, growths=(GROWTH,)),
    "open tickets are waited for": lambda: evolve(
        GOOD, tickets={**GOOD.tickets, Ticket(99): Open(Kind.READ, ONLY, 1)}
    ),
}


def test_a_state_that_the_core_made_breaks_nothing() -> None:
    assert _filling().parts[0].stop == 1
    assert _filling().wanted == (Span(2, 4),)
    assert breaches(GOOD) == ()
    assert local_breaches(GOOD, STATE.local, LIMITS) == ()


def test_every_invariant_has_its_spoilt_state() -> None:
    assert set(SPOILT) == {name_of(invariant) for invariant in INVARIANTS}


@pytest.mark.parametrize("name", SPOILT)
def test_a_spoilt_state_is_noticed(name: str) -> None:
    assert name in {breach.name for breach in breaches(SPOILT[name]())}


def _local_spoilt(name: str) -> Local:
    local = STATE.local
    read = next(t for t, watch in local.watches.items() if watch.kind is Kind.READ)
    watch = local.watches[read]
    match name:
        case "watched tickets are open":
            return evolve(local, watches={})
        case "no more in flight than allowed":
            return evolve(local, n_in_flight={Kind.READ: 3})
        case "a restore waits for its read":
            return evolve(local, watches={**local.watches, read: evolve(watch, has_ended=True)})
        case _:
            stray = StartRestore(ticket=Ticket(77), host=(), device=())
            return evolve(local, parked=(stray,))


@pytest.mark.parametrize("name", [name_of(invariant) for invariant in LOCAL_INVARIANTS])
def test_a_spoilt_rank_is_noticed(name: str) -> None:
    found = local_breaches(GOOD, _local_spoilt(name), LIMITS)
    assert name in {breach.name for breach in found}


def test_every_invariant_says_what_it_means() -> None:
    for invariant in (*INVARIANTS, *LOCAL_INVARIANTS):
        assert (invariant.__doc__ or "").strip().endswith(".")


def test_names_and_counters_do_not_matter() -> None:
    later = opened(first_ticket=40, first_handle=100)
    assert later.agreed.tickets.keys() != GOOD.tickets.keys()
    later = evolve(later, agreed=evolve(later.agreed, tick=99, digest=bytes(range(16))))
    assert canonical(later, POLICY) == canonical(STATE, POLICY)


def test_what_the_core_sees_does_matter() -> None:
    for spoilt in SPOILT.values():
        other = evolve(STATE, agreed=spoilt())
        if other.agreed.index.n_host_idle != GOOD.index.n_host_idle:
            continue  # a count that follows from the segments
        assert canonical(other, POLICY) != canonical(STATE, POLICY)


def test_a_second_attempt_is_not_the_first() -> None:
    agreed = evolve(GOOD, attempt_by_rid={Rid("B"): Attempt(ONLY)})
    assert canonical(evolve(STATE, agreed=agreed), POLICY) != canonical(STATE, POLICY)
