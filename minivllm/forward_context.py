"""What a step's attention needs to know but a model's `forward` does not take as an argument.

A model is called with token ids and positions only. Which cache belongs to a layer, and where the
requests of this step lie, reaches the attention layers through this context, by the layer's name.
It is the one global of the project, and the reason is the compiler: whatever is passed as an
argument becomes an input of the traced graph, and step-dependent metadata must not be one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from minivllm.attention.backend import AttentionMetadata

if TYPE_CHECKING:
    from minivllm.layers.attention import Attention


@dataclass(frozen=True)
class ForwardContext:
    """Valid during one forward pass.

    Attributes:
        attn_metadata: The step's; None in a profiling run, in which attention is skipped.
        attention_layers: The model's attention layers, by name.
    """

    attn_metadata: AttentionMetadata | None
    attention_layers: Mapping[str, Attention] = field(default_factory=dict)


_current: ForwardContext | None = None


@contextmanager
def set_forward_context(context: ForwardContext) -> Iterator[None]:
    """Makes `context` the current one inside the `with` block."""
    global _current
    previous, _current = _current, context
    try:
        yield
    finally:
        _current = previous


def get_forward_context() -> ForwardContext:
    """Returns the current context.

    Raises:
        RuntimeError: A model was called outside `set_forward_context`.
    """
    if _current is None:
        raise RuntimeError("no forward context: call the model inside set_forward_context(...)")
    return _current
