"""The engine's KV memory, page-wise. It belongs to the engine; kvlift only registers it.

`LayeredMemory` is for engines with a K and a V tensor (or one latent) a layer, `BlockMemory` for
engines whose pages are contiguous. Both implement `ports.DeviceMemory` and serve the copies.
"""

import contextlib
import itertools
import threading
from collections.abc import Iterator, Sequence
from typing import Final, TypeAlias

import torch
from attrs import frozen

from kvlift.effects.layout import PageLayout

_PITCH_MAX: Final = (1 << 31) - 1


@frozen
class RowGroup:
    """Pieces of a page whose tensors lie at equal distances, so that one 2D copy moves them.

    Row `i` is `host_offset + i * host_pitch` in the page, and for device page `p`
    `address + i * device_pitch + p * width`. All in bytes.
    """

    host_offset: int
    host_pitch: int
    address: int
    device_pitch: int
    n_rows: int
    width: int


class LayeredMemory:
    """One tensor for each layer and part, tokens first: the usual paged KV cache.

    `k_layers` and `v_layers` (`mla`: `k_layers` are the latents, `v_layers` is None) hold one
    contiguous tensor a layer, `[n_tokens, n_kv_heads, head_dim]` or
    `[n_pages, page_tokens, n_kv_heads, head_dim]`, all on one device and of one size. Tokens beyond
    the last whole page are left alone. Raises `ValueError`, naming the tensor that does not fit.

    Different pages may be written and read from different threads at the same time.
    """

    def __init__(
        self,
        layout: PageLayout,
        k_layers: Sequence[torch.Tensor],
        v_layers: Sequence[torch.Tensor] | None = None,
    ) -> None:
        has_v = v_layers is not None
        if has_v != (layout.n_parts == 2):
            raise ValueError(f"a {layout.kind} layout takes {layout.n_parts} tensor(s) a layer")
        parts = [k_layers] if v_layers is None else [k_layers, v_layers]
        for name, tensors in zip(("k_layers", "v_layers"), parts, strict=False):
            if len(tensors) != layout.n_layers:
                raise ValueError(f"{len(tensors)} {name} for {layout.n_layers} layers")
            for layer, tensor in enumerate(tensors):
                _check_tensor(f"{name}[{layer}]", tensor, layout, k_layers[0])
        self.layout = layout
        self.device = k_layers[0].device
        n_tokens = k_layers[0].numel() // (layout.n_kv_heads * layout.head_dim)
        self._n_pages = n_tokens // layout.page_tokens
        if self._n_pages < 1:
            raise ValueError(f"{n_tokens} tokens are less than one page of {layout.page_tokens}")
        self.k_layers = tuple(k_layers)
        self.v_layers = None if v_layers is None else tuple(v_layers)
        self.slices = tuple(
            _page_rows(parts[part][layer], self._n_pages, layout.slice_bytes)
            for layer in range(layout.n_layers)
            for part in range(layout.n_parts)
        )
        """Every tensor as uint8 `[n_pages, slice_bytes]`, in the order of a host page."""
        self._through = _Bounce(self.device, layout.page_bytes)

    @classmethod
    def allocate(
        cls, layout: PageLayout, n_pages: int, device: torch.device | str = "cpu"
    ) -> "LayeredMemory":
        """Fresh zeroed tensors, for engines that let kvlift allocate, and for tests.

        All layers are one allocation, so that they lie at equal distances.
        """
        n_tokens = n_pages * layout.page_tokens
        shape = (layout.n_slices, n_tokens, layout.n_kv_heads, layout.head_dim)
        size_bytes = n_pages * layout.page_bytes
        base = torch.zeros(size_bytes, dtype=torch.uint8, device=device)
        tensors = list(base.view(layout.torch_dtype).view(shape).unbind(0))
        if layout.n_parts == 1:
            return cls(layout, tensors)
        return cls(layout, tensors[0::2], tensors[1::2])

    @property
    def page_bytes(self) -> int:
        return self.layout.page_bytes

    @property
    def n_pages(self) -> int:
        return self._n_pages

    def write_page(self, device_page: int, data: memoryview) -> None:
        """Blocking: the page's bytes are in place when it returns."""
        _check_page(device_page, self._n_pages, len(data), self.page_bytes)
        rows = [piece[device_page] for piece in self.slices]
        with self._through.incoming(data) as page:
            torch._foreach_copy_(rows, list(page.view(len(rows), -1).unbind(0)))

    def read_page(self, device_page: int, into: memoryview) -> None:
        """Blocking; the reverse."""
        _check_page(device_page, self._n_pages, len(into), self.page_bytes)
        rows = [piece[device_page] for piece in self.slices]
        with self._through.outgoing(into) as page:
            torch._foreach_copy_(list(page.view(len(rows), -1).unbind(0)), rows)

    def row_groups(self) -> tuple[RowGroup, ...] | None:
        """The fewest 2D copies that move one page, or None where the tensors lie unevenly."""
        addresses = [piece.data_ptr() for piece in self.slices]
        n_parts, width = self.layout.n_parts, self.layout.slice_bytes
        pitch = _pitch(addresses, width)
        if pitch is not None:
            return (RowGroup(0, width, addresses[0], pitch, len(addresses), width),)
        groups = []
        for part in range(n_parts):
            of_part = addresses[part::n_parts]
            pitch = _pitch(of_part, width)
            if pitch is None:
                return None
            groups.append(
                RowGroup(part * width, n_parts * width, of_part[0], pitch, len(of_part), width)
            )
        return tuple(groups)


