# mypy: disable-error-code="no-untyped-def"
"""Triton kernels for the paged cache: writing to it, and attention of many queries over it.

A request's context is scattered over blocks, so a kernel never sees "the keys": it turns positions
into slots through the block table, a tile at a time, and gathers those rows. The loop that does so,
`attend_range`, is shared by prefill (here) and decode (`triton_decode.py`). It is the online softmax
of FlashAttention-2 (Dao, 2023): a running maximum and sum per row, in base 2 because the hardware's
exponential is; the scale carries the factor log2(e).

Query heads that share a KV head are rows of one tile, so a key is loaded once for all of them.
Everything a launch depends on is a number the host has anyway: no kernel waits for the device.
(Kernel parameters have no Python types; those marked `tl.constexpr` are compiled in.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from minivllm.attention.backend import AttentionMetadata

LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class Tile:
    """How a kernel is cut up.

    Attributes:
        block_m: Rows, each a (query token, query head) pair; a power of two, at least 16.
        block_n: Context tokens per loop iteration; a power of two, at least 16.
        num_warps: Warps per program.
        num_stages: Depth of the software pipeline. The block table is loaded one stage before the
            rows it leads to, so `n` stages keep `n - 2` tiles of keys and values in flight.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def write_cache(
    key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Stores each token's key and value in the slot that the mapping names; -1 stores nothing.

    Args:
        key: `[>= num_tokens, num_kv_heads, head_size]`, last dimension contiguous.
        value: Likewise.
        kv_cache: `[2, num_blocks, block_size, num_kv_heads, head_size]`, contiguous.
        slot_mapping: int64 `[num_tokens]`. Its length is what counts: key and value may have more
            rows, of padding.
    """
    num_kv_heads, head_size = kv_cache.shape[-2:]
    cache_write_kernel[(slot_mapping.shape[0],)](
        key,
        value,
        kv_cache,
        slot_mapping,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        kv_cache.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        HEADS_PADDED=triton.next_power_of_2(num_kv_heads),
        HEAD_SIZE=head_size,
        HEAD_PADDED=triton.next_power_of_2(head_size),
        num_warps=4,
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
        metadata: The step's. Of the host's numbers only `num_reqs` is used, and with the number of
            query rows it bounds the grid: a recorded launch fits every step up to that size.
        first_req: Requests before it are left alone; each has exactly one query token.
        scale: Factor on the scores, positive.
        tile: Shape of the work of one program.
    """
    block_size, num_kv_heads, head_size = kv_cache.shape[-3:]
    group = query.shape[1] // num_kv_heads
    block_m = max(tile.block_m, triton.next_power_of_2(group))
    queries_per_tile = block_m // group
    # Each request's last tile may be partly empty; the sum of the others is bounded by the rows.
    num_tiles = (query.shape[0] - first_req) // queries_per_tile + metadata.num_reqs - first_req
    prefill_kernel[(num_kv_heads, num_tiles)](
        output,
        query,
        kv_cache,
        metadata.block_table,
        metadata.seq_lens,
        metadata.query_start_loc,
        scale * LOG2_E,
        query.stride(0),
        query.stride(1),
        metadata.block_table.stride(0),
        kv_cache.stride(0),
        first_req,
        metadata.num_reqs,
        GROUP=group,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_SIZE=head_size,
        HEAD_PADDED=max(16, triton.next_power_of_2(head_size)),
        BLOCK_SIZE=block_size,
        BLOCK_M=block_m,
        BLOCK_N=tile.block_n,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


@triton.jit
def cache_write_kernel(
    key_ptr,
    value_ptr,
    cache_ptr,
    slot_ptr,
    key_stride,
    key_head_stride,
    value_stride,
    value_head_stride,
    value_offset,
    NUM_KV_HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
):
    """One program per token, all its KV heads."""
    # 64 bits from here on: a cache has more than 2^31 elements, and a batch may.
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + token)
    if slot < 0:
        return
    heads = tl.arange(0, HEADS_PADDED)[:, None]
    dims = tl.arange(0, HEAD_PADDED)[None, :]
    mask = (heads < NUM_KV_HEADS) & (dims < HEAD_SIZE)
    key = tl.load(key_ptr + token * key_stride + heads * key_head_stride + dims, mask=mask)
    value = tl.load(value_ptr + token * value_stride + heads * value_head_stride + dims, mask=mask)
    row = cache_ptr + slot * NUM_KV_HEADS * HEAD_SIZE
    tl.store(row + heads * HEAD_SIZE + dims, key, mask=mask)
    tl.store(row + value_offset + heads * HEAD_SIZE + dims, value, mask=mask)


# The request count changes from step to step: specialising on it would compile in mid-service.
@triton.jit(do_not_specialize=["first_req", "num_reqs"])
def prefill_kernel(
    output_ptr,
    query_ptr,
    cache_ptr,
    table_ptr,
    seq_lens_ptr,
    query_start_ptr,
    scale,
    query_stride,
    query_head_stride,
    table_stride,
    value_offset,
    first_req,
    num_reqs,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program per tile of a request's query tokens and KV head."""
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
    positions = context_len + queries
    end = context_len + tl.minimum(first_query + QUERIES, query_len)
    # Tiles before this one lie wholly in the past of every row and need no mask.
    first_masked = (context_len + first_query + 1) // BLOCK_N * BLOCK_N
    table_row = table_ptr + req.to(tl.int64) * table_stride
    acc = tl.zeros([BLOCK_M, HEAD_PADDED], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc, row_max, row_sum = attend_range(
        query, acc, row_max, row_sum, 0, first_masked, positions, scale, kv_head,
        cache_ptr, value_offset, table_row,
        NUM_KV_HEADS, HEAD_SIZE, HEAD_PADDED, BLOCK_SIZE, BLOCK_N, False,
    )  # fmt: skip
    acc, row_max, row_sum = attend_range(
        query, acc, row_max, row_sum, first_masked, end, positions, scale, kv_head,
        cache_ptr, value_offset, table_row,
        NUM_KV_HEADS, HEAD_SIZE, HEAD_PADDED, BLOCK_SIZE, BLOCK_N, True,
    )  # fmt: skip
    output_rows = output_ptr + (tokens * (NUM_KV_HEADS * GROUP) + heads) * HEAD_SIZE
    result = (acc / row_sum[:, None]).to(output_ptr.dtype.element_ty)
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
def attend_range(
    query,
    acc,
    row_max,
    row_sum,
    start,
    end,
    last_visible,
    scale,
    kv_head,
    cache_ptr,
    value_offset,
    table_row,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Attends to positions `start <= position < end`; returns acc, row_max and row_sum, updated.

    With `MASKED`, row `m` sees the positions up to `last_visible[m]`; `start` must be one of them,
    or an empty row's maximum would be -inf and its weights NaN. Without, all rows see all of them
    and the range is whole tiles.
    """
    dims = tl.arange(0, HEAD_PADDED)
    for tile_start in range(start, end, BLOCK_N):
        positions = tile_start + tl.arange(0, BLOCK_N)
        in_range = positions < end
        if MASKED:
            # The table may end here. Entry 0, the null block, is readable, whatever it holds.
            blocks = tl.load(table_row + positions // BLOCK_SIZE, mask=in_range, other=0)
        else:
            blocks = tl.load(table_row + positions // BLOCK_SIZE)
        slots = blocks.to(tl.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
        pointers = cache_ptr + (slots * NUM_KV_HEADS + kv_head)[:, None] * HEAD_SIZE + dims[None, :]
        if HEAD_SIZE == HEAD_PADDED:
            key = tl.load(pointers)
        else:
            key = tl.load(pointers, mask=(dims < HEAD_SIZE)[None, :], other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee")
        if MASKED:
            scores = tl.where(positions[None, :] <= last_visible[:, None], scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale)
        weights = tl.math.exp2(scores * scale - new_max[:, None])
        correction = tl.math.exp2(row_max - new_max)
        row_sum = row_sum * correction + tl.sum(weights, 1)
        row_max = new_max
        acc = acc * correction[:, None]
        if MASKED:
            # A weight of zero does not silence a NaN, and slots nobody has written may hold one.
            value_mask = in_range[:, None] & (dims < HEAD_SIZE)[None, :]
            value = tl.load(pointers + value_offset, mask=value_mask, other=0.0)
        elif HEAD_SIZE == HEAD_PADDED:
            value = tl.load(pointers + value_offset)
        else:
            value = tl.load(pointers + value_offset, mask=(dims < HEAD_SIZE)[None, :], other=0.0)
        acc = tl.dot(weights.to(value.dtype), value, acc, input_precision="ieee")
    return acc, row_max, row_sum
