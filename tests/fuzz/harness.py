"""Feeds a surface with many inputs, and measures what each of them costs.

An input is a string of bytes, so whatever is found can be kept as a file and fed again. A surface
raises when something is wrong: an error outside of the declared ones, a broken promise. A hang and
a growing memory are found here.
"""

import base64
import resource
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable
from random import Random
from types import FrameType
from typing import Any, Final, Protocol

import hypothesis
from attrs import define, field
from hypothesis import strategies as st

CPU_S_MAX: Final = 2.0
"""Processor time that one input may take."""

WALL_S_MAX: Final = 60.0
"""After so long an input is interrupted: it hangs, even on a busy machine."""

GROWTH_BYTES_MAX: Final = 192 << 20
"""By so much the peak of resident memory may exceed what it was after the first inputs."""

ADDRESS_BYTES_MORE: Final = 8 << 30
"""Address space beyond that of the start: one absurd allocation is refused, not swapped."""

N_WARM: Final = 200
N_FAILURES_MAX: Final = 20
SHOWN_BYTES_MAX: Final = 4096


class Surface(Protocol):
    """Something that is fed from outside."""

    name: str

    def made(self, draw: Random) -> bytes:
        """An input by the grammar: valid, or valid with changes."""

    def fed(self, data: bytes) -> str:
        """Feed one input; a word for how it ended. Raises where a promise is broken."""

    def close(self) -> None: ...


class HangError(Exception):
    """One input took longer than `WALL_S_MAX`."""


class CostError(Exception):
    """One input took too much processor time or memory."""


@define(eq=False)
class Meter:
    """Counts, times and failures of one surface in this process."""

    surface: Surface
    n_inputs: int = 0
    outcomes: Counter[str] = field(factory=Counter)
    failures: list[dict[str, object]] = field(factory=list)
    slowest_s: float = 0.0
    slowest: bytes = b""
    _places: set[str] = field(factory=set)
    _base_bytes: int = 0
    _started_s: float = field(factory=time.monotonic)
    _cpu_started_s: float = field(factory=time.process_time)

    def __attrs_post_init__(self) -> None:
        signal.signal(signal.SIGALRM, _hangs)

    def feed(self, data: bytes) -> None:
        """One input; what is wrong with it is noted."""
        try:
            self._measured(data)
        except Exception as error:  # noqa: BLE001 - every other kind of error is what is looked for
            self._note(data, error)

    def feed_or_raise(self, data: bytes) -> None:
        """The same, and raised again, for engines that shrink."""
        try:
            self._measured(data)
        except Exception as error:
            self._note(data, error)
            raise

    def _measured(self, data: bytes) -> None:
        self.n_inputs += 1
        if self.n_inputs == N_WARM:
            self._base_bytes = peak_bytes()
        signal.setitimer(signal.ITIMER_REAL, WALL_S_MAX)
        before_s = time.process_time()
        try:
            self.outcomes[self.surface.fed(data)] += 1
        finally:
            took_s = time.process_time() - before_s
            signal.setitimer(signal.ITIMER_REAL, 0)
        if self.n_inputs > N_WARM and took_s > self.slowest_s:
            self.slowest_s, self.slowest = took_s, data
        if took_s > CPU_S_MAX:
            raise CostError(f"{took_s:.2f} s of processor time for {len(data)} bytes")
        if self._base_bytes and peak_bytes() > self._base_bytes + GROWTH_BYTES_MAX:
            grown = peak_bytes() - self._base_bytes
            self._base_bytes += grown
            raise CostError(f"memory has grown by {grown >> 20} MiB with {len(data)} bytes")

    def _note(self, data: bytes, error: Exception) -> None:
        frames = traceback.extract_tb(error.__traceback__)
        where = f"{frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}" if frames else ""
        place = f"{type(error).__name__} at {where}"
        if place in self._places or len(self.failures) >= N_FAILURES_MAX:
            return
        self._places.add(place)
        self.failures.append(
            {
                "error": f"{type(error).__name__}: {error}"[:500],
                "where": [f"{each.filename}:{each.lineno}" for each in frames[-4:]],
                "input_bytes": len(data),
                "input": shown(data),
            }
        )

    def report(self) -> dict[str, Any]:
        seconds = time.monotonic() - self._started_s
        return {
            "surface": self.surface.name,
            "inputs": self.n_inputs,
            "outcomes": dict(sorted(self.outcomes.items())),
            "seconds": round(seconds, 1),
            "cpu_seconds": round(time.process_time() - self._cpu_started_s, 1),
            "peak_rss_mib": peak_bytes() >> 20,
            "peak_rss_growth_mib": max(0, peak_bytes() - self._base_bytes) >> 20,
            "slowest_ms": round(self.slowest_s * 1000, 2),
            "slowest_input_bytes": len(self.slowest),
            "slowest_input": shown(self.slowest[:120]),
            "failures": self.failures,
        }


def _hangs(_number: int, _frame: FrameType | None) -> None:
    raise HangError(f"no answer within {WALL_S_MAX:g} s")


def shown(data: bytes) -> str:
    return base64.b64encode(data[:SHOWN_BYTES_MAX]).decode()


def peak_bytes() -> int:
    """The most memory that was ever resident in this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def bound_memory() -> None:
    """Refuse allocations of absurd size from now on."""
    with open("/proc/self/statm") as file:
        now_bytes = int(file.read().split()[0]) * resource.getpagesize()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (now_bytes + ADDRESS_BYTES_MORE, hard))


def by_grammar(meter: Meter, n_inputs: int, seed: int, step: Callable[[], None]) -> None:
    """Inputs from the surface's grammar, all from one seed."""
    draw = Random(f"{meter.surface.name}/{seed}")
    for _ in range(n_inputs):
        meter.feed(meter.surface.made(draw))
        step()


def by_hypothesis(meter: Meter, n_inputs: int, seed: int, step: Callable[[], None]) -> None:
    """The same grammar with every choice made by hypothesis, which shrinks what it finds."""

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=n_inputs,
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        print_blob=False,
        report_multiple_bugs=False,
        phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
    )
    @hypothesis.given(st.randoms(use_true_random=False))
    def feed(draw: Random) -> None:
        step()
        meter.feed_or_raise(meter.surface.made(draw))

    try:
        feed()
    except Exception:  # noqa: BLE001 - noted already
        return
