"""One run: a phase in which anything may fail, a phase in which everything must finish."""

from collections.abc import Callable, Sequence
from hashlib import sha256
from random import Random
from typing import Final

from attrs import define, field, frozen

from kvlift.core.ballot import RanksDiverged
from kvlift.runtime.tick import Tick
from kvlift.testing.sim.checks import Checks, cached_bytes, leaks, stored_bytes, words_of
from kvlift.testing.sim.faults import Faults
from kvlift.testing.sim.host import Host
from kvlift.testing.sim.plan import Options, Plan, drawn_plan
from kvlift.testing.sim.scribe import Scribe
from kvlift.testing.sim.weather import Weather
from kvlift.testing.sim.workload import (
    Author,
    DrawnAuthor,
    TraceAuthor,
    pages_of_trace,
    trace_window,
)
from kvlift.testing.sim.world import World

QUIET_TICKS: Final = 2
"""Ticks in a row in which nothing happened; then time jumps to whatever comes next."""

N_REQUESTS_MAX: Final = 1 << 30
TICKS_TO_FINISH: Final = 400
TICKS_A_REQUEST: Final = 80
"""Bounds of the second phase, beside a tick or two for every token that is still to be decoded."""

DEADLINES_TO_FINISH: Final = 40
"""They are counted from the last tick in which a rank waited for a deadline: as often, at most."""


@frozen(kw_only=True)
class Violation:
    """`claim` begins with the checker's name."""

    seed: int
    tick: int
    claim: str


@frozen(kw_only=True)
class Result:
    """One seed. `faults`: times each kind struck; `digest`: of everything that was decided."""

    seed: int
    n_ticks: int
    n_requests: int
    ended: dict[str, int]
    hit: dict[str, int]
    n_widened: int
    n_retracted: int
    faults: dict[str, int]
    n_failed_by_cache: int
    n_leaks: int
    n_divergences: int
    virtual_s: float
    n_ranks: int
    digest: str
    violations: tuple[Violation, ...]
    is_repeated: bool = False


