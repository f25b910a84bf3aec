"""Ranks over torch.distributed: one asynchronous MIN reduction a tick on gloo, on the CPU.

The rendezvous store lives with the launcher (`open_store`), not in a rank, so that rank 0 is
missed like any other. The group is kvlift's own: it never touches the host's default group, and
several of them can share a store under different names.

What gloo does not do is done here: a vector of another length never reaches it (it would end the
process from a thread where nobody can catch it), and a wait is given up without it (a gloo group
with a running operation cannot be aborted or destroyed, see `_abandon`).
"""

import atexit
import socket
import threading
import time
from array import array
from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol, cast

import torch
import torch.distributed as dist
from attrs import define, field

from kvlift.effects.lone_rank import checked_ballot
from kvlift.effects.patience import Patience
from kvlift.effects.ports import RankLate, RankLost
from kvlift.effects.ranks_heartbeat import Heartbeat, Standing
from kvlift.effects.ranks_rendezvous import GroupShape, Rendezvous, without_address


class _Reduces(Protocol):
    """What is used of ProcessGroupGloo; torch's own types leave it out."""

    def allreduce(
        self, tensors: list[torch.Tensor], options: dist.AllreduceOptions
    ) -> dist.Work: ...


def open_store(host: str = "127.0.0.1", port: int = 0, timeout_s: float = 30.0) -> dist.TCPStore:
    """The launcher's store; keep it open as long as the ranks live. Port 0: see `.port` after.

    The store knows no secrets and trusts who can reach it, so it listens on `host` alone: left to
    itself, torch would listen on every address of the machine, whatever host it is told.
    """
    listening = socket.create_server((host, port))
    return dist.TCPStore(
        host,
        listening.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listening.detach(),
    )


def join_store(host: str, port: int, timeout_s: float = 30.0) -> dist.TCPStore:
    """A rank's connection to the launcher's store."""
    return dist.TCPStore(
        host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
    )


def has_ended_within(work: dist.Work, wait_s: float) -> bool:
    """Whether a collective ended well. Raises RuntimeError, torch's, where it failed.

    A wait below 1 ms would be rounded to 0, which means forever to torch.
    """
    try:
        work.wait(timedelta(seconds=max(wait_s, 0.001)))
    except RuntimeError:
        if not work.is_completed():
            return False
        # Raises what it has failed with; what has to be copied back to a GPU is ordered by it.
        work.wait()
    return True


