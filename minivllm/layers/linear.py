"""Matrix products, several of a checkpoint's in one, in the layout that the device likes best.

A checkpoint has separate weights for query, key and value, and for the MLP's gate and up
projections. They are applied to the same input, so one product with their rows stacked gives all of
them and reads the input once. Each original tensor is loaded into its rows.

On a CPU the weights are then reordered into oneDNN's blocked layout. A decode step reads every
weight once for a handful of rows, and the plain layout reaches only half of the memory's bandwidth
there (`benchmarks/generate.py` measures both).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.nn import functional as F


class MergedLinear(nn.Module):
    """`y = x @ W.T + b`, where `W` has the rows of several projections, one after another.

    Args:
        input_size: Width of the input.
        output_sizes: Rows of each projection, by its name in the checkpoint.
        bias: Whether all of them have a bias, or none.
    """

    def __init__(self, input_size: int, output_sizes: Mapping[str, int], bias: bool) -> None:
        super().__init__()
        self.output_sizes = dict(output_sizes)
        total = sum(self.output_sizes.values())
        self.weight = nn.Parameter(torch.empty(total, input_size), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(total), requires_grad=False) if bias else None
        self.packed: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps `[num_tokens, input_size]` to `[num_tokens, sum(output_sizes)]`."""
        if self.packed is not None:
            return packed_linear(x, self.packed, self.bias)
        return F.linear(x, self.weight, self.bias)

    def pack(self) -> None:
        """Reorders the weight for oneDNN and frees the plain one; call after loading."""
        self.packed = pack_weight(self.weight.data)
        self.weight = nn.Parameter(torch.empty(0), requires_grad=False)

    def weight_targets(self, prefix: str) -> dict[str, torch.Tensor]:
        """Views into which the checkpoint's tensors go, by their names there."""
        targets, start = {}, 0
        for name, size in self.output_sizes.items():
            targets[f"{prefix}.{name}.weight"] = self.weight.data[start : start + size]
            if self.bias is not None:
                targets[f"{prefix}.{name}.bias"] = self.bias.data[start : start + size]
            start += size
        return targets


def can_pack(device: str, dtype: str) -> bool:
    """Whether weights on this device and of this dtype have a packed layout."""
    if device != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    # Half-width products need instructions that not every CPU has; oneDNN refuses them otherwise.
    supported = {
        "float32": True,
        "bfloat16": torch.ops.mkldnn._is_mkldnn_bf16_supported(),
        "float16": torch.ops.mkldnn._is_mkldnn_fp16_supported(),
    }
    return supported[dtype]


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    """Reorders `[rows, input_size]` into oneDNN's layout: an opaque tensor for `packed_linear`.

    Inductor does the same when it freezes a model. The layout is left to oneDNN for any number of
    rows of the input: packing for one row made 16 rows half as slow again.
    """
    return torch.ops.mkldnn._reorder_linear_weight(weight, None)


def packed_linear(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`x @ W.T + b` with a weight from `pack_weight`."""
    if torch.compiler.is_compiling():
        return torch.ops.minivllm.packed_linear(x, packed, bias)
    return _packed_linear(x, packed, bias)


def _packed_linear(
    x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


def _packed_linear_shape(
    x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], packed.shape[0])


# Inductor takes a packed weight only as a constant of the graph, and with a constant every layer
# would be a graph of its own. In an op of ours it is an input like any other.
_library = torch.library.Library("minivllm", "FRAGMENT")
_library.define("packed_linear(Tensor x, Tensor packed, Tensor? bias) -> Tensor")
for _key in ("CPU", "MkldnnCPU"):  # the weight's layout is part of what selects an implementation
    _library.impl("packed_linear", _packed_linear, _key)
_library._register_fake("packed_linear", _packed_linear_shape)