@define(eq=False)
class Run:
    """`play` it once. `scribes`: they look over the ranks' shoulders; `change`: of the plan."""

    seed: int
    options: Options
    scribes: Sequence[Scribe] = ()
    change: Callable[[Plan], Plan] = lambda plan: plan
    world: World = field(init=False)
    host: Host = field(init=False)
    weather: Weather = field(init=False)
    checks: Checks = field(factory=Checks)
    n_ticks: int = 0
    violations: list[Violation] = field(factory=list)
    n_leaks: int = 0
    n_divergences: int = 0
    _decided: bytes = bytes(32)
    _n_quiet: int = 0

    def __attrs_post_init__(self) -> None:
        window = trace_window(self.options.trace, self.seed) if self.options.trace else []
        least = pages_of_trace(window) if window else 4
        plan = self.change(drawn_plan(self.seed, self.options, least_device_pages=least))
        n_left = self.options.n_requests_max
        author: Author = DrawnAuthor(plan, N_REQUESTS_MAX if n_left is None else n_left)
        if self.options.trace:
            author = TraceAuthor(plan, window[:n_left])
        first_tokens: dict[str, int] = {}
        faults = Faults.drawn(self.seed, self.options.faults)
        self.world = World(plan, faults, first_tokens, self.scribes)
        self.world.warm_up(author.warm, Random(f"{self.seed}/warm"))
        self.checks.know(author.warm)
        self.host = Host(plan, author, first_tokens)
        self.weather = Weather(self.world)

    def play(self) -> Result:
        for _ in range(self.options.n_ticks):
            if self.violations or self.host.is_done():
                break
            self.weather.strike()
            self._round()
        self._finish()
        return self._result()

    def _finish(self) -> None:
        self.weather.heal()
        self.weather.paused_ns = 0
        self.host.is_closing = True
        n_alive = len(self.host.alive())
        n_most = TICKS_TO_FINISH + TICKS_A_REQUEST * n_alive + 2 * self.host.n_answer_tokens_left()
        left: Sequence[str] = ()
        n_since_due = 0
        for _ in range(DEADLINES_TO_FINISH * n_most):
            if self.violations:
                return
            if n_since_due == n_most:
                break
            self._round()
            n_since_due = 0 if self._is_something_due() else n_since_due + 1
            if self.host.is_done():
                left = list(leaks(self.world))
                if not left:
                    for claim in (*cached_bytes(self.world), *stored_bytes(self.world)):
                        self._broken(claim)
                    return
        for job in self.host.alive():
            self._broken(f"liveness: {job.rid} is still {job.stand.value} after {n_most} ticks")
        self.n_leaks = len(left)
        for leak in left:
            self._broken(leak)

    def _is_something_due(self) -> bool:
        """A rank waits for a deadline: one of 30 s may lie behind a thousand late answers, each of
        which is a tick or two."""
        return self.world.next_deadline_ns() is not None

    def _broken(self, claim: str) -> None:
        self.violations.append(Violation(seed=self.seed, tick=self.n_ticks, claim=claim))

    # One round.

    def _round(self) -> None:
        try:
            ticks = self._ticks()
        except RanksDiverged as diverged:
            self.n_divergences += 1
            self._broken(f"agreement: {diverged}")
            return
        except Exception as error:  # noqa: BLE001 - whatever a driver raises is a finding
            self._broken(f"calls: {_where(error)}")
            return
        found = [*self.host.claims, *self.checks.broken(self.world, ticks, self.host.jobs)]
        found += [f"failed_by_cache: {said}" for said in self.host.failed_by_cache]
        for claim in found:
            self._broken(claim)
        if any(claim.startswith("agreement") for claim in found):
            self.n_divergences += 1
        self._pass_time(ticks)

    def _ticks(self) -> list[Tick]:
        """What the host asks, one tick of every rank, and what the host makes of it."""
        world = self.world
        for rank in world.ranks:
            rank.clear_effects()
        self.host.schedule(world)
        ticks = [driver.tick() for driver in world.drivers]
        self.n_ticks += 1
        self.host.hear(world, ticks)
        world.look()
        said = f"{world.agenda.now_ns}:{words_of(ticks[0])}".encode()
        self._decided = sha256(self._decided + world.drivers[0].state.agreed.digest + said).digest()
        return ticks

    def _pass_time(self, ticks: Sequence[Tick]) -> None:
        """A step of decoding, a pause, or a jump over time in which nothing can happen."""
        world, agenda = self.world, self.world.agenda
        is_quiet = (
            not any(rank.effects() for rank in world.ranks)
            and not words_of(ticks[0])
            and not self.host.is_moving()
            and agenda.n_happened == 0
        )
        self._n_quiet = self._n_quiet + 1 if is_quiet else 0
        agenda.n_happened = 0
        until_ns = agenda.now_ns + max(world.plan.step_ns, self.weather.paused_ns)
        if self._n_quiet >= QUIET_TICKS:
            coming = (agenda.next_ns(), self.host.next_arrival_ns(), world.next_deadline_ns())
            times = [time_ns for time_ns in coming if time_ns is not None]
            until_ns = max(until_ns, min(times, default=until_ns))
            self._n_quiet = 0
        agenda.run_until(until_ns)
        world.set_clocks()

    def _result(self) -> Result:
        host, world = self.host, self.world
        return Result(
            seed=self.seed,
            n_ticks=self.n_ticks,
            n_requests=host.n_submitted,
            ended=dict(host.ended),
            hit=dict(host.hit),
            n_widened=world.wires[0].n_widened,
            n_retracted=host.n_retracted,
            faults={kind: n for kind, n in sorted(world.faults.struck.items()) if n},
            n_failed_by_cache=len(host.failed_by_cache),
            n_leaks=self.n_leaks,
            n_divergences=self.n_divergences,
            virtual_s=world.agenda.now_ns / 1e9,
            n_ranks=world.plan.n_ranks,
            digest=self._decided.hex(),
            violations=tuple(self.violations),
        )


def _where(error: Exception) -> str:
    """An exception in one line, with the place that raised it."""
    trace = error.__traceback__
    place = ""
    while trace is not None:
        code = trace.tb_frame.f_code
        file = code.co_filename.rpartition("kvlift/")[2]
        place = f"{file}:{trace.tb_lineno} in {code.co_name}"
        trace = trace.tb_next
    return f"{type(error).__name__}: {error} ({place})"


def play(seed: int, options: Options) -> Result:
    """Play one seed. Raises `TraceError` where the trace can't be read."""
    return Run(seed, options).play()
