"""The shape of a Llama- or Qwen-style decoder, read from a Hugging Face `config.json` or made."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from attrs import field, frozen
from attrs.validators import ge, gt, in_, le

DTYPES: Final = ("float32", "bfloat16", "float16")
ARCHITECTURES: Final[Mapping[str, str]] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
CONFIG_BYTES_MAX: Final = 1 << 20
TINY_VOCAB: Final = 1024
TINY_EOS: Final = 257


class ModelRefusedError(ValueError):
    """This model cannot be served; the message says why and what could be."""


@frozen(kw_only=True)
class RopeScaling:
    """How positions are stretched: `llama3` of Llama 3.1, or `linear`; lengths in tokens."""

    kind: str = field(validator=in_(("linear", "llama3")))
    factor: float = field(validator=gt(0.0))
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


@frozen(kw_only=True)
class ModelConfig:
    """Everything that decides the shapes and the arithmetic of the decoder. Sizes are elements."""

    name: str = "tiny"
    hidden: int = field(default=128, validator=[ge(1), le(1 << 17)])
    intermediate: int = field(default=256, validator=[ge(1), le(1 << 20)])
    n_layers: int = field(default=4, validator=[ge(1), le(1024)])
    n_heads: int = field(default=4, validator=[ge(1), le(1024)])
    n_kv_heads: int = field(default=2, validator=[ge(1), le(1024)])
    head_dim: int = field(default=32, validator=[ge(2), le(1024)])
    vocab: int = field(default=TINY_VOCAB, validator=[ge(2), le(1 << 24)])
    rope_theta: float = field(default=10_000.0, validator=gt(0.0))
    rope_scaling: RopeScaling | None = None
    rms_eps: float = 1e-6
    qkv_bias: bool = False
    qk_norm: bool = False
    tied_embeddings: bool = False
    positions_max: int = field(default=1 << 17, validator=[ge(1), le(1 << 24)])
    dtype: str = field(default="float32", validator=in_(DTYPES))
    eos_tokens: tuple[int, ...] = (TINY_EOS,)

    def __attrs_post_init__(self) -> None:
        if self.n_heads % self.n_kv_heads:
            raise ModelRefusedError(
                f"{self.n_heads} heads cannot share {self.n_kv_heads} KV heads evenly"
            )
        if self.head_dim % 2:
            raise ModelRefusedError(
                f"head_dim must be even for rotary positions, it is {self.head_dim}"
            )

    def fits_ranks(self, n_ranks: int) -> None:
        """Raise `ModelRefusedError` where the heads cannot be dealt to `n_ranks` ranks evenly."""
        for what, size in (
            ("heads", self.n_heads),
            ("KV heads", self.n_kv_heads),
            ("MLP columns", self.intermediate),
        ):
            if size % n_ranks:
                raise ModelRefusedError(
                    f"model {self.name} has {size} {what}, which {n_ranks} ranks cannot share "
                    "evenly; choose a number of ranks that divides it"
                )


def tiny() -> ModelConfig:
    """A model of 1 M parameters that computes in milliseconds on one core, in float32."""
    return ModelConfig()


def config_from_folder(folder: Path) -> ModelConfig:
    """Read `config.json`. Raises `ModelRefusedError` for what cannot be computed exactly here."""
    path = folder / "config.json"
    try:
        if path.stat().st_size > CONFIG_BYTES_MAX:
            raise ModelRefusedError(
                f"{path} is larger than {CONFIG_BYTES_MAX} bytes; is it the right file?"
            )
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelRefusedError(
            f"no model in {folder}: config.json cannot be read ({error.strerror}); "
            "give a Hugging Face folder or `tiny`"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ModelRefusedError(f"{path} is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ModelRefusedError(f"{path} must hold a JSON object")
    try:
        return config_from_mapping(raw, name=folder.resolve().name)
    except (KeyError, TypeError) as error:
        raise ModelRefusedError(f"{path} lacks or misspells the field {error}") from error


def config_from_mapping(raw: Mapping[str, object], *, name: str) -> ModelConfig:
    """The same from the parsed JSON. Raises `ModelRefusedError`, `KeyError`, `TypeError`."""
    style = _style(raw)
    n_heads = _whole(raw, "num_attention_heads")
    hidden = _whole(raw, "hidden_size")
    rope = _rope_parameters(raw)
    try:
        return ModelConfig(
            name=name,
            hidden=hidden,
            intermediate=_whole(raw, "intermediate_size"),
            n_layers=_whole(raw, "num_hidden_layers"),
            n_heads=n_heads,
            n_kv_heads=_whole(raw, "num_key_value_heads", n_heads),
            head_dim=_whole(raw, "head_dim", hidden // max(n_heads, 1)),
            vocab=_whole(raw, "vocab_size"),
            rope_theta=_number(rope, "rope_theta", _number(raw, "rope_theta", 10_000.0)),
            rope_scaling=_rope_scaling(rope),
            rms_eps=_number(raw, "rms_norm_eps", 1e-6),
            qkv_bias=style == "qwen2" or bool(raw.get("attention_bias", False)),
            qk_norm=style == "qwen3",
            tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
            positions_max=_whole(raw, "max_position_embeddings", 1 << 17),
            dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
            eos_tokens=_eos_tokens(raw.get("eos_token_id")),
        )
    except ModelRefusedError:
        raise
    except ValueError as error:
        raise ModelRefusedError(f"the config of {name} is out of bounds: {error}") from error


def _style(raw: Mapping[str, object]) -> str:
    architectures = raw.get("architectures")
    named = architectures[0] if isinstance(architectures, list) and architectures else None
    style = ARCHITECTURES.get(str(named))
    if style is None:
        known = ", ".join(ARCHITECTURES)
        raise ModelRefusedError(f"the architecture {named} is not served here; these are: {known}")
    if raw.get("quantization_config"):
        raise ModelRefusedError("quantised weights are not served here; give plain safetensors")
    window = raw.get("sliding_window")
    if window and raw.get("use_sliding_window", named == "MistralForCausalLM"):
        raise ModelRefusedError(
            "sliding-window attention is not served here; give a full-attention model"
        )
    if raw.get("hidden_act", "silu") != "silu":
        raise ModelRefusedError(
            f"the activation {raw.get('hidden_act')} is not served here, only silu"
        )
    if style == "llama" and raw.get("mlp_bias"):
        raise ModelRefusedError("mlp_bias is not served here; give a model without it")
    return style


def _rope_parameters(raw: Mapping[str, object]) -> Mapping[str, object]:
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ModelRefusedError("rope_scaling must be a JSON object")
    return rope


def _rope_scaling(rope: Mapping[str, object]) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind not in ("linear", "llama3"):
        raise ModelRefusedError(f"rope scaling {kind} is not served here; linear and llama3 are")
    return RopeScaling(
        kind=str(kind),
        factor=_number(rope, "factor", 1.0),
        low_freq_factor=_number(rope, "low_freq_factor", 1.0),
        high_freq_factor=_number(rope, "high_freq_factor", 4.0),
        original_max_positions=_whole(rope, "original_max_position_embeddings", 8192),
    )


def _eos_tokens(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    if isinstance(value, int):
        return (value,)
    if isinstance(value, list) and all(isinstance(token, int) for token in value):
        return tuple(value)
    raise ModelRefusedError("eos_token_id must be a number or a list of numbers")


def _whole(raw: Mapping[str, object], key: str, default: int | None = None) -> int:
    value = raw.get(key)
    if value is None:
        if default is None:
            raise KeyError(key)
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(key)
    return value


def _number(raw: Mapping[str, object], key: str, default: float) -> float:
    value = raw.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(key)
    return float(value)
