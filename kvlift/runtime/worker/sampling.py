"""From logits to a token and its log-probability."""

import hashlib
from typing import Final

import torch

from kvlift.runtime.worker.generation import Sampling

SEED_BYTES: Final = 7


def sample(logits: torch.Tensor, sampling: Sampling, place: int) -> tuple[int, float]:
    """The token for position `place` from `logits` [vocab] float32, and its log-probability.

    The log-probability is the model's own, before temperature and truncation.
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    token = int(logits.argmax()) if sampling.is_greedy else _draw(logits, sampling, place)
    return token, float(logprobs[token])


def _draw(logits: torch.Tensor, sampling: Sampling, place: int) -> int:
    order = (logits / sampling.temperature).cpu().sort(descending=True, stable=True)
    shares = torch.softmax(order.values, dim=-1)
    if 0 < sampling.top_k < shares.shape[0]:
        shares[sampling.top_k :] = 0.0
    before = shares.cumsum(-1) - shares
    shares[before >= sampling.top_p * shares.sum()] = 0.0
    digest = hashlib.sha256(f"{sampling.seed}/{place}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:SEED_BYTES], "little"))
    spot = int(torch.multinomial(shares, 1, generator=generator))
    return int(order.indices[spot])
