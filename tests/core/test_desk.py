"""One rank's half in detail: rates, turns, deadlines of each kind, and what is forgotten when."""

from typing import Any

import pytest
from attrs import evolve

from kvlift.core.agreed import Kind
from kvlift.core.effect import (
    CancelPersist,
    CancelPrefetch,
    CancelRestore,
    FreeHost,
    SendHold,
    SendWant,
    StartLookup,
    StartMirror,
    StartPersist,
    StartRestore,
    TakeDevice,
)
from kvlift.core.hear import hear, order
from kvlift.core.ids import Attempt, DeviceHandle, HostHandle, Rid, Ticket
from kvlift.core.landed import (
    MirrorEnded,
    PagesArrived,
    PersistEnded,
    PrefetchEnded,
    RestoreEnded,
)
from kvlift.core.local import (
    NEVER_NS,
    Chain,
    Limits,
    Local,
    Watch,
    ended_with,
    first_deadline_ns,
    given_up,
    is_overdue,
    next_deadline_ns,
)
from kvlift.core.observation import OVERDUE, Observation
from kvlift.core.policy import PrefetchPolicy
from tests.core.test_hear import (
    CHAINED,
    HOLD,
    LIMITS,
    MS,
    PROMPT,
    READ,
    Rank,
    _read,
    _restore,
)

ROOMY = Limits(
    prefetch_deadline_ms=100,
    prefetch_stall_ms=150,
    transfer_deadline_ms=200,
    quarantine_max_ms=300,
    prefetches_in_flight_max=2,
    restores_in_flight_max=2,
    mirrors_in_flight_max=1,
    persists_in_flight_max=1,
)


def mirror(ticket: int, n_pages: int = 2) -> StartMirror:
    return StartMirror(
        ticket=Ticket(ticket),
        device=tuple(DeviceHandle(n) for n in range(n_pages)),
        host=tuple(HostHandle(n) for n in range(n_pages)),
    )


def persist(ticket: int, *, from_host: bool = True) -> StartPersist:
    return StartPersist(
        ticket=Ticket(ticket),
        prompt=PROMPT,
        positions=(0, 1),
        host=(HostHandle(0), HostHandle(1)) if from_host else (),
        device=() if from_host else (DeviceHandle(0), DeviceHandle(1)),
    )


def hold() -> SendHold:
    return SendHold(ticket=HOLD, rid=Rid("A"), attempt=Attempt(1), peer="p", prompt=PROMPT)


def want(n_pages: int, token: Ticket | None = None, start: int = 0) -> SendWant:
    pages = tuple(DeviceHandle(n) for n in range(n_pages))
    return SendWant(ticket=HOLD, start=start, device=pages, promise=0, token=token)


# What a watch says.


def test_the_watch_of_each_effect_says_what_is_to_come() -> None:
    rank = Rank(ROOMY)
    rank.now_ns = 7
    rank.order(
        StartLookup(ticket=Ticket(20), prompt=PROMPT, start=1, stop=3),
        _read(21, 22),
        _restore(23),
        mirror(24),
        persist(25),
        hold(),
    )
    at: dict[str, Any] = {"since_ns": 7, "begun_ns": 7}
    assert dict(rank.local.watches) == {
        20: Watch(kind=Kind.LOOKUP, n_pages=2, ceiling=2, timeout_ms=100, **at),
        21: Watch(kind=Kind.READ, n_pages=3, ceiling=3, timeout_ms=150, **at),
        22: Watch(kind=Kind.COPY, n_pages=3, ceiling=3, has_begun=False),
        23: Watch(kind=Kind.COPY, n_pages=1, ceiling=1, **at),
        24: Watch(kind=Kind.MIRROR, n_pages=2, ceiling=2, **at),
        25: Watch(kind=Kind.PERSIST, n_pages=2, ceiling=2, **at),
        HOLD: Watch(kind=Kind.HOLD, n_pages=0, ceiling=0),
    }
    assert rank.local.n_in_flight == {Kind.READ: 1, Kind.COPY: 1, Kind.MIRROR: 1, Kind.PERSIST: 1}
    chain = Chain(read=Ticket(21), host=_read(21).host, device=_read(21).device)
    assert rank.local.chains == {22: chain}
    assert rank.local.restore_by_read == {21: 22}
    assert rank.local.deadline_ns == 7 + 100 * MS


