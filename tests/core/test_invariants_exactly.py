"""What each invariant about requests, tickets and one rank says of a spoilt state, word by word."""

from typing import Any

import pytest
from attrs import evolve

from kvlift.core.agreed import Agreed, Drain, Growth, Kind, Open
from kvlift.core.descent import Descent, DescentPhase, Mirroring, Persisting, Reach, Settled
from kvlift.core.effect import StartRestore
from kvlift.core.ids import NO_TICKET, Attempt, DeviceHandle, HostHandle, Rid, Ticket
from kvlift.core.invariants import (
    Breach,
    a_name_means_one_living_attempt,
    a_restore_waits_for_its_read,
    bounds_never_cross,
    breaches,
    every_page_has_one_source,
    followers_have_a_leader,
    growths_are_of_running_requests,
    leases_are_whole,
    local_breaches,
    name_of,
    no_more_in_flight_than_allowed,
    nothing_arrives_unasked,
    nothing_ended_stays,
    open_tickets_are_waited_for,
    the_promise_is_leased,
    watched_tickets_are_open,
    what_is_parked_will_begin,
)
from kvlift.core.landed import PeerCause
from kvlift.core.local import Chain, Limits, Local, Watch
from kvlift.core.phase import (
    Asking,
    Draining,
    Ended,
    Filling,
    Outcome,
    Phase,
    Ready,
    Resuming,
    Retracted,
    Running,
    Waiting,
)
from kvlift.core.plan import Bounds, Follow, Lease, Part, Plan, Span
from kvlift.core.tier import Source
from tests.core.scenario import prompt_of
from tests.core.test_admission import draft_of, wait
from tests.core.test_invariants_of_pages import agreed_of

PROMPT = prompt_of(1, 2, 3, 4)
OWN = tuple(DeviceHandle(n) for n in range(4))
PLAN = Plan(bounds=Bounds(device=0, shared=0, host=1, storage=2), n_pages=4, promise=2)
RESTORE = Part(source=Source.HOST, start=0, stop=1, n_good=1, copy=Ticket(11))
READING = Part(
    source=Source.STORAGE,
    start=1,
    stop=2,
    n_good=1,
    copy=Ticket(12),
    read=Ticket(13),
    host=(HostHandle(0),),
)
FILL = Filling(
    plan=PLAN,
    lease=Lease(n_shared=0, own=OWN),
    parts=(RESTORE, READING),
    wanted=(Span(2, 4),),
    n_arrived=0,
    token=Ticket(14),
)
FILL_TICKETS = {11: Kind.COPY, 12: Kind.COPY, 13: Kind.READ, 14: Kind.TOKEN}


def state(phase: Phase, *, peer: str = "p", tickets: dict[int, Kind] | None = None) -> Agreed:
    """One request A in that phase, with its hold and these tickets open."""
    draft = draft_of()
    request = evolve(wait(draft, "A", PROMPT), peer=peer)
    draft.requests[request.attempt] = request
    for number, kind in (tickets or {}).items():
        draft.tickets[Ticket(number)] = Open(kind, request.attempt, 1)
    draft.put_phase(request.attempt, phase)
    return agreed_of(draft)


def filled(**fields: Any) -> Agreed:
    return state(evolve(FILL, **fields), tickets=FILL_TICKETS)


def bounded(**fields: int) -> Plan:
    changes: dict[str, Any] = dict(fields)
    return evolve(PLAN, bounds=evolve(PLAN.bounds, **changes))


# Names and ends.


def test_a_name_leads_to_the_attempt_that_lives() -> None:
    agreed = filled()
    assert a_name_means_one_living_attempt(agreed) is None
    assert a_name_means_one_living_attempt(evolve(agreed, attempt_by_rid={})) == (
        "living attempts are {'A': 1}, the names lead to {}"
    )
    drains = state(Draining(outcome=Outcome.DONE))
    assert a_name_means_one_living_attempt(evolve(drains, attempt_by_rid={})) is None
    assert a_name_means_one_living_attempt(drains) is not None