class BlockMemory:
    """Pages that are contiguous on the device: uint8 `[n_pages, page_bytes]`, host-page order.

    Raises `ValueError` for another shape or dtype.
    """

    def __init__(self, blocks: torch.Tensor) -> None:
        if blocks.dtype != torch.uint8 or blocks.dim() != 2 or not blocks.is_contiguous():
            raise ValueError(
                "blocks must be one contiguous uint8 tensor [n_pages, page_bytes], not "
                f"{blocks.dtype} {list(blocks.shape)}; view(torch.uint8) gives bytes"
            )
        self.blocks = blocks
        self.device = blocks.device
        self._through = _Bounce(self.device, self.page_bytes)

    @property
    def page_bytes(self) -> int:
        return int(self.blocks.shape[1])

    @property
    def n_pages(self) -> int:
        return int(self.blocks.shape[0])

    def write_page(self, device_page: int, data: memoryview) -> None:
        """Blocking: the page's bytes are in place when it returns."""
        _check_page(device_page, self.n_pages, len(data), self.page_bytes)
        with self._through.incoming(data) as page:
            self.blocks[device_page].copy_(page)

    def read_page(self, device_page: int, into: memoryview) -> None:
        """Blocking; the reverse."""
        _check_page(device_page, self.n_pages, len(into), self.page_bytes)
        with self._through.outgoing(into) as page:
            page.copy_(self.blocks[device_page])


PagedMemory: TypeAlias = LayeredMemory | BlockMemory


class _Bounce:
    """Carries one page between any host memory and the device, blocking, thread by thread.

    On the CPU there is nothing to carry. On CUDA every calling thread has its own stream, pinned
    page and device page, so that threads with different pages never wait for each other.
    """

    def __init__(self, device: torch.device, page_bytes: int) -> None:
        self._device = device
        self._page_bytes = page_bytes
        self._lanes = threading.local()

    @contextlib.contextmanager
    def incoming(self, data: memoryview) -> Iterator[torch.Tensor]:
        """The bytes of `data` on the device; on leaving, what read them has finished."""
        # torch takes writable buffers only; what a socket received is writable already.
        source = torch.frombuffer(bytearray(data) if data.readonly else data, dtype=torch.uint8)
        lane = self._lane()
        if lane is None:
            yield source
            return
        with torch.cuda.stream(lane.stream):
            lane.pinned.copy_(source)
            lane.on_device.copy_(lane.pinned, non_blocking=True)
            try:
                yield lane.on_device
            finally:
                lane.stream.synchronize()

    @contextlib.contextmanager
    def outgoing(self, into: memoryview) -> Iterator[torch.Tensor]:
        """A page on the device to fill; on leaving, its bytes are in `into`."""
        target = torch.frombuffer(into, dtype=torch.uint8)
        lane = self._lane()
        if lane is None:
            yield target
            return
        with torch.cuda.stream(lane.stream):
            yield lane.on_device
            lane.pinned.copy_(lane.on_device, non_blocking=True)
            lane.stream.synchronize()
        target.copy_(lane.pinned)

    def _lane(self) -> "_Lane | None":
        if self._device.type != "cuda":
            return None
        lane: _Lane | None = getattr(self._lanes, "lane", None)
        if lane is None:
            with torch.cuda.device(self._device):
                lane = _Lane(
                    torch.cuda.Stream(self._device),  # type: ignore[no-untyped-call]
                    torch.empty(self._page_bytes, dtype=torch.uint8, pin_memory=True),
                    torch.empty(self._page_bytes, dtype=torch.uint8, device=self._device),
                )
                # The fresh device page may come from memory that another stream still uses.
                torch.cuda.synchronize(self._device)
            self._lanes.lane = lane
        return lane


@frozen
class _Lane:
    stream: torch.cuda.Stream
    pinned: torch.Tensor
    on_device: torch.Tensor


def _check_page(device_page: int, n_pages: int, size_bytes: int, page_bytes: int) -> None:
    if not 0 <= device_page < n_pages:
        raise IndexError(f"device page {device_page} is outside {n_pages} pages")
    if size_bytes != page_bytes:
        raise ValueError(f"a page has {page_bytes} bytes, not {size_bytes}")


def _check_tensor(name: str, tensor: torch.Tensor, layout: PageLayout, first: torch.Tensor) -> None:
    heads = (layout.n_kv_heads, layout.head_dim)
    if tensor.dtype != layout.torch_dtype:
        raise ValueError(f"{name} is {tensor.dtype}, the layout says {layout.dtype}")
    shape = tuple(tensor.shape)
    is_paged = len(shape) == 4 and shape[1:] == (layout.page_tokens, *heads)
    is_flat = len(shape) == 3 and shape[1:] == heads
    if not (is_paged or is_flat):
        raise ValueError(
            f"{name} has shape {list(shape)}; it must be [n_tokens, {heads[0]}, {heads[1]}] or "
            f"[n_pages, {layout.page_tokens}, {heads[0]}, {heads[1]}]"
        )
    if not tensor.is_contiguous():
        raise ValueError(f"{name} is not contiguous: register the tensor that owns the memory")
    if shape != tuple(first.shape) or tensor.device != first.device:
        raise ValueError(f"{name} differs from k_layers[0] in shape or device")


def _page_rows(tensor: torch.Tensor, n_pages: int, slice_bytes: int) -> torch.Tensor:
    """A layer's tensor as uint8 `[n_pages, slice_bytes]`, sharing its memory."""
    whole = tensor.view(torch.uint8).view(-1)
    return whole[: n_pages * slice_bytes].view(n_pages, slice_bytes)


def _pitch(addresses: Sequence[int], width: int) -> int | None:
    """The distance between neighbours, if it is the same for all and a 2D copy can use it."""
    if len(addresses) == 1:
        return width
    pitch = addresses[1] - addresses[0]
    steps = {after - before for before, after in itertools.pairwise(addresses)}
    return pitch if len(steps) == 1 and width <= pitch <= _PITCH_MAX else None
