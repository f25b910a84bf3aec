"""How large the multi-turn benchmark is: model, prompts, tiers, link rates."""

from typing import Final

from attrs import frozen

from kvlift.effects.layout import PageLayout

MODES: Final = ("none", "device", "host", "all")


@frozen(kw_only=True)
class Sizes:
    """`prompt_tokens`: the prompt of each round, of whole pages; what is new in it begins with the
    `n_output` tokens of the last answer. `load`: the share of its time that prefill computes.
    `device_pages`, `host_pages`: decode's tiers; storage has no bound. `chunk_tokens`: what prefill
    computes at a time, so also how finely a transfer streams beside it."""

    n_layers: int
    hidden: int
    ffn: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocab: int
    dtype: str
    page_tokens: int
    prompt_tokens: tuple[int, ...]
    n_output: int
    n_conversations: int
    device_pages: int
    host_pages: int
    chunk_tokens: int
    batch: int
    n_splits: int
    n_store_threads: int
    rates_gbps: tuple[float, ...]
    modes: tuple[str, ...] = MODES
    load: float = 0.75
    gap_min_s: float = 0.25

    @property
    def layout(self) -> PageLayout:
        return PageLayout(
            kind="mha",
            n_layers=self.n_layers,
            n_kv_heads=self.n_kv_heads,
            head_dim=self.head_dim,
            dtype=self.dtype,
            page_tokens=self.page_tokens,
        )

    @property
    def n_tokens_max(self) -> int:
        """Tokens of a whole conversation, its last answer included; whole pages."""
        n_tokens = self.prompt_tokens[-1] + self.n_output
        return -(-n_tokens // self.page_tokens) * self.page_tokens

    @property
    def n_pages_max(self) -> int:
        return self.n_tokens_max // self.page_tokens

    @property
    def n_pages_output(self) -> int:
        """Pages that an answer needs beside its prompt's; the last token has no KV."""
        return -(-(self.n_output - 1) // self.page_tokens)


FULL: Final = Sizes(
    n_layers=32,
    hidden=4096,
    ffn=14336,
    n_heads=32,
    n_kv_heads=8,
    head_dim=128,
    vocab=128256,
    dtype="bfloat16",
    page_tokens=64,
    prompt_tokens=(4096, 16384, 28672, 40960, 53248, 65536),
    n_output=80,
    n_conversations=4,
    device_pages=2560,
    host_pages=3584,
    chunk_tokens=2048,
    batch=8,
    n_splits=32,
    n_store_threads=8,
    rates_gbps=(25.0, 100.0, 200.0, 400.0),
)
"""An 8-billion-parameter model; four conversations end with 32 GiB of KV, the device holds 20."""

TINY: Final = Sizes(
    n_layers=2,
    hidden=64,
    ffn=128,
    n_heads=4,
    n_kv_heads=2,
    head_dim=16,
    vocab=512,
    dtype="float32",
    page_tokens=16,
    prompt_tokens=(64, 128, 192),
    n_output=20,
    n_conversations=3,
    device_pages=32,
    host_pages=36,
    chunk_tokens=32,
    batch=4,
    n_splits=4,
    n_store_threads=2,
    rates_gbps=(0.02,),
    gap_min_s=0.15,
)
"""The same code in a few seconds, without a GPU."""
