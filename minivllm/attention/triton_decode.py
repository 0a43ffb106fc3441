# mypy: disable-error-code="no-untyped-def"
"""Triton kernels for decode: one query token per request, so reading the cache is all the work.

One program per request and KV head would leave most of a GPU idle at small batches: a context is
split among several programs, which leave partial results in a scratch buffer, and a second kernel
merges them (Flash-Decoding; Dao, Haziza, Massa, Sizov, 2023). How many splits is decided by
`num_kv_splits` alone, from numbers known at launch, because a recorded graph freezes the choice:
the kernels are right for every context length with every count, empty splits included.
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

PROGRAMS_PER_SM = 4  # enough to hide latencies and to even out unequal lengths
MIN_TOKENS_PER_SPLIT = 128  # fewer take less time than the merge
MERGE_CHUNK = 16


def num_kv_splits(num_decodes: int, num_kv_heads: int, max_seq_len: int, num_sms: int) -> int:
    """Decides into how many parts the contexts are split; the only place that does.

    Args:
        num_decodes: Requests in the launch, padding included.
        num_kv_heads: KV heads on this device.
        max_seq_len: Longest context that the launch may meet: the step's, or for a launch that is
            recorded, the model's.
        num_sms: Multiprocessors of the device.

    Returns:
        At least 1. If more, `num_decodes * num_kv_heads * splits <= max_split_programs(num_sms)`.
    """
    wanted = max_split_programs(num_sms) // max(1, num_decodes * num_kv_heads)
    useful = -(-max_seq_len // MIN_TOKENS_PER_SPLIT)
    return max(1, min(wanted, useful))


def max_split_programs(num_sms: int) -> int:
    """Most programs of a launch that splits, whatever the batch: what bounds the scratch."""
    return PROGRAMS_PER_SM * num_sms


class DecodeScratch:
    """Where splits leave their partial results, in float32.

    Args:
        num_rows: Room for this many (request, query head, split) triples.
        head_size: Of a head.
        device: Where the kernels run.
    """

    def __init__(self, num_rows: int, head_size: int, device: torch.device) -> None:
        self.partial = torch.empty(num_rows, head_size, dtype=torch.float32, device=device)
        self.lse = torch.empty(num_rows, dtype=torch.float32, device=device)


def decode_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    output: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
    tile: Tile,
    num_splits: int,
    scratch: DecodeScratch,
) -> None:
    """Attention for the first `metadata.num_decodes` requests: request i has the query of row i.

    Rows of requests whose context is empty (padding) become zero.

    Args:
        query: `[num_tokens, num_heads, head_size]`, last dimension contiguous.
        kv_cache: `[2, num_blocks, block_size, num_kv_heads, head_size]`, contiguous; it holds the
            step's keys and values already.
        output: `[num_tokens, num_heads, head_size]`, contiguous.
        metadata: The step's. Of the host's numbers only `num_decodes` is used.
        scale: Factor on the scores, positive.
        tile: Shape of the work of one program; as many rows as the heads need are added.
        num_splits: From `num_kv_splits`, though any count from 1 gives the right result.
        scratch: Room for `num_decodes * num_heads * num_splits` rows; untouched if one split.
    """
    block_size, num_kv_heads, head_size = kv_cache.shape[-3:]
    group = query.shape[1] // num_kv_heads
    # Heads first: programs that run together then read neighbouring rows of the same blocks.
    decode_kernel[(num_kv_heads, metadata.num_decodes, num_splits)](
        output, scratch.partial, scratch.lse, query, kv_cache,
        metadata.block_table, metadata.seq_lens, scale * LOG2_E,
        query.stride(0), query.stride(1), metadata.block_table.stride(0), kv_cache.stride(0),
        GROUP=group, NUM_KV_HEADS=num_kv_heads,
        HEAD_SIZE=head_size, HEAD_PADDED=padded_head_size(head_size), BLOCK_SIZE=block_size,
        BLOCK_M=max(tile.block_m, triton.next_power_of_2(group)), BLOCK_N=tile.block_n,
        SPLIT=num_splits > 1, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    if num_splits > 1:
        _merge(output, metadata, tile, num_splits, scratch)


def _merge(
    output: torch.Tensor,
    metadata: AttentionMetadata,
    tile: Tile,
    num_splits: int,
    scratch: DecodeScratch,
) -> None:
    num_heads, head_size = output.shape[1:]
    merge_kernel[(num_heads, metadata.num_decodes)](
        output, scratch.partial, scratch.lse, metadata.seq_lens, num_splits,
        HEAD_SIZE=head_size, HEAD_PADDED=padded_head_size(head_size),
        BLOCK_N=tile.block_n, CHUNK=MERGE_CHUNK, num_warps=4,
    )  # fmt: skip


@triton.jit
def split_length(seq_len, num_splits, BLOCK_N: tl.constexpr):
    """Context tokens per split: whole tiles, and as few as the number of splits allows."""
    return tl.cdiv(tl.cdiv(seq_len, BLOCK_N), num_splits) * BLOCK_N


@triton.jit
def decode_kernel(
    output_ptr, partial_ptr, lse_ptr, query_ptr, cache_ptr, table_ptr, seq_lens_ptr, scale,
    query_stride, query_head_stride, table_stride, value_offset,
    GROUP: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr, HEAD_PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """One program per KV head, request and split; its rows are the KV head's query heads."""
    kv_head = tl.program_id(0)
    req = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    seq_len = tl.load(seq_lens_ptr + req)
    length = split_length(seq_len, tl.num_programs(2), BLOCK_N)
    start = split * length
    end = tl.minimum(start + length, seq_len)
    if SPLIT and start >= end:
        return
    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, HEAD_PADDED)
    heads = kv_head * GROUP + rows
    mask = (rows < GROUP)[:, None] & (dims < HEAD_SIZE)[None, :]
    query_rows = query_ptr + req * query_stride + heads * query_head_stride
    query = tl.load(query_rows[:, None] + dims[None, :], mask=mask, other=0.0)
    acc, row_max, row_sum = empty_softmax(BLOCK_M, HEAD_PADDED)
    # Masked throughout: memory is the limit here, and one loop fills one pipeline.
    acc, row_max, row_sum = attend_range(
        query, acc, row_max, row_sum, start, end, rows * 0 + seq_len - 1, scale,
        cache_ptr + kv_head * HEAD_SIZE, value_offset, table_ptr + req * table_stride,
        NUM_KV_HEADS * HEAD_SIZE, HEAD_SIZE, HEAD_PADDED, BLOCK_SIZE, BLOCK_N, True,
    )  # fmt: skip
    # The largest weight is 1, so a smaller sum means that there was no context at all.
    result = acc / tl.maximum(row_sum, 0.5)[:, None]
    out_rows = req * (NUM_KV_HEADS * GROUP) + heads
    if SPLIT:
        out_rows = out_rows * tl.num_programs(2) + split
        tl.store(lse_ptr + out_rows, row_max + tl.math.log2(row_sum), mask=rows < GROUP)
        tl.store(partial_ptr + out_rows[:, None] * HEAD_SIZE + dims[None, :], result, mask=mask)
    else:
        result = result.to(output_ptr.dtype.element_ty)
        tl.store(output_ptr + out_rows[:, None] * HEAD_SIZE + dims[None, :], result, mask=mask)


