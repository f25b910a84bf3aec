"""What is planned for: sizes and rates, and what a page of a trace is to the core.

One block of a trace (512 tokens) is one page. The core is given two tokens for a whole block and
one for a part of one, which says the same about pages and costs it far less.
"""

from itertools import product
from typing import Final

from attrs import frozen

from kvlift.core.keys import Namespace
from kvlift.core.prompt import Prompt, n_pages_covering, token_bytes
from kvlift.runtime.config import Config
from kvlift.runtime.demo.trace import BLOCK_TOKENS, TraceRequest

GIB: Final = 1 << 30
GBIT: Final = 1_000_000_000 / 8
NS: Final = 1_000_000_000
CORE_TOKENS: Final = 2
"""Tokens that stand for a whole block."""

ANSWERS_FROM: Final = 1 << 30
"""Tokens of answers; those of blocks are smaller."""

PAGES_MAX: Final = 1 << 22
FOREVER_MS: Final = 2**31
NAMESPACE: Final = Namespace(page_tokens=CORE_TOKENS).digest()


class PlanRefused(Exception):
    """Sizes that cannot be planned for: a sentence that says what to change."""


@frozen(kw_only=True)
class Rates:
    """`link` and `storage`: bytes a second into one decode node; `copies`: between its device and
    its host, each way. `prefill`: tokens a second of one prompt."""

    kv_bytes_per_token: int = 131_072
    link_gbps: float = 100.0
    storage_gbps: float = 50.0
    copy_gbps: float = 400.0
    prefill_tokens_per_s: float = 20_000.0
    step_ms: float = 20.0
    n_batch_max: int = 64

    @property
    def page_bytes(self) -> int:
        return BLOCK_TOKENS * self.kv_bytes_per_token

    @property
    def step_ns(self) -> int:
        return round(self.step_ms * 1_000_000)

    def page_ns(self, gbps: float) -> int:
        return max(1, round(self.page_bytes / (gbps * GBIT) * NS))


@frozen(kw_only=True)
class Sizes:
    """GiB a decode node for device and host; of storage, shared by all of them."""

    device_gib: float
    host_gib: float
    storage_gib: float


def grid(device: list[float], host: list[float], storage: list[float]) -> list[Sizes]:
    return [
        Sizes(device_gib=d, host_gib=h, storage_gib=s) for d, h, s in product(device, host, storage)
    ]


def config_of(sizes: Sizes, rates: Rates) -> Config:
    """Raises `PlanRefused`."""
    n_device = n_pages_of(sizes.device_gib, rates)
    if n_device < 2:
        raise PlanRefused(
            f"{sizes.device_gib:g} GiB hold {n_device} pages of {rates.page_bytes / GIB:.3f} GiB:"
            " give --device-gib at least two, or a smaller --kv-bytes-per-token"
        )
    n_host = n_pages_of(sizes.host_gib, rates)
    return Config(
        page_tokens=CORE_TOKENS,
        device_pages=n_device,
        host_pages=n_host,
        write="through" if n_host else "none",
        persist="on" if sizes.storage_gib else "off",
        prefetch_min_pages=1,
        prefetch_deadline_ms=FOREVER_MS,
        prefetch_stall_ms=FOREVER_MS,
        transfer_deadline_ms=FOREVER_MS,
    )


def n_pages_of(gib: float, rates: Rates) -> int:
    """Raises `PlanRefused`."""
    n_pages = int(gib * GIB / rates.page_bytes)
    if n_pages > PAGES_MAX:
        raise PlanRefused(
            f"{gib:g} GiB are {n_pages} pages, at most {PAGES_MAX} can be planned for"
        )
    return n_pages


@frozen(kw_only=True)
class Ask:
    """One request of a trace. `n_blocks_full` of its prompt; answers are counted in real tokens."""

    rid: str
    arrival_ns: int
    prompt: Prompt
    n_tokens: int
    n_answer: int
    number: int

    @classmethod
    def of(cls, number: int, request: TraceRequest, begin_ms: int) -> "Ask":
        tokens = []
        for place, block in enumerate(request.hash_ids):
            name = block % ANSWERS_FROM
            is_whole = (place + 1) * BLOCK_TOKENS <= request.input_length
            tokens += [name, name] if is_whole else [name]
        return cls(
            rid=f"t{number}",
            arrival_ns=(request.timestamp - begin_ms) * 1_000_000,
            prompt=Prompt(NAMESPACE, token_bytes(tokens), CORE_TOKENS),
            n_tokens=request.input_length,
            n_answer=max(1, request.output_length),
            number=number,
        )

    def n_pages(self, n_sampled: int) -> int:
        """Pages that hold the prompt and the answer so far; its last token has no KV yet."""
        return n_pages_covering(self.n_tokens + n_sampled - 1, BLOCK_TOKENS)

    def output(self, n_sampled: int) -> bytes:
        """An answer for the core that fills as many pages as these real tokens."""
        n_full = (self.n_tokens + n_sampled - 1) // BLOCK_TOKENS
        n_core = max(1, CORE_TOKENS * n_full - self.prompt.n_tokens + 1)
        first = ANSWERS_FROM + self.number * 4096 % ANSWERS_FROM
        return token_bytes([min(first + place, 2**31 - 1) for place in range(n_core)])
