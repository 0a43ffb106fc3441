"""Cuts a traced graph at the operations that must not be compiled.

Attention depends on the step: its metadata, its kernel, sometimes its launch grid. So it stays
outside, and a model of L layers becomes L + 1 computing pieces with L attention calls between them.
The order of the graph is kept as it was traced, because operations that write into their arguments
do not say so to a graph's data flow.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import fx
from torch.fx.passes.split_module import split_module

from minivllm.errors import ConfigError

_ALLOCATIONS = (torch.empty, torch.empty_like, "new_empty")


@dataclass(frozen=True)
class SplitPiece:
    """One part of a split graph.

    Attributes:
        name: Of the submodule in the stitching graph.
        graph: Its operations; parameters and symbolic sizes are inputs like any other.
        is_splitting: Whether it holds splitting operations, and is run as it is.
    """

    name: str
    graph: fx.GraphModule
    is_splitting: bool


def split_graph(
    graph: fx.GraphModule, splitting_ops: Collection[str]
) -> tuple[fx.GraphModule, list[SplitPiece]]:
    """Splits a graph.

    Args:
        graph: As Dynamo traced it.
        splitting_ops: Names such as `minivllm::attention_with_output`. Neighbours share a piece.

    Returns:
        The stitching graph, which calls the pieces in order, and the pieces.
    """
    part_of, splitting_parts = _assign_parts(graph, splitting_ops)
    stitched = split_module(graph, graph, lambda node: part_of[node], keep_original_order=True)
    pieces = [
        SplitPiece(name, module, int(name.removeprefix("submod_")) in splitting_parts)
        for name, module in stitched.named_children()
        if isinstance(module, fx.GraphModule)
    ]
    return stitched, pieces


def _assign_parts(
    graph: fx.GraphModule, splitting_ops: Collection[str]
) -> tuple[dict[fx.Node, int], set[int]]:
    """The part of each node, and which parts hold splitting operations."""
    part_of: dict[fx.Node, int] = {}
    splitting_parts: set[int] = set()
    part, inside_split = 0, False
    lone_allocations = _allocations_before_a_split(graph, splitting_ops)
    for node in graph.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if node.op == "call_function" and node.target is operator.getitem:
            part_of[node] = part_of.get(node.args[0], part)  # a tuple never leaves its piece
            continue
        known_before = all(part_of.get(source, -1) < part for source in node.all_input_nodes)
        if inside_split and node in lone_allocations and known_before:
            # A piece of an allocation alone would be compiled, run and recorded for no work.
            part_of[node] = part - 1
            continue
        is_split = op_name(node) in splitting_ops
        if is_split != inside_split:
            part, inside_split = part + 1, is_split
        if is_split:
            splitting_parts.add(part)
        part_of[node] = part
    return part_of, splitting_parts


def _allocations_before_a_split(
    graph: fx.GraphModule, splitting_ops: Collection[str]
) -> set[fx.Node]:
    """Allocations with nothing but allocations between them and the next splitting operation."""
    found: set[fx.Node] = set()
    before_split = False
    for node in reversed(graph.graph.nodes):
        if op_name(node) in splitting_ops:
            before_split = True
        elif node.target not in _ALLOCATIONS:
            before_split = False
        elif before_split:
            found.add(node)
    return found


def op_name(node: fx.Node) -> str | None:
    """The name of a node's custom or aten operation, such as `aten::mm`; None for anything else.

    Dynamo records an operation as an overload or as the packet of its overloads; both count.
    """
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target.name().split(".")[0]
    if isinstance(node.target, torch._ops.OpOverloadPacket):
        return node.target._qualified_op_name
    return None


def check_splitting_ops(splitting_ops: Collection[str]) -> None:
    """Refuses names that no operation has.

    Raises:
        ConfigError: Names the operations of this project, since those are what one splits at.
    """
    for name in splitting_ops:
        namespace, _, short = name.partition("::")
        if not short or not hasattr(getattr(torch.ops, namespace), short):
            known = sorted(
                schema.name
                for schema in torch._C._jit_get_all_schemas()
                if schema.name.startswith("minivllm::")
            )
            raise ConfigError(
                f"splitting_ops: there is no operation {name!r}; the operations of minivllm are "
                f"{', '.join(known)}"
            )
