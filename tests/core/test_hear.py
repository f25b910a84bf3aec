"""One rank's half: what it hears, what it lets start, and when it gives up."""

import pytest

from kvlift.core.effect import (
    CancelPrefetch,
    CancelRestore,
    Effect,
    SendAborted,
    SendCommitted,
    SendHold,
    SendWant,
    StartLookup,
    StartPrefetch,
    StartRestore,
)
from kvlift.core.hear import hear, order
from kvlift.core.ids import Attempt, DeviceHandle, HostHandle, Rid, Ticket
from kvlift.core.landed import (
    Landed,
    LookupAnswered,
    PagesArrived,
    PeerCause,
    PeerFailed,
    PeerLetGo,
    PrefetchEnded,
    PrefetchProgressed,
    RestoreEnded,
    TokenArrived,
)
from kvlift.core.local import Limits, Local, next_deadline_ns, seen
from kvlift.core.observation import OVERDUE, Observation
from kvlift.core.policy import PrefetchPolicy
from kvlift.core.prompt import Prompt

MS = 1_000_000
PROMPT = Prompt(bytes(32), bytes(64), 4)
LIMITS = Limits(
    prefetch=PrefetchPolicy.DEADLINE,
    prefetch_deadline_ms=100,
    transfer_deadline_ms=200,
    quarantine_max_ms=300,
    prefetches_in_flight_max=1,
    restores_in_flight_max=1,
)
HOLD, TOKEN, READ, CHAINED = Ticket(1), Ticket(2), Ticket(3), Ticket(4)


def _read(ticket: int = READ, restore: int = CHAINED, n_pages: int = 3) -> StartPrefetch:
    return StartPrefetch(
        ticket=Ticket(ticket),
        prompt=PROMPT,
        start=0,
        host=tuple(HostHandle(10 * ticket + n) for n in range(n_pages)),
        restore=Ticket(restore),
        device=tuple(DeviceHandle(10 * ticket + n) for n in range(n_pages)),
    )


def _restore(ticket: int) -> StartRestore:
    return StartRestore(
        ticket=Ticket(ticket), host=(HostHandle(ticket),), device=(DeviceHandle(1),)
    )


