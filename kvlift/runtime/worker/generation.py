"""What goes into an engine and what comes out: requests, outputs, and the `Engine` protocol.

These travel between processes as msgspec messages, so every field is a plain value.
"""

from collections.abc import AsyncIterator, Sequence
from enum import StrEnum
from typing import Final, Protocol

import msgspec

TEMPERATURE_MIN: Final = 1e-6
"""Below it sampling is greedy, as in SGLang: logits divided by less are no numbers any more."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tokens are chosen. Temperature 0 is greedy; `top_k` -1 is off.

    A token drawn at random depends on (seed, its place, the logits) alone: not on its neighbours
    in a batch, nor on where its KV came from.
    """

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_tokens: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int = 0

    @property
    def is_greedy(self) -> bool:
        return self.temperature < TEMPERATURE_MIN or self.top_k == 1


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt to continue. `salt` and `tenant` separate caches; both may be empty."""

    rid: str
    tokens: tuple[int, ...]
    sampling: Sampling
    tenant: str = ""
    salt: str = ""
    priority: int = 0


class FinishKind(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Finish(msgspec.Struct, frozen=True, kw_only=True):
    """Why an answer ended. `matched` is the stop token; `retryable`: another peer may do it.

    `status` is the HTTP status of an ERROR: 400 for what can never be served, 503 for weather.
    """

    kind: FinishKind
    matched: int | None = None
    message: str = ""
    retryable: bool = False
    status: int = 500


class CachedTokens(msgspec.Struct, frozen=True, kw_only=True):
    """Prompt tokens that were not computed or sent again, by the tier that held them."""

    device: int = 0
    host: int = 0
    storage: int = 0

    @property
    def total(self) -> int:
        return self.device + self.host + self.storage


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """What is new since the last output of this request; the last one carries `finish`.

    `logprobs` are natural logarithms of the model's own probabilities (before temperature).
    """

    rid: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    cached: CachedTokens | None = None
    n_pages_from_peer: int = 0
    finish: Finish | None = None


class EngineBusyError(RuntimeError):
    """The queue is full: come back later (HTTP 429)."""


class EngineRefusedError(ValueError):
    """This request can never be served; the message says what to change (HTTP 400)."""


class EngineDownError(RuntimeError):
    """The engine is gone or was never there; the message says what happened (HTTP 503)."""


class Engine(Protocol):
    """What the HTTP server needs of an engine, near or far."""

    def submit(self, request: Request) -> AsyncIterator[Output]:
        """Outputs until one has `finish`.

        Raises `EngineBusyError`, `EngineRefusedError`, `EngineDownError`. Closing the iterator
        before its end aborts the request.
        """

    async def abort(self, rid: str) -> bool:
        """End a request early; False where the id is unknown or has ended."""

    async def flush(self, tiers: Sequence[str]) -> None:
        """Forget what `tiers` hold: any of device, host, storage."""

    async def score(self, tokens: Sequence[int], start: int) -> tuple[float, ...]:
        """Log-probability of `tokens[i]` after `tokens[:i]` for i from max(start, 1) on, by a
        plain forward without any cache."""

    async def info(self) -> dict[str, object]:
        """Plain values that describe model, limits and state."""

    async def metrics_text(self) -> str:
        """Prometheus text format."""
