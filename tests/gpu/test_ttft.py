"""The kernels of the multi-turn benchmark against plain attention, on a GPU."""

import pytest
import torch

from kvlift.cli.benches.ttft.attention import (
    paged_attention,
    paged_plain,
    prefill_attention,
    prefill_attention_plain,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TOKENS, KV_HEADS, HEADS, DIM = 1024, 8, 32, 128


def fresh(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def error(seen: torch.Tensor, truth: torch.Tensor) -> float:
    return float((seen.double() - truth.double()).norm() / truth.double().norm())


@pytest.mark.parametrize("n_new", [1024, 256])
def test_a_chunk_sees_what_stands_before_it_and_not_what_follows(n_new: int) -> None:
    q, k, v = fresh(n_new, HEADS, DIM), fresh(TOKENS, KV_HEADS, DIM), fresh(TOKENS, KV_HEADS, DIM)
    truth = prefill_attention_plain(q.double(), k.double(), v.double())
    assert error(prefill_attention(q, k, v), truth) < 0.01


def test_decoding_sees_its_own_pages_and_no_other() -> None:
    n_pages = TOKENS // 64
    k, v = fresh(TOKENS, KV_HEADS, DIM), fresh(TOKENS, KV_HEADS, DIM)
    wide = torch.stack([torch.randperm(n_pages) for _ in range(4)]).int().cuda()
    table = torch.cat((torch.zeros((4, 2), dtype=torch.int32, device="cuda"), wide), 1)[:, 2:]
    lengths = torch.tensor([1, 64, 500, 1024], dtype=torch.int32, device="cuda")
    q = fresh(4, HEADS, DIM)
    seen = paged_attention(q, k, v, table, lengths, 64, 32)
    truth = paged_plain(q.double(), k.double(), v.double(), table, lengths, 64)
    assert error(seen, truth) < 0.01
