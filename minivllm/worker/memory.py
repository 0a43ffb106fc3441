"""How many KV blocks fit, and where they are.

On a GPU the pool takes what is left: the memory the user allows, minus what weights and the largest
possible step take, which is measured by running one. On a CPU there is no such line, so the pool
takes a modest share of the memory that is free.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from minivllm.config import EngineConfig, ModelConfig
from minivllm.errors import OutOfMemoryError
from minivllm.models.decoder import DecoderForCausalLM
from minivllm.worker.model_runner import ModelRunner

logger = logging.getLogger(__name__)

_CPU_POOL_BYTES = 4 << 30  # at most; a CPU computes too slowly to fill more
_CPU_POOL_SHARE = 0.5  # of the memory that is free


def kv_bytes_per_block(config: EngineConfig, model: ModelConfig) -> int:
    """Bytes of one block over all layers, keys and values."""
    itemsize = getattr(torch, config.dtype).itemsize
    per_token = 2 * model.num_hidden_layers * model.kv_size * itemsize
    return per_token * config.cache.block_size


def choose_num_kv_blocks(
    config: EngineConfig, model: ModelConfig, runner: ModelRunner, max_model_len: int
) -> int:
    """Decides the size of the pool, in blocks.

    Raises:
        OutOfMemoryError: There is no room for a single block.
    """
    if config.cache.num_kv_blocks is not None:
        return config.cache.num_kv_blocks
    available = _cpu_budget() if config.device == "cpu" else _cuda_budget(config, runner)
    num_blocks = available // kv_bytes_per_block(config, model) - 1  # one for the null block
    if num_blocks < 1:
        raise OutOfMemoryError(
            f"no memory is left for the KV cache ({available / 2**30:.2f} GiB after the weights); "
            "use a smaller model, a smaller dtype, fewer max_num_batched_tokens, or raise "
            "gpu_memory_utilization"
        )
    # More than all sequences at full length could never be used.
    most = config.scheduler.max_num_seqs * -(-max_model_len // config.cache.block_size)
    return min(num_blocks, most)


def allocate_kv_cache(config: EngineConfig, model: DecoderForCausalLM, num_blocks: int) -> None:
    """Allocates the cache and gives every layer its part; block 0 is the null block on top."""
    layers = model.attention_layers()
    shape = layers[0].backend.kv_cache_shape(num_blocks + 1)
    dtype = getattr(torch, config.dtype)
    size = len(layers) * math.prod(shape) * dtype.itemsize
    free = _free_host_memory() if config.device == "cpu" else torch.cuda.mem_get_info()[0]
    # Asked first, because a system promises host memory that it does not have, and ends the process
    # when the cache fills up.
    if size > free:
        raise OutOfMemoryError(
            f"a KV cache of {num_blocks} blocks takes {size / 2**30:.1f} GiB, but only "
            f"{free / 2**30:.1f} GiB are free; lower num_kv_blocks"
        )
    for layer in layers:
        layer.kv_cache = _zeros(shape, dtype, config.device)
    logger.info("KV cache: %d blocks, %.2f GiB", num_blocks, size / 2**30)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    if device == "cpu":
        # numpy asks the system for zeroed pages, which cost nothing until they are used; torch
        # writes every zero, several seconds for a large pool.
        memory = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
        return torch.from_numpy(memory).view(dtype).view(shape)
    return torch.zeros(shape, dtype=dtype, device=device)


@contextmanager
def explain_out_of_memory(what: str) -> Iterator[None]:
    """Turns an allocator's failure into one line that says what did not fit."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        # What torch says next is advice on an allocator mode whose memory other ranks cannot open.
        reason = str(error).split(". ")[0]
        raise OutOfMemoryError(f"{what} do not fit into the GPU's memory: {reason}") from error
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "can't allocate memory" not in str(error):
            raise
        raise OutOfMemoryError(f"{what} do not fit into memory: {error}") from error


def _cpu_budget() -> int:
    return min(_CPU_POOL_BYTES, int(_free_host_memory() * _CPU_POOL_SHARE))


def _free_host_memory() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cuda_budget(config: EngineConfig, runner: ModelRunner) -> int:
    """Bytes that the user allows, minus what the engine takes without a cache."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    with explain_out_of_memory("the activations of the largest step"):
        runner.profile(config.scheduler.max_num_batched_tokens, config.scheduler.max_num_seqs)
        torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    # What others, and the CUDA context itself, hold beside torch's own allocations.
    outside_torch = total - free - torch.cuda.memory_reserved()
    peak = torch.cuda.max_memory_allocated() + outside_torch
    torch.cuda.empty_cache()
    return int(total * config.cache.gpu_memory_utilization) - peak
