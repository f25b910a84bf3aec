"""Continuous batching on one decode rank, driven in lock step with the other ranks.

Everything that decides here (which rows are computed, who grows, who is retracted, who ends) is a
function of what all ranks know: submissions, ticks and sampled tokens. Rank 0 alone samples.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

import torch
from attrs import define, field

from kvlift.core.ids import Rid
from kvlift.core.phase import Outcome
from kvlift.core.prompt import Prompt, n_pages_covering, token_bytes
from kvlift.core.tier import Source, Tier
from kvlift.runtime.driver import Driver
from kvlift.runtime.errors import DuplicateRequest, PromptTooLong
from kvlift.runtime.tick import Ended, Granted, Grew, NoRoom, Pending, Ready
from kvlift.runtime.worker.audit import Audit
from kvlift.runtime.worker.decoding import Decoding, Row, Stage
from kvlift.runtime.worker.generation import (
    CachedTokens,
    Finish,
    FinishKind,
    Output,
    Request,
)
from kvlift.runtime.worker.model import Decoder, PagedKv, paged_batch
from kvlift.runtime.worker.plain_engine import ending
from kvlift.runtime.worker.sampling import sample_rows

BAD_REQUEST: Final = 400
UNAVAILABLE: Final = 503


@define(eq=False)
class DecodeEngine:
    """`namespace_of` gives a request's namespace digest on this rank; `peers` are the addresses of
    the prefill nodes, tried in turn. `samples` is true on rank 0. Without `reuses` the device and
    the host forget everything before each request: the yardstick of what reuse is worth."""

    driver: Driver
    decoder: Decoder
    kv: PagedKv
    audit: Audit
    namespace_of: Callable[[Request], bytes]
    peers: tuple[str, ...]
    samples: bool = field(kw_only=True)
    reuses: bool = field(kw_only=True)
    output_reserved_percent: int = field(kw_only=True)
    n_running_max: int = field(kw_only=True)
    chunk_tokens: int = field(kw_only=True)
    n_retracted: int = field(default=0, init=False)
    n_recomputed: int = field(default=0, init=False)
    _live: dict[Rid, Decoding] = field(factory=dict, init=False)
    _n_submitted: int = field(default=0, init=False)
    _early: list[Decoding] = field(factory=list, init=False)
    _may_resume: bool = field(default=False, init=False)
    _outputs: list[Output] = field(factory=list, init=False)

    @property
    def n_live(self) -> int:
        return len(self._live)

    def n_by_stage(self) -> dict[str, int]:
        """Requests of this scheduler by where they stand."""
        return dict(Counter(decoding.stage.name.lower() for decoding in self._live.values()))

    def taken_outputs(self) -> list[Output]:
        """What is new for the clients since the last call."""
        outputs, self._outputs = self._outputs, []
        return outputs

    # -- commands ----------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        rid = Rid(request.rid)
        if rid in self._live:
            self._refuse(request, f"the request id {rid[:64]} is in use; choose another")
            return
        self._n_submitted += 1
        decoding = Decoding(request, self._n_submitted, list(request.tokens))
        self._live[rid] = decoding
        self._ask(decoding)

    def abort(self, rid: str) -> None:
        """Takes effect with the next tick; an unknown id has ended by itself."""
        decoding = self._live.get(Rid(rid))
        if decoding is None:
            return
        if decoding in self._early:
            self._early.remove(decoding)
            self._drop(decoding)
            self._outputs.append(Output(rid=rid, finish=Finish(kind=FinishKind.ABORT)))
        else:
            self.driver.abort(decoding.rid)

    def _ask(self, decoding: Decoding) -> None:
        request, span = decoding.request, self.kv.page_tokens
        n_pages_prompt = n_pages_covering(decoding.n_prompt, span)
        # The last sampled token is never read back, so it needs no room.
        n_tokens_most = decoding.n_prompt + request.sampling.max_new_tokens - 1
        n_pages_output = n_pages_covering(n_tokens_most, span) - n_pages_prompt
        peer = self.peers[(decoding.order + decoding.n_peers_tried) % len(self.peers)]
        if not self.reuses:
            self.driver.flush((Tier.DEVICE, Tier.HOST))
        try:
            self._check_fits(request.rid, n_pages_prompt + n_pages_output)
            self.driver.submit(
                decoding.rid,
                Prompt(self.namespace_of(request), token_bytes(request.tokens), span),
                peer=peer,
                priority=request.priority,
                n_pages_output=n_pages_output * self.output_reserved_percent // 100,
            )
        except DuplicateRequest:
            # Its client has the answer to the last one of this name, which the driver hears of
            # with its next tick.
            self._early.append(decoding)
        except ValueError as error:
            del self._live[decoding.rid]
            self._refuse(request, str(error))

    def _check_fits(self, rid: str, n_pages: int) -> None:
        """Raises `PromptTooLong` for a request that could not run even alone."""
        n_pages_device = self.driver.config.device_pages
        if n_pages > n_pages_device:
            raise PromptTooLong(rid, n_pages, n_pages_device)

    def _refuse(self, request: Request, message: str) -> None:
        finish = Finish(kind=FinishKind.ERROR, message=message, status=BAD_REQUEST)
        self._outputs.append(Output(rid=request.rid, finish=finish))

    # -- the tick ----------------------------------------------------------------------------------

    def tick(self) -> bool:
        """One tick of the driver, and what follows from it for the batch. Whether more is under
        way."""
        tick = self.driver.tick()
        for decoding in self._running():
            decoding.may_grow = True
        for grown in tick.grown:
            self._has_grown(grown)
        for ready in tick.ready:
            self._is_ready(ready)
        for ended in tick.ended:
            self._has_ended(ended)
        early, self._early = self._early, []
        for decoding in early:
            self._ask(decoding)
        self._fill_batch()
        self._resume_one()
        return tick.is_busy

    def _is_ready(self, ready: Ready) -> None:
        decoding = self._live[Rid(ready.rid)]
        decoding.pages = list(ready.device_pages)
        if decoding.stage is Stage.FILLING:
            self._note_sources(decoding, ready)
            decoding.n_kv = decoding.n_prompt
            self.audit.look(decoding.request, ready)
            if ready.token is not None and decoding.request.sampling.is_greedy:
                decoding.stage = Stage.READY
                self._take_token(decoding, ready.token, ready.logprob or 0.0)
                return
        else:
            n_in_place = ready.needs_prefill_from
            n_most = max(len(decoding.tokens) - 1, decoding.n_prompt)
            decoding.n_kv = n_most if n_in_place is None else n_in_place
            self.n_recomputed += n_most - decoding.n_kv
        decoding.stage = Stage.READY

    def _note_sources(self, decoding: Decoding, ready: Ready) -> None:
        span = self.kv.page_tokens
        n_pages = ready.n_pages_by_source
        decoding.cached = CachedTokens(
            device=n_pages.get(Source.DEVICE, 0) * span,
            host=n_pages.get(Source.HOST, 0) * span,
            storage=n_pages.get(Source.STORAGE, 0) * span,
        )
        decoding.n_pages_from_peer = n_pages.get(Source.PEER, 0)

    def _has_ended(self, ended: Ended) -> None:
        decoding = self._live.get(Rid(ended.rid))
        if decoding is None or decoding in self._early:
            return  # its client has the answer already
        if ended.outcome is Outcome.FAILED and ended.retryable and self._asks_another(decoding):
            return
        self._drop(decoding)
        if ended.outcome is Outcome.ABORTED:
            finish = Finish(kind=FinishKind.ABORT, message=ended.reason)
        else:
            status = UNAVAILABLE if ended.retryable else 500
            finish = Finish(
                kind=FinishKind.ERROR,
                message=ended.reason,
                retryable=ended.retryable,
                status=status,
            )
        self._outputs.append(Output(rid=decoding.request.rid, finish=finish))

    def _asks_another(self, decoding: Decoding) -> bool:
        """Send it to the next prefill node, unless all were tried or the client has tokens."""
        is_fresh = decoding.stage is Stage.FILLING
        if not is_fresh or decoding.n_peers_tried >= len(self.peers):
            return False
        decoding.n_peers_tried += 1
        self._ask(decoding)
        return True

    def _drop(self, decoding: Decoding) -> None:
        decoding.stage = Stage.OVER
        self._live.pop(decoding.rid, None)
        self._may_resume = True

    def _running(self) -> list[Decoding]:
        """Oldest first; those that wait for a page of their own are in the batch as well."""
        return [
            decoding
            for decoding in self._live.values()
            if decoding.stage in (Stage.RUNNING, Stage.GROWING)
        ]

    def _fill_batch(self) -> None:
        n_free = self.n_running_max - len(self._running())
        ready = [each for each in self._live.values() if each.stage is Stage.READY]
        for decoding in ready[: max(n_free, 0)]:
            self.driver.run(decoding.rid)
            decoding.stage, decoding.may_grow = Stage.RUNNING, False
            self._end_if_done(decoding)

    # -- growth, retraction, resumption ------------------------------------------------------------

    def _has_room(self, decoding: Decoding, n_tokens: int) -> bool:
        """Whether the pages cover `n_tokens`; asks for one more where they do not."""
        if decoding.stage is not Stage.RUNNING:
            return False
        n_missing = n_pages_covering(n_tokens, self.kv.page_tokens) - len(decoding.pages)
        if n_missing <= 0:
            return True
        if not decoding.may_grow:
            return False
        match self.driver.grow(decoding.rid, n_missing):
            case Granted(device_pages=pages):
                decoding.pages.extend(pages)
                return True
            case Pending():
                decoding.stage = Stage.GROWING
            case NoRoom():
                self._retract_for(decoding)
        return False

    def _has_grown(self, grown: Grew) -> None:
        decoding = self._live.get(Rid(grown.rid))
        if decoding is None or decoding.stage is not Stage.GROWING:
            return
        decoding.stage = Stage.RUNNING
        if grown.device_pages:
            decoding.pages.extend(grown.device_pages)
        else:
            self._retract_for(decoding)

    def _retract_for(self, decoding: Decoding) -> None:
        """Give up the youngest, itself perhaps; never an older one for a younger.

        Waits for one that still computes its KV again: what is retracted counts as computed.
        """
        running = [each for each in self._running() if each.stage is Stage.RUNNING]
        victims = [each for each in running if each.order >= decoding.order]
        if not all(each.is_whole for each in victims):
            return
        victim = max(victims, key=lambda each: each.order)
        self.driver.retract(victim.rid, victim.output_bytes)
        self.n_retracted += 1
        victim.stage = Stage.RETRACTED
        victim.pages = []
        self._may_resume = False

    def _resume_one(self) -> None:
        """The oldest retracted request, once somebody has left or nobody runs."""
        if not self._may_resume and self._running():
            return
        retracted = [each for each in self._live.values() if each.stage is Stage.RETRACTED]
        if retracted:
            oldest = min(retracted, key=lambda each: each.order)
            self.driver.resume(oldest.rid)
            oldest.stage = Stage.RESUMING
        self._may_resume = False

    # -- the step ----------------------------------------------------------------------------------

    def rows(self) -> list[Row]:
        """What is computed now: every decoding request, or one chunk of one that computes again."""
        rows = []
        for decoding in self._running():
            n_tokens = len(decoding.tokens)
            start, stop = n_tokens - 1, n_tokens
            if not decoding.is_whole:
                start = decoding.n_kv
                stop = min(start + self.chunk_tokens, n_tokens - 1)
            if self._has_room(decoding, stop):
                rows.append(Row(decoding, start, stop))
        # A retraction on the way may have taken a row's pages.
        rows = [row for row in rows if row.decoding.stage is Stage.RUNNING]
        long = [row for row in rows if row.stop - row.start > 1]
        return long[:1] or rows

    def compute(self, rows: Sequence[Row]) -> list[tuple[int, float]]:
        """One forward over the rows. On rank 0: token and log-probability of each sampled row."""
        if not rows:
            return []
        batch = paged_batch(
            [
                (row.decoding.tokens[row.start : row.stop], row.start, row.decoding.pages)
                for row in rows
            ],
            page_tokens=self.kv.page_tokens,
            n_written_first=[row.decoding.n_kv for row in rows],
            device=self.decoder.device,
        )
        width = batch.tokens.shape[1]
        ends = [n * width + row.stop - row.start - 1 for n, row in enumerate(rows)]
        asked = [
            (end, (row.decoding.request.sampling, row.stop))
            for end, row in zip(ends, rows, strict=True)
            if row.is_sampled
        ]
        last = torch.tensor([end for end, _ in asked], device=self.decoder.device)
        hidden = self.decoder.paged_forward(batch, self.kv)
        if not self.samples or not asked:
            return []
        logits = self.decoder.logits(hidden.flatten(0, 1)[last])
        return sample_rows(logits, [how for _, how in asked])

    def accept(self, rows: Sequence[Row], sampled: Sequence[tuple[int, float]]) -> None:
        """Take the step's result, the same on every rank."""
        tokens = iter(sampled)
        for row in rows:
            is_sampled = row.is_sampled
            row.decoding.n_kv = row.stop
            if is_sampled:
                token, logprob = next(tokens)
                self._take_token(row.decoding, token, logprob)
                self._end_if_done(row.decoding)

    def _take_token(self, decoding: Decoding, token: int, logprob: float) -> None:
        decoding.tokens.append(token)
        cached, decoding.cached = decoding.cached, None
        n_from_peer = decoding.n_pages_from_peer if cached is not None else 0
        self._outputs.append(
            Output(
                rid=decoding.request.rid,
                tokens=(token,),
                logprobs=(logprob,),
                cached=cached,
                n_pages_from_peer=n_from_peer,
                finish=self._ending(decoding),
            )
        )

    def _ending(self, decoding: Decoding) -> Finish | None:
        n_new = len(decoding.tokens) - decoding.n_prompt
        if n_new == 0:
            return None
        eos = self.decoder.config.eos_tokens
        return ending(decoding.request, eos, n_new, decoding.tokens[-1])

    def _end_if_done(self, decoding: Decoding) -> None:
        if self._ending(decoding) is not None:
            self.driver.finish(decoding.rid, decoding.output_bytes)
            self._drop(decoding)
