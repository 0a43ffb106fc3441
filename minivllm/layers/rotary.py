"""Rotary position embedding (Su et al. 2021): a token's position turns its queries and keys.

Pairs of coordinates `(i, i + head_dim / 2)` are rotated by `position * frequency[i]`, so that the
product of a query and a key depends only on how far apart they are. Cosines and sines of all
positions are computed once, at the start, and looked up once a step for all
layers.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from minivllm.config import ModelConfig, RopeScaling


def rotary_frequencies(config: ModelConfig) -> torch.Tensor:
    """Angle per position of each coordinate pair, in radians; float32 `[head_dim / 2]`.

    Float32, because that is what the models were trained with.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    if config.rope_scaling is not None:
        frequencies = _scale_llama3(frequencies, config.rope_scaling)
    return frequencies


def _scale_llama3(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Slows the frequencies whose wavelength exceeds what the model was first trained on."""
    wavelengths = 2 * math.pi / frequencies
    length = scaling.original_max_position_embeddings
    # 0 for wavelengths that are slowed in full, 1 for those that stay as they are
    keep = (length / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    keep = keep.clamp(0.0, 1.0)
    return frequencies * (keep + (1.0 - keep) / scaling.factor)


class RotaryEmbedding(nn.Module):
    """Looks up the cosines and sines of a step's positions.

    Args:
        config: The model's.
        max_position: Positions to prepare, in tokens.
    """

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, config: ModelConfig, max_position: int) -> None:
        super().__init__()
        # Built on the CPU whatever the default device is: the table must be the same everywhere.
        with torch.device("cpu"):
            positions = torch.arange(max_position, dtype=torch.float32)
            angles = torch.outer(positions, rotary_frequencies(config))  # [max_position, dim / 2]
        angles = torch.cat((angles, angles), dim=-1)  # both halves turn by the same angle
        device = torch.get_default_device()
        self.register_buffer("cos", angles.cos().to(device, torch.get_default_dtype()), False)
        self.register_buffer("sin", angles.sin().to(device, torch.get_default_dtype()), False)

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Maps positions `[num_tokens]` to cosines and sines, each `[num_tokens, 1, head_dim]`."""
        return self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turns every head of `x` by its token's angles.

    Args:
        x: `[num_tokens, num_heads, head_dim]`.
        cos: `[num_tokens, 1, head_dim]`.
        sin: Likewise.

    Returns:
        A new tensor, shaped as `x`.
    """
    first, second = x.chunk(2, dim=-1)
    quarter_turned = torch.cat((-second, first), dim=-1)
    return torch.addcmul(x * cos, quarter_turned, sin)
