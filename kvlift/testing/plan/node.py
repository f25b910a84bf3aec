"""A decode node of a plan: a real driver, and a host scheduler with continuous batching.

Time is in decode steps. Nothing is computed: an answer takes a step a token.
"""

from collections import Counter
from collections.abc import Sequence
from enum import Enum

from attrs import define, field

from kvlift.core.advance import Decision, State
from kvlift.core.landed import Landed
from kvlift.core.phase import Outcome
from kvlift.core.submission import Submission
from kvlift.core.tier import Source
from kvlift.runtime.config import Config
from kvlift.runtime.demo.trace import BLOCK_TOKENS
from kvlift.runtime.driver import Driver
from kvlift.runtime.errors import PromptTooLong
from kvlift.runtime.interpret import Ports
from kvlift.runtime.observer import SilentObserver
from kvlift.runtime.tick import Granted, NoRoom, Ready, Tick
from kvlift.testing.clock import ManualClock
from kvlift.testing.plan.ports import (
    PlannedCopies,
    PlannedPeers,
    PlannedStore,
    Prefill,
    Shelf,
    Way,
)
from kvlift.testing.plan.sizes import Ask, Rates
from kvlift.testing.sim.agenda import Agenda
from kvlift.testing.sim_ranks import in_process_ranks

QUIET_TICKS = 3
"""Ticks in a row in which nothing happened: then nothing does before something lands."""

TIERS = {Source.DEVICE: "device", Source.HOST: "host", Source.STORAGE: "storage"}


class Stand(Enum):
    ASKED = "asked"
    READY = "ready"
    RUNNING = "running"
    GROWING = "growing"
    LEAVING = "leaving"
    RETRACTED = "retracted"


