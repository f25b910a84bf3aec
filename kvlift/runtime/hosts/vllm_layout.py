"""vLLM's KV tensors as kvlift's device memory: shapes and strides are read, not believed.

vLLM gives one view a layer, block first: `[n_blocks, heads, tokens, K|V]` since 0.32, or
`[n_blocks, tokens, width]` for a latent. kvlift copies whole blocks and never looks inside, so what
it needs is that a block is one piece of memory. The order of the dimensions inside is a part of the
keys: two engines that order them differently never meet.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Final

import torch
from attrs import frozen

from kvlift.effects.device_memory import LayeredMemory
from kvlift.effects.layout import DTYPES, PageLayout

_NAME_BY_DTYPE: Final = {dtype: name for name, dtype in DTYPES.items()}


class LayoutRefusedError(ValueError):
    """A KV cache that kvlift does not understand: nothing of it is touched."""


@frozen(kw_only=True)
class BlockLayout:
    """How one block of one layer lies in memory, and in how many layers.

    `order`: the dimensions behind the block's, outermost first, as letters and sizes."""

    page: PageLayout
    order: str

    def words(self) -> str:
        """What keys and peers compare."""
        return f"vllm block {self.order} {self.page.dtype} x{self.page.n_layers}"

    def fingerprint(self, model: str, shard: str) -> str:
        """SHA-256 in hex: equal on the two ends of a transfer, or it is refused."""
        said = f"{self.words()}\0{self.page.fingerprint()}\0{model}\0{shard}"
        return hashlib.sha256(said.encode()).hexdigest()


def registered(
    kv_caches: Mapping[str, torch.Tensor], page_tokens: int
) -> tuple[BlockLayout, LayeredMemory]:
    """The engine's tensors as pages of `page_tokens` tokens. Raises `LayoutRefusedError`."""
    if not kv_caches:
        raise LayoutRefusedError("vLLM registered no KV cache")
    tensors = list(kv_caches.values())
    first_name = next(iter(kv_caches))
    order = _order(first_name, tensors[0], page_tokens)
    for name, tensor in kv_caches.items():
        if tensor.dtype != tensors[0].dtype or tensor.shape != tensors[0].shape:
            raise LayoutRefusedError(
                f"{name} is {tensor.dtype} {list(tensor.shape)}, {first_name} is "
                f"{tensors[0].dtype} {list(tensors[0].shape)}: layers of different kinds are not "
                "understood"
            )
        if _order(name, tensor, page_tokens) != order:
            raise LayoutRefusedError(f"{name} lies in memory otherwise than {first_name}")
        if tensor.data_ptr() in [other.data_ptr() for other in tensors if other is not tensor]:
            raise LayoutRefusedError(f"{name} shares its memory with another layer")
    tensors = [_known_dtype(first_name, tensor) for tensor in tensors]
    n_elements = tensors[0][0].numel()
    layout = PageLayout(
        kind="mla",  # one piece a layer: K and V of a block lie together
        n_layers=len(tensors),
        n_kv_heads=1,
        head_dim=n_elements // page_tokens,
        dtype=_NAME_BY_DTYPE[tensors[0].dtype],
        page_tokens=page_tokens,
    )
    blocks = [_as_blocks(tensor, layout) for tensor in tensors]
    return BlockLayout(page=layout, order=order), LayeredMemory(layout, blocks)


def _order(name: str, tensor: torch.Tensor, page_tokens: int) -> str:
    """The block's dimensions from the outermost in. Raises `LayoutRefusedError`."""
    shape, strides = tuple(tensor.shape), tensor.stride()
    said = f"{name} is {list(shape)} with strides {list(strides)}"
    if len(shape) not in (3, 4):
        raise LayoutRefusedError(
            f"{said}: blocks of [heads, tokens, width] or [tokens, width] are understood"
        )
    letters = "HNC" if len(shape) == 4 else "NC"
    n_tokens = shape[-2]
    if n_tokens != page_tokens:
        raise LayoutRefusedError(f"{said}: {page_tokens} tokens a block were expected there")
    inner = sorted(range(1, len(shape)), key=lambda dim: (-strides[dim], dim))
    expected = 1
    for dim in reversed(inner):
        if shape[dim] != 1 and strides[dim] != expected:
            raise LayoutRefusedError(f"{said}: a block is not one piece of memory")
        expected *= shape[dim]
    if shape[0] > 1 and strides[0] != expected:
        raise LayoutRefusedError(f"{said}: the blocks of a layer do not lie side by side")
    return "".join(f"{letters[dim - 1]}{shape[dim]}" for dim in inner)


def _known_dtype(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Quantised caches, which vLLM keeps as uint8, are copied byte by byte like all others."""
    if tensor.dtype is torch.uint8:
        return tensor.view(torch.float8_e4m3fn)
    if tensor.dtype not in _NAME_BY_DTYPE:
        raise LayoutRefusedError(f"{name} is {tensor.dtype}; known are {', '.join(DTYPES)}")
    return tensor


def _as_blocks(tensor: torch.Tensor, layout: PageLayout) -> torch.Tensor:
    """The same memory as `[n_blocks, page_tokens, 1, width]`, contiguous."""
    width = layout.head_dim
    shape: Sequence[int] = (tensor.shape[0], layout.page_tokens, 1, width)
    strides = (layout.page_tokens * width, width, width, 1)
    return tensor.as_strided(tuple(shape), strides)
