"""Compares pages of ready requests with what prefill computed, while the play goes on.

A sample of each request's pages, restored ones and fresh ones, by their fingerprints. Pages that
decoding itself wrote are left out: prefill computes the same tokens in other batches, and rounds
differently."""

from typing import Final

import torch

from kvlift.cli.benches.ttft.machine import Machine
from kvlift.cli.benches.ttft.workload import Turn

N_SAMPLED: Final = 16


class WrongBytesError(RuntimeError):
    """A restored page is not the one that was computed."""


class Verifier:
    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._seen: list[tuple[Turn, list[int], torch.Tensor]] = []
        is_cuda = machine.memory.device.type == "cuda"
        self._stream = (
            torch.cuda.Stream(machine.memory.device) if is_cuda else None  # type: ignore[no-untyped-call]
        )

    def look(self, turn: Turn, places: tuple[int, ...], n_from_peer: int) -> None:
        """Queue the fingerprints of a sample: mostly restored pages, where there are some."""
        n_restored = len(places) - n_from_peer
        positions = self._sample(turn, 0, n_restored) + self._sample(turn, n_restored, len(places))
        chosen = [places[position] for position in positions]
        if self._stream is None:
            prints = self._machine.prints.of(self._machine.words[:, chosen])
        else:
            with torch.cuda.stream(self._stream):
                index = torch.tensor(chosen, pin_memory=True).to(
                    self._machine.memory.device, non_blocking=True
                )
                prints = self._machine.prints.of(self._machine.words.index_select(1, index))
        self._seen.append((turn, positions, prints))

    def result(self) -> int:
        """Pages compared, all equal. Raises `WrongBytesError`."""
        n_pages = 0
        for turn, positions, prints in self._seen:
            truth = self._machine.prefill.kept[turn.conversation].prints.cpu()
            for position, seen in zip(positions, prints.cpu().tolist(), strict=True):
                if int(truth[position]) != seen:
                    raise WrongBytesError(f"{turn.rid}: page {position} has other bytes")
                n_pages += 1
        return n_pages

    def _sample(self, turn: Turn, start: int, stop: int) -> list[int]:
        sizes = self._machine.sizes
        decoded: set[int] = set()
        for n_tokens in sizes.prompt_tokens[: turn.round]:
            first = n_tokens // sizes.page_tokens
            decoded.update(range(first, first + sizes.n_pages_output))
        pages = [page for page in range(start, stop) if page not in decoded]
        step = max(1, 2 * len(pages) // N_SAMPLED)
        return pages[::step]
