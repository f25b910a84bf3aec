"""Weights: seeded random ones, or those of a Hugging Face folder; one rank's shard of them.

Names are Hugging Face's. A rank keeps its heads' rows of q, k, v and gate/up and its columns of
o and down (Megatron's split: two all-reduces a layer); embeddings are whole on every rank.
"""

import hashlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeAlias

import torch
from attrs import frozen
from safetensors import safe_open

from kvlift.runtime.worker.model_config import ModelConfig, ModelRefusedError

Fetch: TypeAlias = Callable[[str, tuple[int, ...]], torch.Tensor]
"""The whole tensor of this name, which must have this shape."""

LOGIT_SPREAD: Final = 3.0
"""Standard deviation of random weights' logits: greedy tokens are then decided by a margin."""

HASH_CHUNK_BYTES: Final = 1 << 22


@frozen(kw_only=True)
class Shard:
    """Which part of the heads this rank keeps."""

    rank: int = 0
    n_ranks: int = 1

    def rows(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's rows, contiguous."""
        return whole.chunk(self.n_ranks, dim=0)[self.rank].contiguous()

    def columns(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's columns, contiguous."""
        return whole.chunk(self.n_ranks, dim=1)[self.rank].contiguous()


@frozen(kw_only=True, eq=False)
class LayerWeights:
    """One layer on one rank. `qkv` is [(q + 2 kv) heads x dim, hidden], `gate_up` likewise."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    out: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


@frozen(kw_only=True, eq=False)
class Weights:
    """A rank's whole set. `embed` and `head` are [vocab, hidden]."""

    embed: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    head: torch.Tensor


def random_weights(
    config: ModelConfig, *, seed: int, shard: Shard, device: torch.device
) -> Weights:
    """Weights that depend on (config, seed, name) alone, so that every process makes the same."""

    def fetch(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        noise = torch.randn(shape, generator=generator, dtype=torch.float32)
        return _scaled(name, noise, config).to(_dtype(config))

    return _assemble(config, fetch, shard, device)


def _scaled(name: str, noise: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    if "norm" in name:
        return 1.0 + 0.1 * noise
    if name.endswith(".bias"):
        return 0.1 * noise
    if "embed_tokens" in name and not config.tied_embeddings:
        return noise
    if "lm_head" in name or "embed_tokens" in name:
        return noise * (LOGIT_SPREAD / math.sqrt(config.hidden))
    # Queries and keys a little larger, so that attention has preferences and a wrong page is seen.
    gain = 1.5 if ("q_proj" in name or "k_proj" in name) else 1.0
    return noise * (gain / math.sqrt(noise.shape[-1]))


def weights_from_folder(
    folder: Path, config: ModelConfig, *, shard: Shard, device: torch.device
) -> Weights:
    """Read `*.safetensors` tensor by tensor (memory-mapped, never more than one whole at a time).

    Raises `ModelRefusedError` for a missing tensor or one of another shape.
    """
    where: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(str(path), framework="pt") as opened:
            where.update(dict.fromkeys(opened.keys(), path))
    if not where:
        raise ModelRefusedError(f"{folder} holds no *.safetensors; convert the weights first")

    def fetch(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        path = where.get(name)
        if path is None:
            raise ModelRefusedError(f"{folder} lacks the tensor {name}")
        with safe_open(str(path), framework="pt") as opened:
            tensor: torch.Tensor = opened.get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise ModelRefusedError(
                f"{name} has shape {tuple(tensor.shape)}, config.json says {shape}"
            )
        return tensor.to(_dtype(config))

    return _assemble(config, fetch, shard, device)


def weights_digest(folder: Path) -> str:
    """SHA-256 over the config and all weight files: new weights are a new namespace."""
    hasher = hashlib.sha256()
    for path in [folder / "config.json", *sorted(folder.glob("*.safetensors"))]:
        with path.open("rb") as opened:
            while chunk := opened.read(HASH_CHUNK_BYTES):
                hasher.update(chunk)
    return hasher.hexdigest()


def _dtype(config: ModelConfig) -> torch.dtype:
    return {
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
    }[config.dtype]


def _assemble(config: ModelConfig, fetch: Fetch, shard: Shard, device: torch.device) -> Weights:
    config.fits_ranks(shard.n_ranks)
    embed = fetch("model.embed_tokens.weight", (config.vocab, config.hidden)).to(device)
    layers = tuple(_layer(config, fetch, shard, device, index) for index in range(config.n_layers))
    head = embed
    if not config.tied_embeddings:
        head = fetch("lm_head.weight", (config.vocab, config.hidden)).to(device)
    final_norm = fetch("model.norm.weight", (config.hidden,)).to(device)
    return Weights(embed=embed, layers=layers, final_norm=final_norm, head=head)


def _layer(
    config: ModelConfig, fetch: Fetch, shard: Shard, device: torch.device, index: int
) -> LayerWeights:
    prefix = f"model.layers.{index}."
    widths = {
        "q": config.n_heads * config.head_dim,
        "k": config.n_kv_heads * config.head_dim,
        "v": config.n_kv_heads * config.head_dim,
    }

    def norm(name: str, width: int) -> torch.Tensor:
        return fetch(f"{prefix}{name}.weight", (width,)).to(device)

    def rows(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return shard.rows(fetch(prefix + name, shape)).to(device)

    def columns(name: str, shape: tuple[int, int]) -> torch.Tensor:
        return shard.columns(fetch(prefix + name, shape)).to(device)

    qkv = [rows(f"self_attn.{x}_proj.weight", (n, config.hidden)) for x, n in widths.items()]
    bias = None
    if config.qkv_bias:
        bias = torch.cat([rows(f"self_attn.{x}_proj.bias", (n,)) for x, n in widths.items()])
    mlp = (config.intermediate, config.hidden)
    return LayerWeights(
        input_norm=norm("input_layernorm", config.hidden),
        qkv=torch.cat(qkv),
        qkv_bias=bias,
        q_norm=norm("self_attn.q_norm", config.head_dim) if config.qk_norm else None,
        k_norm=norm("self_attn.k_norm", config.head_dim) if config.qk_norm else None,
        out=columns("self_attn.o_proj.weight", (config.hidden, widths["q"])),
        mlp_norm=norm("post_attention_layernorm", config.hidden),
        gate_up=torch.cat([rows("mlp.gate_proj.weight", mlp), rows("mlp.up_proj.weight", mlp)]),
        down=columns("mlp.down_proj.weight", (config.hidden, config.intermediate)),
    )