def _drain(*tickets: int) -> Drain:
    return Drain(
        attempt=Attempt(1),
        prompt=PROMPT,
        tickets=tuple(map(Ticket, tickets)),
        device=(),
        host=(),
        pin_host_start=0,
        pin_host_stop=0,
    )


def _descent(phase: DescentPhase) -> Descent:
    return Descent(id=5, prompt=PROMPT, n_pages=1, reach=Reach.BOTH, phase=phase)


def test_nothing_stays_that_has_ended() -> None:
    assert nothing_ended_stays(filled()) is None
    ended = state(Ended(outcome=Outcome.DONE))
    assert nothing_ended_stays(ended) == "attempt 1 has ended and is still here"
    drains = state(Draining(outcome=Outcome.DONE))
    assert nothing_ended_stays(drains) == "attempt 1 drains and nothing of it is held back"
    assert nothing_ended_stays(evolve(drains, drains=(_drain(7),))) is None
    other = evolve(_drain(7), attempt=Attempt(2))
    assert nothing_ended_stays(evolve(drains, drains=(other,))) is not None
    assert nothing_ended_stays(evolve(drains, drains=(_drain(7), _drain()))) == (
        "pages are held back for nothing"
    )
    settled = evolve(filled(), descents=(_descent(Settled()),))
    assert nothing_ended_stays(settled) == "a descent is settled and still here"


# Leases and plans.


@pytest.mark.parametrize("kind", [Filling, Ready, Running])
@pytest.mark.parametrize(("n_shared", "n_own"), [(0, 4), (1, 3), (0, 3), (1, 4), (0, 5)])
def test_a_request_has_a_page_for_each_of_its_prompt(
    kind: type[Filling] | type[Ready] | type[Running], n_shared: int, n_own: int
) -> None:
    lease = Lease(n_shared=n_shared, own=tuple(DeviceHandle(n) for n in range(n_own)))
    phase: Phase = Ready(plan=PLAN, lease=lease)
    if kind is Filling:
        phase = evolve(FILL, lease=lease)
    elif kind is Running:
        phase = Running(plan=PLAN, lease=lease)
    n_held = n_shared + n_own
    is_right = n_held >= 4 if kind is Running else n_held == 4
    said = leases_are_whole(state(phase))
    assert said == (None if is_right else f"A needs 4 pages and holds {lease}")


@pytest.mark.parametrize(
    "fields",
    [{"device": -1}, {"device": 1, "shared": 0}, {"shared": 2}, {"host": 3}, {"storage": 5}],
)
def test_bounds_that_cross_are_found(fields: dict[str, int]) -> None:
    assert bounds_never_cross(filled()) is None
    equal = evolve(PLAN, bounds=Bounds(device=4, shared=4, host=4, storage=4))
    assert bounds_never_cross(filled(plan=equal)) is None
    plan = bounded(**fields)
    assert bounds_never_cross(filled(plan=plan)) == f"A has bounds {plan.bounds} in 4 pages"


def test_every_page_of_a_request_has_one_source() -> None:
    assert every_page_has_one_source(filled()) is None
    gap = filled(wanted=(Span(3, 4),))
    assert every_page_has_one_source(gap) == (
        "A: nothing brings the pages (Span(start=2, stop=3),)"
    )
    gone = filled(wanted=(Span(3, 4),), peer_gone=PeerCause.GONE)
    assert every_page_has_one_source(gone) is None
    twice = every_page_has_one_source(filled(wanted=(Span(1, 4),)))
    assert twice is not None
    assert twice.startswith("A: a page has two sources among [Span(start=0, stop=0), ")
    follow = Follow(leader=9, stop=1)
    followed = filled(parts=(READING,), follow=follow)
    assert every_page_has_one_source(followed) is None
    assert every_page_has_one_source(filled(follow=follow)) is not None


