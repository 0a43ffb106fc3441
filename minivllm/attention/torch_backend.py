"""Paged attention in plain torch: the reference, and what runs on a CPU.

Nothing here knows more than the definition: write the new keys and values into their slots, gather
each request's context through its block table, and attend. Requests with one query token are
gathered together and attend in one call, since a call costs more than a little padding; a request
with several attends alone, because there the padding would cost more.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from minivllm.attention.backend import AttentionBackend, AttentionMetadata


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
        if metadata.num_decodes > 0:
            self._attend_decodes(query, kv_cache, output, metadata)
        start = metadata.num_decodes
        for i in range(metadata.num_decodes, metadata.num_reqs):
            end = start + metadata.query_lens_cpu[i]
            if end > start:  # a padding request has no tokens
                self._attend_one(query[start:end], kv_cache, output[start:end], metadata, i)
            start = end

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

    def _gather(self, kv_cache: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        """Collects the context of several requests.

        Args:
            kv_cache: One layer's.
            blocks: `[num_reqs, num_blocks_each]`.

        Returns:
            Keys and values, `[2, num_reqs, num_kv_heads, num_blocks_each * block_size, head_size]`.
        """
        gathered = kv_cache.index_select(1, blocks.flatten())
        return gathered.view(2, blocks.shape[0], -1, self.num_kv_heads, self.head_size).transpose(
            2, 3
        )

    def _attend_decodes(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        output: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> None:
        """One query token each; queries that share a KV head attend as if they were a sequence."""
        n = metadata.num_decodes
        shortest, longest = min(metadata.seq_lens_cpu[:n]), max(metadata.seq_lens_cpu[:n])
        blocks = metadata.block_table[:n, : -(-longest // self.block_size)]
        keys, values = self._gather(kv_cache, blocks)[:, :, :, :longest]
        mask = None
        if shortest < longest:
            positions = torch.arange(longest, device=query.device)
            mask = (positions < metadata.seq_lens[:n, None])[:, None, None]  # [num_reqs, 1, 1, len]
            # Slots past a request's end hold what others left there. A weight of zero does not
            # silence a NaN, and one request's overflow must not become another's.
            values.masked_fill_(~mask.transpose(2, 3), 0.0)
        grouped = query[:n].unflatten(1, (self.num_kv_heads, -1))
        attended = F.scaled_dot_product_attention(
            grouped, keys, values, attn_mask=mask, scale=self.scale
        )
        output[:n] = attended.flatten(1, 2)

    def _attend_one(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        output: torch.Tensor,
        metadata: AttentionMetadata,
        i: int,
    ) -> None:
        """A request with several query tokens, the last of its context."""
        query_len, seq_len = metadata.query_lens_cpu[i], metadata.seq_lens_cpu[i]
        blocks = metadata.block_table[i : i + 1, : -(-seq_len // self.block_size)]
        keys, values = self._gather(kv_cache, blocks)[:, :, :, :seq_len]
        is_first_chunk = query_len == seq_len
        mask = None
        if not is_first_chunk:
            # Query row r is token seq_len - query_len + r, and sees the tokens up to itself.
            mask = torch.ones(query_len, seq_len, dtype=torch.bool, device=query.device)
            mask = mask.tril(seq_len - query_len)
        attended = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            keys,
            values,
            attn_mask=mask,
            is_causal=is_first_chunk,
            scale=self.scale,
            enable_gqa=True,
        )
        output.copy_(attended[0].transpose(0, 1))
