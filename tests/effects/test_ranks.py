"""The ranks port over gloo and alone: conformance, then real processes that stop and die."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess

import pytest

from kvlift.effects.clock import MonotonicClock
from kvlift.effects.lone_rank import REPORT_BYTES_MAX, LoneRank
from kvlift.effects.ports import Clock, RankLate, RankLost, Ranks
from kvlift.effects.ranks_gloo import GlooRanks, join_store, open_store
from kvlift.effects.ranks_heartbeat import Line, Standing
from tests.effects.rank_process import (
    Ended,
    rounds_per_second,
    sum_until_it_ends,
    tick_once_and_leave,
    tick_until_it_ends,
)
from tests.effects.ranks_conformance import MakeGroup, RanksConformance, on_every_rank

DEADLINE_S = 1.5


@contextmanager
def gloo_group(
    n_ranks: int, ballot_length: int | Sequence[int], *, deadline_s: float = 20.0
) -> Iterator[list[GlooRanks]]:
    """All ranks in this process, each with a connection of its own."""
    lengths = [ballot_length] * n_ranks if isinstance(ballot_length, int) else list(ballot_length)
    launcher = open_store()
    made: dict[int, GlooRanks] = {}
    errors: list[ValueError | RankLate] = []

    def join(rank: int) -> None:
        try:
            made[rank] = GlooRanks(
                rank,
                n_ranks,
                join_store("127.0.0.1", launcher.port),
                deadline_s=deadline_s,
                ballot_length=lengths[rank],
                join_timeout_s=20,
            )
        except (ValueError, RankLate) as error:
            errors.append(error)

    threads = [threading.Thread(target=join, args=(rank,), daemon=True) for rank in range(n_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    if errors:
        raise errors[0]
    group = [made[rank] for rank in range(n_ranks)]
    try:
        yield group
    finally:
        for ranks in group:
            ranks.close()


@contextmanager
def lone_group(n_ranks: int, ballot_length: int) -> Iterator[list[LoneRank]]:
    assert n_ranks == 1
    yield [LoneRank(ballot_length)]


class TestGlooConforms(RanksConformance):
    @pytest.fixture
    def make_group(self) -> MakeGroup:
        return gloo_group


class TestTheLoneRankConforms(RanksConformance):
    n_ranks = 1

    @pytest.fixture
    def make_group(self) -> MakeGroup:
        return lone_group


def test_ranks_with_ballots_of_different_lengths_are_refused_before_gloo() -> None:
    with (
        pytest.raises(ValueError, match="start all ranks with one config"),
        gloo_group(2, [4, 5]),
    ):
        pass


def test_a_rank_cannot_join_twice() -> None:
    launcher = open_store()
    with pytest.raises(RankLate) as late:
        GlooRanks(0, 2, launcher, deadline_s=1, ballot_length=1, join_timeout_s=0.1)
    assert late.value.ranks == (1,)
    with pytest.raises(ValueError, match="new name"):
        GlooRanks(0, 2, launcher, deadline_s=1, ballot_length=1, join_timeout_s=0.1)


def test_impossible_groups_are_refused() -> None:
    launcher = open_store()
    with pytest.raises(ValueError, match="rank 2"):
        GlooRanks(2, 2, launcher, deadline_s=1, ballot_length=1)
    with pytest.raises(ValueError, match="deadline"):
        GlooRanks(0, 2, launcher, deadline_s=0, ballot_length=1)


def test_sending_returns_before_the_others_have_sent() -> None:
    with gloo_group(2, 64) as (first, second):
        started_s = time.monotonic()
        first.send([1] * 64)
        assert time.monotonic() - started_s < 0.2
        time.sleep(0.3)
        second.send([2] * 64)
        assert first.verdict() == second.verdict() == (1,) * 64


def test_a_rank_whose_loop_is_stuck_is_named_although_it_beats() -> None:
    with gloo_group(3, 1, deadline_s=0.4) as group:
        for ranks in (group[0], group[2]):
            ranks.send([1])
        with pytest.raises(RankLate) as late:
            group[0].verdict()
        assert late.value.ranks == (1,)
        with pytest.raises(RankLate) as heard:
            group[2].verdict()
        assert heard.value.ranks == (1,)
        with pytest.raises(RuntimeError, match="rank 1 is late"):
            group[0].send([1])
        group[1].send([1])
        with pytest.raises(RankLost, match="given this rank up as late") as lost:
            group[1].verdict()
        assert set(lost.value.ranks) <= {0, 2}


def test_a_late_report_names_its_rank_within_the_deadline() -> None:
    with gloo_group(2, 1, deadline_s=0.3) as (first, _):
        started_s = time.monotonic()
        with pytest.raises(RankLate) as late:
            first.exchange(b"mine")
        assert late.value.ranks == (1,)
        assert time.monotonic() - started_s < 2


def test_reports_have_a_limit() -> None:
    whole = bytes(range(256)) * (REPORT_BYTES_MAX // 256)
    with gloo_group(2, 1) as group:
        with pytest.raises(ValueError, match="shorten"):
            group[0].exchange(whole + b"x")
        reports = on_every_rank(group, lambda ranks: ranks.exchange(whole))
        assert all(report == whole for heard in reports for report in heard)


def test_a_heartbeat_line_says_the_same_after_a_round_trip() -> None:
    for line in (Line(), Line(3, 2, Standing.LATE, (0, 7)), Line(1, 1, Standing.LOST, ())):
        assert Line.parse(line.to_text().encode()) == line
    for damaged in (b"", b"1 2 here", b"1 2 gone -", b"x 2 here -", b"1 2 here -" + b" " * 20000):
        with pytest.raises(ValueError):
            Line.parse(damaged)


def test_the_clock_never_goes_back() -> None:
    clock: Clock = MonotonicClock()
    readings = [clock.now_ns() for _ in range(1000)]
    assert readings == sorted(readings)
    time.sleep(0.01)
    assert clock.now_ns() - readings[-1] >= 10_000_000


def test_the_ports_have_the_types_of_the_contract() -> None:
    lone: Ranks = LoneRank(1)
    with gloo_group(2, 1) as group:
        real: Ranks = group[0]
        assert (lone.n_ranks, real.n_ranks) == (1, 2)


class Processes:
    """Ranks in real processes; a fork server that has torch loaded makes starting them cheap."""

    def __init__(self) -> None:
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["tests.effects.rank_process"])
        self.launcher = open_store()
        self.processes: list[ForkServerProcess] = []
        self.pipes: list[Connection] = []

    def start(self, target: Callable[..., None], *args: object) -> None:
        ours, theirs = self.context.Pipe(duplex=False)
        process = self.context.Process(target=target, args=(*args, theirs), daemon=True)
        process.start()
        theirs.close()
        self.processes.append(process)
        self.pipes.append(ours)

    def signal(self, rank: int, number: signal.Signals) -> None:
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, number)

    def heard(self, rank: int, timeout_s: float = 40) -> object:
        assert self.pipes[rank].poll(timeout_s), f"rank {rank} said nothing"
        return self.pipes[rank].recv()

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join(10)


@pytest.fixture
def processes() -> Iterator[Processes]:
    group = Processes()
    yield group
    group.end()


def start_ticking(
    processes: Processes, n_ranks: int, loop: Callable[..., None] = tick_until_it_ends
) -> None:
    port = processes.launcher.port
    for rank in range(n_ranks):
        processes.start(loop, rank, n_ranks, port, DEADLINE_S)
    for rank in range(n_ranks):
        assert processes.heard(rank) == "ticking"


@pytest.mark.real
@pytest.mark.parametrize("stopped", [0, 1, 2])
def test_a_stopped_rank_is_named_by_all_others_within_the_deadline(
    processes: Processes, stopped: int
) -> None:
    start_ticking(processes, 3)
    processes.signal(stopped, signal.SIGSTOP)
    for rank in {0, 1, 2} - {stopped}:
        ended = processes.heard(rank)
        assert isinstance(ended, Ended)
        assert (ended.how, ended.ranks) == ("RankLate", (stopped,))
        assert ended.after_s < DEADLINE_S + 0.5
        assert ended.closed_in_s < 2
        processes.processes[rank].join(10)
        assert processes.processes[rank].exitcode == 0
    processes.signal(stopped, signal.SIGCONT)
    woken = processes.heard(stopped)
    assert isinstance(woken, Ended)
    assert woken.how == "RankLost"
    assert set(woken.ranks) <= {0, 1, 2} - {stopped}


@pytest.mark.real
@pytest.mark.parametrize("loop", [tick_until_it_ends, sum_until_it_ends])
def test_ranks_that_all_stood_still_for_longer_than_the_deadline_go_on(
    processes: Processes, loop: Callable[..., None]
) -> None:
    """Rank 0 falls asleep first and wakes up last: the others were waiting for it meanwhile."""
    start_ticking(processes, 3, loop)
    for rank in range(3):
        processes.signal(rank, signal.SIGSTOP)
        time.sleep(0.1)
    time.sleep(DEADLINE_S)
    for rank in (1, 2, 0):
        processes.signal(rank, signal.SIGCONT)
        time.sleep(0.1)
    time.sleep(DEADLINE_S)
    assert not any(pipe.poll(0) for pipe in processes.pipes), "none has given up"
    processes.signal(0, signal.SIGSTOP)
    ended = processes.heard(1)
    assert isinstance(ended, Ended), "and who is really late is still found"
    assert DEADLINE_S / 2 < ended.after_s < DEADLINE_S + 0.5


@pytest.mark.real
@pytest.mark.parametrize("killed", [0, 2])
def test_a_killed_rank_is_named_by_all_others_within_the_deadline(
    processes: Processes, killed: int
) -> None:
    start_ticking(processes, 3)
    processes.signal(killed, signal.SIGKILL)
    for rank in {0, 1, 2} - {killed}:
        ended = processes.heard(rank)
        assert isinstance(ended, Ended)
        assert (ended.how, ended.ranks) == ("RankLost", (killed,)), ended.message
        assert ended.after_s < DEADLINE_S + 0.5
        processes.processes[rank].join(10)
        assert processes.processes[rank].exitcode == 0


@pytest.mark.real
def test_a_rank_that_leaves_in_good_order_is_named_before_the_deadline(
    processes: Processes,
) -> None:
    started_s = time.monotonic()
    for rank in range(2):
        processes.start(tick_once_and_leave, rank, 2, processes.launcher.port)
    lost = processes.heard(1)
    assert isinstance(lost, Ended)
    assert lost.ranks == (0,)
    assert "left the group" in lost.message
    assert time.monotonic() - started_s < 10 + 5


HOST_THAT_CRASHES = """
import sys
from kvlift.effects.ranks_gloo import GlooRanks, join_store
store = join_store("127.0.0.1", int(sys.argv[1]))
ranks = GlooRanks(1, 2, store, deadline_s=20, ballot_length=1)
ranks.send([1])
raise ArithmeticError("the host has crashed")
"""


@pytest.mark.real
def test_a_host_that_crashes_with_a_ballot_on_its_way_does_not_hang_at_its_exit() -> None:
    launcher = open_store()
    command = [sys.executable, "-c", HOST_THAT_CRASHES, str(launcher.port)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as host:
        store = join_store("127.0.0.1", launcher.port)
        with closing(GlooRanks(0, 2, store, deadline_s=20, ballot_length=1)):
            try:
                _, errors = host.communicate(timeout=20)
            finally:
                host.kill()
    assert host.returncode == 1
    assert "ArithmeticError: the host has crashed" in errors


@pytest.mark.real
def test_a_thousand_ballots_take_a_few_seconds_at_most(
    processes: Processes, record_property: Callable[[str, object], None]
) -> None:
    for rank in range(2):
        processes.start(rounds_per_second, rank, processes.launcher.port, 1000)
    rates = [processes.heard(rank) for rank in range(2)]
    assert all(isinstance(rate, float) and rate > 50 for rate in rates)
    record_property("ballots_per_second", rates[0])
