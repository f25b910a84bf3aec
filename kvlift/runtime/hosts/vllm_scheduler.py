"""The scheduler's side: vLLM's questions become calls of the core, its answers numbers and blocks.

vLLM asks in the middle of its own scheduling, so nothing here waits: a question that the core can't
answer yet is answered `None`, and vLLM asks again. One round of the core at a time is under way:

    step_orders() --> workers obey --> heard(ballots) --> tick --> the next step's orders

Loads: `vllm_loads`. Saves: whatever a running request has computed goes down page by page, and the
rest when it ends; each block is referenced in vLLM's pool for as long as kvlift reads or writes it.
"""

import logging
from collections.abc import Sequence
from typing import Any, Final

from attrs import define, field

from kvlift.core.phase import Outcome
from kvlift.core.policy import Switch, WritePolicy
from kvlift.core.prompt import n_pages_covering, n_pages_filled
from kvlift.core.tier import Source, Tier
from kvlift.runtime.config import JournalMode
from kvlift.runtime.errors import TooManyRequests
from kvlift.runtime.hosted import Orders
from kvlift.runtime.hosts.vllm_blocks import HeldBlocks
from kvlift.runtime.hosts.vllm_handover import is_asked_for, params_of, peer_of
from kvlift.runtime.hosts.vllm_loads import Load, Stage, split
from kvlift.runtime.hosts.vllm_metadata import Keep, StepOrders, StepReport
from kvlift.runtime.hosts.vllm_requests import ModelWords, Tracked, is_cacheable
from kvlift.runtime.hosts.vllm_settings import VllmSettings
from kvlift.runtime.hosts.vllm_stats import Tally
from kvlift.runtime.hosts.vllm_words import EngineRequest, SchedulerOutput
from kvlift.runtime.lending import LendingScheduler
from kvlift.runtime.observers import observers_of_scheduler
from kvlift.runtime.tick import Ended, Ready, Tick

_log = logging.getLogger(__name__)

NO_OUTPUT: Final = b""

SHORT_MAX: Final = 3
"""Loads of one request that may come short before kvlift leaves it to vLLM."""


