"""Paged attention in plain torch: the reference, and what runs on a CPU.

Nothing here knows more than the definition: write the new keys and values into their slots, gather
each request's context through its block table, and attend. Neighbours in the batch with equal
lengths attend together, since a call costs something; nothing is padded to a common length, because
copying and masking what is not there costs more than the calls that it saves.
"""

from __future__ import annotations

import itertools

import torch
from torch.nn import functional as F

from minivllm.attention.backend import AttentionBackend, AttentionMetadata

# A gathered context beyond the caches is written to memory and read again: smaller groups win.
_MAX_GATHERED_TOKENS = 8192


class TorchAttentionBackend(AttentionBackend):
    """Runs on every device and dtype that torch has; any head size."""

    name = "torch"

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        output: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> None:
        """See `AttentionBackend.forward`. Rows of padding in `output` are left as they are."""
        self._write_cache(key, value, kv_cache, metadata)
        request = row = 0
        lens = zip(metadata.query_lens_cpu, metadata.seq_lens_cpu, strict=True)
        for (query_len, seq_len), group in itertools.groupby(lens):
            num_reqs = len(list(group))
            if query_len == 0:  # padding requests have no tokens
                continue
            most = max(1, _MAX_GATHERED_TOKENS // seq_len)
            for count in _split(num_reqs, most):
                rows = slice(row, row + count * query_len)
                blocks = metadata.block_table[request : request + count]
                blocks = blocks[:, : -(-seq_len // self.block_size)]
                grouped = query[rows].unflatten(0, (count, query_len))
                attended = self._attend(grouped, kv_cache, blocks, seq_len)
                output[rows] = attended.flatten(0, 1)
                request, row = request + count, row + count * query_len

    def _write_cache(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> None:
        # Padding has slot -1, which an index would take for the last slot of the cache.
        num_tokens = metadata.num_actual_tokens
        slots = metadata.slot_mapping[:num_tokens]
        keys, values = kv_cache.flatten(1, 2)  # [num_slots, num_kv_heads, head_size] each
        keys.index_copy_(0, slots, key[:num_tokens])
        values.index_copy_(0, slots, value[:num_tokens])

    def _attend(
        self, query: torch.Tensor, kv_cache: torch.Tensor, blocks: torch.Tensor, seq_len: int
    ) -> torch.Tensor:
        """Attention of requests with equal lengths.

        Args:
            query: `[num_reqs, query_len, num_heads, head_size]`, the last tokens of each context.
            kv_cache: One layer's.
            blocks: `[num_reqs, num_blocks_each]`.
            seq_len: Context length of each.

        Returns:
            Shaped as `query`.
        """
        num_reqs, query_len, num_heads, head_size = query.shape
        gathered = kv_cache.index_select(1, blocks.flatten())
        # [num_reqs, num_kv_heads, seq_len, head_size]; what lies behind the last token is somebody
        # else's, and is cut off rather than masked: a weight of zero does not silence a NaN.
        keys, values = gathered.view(2, num_reqs, -1, self.num_kv_heads, head_size)[
            :, :, :seq_len
        ].transpose(2, 3)
        if query_len == 1:
            # The queries that share a KV head attend as if they were a sequence of their own.
            query = query.reshape(num_reqs, self.num_kv_heads, -1, head_size)
            attended = F.scaled_dot_product_attention(query, keys, values, scale=self.scale)
            return attended.reshape(num_reqs, 1, num_heads, head_size)
        mask = None
        if query_len < seq_len:
            # Query row r is token seq_len - query_len + r, and sees the tokens up to itself.
            mask = torch.ones(query_len, seq_len, dtype=torch.bool, device=query.device)
            mask = mask.tril(seq_len - query_len)
        attended = F.scaled_dot_product_attention(
            query.transpose(1, 2),
            keys,
            values,
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.scale,
            enable_gqa=True,
        )
        return attended.transpose(1, 2)


def _split(count: int, most: int) -> list[int]:
    """Cuts `count` into parts of at most `most`."""
    return [min(most, count - start) for start in range(0, count, most)]
