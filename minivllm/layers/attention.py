"""The attention layer: the place where a layer's slice of the KV cache meets the step's metadata.

The layer computes nothing itself. It knows its cache, finds the step's metadata in the forward
context, and asks the backend to write the new keys and values and to fill `output`, which its
caller allocated. Nothing is returned, so the address of the result is the caller's choice.
"""

from __future__ import annotations

import torch
from torch import nn

from minivllm.attention.backend import AttentionBackend
from minivllm.forward_context import get_forward_context


class Attention(nn.Module):
    """Attention of one decoder layer over the paged cache.

    Args:
        backend: How it is computed; shared by all layers.

    Attributes:
        kv_cache: The layer's part of the cache, set by the worker before the first step;
            `[2, num_blocks, block_size, num_kv_heads, head_size]`.
    """

    kv_cache: torch.Tensor

    def __init__(self, backend: AttentionBackend) -> None:
        super().__init__()
        self.backend = backend

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor
    ) -> None:
        """Fills `output`, `[num_tokens, num_heads, head_size]`; shapes as in `AttentionBackend`."""
        metadata = get_forward_context().attn_metadata
        if metadata is None:  # profiling: there is no cache yet, and memory is what is measured
            output.zero_()
            return
        self.backend.forward(query, key, value, self.kv_cache, output, metadata)
