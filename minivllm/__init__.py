"""minivllm: vLLM V1's execution design, small enough to read and fast enough to use.

The public names are imported on first use, so that `minivllm --help` does not pay for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from minivllm.version import __version__

if TYPE_CHECKING:
    from minivllm.engine.llm import LLM
    from minivllm.engine.request import CompletionOutput, RequestOutput
    from minivllm.sampling_params import SamplingParams

_PUBLIC = {
    "LLM": "minivllm.engine.llm",
    "SamplingParams": "minivllm.sampling_params",
    "RequestOutput": "minivllm.engine.request",
    "CompletionOutput": "minivllm.engine.request",
}

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'minivllm' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)
