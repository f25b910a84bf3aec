"""One request of the decode engine, and what it computes in a step."""

from enum import Enum, auto

from attrs import define, field, frozen

from kvlift.core.ids import Rid
from kvlift.core.prompt import token_bytes
from kvlift.runtime.worker.generation import CachedTokens, Request


class Stage(Enum):
    """Where a request stands in this scheduler."""

    FILLING = auto()
    READY = auto()
    RUNNING = auto()
    GROWING = auto()
    RETRACTED = auto()
    RESUMING = auto()
    OVER = auto()


@define(eq=False)
class Decoding:
    """One request. `n_kv`: leading tokens whose KV is in place; `pages` in order of positions.

    `may_grow`: the driver has ticked since it was told that the request runs.
    """

    request: Request
    order: int
    tokens: list[int]
    stage: Stage = Stage.FILLING
    pages: list[int] = field(factory=list)
    n_kv: int = 0
    n_peers_tried: int = 1
    may_grow: bool = False
    cached: CachedTokens | None = None
    n_pages_from_peer: int = 0

    @property
    def rid(self) -> Rid:
        return Rid(self.request.rid)

    @property
    def is_whole(self) -> bool:
        """All KV is in place but that of the last token, which the next step computes."""
        return self.n_kv >= len(self.tokens) - 1

    @property
    def n_prompt(self) -> int:
        return len(self.request.tokens)

    @property
    def output_bytes(self) -> bytes:
        """Every sampled token, as the driver takes them."""
        return token_bytes(self.tokens[self.n_prompt :])


@frozen
class Row:
    """What one request computes in a step: the tokens [start, stop)."""

    decoding: Decoding
    start: int
    stop: int

    @property
    def is_sampled(self) -> bool:
        return self.stop == len(self.decoding.tokens)
