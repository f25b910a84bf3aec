"""Several conversations at once, their arrivals fixed beforehand: open loop, as in a trace.

Answers are given in advance too (decoding is told which token comes next), so every mode serves the
same tokens at the same times, however far behind it is.
"""

import os
import random

import numpy as np
from attrs import field, frozen

from kvlift.cli.benches.ttft.sizes import Sizes
from kvlift.core.keys import TOKEN_BYTES

ARRIVALS_SEED = 5


@frozen
class Turn:
    """One request. `tokens` are its prompt and `output` its answer, little-endian int32."""

    conversation: int
    round: int
    arrival_s: float
    tokens: bytes = field(repr=False)
    output: bytes = field(repr=False)

    @property
    def rid(self) -> str:
        return f"c{self.conversation}r{self.round}"

    @property
    def n_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    @property
    def n_output(self) -> int:
        return len(self.output) // TOKEN_BYTES


def fresh_tokens(sizes: Sizes) -> list[bytes]:
    """The tokens of each conversation, never the same twice."""
    source = np.random.default_rng(int.from_bytes(os.urandom(8)))
    n_tokens = sizes.prompt_tokens[-1] + sizes.n_output
    return [
        source.integers(0, sizes.vocab, n_tokens, dtype="<i4").tobytes()
        for _ in range(sizes.n_conversations)
    ]


def turns_of(
    sizes: Sizes, tokens: list[bytes], prefill_s_by_round: tuple[float, ...]
) -> tuple[Turn, ...]:
    """All requests by arrival: the conversations take turns, with exponential gaps such that
    prefill is busy for `sizes.load` of the time on average."""
    chance = random.Random(ARRIVALS_SEED)  # noqa: S311 - no secret, and the same every time
    turns = []
    now_s = 0.0
    for number, n_tokens in enumerate(sizes.prompt_tokens):
        gap_s = max(sizes.gap_min_s, prefill_s_by_round[number] / sizes.load)
        for conversation in range(sizes.n_conversations):
            end = n_tokens * TOKEN_BYTES
            end_of_output = end + sizes.n_output * TOKEN_BYTES
            whole = tokens[conversation]
            turns.append(Turn(conversation, number, now_s, whole[:end], whole[end:end_of_output]))
            now_s += chance.expovariate(1 / gap_s)
    return tuple(turns)
