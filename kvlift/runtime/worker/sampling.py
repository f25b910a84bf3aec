"""From logits to a token and its log-probability."""

import hashlib
from collections.abc import Sequence
from typing import Final

import torch

from kvlift.runtime.worker.generation import Sampling

SEED_BYTES: Final = 7
NOT_DRAWN: Final = -1


def sample(logits: torch.Tensor, sampling: Sampling, place: int) -> tuple[int, float]:
    """The token for position `place` from `logits` [vocab] float32, and its log-probability."""
    return sample_rows(logits[None], [(sampling, place)])[0]


def sample_rows(
    logits: torch.Tensor, asked: Sequence[tuple[Sampling, int]]
) -> list[tuple[int, float]]:
    """A token and its log-probability for each row of `logits` [rows, vocab] float32.

    `asked`: how the row is sampled, and its place. The log-probability is the model's own, before
    temperature and truncation. Waits for the device once, and once more where a row is drawn.
    """
    tokens = logits.argmax(dim=-1)
    if not all(sampling.is_greedy for sampling, _place in asked):
        on_host = logits.cpu()
        drawn = [
            NOT_DRAWN if sampling.is_greedy else _draw(on_host[row], sampling, place)
            for row, (sampling, place) in enumerate(asked)
        ]
        chosen = torch.tensor(drawn, device=logits.device)
        tokens = torch.where(chosen == NOT_DRAWN, tokens, chosen)
    logprobs = torch.log_softmax(logits, dim=-1).gather(1, tokens[:, None])[:, 0]
    both = torch.stack((tokens.double(), logprobs.double()), dim=1)  # exact, and one transfer
    return [(int(token), logprob) for token, logprob in both.tolist()]


def _draw(logits: torch.Tensor, sampling: Sampling, place: int) -> int:
    order = (logits / sampling.temperature).sort(descending=True, stable=True)
    shares = torch.softmax(order.values, dim=-1)
    if not bool(torch.isfinite(shares).all()):
        return int(logits.argmax())  # the model gave no numbers: nothing to draw from
    if 0 < sampling.top_k < shares.shape[0]:
        shares[sampling.top_k :] = 0.0
    # The likeliest stays, however small `top_p` is: nothing can be drawn from nothing.
    before = shares.cumsum(-1) - shares
    before[0] = -1.0
    shares[before >= sampling.top_p * shares.sum()] = 0.0
    digest = hashlib.sha256(f"{sampling.seed}/{place}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:SEED_BYTES], "little"))
    spot = int(torch.multinomial(shares, 1, generator=generator))
    return int(order.indices[spot])