@triton.jit(do_not_specialize=["num_splits"])
def merge_kernel(
    output_ptr, partial_ptr, lse_ptr, seq_lens_ptr, num_splits,
    HEAD_SIZE: tl.constexpr, HEAD_PADDED: tl.constexpr,
    BLOCK_N: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One program per query head and request: the partial results' mean, weighted by exp2(lse).

    Only the splits that had tokens are read; the others have written nothing.
    """
    out_row = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    seq_len = tl.load(seq_lens_ptr + tl.program_id(1))
    num_used = tl.cdiv(seq_len, tl.maximum(split_length(seq_len, num_splits, BLOCK_N), 1))
    dims = tl.arange(0, HEAD_PADDED)
    acc = tl.zeros([HEAD_PADDED], tl.float32)
    # One element, not a scalar: the loop's maximum and sum come as such.
    total_max = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    for first in range(0, num_used, CHUNK):
        splits = first + tl.arange(0, CHUNK)
        used = splits < num_used
        mask = used[:, None] & (dims < HEAD_SIZE)[None, :]
        rows = out_row * num_splits + splits
        lse = tl.load(lse_ptr + rows, mask=used, other=float("-inf"))
        partial = tl.load(partial_ptr + rows[:, None] * HEAD_SIZE + dims[None, :], mask, other=0.0)
        new_max = tl.maximum(total_max, tl.max(lse, 0))
        weights = tl.math.exp2(lse - new_max)
        correction = tl.math.exp2(total_max - new_max)
        total = total * correction + tl.sum(weights, 0)
        acc = acc * correction + tl.sum(weights[:, None] * partial, 0)
        total_max = new_max
    result = (acc / tl.maximum(total, 0.5)).to(output_ptr.dtype.element_ty)
    tl.store(output_ptr + out_row * HEAD_SIZE + dims, result, mask=dims < HEAD_SIZE)
