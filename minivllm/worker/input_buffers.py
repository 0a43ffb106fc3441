"""Every tensor that a forward pass reads and that changes from step to step, allocated once.

A step never makes new input tensors: it writes into these, in place, and hands out slices of them.
So their addresses stay the same for the life of the engine, which is what a recorded graph needs
and what a reader of an address dump can rely on. Each buffer has a twin on the host, filled with
numpy and copied over in one go; on a CPU the two are one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from minivllm.attention.backend import AttentionMetadata

PADDING_SLOT = -1


class StagedBuffer:
    """A tensor on the device and its twin on the host, viewed as `np` for filling."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        # Pinned, so that the copy is truly asynchronous.
        self.host = torch.zeros(shape, dtype=dtype, device="cpu", pin_memory=on_gpu)
        self.device = torch.zeros(shape, dtype=dtype, device=device) if on_gpu else self.host
        self.np: np.ndarray = self.host.numpy()

    def upload(self, count: int) -> torch.Tensor:
        """Copies the first `count` rows to the device and returns that slice of the buffer."""
        if self.device is not self.host:
            self.device[:count].copy_(self.host[:count], non_blocking=True)
        return self.device[:count]


@dataclass(frozen=True)
class BatchRows:
    """One step's requests, in batch order: those with one token to compute first.

    Attributes:
        token_ids: int `[num_tokens]`, the tokens to compute.
        positions: int `[num_tokens]`, their places in their own sequences.
        request_of: int `[num_tokens]`, the batch index of the request each belongs to.
        query_lens: int `[num_reqs]`, how many of them each request has.
        num_computed: int `[num_reqs]`, tokens in the cache before the step.
        block_table: int `[num_reqs, max_blocks_per_seq]`.
    """

    token_ids: np.ndarray
    positions: np.ndarray
    request_of: np.ndarray
    query_lens: np.ndarray
    num_computed: np.ndarray
    block_table: np.ndarray


@dataclass(frozen=True)
class ModelInputs:
    """What one forward pass is called with: slices of the buffers, and the attention metadata."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    attn_metadata: AttentionMetadata


class InputBuffers:
    """The buffers, at their largest size.

    Args:
        max_num_tokens: Most tokens of a step.
        max_num_seqs: Most requests of a step.
        max_model_len: Longest sequence, in tokens.
        block_size: Tokens per KV block.
        device: Where the model runs.
    """

    def __init__(
        self,
        max_num_tokens: int,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        device: torch.device,
    ) -> None:
        self.block_size = block_size
        self.max_blocks_per_seq = -(-max_model_len // block_size)
        self.input_ids = StagedBuffer((max_num_tokens,), torch.int32, device)
        self.positions = StagedBuffer((max_num_tokens,), torch.int64, device)
        self.slot_mapping = StagedBuffer((max_num_tokens,), torch.int64, device)
        self.query_start_loc = StagedBuffer((max_num_seqs + 1,), torch.int32, device)
        self.seq_lens = StagedBuffer((max_num_seqs,), torch.int32, device)
        table_shape = (max_num_seqs, self.max_blocks_per_seq)
        self.block_table = StagedBuffer(table_shape, torch.int32, device)

    def fill(
        self,
        rows: BatchRows,
        num_tokens_padded: int | None = None,
        num_reqs_padded: int | None = None,
    ) -> ModelInputs:
        """Writes a step into the buffers, padding included, and returns the slices to run on.

        Padding tokens get slot -1, so that they write to no cache; padding requests get length 0,
        no tokens, and the null block. Both are written every time: the rows held a real request a
        step before, and a stale block table would let padding read, or write, somebody's cache.

        Args:
            rows: The step.
            num_tokens_padded: Rows of the token buffers to hand out; None is no padding.
            num_reqs_padded: Rows of the request buffers to hand out; None is no padding.
        """
        num_tokens, num_reqs = len(rows.token_ids), len(rows.query_lens)
        padded_tokens = num_tokens_padded or num_tokens
        padded_reqs = num_reqs_padded or num_reqs
        self._fill_tokens(rows, num_tokens, padded_tokens)
        self._fill_requests(rows, num_reqs, padded_reqs)
        seq_lens_cpu = self.seq_lens.np[:padded_reqs].tolist()
        query_lens_cpu = rows.query_lens.tolist() + [0] * (padded_reqs - num_reqs)
        metadata = AttentionMetadata(
            num_actual_tokens=num_tokens,
            num_reqs=padded_reqs,
            num_decodes=int((rows.query_lens == 1).sum()),
            query_start_loc=self.query_start_loc.upload(padded_reqs + 1),
            seq_lens=self.seq_lens.upload(padded_reqs),
            block_table=self.block_table.upload(padded_reqs),
            slot_mapping=self.slot_mapping.upload(padded_tokens),
            max_query_len=max(query_lens_cpu),
            max_seq_len=max(seq_lens_cpu),
            query_lens_cpu=query_lens_cpu,
            seq_lens_cpu=seq_lens_cpu,
        )
        return ModelInputs(
            input_ids=self.input_ids.upload(padded_tokens),
            positions=self.positions.upload(padded_tokens),
            attn_metadata=metadata,
        )

    def _fill_tokens(self, rows: BatchRows, num_tokens: int, padded: int) -> None:
        blocks = rows.block_table[rows.request_of, rows.positions // self.block_size]
        slots = blocks.astype(np.int64) * self.block_size + rows.positions % self.block_size
        self.input_ids.np[:num_tokens] = rows.token_ids
        self.positions.np[:num_tokens] = rows.positions
        self.slot_mapping.np[:num_tokens] = slots
        self.input_ids.np[num_tokens:padded] = 0
        self.positions.np[num_tokens:padded] = 0
        self.slot_mapping.np[num_tokens:padded] = PADDING_SLOT

    def _fill_requests(self, rows: BatchRows, num_reqs: int, padded: int) -> None:
        self.query_start_loc.np[0] = 0
        np.cumsum(rows.query_lens, out=self.query_start_loc.np[1 : num_reqs + 1])
        self.query_start_loc.np[num_reqs + 1 : padded + 1] = self.query_start_loc.np[num_reqs]
        self.seq_lens.np[:num_reqs] = rows.num_computed + rows.query_lens
        self.seq_lens.np[num_reqs:padded] = 0
        self.block_table.np[:num_reqs] = rows.block_table
        self.block_table.np[num_reqs:padded] = 0
