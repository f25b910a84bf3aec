"""Pages as words on a device: one tensor over all layers, and a fingerprint of each page."""

import torch

from kvlift.effects.device_memory import LayeredMemory

FINGERPRINT_SEED = 7


def words_of_memory(memory: LayeredMemory) -> torch.Tensor:
    """Decode's pages as int64 `[n_slices, n_pages, words]`, sharing their memory.

    For memory of `LayeredMemory.allocate`, whose layers are one allocation."""
    first, slice_bytes = memory.slices[0], memory.layout.slice_bytes
    pitch = memory.n_pages * slice_bytes
    whole = torch.as_strided(
        first, (len(memory.slices), memory.n_pages, slice_bytes), (pitch, slice_bytes, 1)
    )
    assert whole[-1, -1].data_ptr() == memory.slices[-1][-1].data_ptr()
    return whole.view(torch.int64)


def words_of_kv(kv: torch.Tensor, page_tokens: int) -> torch.Tensor:
    """A conversation's KV, `[n_slices, n_tokens, heads, dim]`, in the same form."""
    n_slices, n_tokens, n_heads, dim = kv.shape
    paged = kv.view(n_slices, n_tokens // page_tokens, page_tokens * n_heads * dim)
    return paged.view(torch.int64)


class Fingerprints:
    """Of each page a 64-bit sum of all its words, each times a random odd number of its place."""

    def __init__(self, n_slices: int, n_words: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(FINGERPRINT_SEED)
        factors = torch.randint(-(2**62), 2**62, (n_slices, 1, n_words), generator=generator)
        self._factors = (factors * 2 + 1).to(device)

    def of(self, pages: torch.Tensor) -> torch.Tensor:
        """`pages` `[n_slices, n, words]`; int64 `[n]` on the same device."""
        return (pages * self._factors).sum(dim=(0, 2))
