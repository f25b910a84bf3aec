"""What every ranks port must do. `RanksConformance` is mixed into no port: a test file for a port
subclasses it and gives a `make_group` fixture."""

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TypeAlias, TypeVar

import pytest

from kvlift.effects.ports import Ranks

Group: TypeAlias = Sequence[Ranks]
MakeGroup: TypeAlias = Callable[[int, int], AbstractContextManager[Group]]
"""n_ranks, ballot_length -> the ranks of one group, all in this process; closed at the end."""

Answer = TypeVar("Answer")
INT64_MIN, INT64_MAX = -(1 << 63), (1 << 63) - 1


def on_every_rank(group: Group, call: Callable[[Ranks], Answer]) -> list[Answer]:
    """The call on each rank from a thread of its own, so that ranks may wait for each other."""
    answers: dict[int, Answer] = {}

    def run(ranks: Ranks) -> None:
        answers[ranks.rank] = call(ranks)

    threads = [threading.Thread(target=run, args=(ranks,), daemon=True) for ranks in group]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return [answers[ranks.rank] for ranks in group]


class RanksConformance:
    n_ranks = 3

    def test_every_rank_knows_its_place(self, make_group: MakeGroup) -> None:
        with make_group(self.n_ranks, 2) as group:
            assert [ranks.rank for ranks in group] == list(range(self.n_ranks))
            assert {ranks.n_ranks for ranks in group} == {self.n_ranks}

    def test_the_verdict_is_the_minimum_at_each_place(self, make_group: MakeGroup) -> None:
        with make_group(self.n_ranks, 3) as group:
            for ranks in group:
                ranks.send([ranks.rank, -ranks.rank, 7])
            verdicts = [ranks.verdict() for ranks in group]
        assert verdicts == [(0, 1 - self.n_ranks, 7)] * self.n_ranks

    def test_the_ends_of_64_bits_survive(self, make_group: MakeGroup) -> None:
        with make_group(self.n_ranks, 2) as group:
            for ranks in group:
                ranks.send([INT64_MIN, INT64_MAX])
            verdicts = {ranks.verdict() for ranks in group}
        assert verdicts == {(INT64_MIN, INT64_MAX)}

    def test_verdicts_follow_the_order_of_the_ballots(self, make_group: MakeGroup) -> None:
        with make_group(self.n_ranks, 1) as group:
            for round_ in range(50):
                for ranks in group:
                    ranks.send([round_ + ranks.rank])
                assert {ranks.verdict() for ranks in group} == {(round_,)}

    def test_a_ballot_can_be_changed_after_it_was_sent(self, make_group: MakeGroup) -> None:
        with make_group(self.n_ranks, 2) as group:
            ballot = [5, 5]
            for ranks in group:
                ranks.send(ballot)
            ballot[0] = 1
            assert {ranks.verdict() for ranks in group} == {(5, 5)}

    def test_a_ballot_of_another_length_is_refused_and_harms_nothing(
        self, make_group: MakeGroup
    ) -> None:
        with make_group(self.n_ranks, 2) as group:
            for wrong in ([1], [1, 2, 3], []):
                with pytest.raises(ValueError, match="numbers"):
                    group[0].send(wrong)
            for ranks in group:
                ranks.send([1, 2])
            assert {ranks.verdict() for ranks in group} == {(1, 2)}

    def test_a_number_beyond_64_bits_is_refused(self, make_group: MakeGroup) -> None:
        with make_group(self.n_ranks, 1) as group:
            for wrong in (INT64_MIN - 1, INT64_MAX + 1):
                with pytest.raises(ValueError, match="64"):
                    group[0].send([wrong])

    def test_calls_in_the_wrong_order_are_bugs(self, make_group: MakeGroup) -> None:
        with make_group(self.n_ranks, 1) as group:
            with pytest.raises(RuntimeError):
                group[0].verdict()
            for ranks in group:
                ranks.send([1])
            with pytest.raises(RuntimeError):
                group[0].send([1])
            for ranks in group:
                ranks.verdict()
            with pytest.raises(RuntimeError):
                group[0].verdict()

    def test_reports_come_back_by_rank(self, make_group: MakeGroup) -> None:
        with make_group(self.n_ranks, 1) as group:
            for word in (b"\x00one\xff", b""):

                def call(ranks: Ranks, word: bytes = word) -> list[bytes]:
                    return ranks.exchange(word + b"%d" % ranks.rank)

                reports = on_every_rank(group, call)
                assert reports == [[word + b"%d" % r for r in range(self.n_ranks)]] * self.n_ranks

    def test_a_closed_rank_sends_nothing(self, make_group: MakeGroup) -> None:
        with make_group(self.n_ranks, 1) as group:
            group[0].close()
            group[0].close()
            with pytest.raises(RuntimeError):
                group[0].send([1])
