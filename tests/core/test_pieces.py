"""A restore behind a read goes up in pieces while the rest is read, one piece at a time."""

from attrs import evolve

from kvlift.core.agreed import Kind
from kvlift.core.effect import CancelPrefetch, CancelRestore, StartRestore
from kvlift.core.ids import Ticket
from kvlift.core.landed import PrefetchEnded, PrefetchProgressed, RestoreEnded
from kvlift.core.observation import OVERDUE, Observation
from tests.core.test_hear import CHAINED, LIMITS, READ, Rank, _read, _restore

GIVE_UP = CancelPrefetch(ticket=READ, n_pages_kept=0), CancelRestore(ticket=CHAINED)


def pieces(rank: Rank) -> list[StartRestore]:
    return [one for one in rank.started if isinstance(one, StartRestore) and one.ticket == CHAINED]


def piece(start: int, stop: int) -> StartRestore:
    whole = _read()
    return StartRestore(
        ticket=CHAINED,
        host=whole.host[start:stop],
        device=whole.device[start:stop],
        start=start,
    )


def reading(n_pages: int = 1) -> Rank:
    """A rank on which the first pages of a read of three have come and are being restored."""
    rank = Rank()
    rank.order(_read())
    rank.hear(PrefetchProgressed(READ, n_pages))
    assert pieces(rank) == [piece(0, n_pages)]
    return rank


def test_a_page_goes_up_while_the_next_ones_are_read() -> None:
    rank = reading()
    assert rank.seen(CHAINED) == Observation(0, 0, 3), "nothing is agreed before its end"
    rank.hear(RestoreEnded(CHAINED, 1))
    rank.hear(PrefetchProgressed(READ, 2))
    rank.hear(RestoreEnded(CHAINED, 1, start=1))
    rank.hear(PrefetchEnded(READ, 3))
    assert pieces(rank) == [piece(0, 1), piece(1, 2), piece(2, 3)]
    rank.hear(RestoreEnded(CHAINED, 1, start=2))
    assert rank.seen(CHAINED) == Observation(3, 1, 3)
    assert rank.local.chains == {} == rank.local.restore_by_read


def test_what_comes_while_a_piece_is_copied_is_the_next_piece() -> None:
    rank = reading()
    rank.hear(PrefetchProgressed(READ, 2))
    rank.hear(PrefetchEnded(READ, 3))
    assert pieces(rank) == [piece(0, 1)]
    rank.hear(RestoreEnded(CHAINED, 1))
    assert pieces(rank) == [piece(0, 1), piece(1, 3)]


def test_what_comes_in_one_tick_is_one_copy() -> None:
    rank = Rank()
    rank.order(_read())
    rank.hear(PrefetchProgressed(READ, 1), PrefetchProgressed(READ, 2), PrefetchEnded(READ, 3))
    assert pieces(rank) == [piece(0, 3)]


def test_a_restore_waits_without_a_turn_between_two_pieces() -> None:
    rank = reading()
    rank.hear(RestoreEnded(CHAINED, 1))
    assert rank.local.n_in_flight[Kind.COPY] == 0
    assert rank.seen(CHAINED) == Observation(0, 0, 3)
    rank.order(_restore(11))
    assert rank.started[-1] == _restore(11)


def test_a_piece_takes_its_turn_behind_other_restores() -> None:
    rank = Rank()
    rank.order(_read(), _restore(11))
    rank.hear(PrefetchProgressed(READ, 1))
    assert pieces(rank) == []
    rank.hear(PrefetchProgressed(READ, 2))
    rank.hear(RestoreEnded(Ticket(11), 1))
    assert pieces(rank) == [piece(0, 1)], "a piece that waits for its turn stays as it is"
    rank.order(_restore(12))
    rank.hear(RestoreEnded(CHAINED, 1))
    assert rank.started[-1] == _restore(12)
    rank.hear(RestoreEnded(Ticket(12), 1))
    assert pieces(rank) == [piece(0, 1), piece(1, 2)]


def test_the_report_of_a_piece_counts_once() -> None:
    rank = reading()
    rank.hear(RestoreEnded(CHAINED, 1))
    rank.hear(RestoreEnded(CHAINED, 1))
    assert rank.local.n_stale == 1
    rank.hear(PrefetchEnded(READ, 3))
    rank.hear(RestoreEnded(CHAINED, 1))
    assert rank.local.n_stale == 2
    assert rank.seen(CHAINED) == Observation(0, 0, 3)
    assert rank.local.n_in_flight[Kind.COPY] == 1
    rank.hear(RestoreEnded(CHAINED, 2, start=1))
    assert rank.seen(CHAINED) == Observation(3, 1, 3)
    assert rank.local.n_in_flight[Kind.COPY] == 0


def test_the_report_of_one_piece_is_not_taken_for_that_of_another() -> None:
    rank = reading(2)
    rank.hear(RestoreEnded(CHAINED, 2, start=1))
    assert rank.local.n_stale == 1
    assert rank.seen(CHAINED) == Observation(0, 0, 3)


