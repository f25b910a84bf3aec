"""One request's whole answer, gathered from the outputs that an engine gives bit by bit."""

import time
from collections.abc import AsyncIterator

from attrs import frozen

from kvlift.runtime.worker.generation import CachedTokens, Finish, Output, Request


@frozen(kw_only=True)
class Generation:
    """One finished request: what came out, from where its KV came, and how long it took."""

    rid: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    n_prompt_tokens: int
    cached: CachedTokens
    n_pages_from_peer: int
    bytes_from_peer: int
    finish: Finish
    submitted_s: float
    ttft_s: float
    duration_s: float

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None where there is only one."""
        n_later = len(self.tokens) - 1
        return (self.duration_s - self.ttft_s) / n_later if n_later > 0 else None


async def gathered(request: Request, outputs: AsyncIterator[Output], page_bytes: int) -> Generation:
    """Wait for the last of a request's outputs. Raises what `Engine.submit` raises."""
    tokens: list[int] = []
    logprobs: list[float] = []
    cached, n_from_peer = CachedTokens(), 0
    started_s = time.monotonic()
    first_s: float | None = None
    finish: Finish | None = None
    async for output in outputs:
        if output.tokens and first_s is None:
            first_s = time.monotonic()
        tokens.extend(output.tokens)
        logprobs.extend(output.logprobs)
        if output.cached is not None:
            cached, n_from_peer = output.cached, output.n_pages_from_peer
        finish = output.finish or finish
    ended_s = time.monotonic()
    assert finish is not None, "an engine's last output says how it ended"
    return Generation(
        rid=request.rid,
        tokens=tuple(tokens),
        logprobs=tuple(logprobs),
        n_prompt_tokens=len(request.tokens),
        cached=cached,
        n_pages_from_peer=n_from_peer,
        bytes_from_peer=n_from_peer * page_bytes,
        finish=finish,
        submitted_s=started_s,
        ttft_s=(first_s or ended_s) - started_s,
        duration_s=ended_s - started_s,
    )
