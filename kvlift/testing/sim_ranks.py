"""Ranks of one process: a mailbox with a MIN reduction, for one thread or one thread a rank."""

import threading
from collections.abc import Sequence

from attrs import define, field

from kvlift.effects.ports import RankLate

BALLOTS_KEPT = 4
"""No rank can be further ahead than one ballot; a few more are kept for looking at."""


@define(eq=False)
class Mailbox:
    """What N in-process ranks share. Each rank's n-th ballot is reduced with the others' n-th.

    `deadline_s` is how long `verdict` waits: 0 fits hosts that tick all ranks on one thread, where
    a missing ballot cannot come while one waits.
    """

    n_ranks: int
    deadline_s: float = 0.0
    ballots: list[dict[int, tuple[int, ...]]] = field(init=False)
    reports: list[bytes | None] = field(init=False)
    changed: threading.Condition = field(factory=threading.Condition)

    def __attrs_post_init__(self) -> None:
        self.ballots = [{} for _ in range(self.n_ranks)]
        self.reports = [None] * self.n_ranks

    def late_ranks(self, number: int) -> tuple[int, ...]:
        """The ranks that have not sent the ballot of this number."""
        return tuple(rank for rank, sent in enumerate(self.ballots) if number not in sent)


@define(eq=False)
class SimRanks:
    """One rank's end of a `Mailbox`. `n_sent` counts the reductions that it took part in."""

    mailbox: Mailbox
    rank: int
    n_sent: int = 0
    last_verdict: tuple[int, ...] | None = None

    @property
    def n_ranks(self) -> int:
        return self.mailbox.n_ranks

    def send(self, ballot: Sequence[int]) -> None:
        box = self.mailbox
        with box.changed:
            number = self.n_sent + 1
            others = [sent[number] for sent in box.ballots if number in sent]
            if others and len(others[0]) != len(ballot):
                raise ValueError(
                    f"rank {self.rank} sends {len(ballot)} numbers where another sent"
                    f" {len(others[0])}; give all ranks the same config"
                )
            box.ballots[self.rank][number] = tuple(ballot)
            box.ballots[self.rank].pop(number - BALLOTS_KEPT, None)
            self.n_sent = number
            box.changed.notify_all()

    def verdict(self) -> tuple[int, ...]:
        """The MIN, number by number, of every rank's ballot since the last one."""
        box = self.mailbox
        with box.changed:
            box.changed.wait_for(lambda: not box.late_ranks(self.n_sent), box.deadline_s)
            late = box.late_ranks(self.n_sent)
            if late:
                raise RankLate(late, box.deadline_s)
            sent = [ballots[self.n_sent] for ballots in box.ballots]
        self.last_verdict = tuple(min(numbers) for numbers in zip(*sent, strict=True))
        return self.last_verdict

    def exchange(self, report: bytes) -> list[bytes]:
        """Every rank's report by rank; empty for one that did not give any before the deadline."""
        box = self.mailbox
        with box.changed:
            box.reports[self.rank] = report
            box.changed.notify_all()
            box.changed.wait_for(lambda: None not in box.reports, box.deadline_s)
            return [one or b"" for one in box.reports]

    def close(self) -> None:
        """Nothing to give back."""


def in_process_ranks(n_ranks: int, deadline_s: float = 0.0) -> list[SimRanks]:
    """The ends of one new mailbox, by rank."""
    mailbox = Mailbox(n_ranks, deadline_s)
    return [SimRanks(mailbox, rank) for rank in range(n_ranks)]
