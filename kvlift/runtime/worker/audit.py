"""Are restored pages what a new computation gives? And does that question bite?

Runs on every rank in lock step: the recomputation is a plain forward of the sharded model.
"""

from typing import Final

import torch
from attrs import define, field

from kvlift.core.tier import Source
from kvlift.runtime.tick import Ready
from kvlift.runtime.worker.generation import Request
from kvlift.runtime.worker.model import Decoder, PagedKv

KV_DIFF_MAX: Final = 1e-3
"""Largest difference of an element in float32 that summation order explains."""

KV_DIFF_MAX_HALF: Final = 0.25
"""The same for 16-bit pages, whose last place is a thousandth of their value."""


@define(eq=False)
class Audit:
    """`is_on`: compare every restored page of each request that becomes ready.

    `damages_next`: overwrite one restored page of the next request that has one.
    """

    decoder: Decoder
    kv: PagedKv
    is_on: bool = False
    damages_next: bool = False
    n_pages_verified: int = field(default=0, init=False)
    n_pages_wrong: int = field(default=0, init=False)
    n_pages_damaged: int = field(default=0, init=False)
    diff_max: float = field(default=0.0, init=False)

    def look(self, request: Request, ready: Ready) -> None:
        """Damage what is to be damaged, then compare what came from host and storage."""
        n_first = ready.n_pages_by_source.get(Source.DEVICE, 0)
        n_restored = sum(
            ready.n_pages_by_source.get(source, 0) for source in (Source.HOST, Source.STORAGE)
        )
        if n_restored == 0:
            return
        if self.damages_next:
            self._damage(ready.device_pages[n_first])
            self.damages_next = False
        if self.is_on:
            self._compare(request, ready, n_first, n_first + n_restored)

    def _span(self, device_page: int) -> slice:
        first = device_page * self.kv.page_tokens
        return slice(first, first + self.kv.page_tokens)

    def _damage(self, device_page: int) -> None:
        for _, values in self.kv.layers:
            values[self._span(device_page)] = 3.0
        self.n_pages_damaged += 1

    def _compare(self, request: Request, ready: Ready, n_first: int, n_stop: int) -> None:
        span = self.kv.page_tokens
        _, layers = self.decoder.plain_forward(torch.tensor(request.tokens[: n_stop * span]))
        is_float32 = self.decoder.config.dtype == "float32"
        limit = KV_DIFF_MAX if is_float32 else KV_DIFF_MAX_HALF
        for page in range(n_first, n_stop):
            here = self._span(ready.device_pages[page])
            there = slice(page * span, (page + 1) * span)
            diff = max(
                float((kept[here].float() - fresh[there].float()).abs().max())
                for pair, fresh_pair in zip(self.kv.layers, layers, strict=True)
                for kept, fresh in zip(pair, fresh_pair, strict=True)
            )
            self.diff_max = max(self.diff_max, diff)
            self.n_pages_verified += 1
            self.n_pages_wrong += diff > limit
