"""Carries pages from prefill's memory to decode's, through buffers on both devices."""

from collections.abc import Sequence

import torch

N_BUFFERS = 2


class Stage:
    """`target`: decode's pages as `pages.words_of_memory` gives them. One thread uses it."""

    def __init__(self, source: torch.device, target: torch.Tensor, n_pages: int) -> None:
        n_slices, _, n_words = target.shape
        self.n_pages = n_pages
        self.page_bytes = n_slices * n_words * 8
        self._target = target
        self._source_device = source
        shape = (n_slices, n_pages, n_words)
        self._at_source = [self._buffer(shape, source) for _ in range(N_BUFFERS)]
        self._at_target = [self._buffer(shape, target.device) for _ in range(N_BUFFERS)]
        self._next = 0
        self._streams: list[torch.cuda.Stream] = []
        if target.device.type == "cuda":
            for device in (source, target.device):
                self._streams.append(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]

    def carry(
        self, source: torch.Tensor, first: int, places: Sequence[int]
    ) -> torch.cuda.Event | None:
        """Pages `first`, `first + 1`, ... of `source` to `places`. At most `N_BUFFERS` at a time;
        the event passes when the bytes are there (None: they are)."""
        n_pages = len(places)
        buffer, self._next = self._next, (self._next + 1) % N_BUFFERS
        if not self._streams:
            self._target[:, list(places)] = source[:, first : first + n_pages]
            return None
        at_source, at_target = self._streams
        index = torch.tensor(places, dtype=torch.int64, pin_memory=True)
        leaving = self._at_source[buffer].view(-1)[: self._n_words(n_pages)]
        leaving = leaving.view(len(source), n_pages, -1)
        arriving = self._at_target[buffer].view(-1)[: self._n_words(n_pages)].view(leaving.shape)
        with torch.cuda.stream(at_source), torch.cuda.stream(at_target):
            with torch.cuda.device(self._source_device):
                leaving.copy_(source[:, first : first + n_pages])
            arriving.copy_(leaving, non_blocking=True)
            on_device = index.to(self._target.device, non_blocking=True)
            self._target.index_copy_(1, on_device, arriving)
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            event.record(at_target)
        return event

    def _n_words(self, n_pages: int) -> int:
        return n_pages * self.page_bytes // 8

    def _buffer(self, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int64, device=device)
