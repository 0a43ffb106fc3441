"""The smallest Triton kernel there is; `minivllm doctor` runs it to see whether Triton works."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def _add_one(values, size, block: tl.constexpr):  # type: ignore[no-untyped-def]
    offsets = tl.program_id(0) * block + tl.arange(0, block)
    mask = offsets < size
    tl.store(values + offsets, tl.load(values + offsets, mask=mask) + 1, mask=mask)


def run_kernel(device: str) -> None:
    """Adds one to 100 numbers, in blocks of 64.

    Args:
        device: `cuda` compiles the kernel; `cpu` interprets it, whatever the environment says.

    Raises:
        RuntimeError: The sum is wrong.
    """
    if device == "cpu":
        from triton.runtime.interpreter import InterpretedFunction

        kernel = InterpretedFunction(_add_one)
    else:
        kernel = triton.jit(_add_one)
    values = torch.zeros(100, device=device)
    kernel[(2,)](values, 100, block=64)
    if values.sum().item() != 100:
        raise RuntimeError("a kernel ran, but what it computed is wrong")
