"""Attention over a contiguous prefix (prefill) and over pages (decode), on a GPU or without one."""

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it

from kvlift.cli.benches.ttft.paged_kernel import HAS_TRITON, paged_on_gpu


def prefill_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal: `q` `[n, heads, dim]` are the last of the tokens of `k`, `v` `[m, kv_heads, dim]`.

    On CUDA torch's flash attention, whose causal mask ends at the last key."""
    if q.is_cuda:
        is_causal, returns_mask = True, False
        seen, *_ = torch.ops.aten._flash_attention_forward(
            q[None], k[None], v[None], None, None, len(q), len(k), 0.0, is_causal, returns_mask
        )
        return torch.as_tensor(seen)[0]
    return prefill_attention_plain(q, k, v)


def prefill_attention_plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The same with an explicit mask."""
    n_new, n_all = len(q), len(k)
    allowed = torch.ones((n_new, n_all), dtype=torch.bool, device=q.device)
    allowed = allowed.tril(n_all - n_new)
    query, key, value = (each.transpose(0, 1)[None] for each in (q, k, v))
    seen = F.scaled_dot_product_attention(query, key, value, attn_mask=allowed, enable_gqa=True)
    return seen[0].transpose(0, 1)


def paged_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    page_tokens: int,
    n_splits: int,
) -> torch.Tensor:
    """One query a row: `q` `[rows, heads, dim]` over `k`, `v` `[n_tokens, kv_heads, dim]` at the
    pages of `table`, int32 `[rows, n_pages]`, of which the first `lengths` tokens count."""
    if q.is_cuda and HAS_TRITON:
        return paged_on_gpu(q, k, v, table, lengths, page_tokens, n_splits)
    return paged_plain(q, k, v, table, lengths, page_tokens)


def paged_plain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    page_tokens: int,
) -> torch.Tensor:
    """The same row by row; it reads `lengths` on the host."""
    seen = torch.empty_like(q)
    inside = torch.arange(page_tokens, device=q.device)
    for row, length in enumerate(lengths.tolist()):
        n_pages = -(-length // page_tokens)
        places = (table[row, :n_pages, None] * page_tokens + inside).flatten()[:length]
        parts = (q[row : row + 1], k[places], v[places])
        query, key, value = (each.transpose(0, 1)[None] for each in parts)
        one = F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
        seen[row] = one[0, :, 0]
    return seen
