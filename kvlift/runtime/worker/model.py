"""A decoder-only transformer in plain torch: RMSNorm, rotary positions, GQA, SwiGLU.

Two ways through it. `plain_forward` knows no cache: it is the yardstick. `paged_forward` reads and
writes KV in pages (prefill chunks and batched decoding are one function) and must give the same
log-probabilities. Tensor parallel: heads and MLP columns are dealt to ranks, `all_reduce` sums.
"""

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from attrs import frozen
from torch.nn import functional

from kvlift.runtime.worker.model_config import ModelConfig
from kvlift.runtime.worker.weights import LayerWeights, Shard, Weights

AllReduce: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""The sum of a tensor over all ranks, equal on all of them."""

LayerKv: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""K (after rotation) and V of one layer, each [tokens, kv_heads, head_dim]."""

Attend: TypeAlias = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer, q, k, v), each [batch, n, heads, dim], to the attended values, shaped like q."""


def alone(tensor: torch.Tensor) -> torch.Tensor:
    """The all-reduce of a single rank."""
    return tensor


@frozen(eq=False)
class PagedKv:
    """One rank's KV memory: per layer K and V, [n_pages * page_tokens, kv_heads, head_dim]."""

    page_tokens: int
    layers: tuple[LayerKv, ...]


def paged_kv(
    config: ModelConfig, *, n_pages: int, page_tokens: int, shard: Shard, device: torch.device
) -> PagedKv:
    """Zeroed KV memory for a shard of the model."""
    shape = (n_pages * page_tokens, config.n_kv_heads // shard.n_ranks, config.head_dim)
    dtype = getattr(torch, config.dtype)

    def zeros() -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return PagedKv(page_tokens, tuple((zeros(), zeros()) for _ in range(config.n_layers)))


@frozen(kw_only=True, eq=False)
class PagedBatch:
    """Rows of a padded batch: what to compute, where to write it, what to read.

    `tokens`, `positions` [batch, n] int64; `written` [m] int64: the tokens, counted through all
    rows, whose KV is kept (not padding, nor KV that is there already); `slots` [m] int64: its
    places; `tables` [batch, pages] int64, padded with any valid page.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    written: torch.Tensor
    slots: torch.Tensor
    tables: torch.Tensor


def paged_batch(
    rows: Sequence[tuple[Sequence[int], int, Sequence[int]]],
    *,
    page_tokens: int,
    n_written_first: Sequence[int],
    device: torch.device,
) -> PagedBatch:
    """From rows of (tokens, first position, page table); row i writes KV of positions from
    `n_written_first[i]` on and only reads what lies before."""
    width = max(len(tokens) for tokens, _, _ in rows)
    n_pages = max(len(table) for _, _, table in rows)
    all_tokens, all_positions, all_tables = [], [], []
    written: list[int] = []
    slots: list[int] = []
    for number, ((tokens, first, table), writes_from) in enumerate(
        zip(rows, n_written_first, strict=True)
    ):
        pad = width - len(tokens)
        spots = range(first, first + len(tokens))
        for at in range(max(first, writes_from), spots.stop):
            written.append(number * width + at - first)
            slots.append(table[at // page_tokens] * page_tokens + at % page_tokens)
        all_tokens.append([*tokens, *([0] * pad)])
        all_positions.append([*spots, *([0] * pad)])
        all_tables.append([*table, *([0] * (n_pages - len(table)))])
    return PagedBatch(
        tokens=torch.tensor(all_tokens, device=device),
        positions=torch.tensor(all_positions, device=device),
        written=torch.tensor(written, dtype=torch.int64, device=device),
        slots=torch.tensor(slots, dtype=torch.int64, device=device),
        tables=torch.tensor(all_tables, device=device),
    )


class Decoder:
    """The model of one rank. Stateless: KV lives in what the caller passes in."""

    def __init__(
        self, config: ModelConfig, weights: Weights, shard: Shard, all_reduce: AllReduce = alone
    ) -> None:
        self.config = config
        self.weights = weights
        self.shard = shard
        self.device = weights.embed.device
        self._all_reduce = all_reduce
        self._n_heads = config.n_heads // shard.n_ranks
        self._n_kv_heads = config.n_kv_heads // shard.n_ranks
        self._inverse_frequencies = _inverse_frequencies(config).to(self.device)

    @torch.inference_mode()
    def plain_forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, list[LayerKv]]:
        """Logits [n, vocab] float32 of `tokens` [n], and each layer's K and V; no cache."""
        n_tokens = int(tokens.shape[0])
        kept: list[LayerKv] = []

        def attend(_layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            kept.append((k[0], v[0]))
            return _sdpa(q, k, v, None)

        positions = torch.arange(n_tokens, device=self.device)[None]
        hidden = self._layers(tokens[None].to(self.device), positions, attend)
        return self.logits(hidden[0]), kept

    @torch.inference_mode()
    def paged_forward(self, batch: PagedBatch, kv: PagedKv) -> torch.Tensor:
        """Final hidden states [batch, n, hidden]; new KV is written to its slots.

        A query sees every key of its row's table up to its own position. Nothing in here waits
        for the device.
        """
        written, slots = batch.written, batch.slots
        places = torch.arange(kv.page_tokens, device=self.device)
        spots = (batch.tables[:, :, None] * kv.page_tokens + places).flatten(1)
        keys_at = torch.arange(spots.shape[1], device=self.device)
        mask = (keys_at[None, None, :] <= batch.positions[:, :, None])[:, None]

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            k_memory, v_memory = kv.layers[layer]
            k_memory[slots] = k.flatten(0, 1)[written]
            v_memory[slots] = v.flatten(0, 1)[written]
            return _sdpa(q, k_memory[spots], v_memory[spots], mask)

        return self._layers(batch.tokens, batch.positions, attend)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., hidden] of `paged_forward` to logits [..., vocab], float32."""
        normed = _rms_norm(hidden, self.weights.final_norm, self.config.rms_eps)
        return functional.linear(normed, self.weights.head).float()

    def _layers(
        self, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        hidden = functional.embedding(tokens, self.weights.embed)
        rotation = self._rotation(positions)
        for index, layer in enumerate(self.weights.layers):
            normed = _rms_norm(hidden, layer.input_norm, self.config.rms_eps)
            q, k, v = self._qkv(layer, normed, rotation)
            attended = attend(index, q, k, v).flatten(-2)
            hidden = hidden + self._all_reduce(functional.linear(attended, layer.out))
            normed = _rms_norm(hidden, layer.mlp_norm, self.config.rms_eps)
            gate, up = functional.linear(normed, layer.gate_up).chunk(2, dim=-1)
            hidden = hidden + self._all_reduce(
                functional.linear(functional.silu(gate) * up, layer.down)
            )
        return hidden

    def _qkv(
        self, layer: LayerWeights, normed: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        dim = self.config.head_dim
        fused = functional.linear(normed, layer.qkv, layer.qkv_bias)
        fused = fused.view(*fused.shape[:-1], -1, dim)
        q, k, v = torch.split(fused, [self._n_heads, self._n_kv_heads, self._n_kv_heads], dim=-2)
        if layer.q_norm is not None and layer.k_norm is not None:
            q = _rms_norm(q, layer.q_norm, self.config.rms_eps)
            k = _rms_norm(k, layer.k_norm, self.config.rms_eps)
        return _rotate(q, rotation), _rotate(k, rotation), v

    def _rotation(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine, [batch, n, 1, head_dim], in float32 until the last moment."""
        angles = positions[..., None].float() * self._inverse_frequencies
        both = torch.cat([angles, angles], dim=-1)[:, :, None]
        dtype = self.weights.embed.dtype
        return both.cos().to(dtype), both.sin().to(dtype)


def _sdpa(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """Causal attention without a mask, else what the mask allows; [batch, n, heads, dim]."""
    attended = functional.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=mask is None,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return attended.transpose(1, 2)


def _rms_norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = hidden.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(hidden.dtype)


def _rotate(heads: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    cosine, sine = rotation
    first, second = heads.chunk(2, dim=-1)
    return heads * cosine + torch.cat([-second, first], dim=-1) * sine


def _inverse_frequencies(config: ModelConfig) -> torch.Tensor:
    """[head_dim / 2] float32, stretched as the config says (Llama 3.1's rule for `llama3`)."""
    steps = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    plain = 1.0 / (config.rope_theta**steps)
    scaling = config.rope_scaling
    if scaling is None:
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    wavelength = 2 * math.pi / plain
    turns = scaling.original_max_positions / wavelength
    span = scaling.high_freq_factor - scaling.low_freq_factor
    smooth = ((turns - scaling.low_freq_factor) / span).clamp(0.0, 1.0)
    return (1 - smooth) * plain / scaling.factor + smooth * plain
