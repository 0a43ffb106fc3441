"""What attention is given in a step, and what a backend must do with it.

A step is a flat batch: the tokens of all scheduled requests one after another, whatever their kind.
`AttentionMetadata` says where each request's tokens begin (`query_start_loc`), how long its context
is (`seq_lens`), and where its keys and values lie (`block_table`, `slot_mapping`). A backend writes
the new keys and values into the paged cache, then lets every token attend to all tokens of its own
request up to itself, and stores the result in a buffer that the caller allocated.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch


@dataclass
class AttentionMetadata:
    """Where everything is, for one step. Requests are ordered: decodes first, then the rest.

    A "decode" here is a request with exactly one query token, whatever it is for: which kernel fits
    depends on the shape alone. (Which GRAPH fits does not; that is decided from request state.)

    Attributes:
        num_actual_tokens: Real tokens in the step; rows beyond them are padding.
        num_reqs: Requests in the step.
        num_decodes: How many requests, all at the front, have exactly one query token.
        query_start_loc: int32 `[num_reqs + 1]`, first row of each request's tokens.
        seq_lens: int32 `[num_reqs]`, context length after this step (computed + new tokens).
        block_table: int32 `[num_reqs, max_blocks_per_seq]`, entries past the context are 0, the
            null block.
        slot_mapping: int64 `[num_tokens]`, cache slot of each token: `block * block_size + offset`;
            -1 for padding, which must not be written.
        max_query_len: Most query tokens of any request.
        max_seq_len: Longest context of any request.
        query_lens_cpu: Query tokens per request, on the host.
        seq_lens_cpu: Context length per request, on the host.
    """

    num_actual_tokens: int
    num_reqs: int
    num_decodes: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    max_query_len: int
    max_seq_len: int
    query_lens_cpu: list[int]
    seq_lens_cpu: list[int]


class AttentionBackend(ABC):
    """Paged attention of one kind, for layers that all have the same shape."""

    name: str

    def __init__(
        self, num_heads: int, num_kv_heads: int, head_size: int, block_size: int, scale: float
    ) -> None:
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_size = head_size
        self.block_size = block_size
        self.scale = scale

    def kv_cache_shape(self, num_blocks: int) -> tuple[int, ...]:
        """Shape of one layer's cache: keys at index 0, values at index 1.

        Returns:
            `[2, num_blocks, block_size, num_kv_heads, head_size]`
        """
        return (2, num_blocks, self.block_size, self.num_kv_heads, self.head_size)

    @abstractmethod
    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        output: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> None:
        """Writes key and value into the cache, then attends; fills `output`, returns nothing.

        Args:
            query: `[num_tokens, num_heads, head_size]`, rotated already; rows may be strided.
            key: `[num_tokens, num_kv_heads, head_size]`, likewise.
            value: `[num_tokens, num_kv_heads, head_size]`.
            kv_cache: One layer's cache, shaped as `kv_cache_shape` says.
            output: `[num_tokens, num_heads, head_size]`, contiguous; rows of padding are left as
                they are or set to any finite value.
            metadata: The step's; `num_tokens` of the tensors may be larger than
                `metadata.num_actual_tokens` by padding rows at the end.
        """
