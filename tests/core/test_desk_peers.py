"""One rank's half of a conversation: deadlines, tokens, causes, rates."""

import pytest
from attrs import evolve

from kvlift.core.agreed import Kind, Rates
from kvlift.core.effect import (
    SendAborted,
    SendCommitted,
    StartLookup,
)
from kvlift.core.hear import _smooth
from kvlift.core.ids import Ticket
from kvlift.core.landed import (
    LookupAnswered,
    PagesArrived,
    PeerCause,
    PeerFailed,
    PeerLetGo,
    PrefetchEnded,
    PrefetchProgressed,
    TokenArrived,
)
from kvlift.core.local import (
    Watch,
)
from kvlift.core.observation import Observation
from tests.core.test_desk import ROOMY, hold, want
from tests.core.test_hear import (
    HOLD,
    MS,
    PROMPT,
    READ,
    TOKEN,
    Rank,
    _read,
    _restore,
    _talking,
)

# Peers.


def test_a_want_without_pages_has_no_deadline_but_its_token_has() -> None:
    rank = Rank(ROOMY)
    rank.now_ns = 3
    rank.order(hold(), want(0, TOKEN))
    watch = rank.local.watches[HOLD]
    assert (watch.n_pages, watch.timeout_ms, watch.since_ns, watch.begun_ns) == (0, None, 3, 3)
    assert rank.local.watches[TOKEN] == Watch(
        kind=Kind.TOKEN, n_pages=0, ceiling=0, since_ns=3, begun_ns=3, timeout_ms=200
    )
    assert rank.local.token_by_hold == {HOLD: TOKEN}
    rank.now_ns = 5
    rank.order(want(2))
    watch = rank.local.watches[HOLD]
    assert (watch.n_pages, watch.timeout_ms, watch.since_ns) == (2, 200, 5)
    token = rank.local.watches[TOKEN]
    assert (token.since_ns, token.begun_ns, token.timeout_ms) == (5, 3, 200)


def test_pages_give_the_token_its_whole_time_again() -> None:
    rank = _talking()
    rank.hear(PagesArrived(HOLD, 1), at_ms=150)
    watch, token = rank.local.watches[HOLD], rank.local.watches[TOKEN]
    assert watch == Watch(
        kind=Kind.HOLD,
        n_pages=4,
        ceiling=0,
        progress=1,
        since_ns=150 * MS,
        timeout_ms=200,
        begun_ns=0,
    )
    assert (token.since_ns, token.begun_ns, token.has_ended) == (150 * MS, 0, False)
    rank.hear(PagesArrived(HOLD, 1), at_ms=160)
    assert rank.local.watches[HOLD] == watch, "nothing new"
    rank.hear(TokenArrived(HOLD, 7, -0.5), at_ms=170)
    ended = rank.local.watches[TOKEN]
    assert (ended.has_ended, ended.timeout_ms, ended.progress, ended.ceiling) == (True, None, 8, -8)
    rank.hear(PagesArrived(HOLD, 4), at_ms=180)
    assert rank.local.watches[TOKEN] == ended
    assert rank.local.watches[HOLD].timeout_ms is None


def test_a_token_that_nobody_awaits_is_only_kept() -> None:
    rank = Rank(ROOMY)
    rank.order(hold())
    rank.hear(TokenArrived(HOLD, 7, -0.5))
    assert rank.local.tokens == {HOLD: (7, -0.5)}
    assert list(rank.local.watches) == [HOLD]


def test_a_token_that_is_overdue_fails_its_own_conversation() -> None:
    rank = Rank(ROOMY)
    other, other_token = Ticket(31), Ticket(32)
    rank.order(hold(), want(1, TOKEN))
    rank.order(evolve(hold(), ticket=other), evolve(want(0, other_token), ticket=other))
    rank.hear(PagesArrived(HOLD, 1), TokenArrived(HOLD, 1, 0.0), at_ms=199)
    rank.hear(at_ms=201)
    assert rank.seen(31).ceiling == PeerCause.TOKEN_OVERDUE
    assert rank.seen(HOLD) == Observation(1, 0, 0)
    assert rank.local.watches[other_token].timeout_ms is None
    assert not rank.local.watches[other_token].has_ended


def test_after_a_failure_only_an_aborted_conversation_has_a_deadline() -> None:
    rank = _talking()
    rank.hear(PeerFailed(HOLD, PeerCause.GONE, "gone"))
    assert rank.local.watches[HOLD].timeout_ms is None
    rank = _talking()
    rank.order(SendAborted(ticket=HOLD))
    rank.hear(PeerFailed(HOLD, PeerCause.GONE, "gone"))
    assert rank.local.watches[HOLD].timeout_ms == 300
    assert rank.seen(HOLD).ceiling == PeerCause.GONE