@define(eq=False)
class GlooRanks:
    """Implements `ports.Ranks`. All calls come from one thread.

    `store`: this rank's connection to the launcher's store (a store per rank).
    `group`: name of this group in the store; a restarted group needs a new one.
    `deadline_s`: longest wait in `verdict` and `exchange`, counted from the call, without time in
    which this process stood still.
    `ballot_length`: 64-bit numbers in a ballot, the same on every rank.
    `join_timeout_s`: longest wait in the constructor for the other ranks.
    `send_lifetime_s`: longest time from `send` to the end of its reduction; it bounds how long an
    abandoned group's threads stay, and must exceed the longest step of the host.

    Raises ValueError if the ranks were configured differently, RankLate if some did not come,
    RankLost if one has gone meanwhile.
    After RankLate or RankLost the group is over: every call but `close` raises RuntimeError.
    """

    rank: int
    n_ranks: int
    store: dist.Store = field(repr=False)
    deadline_s: float = field(kw_only=True)
    ballot_length: int = field(kw_only=True)
    group: str = field(default="kvlift", kw_only=True)
    join_timeout_s: float = field(default=60.0, kw_only=True)
    send_lifetime_s: float = field(default=600.0, kw_only=True)
    _rendezvous: Rendezvous = field(init=False, repr=False)
    _beat: Heartbeat = field(init=False, repr=False)
    _gloo: _Reduces | None = field(default=None, init=False, repr=False)
    _running: tuple[dist.Work, "array[int]"] | None = field(default=None, init=False, repr=False)
    _over: str = field(default="", init=False)

    def __attrs_post_init__(self) -> None:
        if not 0 <= self.rank < self.n_ranks:
            raise ValueError(f"rank {self.rank} is not one of {self.n_ranks} ranks")
        if self.deadline_s <= 0 or self.ballot_length < 1:
            raise ValueError("a group needs a deadline above 0 s and ballots of at least 1 number")
        own_keys = dist.PrefixStore(f"kvlift/{self.group}", self.store)
        shape = GroupShape(self.n_ranks, self.ballot_length)
        self._rendezvous = Rendezvous(self.rank, self.n_ranks, own_keys)
        self._rendezvous.claim(self.group)
        period_s = min(max(self.deadline_s / 20, 0.01), 0.1)
        self._beat = Heartbeat(self.rank, self.n_ranks, own_keys, period_s)
        self._beat.announce()
        self._rendezvous.meet(shape, self.join_timeout_s)
        self._gloo = self._connected(own_keys)
        self._beat.start()
        # A host that dies of an exception with a ballot on its way must not hang at its exit.
        atexit.register(self.close)

    def _connected(self, own_keys: dist.Store) -> _Reduces:
        """gloo says at best which key or address it has waited for; this names the ranks."""
        keys = dist.PrefixStore("gloo", own_keys)
        timeout = timedelta(seconds=self.join_timeout_s)
        try:
            gloo = dist.ProcessGroupGloo(keys, self.rank, self.n_ranks, timeout=timeout)
        except RuntimeError as error:
            absent = without_address(keys, self.rank, self.n_ranks)
            if absent:
                raise RankLate(absent, self.join_timeout_s) from error
            raise RankLost((), f"while the ranks connected: {_first_line(str(error))}") from error
        return cast("_Reduces", gloo)

    @property
    def silence_s(self) -> float:
        """A rank that has not beaten for so long is called late: well inside the deadline."""
        return max(4 * self._beat.period_s, self.deadline_s / 4)

    def send(self, ballot: Sequence[int]) -> None:
        gloo = self._usable()
        if self._running is not None:
            raise RuntimeError("send() before the verdict of the last ballot was taken")
        # Numbers are written and read as an array: a tensor's `tolist` costs several times as much.
        numbers = array("q", checked_ballot(ballot, self.ballot_length))
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MIN)
        options.timeout = timedelta(seconds=self.send_lifetime_s)
        self._beat.count_sent()
        self._running = (
            gloo.allreduce([torch.frombuffer(numbers, dtype=torch.int64)], options),
            numbers,
        )

    def verdict(self) -> tuple[int, ...]:
        self._usable()
        if self._running is None:
            raise RuntimeError("verdict() without a ballot: call send() first")
        work, numbers = self._running
        self._wait_for(work)
        if not self._beat.is_calm:
            self._heed_the_others(heed_left=False)
        self._running = None
        return tuple(numbers)

    def _wait_for(self, work: dist.Work) -> None:
        patience = Patience(self.deadline_s)
        while not self._ended_within(work, patience):
            self._heed_the_others(heed_left=True)
            if not patience.left_s():
                late = self._suspects()
                raise self._given_up(RankLate(late, self.deadline_s))

    def exchange(self, report: bytes) -> list[bytes]:
        self._usable()
        try:
            return self._rendezvous.exchange(report, self.deadline_s)
        except (RankLate, RankLost) as error:
            raise self._given_up(error) from None

    def close(self) -> None:
        """Tells the others and returns within seconds, also when a rank or the store hangs."""
        if self._gloo is None:
            return
        atexit.unregister(self.close)
        self._beat.stop(timeout_s=1.0)
        gloo, running = self._gloo, self._running
        self._gloo, self._running = None, None
        self._over = self._over or "it was closed"
        if running is not None and not running[0].is_completed():
            _abandon(gloo, running)

    def _usable(self) -> _Reduces:
        if self._over or self._gloo is None:
            raise RuntimeError(f"this group is over ({self._over}): close it and start a new one")
        return self._gloo

    def _ended_within(self, work: dist.Work, patience: Patience) -> bool:
        """Whether the reduction ended well. Raises RankLost where it failed."""
        try:
            with patience.turn() as turn_s:
                return has_ended_within(work, turn_s)
        except RuntimeError as error:
            raise self._name_the_lost(str(error), patience) from None

    def _name_the_lost(self, reason: str, patience: Patience) -> RankLate | RankLost:
        """gloo knows an address at best; the heartbeat knows the rank a moment later."""
        first_line = _first_line(reason)
        while patience.left_s():
            self._heed_the_others(heed_left=True)
            silent = self._beat.silent_ranks(self.silence_s)
            if silent:
                return self._given_up(RankLost(silent, first_line))
            with patience.turn(self._beat.period_s / 2) as turn_s:
                time.sleep(turn_s)
        return self._given_up(RankLost(self._suspects(), first_line))

    def _suspects(self) -> tuple[int, ...]:
        beat, silence_s = self._beat, self.silence_s
        return beat.silent_ranks(silence_s) or beat.behind_ranks(silence_s)

    def _heed_the_others(self, *, heed_left: bool) -> None:
        """Raises what another rank has already found out, instead of waiting for it again."""
        for rank, line in sorted(self._beat.lines().items()):
            match line.standing:
                case Standing.HERE:
                    continue
                case Standing.LEFT:
                    if heed_left:
                        raise self._given_up(RankLost((rank,), "it has left the group"))
                case Standing.LATE | Standing.LOST if self.rank in line.blamed:
                    what = f"it has given this rank up as {line.standing.value}"
                    raise self._given_up(RankLost((rank,), what))
                case Standing.LATE:
                    raise self._given_up(RankLate(line.blamed, self.deadline_s))
                case Standing.LOST:
                    what = f"found by rank {rank}"
                    raise self._given_up(RankLost(line.blamed or (rank,), what))

    def _given_up(self, error: RankLate | RankLost) -> RankLate | RankLost:
        standing = Standing.LATE if isinstance(error, RankLate) else Standing.LOST
        self._over = str(error)
        self._beat.give_up(standing, error.ranks)
        return error


def _first_line(reason: str) -> str:
    return reason.splitlines()[0][:200] if reason else "its connection failed"


def _abandon(gloo: _Reduces, running: tuple[dist.Work, "array[int]"]) -> None:
    """Keep a group with a running operation alive until the operation or the process ends.

    Its destructor waits for the operation (ProcessGroupGloo has no abort), also at the
    interpreter's exit. The frame of a daemon thread is never torn down, so the process can exit.
    """

    def keep(*_kept: object) -> None:
        threading.Event().wait()

    name = "kvlift-abandoned-gloo"
    threading.Thread(target=keep, args=(gloo, running), name=name, daemon=True).start()
