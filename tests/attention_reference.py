"""What paged attention must compute, in float64 and without any paging, and random cases of it.

A case keeps each request's whole keys and values in order, as the definition has them; the cache
is made from them, scattered over randomly chosen blocks, with NaN in every slot nobody owns. So the
reference shares no code and no layout with what it judges.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from minivllm.attention.backend import AttentionBackend, AttentionMetadata


@dataclass
class AttentionCase:
    """One step of one attention layer, before it ran.

    Attributes:
        query: `[num_tokens, num_heads, head_size]`; padding rows, if any, at the end.
        key: `[num_tokens, num_kv_heads, head_size]`.
        value: Likewise.
        kv_cache: `[2, num_blocks, block_size, num_kv_heads, head_size]`: holds the tokens computed
            before the step; all other slots hold `unowned`.
        output: Like query, filled with `OUTPUT_CANARY`.
        metadata: Of the step.
        scale: Factor on the scores.
        keys: By request, all keys `[seq_len, num_kv_heads, head_size]`, the step's included.
        values: Likewise.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    kv_cache: torch.Tensor
    output: torch.Tensor
    metadata: AttentionMetadata
    scale: float
    keys: list[torch.Tensor]
    values: list[torch.Tensor]


OUTPUT_CANARY = 7.0

# Most relative error, by the norm, that rounding of inputs, weights and output explains.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def random_case(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_size: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    num_padding_tokens: int = 0,
    num_padding_reqs: int = 0,
    unowned: float = float("nan"),
    seed: int = 0,
) -> AttentionCase:
    """Draws a step.

    Query, key and value are views of one `[num_tokens, (heads + 2 * kv heads) * head_size]` tensor,
    as a fused projection makes them, so their rows are strided.

    Args:
        query_lens: Tokens that each request computes in the step; ones must come first.
        context_lens: Tokens that each has in the cache before.
        num_heads: Query heads.
        num_kv_heads: KV heads.
        head_size: Of a head.
        block_size: Tokens per block.
        dtype: Of all tensors.
        device: Of all tensors.
        num_padding_tokens: Extra rows at the end, with slot -1.
        num_padding_reqs: Extra requests at the end, with no tokens and no context.
        unowned: What slots hold that belong to no token.
        seed: Of the random numbers.
    """
    generator = torch.Generator(device).manual_seed(seed)
    num_actual = sum(query_lens)
    seq_lens = [q + c for q, c in zip(query_lens, context_lens, strict=True)]
    num_tokens = num_actual + num_padding_tokens
    width = (num_heads + 2 * num_kv_heads) * head_size
    qkv = torch.randn(num_tokens, width, generator=generator, device=device).to(dtype)
    sizes = [num_heads * head_size, num_kv_heads * head_size, num_kv_heads * head_size]
    query, key, value = (x.unflatten(1, (-1, head_size)) for x in qkv.split(sizes, dim=1))

    tables = _random_tables(seq_lens, block_size, seed)
    cache_shape = (2, sum(map(len, tables)) + 4, block_size, num_kv_heads, head_size)
    kv_cache = torch.full(cache_shape, unowned, dtype=dtype, device=device)
    own_slots = _own_slots(tables, seq_lens, block_size)
    past = _fill_cache(kv_cache, own_slots, context_lens, generator)
    new = torch.stack([key, value])[:, :num_actual].split(list(query_lens), dim=1)
    whole = [torch.cat(parts, dim=1) for parts in zip(past, new, strict=True)]
    slots = [own[length:] for own, length in zip(own_slots, context_lens, strict=True)]
    slot_mapping = torch.cat([*slots, torch.full((num_padding_tokens,), -1)])
    output = torch.full((num_tokens, num_heads, head_size), OUTPUT_CANARY)
    return AttentionCase(
        query=query,
        key=key,
        value=value,
        kv_cache=kv_cache,
        output=output.to(device, dtype),
        metadata=_metadata(query_lens, seq_lens, tables, slot_mapping, num_padding_reqs, device),
        scale=head_size**-0.5,
        keys=[keys for keys, _ in whole],
        values=[values for _, values in whole],
    )