def test_effects_of_the_ledger_and_of_the_store_go_straight_through() -> None:
    rank = Rank(ROOMY)
    effects = (TakeDevice(pages=()), FreeHost(pages=()), CancelPersist(ticket=Ticket(1)))
    rank.order(*effects)
    assert rank.started == list(effects)
    assert rank.local.watches == {}


def test_nothing_to_order_and_nothing_to_hear_is_the_same_local_half() -> None:
    local = evolve(Local(), deadline_ns=50)
    assert order(local, LIMITS, (), (), 9) == (local, ())
    assert order(local, LIMITS, (), (), 9)[0] is local
    assert hear(local, LIMITS, (), 50)[0] is local
    assert hear(local, LIMITS, (), 51)[0] is not local
    assert order(local, LIMITS, (), (Ticket(1),), 9)[0] is not local


@pytest.mark.parametrize(
    ("policy", "timeout_ms"),
    [
        (PrefetchPolicy.DEADLINE, 100),
        (PrefetchPolicy.WAIT_COMPLETE, 150),
        (PrefetchPolicy.BEST_EFFORT, 150),
    ],
)
def test_a_read_has_the_deadline_of_its_policy(policy: PrefetchPolicy, timeout_ms: int) -> None:
    assert evolve(ROOMY, prefetch=policy).read_deadline_ms() == timeout_ms


@pytest.mark.parametrize("kind", list(Kind))
def test_only_copies_reads_and_writes_are_limited(kind: Kind) -> None:
    limits = Limits(
        prefetches_in_flight_max=1,
        restores_in_flight_max=2,
        mirrors_in_flight_max=3,
        persists_in_flight_max=4,
    )
    most = {Kind.READ: 1, Kind.COPY: 2, Kind.MIRROR: 3, Kind.PERSIST: 4}
    assert limits.n_in_flight_max(kind) == most.get(kind)


# Deadlines.


def test_a_watch_is_overdue_after_its_time_while_it_runs() -> None:
    watch = Watch(kind=Kind.READ, n_pages=1, ceiling=1, since_ns=5, timeout_ms=2)
    assert not is_overdue(watch, 5 + 2 * MS)
    assert is_overdue(watch, 6 + 2 * MS)
    assert not is_overdue(evolve(watch, has_ended=True), 99 * MS)
    assert not is_overdue(evolve(watch, timeout_ms=None), 99 * MS)
    assert first_deadline_ns([watch, evolve(watch, since_ns=3)]) == 3 + 2 * MS
    assert first_deadline_ns([evolve(watch, has_ended=True)]) == NEVER_NS
    assert first_deadline_ns([evolve(watch, timeout_ms=None)]) == NEVER_NS
    assert next_deadline_ns(Local()) is None
    assert next_deadline_ns(evolve(Local(), deadline_ns=4)) == 4


def test_what_has_ended_or_was_given_up_runs_no_more() -> None:
    watch = Watch(kind=Kind.READ, n_pages=3, ceiling=3, timeout_ms=2)
    after = ended_with(watch, 2)
    assert (after.has_ended, after.progress, after.ceiling, after.timeout_ms) == (True, 2, 2, None)
    assert ended_with(evolve(watch, ceiling=1), 2).ceiling == 1
    assert ended_with(evolve(watch, ceiling=0), 2).ceiling == 0
    assert ended_with(evolve(watch, ceiling=OVERDUE), 2).ceiling == OVERDUE
    assert (given_up(watch).ceiling, given_up(watch).timeout_ms) == (OVERDUE, None)
    assert given_up(evolve(watch, kind=Kind.LOOKUP)).ceiling == 0


@pytest.mark.parametrize("kind", [Kind.COPY, Kind.TAIL, Kind.MIRROR, Kind.READ, Kind.LOOKUP])
def test_each_kind_that_is_overdue_is_given_up(kind: Kind) -> None:
    watch = Watch(kind=kind, n_pages=3, ceiling=3, timeout_ms=2)
    local = evolve(Local(), watches={READ: watch}, deadline_ns=2 * MS)
    after, starts = hear(local, ROOMY, (), 3 * MS)
    assert after.watches[READ] == given_up(watch)
    assert starts == ()
    assert after.deadline_ns == NEVER_NS


