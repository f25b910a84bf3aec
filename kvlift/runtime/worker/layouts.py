"""The page of a model: whole, as both ends of the wire mean it, and as one rank keeps it."""

import attrs

from kvlift.effects.layout import PageLayout
from kvlift.runtime.worker.model_config import ModelConfig


def whole_layout(config: ModelConfig, page_tokens: int) -> PageLayout:
    """The page of the unsharded model: both ends of the wire must mean the same one."""
    return PageLayout(
        kind="mha",
        n_layers=config.n_layers,
        n_kv_heads=config.n_kv_heads,
        head_dim=config.head_dim,
        dtype=config.dtype,
        page_tokens=page_tokens,
    )


def rank_layout(config: ModelConfig, page_tokens: int, n_ranks: int) -> PageLayout:
    """A page as one rank keeps it: its share of the KV heads."""
    return attrs.evolve(whole_layout(config, page_tokens), n_kv_heads=config.n_kv_heads // n_ranks)
