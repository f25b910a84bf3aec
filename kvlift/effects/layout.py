"""How one page of KV cache lies in memory: its sizes, its order, and a fingerprint for peers.

A host page is page-first: `[layer][K|V][token][head][dim]`, contiguous, so that a page is one file,
one copy and one checksum. The device side is the engine's: per-layer tensors, or blocks that have
the host's order already.
"""

import hashlib
from typing import Final, Literal, TypeAlias

import torch
from attrs import field, frozen
from attrs.validators import in_

Kind: TypeAlias = Literal["mha", "mla"]

FORMAT_VERSION: Final = 1
"""Changes whenever the same fields would describe other bytes."""

DTYPES: Final[dict[str, torch.dtype]] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3fn": torch.float8_e4m3fn,
}

_FIELD_MAX: Final = 1 << 20
_PAGE_BYTES_MAX: Final = 1 << 30


@frozen(kw_only=True)
class PageLayout:
    """The shape of one page. Raises `ValueError` for sizes that no page can have.

    `mha` pages hold K and V of every layer (grouped heads included); `mla` pages hold one latent
    a layer, with `n_kv_heads` 1 and `head_dim` the latent's width.
    """

    kind: Kind = field(validator=in_(("mha", "mla")))
    n_layers: int
    n_kv_heads: int
    head_dim: int
    dtype: str = field(validator=in_(tuple(DTYPES)))
    page_tokens: int

    def __attrs_post_init__(self) -> None:
        sizes = {
            "n_layers": self.n_layers,
            "n_kv_heads": self.n_kv_heads,
            "head_dim": self.head_dim,
            "page_tokens": self.page_tokens,
        }
        for name, size in sizes.items():
            if not 1 <= size <= _FIELD_MAX:
                raise ValueError(f"{name} must be between 1 and {_FIELD_MAX}, not {size}")
        if self.page_bytes > _PAGE_BYTES_MAX:
            raise ValueError(
                f"a page of {self.page_bytes} bytes is above the limit of {_PAGE_BYTES_MAX}: "
                "use fewer tokens a page"
            )

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def n_parts(self) -> int:
        """Tensors a layer: 2 for K and V, 1 for a latent."""
        return 2 if self.kind == "mha" else 1

    @property
    def n_slices(self) -> int:
        """Contiguous pieces of a page: one for each layer and part, in this order."""
        return self.n_layers * self.n_parts

    @property
    def slice_bytes(self) -> int:
        """Bytes of one piece: `page_tokens * n_kv_heads * head_dim` elements."""
        return self.page_tokens * self.n_kv_heads * self.head_dim * self.torch_dtype.itemsize

    @property
    def page_bytes(self) -> int:
        return self.n_slices * self.slice_bytes

    def slice_offset(self, layer: int, part: int = 0) -> int:
        """Where the piece of `layer` and `part` (0: K or latent, 1: V) begins in a page, in bytes.

        Raises `IndexError` for a layer or part that the layout does not have.
        """
        if not (0 <= layer < self.n_layers and 0 <= part < self.n_parts):
            raise IndexError(
                f"layer {layer}, part {part} is outside {self.n_layers} layers of "
                f"{self.n_parts} part(s)"
            )
        return (layer * self.n_parts + part) * self.slice_bytes

    def fingerprint(self) -> str:
        """SHA-256 in hex over all fields and the format's version; peers compare it.

        The encoding is injective: every value has its length in front.
        """
        fields = (
            "kvlift page layout",
            str(FORMAT_VERSION),
            self.kind,
            str(self.n_layers),
            str(self.n_kv_heads),
            str(self.head_dim),
            self.dtype,
            str(self.page_tokens),
        )
        digest = hashlib.sha256()
        for value in fields:
            encoded = value.encode()
            digest.update(len(encoded).to_bytes(4, "big"))
            digest.update(encoded)
        return digest.hexdigest()
