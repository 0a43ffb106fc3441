# mypy: disable-error-code="no-untyped-def"
"""The Triton kernel for requests with any number of query tokens over a paged context.

A program takes a few consecutive query tokens of one request, with all query heads that share a KV
head: a key is loaded once for all of these rows. Which request a program works for it finds itself,
by a binary search in `query_start_loc`: the host only bounds the number of programs, so it never
waits for the device, and a recorded launch stays right when the lengths change.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from minivllm.attention.backend import AttentionMetadata
from minivllm.attention.triton_kernels import (
    LOG2_E,
    Tile,
    attend_range,
    empty_softmax,
    padded_head_size,
)


def prefill_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    output: torch.Tensor,
    metadata: AttentionMetadata,
    first_req: int,
    scale: float,
    tile: Tile,
) -> None:
    """Causal attention for the requests from `first_req` on, of any query lengths, 0 and 1 too.

    Args:
        query: `[num_tokens, num_heads, head_size]`, last dimension contiguous.
        kv_cache: `[2, num_blocks, block_size, num_kv_heads, head_size]`, contiguous; it holds the
            step's keys and values already.
        output: `[num_tokens, num_heads, head_size]`, contiguous.
        metadata: The step's. Of the host's numbers only `num_reqs` is used.
        first_req: Requests before it are left alone; each has exactly one query token.
        scale: Factor on the scores, positive.
        tile: Shape of the work of one program; as many rows as a token's heads need are added.
    """
    block_size, num_kv_heads, head_size = kv_cache.shape[-3:]
    group = query.shape[1] // num_kv_heads
    block_m = max(tile.block_m, triton.next_power_of_2(group))
    # Full tiles are bounded by the query rows, and each request may have one more that is not.
    num_full = (query.shape[0] - first_req) // (block_m // group)
    prefill_kernel[(num_kv_heads, num_full + metadata.num_reqs - first_req)](
        output, query, kv_cache,
        metadata.block_table, metadata.seq_lens, metadata.query_start_loc, scale * LOG2_E,
        query.stride(0), query.stride(1), metadata.block_table.stride(0), kv_cache.stride(0),
        first_req, metadata.num_reqs,
        GROUP=group, NUM_KV_HEADS=num_kv_heads,
        HEAD_SIZE=head_size, HEAD_PADDED=padded_head_size(head_size),
        BLOCK_SIZE=block_size, BLOCK_M=block_m, BLOCK_N=tile.block_n,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip


# Counts of requests change from step to step: to specialise on them is to compile in mid-service.
@triton.jit(do_not_specialize=["first_req", "num_reqs"])
def prefill_kernel(
    output_ptr, query_ptr, cache_ptr, table_ptr, seq_lens_ptr, query_start_ptr, scale,
    query_stride, query_head_stride, table_stride, value_offset, first_req, num_reqs,
    GROUP: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr, HEAD_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program per KV head and tile of a request's query tokens."""
    QUERIES: tl.constexpr = BLOCK_M // GROUP
    kv_head = tl.program_id(0)
    # Later tiles see more context: they start first, so that the last to finish are the short ones.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    req, first_query = find_request(query_start_ptr, tile, first_req, num_reqs, QUERIES)
    query_start = tl.load(query_start_ptr + req)
    query_len = tl.load(query_start_ptr + req + 1) - query_start
    if first_query >= query_len:
        return
    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, HEAD_PADDED)
    queries = first_query + rows // GROUP
    tokens = (query_start + queries).to(tl.int64)
    heads = kv_head * GROUP + rows % GROUP
    mask = ((rows < QUERIES * GROUP) & (queries < query_len))[:, None] & (dims < HEAD_SIZE)[None, :]
    query_rows = query_ptr + tokens * query_stride + heads * query_head_stride
    query = tl.load(query_rows[:, None] + dims[None, :], mask=mask, other=0.0)
    context_len = tl.load(seq_lens_ptr + req) - query_len
    result = attend_causal(
        query, context_len + queries, context_len + first_query + 1,
        context_len + tl.minimum(first_query + QUERIES, query_len), scale,
        cache_ptr + kv_head * HEAD_SIZE, value_offset, table_ptr + req.to(tl.int64) * table_stride,
        NUM_KV_HEADS * HEAD_SIZE, HEAD_SIZE, HEAD_PADDED, BLOCK_SIZE, BLOCK_M, BLOCK_N,
    ).to(output_ptr.dtype.element_ty)  # fmt: skip
    output_rows = output_ptr + (tokens * (NUM_KV_HEADS * GROUP) + heads) * HEAD_SIZE
    tl.store(output_rows[:, None] + dims[None, :], result, mask=mask)


@triton.jit
def find_request(query_start_ptr, tile, first_req, num_reqs, QUERIES: tl.constexpr):
    """Finds whose tile this is, and its first query token within that request.

    Request `r` owns the tiles from `rows before it // QUERIES + requests before it` on: at least as
    many as it needs, and computable from `query_start_loc` alone, so no one has to count them.
    """
    rows_before = tl.load(query_start_ptr + first_req)
    low = first_req
    high = num_reqs
    while high - low > 1:
        middle = (low + high) // 2
        start = (tl.load(query_start_ptr + middle) - rows_before) // QUERIES + middle - first_req
        low = tl.where(start <= tile, middle, low)
        high = tl.where(start <= tile, high, middle)
    start = (tl.load(query_start_ptr + low) - rows_before) // QUERIES + low - first_req
    return low, (tile - start) * QUERIES


@triton.jit
def attend_causal(
    query, positions, num_visible_to_all, end, scale, head_ptr, value_offset, table_row,
    SLOT_STRIDE: tl.constexpr, HEAD_SIZE: tl.constexpr, HEAD_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Attends from rows at `positions` to every position up to their own, all below `end`."""
    acc, row_max, row_sum = empty_softmax(BLOCK_M, HEAD_PADDED)
    # Tiles before this one lie wholly in the past of every row and need no mask.
    first_masked = num_visible_to_all // BLOCK_N * BLOCK_N
    acc, row_max, row_sum = attend_range(
        query, acc, row_max, row_sum, 0, first_masked, positions, scale,
        head_ptr, value_offset, table_row,
        SLOT_STRIDE, HEAD_SIZE, HEAD_PADDED, BLOCK_SIZE, BLOCK_N, False,
    )  # fmt: skip
    acc, row_max, row_sum = attend_range(
        query, acc, row_max, row_sum, first_masked, end, positions, scale,
        head_ptr, value_offset, table_row,
        SLOT_STRIDE, HEAD_SIZE, HEAD_PADDED, BLOCK_SIZE, BLOCK_N, True,
    )  # fmt: skip
    return acc / row_sum[:, None]
