# mypy: disable-error-code="no-untyped-def"
"""The Triton kernels behind `fused.py`: one program per row, all arithmetic in float32."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_SILU_COLUMNS = 1024


@triton.jit
def _add_rms_norm_kernel(
    residual, x, weight, normed, total, size: tl.constexpr, eps, block: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * size
    columns = tl.arange(0, block)
    mask = columns < size
    value = tl.load(residual + row + columns, mask, 0.0).to(tl.float32)
    value += tl.load(x + row + columns, mask, 0.0).to(tl.float32)
    # The norm is that of the sum as it is stored, as without fusion.
    value = value.to(total.dtype.element_ty)
    tl.store(total + row + columns, value, mask)
    value = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / size + eps)
    scaled = value * scale * tl.load(weight + columns, mask, 0.0).to(tl.float32)
    tl.store(normed + row + columns, scaled.to(normed.dtype.element_ty), mask)


def add_rms_norm(
    residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `fused.add_rms_norm`."""
    residual, x = residual.contiguous(), x.contiguous()
    normed, total = torch.empty_like(x), torch.empty_like(x)
    size = x.shape[1]
    block = triton.next_power_of_2(size)
    _add_rms_norm_kernel[(x.shape[0],)](residual, x, weight, normed, total, size, eps, block)
    return normed, total


@triton.jit
def _silu_mul_kernel(gate_up, out, size: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    mask = columns < size
    gate = tl.load(gate_up + row * 2 * size + columns, mask, 0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * size + size + columns, mask, 0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * size + columns, value.to(out.dtype.element_ty), mask)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `fused.silu_mul`."""
    gate_up = gate_up.contiguous()
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_tokens, size)
    grid = (num_tokens, triton.cdiv(size, _SILU_COLUMNS))
    _silu_mul_kernel[grid](gate_up, out, size, _SILU_COLUMNS)
    return out


@triton.jit
def _qk_norm_rope_kernel(
    query_key, query_weight, key_weight, cos, sin, out, token_stride, head_stride, num_heads, eps,
    half: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, block)
    mask = columns < half
    source = query_key + token * token_stride + head * head_stride + columns
    first = tl.load(source, mask, 0.0).to(tl.float32)
    second = tl.load(source + half, mask, 0.0).to(tl.float32)
    scale = tl.rsqrt((tl.sum(first * first, 0) + tl.sum(second * second, 0)) / (2 * half) + eps)
    weight = query_weight if head < num_heads else key_weight
    first *= scale * tl.load(weight + columns, mask, 0.0).to(tl.float32)
    second *= scale * tl.load(weight + half + columns, mask, 0.0).to(tl.float32)
    angle = token * 2 * half + columns
    cos_first = tl.load(cos + angle, mask, 0.0).to(tl.float32)
    cos_second = tl.load(cos + angle + half, mask, 0.0).to(tl.float32)
    sin_first = tl.load(sin + angle, mask, 0.0).to(tl.float32)
    sin_second = tl.load(sin + angle + half, mask, 0.0).to(tl.float32)
    target = out + (token * tl.num_programs(1) + head) * 2 * half + columns
    dtype = out.dtype.element_ty
    tl.store(target, (first * cos_first - second * sin_first).to(dtype), mask)
    tl.store(target + half, (second * cos_second + first * sin_second).to(dtype), mask)


def qk_norm_rope(
    query_key: torch.Tensor,
    query_weight: torch.Tensor,
    key_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    num_heads: int,
    eps: float,
) -> torch.Tensor:
    """See `fused.qk_norm_rope`."""
    num_tokens, all_heads, head_dim = query_key.shape
    if query_key.stride(2) != 1:
        query_key = query_key.contiguous()
    out = query_key.new_empty(query_key.shape)
    half = head_dim // 2
    _qk_norm_rope_kernel[(num_tokens, all_heads)](
        query_key,
        query_weight,
        key_weight,
        cos.contiguous(),
        sin.contiguous(),
        out,
        query_key.stride(0),
        query_key.stride(1),
        num_heads,
        eps,
        half,
        triton.next_power_of_2(half),
    )
    return out