def reference_attention(case: AttentionCase) -> torch.Tensor:
    """The right output of the real rows, float64 `[num_actual_tokens, num_heads, head_size]`."""
    outputs, row = [], 0
    for keys, values, query_len in zip(
        case.keys, case.values, case.metadata.query_lens_cpu, strict=False
    ):
        query = case.query[row : row + query_len].double()  # [query_len, num_heads, head_size]
        group = query.shape[1] // keys.shape[1]
        keys = keys.double().repeat_interleave(group, dim=1)
        values = values.double().repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", query, keys) * case.scale
        positions = torch.arange(keys.shape[0], device=query.device)
        visible = positions[None, :] <= positions[-query_len:, None]
        weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, values))
        row += query_len
    return torch.cat(outputs)


def attention_error(backend: AttentionBackend, case: AttentionCase) -> float:
    """Runs the step and tells how wrong the output of its real rows is, see `relative_error`."""
    expected = reference_attention(case)
    backend.forward(case.query, case.key, case.value, case.kv_cache, case.output, case.metadata)
    return relative_error(case.output[: case.metadata.num_actual_tokens], expected)


def reference_cache(case: AttentionCase) -> torch.Tensor:
    """The cache as it must be after the step: the new tokens stored, all other slots as before."""
    cache = case.kv_cache.clone()
    block_size = cache.shape[2]
    for token, slot in enumerate(case.metadata.slot_mapping.tolist()):
        if slot >= 0:
            cache[0, slot // block_size, slot % block_size] = case.key[token]
            cache[1, slot // block_size, slot % block_size] = case.value[token]
    return cache


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of what is expected; NaN if either holds one."""
    difference = actual.double() - expected.double()
    return float(difference.norm() / expected.double().norm())


def _random_tables(seq_lens: Sequence[int], block_size: int, seed: int) -> list[torch.Tensor]:
    """Block ids by request, all distinct, in random order, from a pool a little too large."""
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-length // block_size) for length in seq_lens]
    ids = torch.randperm(sum(counts) + 3, generator=generator) + 1  # block 0 is the null block
    return list(ids[: sum(counts)].split(counts))


def _own_slots(
    tables: Sequence[torch.Tensor], seq_lens: Sequence[int], block_size: int
) -> list[torch.Tensor]:
    """By request, the cache slot of each of its tokens."""
    positions = [torch.arange(length) for length in seq_lens]
    return [
        table[position // block_size] * block_size + position % block_size
        for table, position in zip(tables, positions, strict=True)
    ]


def _fill_cache(
    kv_cache: torch.Tensor,
    own_slots: Sequence[torch.Tensor],
    context_lens: Sequence[int],
    generator: torch.Generator,
) -> list[torch.Tensor]:
    """Draws and stores the contexts; returns them by request, `[2, context_len, heads, size]`."""
    past = []
    for slots, length in zip(own_slots, context_lens, strict=True):
        shape = (2, length, *kv_cache.shape[-2:])
        drawn = torch.randn(shape, generator=generator, device=kv_cache.device)
        past.append(drawn.to(kv_cache.dtype))
        kv_cache.flatten(1, 2)[:, slots[:length].to(kv_cache.device)] = past[-1]
    return past


def _metadata(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    tables: Sequence[torch.Tensor],
    slot_mapping: torch.Tensor,
    num_padding_reqs: int,
    device: str,
) -> AttentionMetadata:
    num_decodes = sum(length == 1 for length in query_lens)
    assert all(length == 1 for length in query_lens[:num_decodes]), "decodes must come first"
    all_query_lens = [*query_lens, *[0] * num_padding_reqs]
    all_seq_lens = [*seq_lens, *[0] * num_padding_reqs]
    # Behind the table lie ids of no block: to look one up is to read far outside the cache.
    table_shape = (len(all_seq_lens) + 1, max(map(len, tables)))
    block_table = torch.full(table_shape, 2**30, dtype=torch.int32)
    block_table[:-1] = 0
    for i, table in enumerate(tables):
        block_table[i, : len(table)] = table
    starts = torch.tensor([0, *all_query_lens]).cumsum(0)
    return AttentionMetadata(
        num_actual_tokens=sum(query_lens),
        num_reqs=len(all_query_lens),
        num_decodes=num_decodes,
        query_start_loc=starts.to(device, torch.int32),
        seq_lens=torch.tensor(all_seq_lens, dtype=torch.int32, device=device),
        block_table=block_table.to(device)[:-1],
        slot_mapping=slot_mapping.to(device, torch.int64),
        max_query_len=max(all_query_lens),
        max_seq_len=max(all_seq_lens),
        query_lens_cpu=all_query_lens,
        seq_lens_cpu=all_seq_lens,
    )
