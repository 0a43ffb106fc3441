"""The attention layer: the place where a layer's slice of the KV cache meets the step's metadata.

The layer computes nothing itself. It knows its cache, finds the step's metadata in the forward
context, and asks the backend to write the new keys and values and to fill `output`, which its
caller allocated. Nothing is returned, so the address of the result is the caller's choice.

While a model is traced, the call becomes one custom op, `minivllm::attention_with_output`, that the
compiler cannot look into. The op gets its layer by name, at run time, from the forward context: so
neither the cache nor the metadata of a step ever becomes an input of the traced graph.
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
        name: Of this layer, unique in its model.

    Attributes:
        kv_cache: The layer's part of the cache, set by the worker before the first step;
            `[2, num_blocks, block_size, num_kv_heads, head_size]`.
    """

    kv_cache: torch.Tensor

    def __init__(self, backend: AttentionBackend, name: str) -> None:
        super().__init__()
        self.backend = backend
        self.name = name

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor
    ) -> None:
        """Fills `output`, `[num_tokens, num_heads, head_size]`; shapes as in `AttentionBackend`."""
        if torch.compiler.is_compiling():
            torch.ops.minivllm.attention_with_output(query, key, value, output, self.name)
        else:
            self.attend(query, key, value, output)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor
    ) -> None:
        """Does what `forward` promises, now."""
        metadata = get_forward_context().attn_metadata
        if metadata is None:  # profiling: there is no cache yet, and memory is what is measured
            output.zero_()
            return
        self.backend.forward(query, key, value, self.kv_cache, output, metadata)


def _attention_with_output(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    layer_name: str,
) -> None:
    layer = get_forward_context().attention_layers[layer_name]
    layer.attend(query, key, value, output)


def _attention_without_data(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    layer_name: str,
) -> None:
    """For tracing: nothing is returned, so there is no shape to say."""


# Defined by hand rather than by `torch.library.custom_op`, whose wrapper costs more than the op.
# The library object must live as long as the op. That `output` is written is part of the schema: an
# effect that is not declared, of an op without a used result, is removed as dead code.
_library = torch.library.Library("minivllm", "FRAGMENT")
_library.define(
    "attention_with_output(Tensor query, Tensor key, Tensor value, Tensor(a!) output, "
    "str layer_name) -> ()"
)
for _device in ("CPU", "CUDA"):
    _library.impl("attention_with_output", _attention_with_output, _device)
_library._register_fake("attention_with_output", _attention_without_data)