def test_a_piece_that_falls_short_is_the_end_and_gives_its_read_up() -> None:
    rank = reading()
    rank.hear(RestoreEnded(CHAINED, 1))
    rank.hear(PrefetchProgressed(READ, 3))
    rank.hear(RestoreEnded(CHAINED, 1, start=1))
    assert rank.seen(CHAINED) == Observation(2, 1, 2)
    assert rank.seen(READ) == Observation(3, 0, OVERDUE)
    rank.hear(PrefetchEnded(READ, 3))
    assert rank.seen(READ) == Observation(3, 1, OVERDUE)
    assert pieces(rank) == [piece(0, 1), piece(1, 3)]


def test_a_last_piece_that_falls_short_says_nothing_of_its_read() -> None:
    rank = Rank()
    rank.order(_read())
    rank.hear(PrefetchEnded(READ, 3))
    rank.hear(RestoreEnded(CHAINED, 1))
    assert rank.seen(CHAINED) == Observation(1, 1, 1)
    assert rank.seen(READ) == Observation(3, 1, 3)


def test_a_restore_that_is_given_up_ends_with_the_piece_that_runs() -> None:
    """Before that its device pages are written into: they are nobody else's."""
    rank = reading()
    rank.order(*GIVE_UP)
    assert rank.seen(CHAINED) == Observation(0, 0, 0)
    rank.hear(PrefetchProgressed(READ, 2), PrefetchEnded(READ, 3))
    assert rank.seen(CHAINED) == Observation(0, 0, 0)
    rank.hear(RestoreEnded(CHAINED, 1))
    assert rank.seen(CHAINED) == Observation(0, 1, 0)
    assert pieces(rank) == [piece(0, 1)]


def test_a_restore_that_is_given_up_between_two_pieces_is_over() -> None:
    rank = reading()
    rank.hear(RestoreEnded(CHAINED, 1))
    rank.order(*GIVE_UP)
    assert rank.seen(CHAINED).ended
    rank.hear(PrefetchEnded(READ, 3))
    assert pieces(rank) == [piece(0, 1)]


def test_a_restore_that_is_given_up_after_its_read_ends_with_the_piece_that_runs() -> None:
    rank = reading()
    rank.hear(PrefetchEnded(READ, 3))
    rank.order(*GIVE_UP)
    assert rank.seen(CHAINED) == Observation(0, 0, 3)
    rank.hear(RestoreEnded(CHAINED, 1))
    assert rank.seen(CHAINED).ended
    assert pieces(rank) == [piece(0, 1)]


def test_a_restore_that_is_given_up_twice_ends_with_the_piece_that_runs() -> None:
    rank = reading()
    rank.hear(PrefetchProgressed(READ, 2))
    rank.order(CancelPrefetch(ticket=READ, n_pages_kept=2))
    rank.order(*GIVE_UP)
    rank.hear(RestoreEnded(CHAINED, 1))
    assert rank.seen(CHAINED).ended
    assert pieces(rank) == [piece(0, 1)]


def test_a_piece_that_has_no_turn_yet_is_dropped() -> None:
    rank = Rank()
    rank.order(_read(), _restore(11))
    rank.hear(PrefetchProgressed(READ, 1))
    rank.order(*GIVE_UP)
    assert rank.seen(CHAINED) == Observation(0, 1, 0)
    rank.hear(RestoreEnded(Ticket(11), 1))
    assert pieces(rank) == []
    assert rank.local.n_in_flight[Kind.COPY] == 0


def test_of_a_read_that_is_given_up_late_more_may_be_up_than_is_kept() -> None:
    rank = reading(2)
    rank.order(CancelPrefetch(ticket=READ, n_pages_kept=1))
    assert rank.seen(CHAINED) == Observation(0, 0, 1)
    rank.hear(RestoreEnded(CHAINED, 2))
    assert rank.seen(CHAINED) == Observation(1, 1, 1)
    assert pieces(rank) == [piece(0, 2)]


def test_of_a_read_that_is_given_up_early_what_is_kept_goes_up() -> None:
    rank = reading()
    rank.hear(PrefetchProgressed(READ, 2))
    rank.order(CancelPrefetch(ticket=READ, n_pages_kept=2))
    rank.hear(RestoreEnded(CHAINED, 1))
    assert pieces(rank) == [piece(0, 1), piece(1, 2)]
    rank.hear(RestoreEnded(CHAINED, 1, start=1))
    assert rank.seen(CHAINED) == Observation(2, 1, 2)


def test_a_restore_that_is_closed_forgets_its_read() -> None:
    rank = reading()
    rank.order(closed=(CHAINED,))
    rank.hear(PrefetchProgressed(READ, 2))
    rank.hear(PrefetchEnded(READ, 3))
    assert pieces(rank) == [piece(0, 1)]
    assert rank.local.chains == {} == rank.local.restore_by_read


def test_two_reads_feed_their_own_restores() -> None:
    rank = Rank(evolve(LIMITS, prefetches_in_flight_max=2))
    rank.order(_read(21, 22), _read(31, 32))
    rank.hear(PrefetchEnded(Ticket(21), 0))
    assert rank.seen(22) == Observation(0, 1, 0)
    assert rank.seen(32) == Observation(0, 0, 3)
    rank.hear(PrefetchProgressed(Ticket(31), 1))
    assert [one.ticket for one in rank.started if isinstance(one, StartRestore)] == [32]
