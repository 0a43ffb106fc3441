# mypy: disable-error-code="no-untyped-def"
"""Triton on the paged cache: the kernel that writes to it, and the loop that attends over it.

A request's context is scattered over blocks, so a kernel never sees "the keys": it turns positions
into slots through the block table, a tile at a time, and gathers those rows. The loop that does so,
`attend_range`, is shared by prefill (`triton_prefill.py`) and decode (`triton_decode.py`). It is
the online softmax of FlashAttention-2 (Dao, 2023): a running maximum and sum per row, in base 2
because the hardware's exponential is; the scale carries the factor log2(e).

Parameters of kernels have no Python types; those marked `tl.constexpr` are compiled in.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class Tile:
    """How an attention kernel is cut up.

    Attributes:
        block_m: Rows, each a (query token, query head) pair; a power of two, at least 16.
        block_n: Context tokens per loop iteration; a power of two, at least 16.
        num_warps: Warps per program.
        num_stages: Depth of the software pipeline: shared memory holds `num_stages - 1` tiles of
            keys and as many of values (one, without a pipeline, if it is 1).
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def padded_head_size(head_size: int) -> int:
    """Width of a head in a tile: a power of two, and at least what a matrix instruction takes."""
    return max(16, triton.next_power_of_2(head_size))


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
        key, value, kv_cache, slot_mapping,
        key.stride(0), key.stride(1), value.stride(0), value.stride(1), kv_cache.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        HEADS_PADDED=triton.next_power_of_2(num_kv_heads),
        HEAD_SIZE=head_size,
        HEAD_PADDED=padded_head_size(head_size),
        num_warps=4,
    )  # fmt: skip


@triton.jit
def cache_write_kernel(
    key_ptr, value_ptr, cache_ptr, slot_ptr,
    key_stride, key_head_stride, value_stride, value_head_stride, value_offset,
    NUM_KV_HEADS: tl.constexpr, HEADS_PADDED: tl.constexpr,
    HEAD_SIZE: tl.constexpr, HEAD_PADDED: tl.constexpr,
):  # fmt: skip
    """One program per token, for all its KV heads."""
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
    destination = cache_ptr + slot * (NUM_KV_HEADS * HEAD_SIZE) + heads * HEAD_SIZE + dims
    tl.store(destination, key, mask=mask)
    tl.store(destination + value_offset, value, mask=mask)


@triton.jit
def empty_softmax(BLOCK_M: tl.constexpr, HEAD_PADDED: tl.constexpr):
    """What `attend_range` starts from: no weighted values, no maximum, no sum."""
    acc = tl.zeros([BLOCK_M, HEAD_PADDED], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    return acc, row_max, row_sum


@triton.jit
def attend_range(
    query, acc, row_max, row_sum, start, end, last_visible, scale,
    head_ptr, value_offset, table_row,
    SLOT_STRIDE: tl.constexpr, HEAD_SIZE: tl.constexpr, HEAD_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Attends to positions `start <= position < end` of one KV head; returns acc, row_max, row_sum.

    With `MASKED`, row `m` sees the positions up to `last_visible[m]`; `start` must be one of them,
    or the row's maximum is -inf and its weights NaN. Without, all rows see all, in whole tiles.
    """
    dims = tl.arange(0, HEAD_PADDED)
    positions = start + tl.arange(0, BLOCK_N)
    # Block ids are loaded a tile ahead, by hand: the pipeliner would spend half its stages on them.
    # The mask is for the end of the table; block 0, the null block, is safe to read.
    blocks = tl.load(table_row + positions // BLOCK_SIZE, mask=positions < end, other=0)
    for tile_start in range(start, end, BLOCK_N):
        positions = tile_start + tl.arange(0, BLOCK_N)
        ahead = positions + BLOCK_N
        next_blocks = tl.load(table_row + ahead // BLOCK_SIZE, mask=ahead < end, other=0)
        slots = blocks.to(tl.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
        pointers = head_ptr + (slots * SLOT_STRIDE)[:, None] + dims[None, :]
        # Unwritten slots may hold NaN. In scores the mask below covers it; in values it would get
        # past a weight of zero, so those are not loaded.
        key = load_rows(pointers, positions < end, dims, HEAD_SIZE, HEAD_PADDED, False)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee")
        if MASKED:
            scores = tl.where(positions[None, :] <= last_visible[:, None], scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale)
        weights = tl.math.exp2(scores * scale - new_max[:, None])
        correction = tl.math.exp2(row_max - new_max)
        row_sum = row_sum * correction + tl.sum(weights, 1)
        row_max = new_max
        value = load_rows(
            pointers + value_offset, positions < end, dims, HEAD_SIZE, HEAD_PADDED, MASKED
        )
        acc = acc * correction[:, None]
        acc = tl.dot(weights.to(value.dtype), value, acc, input_precision="ieee")
        blocks = next_blocks
    return acc, row_max, row_sum


@triton.jit
def load_rows(
    pointers, row_mask, dims,
    HEAD_SIZE: tl.constexpr, HEAD_PADDED: tl.constexpr, MASK_ROWS: tl.constexpr,
):  # fmt: skip
    """Loads a tile of rows; zeros instead of padding, and with `MASK_ROWS` of masked rows."""
    if MASK_ROWS:
        mask = row_mask[:, None] & (dims < HEAD_SIZE)[None, :]
        rows = tl.load(pointers, mask=mask, other=0.0)
    elif HEAD_SIZE != HEAD_PADDED:
        rows = tl.load(pointers, mask=(dims < HEAD_SIZE)[None, :], other=0.0)
    else:
        rows = tl.load(pointers)
    return rows
