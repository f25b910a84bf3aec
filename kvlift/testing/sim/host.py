"""The host scheduler of a run: arrivals, continuous batching, growth, retraction, new attempts.

It gives every rank's driver the same calls in the same order, as a lock-step host must.
"""

from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Final

from attrs import define, field

from kvlift.core.phase import Outcome
from kvlift.core.policy import Switch
from kvlift.core.tier import Source
from kvlift.runtime.tick import Ended, Granted, Growth, NoRoom, Ready, Tick
from kvlift.testing.sim.job import Job, Stand
from kvlift.testing.sim.plan import Plan
from kvlift.testing.sim.workload import Author, Order
from kvlift.testing.sim.world import World, first_token_of

N_TRIES_MAX: Final = 6
TIERS: Final = {Source.DEVICE: "device", Source.HOST: "host", Source.STORAGE: "storage"}


@define(eq=False)
class Host:
    """`jobs`: the requests that live; `past`: those that did. `claims`: what a driver told the
    host that can't be; `ended` and `hit` count over the run.

    `first_tokens`: what each request's answer begins with, for the prefill nodes."""

    plan: Plan
    author: Author
    first_tokens: dict[str, int]
    draw: Random = field(init=False)
    jobs: dict[str, Job] = field(factory=dict)
    past: dict[str, Job] = field(factory=dict)
    ended: "Counter[str]" = field(factory=Counter)
    hit: "Counter[str]" = field(factory=Counter)
    claims: list[str] = field(factory=list)
    failed_by_cache: list[str] = field(factory=list)
    n_submitted: int = 0
    n_retracted: int = 0
    n_ticks: int = 0
    is_closing: bool = False
    _next: Order | None = None
    _next_ns: int = 0
    _runs_from: dict[str, int] = field(factory=dict)
    _starving: str | None = None
    _has_acted: bool = False
    _n_started: int = 0

    def __attrs_post_init__(self) -> None:
        self.draw = Random(f"{self.plan.seed}/host")
        self._next = self.author.next_order()

    # What the run asks.

    def alive(self) -> list[Job]:
        return list(self.jobs.values())

    def next_arrival_ns(self) -> int | None:
        """When the host will act by itself: an arrival, or a request that is tried again."""
        times = [job.retry_ns for job in self.alive() if job.stand is Stand.WAITING]
        has_room = len(self.alive()) < self.plan.n_alive_max
        if self._next is not None and not self.is_closing and has_room:
            times.append(self._next_ns)
        return min(times, default=None)

    def is_done(self) -> bool:
        """Nobody is alive and nobody will come."""
        return not self.alive() and (self.is_closing or self._next is None)

    def is_moving(self) -> bool:
        """The host has done something since the last tick, or its last call takes effect soon."""
        moving = (Stand.STARTING, Stand.GROWING, Stand.RETRACTING)
        return self._has_acted or any(job.stand in moving for job in self.jobs.values())

    def n_answer_tokens_left(self) -> int:
        return sum(job.order.n_answer - job.n_sampled for job in self.alive())

    # Before a tick.

    def schedule(self, world: World) -> None:
        """One scheduling step: everything that the host asks of the drivers before this tick."""
        self._has_acted = False
        self._arrivals(world)
        self._abort(world)
        self._start_and_finish(world)
        self._decode(world)
        self._resume(world)

    def _arrivals(self, world: World) -> None:
        now_ns = world.agenda.now_ns
        for job in self.alive():
            if job.stand is Stand.WAITING and job.retry_ns <= now_ns:
                self._submit(world, job)
        while (
            self._next is not None
            and not self.is_closing
            and self._next_ns <= now_ns
            and len(self.alive()) < self.plan.n_alive_max
        ):
            order = self._next
            self.first_tokens[order.rid] = first_token_of(order.answer)
            job = Job(order, "", self.plan.n_ranks)
            self.jobs[order.rid] = job
            self._submit(world, job)
            self._next = self.author.next_order()
            self._next_ns = now_ns + (0 if self._next is None else self._next.gap_ns)

    def _submit(self, world: World, job: Job) -> None:
        names = [name for name in world.nodes if name != job.node] or list(world.nodes)
        well = [name for name in names if not world.nodes[name].is_silent] or names
        job.node = self.draw.choice(well if self.is_closing else names)
        job.stand, job.asked_ns = Stand.ASKED, world.agenda.now_ns
        job.is_aborted = job.is_finished = False
        job.n_sampled = job.n_ready = 0
        self.n_submitted += 1
        self._has_acted = True
        for driver in world.drivers:
            driver.submit(
                job.rid,
                job.order.prompt,
                peer=job.node,
                priority=job.order.priority,
                n_pages_output=job.order.n_pages_output,
            )

    def _abort(self, world: World) -> None:
        faults = world.faults
        if not faults.strikes("abort"):
            return
        settled = (Stand.WAITING, Stand.LEAVING)
        jobs = [job for job in self.alive() if job.stand not in settled]
        if not jobs:
            faults.take_back("abort")
            return
        job = faults.stream("abort").choice(jobs)
        job.is_aborted, job.stand = True, Stand.LEAVING
        job.give_pages_back()
        self._has_acted = True
        for driver in world.drivers:
            driver.abort(job.rid)

    def _start_and_finish(self, world: World) -> None:
        n_active = len(self._active())
        for job in list(self.jobs.values()):
            if job.stand is Stand.STARTING:
                if self.n_ticks >= self._runs_from[job.rid]:
                    job.stand = Stand.RUNNING
            elif job.stand is Stand.READY and n_active < self.plan.n_batch_max:
                self._run(world, job)
                n_active += 1
            elif job.stand is Stand.RUNNING and job.n_sampled >= job.order.n_answer:
                job.stand, job.is_finished = Stand.LEAVING, True
                output = job.output()
                self._has_acted = True
                for driver in world.drivers:
                    driver.finish(job.rid, output)
                job.give_pages_back()

    def _active(self) -> list[Job]:
        batch = (Stand.STARTING, Stand.RUNNING, Stand.GROWING)
        return [job for job in self.jobs.values() if job.stand in batch]

    def _run(self, world: World, job: Job) -> None:
        # With idle ballots a call is taken when all ranks are known to have it: a tick later.
        is_idle = self.plan.config.idle_ballots is Switch.ON
        self._runs_from[job.rid] = self.n_ticks + (2 if is_idle else 1)
        self._n_started += 1
        job.stand = Stand.STARTING
        job.started = job.started or self._n_started
        self._has_acted = True
        for driver in world.drivers:
            driver.run(job.rid)

    def _decode(self, world: World) -> None:
        """A few tokens for everyone in the batch; who needs a page asks for it first."""
        memories = world.memories()
        running = [job for job in self.jobs.values() if job.stand is Stand.RUNNING]
        for job in sorted(running, key=lambda one: one.started):
            for _ in range(self.plan.n_tokens_a_tick):
                if job.stand is not Stand.RUNNING or job.n_sampled >= job.order.n_answer:
                    break
                if not job.has_room() and not self._grow(world, job):
                    break
                job.sample(memories)
                self._has_acted = True

    def _grow(self, world: World, job: Job) -> bool:
        answers: list[Growth] = [driver.grow(job.rid, 1) for driver in world.drivers]
        if len({type(answer) for answer in answers}) > 1:
            self.claims.append(f"agreement: the ranks answer a growth of {job.rid} with {answers}")
        if all(isinstance(answer, Granted) for answer in answers):
            for table, answer in zip(job.tables, answers, strict=True):
                assert isinstance(answer, Granted)
                table.extend(answer.device_pages)
            if self._starving == job.rid:
                self._starving = None
            return True
        if isinstance(answers[0], NoRoom):
            self._make_room(world, job)
        else:
            job.stand = Stand.GROWING
        return False

    def _make_room(self, world: World, job: Job) -> None:
        """Growth was refused: the youngest of the batch goes, never the oldest for another."""
        batch = [one for one in self.jobs.values() if one.stand in (Stand.RUNNING, Stand.GROWING)]
        youngest = max(batch, key=lambda one: one.started, default=job)
        if youngest is job and len(batch) > 1:
            self._retract(world, job)
            return
        self._starving = job.rid
        if youngest is not job:
            if youngest.stand is Stand.RUNNING:
                self._retract(world, youngest)
            return
        ready = [one for one in self.jobs.values() if one.stand is Stand.READY]
        if ready and len(self._active()) <= 1:
            self._run(world, ready[-1])  # its pages come back by the retraction that follows

    def _retract(self, world: World, job: Job) -> None:
        output = job.output()
        self._has_acted = True
        for driver in world.drivers:
            driver.retract(job.rid, output)
        job.give_pages_back()
        job.stand = Stand.RETRACTING

    def _resume(self, world: World) -> None:
        starving = self.jobs.get(self._starving or "")
        if starving is not None and starving.stand in (Stand.RUNNING, Stand.GROWING):
            return
        self._starving = None
        waiting = [job for job in self.jobs.values() if job.stand is Stand.RETRACTED]
        for job in sorted(waiting, key=lambda one: one.started):
            if len(self._active()) >= self.plan.n_batch_max:
                return
            job.stand = Stand.ASKED
            self._has_acted = True
            for driver in world.drivers:
                driver.resume(job.rid)

    # After a tick.

    def hear(self, world: World, ticks: Sequence[Tick]) -> None:
        """What the drivers told; the ranks' words are compared by the checkers."""
        self.n_ticks += 1
        for place in range(len(ticks[0].ready)):
            self._ready(world, [tick.ready[place] for tick in ticks])
        for rid in ticks[0].retracted:
            self.n_retracted += 1
            if self.jobs[rid].stand is Stand.RETRACTING:
                self.jobs[rid].stand = Stand.RETRACTED
        for place, grown in enumerate(ticks[0].grown):
            job = self.jobs[grown.rid]
            if job.stand is Stand.GROWING:
                job.stand = Stand.RUNNING
                for table, tick in zip(job.tables, ticks, strict=True):
                    table.extend(tick.grown[place].device_pages)
                if not grown.device_pages:
                    self._make_room(world, job)
        for ended in ticks[0].ended:
            self._ended(world, ended)
        for refused in ticks[0].refused:
            if not self._known(refused.rid).is_aborted:
                text = f"{refused.call} came when {refused.rid} was {refused.phase}"
                self.claims.append(f"calls: {text}")

    def _ready(self, world: World, told: Sequence[Ready]) -> None:
        job = self.jobs[told[0].rid]
        if job.is_aborted:
            return
        if job.stand is not Stand.ASKED:
            self.claims.append(f"calls: {job.rid} is ready while the host has it {job.stand.value}")
        job.stand = Stand.READY
        for number, ready in enumerate(told):
            job.tables[number] = list(ready.device_pages)
            right = first_token_of(job.order.answer)
            if ready.token is not None and ready.token != right:
                self.claims.append(f"bytes: {job.rid} begins with {ready.token}, not {right}")
        is_due = self.plan.config.first_token is Switch.ON and job.n_ready == 0
        if is_due and told[0].token is None:
            self.claims.append(f"bytes: {job.rid} is ready without its first token")
        job.n_sampled = max(1, job.n_sampled)
        if told[0].needs_prefill_from is not None:
            job.write_from(told[0].needs_prefill_from, world.memories())
        job.n_ready += 1
        if job.n_ready == 1:
            for source, name in TIERS.items():
                self.hit[name] += told[0].n_pages_by_source.get(source, 0)

    def _ended(self, world: World, ended: Ended) -> None:
        job, now_ns = self._known(ended.rid), world.agenda.now_ns
        if job.stand is Stand.OVER or job.stand is Stand.WAITING:
            self.claims.append(f"outcome: {job.rid} has ended twice: {ended}")
        job.give_pages_back()
        job.stand = Stand.OVER
        match ended.outcome:
            case Outcome.DONE:
                self.ended["done"] += 1
                if not job.is_finished:
                    self.claims.append(f"outcome: {job.rid} is done and was not finished")
            case Outcome.ABORTED:
                self.ended["aborted"] += 1
                if not job.is_aborted:
                    self.claims.append(f"outcome: {job.rid} is aborted and nobody aborted it")
            case Outcome.FAILED:
                self.ended["retryable" if ended.retryable else "failed"] += 1
                self._judge(world, job, ended)
                if ended.retryable and not job.is_aborted and job.n_tries < N_TRIES_MAX:
                    job.n_tries += 1
                    job.stand = Stand.WAITING
                    job.retry_ns = now_ns + self.plan.step_ns * 3**job.n_tries
                    job.started = 0
        if job.stand is Stand.OVER:
            self.past[job.rid] = job
            self.jobs.pop(job.rid, None)

    def _known(self, rid: str) -> Job:
        """A request that is alive, or has been."""
        return self.jobs[rid] if rid in self.jobs else self.past[rid]

    def _judge(self, world: World, job: Job, ended: Ended) -> None:
        if world.excuses.found(job.rid, job.node, job.asked_ns) is None:
            said = f"{job.rid} failed though {job.node} was alive and willing: {ended.reason}"
            self.failed_by_cache.append(said)
        if job.node not in ended.reason:
            self.claims.append(f"outcome: the reason of {job.rid} names no peer: {ended.reason!r}")
