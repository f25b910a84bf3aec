"""Are restored pages what a new computation gives? And does that question bite?

Restored pages are copied aside when a request becomes ready and compared later, when the host asks
for statistics, so that the comparison costs the request no time. Runs on every rank in lock step:
the recomputation is a plain forward of the sharded model.
"""

from typing import Final

import torch
from attrs import define, field, frozen

from kvlift.core.tier import Source
from kvlift.runtime.tick import Ready
from kvlift.runtime.worker.generation import Request
from kvlift.runtime.worker.model import Decoder, LayerKv, PagedKv

KV_DIFF_MAX: Final = 1e-4
"""Largest difference of an element in float32 that summation order explains."""

KV_DIFF_MAX_HALF: Final = 0.25
"""The same for 16-bit pages, whose last place is a thousandth of their value."""


PENDING_BYTES_MAX: Final = 256 << 20
"""Copies that may wait for their comparison; more, and they are compared at once."""


@frozen(eq=False)
class Restored:
    """The KV of tokens [start, stop) as it was on the device, and the tokens up to there."""

    tokens: tuple[int, ...]
    start: int
    layers: tuple[LayerKv, ...]

    @property
    def size_bytes(self) -> int:
        return sum(values.nbytes for pair in self.layers for values in pair)


@define(eq=False)
class Audit:
    """`is_on`: compare every restored page of each request that becomes ready.

    `damages_next`: overwrite one restored page of the next request that has one, on the last rank.
    """

    decoder: Decoder
    kv: PagedKv
    is_on: bool = False
    damages_next: bool = False
    n_pages_verified: int = field(default=0, init=False)
    n_pages_wrong: int = field(default=0, init=False)
    n_pages_damaged: int = field(default=0, init=False)
    diff_max: float = field(default=0.0, init=False)
    _pending: list[Restored] = field(factory=list, init=False)

    def look(self, request: Request, ready: Ready) -> None:
        """Damage what is to be damaged, then set aside what came from host and storage."""
        n_first = ready.n_pages_by_source.get(Source.DEVICE, 0)
        n_restored = sum(
            ready.n_pages_by_source.get(source, 0) for source in (Source.HOST, Source.STORAGE)
        )
        if n_restored == 0:
            return
        if self.damages_next:
            self.damages_next = False
            if self.decoder.shard.rank == self.decoder.shard.n_ranks - 1:
                self._damage(ready.device_pages[n_first])
        if self.is_on:
            self._set_aside(request, ready.device_pages, n_first, n_first + n_restored)

    def compare_pending(self) -> None:
        """Recompute everything that was set aside. Call it on all ranks or on none."""
        pending, self._pending = self._pending, []
        for restored in pending:
            self._compare(restored)

    def _span(self, device_page: int) -> slice:
        first = device_page * self.kv.page_tokens
        return slice(first, first + self.kv.page_tokens)

    def _damage(self, device_page: int) -> None:
        for _, values in self.kv.layers:
            values[self._span(device_page)] = 3.0
        self.n_pages_damaged += 1

    def _set_aside(
        self, request: Request, device_pages: tuple[int, ...], n_first: int, n_stop: int
    ) -> None:
        span = self.kv.page_tokens
        places = torch.tensor(device_pages[n_first:n_stop], device=self.decoder.device)
        slots = (places[:, None] * span + torch.arange(span, device=places.device)).flatten()
        layers = tuple((k[slots], v[slots]) for k, v in self.kv.layers)
        tokens = request.tokens[: n_stop * span]
        self._pending.append(Restored(tokens, n_first * span, layers))
        if sum(each.size_bytes for each in self._pending) > PENDING_BYTES_MAX:
            self.compare_pending()

    def _compare(self, restored: Restored) -> None:
        _, fresh_layers = self.decoder.plain_forward(torch.tensor(restored.tokens))
        diffs = [
            (kept.float() - fresh[restored.start :].float())
            .abs()
            .reshape(-1, self.kv.page_tokens * fresh.shape[1] * fresh.shape[2])
            .amax(dim=1)
            for pair, fresh_pair in zip(restored.layers, fresh_layers, strict=True)
            for kept, fresh in zip(pair, fresh_pair, strict=True)
        ]
        of_pages = torch.stack(diffs).amax(dim=0)
        is_float32 = self.decoder.config.dtype == "float32"
        limit = KV_DIFF_MAX if is_float32 else KV_DIFF_MAX_HALF
        self.diff_max = max(self.diff_max, float(of_pages.max()))
        self.n_pages_verified += len(of_pages)
        self.n_pages_wrong += int((~(of_pages <= limit)).sum())
