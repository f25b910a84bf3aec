"""Runs in processes that test_ranks.py starts: ranks that tick until something happens."""

import time
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from attrs import frozen

from kvlift.effects.ports import RankLate, RankLost
from kvlift.effects.ranks_gloo import GlooRanks, join_store
from kvlift.runtime.worker.rank_ports import sum_over_ranks


@frozen
class Ended:
    """How a rank's loop ended: the error's name, whom it names, how long the call took."""

    how: str
    ranks: tuple[int, ...]
    after_s: float
    closed_in_s: float
    message: str


def tick_until_it_ends(
    rank: int, n_ranks: int, port: int, deadline_s: float, to_test: Connection
) -> None:
    """Reports "ticking" after ten rounds, then ticks on until the group ends."""
    store = join_store("127.0.0.1", port)
    ranks = GlooRanks(rank, n_ranks, store, deadline_s=deadline_s, ballot_length=16)
    n_rounds = 0
    while True:
        called_at_s = time.monotonic()
        try:
            ranks.send([n_rounds] * 16)
            time.sleep(0.005)
            called_at_s = time.monotonic()
            ranks.verdict()
        except (RankLate, RankLost) as error:
            failed_at_s = time.monotonic()
            ranks.close()
            closed_in_s = time.monotonic() - failed_at_s
            how, after_s = type(error).__name__, failed_at_s - called_at_s
            to_test.send(Ended(how, error.ranks, after_s, closed_in_s, str(error)))
            return
        n_rounds += 1
        if n_rounds == 10:
            to_test.send("ticking")


def sum_until_it_ends(
    rank: int, n_ranks: int, port: int, deadline_s: float, to_test: Connection
) -> None:
    """A model's sums over the ranks. Reports "ticking" after ten."""
    store = dist.PrefixStore("model", join_store("127.0.0.1", port))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=n_ranks)
    n_rounds = 0
    while True:
        called_at_s = time.monotonic()
        try:
            assert sum_over_ranks(deadline_s, torch.ones(3)).tolist() == [n_ranks] * 3
        except RuntimeError as error:
            after_s = time.monotonic() - called_at_s
            to_test.send(Ended("RuntimeError", (), after_s, 0.0, str(error)))
            return
        time.sleep(0.005)
        n_rounds += 1
        if n_rounds == 10:
            to_test.send("ticking")


def rounds_per_second(rank: int, port: int, n_rounds: int, to_test: Connection) -> None:
    """Two ranks, ballots of 1,290 numbers (256 slots)."""
    store = join_store("127.0.0.1", port)
    ranks = GlooRanks(rank, 2, store, deadline_s=20, ballot_length=1290)
    ballot = [rank] * 1290
    started_s = time.monotonic()
    for _ in range(n_rounds):
        ranks.send(ballot)
        assert ranks.verdict()[0] == 0
    to_test.send(n_rounds / (time.monotonic() - started_s))
    ranks.close()


def tick_once_and_leave(rank: int, n_ranks: int, port: int, to_test: Connection) -> None:
    """Rank 0 leaves in good order after one round; the others tick on."""
    store = join_store("127.0.0.1", port)
    ranks = GlooRanks(rank, n_ranks, store, deadline_s=10, ballot_length=1)
    ranks.send([rank])
    ranks.verdict()
    if rank == 0:
        ranks.close()
        return
    try:
        ranks.send([rank])
        ranks.verdict()
    except RankLost as error:
        to_test.send(Ended("RankLost", error.ranks, 0.0, 0.0, str(error)))
    ranks.close()
