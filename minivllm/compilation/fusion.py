"""Fusion passes of our own: chains of operations in a piece's graph become one operation each.

Inductor fuses point-wise chains by itself, and does it well. A pass of one's own is for what it
does not know: a kernel that somebody has tuned, or a collective that can normalise on its way. A
pass is a pattern and a replacement, both written as plain functions; torch's pattern matcher traces
them and looks for the one to put the other in its place.

None is on by default: Inductor fuses these chains too, and none of ours has been shown to be
faster. To add one, such as all-reduce followed by the norm, add a function to `FUSIONS`.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.pattern_matcher import PatternMatcherPass, fwd_only, register_replacement

from minivllm.config import ModelConfig
from minivllm.layers import fused


@dataclass(frozen=True)
class Fusion:
    """A chain and what stands for it.

    Attributes:
        search: The chain, as a function of tensors.
        replace: A function of the same tensors with the same results.
        example_inputs: To trace both with.
    """

    search: Callable[..., Any]
    replace: Callable[..., Any]
    example_inputs: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class FusedGraph:
    """What the passes did to a graph.

    Attributes:
        before: The graph as text.
        after: Likewise.
        counts: Chains replaced, by fusion.
    """

    before: str
    after: str
    counts: dict[str, int]


class FusionPass(CustomGraphPass):
    """All chosen fusions, one after another, over the graph of one piece.

    Args:
        names: Of `FUSIONS`.
        config: The model's: shapes and constants of the patterns.
        dtype: Of activations.
        device: The model's.

    Attributes:
        fused: What was done to each graph so far.
    """

    def __init__(
        self, names: Collection[str], config: ModelConfig, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.fused: list[FusedGraph] = []
        self._passes: dict[str, PatternMatcherPass] = {}
        self._identity = repr((sorted(names), config, dtype, device))
        with torch.device(device):
            for name in names:
                fusion = FUSIONS[name](config, dtype)
                if fusion is not None:
                    self._passes[name] = matcher = PatternMatcherPass(pass_name=name)
                    register_replacement(
                        fusion.search, fusion.replace, fusion.example_inputs, _traced, matcher
                    )

    def __call__(self, graph: fx.Graph) -> None:
        """Replaces what is found, in place."""
        before = str(graph)
        counts = {name: int(matcher.apply(graph)) for name, matcher in self._passes.items()}
        self.fused.append(FusedGraph(before, str(graph), counts))

    def uuid(self) -> str:
        """What Inductor's own cache has to know of this pass."""
        source = inspect.getsource(inspect.getmodule(FusionPass)) + inspect.getsource(fused)  # type: ignore[arg-type]
        return hashlib.sha256((source + self._identity).encode()).hexdigest()


def _traced(fn: Callable[..., Any], *inputs: Any, **options: Any) -> fx.GraphModule:
    """A function's graph as it looks inside a piece: decomposed, and without operations in place.

    The options are torch's: the pattern matcher chooses them when it calls this.
    """
    # In this order: it is the decomposition of the norm that works in place.
    decomposed = fwd_only(fn, *inputs, **options)
    return fwd_only(torch.func.functionalize(decomposed), *inputs, **options)


def _add_rms_norm(config: ModelConfig, dtype: torch.dtype) -> Fusion:
    eps, x = config.rms_norm_eps, torch.empty(4, config.hidden_size, dtype=dtype)

    def search(residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> Any:
        return fused.add_rms_norm(residual, x, weight, eps)

    def replace(residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> Any:
        return torch.ops.minivllm.add_rms_norm(residual, x, weight, eps)

    return Fusion(search, replace, (x, x.clone(), x[0].clone()))


def _silu_mul(config: ModelConfig, dtype: torch.dtype) -> Fusion:
    return Fusion(
        lambda gate_up: fused.silu_mul(gate_up),
        lambda gate_up: torch.ops.minivllm.silu_mul(gate_up),
        (torch.empty(4, 2 * config.intermediate_size, dtype=dtype),),
    )


def _qk_norm_rope(config: ModelConfig, dtype: torch.dtype) -> Fusion | None:
    if not config.qk_norm:
        return None
    num_heads, eps = config.num_attention_heads, config.rms_norm_eps

    def search(
        query_key: torch.Tensor,
        query_weight: torch.Tensor,
        key_weight: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> Any:
        return fused.qk_norm_rope(query_key, query_weight, key_weight, cos, sin, num_heads, eps)

    def replace(
        query_key: torch.Tensor,
        query_weight: torch.Tensor,
        key_weight: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> Any:
        return torch.ops.minivllm.qk_norm_rope(
            query_key, query_weight, key_weight, cos, sin, num_heads, eps
        )

    heads = num_heads + config.num_key_value_heads
    query_key = torch.empty(4, heads, config.head_dim, dtype=dtype)
    weight, angles = query_key[0, 0].clone(), query_key[:, :1].clone()
    return Fusion(search, replace, (query_key, weight, weight.clone(), angles, angles.clone()))


# By name; a function gives None for a model that has no such chain.
FUSIONS: dict[str, Callable[[ModelConfig, torch.dtype], Fusion | None]] = {
    "add_rms_norm": _add_rms_norm,
    "silu_mul": _silu_mul,
    "qk_norm_rope": _qk_norm_rope,
}
