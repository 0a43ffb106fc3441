"""Names the content of a graph, so that equal pieces are found and compiled once.

Thirty equal layers differ in the names of their nodes and in the parameters they are given, and in
nothing else. A signature is a hash over what does matter: operations, who feeds whom, constants,
and the shapes, dtypes, strides and devices of the inputs. Symbolic sizes are numbered in the order
in which they appear, so that `s77` in one piece is `s3` in another.
"""

from __future__ import annotations

import hashlib
import operator
import re
from typing import Any

import torch
from torch import fx

_SYMBOL = re.compile(r"\b[su]\d+\b")


def graph_signature(graph: fx.GraphModule) -> str:
    """Hash of a graph's structure, in hexadecimal."""
    lines: list[str] = []
    index_of: dict[fx.Node, int] = {}
    for index, node in enumerate(graph.graph.nodes):
        index_of[node] = index
        args = _describe(node.args, index_of), _describe(node.kwargs, index_of)
        if node.op == "placeholder":
            lines.append(f"input {_describe_value(example_value(node))}")
        else:
            lines.append(f"{node.op} {_target(node, graph)} {args}")
    text = "\n".join(lines)
    symbols: dict[str, str] = {}
    text = _SYMBOL.sub(lambda m: symbols.setdefault(m[0], f"symbol{len(symbols)}"), text)
    return hashlib.sha256(text.encode()).hexdigest()


def example_value(node: fx.Node) -> Any:
    """What Dynamo saw there: a fake tensor or a symbolic integer."""
    return node.meta["example_value"] if "example_value" in node.meta else node.meta.get("val")


def _target(node: fx.Node, graph: fx.GraphModule) -> str:
    if node.op == "get_attr":  # a constant of the trace: its content counts, not its name
        return _describe_constant(operator.attrgetter(str(node.target))(graph))
    if isinstance(node.target, str | torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return str(node.target)
    return f"{node.target.__module__}.{node.target.__qualname__}"


def _describe_constant(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    # Every byte: printed, a tensor is rounded to four digits and a long one cut in the middle, and
    # two layers with different tables would share the code of the first.
    content = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return f"{_describe_value(value)} {hashlib.sha256(content).hexdigest()}"


def _describe(value: Any, index_of: dict[fx.Node, int]) -> str:
    if isinstance(value, fx.Node):
        return f"%{index_of[value]}"
    if isinstance(value, tuple | list):
        return f"[{', '.join(_describe(item, index_of) for item in value)}]"
    if isinstance(value, slice):
        return f"slice{_describe((value.start, value.stop, value.step), index_of)}"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{k}: {_describe(v, index_of)}' for k, v in value.items())}}}"
    return repr(value)


def _describe_value(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        strides = value.stride() if value.layout == torch.strided else ""
        return f"{tuple(value.shape)} {strides} {value.dtype} {value.device} {value.layout}"
    return f"{type(value).__name__} {value}"
