"""Paged attention on a GPU, in Triton: what to launch for a step, and with which constants.

A step takes up to four launches on one stream: write the new keys and values into the cache, decode
attention for the requests with one query token (a second launch merges its splits), and prefill
attention for the rest, which reads the step's own keys back from the cache. Nothing waits for the
device, and every launch can be recorded: grids follow from shapes, from counts that the metadata
holds on the host, and from `num_kv_splits`; the scratch memory is allocated once.
"""

from __future__ import annotations

import torch

from minivllm.attention.backend import AttentionBackend, AttentionMetadata
from minivllm.attention.triton_decode import (
    DecodeScratch,
    decode_attention,
    max_split_programs,
    num_kv_splits,
)
from minivllm.attention.triton_kernels import Tile, write_cache
from minivllm.attention.triton_prefill import prefill_attention
from minivllm.errors import ConfigError
from minivllm.platform import triton_interpreted

SUPPORTED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_HEAD_SIZE = 256


class TritonAttentionBackend(AttentionBackend):
    """Runs on CUDA devices, and slowly on a CPU under `TRITON_INTERPRET=1`.

    Args:
        num_heads: Query heads on this device.
        num_kv_heads: KV heads on this device; divides `num_heads`.
        head_size: A multiple of 8 up to 256. Powers of two are the fastest: others are padded.
        block_size: Tokens per block of the cache, a power of two.
        scale: Factor on the scores, positive.
        dtype: Of all tensors, to have it checked now; None takes what `forward` is given.

    Raises:
        ConfigError: One of these is not supported.
    """

    name = "triton"

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        block_size: int,
        scale: float,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_heads, num_kv_heads, head_size, block_size, scale)
        _check_shape(num_heads, num_kv_heads, head_size, block_size, scale)
        if dtype is not None:
            _check_dtype(dtype)
        self._num_sms = 0
        self._scratch: DecodeScratch | None = None

    def allocate_scratch(self, device: torch.device) -> None:
        """Allocates the memory that split decodes need; call it before anything is recorded.

        Its size depends on the device only, not on the batch, because a batch that fills the device
        is not split. So it never grows and never moves. `forward` calls this if nobody has.

        Args:
            device: Where the model runs.
        """
        self._num_sms = _num_sms(device)
        num_rows = max_split_programs(self._num_sms) * (self.num_heads // self.num_kv_heads)
        self._scratch = DecodeScratch(num_rows, self.head_size, device)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        output: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> None:
        """See `AttentionBackend.forward`. Rows of padding in `output` are kept, or become zero.

        To record a launch that serves other steps later, give `metadata` the upper bounds:
        `num_reqs` and the rows of `query` bound prefill's grid, `num_decodes` is decode's, and
        `max_seq_len` decides the number of splits. With `num_decodes=0` every request, whatever its
        length, takes the prefill kernel.

        Raises:
            ConfigError: The dtype is not supported.
            RuntimeError: The stream is being recorded and there is no scratch memory yet.
        """
        _check_dtype(query.dtype)
        write_cache(key, value, kv_cache, metadata.slot_mapping)
        num_decodes = metadata.num_decodes
        if num_decodes > 0:
            self._decode(query, kv_cache, output, metadata)
        if metadata.num_actual_tokens > num_decodes:
            tile = prefill_tile(self.head_size, query.dtype)
            prefill_attention(query, kv_cache, output, metadata, num_decodes, self.scale, tile)

    def _decode(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        output: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> None:
        if self._scratch is None:
            if query.is_cuda and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "Triton attention has no scratch memory and a graph is being recorded: call "
                    "allocate_scratch(device) before recording, so that the graph does not own it"
                )
            self.allocate_scratch(query.device)
        assert self._scratch is not None
        num_splits = num_kv_splits(
            metadata.num_decodes, self.num_kv_heads, metadata.max_seq_len, self._num_sms
        )
        decode_attention(
            query,
            kv_cache,
            output,
            metadata,
            self.scale,
            decode_tile(self.head_size, query.dtype),
            num_splits,
            self._scratch,
        )


def prefill_tile(head_size: int, dtype: torch.dtype) -> Tile:
    """The prefill kernel's tile: the fastest of `benchmarks/attention.py --sweep` on an H200."""
    if dtype == torch.float32:
        # Exact float32 has no tensor cores: the products run in registers, of which there are few.
        return Tile(32, 32, 8, 1) if head_size <= 128 else Tile(32, 16, 8, 1)
    if head_size <= 64:
        return Tile(64, 128, 4, 2)
    return Tile(128, 128, 8, 3) if head_size <= 128 else Tile(128, 32, 8, 3)


def decode_tile(head_size: int, dtype: torch.dtype) -> Tile:
    """The decode kernel's tile: three programs fit into a multiprocessor, all loading ahead."""
    if dtype == torch.float32:
        return Tile(16, 32, 8, 2)
    if head_size <= 64:
        return Tile(16, 64, 4, 4)
    return Tile(16, 64, 4, 3) if head_size <= 128 else Tile(16, 32, 4, 3)


def _num_sms(device: torch.device) -> int:
    if device.type != "cuda":  # interpreted: one program at a time
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def _check_dtype(dtype: torch.dtype) -> None:
    if dtype not in SUPPORTED_DTYPES:
        raise ConfigError(
            f"Triton attention: dtype={dtype} is not supported, expected one of "
            f"{', '.join(map(str, SUPPORTED_DTYPES))}; use attention_backend='torch'"
        )
    if dtype == torch.bfloat16 and triton_interpreted():
        raise ConfigError(
            "Triton attention: Triton's interpreter multiplies bfloat16 as if it were integers; "
            "with TRITON_INTERPRET=1 use dtype='float32' or 'float16'"
        )


def _check_shape(
    num_heads: int, num_kv_heads: int, head_size: int, block_size: int, scale: float
) -> None:
    if num_kv_heads < 1 or num_heads < 1 or num_heads % num_kv_heads:
        raise ConfigError(
            f"Triton attention: num_heads={num_heads}, num_kv_heads={num_kv_heads}: expected "
            "positive numbers, the first a multiple of the second"
        )
    if head_size < 8 or head_size > MAX_HEAD_SIZE or head_size % 8:
        raise ConfigError(
            f"Triton attention: head_size={head_size} is not supported, expected a multiple of 8 "
            f"from 8 to {MAX_HEAD_SIZE}; use attention_backend='torch'"
        )
    if block_size < 1 or block_size & (block_size - 1):
        raise ConfigError(
            f"Triton attention: block_size={block_size}: expected a power of two, such as 16"
        )
    if not scale > 0:
        raise ConfigError(f"Triton attention: scale={scale}: expected a positive number")
