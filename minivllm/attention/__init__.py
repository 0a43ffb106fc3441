"""Paged attention: the interface, its backends, and the choice between them."""

from __future__ import annotations

import torch

from minivllm.attention.backend import AttentionBackend
from minivllm.config import EngineConfig, ModelConfig


def make_backend(config: EngineConfig, model: ModelConfig) -> AttentionBackend:
    """Builds the backend that the configuration names.

    Raises:
        ConfigError: The backend cannot do the model's head size or the dtype.
    """
    shape = (
        model.num_attention_heads,
        model.num_key_value_heads,
        model.head_dim,
        config.cache.block_size,
        model.head_dim**-0.5,
    )
    # Imported late: triton is not installed everywhere, and costs time where it is.
    if config.attention_backend == "triton":
        from minivllm.attention.triton_backend import TritonAttentionBackend

        return TritonAttentionBackend(*shape, dtype=getattr(torch, config.dtype))
    from minivllm.attention.torch_backend import TorchAttentionBackend

    return TorchAttentionBackend(*shape)