class Rank:
    """A local half, with everything that it has started."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self.local, self.limits, self.now_ns = Local(), limits, 0
        self.started: list[Effect] = []

    def order(self, *effects: Effect, closed: tuple[Ticket, ...] = ()) -> None:
        before = repr(self.local)
        after, starts = order(self.local, self.limits, effects, closed, self.now_ns)
        assert repr(self.local) == before
        self.local = after
        self.started += starts

    def hear(self, *reports: Landed, at_ms: float | None = None) -> None:
        if at_ms is not None:
            self.now_ns = round(at_ms * MS)
        before = repr(self.local)
        after, starts = hear(self.local, self.limits, reports, self.now_ns)
        assert repr(self.local) == before
        assert hear(self.local, self.limits, reports, self.now_ns) == (after, starts)
        self.local = after
        self.started += starts

    def seen(self, ticket: int) -> Observation:
        return seen(self.local, (Ticket(ticket),))[0]

    def names(self) -> list[str]:
        return [type(effect).__name__ for effect in self.started]


def _talking(n_pages: int = 4) -> Rank:
    rank = Rank()
    rank.order(
        SendHold(ticket=HOLD, rid=Rid("A"), attempt=Attempt(1), peer="p", prompt=PROMPT),
        SendWant(
            ticket=HOLD,
            start=0,
            device=tuple(DeviceHandle(n) for n in range(n_pages)),
            promise=0,
            token=TOKEN,
        ),
    )
    return rank


def test_what_came_is_restored_at_once() -> None:
    rank = Rank()
    rank.order(_read())
    rank.hear(PrefetchEnded(READ, 2))
    assert rank.started[-1] == StartRestore(
        ticket=CHAINED, host=_read().host[:2], device=_read().device[:2]
    )
    rank.hear(RestoreEnded(CHAINED, 2))
    assert rank.seen(CHAINED) == Observation(2, 1, 2)


def test_a_read_that_brought_nothing_has_no_restore() -> None:
    rank = Rank()
    rank.order(_read())
    rank.hear(PrefetchEnded(READ, 0))
    assert rank.names() == ["StartPrefetch"]
    assert rank.seen(CHAINED) == Observation(0, 1, 0)


def test_the_same_report_twice_and_a_report_for_nobody_change_nothing() -> None:
    rank = Rank()
    rank.order(_read())
    rank.hear(PrefetchEnded(READ, 3))
    n_started, said = len(rank.started), rank.seen(READ)
    rank.hear(PrefetchEnded(READ, 1), PrefetchProgressed(READ, 1), RestoreEnded(Ticket(99), 1))
    assert (len(rank.started), rank.seen(READ)) == (n_started, said)
    assert rank.local.n_stale == 3


def test_progress_never_goes_back() -> None:
    rank = Rank()
    rank.order(_read())
    rank.hear(PrefetchProgressed(READ, 2), PrefetchProgressed(READ, 1))
    assert rank.seen(READ) == Observation(2, 0, 3)


def test_a_lookup_finds_no_more_than_it_was_asked_for() -> None:
    rank = Rank()
    rank.order(StartLookup(ticket=READ, prompt=PROMPT, start=1, stop=3))
    rank.hear(LookupAnswered(READ, 99))
    assert rank.seen(READ) == Observation(2, 1, 2)


def test_a_deadline_is_over_one_nanosecond_after_it() -> None:
    rank = Rank()
    rank.order(_read())
    assert next_deadline_ns(rank.local) == 100 * MS
    rank.hear(at_ms=100)
    assert rank.seen(READ).ceiling == 3
    rank.now_ns += 1
    rank.hear()
    assert rank.seen(READ) == Observation(0, 0, OVERDUE)
    assert next_deadline_ns(rank.local) is None


def test_progress_starts_the_deadline_again() -> None:
    rank = Rank()
    rank.order(_read())
    rank.hear(PrefetchProgressed(READ, 1), at_ms=90)
    rank.hear(at_ms=180)
    assert rank.seen(READ).ceiling == 3
    rank.hear(at_ms=190.001)
    assert rank.seen(READ) == Observation(1, 0, OVERDUE)


def test_what_was_given_up_stays_given_up_when_it_ends() -> None:
    rank = Rank()
    rank.order(_read())
    rank.hear(at_ms=101)
    rank.hear(PrefetchEnded(READ, 3))
    assert rank.seen(READ) == Observation(3, 1, OVERDUE)


def test_a_lookup_past_its_deadline_finds_nothing() -> None:
    rank = Rank()
    rank.order(StartLookup(ticket=READ, prompt=PROMPT, start=0, stop=3))
    rank.hear(at_ms=101)
    assert rank.seen(READ) == Observation(0, 0, 0)


def test_what_exceeds_a_limit_waits_first_come_first_served() -> None:
    rank = Rank()
    rank.order(*(_restore(n) for n in (11, 12, 13)))
    assert [e.ticket for e in rank.started if isinstance(e, StartRestore)] == [11]
    for ended, begun in ((11, [11, 12]), (12, [11, 12, 13]), (13, [11, 12, 13])):
        rank.hear(RestoreEnded(Ticket(ended), 1))
        assert [e.ticket for e in rank.started if isinstance(e, StartRestore)] == begun
    assert set(rank.local.n_in_flight.values()) == {0}


def test_a_parked_restore_that_is_cancelled_never_begins() -> None:
    rank = Rank()
    rank.order(_restore(11), _restore(12), CancelRestore(ticket=Ticket(12)))
    rank.hear(RestoreEnded(Ticket(11), 1))
    assert rank.names() == ["StartRestore"]
    assert rank.seen(12) == Observation(0, 1, 0)


def test_a_restore_that_runs_is_left_alone() -> None:
    rank = Rank()
    rank.order(_restore(11), CancelRestore(ticket=Ticket(11)))
    assert rank.seen(11) == Observation(0, 0, 1)


def test_a_parked_read_that_is_cancelled_is_over_with_its_restore() -> None:
    rank = Rank()
    rank.order(_read(11, 12), _read(21, 22), CancelPrefetch(ticket=Ticket(21), n_pages_kept=2))
    assert rank.names() == ["StartPrefetch"], "storage never hears of it"
    assert rank.seen(21) == Observation(0, 1, 0)
    assert rank.seen(22) == Observation(0, 1, 0)


def test_what_a_cancelled_read_has_brought_is_restored_once() -> None:
    rank = Rank()
    rank.order(_read())
    rank.hear(PrefetchProgressed(READ, 2))
    rank.order(CancelPrefetch(ticket=READ, n_pages_kept=2))
    rank.hear(PrefetchEnded(READ, 3))
    assert rank.names() == ["StartPrefetch", "StartRestore", "CancelPrefetch"]
    rank.hear(RestoreEnded(CHAINED, 2))
    assert rank.seen(CHAINED) == Observation(2, 1, 2)


def test_a_read_is_cancelled_once() -> None:
    rank = Rank()
    rank.order(_read())
    rank.order(CancelPrefetch(ticket=READ, n_pages_kept=0))
    rank.hear(PrefetchProgressed(READ, 1))
    rank.order(CancelPrefetch(ticket=READ, n_pages_kept=0))
    assert rank.names() == ["StartPrefetch", "CancelPrefetch"]
    rank.hear(PrefetchEnded(READ, 1))
    assert rank.seen(READ) == Observation(1, 1, 1)


def test_a_parked_read_is_given_up_too() -> None:
    """Or a silent store would hold for ever what waits behind its first read."""
    rank = Rank()
    rank.order(_read(11, 12), _read(21, 22))
    rank.hear(at_ms=101)
    assert rank.seen(21).ceiling == OVERDUE


def test_the_peer_has_its_deadline_again_at_each_widening() -> None:
    rank = _talking()
    rank.hear(PagesArrived(HOLD, 4), TokenArrived(HOLD, 7, -0.5), at_ms=150)
    rank.hear(at_ms=10_000)
    assert rank.seen(HOLD) == Observation(4, 0, 0), "nothing is awaited, so nothing is overdue"
    rank.order(SendWant(ticket=HOLD, start=4, device=(DeviceHandle(9),), promise=0))
    rank.hear(at_ms=10_200)
    assert rank.seen(HOLD).ceiling == 0
    rank.hear(at_ms=10_200.001)
    assert rank.seen(HOLD).ceiling == PeerCause.OVERDUE


def test_a_token_that_does_not_come_is_told_apart() -> None:
    rank = _talking(n_pages=0)
    rank.hear(at_ms=200.001)
    assert rank.seen(HOLD).ceiling == PeerCause.TOKEN_OVERDUE


def test_a_token_that_comes_before_it_is_wanted_is_kept() -> None:
    rank = Rank()
    hold = SendHold(ticket=HOLD, rid=Rid("A"), attempt=Attempt(1), peer="p", prompt=PROMPT)
    rank.order(hold)
    rank.hear(TokenArrived(HOLD, 7, -0.5))
    rank.order(SendWant(ticket=HOLD, start=0, device=(), promise=4, token=TOKEN))
    assert rank.seen(TOKEN) == Observation(8, 1, -8)
    rank.hear(TokenArrived(HOLD, 9, -0.5))
    assert rank.seen(TOKEN) == Observation(8, 1, -8), "the first one counts"


def test_more_pages_than_were_wanted_are_not_believed() -> None:
    rank = _talking(n_pages=2)
    rank.hear(PagesArrived(HOLD, 99))
    assert rank.seen(HOLD).progress == 2


@pytest.mark.parametrize(
    "causes", [(PeerCause.GONE, PeerCause.LOST), (PeerCause.LOST, PeerCause.GONE)]
)
def test_the_worst_cause_counts(causes: tuple[PeerCause, PeerCause]) -> None:
    rank = _talking()
    for cause in causes:
        rank.hear(PeerFailed(HOLD, cause, f"said {cause.name}"))
    assert rank.seen(HOLD).ceiling == PeerCause.LOST
    assert rank.local.reasons[HOLD] == f"said {causes[0].name}"


def test_a_peer_that_never_confirms_an_abort_is_silent_in_the_end() -> None:
    rank = _talking()
    rank.order(SendAborted(ticket=HOLD), closed=(TOKEN,))
    rank.hear(at_ms=300)
    assert rank.seen(HOLD) == Observation(0, 0, 0)
    rank.hear(PagesArrived(HOLD, 1), at_ms=300)
    rank.hear(at_ms=600)
    assert rank.seen(HOLD).ceiling == 0, "a page that comes late starts the quarantine again"
    rank.hear(at_ms=600.001)
    assert rank.seen(HOLD).ceiling == PeerCause.SILENT
    rank.hear(PeerLetGo(HOLD))
    assert rank.seen(HOLD).ended == 1


def test_what_was_said_is_kept_until_the_tick_after_the_end() -> None:
    rank = _talking()
    rank.hear(TokenArrived(HOLD, 7, -0.5))
    rank.order(_restore(11), closed=(HOLD,))
    rank.order(_restore(12))
    assert rank.local.tokens[HOLD] == (7, -0.5), "its request may still become ready"
    rank.order(SendCommitted(ticket=HOLD))
    assert rank.local.tokens[HOLD] == (7, -0.5)
    rank.order(_restore(13))
    assert HOLD not in rank.local.tokens


def test_of_a_ticket_that_was_never_ordered_nothing_has_been_seen() -> None:
    (unknown,) = seen(Local(), (Ticket(77),))
    assert (unknown.progress, unknown.ended) == (0, 0)