def test_the_end_of_an_abort_is_awaited_once() -> None:
    rank = _talking()
    rank.now_ns = 9
    rank.order(SendAborted(ticket=HOLD))
    watch = rank.local.watches[HOLD]
    assert (watch.since_ns, watch.timeout_ms) == (9, 300)
    seen = [(rank.local.dismissed, rank.local.leaving)]
    for closed in (HOLD, READ):
        rank.order(closed=(closed,))
        seen.append((rank.local.dismissed, rank.local.leaving))
    assert seen == [((HOLD,), (HOLD,)), ((), (HOLD,)), ((), ())]


def test_an_abort_of_what_has_ended_awaits_nothing() -> None:
    rank = _talking()
    rank.hear(PeerLetGo(HOLD))
    assert rank.local.watches[HOLD].timeout_ms is None
    rank.order(SendAborted(ticket=HOLD), SendAborted(ticket=Ticket(77)))
    assert rank.local.dismissed == ()
    assert rank.names()[-2:] == ["SendAborted", "SendAborted"]


def test_a_silent_peer_is_said_to_be_silent() -> None:
    rank = _talking()
    rank.order(SendAborted(ticket=HOLD))
    rank.hear(at_ms=301)
    assert rank.seen(HOLD).ceiling == PeerCause.SILENT
    assert rank.local.reasons == {HOLD: "the prefill node has not confirmed the end"}
    assert rank.local.watches[HOLD].timeout_ms is None


def test_what_was_said_goes_when_its_request_has_gone() -> None:
    rank = _talking()
    rank.hear(TokenArrived(HOLD, 7, -0.5), PeerFailed(HOLD, PeerCause.GONE, "gone"))
    rank.order(SendCommitted(ticket=HOLD), closed=(HOLD,))
    leaving = [rank.local.leaving]
    assert rank.local.token_by_hold == {}
    rank.order(_restore(11))
    assert [*leaving, rank.local.leaving] == [(HOLD,), ()]
    assert (rank.local.tokens, rank.local.reasons) == ({}, {})


# Rates.


@pytest.mark.parametrize(
    ("before_us", "now_us", "after_us"),
    [(0, 0, 1), (0, 5, 5), (80, 160, 90), (80, 80, 80), (1, 0, 1), (800, 0, 700), (15, 16, 15)],
)
def test_rates_move_by_an_eighth(before_us: int, now_us: int, after_us: int) -> None:
    assert _smooth(before_us, now_us) == after_us


def test_reads_and_transfers_are_measured_a_page() -> None:
    rank = Rank(evolve(ROOMY, transfer_deadline_ms=9000, prefetch_stall_ms=9000))
    rank.now_ns = 10 * MS
    rank.order(hold(), want(4), _read())
    rank.hear(PrefetchProgressed(READ, 1), PagesArrived(HOLD, 2), at_ms=12)
    assert rank.local.rates == Rates()
    rank.hear(PrefetchEnded(READ, 2), at_ms=16)
    assert rank.local.rates == Rates(prefetch_us=3000, transfer_us=0)
    rank.hear(PagesArrived(HOLD, 4), at_ms=18)
    assert rank.local.rates == Rates(prefetch_us=2953, transfer_us=2000)
    rank.order(_read(21, 22))
    rank.hear(PrefetchEnded(Ticket(21), 0), at_ms=30)
    assert rank.local.rates == Rates(prefetch_us=2953, transfer_us=2000), "nothing to measure"
    rank.order(_read(31, 32))
    rank.hear(PrefetchEnded(Ticket(31), 1), at_ms=41)
    assert rank.local.rates == Rates(prefetch_us=3958, transfer_us=2000)


@pytest.mark.parametrize(
    ("read_us", "transfer_us", "percent", "after_us"),
    [
        (6400, 2000, 100, 6300),
        (6400, 2000, 400, 6400),
        (2001, 2000, 100, 1969),
        (60, 2000, 1, 59),
        (1, 2000, 1, 1),
        (2, 1, 100, 1),
        (1, 1, 50, 1),  # 0 is that of a read that was never measured
    ],
)
def test_a_read_that_is_left_out_for_its_price_gets_cheaper_with_every_transfer(
    read_us: int, transfer_us: int, percent: int, after_us: int
) -> None:
    rank = Rank(evolve(ROOMY, transfer_deadline_ms=9000, cost_threshold_percent=percent))
    rank.local = evolve(rank.local, rates=Rates(prefetch_us=read_us, transfer_us=transfer_us))
    rank.now_ns = 10 * MS
    rank.order(hold(), want(1))
    rank.hear(PagesArrived(HOLD, 1), at_ms=10 + transfer_us // 1000)
    assert rank.local.rates == Rates(prefetch_us=after_us, transfer_us=transfer_us)


def test_a_lookup_that_finds_less_says_so() -> None:
    rank = Rank(ROOMY)
    rank.order(StartLookup(ticket=READ, prompt=PROMPT, start=0, stop=3))
    rank.hear(LookupAnswered(READ, 1))
    assert rank.seen(READ) == Observation(1, 1, 1)
    rank.hear(LookupAnswered(READ, 1))
    assert rank.local.n_stale == 1