def test_a_part_that_has_ended_brings_what_has_landed_and_is_good() -> None:
    for n_landed, n_good, whole in ((1, 1, True), (0, 1, False), (1, 0, False)):
        over = evolve(RESTORE, copy=None, n_landed=n_landed, n_good=n_good)
        said = every_page_has_one_source(filled(parts=(over, READING)))
        assert (said is None) is whole
    running = evolve(RESTORE, n_good=0)
    assert every_page_has_one_source(filled(parts=(running, READING))) is None


def test_shared_pages_are_no_part_any_more() -> None:
    lease = Lease(n_shared=1, own=OWN[1:])
    assert every_page_has_one_source(filled(lease=lease)) is None
    assert every_page_has_one_source(filled(lease=lease, parts=(READING,))) is None
    wants = filled(lease=lease, parts=(READING,), wanted=(Span(0, 1), Span(2, 4)))
    assert every_page_has_one_source(wants) is None


def test_what_is_computed_again_has_no_source() -> None:
    plan = evolve(PLAN, rest=Source.RECOMPUTE)
    assert every_page_has_one_source(filled(plan=plan, wanted=())) is None
    assert every_page_has_one_source(filled(plan=plan, wanted=(), parts=(RESTORE,))) == (
        "A: nothing brings the pages (Span(start=1, stop=2),)"
    )
    assert every_page_has_one_source(filled(plan=plan, wanted=(), parts=(READING,))) == (
        "A: nothing brings the pages (Span(start=0, stop=1),)"
    )
    twice = filled(plan=plan, wanted=(), parts=(RESTORE, RESTORE, READING))
    said = every_page_has_one_source(twice)
    assert said is not None
    assert said.startswith("A: a page has two sources among ")
    gone = filled(peer_gone=PeerCause.GONE, parts=(READING, READING))
    assert every_page_has_one_source(gone) is not None, "a gap does not make up for it"


def test_a_promise_is_leased_or_still_under_a_copy() -> None:
    assert the_promise_is_leased(filled()) is None
    more = evolve(PLAN, promise=3)
    assert the_promise_is_leased(filled(plan=more)) == (
        "A: (Span(start=2, stop=3),) were promised and nobody brings them"
    )
    assert the_promise_is_leased(filled(plan=evolve(more, rest=Source.RECOMPUTE))) is None
    assert the_promise_is_leased(filled(plan=more, peer_gone=PeerCause.GONE)) is None
    first, second = filled(plan=evolve(more, rest=Source.RECOMPUTE)), filled(plan=more)
    (exempt,), (broken,) = first.requests.values(), second.requests.values()
    both = evolve(first, requests={exempt.attempt: exempt, Attempt(exempt.attempt + 1): broken})
    assert the_promise_is_leased(both) is not None
    shorter = evolve(PLAN, bounds=evolve(PLAN.bounds, storage=1))
    assert the_promise_is_leased(filled(plan=shorter)) is None, "its copy still runs"


@pytest.mark.parametrize("n_arrived", [-1, 0, 2, 3])
def test_no_more_arrives_than_was_asked_for(n_arrived: int) -> None:
    said = nothing_arrives_unasked(filled(n_arrived=n_arrived))
    wrong = f"A asked for {FILL.wanted} and counts {n_arrived}"
    assert said == (None if n_arrived in (0, 2) else wrong)


def test_a_follower_needs_a_leader_that_brings_something() -> None:
    draft = draft_of()
    leader = wait(draft, "A", PROMPT)
    draft.put_phase(leader.attempt, FILL)
    follower = wait(draft, "B", PROMPT)

    def said(leads: int, stop: int, n_shared: int) -> str | None:
        lease = Lease(n_shared=n_shared, own=OWN[n_shared:])
        phase = evolve(FILL, follow=Follow(leader=leads, stop=stop), lease=lease)
        draft.put_phase(follower.attempt, phase)
        return followers_have_a_leader(agreed_of(draft))

    assert said(leader.attempt, 2, 1) is None
    assert said(77, 2, 1) == "B follows attempt 77, which brings nothing"
    assert said(leader.attempt, 1, 1) == "B follows for pages that it has"
    assert said(leader.attempt, 1, 2) == "B follows for pages that it has"
    draft.put_phase(leader.attempt, Ready(plan=PLAN, lease=FILL.lease))
    assert said(leader.attempt, 2, 1) == "B follows attempt 1, which brings nothing"


