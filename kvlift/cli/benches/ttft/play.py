"""One play: all requests through kvlift's driver, in one mode, over one link."""

import gc
import shutil
import sys
import time
from collections import deque

import torch
from attrs import define, field, frozen

from kvlift.cli.benches.ttft.batch import Batch, Row, StepTime
from kvlift.cli.benches.ttft.link import Link
from kvlift.cli.benches.ttft.machine import Machine
from kvlift.cli.benches.ttft.prefill import Computed
from kvlift.cli.benches.ttft.stopwatch import Stopwatch, TickTime
from kvlift.cli.benches.ttft.verify import Verifier
from kvlift.cli.benches.ttft.workload import Turn
from kvlift.core.ballot import ballot_length
from kvlift.core.prompt import Prompt
from kvlift.core.tier import Source
from kvlift.effects.clock import MonotonicClock
from kvlift.effects.lone_rank import LoneRank
from kvlift.effects.wakeup import Wakeup
from kvlift.runtime.config import Config
from kvlift.runtime.driver import Driver
from kvlift.runtime.interpret import Ports
from kvlift.runtime.tick import Granted, Ready, Tick

IDLE_S = 0.002
PLAY_S_MAX = 180.0
THREAD_TURN_S = 0.0005
"""How long prefill's and the link's threads keep the interpreter from the scheduler's."""

GBPS = 1e9 / 8


@define
class Served:
    """One request, as its user saw it. Times in seconds since the play began."""

    turn: Turn
    pages: dict[str, int] = field(factory=dict)
    ready_s: float | None = None
    joined_s: float = 0.0
    ended_s: float = 0.0
    failed: str = ""
    steps: list[int] = field(factory=list)

    @property
    def ttft_s(self) -> float:
        assert self.ready_s is not None
        return self.ready_s - self.turn.arrival_s

    @property
    def tpot_s(self) -> float:
        return (self.ended_s - self.joined_s) / max(1, self.turn.n_output - 1)


@frozen
class Lag:
    """What kvlift and the scheduler add to one request; seconds. From its arrival to its first
    want, and from the last that came from prefill (pages, token) to ready."""

    to_want_s: float
    to_ready_s: float


@define
class Played:
    mode: str
    gbps: float
    served: list[Served]
    times: list[StepTime]
    computed: dict[str, Computed]
    bytes_from_peer: int
    wall_s: float
    n_verified: int
    leaks: int
    lags: "list[Lag]"
    ticks: "list[TickTime]"


def config_of(machine: Machine, mode: str) -> Config:
    """`none` keeps pages as `device` does, but no request can find those of another."""
    sizes = machine.sizes
    fields: dict[str, object] = {
        "page_tokens": sizes.page_tokens,
        "device_pages": sizes.device_pages,
        "host_pages": sizes.host_pages if mode in ("host", "all") else 0,
        "write": "through" if mode in ("host", "all") else "none",
        "persist": "on" if mode == "all" else "off",
        "prefetch_min_pages": 1,
    }
    return Config.parse(fields)


