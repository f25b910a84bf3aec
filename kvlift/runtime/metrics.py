"""Metrics of one driver for Prometheus: an observer that counts, and gauges made when asked for.

Gauges cost a tick nothing: the driver's last state is kept (a value, nobody changes it) and counted
in `exposition`. Each driver has a registry of its own. Without prometheus_client there are none.
"""

import time
from collections import Counter as Tally
from collections.abc import Sequence
from typing import Any, Final

import attrs

from kvlift.core.advance import Decision, State
from kvlift.core.agreed import Kind
from kvlift.core.counts import device_counts, host_counts
from kvlift.core.desk import ticket_and_kind
from kvlift.core.event import (
    CopyEnded,
    CopyShort,
    HandedOver,
    LeaderLost,
    ReadEnded,
    ReadOverdue,
    ReadShort,
)
from kvlift.core.ids import Attempt
from kvlift.core.landed import Landed
from kvlift.core.notice import (
    BecameReady,
    HasEnded,
    HasShrunk,
    Notice,
    PageLost,
    WasPromised,
    WasRefused,
)
from kvlift.core.phase import (
    Asking,
    Draining,
    Filling,
    Ready,
    Resuming,
    Retracted,
    Running,
    Waiting,
)
from kvlift.core.plan import Bounds, Plan
from kvlift.core.step_filling import n_pages_wanted
from kvlift.core.submission import Submission
from kvlift.core.tier import Source
from kvlift.runtime.config import Config
from kvlift.runtime.metrics_table import METRICS, SECONDS
from kvlift.runtime.observer import SilentObserver
from kvlift.runtime.tick import Tick

try:
    import prometheus_client as prometheus
except ImportError:
    prometheus = None  # type: ignore[assignment]

PHASES: Final = (Asking, Waiting, Filling, Ready, Running, Retracted, Resuming, Draining)
WORK: Final = {
    Kind.READ: "prefetch",
    Kind.COPY: "restore",
    Kind.MIRROR: "mirror",
    Kind.PERSIST: "persist",
}
CAUSES: Final[dict[type, str]] = {
    ReadShort: "read",
    ReadOverdue: "late",
    CopyShort: "copy",
    LeaderLost: "leader",
    HandedOver: "leader",
    ReadEnded: "read",
    CopyEnded: "copy",
}
"""In order of trust: an end shrinks a prefix only when no bad news came before it."""


def lost_by_source(before: Bounds, page: int) -> dict[Source, int]:
    """Pages that each source does not bring any more when the prefix ends at `page`."""
    old, new = _pages(before), _pages(before.cut_at(page))
    return {source: old[source] - new[source] for source in old if old[source] > new[source]}


def _pages(bounds: Bounds) -> dict[Source, int]:
    plan = Plan(bounds=bounds, n_pages=bounds.storage, promise=bounds.storage)
    counts = plan.n_pages_by_source()
    return {source: counts[source] for source in (Source.DEVICE, Source.HOST, Source.STORAGE)}


def cause_of_shrink(attempt: int, decision: Decision) -> str:
    """What made the cached prefix of this attempt shorter in this tick."""
    happened = [
        event
        for owner, (_phase, event, _after) in zip(decision.movers, decision.arrows, strict=True)
        if owner == attempt
    ]
    return next((word for event, word in CAUSES.items() if event in happened), "unknown")


class NoMetrics(SilentObserver):
    """Where prometheus_client is not installed."""

    def exposition(self) -> bytes:
        return b"# prometheus_client is not installed: pip install 'kvlift[metrics]'\n"