def test_only_running_requests_grow() -> None:
    growth = Growth(attempt=Attempt(1), n_pages=1, deadline=1)
    running = state(Running(plan=PLAN, lease=FILL.lease))
    assert growths_are_of_running_requests(evolve(running, growths=(growth,))) is None
    wrong = "attempt {} grows and does not run"
    assert growths_are_of_running_requests(evolve(filled(), growths=(growth,))) == wrong.format(1)
    lost = evolve(growth, attempt=Attempt(7))
    assert growths_are_of_running_requests(evolve(running, growths=(lost,))) == wrong.format(7)


# Tickets.


TAIL: dict[str, Any] = {"tail_device": None, "tail_host": None, "tail_copy": Ticket(15)}
NEEDED: list[tuple[Phase, dict[int, Kind]]] = [
    (Asking(lookup=Ticket(10), start=0, n_lookups=1), {10: Kind.LOOKUP, 1: Kind.HOLD}),
    (Waiting(stored_start=0, stored_stop=0, n_lookups=0), {1: Kind.HOLD}),
    (FILL, {**FILL_TICKETS, 1: Kind.HOLD}),
    (Retracted(plan=PLAN, n_pages_pinned=0, **TAIL), {15: Kind.TAIL}),
    (Resuming(plan=PLAN, n_pages_pinned=0, **TAIL), {15: Kind.TAIL}),
    (Ready(plan=PLAN, lease=FILL.lease), {}),
]


@pytest.mark.parametrize(("phase", "needed"), NEEDED, ids=lambda one: type(one).__name__)
def test_whatever_is_waited_for_is_open_and_of_its_kind(
    phase: Phase, needed: dict[int, Kind]
) -> None:
    agreed = state(phase, tickets={n: kind for n, kind in needed.items() if n != 1})
    assert open_tickets_are_waited_for(agreed) is None
    for number, kind in needed.items():
        left = {t: known for t, known in agreed.tickets.items() if t != number}
        assert open_tickets_are_waited_for(evolve(agreed, tickets=left)) == (
            f"ticket {number} ({kind.value}) is waited for and closed"
        )
        other = Kind.PERSIST
        wrong = {**agreed.tickets, Ticket(number): Open(other, 1, 1)}
        assert open_tickets_are_waited_for(evolve(agreed, tickets=wrong)) == (
            f"ticket {number} is a persist, not a {kind.value}"
        )
    stray = {**agreed.tickets, Ticket(99): Open(Kind.READ, 1, 1)}
    assert open_tickets_are_waited_for(evolve(agreed, tickets=stray)) == (
        "ticket 99 (read) is open and nobody waits for it"
    )


def test_who_has_no_peer_or_needs_it_no_more_waits_for_no_conversation() -> None:
    alone = (
        Asking(lookup=Ticket(10), start=0, n_lookups=1),
        Waiting(stored_start=0, stored_stop=0, n_lookups=0),
        evolve(FILL, plan=evolve(PLAN, rest=Source.RECOMPUTE)),
    )
    for phase in alone:
        tickets = {10: Kind.LOOKUP} if isinstance(phase, Asking) else {}
        agreed = state(phase, peer="", tickets=tickets or dict(FILL_TICKETS))
        if isinstance(phase, Waiting):
            agreed = state(phase, peer="")
        left = {t: known for t, known in agreed.tickets.items() if t != 1}
        request = evolve(agreed.requests[Attempt(1)], hold=NO_TICKET)
        agreed = evolve(agreed, tickets=left, requests={Attempt(1): request})
        assert open_tickets_are_waited_for(agreed) is None
    gone = filled(peer_gone=PeerCause.GONE)
    left = {t: known for t, known in gone.tickets.items() if t != 1}
    assert open_tickets_are_waited_for(evolve(gone, tickets=left)) is None


