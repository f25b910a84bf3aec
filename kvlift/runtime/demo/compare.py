"""Are the answers those of a plain forward, and the same in every mode?

The plain forward runs in this process, without any cache, over each whole sequence: the answer's
tokens are given (teacher-forced), so that a difference in one place is not hidden by later ones.
"""

from collections.abc import Callable, Sequence
from typing import Final

import torch
from attrs import define, field, frozen

from kvlift.runtime.demo.play import ModeRun, Played
from kvlift.runtime.worker.model import Decoder

LOGPROB_DIFF_MAX: Final = 1e-4
DIFFERENCES_TOLD: Final = 5


@frozen
class Plain:
    """What a plain forward says about each token of an answer: the best one in its place, and the
    natural logarithm of the given one's probability."""

    best: tuple[int, ...]
    logprobs: tuple[float, ...]


@define
class Comparison:
    """`differences` are sentences, the first few of `n_differences`."""

    logprob_diff_max: float = 0.0
    n_compared: int = 0
    n_differences: int = 0
    differences: list[str] = field(factory=list)

    @property
    def tokens_identical(self) -> bool:
        return self.n_differences == 0 and self.n_compared > 0

    def differ(self, sentence: str) -> None:
        self.n_differences += 1
        if len(self.differences) < DIFFERENCES_TOLD:
            self.differences.append(sentence)


def plain_of(decoder: Decoder, prompt: Sequence[int], answer: Sequence[int]) -> Plain:
    ids = torch.tensor([*prompt, *answer[:-1]])
    logits, _ = decoder.plain_forward(ids)
    rows = logits[len(prompt) - 1 :].cpu()
    given = torch.tensor(list(answer))
    logprobs = torch.log_softmax(rows, dim=-1).gather(1, given[:, None])[:, 0]
    return Plain(tuple(rows.argmax(-1).tolist()), tuple(logprobs.tolist()))


def compare(
    runs: Sequence[ModeRun], decoder: Decoder, on_sequence: Callable[[], None]
) -> Comparison:
    """Every answered request of every mode. `on_sequence` is called after each request."""
    found = Comparison()
    known: dict[tuple[tuple[int, ...], tuple[int, ...]], Plain] = {}
    first: dict[str, tuple[str, Played]] = {}
    for run in runs:
        for one in run.played:
            on_sequence()
            if not one.answer:
                continue
            key = (one.prompt, one.answer)
            if key not in known:
                known[key] = plain_of(decoder, one.prompt, one.answer)
            _with_plain(found, run.mode, one, known[key])
            mode, other = first.setdefault(one.turn.name, (run.mode, one))
            if (other.prompt, other.answer) != key:
                found.differ(f"{one.turn.name} differs between the modes {mode} and {run.mode}")
    return found


def _with_plain(found: Comparison, mode: str, one: Played, plain: Plain) -> None:
    found.n_compared += 1
    for given, wanted in zip(one.logprobs, plain.logprobs, strict=True):
        diff = abs(given - wanted)
        # Not a number compares with nothing; it must not pass for small.
        found.logprob_diff_max = max(found.logprob_diff_max, diff if diff == diff else float("inf"))
    if one.answer != plain.best:
        pairs = enumerate(zip(one.answer, plain.best, strict=True), 1)
        place = next(place for place, (given, best) in pairs if given != best)
        found.differ(f"mode {mode}, {one.turn.name}: token {place} is not the plain forward's")