def test_a_write_from_the_device_may_not_take_for_ever() -> None:
    rank = Rank(ROOMY)
    rank.order(persist(5, from_host=False), persist(6, from_host=False))
    assert [w.timeout_ms for w in rank.local.watches.values()] == [150, 150]
    rank.hear(at_ms=151)
    assert rank.started[1:] == [CancelPersist(ticket=Ticket(5))]
    assert rank.seen(5) == Observation(0, 0, 2), "it may still write"
    assert rank.seen(6) == Observation(0, 1, 0), "it never began"
    assert rank.local.parked == ()
    assert rank.local.watches[Ticket(5)].timeout_ms is None
    rank.hear(PersistEnded(Ticket(5), 1))
    assert rank.seen(5) == Observation(1, 1, 1)
    assert rank.local.n_in_flight[Kind.PERSIST] == 0


def test_a_write_from_the_host_may_take_its_time() -> None:
    rank = Rank(ROOMY)
    rank.order(persist(5), mirror(6))
    assert next_deadline_ns(rank.local) is None


# Turns.


def test_the_next_of_a_kind_begins_when_one_has_ended() -> None:
    rank = Rank(ROOMY)
    rank.order(mirror(11), mirror(12), persist(13), persist(14), mirror(15))
    assert [e.ticket for e in rank.local.parked] == [12, 14, 15]
    assert not rank.local.watches[Ticket(12)].has_begun
    rank.hear(PersistEnded(Ticket(13), 2), at_ms=4)
    assert [e.ticket for e in rank.local.parked] == [12, 15]
    begun = rank.local.watches[Ticket(14)]
    assert (begun.has_begun, begun.since_ns, begun.begun_ns) == (True, 4 * MS, 4 * MS)
    assert rank.local.n_in_flight == {Kind.MIRROR: 1, Kind.PERSIST: 1}
    rank.hear(MirrorEnded(Ticket(11), 1))
    assert rank.seen(11) == Observation(1, 1, 1)
    assert [e.ticket for e in rank.local.parked] == [15]
    assert rank.started[-1] == mirror(12)


def test_a_turn_that_is_passed_on_leaves_the_others_counted() -> None:
    rank = Rank(ROOMY)
    rank.order(_restore(11), _restore(12), _restore(13))
    assert rank.local.n_in_flight[Kind.COPY] == 2
    rank.hear(RestoreEnded(Ticket(11), 1))
    assert rank.local.n_in_flight[Kind.COPY] == 2
    rank.hear(RestoreEnded(Ticket(12), 1), RestoreEnded(Ticket(13), 1))
    assert rank.local.n_in_flight[Kind.COPY] == 0


def test_a_read_that_is_given_up_with_its_restore_leaves_other_reads_with_theirs() -> None:
    rank = Rank(ROOMY)
    given_up = CancelPrefetch(ticket=Ticket(11), n_pages_kept=0), CancelRestore(ticket=Ticket(12))
    rank.order(_read(11, 12), _read(21, 22), *given_up)
    assert rank.seen(12) == Observation(0, 1, 0)
    assert list(rank.local.chains) == [22]
    rank.hear(PrefetchEnded(Ticket(11), 3), PrefetchEnded(Ticket(21), 3))
    assert [e.ticket for e in rank.started if isinstance(e, StartRestore)] == [22]


def test_what_is_cancelled_when_it_is_over_changes_nothing() -> None:
    rank = Rank(ROOMY)
    rank.order(_read(), _restore(11))
    rank.hear(PrefetchEnded(READ, 0), RestoreEnded(Ticket(11), 1))
    before, n_started = rank.local, len(rank.started)
    rank.order(
        CancelPrefetch(ticket=READ, n_pages_kept=2),
        CancelRestore(ticket=Ticket(11)),
        CancelPrefetch(ticket=Ticket(98), n_pages_kept=2),
        CancelRestore(ticket=Ticket(99)),
    )
    assert rank.local == before
    assert len(rank.started) == n_started


def test_a_restore_that_was_closed_does_not_follow_its_read() -> None:
    rank = Rank(ROOMY)
    rank.order(_read())
    rank.order(closed=(CHAINED,))
    rank.hear(PrefetchEnded(READ, 3))
    assert rank.names() == ["StartPrefetch"]
    assert rank.local.chains == {} == rank.local.restore_by_read


@pytest.mark.parametrize(("n_pages", "us_a_page"), [(1, 8000), (2, 4000), (4, 2000)])
def test_a_transfer_is_measured_by_the_page(n_pages: int, us_a_page: int) -> None:
    rank = Rank(ROOMY)
    rank.order(hold(), want(n_pages))
    rank.hear(PagesArrived(HOLD, n_pages), at_ms=8)
    assert rank.local.rates.transfer_us == us_a_page