@pytest.mark.parametrize(
    ("phase", "kind"),
    [
        (Mirroring(ticket=Ticket(20), positions=(0,), host=(), host_epoch=0), Kind.MIRROR),
        (Persisting(ticket=Ticket(20), positions=(0,), from_host=True), Kind.PERSIST),
    ],
)
def test_ways_down_wait_for_their_copies(phase: DescentPhase, kind: Kind) -> None:
    agreed = evolve(filled(), descents=(_descent(phase),))
    assert open_tickets_are_waited_for(agreed) == (
        f"ticket 20 ({kind.value}) is waited for and closed"
    )
    tickets = {**agreed.tickets, Ticket(20): Open(kind, 5, 1)}
    assert open_tickets_are_waited_for(evolve(agreed, tickets=tickets)) is None
    assert open_tickets_are_waited_for(evolve(agreed, tickets=tickets, descents=())) is not None


@pytest.mark.parametrize("kind", list(Kind))
def test_held_pages_wait_for_whatever_may_touch_them(kind: Kind) -> None:
    agreed = evolve(filled(), drains=(_drain(20),))
    tickets = {**agreed.tickets, Ticket(20): Open(kind, 1, 1)}
    may = kind in (Kind.READ, Kind.COPY, Kind.HOLD, Kind.TAIL)
    said = open_tickets_are_waited_for(evolve(agreed, tickets=tickets))
    assert said == (None if may else f"ticket 20 is a {kind.value}, not a read")


# One rank.


LIMITS = Limits(restores_in_flight_max=1)
BEGUN = Watch(kind=Kind.COPY, n_pages=1, ceiling=1)
PARKED = evolve(BEGUN, has_begun=False)
EFFECT = StartRestore(ticket=Ticket(2), host=(), device=())


def rank(**fields: Any) -> Local:
    return evolve(Local(), **fields)


def test_a_rank_watches_what_is_open() -> None:
    agreed = evolve(filled(), tickets={Ticket(2): Open(Kind.COPY, 1, 1)})
    local = rank(watches={Ticket(2): BEGUN})
    assert watched_tickets_are_open(agreed, local, LIMITS) is None
    assert watched_tickets_are_open(agreed, Local(), LIMITS) == (
        "open are [2], this rank watches []"
    )


def test_what_is_in_flight_is_counted_and_limited() -> None:
    agreed = filled()
    one = rank(watches={Ticket(2): BEGUN}, n_in_flight={Kind.COPY: 1, Kind.READ: 0})
    assert no_more_in_flight_than_allowed(agreed, one, LIMITS) is None
    for watch in (PARKED, evolve(BEGUN, has_ended=True), evolve(BEGUN, kind=Kind.LOOKUP)):
        none = rank(watches={Ticket(2): watch}, n_in_flight={Kind.COPY: 0})
        assert no_more_in_flight_than_allowed(agreed, none, LIMITS) is None
        assert no_more_in_flight_than_allowed(agreed, evolve(one, watches=none.watches), LIMITS)
    two = rank(watches={Ticket(2): BEGUN, Ticket(3): BEGUN}, n_in_flight={Kind.COPY: 2})
    assert no_more_in_flight_than_allowed(agreed, two, LIMITS) == (
        "2 of copy are in flight, 1 are allowed"
    )
    assert no_more_in_flight_than_allowed(agreed, Local(), LIMITS) is None


