"""The engine without a cache: every token by a plain forward of the whole sequence.

Slow on purpose and simple on purpose: it is the yardstick of the others, and the engine behind
the HTTP server's tests.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence

import torch
from attrs import define, field

from kvlift.runtime.worker.generation import (
    CachedTokens,
    EngineBusyError,
    EngineRefusedError,
    Finish,
    FinishKind,
    Output,
    Request,
)
from kvlift.runtime.worker.model import Decoder
from kvlift.runtime.worker.sampling import sample


def ending(request: Request, eos: Sequence[int], n_new: int, token: int) -> Finish | None:
    """Whether `token`, the `n_new`-th new one, is the last."""
    stops = request.sampling.stop_tokens
    if token in stops or (token in eos and not request.sampling.ignore_eos):
        return Finish(kind=FinishKind.STOP, matched=token)
    if n_new >= request.sampling.max_new_tokens:
        return Finish(kind=FinishKind.LENGTH)
    return None


def plain_scores(decoder: Decoder, tokens: Sequence[int], start: int) -> tuple[float, ...]:
    """Log-probability of each token from max(start, 1) on, given those before it."""
    first = max(start, 1)
    if first >= len(tokens):
        return ()
    ids = torch.tensor(list(tokens), device=decoder.device)
    logits, _ = decoder.plain_forward(ids)
    logprobs = torch.log_softmax(logits[first - 1 : -1], dim=-1)
    return tuple(logprobs.gather(1, ids[first:, None])[:, 0].tolist())


@define(eq=False)
class PlainEngine:
    """Implements `Engine` in this process; the model runs in a worker thread, one step a time."""

    decoder: Decoder
    n_requests_max: int = 64
    _live: dict[str, asyncio.Event] = field(factory=dict, init=False)
    _n_tokens: int = field(default=0, init=False)
    _turn: asyncio.Lock = field(factory=asyncio.Lock, init=False)

    async def submit(self, request: Request) -> AsyncIterator[Output]:
        config = self.decoder.config
        if len(self._live) >= self.n_requests_max:
            raise EngineBusyError(f"{self.n_requests_max} requests are under way; try again later")
        if request.rid in self._live:
            raise EngineRefusedError(f"the request id {request.rid} is in use; choose another")
        n_tokens = len(request.tokens) + request.sampling.max_new_tokens
        if n_tokens > config.positions_max:
            raise EngineRefusedError(
                f"prompt and answer have {n_tokens} tokens, the model takes {config.positions_max}"
            )
        aborted = asyncio.Event()
        self._live[request.rid] = aborted
        try:
            tokens = list(request.tokens)
            cached: CachedTokens | None = CachedTokens()
            while True:
                token, logprob = await self._next(tokens, request)
                if aborted.is_set():
                    yield Output(rid=request.rid, finish=Finish(kind=FinishKind.ABORT))
                    return
                tokens.append(token)
                n_new = len(tokens) - len(request.tokens)
                finish = ending(request, config.eos_tokens, n_new, token)
                yield Output(
                    rid=request.rid,
                    tokens=(token,),
                    logprobs=(logprob,),
                    cached=cached,
                    finish=finish,
                )
                cached = None
                if finish is not None:
                    return
        finally:
            del self._live[request.rid]

    async def _next(self, tokens: list[int], request: Request) -> tuple[int, float]:
        def compute() -> tuple[int, float]:
            logits, _ = self.decoder.plain_forward(torch.tensor(tokens))
            return sample(logits[-1], request.sampling, len(tokens))

        async with self._turn:
            self._n_tokens += 1
            return await asyncio.to_thread(compute)

    async def abort(self, rid: str) -> bool:
        live = self._live.get(rid)
        if live is None:
            return False
        live.set()
        return True

    async def flush(self, tiers: Sequence[str]) -> None:
        """There is nothing to forget."""

    async def score(self, tokens: Sequence[int], start: int) -> tuple[float, ...]:
        async with self._turn:
            return await asyncio.to_thread(plain_scores, self.decoder, tokens, start)

    async def info(self) -> dict[str, object]:
        return {"engine": "plain", "model": self.decoder.config.name, "running": len(self._live)}

    async def metrics_text(self) -> str:
        return (
            "# TYPE kvlift_worker_tokens_total counter\n"
            f"kvlift_worker_tokens_total {self._n_tokens}\n"
        )