class Metrics(SilentObserver):
    """`rank` is a constant label of every series."""

    def __init__(self, config: Config, *, rank: int) -> None:
        self.registry = prometheus.CollectorRegistry()
        self._page_tokens = config.page_tokens
        self._rank = str(rank)
        self._made: dict[str, Any] = {}
        self._series_by_key: dict[tuple[str, ...], Any] = {}
        for spec in METRICS:
            labels = ("rank", *spec.labels)
            kind = getattr(prometheus, spec.kind.capitalize())
            more = {"buckets": SECONDS} if spec.kind == "histogram" else {}
            self._made[spec.name] = kind(
                spec.name, spec.doc, labels, registry=self.registry, **more
            )
            if not spec.labels:
                self._series(spec.name)
        self._state: State | None = None
        self._began_ns: int | None = None
        self._waiting_ns = 0
        self._n_stale = 0
        self._bounds: dict[Attempt, Bounds] = {}
        self._arrived_ns: dict[Attempt, int] = {}

    def exposition(self) -> bytes:
        """The text format, from any thread."""
        if self._state is not None:
            self._set_gauges(self._state)
        return prometheus.generate_latest(self.registry)

    # What the driver tells.

    def began(self) -> None:
        self._began_ns = time.perf_counter_ns()

    def waiting(self) -> None:
        self._waiting_ns = time.perf_counter_ns()

    def waited(self) -> None:
        waited_ns = time.perf_counter_ns() - self._waiting_ns
        self._series("kvlift_ballot_wait_seconds").observe(waited_ns / 1e9)

    def ticked(
        self,
        state: State,
        now_ns: int,
        reports: Sequence[Landed],
        least: tuple[int, ...] | None,
        calls: Sequence[Submission],
        decision: Decision,
    ) -> None:
        self._series("kvlift_ticks_total").inc()
        if least is not None:
            self._series("kvlift_ballots_total").inc()
        for call in calls:
            self._series("kvlift_calls_total", type(call).__name__).inc()
        for attempt in decision.movers:
            self._note_arrival(state, Attempt(attempt), now_ns)
        for notice in decision.notices:
            self._count(state, notice, decision, now_ns)
        for attempt in decision.movers:
            self._note_bounds(state, Attempt(attempt))
        self._series("kvlift_reports_stale_total").inc(state.local.n_stale - self._n_stale)
        self._n_stale = state.local.n_stale

    def told(self, state: State, tick: Tick) -> None:
        self._state = state
        if self._began_ns is not None:
            spent_ns = time.perf_counter_ns() - self._began_ns
            self._series("kvlift_tick_seconds").observe(spent_ns / 1e9)

    def failed(self, effect: object, error: Exception) -> None:
        self._series("kvlift_port_failures_total", type(effect).__name__).inc()

    # Counting.

    def _series(self, name: str, *labels: str) -> Any:
        key = (name, *labels)
        series = self._series_by_key.get(key)
        if series is None:
            series = self._series_by_key[key] = self._made[name].labels(self._rank, *labels)
        return series

    def _note_arrival(self, state: State, attempt: Attempt, now_ns: int) -> None:
        """The first tick in which everything was here that the peer has been asked for."""
        request = state.agreed.requests.get(attempt)
        if request is None or not isinstance(request.phase, Filling):
            return
        phase = request.phase
        is_all_here = phase.token is None and phase.n_arrived >= n_pages_wanted(phase)
        if phase.plan.rest is not Source.PEER or not is_all_here:
            self._arrived_ns.pop(attempt, None)
        else:
            self._arrived_ns.setdefault(attempt, now_ns)

    def _note_bounds(self, state: State, attempt: Attempt) -> None:
        """Of what was promised alone: a request that comes back after a retraction was not."""
        request = state.agreed.requests.get(attempt)
        if request is None or not isinstance(request.phase, Filling):
            self._bounds.pop(attempt, None)
        elif attempt in self._bounds:
            self._bounds[attempt] = request.phase.plan.bounds

    def _count(self, state: State, notice: Notice, decision: Decision, now_ns: int) -> None:
        match notice:
            case WasPromised(attempt=attempt, plan=plan):
                self._bounds[attempt] = plan.bounds
                for source, n_pages in _pages(plan.bounds).items():
                    n_tokens = n_pages * self._page_tokens
                    self._series("kvlift_tokens_promised_total", source.value).inc(n_tokens)
            case HasShrunk(attempt=attempt, page=page) if attempt in self._bounds:
                cause = cause_of_shrink(attempt, decision)
                for source, n_pages in lost_by_source(self._bounds[attempt], page).items():
                    n_tokens = n_pages * self._page_tokens
                    self._series("kvlift_tokens_lost_total", source.value, cause).inc(n_tokens)
                self._bounds[attempt] = self._bounds[attempt].cut_at(page)
            case BecameReady(attempt=attempt, plan=plan):
                self._count_ready(state, notice)
                if plan.rest is Source.PEER:
                    waited_ns = now_ns - self._arrived_ns.pop(attempt, now_ns)
                    series = self._series("kvlift_transfer_waited_for_restore_seconds")
                    series.observe(waited_ns / 1e9)
            case HasEnded(attempt=attempt, outcome=outcome, cause=cause):
                word = "none" if cause is None else cause.name.lower()
                self._series("kvlift_requests_ended_total", outcome.value, word).inc()
                self._arrived_ns.pop(attempt, None)
            case WasRefused(call=call):
                self._series("kvlift_calls_refused_total", call).inc()
            case PageLost(tier=tier, n_pages=n_pages):
                self._series("kvlift_pages_unwritten_total", tier).inc(n_pages)
            case _:
                pass

    def _count_ready(self, state: State, notice: BecameReady) -> None:
        """The last page of a prompt has fewer tokens than a page has room for, wherever it was."""
        plan = notice.plan
        request = state.agreed.requests.get(notice.attempt)
        if request is None:
            return
        n_left = request.prompt.n_tokens
        for source, n_pages in _pages(plan.bounds).items():
            n_tokens = min(n_left, n_pages * self._page_tokens)
            self._series("kvlift_tokens_restored_total", source.value).inc(n_tokens)
            n_left -= n_tokens
        name = "received" if plan.rest is Source.PEER else "recomputed"
        self._series(f"kvlift_tokens_{name}_total").inc(n_left)

    # Gauges.

    def _set_gauges(self, state: State) -> None:
        agreed, local = state.agreed, state.local
        phases = Tally(type(request.phase) for request in agreed.requests.values())
        for phase in PHASES:
            self._series("kvlift_requests", phase.__name__.lower()).set(phases[phase])
        for tier, counts in (("device", device_counts(agreed)), ("host", host_counts(agreed))):
            for name, n_pages in attrs.asdict(counts).items():
                self._series("kvlift_pages", tier, name).set(n_pages)
        parked = Tally(ticket_and_kind(effect)[1] for effect in local.parked)
        for kind, work in WORK.items():
            self._series("kvlift_in_flight", work).set(local.n_in_flight.get(kind, 0))
            self._series("kvlift_queued", work).set(parked[kind])
        self._series("kvlift_tickets").set(len(agreed.tickets))
        rates = (("prefetch", agreed.rates.prefetch_us), ("transfer", agreed.rates.transfer_us))
        for way, spent_us in rates:
            self._series("kvlift_measured_microseconds_per_page", way).set(spent_us)


def metrics_for(config: Config, *, rank: int) -> Metrics | NoMetrics:
    """Metrics where prometheus_client is installed."""
    return NoMetrics() if prometheus is None else Metrics(config, rank=rank)
