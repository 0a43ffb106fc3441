"""RMSNorm (Zhang and Sennrich 2019): scales a vector to a root mean square of one."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class RMSNorm(nn.Module):
    """`x / sqrt(mean(x^2) + eps) * weight`, over the last dimension, computed in float32.

    Args:
        size: Width of the last dimension.
        eps: Added to the mean square, so that a zero vector stays finite.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps `[..., size]` to the same shape."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