@define(eq=False)
class Job:
    """`n_pages`: places on the device; `since_ns`: when it began to run with `n_before` sampled."""

    ask: Ask
    stand: Stand = Stand.ASKED
    n_pages: int = 0
    n_before: int = 1
    since_ns: int = 0
    is_answered: bool = False

    def n_sampled(self, now_ns: int, step_ns: int) -> int:
        if self.stand not in (Stand.RUNNING, Stand.GROWING):
            return self.n_before
        return min(self.ask.n_answer, self.n_before + (now_ns - self.since_ns) // step_ns)


@define(eq=False)
class Tally:
    """What a plan counts: pages of prompts that hit by tier, tokens of prompts and `ttft_ns`, of
    every request that was ready; `n_over` requests need nothing any more."""

    hit: "Counter[str]" = field(factory=Counter)
    ttft_ns: list[int] = field(factory=list)
    n_tokens: int = 0
    n_over: int = 0
    n_refused: int = 0
    n_retracted: int = 0
    n_failed: int = 0


@define(eq=False)
class Activity(SilentObserver):
    """Whether a tick has decided anything."""

    is_quiet: bool = True

    def ticked(
        self,
        state: State,
        now_ns: int,
        reports: Sequence[Landed],
        least: tuple[int, ...] | None,
        calls: Sequence[Submission],
        decision: Decision,
    ) -> None:
        self.is_quiet = not (calls or decision.effects or decision.arrows or decision.notices)


@define(eq=False)
class Node:
    """`n_quiet`: ticks in a row in which nothing happened."""

    config: Config
    rates: Rates
    agenda: Agenda
    shelf: Shelf
    prefill: Prefill
    tally: Tally
    clock: ManualClock = field(factory=ManualClock)
    jobs: dict[str, Job] = field(factory=dict)
    peers: PlannedPeers = field(init=False)
    driver: Driver = field(init=False)
    n_quiet: int = QUIET_TICKS
    _activity: Activity = field(factory=Activity)
    _is_full: bool = False
    _due_ns: int | None = None
    _boxes: tuple[PlannedCopies, PlannedStore, PlannedPeers] = field(init=False)

    def __attrs_post_init__(self) -> None:
        def way(gbps: float) -> Way:
            return Way(self.agenda, self.rates.page_ns(gbps))

        rates = self.rates
        copies = PlannedCopies(up=way(rates.copy_gbps), down=way(rates.copy_gbps))
        store = PlannedStore(
            shelf=self.shelf, reading=way(rates.storage_gbps), writing=way(rates.storage_gbps)
        )
        self.peers = PlannedPeers(prefill=self.prefill, link=way(rates.link_gbps))
        self._boxes = (copies, store, self.peers)
        [ends] = in_process_ranks(1)
        ports = Ports(
            copies=copies,
            peers=self.peers,
            ranks=ends,
            clock=self.clock,
            store=store if self.shelf.n_pages_max else None,
        )
        self.driver = Driver(self.config, ports, self._activity)

    # What the plan asks.

    def submit(self, ask: Ask) -> None:
        n_more = ask.n_pages(ask.n_answer) - ask.prompt.n_pages
        try:
            self.driver.submit(ask.rid, ask.prompt, peer="prefill", n_pages_output=max(0, n_more))
        except PromptTooLong:
            self.tally.n_refused += 1
            self.tally.n_over += 1
            return
        self.jobs[ask.rid] = Job(ask)
        self.n_quiet = 0

    def is_awake(self) -> bool:
        is_due = self._due_ns is not None and self._due_ns <= self.agenda.now_ns
        return is_due or self.n_quiet < QUIET_TICKS or any(box.reports for box in self._boxes)

    def next_ns(self) -> int | None:
        """When a running request needs a page more, or has its last token."""
        step_ns, now_ns = self.rates.step_ns, self.agenda.now_ns
        times = []
        for job in self.jobs.values():
            if job.stand is Stand.RUNNING:
                n_at = min(self._n_sampled_at_most(job), job.ask.n_answer)
                n_steps = max(1, n_at - job.n_sampled(now_ns, step_ns))
                times.append(now_ns + n_steps * step_ns)
        return min(times, default=None)

    def _n_sampled_at_most(self, job: Job) -> int:
        """Tokens that can be sampled before the next one's KV has no place."""
        return job.n_pages * BLOCK_TOKENS - job.ask.n_tokens + 1

    # A step.

    def step(self) -> None:
        """What is due in the batch, then a tick."""
        self.clock.ns = self.agenda.now_ns
        self._decode()
        self._start()
        has_news = any(box.reports for box in self._boxes)
        self._activity.is_quiet = True
        self._hear(self.driver.tick())
        is_quiet = self._activity.is_quiet and not has_news
        self.n_quiet = self.n_quiet + 1 if is_quiet else 0
        self._due_ns = self.next_ns()

    def _decode(self) -> None:
        step_ns, now_ns = self.rates.step_ns, self.agenda.now_ns
        for job in self._in_batch():
            if job.stand is not Stand.RUNNING:
                continue  # it was retracted for another one's growth, or waits for its own
            n_sampled = job.n_sampled(now_ns, step_ns)
            if n_sampled >= job.ask.n_answer:
                job.stand = Stand.LEAVING
                self.driver.finish(job.ask.rid, job.ask.output(job.ask.n_answer))
            elif job.ask.n_pages(n_sampled + 1) > job.n_pages:
                self._grow(job, n_sampled)

    def _in_batch(self) -> list[Job]:
        """The oldest first."""
        batch = [j for j in self.jobs.values() if j.stand in (Stand.RUNNING, Stand.GROWING)]
        return sorted(batch, key=lambda job: job.ask.number)

    def _grow(self, job: Job, n_sampled: int) -> None:
        match self.driver.grow(job.ask.rid, 1):
            case Granted():
                job.n_pages += 1
            case NoRoom():
                self._make_room()
            case _:
                job.n_before, job.stand = n_sampled, Stand.GROWING

    def _make_room(self) -> None:
        """The youngest of the batch goes; its tokens are kept."""
        running = [job for job in self._in_batch() if job.stand is Stand.RUNNING]
        job = running[-1]
        job.n_before = job.n_sampled(self.agenda.now_ns, self.rates.step_ns)
        job.stand = Stand.LEAVING
        self.driver.retract(job.ask.rid, job.ask.output(job.n_before))
        self._is_full = True

    def _start(self) -> None:
        """Who is ready joins the batch; who was retracted comes back when nobody lacks a page."""
        n_free = self.rates.n_batch_max - len(self._in_batch())
        for job in [job for job in self.jobs.values() if job.stand is Stand.READY][:n_free]:
            job.stand, job.since_ns = Stand.RUNNING, self.agenda.now_ns
            self.driver.run(job.ask.rid)
            n_free -= 1
        if n_free > 0 and not self._is_full:
            waiting = [job for job in self.jobs.values() if job.stand is Stand.RETRACTED]
            for job in waiting[:1]:
                job.stand = Stand.ASKED
                self.driver.resume(job.ask.rid)
        self._is_full = False

    # After a tick.

    def _hear(self, tick: Tick) -> None:
        for ready in tick.ready:
            self._ready(self.jobs[ready.rid], ready)
        for rid in tick.retracted:
            self.tally.n_retracted += 1
            self.jobs[rid].stand = Stand.RETRACTED
        for grown in tick.grown:
            job = self.jobs[grown.rid]
            job.stand, job.since_ns = Stand.RUNNING, self.agenda.now_ns
            job.n_pages += len(grown.device_pages)
            if not grown.device_pages:
                self._make_room()
        for ended in tick.ended:
            del self.jobs[ended.rid]
            self.tally.n_failed += ended.outcome is not Outcome.DONE
            self.tally.n_over += 1

    def _ready(self, job: Job, ready: Ready) -> None:
        job.stand, job.n_pages = Stand.READY, len(ready.device_pages)
        if job.is_answered:
            return
        job.is_answered = True
        self.tally.ttft_ns.append(self.agenda.now_ns - job.ask.arrival_ns)
        self.tally.n_tokens += job.ask.n_tokens
        for source, name in TIERS.items():
            self.tally.hit[name] += ready.n_pages_by_source.get(source, 0)