@define(eq=False)
class SchedulerSide:
    """`addresses`: of this instance's workers, by rank, where it serves decode instances."""

    settings: VllmSettings
    words: ModelWords
    core: LendingScheduler = field(init=False)
    tally: Tally = field(factory=Tally, init=False)
    blocks: HeldBlocks = field(factory=HeldBlocks, init=False)
    addresses: tuple[str, ...] = field(default=(), init=False)
    _tracked: dict[str, Tracked] = field(factory=dict, init=False)
    _loads: dict[str, Load] = field(factory=dict, init=False)
    _has_below: bool = field(default=False, init=False)
    _orders: Orders | None = field(default=None, init=False)
    _is_awaiting: bool = field(default=False, init=False)
    _loaded: list[str] = field(factory=list, init=False)
    _failed_blocks: list[int] = field(factory=list, init=False)
    _keeps: list[Keep] = field(factory=list, init=False)
    _draining: dict[str, Load] = field(factory=dict, init=False)
    _given_back: dict[str, None] = field(factory=dict, init=False)
    _n_attempts: int = field(default=0, init=False)

    def open(self, page_bytes: int) -> None:
        """`page_bytes`: of one block in all layers, on one rank. Raises `ConfigError`."""
        config = self.settings.config(self.words.page_tokens, page_bytes)
        self._has_below = config.write is not WritePolicy.NONE or config.persist is Switch.ON
        storage = Switch.ON if self.settings.storage else Switch.OFF
        observer = None
        if config.journal is not JournalMode.OFF:
            n_workers = self.words.n_ranks
            observers = observers_of_scheduler(config, storage=storage, n_workers=n_workers)
            observer = observers.observer
        self.core = LendingScheduler(
            config,
            storage=storage,
            held=self.blocks.hold,
            released=self.blocks.release,
            observer=observer,
        )

    # -- requests ----------------------------------------------------------------------------------

    def track(self, request: EngineRequest) -> Tracked | None:
        """What is known of this request; None where kvlift has nothing to do with it."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None and is_cacheable(request):
            namespace = self.words.namespace(request)
            peer = peer_of(request.kv_transfer_params, namespace)
            n_prompt = request.num_tokens
            tracked = Tracked(request, namespace, n_prompt, peer)
            self._tracked[request.request_id] = tracked
        return tracked

    def matched(self, request: EngineRequest, n_computed: int) -> tuple[int | None, bool]:
        """Tokens behind `n_computed` that kvlift can bring, or None: ask again."""
        tracked = self.track(request)
        if tracked is None or getattr(request, "skip_reading_prefix_cache", False):
            return 0, False
        page_tokens = self.words.page_tokens
        n_given = n_pages_filled(n_computed, page_tokens)
        load = self._loads.get(request.request_id)
        if load is None or load.n_given != n_given or load.stage is Stage.TOLD:
            # New; or vLLM's cache has changed since it asked; or nothing came at all.
            before = load
            is_worth_it = self._is_worth_asking(tracked, n_given, n_computed)
            load = self._ask(tracked, n_given) if is_worth_it else None
            if before is not None:
                self._drop(before)  # after the new one: the peer keeps the prompt for somebody
            if load is None:
                return 0, False
        plan = self.core.plan_of(load.core_rid)
        if plan is None:
            return None, False
        n_tokens = request.num_tokens - 1  # one is left to compute
        if plan.rest is not Source.PEER:
            n_tokens = min(n_tokens, plan.bounds.storage * page_tokens)
        load.n_external = n_tokens - n_computed
        if load.n_external <= 0:
            tracked.nothing_behind = n_given
            self._drop(load)
            return 0, False
        load.stage = Stage.OFFERED
        return load.n_external, True

    def _is_worth_asking(self, tracked: Tracked, n_given: int, n_computed: int) -> bool:
        n_usable = tracked.request.num_tokens - 1
        if n_usable <= n_computed or tracked.n_short >= SHORT_MAX:
            return False
        if tracked.peer:
            return True
        prompt = tracked.prompt(n_usable, self.words.page_tokens)
        if self.core.hit_from(prompt, n_given).host > n_given:
            return True
        has_asked = tracked.nothing_behind == n_given
        return bool(self.settings.storage) and prompt.n_pages_full > n_given and not has_asked

    def _ask(self, tracked: Tracked, n_given: int) -> Load | None:
        request = tracked.request
        core_rid = self._submitted(tracked, request.num_tokens - 1, n_given)
        if core_rid is None:
            return None
        load = Load(request.request_id, core_rid, n_given, has_peer=bool(tracked.peer))
        self._loads[load.rid] = load
        return load

    def _submitted(self, tracked: Tracked, n_tokens: int, n_given: int) -> str | None:
        """A new attempt's name in the core; None where that has `requests_max`: vLLM computes."""
        self._n_attempts += 1  # over all requests: vLLM may use a name again before it is free here
        core_rid = f"{tracked.request.request_id}/{self._n_attempts}"
        prompt = tracked.prompt(n_tokens, self.words.page_tokens)
        try:
            self.core.submit(core_rid, prompt, peer=tracked.peer, n_pages_given=n_given)
        except TooManyRequests:
            return None
        return core_rid

    def _drop(self, load: Load) -> None:
        """vLLM does not count on this load: the lease goes back, here and at the peer."""
        if self._loads.get(load.rid) is load:
            del self._loads[load.rid]
        if load.stage in (Stage.ASKED, Stage.OFFERED):
            self._abort(load.core_rid)

    def _abort(self, core_rid: str) -> None:
        if self.core.is_known(core_rid):
            self.core.abort(core_rid)

    def allocated(self, request: EngineRequest, n_external: int) -> None:
        """vLLM has blocks for the request; with `n_external` 0 nothing shall be loaded."""
        load = self._loads.get(request.request_id)
        tracked = self._tracked.get(request.request_id)
        if tracked is None or (load is not None and load.stage not in (Stage.ASKED, Stage.OFFERED)):
            return
        if load is None:
            self._give_back(tracked)
            return
        tracked.peer = ""  # a prompt is handed over once
        if n_external == 0:
            self._drop(load)
            return
        page_tokens = self.words.page_tokens
        n_tokens = load.n_given * page_tokens + n_external
        load.n_promised = n_pages_covering(n_tokens, page_tokens)
        load.blocks = self.blocks.of_request(request.request_id)[: load.n_promised]
        load.stage = Stage.LOADING
        if n_external == load.n_external and self.core.plan_of(load.core_rid) is not None:
            self.core.place(load.core_rid, load.blocks)
            return
        load.n_good = load.n_given  # not what was offered: nothing is loaded, vLLM computes
        self._drain(load)

    def sources(self, rid: str, n_external: int) -> dict[Source, int]:
        """`n_external` tokens of a load by where they come from."""
        load = self._loads.get(rid)
        plan = None if load is None else self.core.plan_of(load.core_rid)
        return {} if plan is None else split(plan, n_external, self.words.page_tokens)

    # -- the step ----------------------------------------------------------------------------------

    def step_orders(self, output: SchedulerOutput) -> StepOrders:
        """Everything for the workers with this step."""
        for rid in output.num_scheduled_tokens:
            self._runs(rid)
        self._drop_forgotten()
        if not self._is_awaiting and self._orders is None and self.core.has_news():
            self._tick(())
        orders, self._orders = self._orders, None
        wants_ballot = orders is not None and orders.is_awaited
        self._is_awaiting = self._is_awaiting or wants_ballot
        step = StepOrders(
            orders=orders,
            wants_ballot=wants_ballot,
            loaded=tuple(self._loaded),
            failed_blocks=tuple(self._failed_blocks),
            keeps=tuple(self._keeps),
        )
        self._loaded, self._failed_blocks, self._keeps = [], [], []
        return step

    def _runs(self, rid: str) -> None:
        """The request is in this step: what it had computed before is good."""
        load = self._loads.get(rid)
        if load is not None:
            self._drop(load)
        tracked = self._tracked.get(rid)
        if tracked is None:
            return
        request, tracked.nothing_behind = tracked.request, -1
        n_good = min(request.num_computed_tokens, request.num_tokens)
        if n_good // self.words.page_tokens > tracked.n_stowed:
            self._stow(tracked, n_good, self.blocks.of_request(rid))

    def _stow(self, tracked: Tracked, n_tokens: int, blocks: Sequence[int]) -> None:
        n_full = min(n_pages_filled(n_tokens, self.words.page_tokens), len(blocks))
        start = tracked.n_stowed
        if n_full <= start or not self._has_below:
            return
        tracked.n_stowed = n_full
        prompt = tracked.prompt(n_full * self.words.page_tokens, self.words.page_tokens)
        self.core.stow(prompt, start, blocks[start:n_full])

    def _drop_forgotten(self) -> None:
        """A lease that got no blocks for so long is given back; vLLM may ask anew."""
        for load in list(self._loads.values()):
            if load.stage in (Stage.ASKED, Stage.OFFERED):
                load.n_steps += 1
                if load.n_steps > self.settings.unplaced_steps_max:
                    self._drop(load)

    def heard(self, report: StepReport | None) -> None:
        """The workers' ballots of an earlier step."""
        if report is None or not self._is_awaiting:
            return
        if len(report.ballots) != self.words.n_ranks:
            raise RuntimeError(f"{len(report.ballots)} ballots of {self.words.n_ranks} workers")
        self._is_awaiting = False
        self._tick(report.ballots)

    def _tick(self, ballots: Sequence[Sequence[int]]) -> None:
        tick, self._orders = self.core.tick(ballots)
        self._learn(tick)

    def _learn(self, tick: Tick) -> None:
        by_core = {load.core_rid: load for load in self._loads.values()}
        for ready in tick.ready:
            self._is_ready(ready, by_core.get(ready.rid))
        for ended in tick.ended:
            if (load := by_core.get(ended.rid)) is not None:
                self._has_ended(ended, load)
        self._end_given_back()
        for load in list(self._draining.values()):
            if self.core.is_over(load.core_rid):
                del self._draining[load.core_rid]
                self._tell(load)
        n_loading = sum(load.stage is Stage.LOADING for load in self._loads.values())
        self.tally.set("loads_in_flight", n_loading + len(self._draining))

    def _is_ready(self, ready: Ready, load: Load | None) -> None:
        if load is None or load.stage is not Stage.LOADING:
            return
        page_tokens = self.words.page_tokens
        load.n_good = load.n_promised
        if ready.needs_prefill_from is not None:
            load.n_good = min(load.n_promised, ready.needs_prefill_from // page_tokens)
        counts = ready.n_pages_by_source
        self.tally.add("pages_restored/host", counts.get(Source.HOST, 0))
        self.tally.add("pages_restored/storage", counts.get(Source.STORAGE, 0))
        self.tally.add("pages_received", counts.get(Source.PEER, 0))
        self.core.run(ready.rid)
        self.core.finish(ready.rid, NO_OUTPUT)
        self._tell(load)

    def _has_ended(self, ended: Ended, load: Load) -> None:
        if load.stage in (Stage.ASKED, Stage.OFFERED):
            # The peer is gone before vLLM counted on it: the next answer does without.
            if ended.outcome is Outcome.FAILED:
                _log.warning("request %s: %s", load.rid[:64], ended.reason)
            self._tracked[load.rid].peer = ""
            del self._loads[load.rid]
        elif load.stage is Stage.LOADING:
            load.n_good = max(load.n_given, min(ended.n_pages_landed, load.n_promised))
            if ended.outcome is Outcome.FAILED:
                _log.warning("request %s: %s", load.rid[:64], ended.reason)
            self._drain(load)

    def _drain(self, load: Load) -> None:
        """It has no good end: vLLM hears of it when nothing writes into the blocks any more."""
        self._abort(load.core_rid)
        load.stage = Stage.DRAINING
        self._draining[load.core_rid] = load

    def _tell(self, load: Load) -> None:
        load.stage = Stage.TOLD
        self._loaded.append(load.rid)
        failed = load.failed_blocks()
        if failed and (tracked := self._tracked.get(load.rid)) is not None:
            tracked.n_short += 1
        self._failed_blocks.extend(failed)
        self.tally.add("loads")
        self.tally.add("loads_short", int(bool(failed)))

    def is_busy(self) -> bool:
        """Steps are needed even where vLLM has no request to run."""
        is_untold = bool(self._loaded or self._keeps or self._orders is not None)
        return is_untold or self._is_awaiting or self.core.has_news() or self.core.is_busy()

    # -- the end of a request ----------------------------------------------------------------------

    def finished(
        self, request: EngineRequest, blocks: Sequence[int], *, is_whole: bool
    ) -> tuple[bool, dict[str, Any] | None]:
        """Once, before vLLM frees the blocks. Whether they are kept for a decode instance, and what
        the client has to tell that one. `is_whole`: it ended by itself."""
        rid = request.request_id
        tracked = self._tracked.pop(rid, None)
        load = self._loads.pop(rid, None)
        if tracked is None:
            return False, None
        if load is not None:
            self._leave(load)
        else:
            self._give_back(tracked)
            n_in_flight = getattr(request, "num_in_flight_tokens", 0)
            n_good = min(request.num_computed_tokens - n_in_flight, request.num_tokens)
            self._stow(tracked, n_good, blocks)
        return self._kept(tracked, blocks) if is_whole and load is None else (False, None)

    def _leave(self, load: Load) -> None:
        """The user is gone. Blocks that are being loaded go back when nothing writes any more."""
        load.is_wanted = False
        if load.stage in (Stage.ASKED, Stage.OFFERED):
            self._abort(load.core_rid)
        elif load.stage is Stage.LOADING:
            self._drain(load)

    def _give_back(self, tracked: Tracked) -> None:
        """A prompt that a prefill instance keeps is not asked for: it may free it now.

        It is held there and let go again once the core has admitted it, a step or two later."""
        if not tracked.peer:
            return
        core_rid = self._submitted(tracked, max(1, tracked.n_prompt - 1), 0)
        tracked.peer = ""
        if core_rid is not None:
            self._given_back[core_rid] = None

    def _end_given_back(self) -> None:
        for core_rid in list(self._given_back):
            is_held = self.core.plan_of(core_rid) is not None
            if is_held or not self.core.is_known(core_rid):
                del self._given_back[core_rid]
                self._abort(core_rid)

    def _kept(self, tracked: Tracked, blocks: Sequence[int]) -> tuple[bool, dict[str, Any] | None]:
        request = tracked.request
        if not self.addresses or not is_asked_for(request.kv_transfer_params):
            return False, None
        n_tokens = min(request.num_computed_tokens, request.num_tokens)
        n_pages = n_pages_covering(n_tokens, self.words.page_tokens)
        if n_tokens < 1 or len(blocks) < n_pages:
            return False, None
        prompt = tracked.prompt(n_tokens, self.words.page_tokens)
        rid = request.request_id
        kept = tuple(blocks[:n_pages])
        self._keeps.append(Keep(rid, prompt.namespace, prompt.tokens, kept))
        words = self.words
        return True, params_of(rid, self.addresses, tracked.namespace, words.n_ranks)

    def reset(self) -> None:
        """Forget what the host and storage have: the weights may be others now."""
        self.core.flush((Tier.HOST, Tier.STORAGE))
        for tracked in self._tracked.values():
            tracked.n_stowed, tracked.nothing_behind = 0, -1
