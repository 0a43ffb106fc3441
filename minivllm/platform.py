"""What this machine can do: asked in one place, so that every default has one reason."""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec


@cache
def has_cuda() -> bool:
    """Whether torch sees a CUDA device."""
    import torch

    return torch.cuda.is_available()


def triton_interpreted() -> bool:
    """Whether Triton kernels run in Python, on the CPU (`TRITON_INTERPRET=1`)."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def has_triton(device: str = "cuda") -> bool:
    """Whether Triton kernels can run on `device` (`cpu` only by interpretation)."""
    if find_spec("triton") is None:
        return False
    return triton_interpreted() if device == "cpu" else has_cuda()