class Play:
    """The scheduler of the decode side: arrivals, ticks, steps."""

    def __init__(self, machine: Machine, turns: tuple[Turn, ...], mode: str, gbps: float) -> None:
        self._machine = machine
        self._mode, self._gbps = mode, gbps
        self._turns = turns
        self._waiting: deque[Turn] = deque(turns)
        self._served = {turn.rid: Served(turn) for turn in turns}
        self._ready: dict[str, Ready] = {}
        self._granted: dict[str, tuple[int, ...]] = {}
        self._n_open = len(turns)
        self._verifier = Verifier(machine)
        machine.prefill.forget()
        config = config_of(machine, mode)
        wakeup = Wakeup()
        store = machine.store(wakeup.ring) if mode == "all" else None
        self._link = Link(machine.prefill, machine.stage, turns, gbps * GBPS, wakeup.ring)
        ports = Ports(
            copies=machine.copies(wakeup.ring),
            peers=self._link,
            ranks=LoneRank(ballot_length(config.policy())),
            clock=MonotonicClock(),
            store=store,
            wakeup=wakeup,
        )
        self._stopwatch = Stopwatch()
        self._driver = Driver(config, ports, self._stopwatch)
        self._batch = Batch(machine.step, machine.sizes.batch)
        self._begin_s = 0.0

    def run(self) -> Played:
        """Raises `RuntimeError` where a thread has stopped or the play takes too long."""
        prefill = self._machine.prefill
        prefill.start()
        gc.collect()
        gc.freeze()
        switch_s = sys.getswitchinterval()
        sys.setswitchinterval(THREAD_TURN_S)
        self._begin_s = time.perf_counter()
        try:
            while self._n_open:
                self._turn()
                if prefill.error is not None:
                    raise RuntimeError("prefill has stopped") from prefill.error
                if self._now_s() > PLAY_S_MAX:
                    raise RuntimeError(f"the play has not ended within {PLAY_S_MAX:g} s")
            wall_s = self._now_s()
            leaks = self._leaks()
        finally:
            prefill.stop()
            self._driver.close()
            sys.setswitchinterval(switch_s)
            gc.unfreeze()
            for left in self._machine.folder.iterdir():
                shutil.rmtree(left, ignore_errors=True)
        return Played(
            mode=self._mode,
            gbps=self._gbps,
            served=[self._served[turn.rid] for turn in self._turns],
            times=self._batch.times,
            computed=dict(prefill.computed),
            bytes_from_peer=self._link.n_bytes,
            wall_s=wall_s,
            n_verified=self._verifier.result(),
            leaks=leaks,
            lags=[self._lag(self._served[turn.rid]) for turn in self._turns],
            ticks=self._stopwatch.ticks,
        )

    def _lag(self, served: Served) -> Lag:
        moments = self._link.moments[served.turn.rid]
        assert served.ready_s is not None
        came_s = max(moments.landed_s, moments.token_s) - self._begin_s
        wanted_s = (moments.wanted_s or moments.held_s) - self._begin_s
        return Lag(wanted_s - served.turn.arrival_s, served.ready_s - came_s)

    def _now_s(self) -> float:
        return time.perf_counter() - self._begin_s

    def _turn(self) -> None:
        """Arrivals, a tick, a step queued, the step before it landed."""
        while self._waiting and self._waiting[0].arrival_s <= self._now_s():
            self._submit(self._waiting.popleft())
        self._hear(self._driver.tick())
        is_stepping = self._batch.launch()
        if self._batch.n_flying > (1 if is_stepping else 0):
            for row in self._batch.land():
                self._end(row)
        elif not is_stepping and not (self._ready and self._batch.has_room):
            left_s = self._waiting[0].arrival_s - self._now_s() if self._waiting else IDLE_S
            self._driver.wait(max(0.0, min(IDLE_S, left_s)))

    def _submit(self, turn: Turn) -> None:
        salt = turn.rid if self._mode == "none" else ""
        prompt = Prompt(self._machine.namespace(salt), turn.tokens, self._machine.sizes.page_tokens)
        n_pages = self._machine.sizes.n_pages_output
        self._driver.submit(turn.rid, prompt, peer="link", n_pages_output=n_pages)

    def _hear(self, tick: Tick) -> None:
        for grown in tick.grown:
            if grown.device_pages:
                self._granted[grown.rid] = grown.device_pages
        for rid in [rid for rid in self._ready if rid not in self._granted]:
            answer = self._driver.grow(rid, self._machine.sizes.n_pages_output)
            if isinstance(answer, Granted):
                self._granted[rid] = answer.device_pages
        for rid in list(self._granted):
            if self._batch.has_room:
                pages = self._ready.pop(rid).device_pages + self._granted.pop(rid)
                self._served[rid].joined_s = self._now_s()
                self._batch.join(self._served[rid].turn, pages)
        for ready in tick.ready:
            self._is_ready(ready)
        for ended in tick.ended:
            if not self._served[ended.rid].ended_s:
                self._served[ended.rid].failed = ended.reason or ended.outcome.value
                self._n_open -= 1

    def _is_ready(self, ready: Ready) -> None:
        served = self._served[ready.rid]
        served.ready_s = self._now_s()
        served.pages = {source.value: n for source, n in ready.n_pages_by_source.items() if n}
        n_from_peer = ready.n_pages_by_source.get(Source.PEER, 0)
        self._verifier.look(served.turn, ready.device_pages, n_from_peer)
        self._driver.run(ready.rid)
        self._ready[ready.rid] = ready

    def _end(self, row: Row) -> None:
        served = self._served[row.turn.rid]
        served.ended_s = row.ended_s - self._begin_s
        served.steps = row.steps
        self._driver.finish(row.turn.rid, row.turn.output)
        self._n_open -= 1

    def _leaks(self) -> int:
        """Requests that the driver still has when all have ended and nothing moves any more."""
        until_s = time.perf_counter() + 20.0
        while time.perf_counter() < until_s:
            if not self._driver.tick().is_busy:
                break
            self._driver.wait(IDLE_S)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return len(self._driver.state.agreed.requests)
