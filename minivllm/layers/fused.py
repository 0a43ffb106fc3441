"""Chains of small operations as one operation each, for the fusion passes of the compiler.

A chain between two matrix products reads and writes the same few rows again and again. Each of
these operations reads them once: on a GPU with a kernel of ours, elsewhere with torch's operations,
so that a pass can be tried, shown and tested on any machine.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from minivllm.layers.rotary import apply_rotary


def add_rms_norm(
    residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of `residual + x`, and that sum; all `[num_tokens, size]`."""
    total = residual + x
    return F.rms_norm(total, weight.shape, weight, eps), total


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` of `[num_tokens, 2 * size]`, to `[num_tokens, size]`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def qk_norm_rope(
    query_key: torch.Tensor,
    query_weight: torch.Tensor,
    key_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    num_heads: int,
    eps: float,
) -> torch.Tensor:
    """Norms every head, with a weight for queries and one for keys, and turns it.

    Args:
        query_key: `[num_tokens, num_heads + num_kv_heads, head_dim]`.
        query_weight: `[head_dim]`.
        key_weight: Likewise.
        cos: `[num_tokens, 1, head_dim]`.
        sin: Likewise.
        num_heads: Of queries; they come first.
        eps: Of the norms.

    Returns:
        A new tensor, shaped as `query_key`.
    """
    query, key = query_key.split([num_heads, query_key.shape[1] - num_heads], dim=1)
    query = F.rms_norm(query, query_weight.shape, query_weight, eps)
    key = F.rms_norm(key, key_weight.shape, key_weight, eps)
    return apply_rotary(torch.cat((query, key), dim=1), cos, sin)


def _add_rms_norm_cuda(
    residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    from minivllm.layers import fused_kernels

    return fused_kernels.add_rms_norm(residual, x, weight, eps)


def _silu_mul_cuda(gate_up: torch.Tensor) -> torch.Tensor:
    from minivllm.layers import fused_kernels

    return fused_kernels.silu_mul(gate_up)


def _qk_norm_rope_cuda(
    query_key: torch.Tensor,
    query_weight: torch.Tensor,
    key_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    num_heads: int,
    eps: float,
) -> torch.Tensor:
    from minivllm.layers import fused_kernels

    return fused_kernels.qk_norm_rope(query_key, query_weight, key_weight, cos, sin, num_heads, eps)


_library = torch.library.Library("minivllm", "FRAGMENT")
_library.define(
    "add_rms_norm(Tensor residual, Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)"
)
_library.define("silu_mul(Tensor gate_up) -> Tensor")
_library.define(
    "qk_norm_rope(Tensor query_key, Tensor query_weight, Tensor key_weight, Tensor cos, "
    "Tensor sin, int num_heads, float eps) -> Tensor"
)
for _name, _cpu, _cuda in (
    ("add_rms_norm", add_rms_norm, _add_rms_norm_cuda),
    ("silu_mul", silu_mul, _silu_mul_cuda),
    ("qk_norm_rope", qk_norm_rope, _qk_norm_rope_cuda),
):
    _library.impl(_name, _cpu, "CPU")
    _library.impl(_name, _cuda, "CUDA")
# Shapes follow from the inputs; the results are always new and contiguous.
_library._register_fake(
    "add_rms_norm",
    lambda residual, x, weight, eps: (x.new_empty(x.shape), x.new_empty(x.shape)),
)
_library._register_fake(
    "silu_mul", lambda gate_up: gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
)
_library._register_fake("qk_norm_rope", lambda query_key, *_: query_key.new_empty(query_key.shape))
