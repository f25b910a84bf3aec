"""Ranks that go at bad moments: who is named, and who is not. Real processes where it matters."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess

import pytest
import torch.distributed as dist

from kvlift.effects.ports import RankLate, RankLost
from kvlift.effects.ranks_gloo import GlooRanks, join_store, open_store
from kvlift.effects.ranks_heartbeat import Heartbeat
from kvlift.effects.ranks_rendezvous import GroupShape, Rendezvous
from tests.effects.rank_process import Ended, tick_until_it_ends

SPAWN = multiprocessing.get_context("forkserver")
JOIN_S = 2.0


def joined(rank: int, n_ranks: int, port: int, join_timeout_s: float = JOIN_S) -> GlooRanks:
    store = join_store("127.0.0.1", port)
    return GlooRanks(
        rank, n_ranks, store, deadline_s=2.0, ballot_length=4, join_timeout_s=join_timeout_s
    )


def in_a_thread(rank: int, n_ranks: int, port: int) -> tuple[threading.Thread, list[Exception]]:
    raised: list[Exception] = []

    def join() -> None:
        try:
            joined(rank, n_ranks, port).close()
        except (RankLate, RankLost) as error:
            raised.append(error)

    thread = threading.Thread(target=join, daemon=True)
    thread.start()
    return thread, raised


def test_a_rank_that_goes_while_the_ranks_connect_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has met the others, and dies before gloo knows its address."""
    launcher = open_store()
    connect = dist.ProcessGroupGloo
    away = threading.Event()

    def stopped(store: dist.Store, rank: int, n_ranks: int, **more: object) -> object:
        if rank == 1:
            away.wait(30)
            raise RuntimeError("it is over")
        return connect(store, rank, n_ranks, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(dist, "ProcessGroupGloo", stopped)
    gone, _ = in_a_thread(1, 3, launcher.port)
    others = [in_a_thread(rank, 3, launcher.port) for rank in (0, 2)]
    for thread, raised in others:
        thread.join(20)
        [error] = raised
        assert isinstance(error, RankLate)
        assert error.ranks == (1,)
    away.set()
    gone.join(20)


def test_a_rank_that_comes_when_the_others_have_given_up_is_told_so_at_once() -> None:
    launcher = open_store()
    with pytest.raises(RankLate) as late:
        joined(0, 2, launcher.port, 0.3)
    assert late.value.ranks == (1,)
    began_s = time.monotonic()
    with pytest.raises(RankLost, match="has not waited") as lost:
        joined(1, 2, launcher.port, 20.0)
    assert lost.value.ranks == (0,)
    assert time.monotonic() - began_s < 10


def test_a_launcher_that_goes_while_the_ranks_meet_is_a_lost_group() -> None:
    class Gone(dist.HashStore):
        def check(self, keys: list[str]) -> bool:
            raise dist.DistNetworkError("Connection reset by peer")

    with pytest.raises(RankLost, match="store does not answer"):
        Rendezvous(0, 2, Gone()).meet(GroupShape(2, 4), JOIN_S)


def test_a_line_that_no_rank_writes_does_not_end_the_heartbeat() -> None:
    """It would make this rank the silent one."""
    store = dist.HashStore()
    beats = [Heartbeat(rank, 2, store, 0.02) for rank in range(2)]
    for beat in beats:
        beat.announce()
    beats[0].start()
    try:
        store.set("beat/1", "rubbish")
        time.sleep(0.2)
        n_before = store.get("beat/0")
        time.sleep(0.2)
        assert store.get("beat/0") != n_before
        assert beats[0].silent_ranks(0.1) == (1,)
    finally:
        beats[0].stop(5.0)


# The launcher, which has the store, is gone: nothing is known of anybody any more.


def keep_a_store(to_test: Connection) -> None:
    launcher = open_store()
    to_test.send(launcher.port)
    time.sleep(600)


@pytest.fixture
def started() -> Iterator[list[ForkServerProcess]]:
    processes: list[ForkServerProcess] = []
    yield processes
    for process in processes:
        process.kill()
        process.join(10)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_without_the_store_nobody_is_called_late_who_may_not_be(
    started: list[ForkServerProcess],
) -> None:
    here, there = SPAWN.Pipe()
    started.append(SPAWN.Process(target=keep_a_store, args=(there,), daemon=True))
    started[0].start()
    assert here.poll(60)
    port = here.recv()
    ends = []
    for rank in range(3):
        mine, its = SPAWN.Pipe()
        ends.append(mine)
        started.append(SPAWN.Process(target=tick_until_it_ends, args=(rank, 3, port, 2.0, its)))
        started[-1].start()
    for end in ends:
        assert end.poll(60)
        assert end.recv() == "ticking"
    started[0].kill()
    time.sleep(1.0)  # the others have sent some hundred ballots since the last beat that was heard
    pid = started[2].pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    for rank in (0, 2):
        assert ends[rank].poll(60)
        ended = ends[rank].recv()
        assert isinstance(ended, Ended)
        assert ended.ranks in ((), (1,)), ended.message
