"""Ranks of one process: a mailbox with a MIN reduction, for one thread or one thread a rank."""

import threading
from collections.abc import Sequence

from attrs import define, field

from kvlift.effects.ports import RankLate

INT64_MIN, INT64_MAX = -(1 << 63), (1 << 63) - 1
BALLOTS_KEPT = 4
"""No rank can be further ahead than one ballot; a few more are kept for looking at."""


@define(eq=False)
class Mailbox:
    """What N in-process ranks share. Each rank's n-th ballot is reduced with the others' n-th.

    `deadline_s` is how long `verdict` waits: 0 fits hosts that tick all ranks on one thread, where
    a missing ballot cannot come while one waits. `ballot_length` None: the first ballot sets it.
    """

    n_ranks: int
    deadline_s: float = 0.0
    ballot_length: int | None = None
    ballots: list[dict[int, tuple[int, ...]]] = field(init=False)
    reports: dict[int, dict[int, bytes]] = field(factory=dict)
    changed: threading.Condition = field(factory=threading.Condition)
    _last_reduced: tuple[int, tuple[int, ...]] = (0, ())

    def __attrs_post_init__(self) -> None:
        self.ballots = [{} for _ in range(self.n_ranks)]

    def reduced(self, number: int) -> tuple[int, ...]:
        """The MIN of all ranks' ballots of this number, made once for all of them."""
        if self._last_reduced[0] != number:
            sent = [ballots[number] for ballots in self.ballots]
            least = tuple(map(min, *sent)) if len(sent) > 1 else sent[0]
            self._last_reduced = (number, least)
        return self._last_reduced[1]

    def late_ranks(self, number: int) -> tuple[int, ...]:
        """The ranks that have not sent the ballot of this number."""
        return tuple(rank for rank, sent in enumerate(self.ballots) if number not in sent)


@define(eq=False)
class SimRanks:
    """One rank's end of a `Mailbox`. `n_sent` counts the reductions that it took part in."""

    mailbox: Mailbox
    rank: int
    n_sent: int = 0
    n_exchanges: int = 0
    is_ballot_out: bool = False
    is_closed: bool = False
    last_verdict: tuple[int, ...] | None = None

    @property
    def n_ranks(self) -> int:
        return self.mailbox.n_ranks

    def send(self, ballot: Sequence[int]) -> None:
        box = self.mailbox
        if self.is_closed or self.is_ballot_out:
            reason = "is closed" if self.is_closed else "has not taken its last verdict yet"
            raise RuntimeError(f"rank {self.rank} cannot send a ballot: it {reason}")
        if ballot and not (min(ballot) >= INT64_MIN and max(ballot) <= INT64_MAX):
            raise ValueError("a ballot holds integers of 64 bits, and no larger ones")
        with box.changed:
            if box.ballot_length is None:
                box.ballot_length = len(ballot)
            if len(ballot) != box.ballot_length:
                raise ValueError(
                    f"rank {self.rank} sends {len(ballot)} numbers where {box.ballot_length} are"
                    " due; give all ranks the same config"
                )
            number = self.n_sent + 1
            box.ballots[self.rank][number] = tuple(ballot)
            box.ballots[self.rank].pop(number - BALLOTS_KEPT, None)
            self.n_sent = number
            self.is_ballot_out = True
            box.changed.notify_all()

    def verdict(self) -> tuple[int, ...]:
        """The MIN, number by number, of every rank's ballot since the last one."""
        box = self.mailbox
        if not self.is_ballot_out:
            raise RuntimeError(f"rank {self.rank} has sent no ballot since its last verdict")
        with box.changed:
            box.changed.wait_for(lambda: not box.late_ranks(self.n_sent), box.deadline_s)
            late = box.late_ranks(self.n_sent)
            if late:
                raise RankLate(late, box.deadline_s)
            self.last_verdict = box.reduced(self.n_sent)
        self.is_ballot_out = False
        return self.last_verdict

    def exchange(self, report: bytes) -> list[bytes]:
        """Every rank's report by rank; empty for one that did not give any before the deadline."""
        box = self.mailbox
        with box.changed:
            self.n_exchanges += 1
            box.reports.setdefault(self.n_exchanges, {})[self.rank] = report
            given = box.reports[self.n_exchanges]
            box.changed.notify_all()
            box.changed.wait_for(lambda: len(given) == box.n_ranks, box.deadline_s)
            return [given.get(rank, b"") for rank in range(box.n_ranks)]

    def close(self) -> None:
        """Nothing to give back; a ballot after it is a mistake."""
        self.is_closed = True


def in_process_ranks(
    n_ranks: int, deadline_s: float = 0.0, ballot_length: int | None = None
) -> list[SimRanks]:
    """The ends of one new mailbox, by rank."""
    mailbox = Mailbox(n_ranks, deadline_s, ballot_length)
    return [SimRanks(mailbox, rank) for rank in range(n_ranks)]
