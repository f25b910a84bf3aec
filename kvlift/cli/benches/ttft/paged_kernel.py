"""Decode attention over pages as two Triton kernels: each context in splits, then their sum.

No host synchronisation, and launches that do not depend on lengths, so that a CUDA graph can hold
them. Splitting a context over processors is flash-decoding's idea (Dao et al., 2023).
"""

import functools
from typing import Any

import torch

try:
    import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
except ImportError:
    HAS_TRITON = False
else:
    HAS_TRITON = True

ROWS_OF_A_TILE = 16
"""The smallest tile of the matrix units; a group of query heads fills a part of it."""

if HAS_TRITON:
    # Triton reads annotations as code, so the tensors have none.
    def _attend_split(  # type: ignore[no-untyped-def]
        q,
        k,
        v,
        table,
        lengths,
        parts,
        tops,
        totals,
        scale,
        table_stride,
        n_kv_heads: tl.constexpr,
        group: tl.constexpr,
        dim: tl.constexpr,
        page_tokens: tl.constexpr,
        n_splits: tl.constexpr,
        tile_rows: tl.constexpr,
    ):
        """Row `program_id(0)`, KV head `program_id(1)`, split `program_id(2)` of its pages."""
        row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
        length = tl.load(lengths + row)
        n_pages = (length + page_tokens - 1) // page_tokens
        share = (n_pages + n_splits - 1) // n_splits
        first = split * share
        last = tl.minimum(first + share, n_pages)
        g = tl.arange(0, tile_rows)
        d = tl.arange(0, dim)
        t = tl.arange(0, page_tokens)
        is_query = g < group
        q_at = ((row * n_kv_heads + head) * group + g)[:, None] * dim + d[None, :]
        query = tl.load(q + q_at, mask=is_query[:, None], other=0.0)
        top = tl.full([tile_rows], float("-inf"), tl.float32)
        total = tl.zeros([tile_rows], tl.float32)
        seen = tl.zeros([tile_rows, dim], tl.float32)
        for number in range(first, last):
            page = tl.load(table + row * table_stride + number).to(tl.int64)
            at = ((page * page_tokens + t) * n_kv_heads + head)[:, None] * dim + d[None, :]
            scores = tl.dot(query, tl.trans(tl.load(k + at))) * scale
            is_token = number * page_tokens + t < length
            scores = tl.where(is_token[None, :], scores, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, 1))
            fading = tl.exp(top - higher)
            weights = tl.exp(scores - higher[:, None])
            total = total * fading + tl.sum(weights, 1)
            values = tl.load(v + at)
            seen = seen * fading[:, None] + tl.dot(weights.to(values.dtype), values)
            top = higher
        part = ((row * n_kv_heads + head) * n_splits + split) * group + g
        tl.store(parts + part[:, None] * dim + d[None, :], seen, mask=is_query[:, None])
        tl.store(tops + part, top, mask=is_query)
        tl.store(totals + part, total, mask=is_query)

    def _join_splits(  # type: ignore[no-untyped-def]
        parts,
        tops,
        totals,
        out,
        group: tl.constexpr,
        dim: tl.constexpr,
        n_splits: tl.constexpr,
    ):
        """Query head `program_id(1)` of the group of (row, KV head) `program_id(0)`."""
        owner, g = tl.program_id(0), tl.program_id(1)
        s = tl.arange(0, n_splits)
        d = tl.arange(0, dim)
        part = (owner * n_splits + s) * group + g
        top = tl.load(tops + part)
        weights = tl.exp(top - tl.max(top, 0))
        total = tl.sum(weights * tl.load(totals + part), 0)
        seen = tl.load(parts + part[:, None] * dim + d[None, :])
        joined = tl.sum(seen * weights[:, None], 0) / total
        tl.store(out + (owner * group + g) * dim + d, joined.to(out.dtype.element_ty))


@functools.cache
def _kernels() -> tuple[Any, Any]:
    """Compiled when they are first launched."""
    return triton.jit(_attend_split), triton.jit(_join_splits)


def paged_on_gpu(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    page_tokens: int,
    n_splits: int,
) -> torch.Tensor:
    """See `attention.paged_attention`. `dim`, `page_tokens` and `n_splits` are powers of two;
    `table` may be a part of a wider tensor."""
    rows, n_heads, dim = q.shape
    n_kv_heads = k.shape[1]
    group = n_heads // n_kv_heads
    q = q.contiguous()
    shape = (rows, n_kv_heads, n_splits, group)
    parts = torch.empty((*shape, dim), dtype=torch.float32, device=q.device)
    tops = torch.empty(shape, dtype=torch.float32, device=q.device)
    totals = torch.empty(shape, dtype=torch.float32, device=q.device)
    out = torch.empty_like(q)
    attend, join = _kernels()
    attend[(rows, n_kv_heads, n_splits)](
        q,
        k,
        v,
        table,
        lengths,
        parts,
        tops,
        totals,
        dim**-0.5,
        table.stride(0),
        n_kv_heads=n_kv_heads,
        group=group,
        dim=dim,
        page_tokens=page_tokens,
        n_splits=n_splits,
        tile_rows=max(ROWS_OF_A_TILE, group),
    )
    join[(rows * n_kv_heads, group)](
        parts, tops, totals, out, group=group, dim=dim, n_splits=n_splits
    )
    return out
