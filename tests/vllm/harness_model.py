"""A small Llama whose answer depends on every key and value: seeded weights in a folder.

vLLM's own dummy weights are uniform in +-1e-3, norms included: log-probabilities of such a model
hardly depend on its prompt, and a comparison of them proves nothing. These weights are drawn so
that attention is sharp and the logits are spread by about 1.
"""

import json
import math
from pathlib import Path

import torch
from attrs import frozen
from safetensors.torch import save_file


@frozen
class ModelShape:
    """Sizes of a Llama; `vocab` tokens are plain numbers, there is no tokenizer."""

    hidden: int = 256
    n_layers: int = 2
    n_heads: int = 4
    n_kv_heads: int = 2
    head_dim: int = 64
    vocab: int = 1024
    positions_max: int = 8192

    def kv_bytes(self, n_tokens: int) -> int:
        """Bytes of K and V of that many tokens, in float32, over all layers."""
        return n_tokens * self.n_layers * 2 * self.n_kv_heads * self.head_dim * 4

    def config(self) -> dict[str, object]:
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.hidden * 3,
            "num_hidden_layers": self.n_layers,
            "num_attention_heads": self.n_heads,
            "num_key_value_heads": self.n_kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.positions_max,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "torch_dtype": "float32",
            "bos_token_id": 1,
            "eos_token_id": 2,
        }


TINY = ModelShape()
SMALL = ModelShape(hidden=512, n_layers=6, n_heads=8, n_kv_heads=4)


def _drawn(rows: int, columns: int, gain: float, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(rows, columns, generator=generator) * (gain / math.sqrt(columns))


def weights(shape: ModelShape, seed: int) -> dict[str, torch.Tensor]:
    """Names and shapes of a Hugging Face Llama, float32; linear layers are (out, in)."""
    generator = torch.Generator().manual_seed(seed)
    q_rows, kv_rows = shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim
    found = {
        "model.embed_tokens.weight": torch.randn(shape.vocab, shape.hidden, generator=generator),
        "model.norm.weight": torch.ones(shape.hidden),
        "lm_head.weight": _drawn(shape.vocab, shape.hidden, 1.5, generator),
    }
    sizes = {
        "self_attn.q_proj": (q_rows, shape.hidden, 2.0),
        "self_attn.k_proj": (kv_rows, shape.hidden, 2.0),
        "self_attn.v_proj": (kv_rows, shape.hidden, 1.0),
        "self_attn.o_proj": (shape.hidden, q_rows, 1.0),
        "mlp.gate_proj": (shape.hidden * 3, shape.hidden, 1.0),
        "mlp.up_proj": (shape.hidden * 3, shape.hidden, 1.0),
        "mlp.down_proj": (shape.hidden, shape.hidden * 3, 0.7),
    }
    for layer in range(shape.n_layers):
        prefix = f"model.layers.{layer}."
        for name, (rows, columns, gain) in sizes.items():
            found[f"{prefix}{name}.weight"] = _drawn(rows, columns, gain, generator)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[f"{prefix}{norm}.weight"] = torch.ones(shape.hidden)
    return found


def write_model(folder: Path, shape: ModelShape = TINY, *, seed: int = 0) -> Path:
    """A folder that vLLM loads with `--skip-tokenizer-init`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape.config(), indent=1), encoding="utf-8")
    save_file(weights(shape, seed), folder / "model.safetensors", metadata={"format": "pt"})
    return folder
