"""Matrix products, several of a checkpoint's in one.

A checkpoint has separate weights for query, key and value, and for the MLP's gate and up
projections. They are applied to the same input, so one product with their rows stacked gives all of
them and reads the input once. Each original tensor is loaded into its rows.
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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps `[num_tokens, input_size]` to `[num_tokens, sum(output_sizes)]`."""
        return F.linear(x, self.weight, self.bias)

    def weight_targets(self, prefix: str) -> dict[str, torch.Tensor]:
        """Views into which the checkpoint's tensors go, by their names there."""
        targets, start = {}, 0
        for name, size in self.output_sizes.items():
            targets[f"{prefix}.{name}.weight"] = self.weight.data[start : start + size]
            if self.bias is not None:
                targets[f"{prefix}.{name}.bias"] = self.bias.data[start : start + size]
            start += size
        return targets
