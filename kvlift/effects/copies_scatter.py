"""Between a staging buffer of whole pages and the engine's per-layer tensors, on the device.

One Triton kernel with few programs, because what it takes from the decode step are processors, not
bandwidth; a torch fallback where Triton is missing. Bytes only: the dtype plays no part.
"""

import os
from typing import Final

import torch

from kvlift.effects.device_memory import LayeredMemory

try:
    import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
except ImportError:
    HAS_TRITON = False
else:
    HAS_TRITON = True

_TILE_BYTES: Final = 32 << 10

if HAS_TRITON:
    # Triton reads annotations as code, so the tensors have none.
    def _move_slices(  # type: ignore[no-untyped-def]
        ring,
        table,
        pages,
        first_slot,
        first_page,
        n_slots,
        n_pieces: tl.constexpr,
        slice_units: tl.constexpr,
        tile_units: tl.constexpr,
        is_aligned: tl.constexpr,
        to_layers: tl.constexpr,
    ) -> None:
        """Slots `[first_slot, first_slot + n_slots)` of `ring` to or from `pages[first_page:]`.

        `table[i]` is the address of piece `i`'s tensor. Units are elements of `ring`.
        """
        tile = tl.arange(0, tile_units)
        for item in range(tl.program_id(0), n_slots * n_pieces, tl.num_programs(0)):
            slot = item // n_pieces
            piece = item % n_pieces
            page = tl.load(pages + first_page + slot)
            tensor = tl.load(table + piece).to(tl.pointer_type(ring.dtype.element_ty))
            if is_aligned:
                tensor = tl.multiple_of(tensor, 16)
            staged = ring + ((first_slot + slot).to(tl.int64) * n_pieces + piece) * slice_units
            layered = tensor + page * slice_units
            if to_layers:
                source = staged
                target = layered
            else:
                source = layered
                target = staged
            for start in range(0, slice_units, tile_units):
                at = start + tile
                if slice_units % tile_units == 0:
                    tl.store(target + at, tl.load(source + at))
                else:
                    inside = at < slice_units
                    tl.store(target + at, tl.load(source + at, mask=inside), mask=inside)


class SliceMover:
    """Moves pages between a ring, uint8 `[n_slots, page_bytes]`, and the layers of `memory`.

    Runs on torch's current stream and returns at once. `n_programs` processors are used at most.
    `pages` is int64 on the device; its entries from `first_page` on belong to the slots.
    """

    def __init__(self, memory: LayeredMemory, *, n_programs: int, n_warps: int = 16) -> None:
        addresses = [piece.data_ptr() for piece in memory.slices]
        slice_bytes = memory.layout.slice_bytes
        borders = [slice_bytes, *addresses]
        self._unit = torch.int64 if all(border % 8 == 0 for border in borders) else torch.uint8
        self._is_aligned = all(border % 16 == 0 for border in borders)
        self._pieces = [piece.view(self._unit) for piece in memory.slices]
        self._table = torch.tensor(addresses, dtype=torch.int64, device=memory.device)
        self._n_programs = n_programs
        self._n_warps = n_warps
        self._slice_units = slice_bytes // self._unit.itemsize
        tile_max = _TILE_BYTES // self._unit.itemsize
        self._tile = min(tile_max, 1 << (self._slice_units - 1).bit_length())
        # Counts change with every launch; specialised on them, a launch might compile.
        self._kernel = (
            triton.jit(_move_slices, do_not_specialize=["first_slot", "first_page", "n_slots"])
            if _has_kernel(memory.device)
            else None
        )

    def scatter(
        self, ring: torch.Tensor, first_slot: int, pages: torch.Tensor, first_page: int, n: int
    ) -> None:
        """`n` staged pages into the layers."""
        if self._kernel is not None:
            self._launch(ring, first_slot, pages, first_page, n, to_layers=True)
            return
        index = pages[first_page : first_page + n]
        staged = self._staged(ring, first_slot, n)
        for i, piece in enumerate(self._pieces):
            piece.index_copy_(0, index, staged[:, i])

    def gather(
        self, ring: torch.Tensor, first_slot: int, pages: torch.Tensor, first_page: int, n: int
    ) -> None:
        """`n` pages out of the layers into the ring."""
        if self._kernel is not None:
            self._launch(ring, first_slot, pages, first_page, n, to_layers=False)
            return
        index = pages[first_page : first_page + n]
        staged = self._staged(ring, first_slot, n)
        for i, piece in enumerate(self._pieces):
            staged[:, i].copy_(piece.index_select(0, index))

    def warm_up(self, ring: torch.Tensor) -> None:
        """Compile now what a tick would otherwise compile; moves nothing."""
        if self._kernel is None:
            return
        pages = torch.zeros(1, dtype=torch.int64, device=ring.device)
        for to_layers in (True, False):
            self._launch(ring, 0, pages, 0, 0, to_layers=to_layers)

    def _staged(self, ring: torch.Tensor, first_slot: int, n: int) -> torch.Tensor:
        rows = ring[first_slot : first_slot + n].view(self._unit)
        return rows.view(n, len(self._pieces), self._slice_units)

    def _launch(
        self,
        ring: torch.Tensor,
        first_slot: int,
        pages: torch.Tensor,
        first_page: int,
        n: int,
        *,
        to_layers: bool,
    ) -> None:
        assert self._kernel is not None
        self._kernel[(self._n_programs,)](
            ring.view(self._unit),
            self._table,
            pages,
            first_slot,
            first_page,
            n,
            n_pieces=len(self._pieces),
            slice_units=self._slice_units,
            tile_units=self._tile,
            is_aligned=self._is_aligned,
            to_layers=to_layers,
            num_warps=self._n_warps,
        )


def _has_kernel(device: torch.device) -> bool:
    """On the CPU, Triton runs only where its interpreter was asked for (a test does)."""
    return HAS_TRITON and (device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1")
