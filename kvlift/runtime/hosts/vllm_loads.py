"""One request of vLLM on its way through kvlift: asked, offered, loading, told.

    ASKED --plan--> OFFERED --blocks--> LOADING --ready, or failed and quiet--> TOLD
      |               |                                                          (vLLM runs it)
      '---------------'--nothing to load, no blocks, gone--> forgotten

The decisions are the core's. This only remembers what vLLM was told, so that it is told the rest.
"""

from enum import Enum, auto

from attrs import define, field

from kvlift.core.plan import Plan
from kvlift.core.tier import Source


class Stage(Enum):
    ASKED = auto()
    """kvlift has been asked; `None` for vLLM."""
    OFFERED = auto()
    """vLLM was told a number; the lease is held."""
    LOADING = auto()
    """vLLM has given blocks and waits."""
    DRAINING = auto()
    """The load has failed or is not wanted; something may still write into the blocks."""
    TOLD = auto()
    """vLLM hears that the load is over; until it runs the request, its blocks are not believed."""


@define(eq=False)
class Load:
    """`core_rid`: this attempt's name in the core, never used twice. `n_given`, `n_promised`: pages
    that vLLM had, and pages that it counts on. `n_good`: pages that are good in the end."""

    rid: str
    core_rid: str
    n_given: int
    has_peer: bool
    stage: Stage = Stage.ASKED
    n_external: int = 0
    n_promised: int = 0
    n_good: int = 0
    n_steps: int = 0
    blocks: tuple[int, ...] = field(default=(), repr=False)
    is_wanted: bool = True

    def failed_blocks(self) -> tuple[int, ...]:
        """Blocks that vLLM counts on and that did not come."""
        return self.blocks[self.n_good : self.n_promised] if self.is_wanted else ()


def split(plan: Plan, n_tokens: int, page_tokens: int) -> dict[Source, int]:
    """Tokens behind those that vLLM has, by where the plan takes them from; none of nothing."""
    bounds = plan.bounds
    n_host = min(n_tokens, (bounds.host - bounds.shared) * page_tokens)
    n_storage = min(n_tokens - n_host, (bounds.storage - bounds.host) * page_tokens)
    counts = {
        Source.HOST: n_host,
        Source.STORAGE: n_storage,
        Source.PEER: n_tokens - n_host - n_storage,
    }
    return {source: n for source, n in counts.items() if n}