def test_what_is_parked_has_not_begun_and_waits_for_its_turn() -> None:
    agreed = filled()
    full = {Kind.COPY: 1}
    right = rank(watches={Ticket(2): PARKED}, parked=(EFFECT,), n_in_flight=full)
    assert what_is_parked_will_begin(agreed, right, LIMITS) is None
    for watch in (BEGUN, evolve(PARKED, has_ended=True), evolve(BEGUN, has_ended=True)):
        wrong = evolve(right, watches={Ticket(2): watch})
        assert what_is_parked_will_begin(agreed, wrong, LIMITS) == (
            f"ticket 2 is parked, and this rank knows it as {watch}"
        )
    assert what_is_parked_will_begin(agreed, evolve(right, watches={}), LIMITS) == (
        "ticket 2 is parked, and this rank knows it as None"
    )
    for free in ({}, {Kind.COPY: 0}):
        idle = evolve(right, n_in_flight=free)
        assert what_is_parked_will_begin(agreed, idle, LIMITS) == (
            "ticket 2 is parked although its turn has come"
        )


def test_a_restore_behind_a_read_waits_while_the_read_runs() -> None:
    agreed = filled()
    reading = evolve(BEGUN, kind=Kind.READ)
    chain = Chain(read=Ticket(1), host=(), device=())
    known: dict[str, Any] = {"restore_by_read": {Ticket(1): Ticket(2)}}
    right = rank(
        watches={Ticket(1): reading, Ticket(2): PARKED}, chains={Ticket(2): chain}, **known
    )
    assert a_restore_waits_for_its_read(agreed, right, LIMITS) is None
    over = "ticket 2 waits for read 1, which is over"
    ended = {Ticket(1): evolve(reading, has_ended=True), Ticket(2): PARKED}
    assert a_restore_waits_for_its_read(agreed, evolve(right, watches=ended), LIMITS) == over
    lost = evolve(right, watches={Ticket(2): PARKED})
    assert a_restore_waits_for_its_read(agreed, lost, LIMITS) == over
    for behind in (None, BEGUN, evolve(PARKED, has_ended=True)):
        watches = {Ticket(1): reading} | ({} if behind is None else {Ticket(2): behind})
        said = a_restore_waits_for_its_read(agreed, evolve(right, watches=watches), LIMITS)
        assert said == f"ticket 2 has more to restore, and this rank knows it as {behind}"
    unknown = evolve(right, restore_by_read={})
    assert a_restore_waits_for_its_read(agreed, unknown, LIMITS) == (
        "restores wait for the reads {1: 2}, known are {}"
    )


def test_a_restore_behind_a_read_that_is_over_has_a_piece_to_copy() -> None:
    agreed = filled()
    copying = Chain(read=None, host=(), device=(), n_read=2, start=1, stop=2)
    for watch in (BEGUN, PARKED):
        right = rank(watches={Ticket(2): watch}, chains={Ticket(2): copying})
        assert a_restore_waits_for_its_read(agreed, right, LIMITS) is None
    idle = rank(watches={Ticket(2): PARKED}, chains={Ticket(2): evolve(copying, start=2)})
    assert a_restore_waits_for_its_read(agreed, idle, LIMITS) == (
        "ticket 2 waits for no read, and has nothing to copy"
    )


# Names of breaches.


def test_a_breach_has_the_name_and_the_sentence_of_its_invariant() -> None:
    assert name_of(leases_are_whole) == "leases are whole"
    wrong = evolve(filled(), attempt_by_rid={})
    sentence = a_name_means_one_living_attempt(wrong)
    assert sentence is not None
    assert Breach("a name means one living attempt", sentence) in breaches(wrong)
    assert "growths are of running requests" not in {one.name for one in breaches(wrong)}
    stray = rank(watches={Ticket(77): BEGUN}, n_in_flight={Kind.COPY: 1})
    agreed = evolve(filled(), tickets={})
    found = local_breaches(agreed, stray, LIMITS)
    assert found == (Breach("watched tickets are open", "open are [], this rank watches [77]"),)


def test_a_request_may_be_named_anything() -> None:
    assert Rid("A") in filled().attempt_by_rid
