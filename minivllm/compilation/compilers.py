"""Two ways to make a callable of a piece: run its operations as they are, or let Inductor compile.

`eager` is for looking and for finding faults: same pieces, same splits, nothing generated.
`inductor` fuses chains of operations into kernels. Both are given the same graph and the same
example inputs, and give back a function of the piece's inputs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol
from unittest import mock

import torch
from torch import fx

if TYPE_CHECKING:
    from minivllm.compilation.fusion import FusionPass

logger = logging.getLogger(__name__)

CompiledPiece = Callable[..., Any]


class Compiler(Protocol):
    """What the piecewise backend needs of a compiler."""

    name: str

    def compile(
        self, graph: fx.GraphModule, example_inputs: Sequence[Any], dynamic: bool
    ) -> CompiledPiece:
        """Makes a callable of a piece.

        Args:
            graph: The piece; may be changed.
            example_inputs: Fake tensors and integers, one per input; symbolic if `dynamic`.
            dynamic: For any number of tokens, or for the one that the examples have.
        """


class EagerCompiler:
    """Runs the graph as it was traced."""

    name = "eager"

    def compile(
        self, graph: fx.GraphModule, example_inputs: Sequence[Any], dynamic: bool
    ) -> CompiledPiece:
        """See `Compiler`."""
        return graph.forward


class InductorCompiler:
    """Compiles with Inductor; the results can be written to disk.

    Args:
        fusion_pass: Runs over each piece's graph before anything else does; None for none.
    """

    name = "inductor"

    def __init__(self, fusion_pass: FusionPass | None = None) -> None:
        self.fusion_pass = fusion_pass

    def compile(
        self, graph: fx.GraphModule, example_inputs: Sequence[Any], dynamic: bool
    ) -> CompiledPiece:
        """See `Compiler`."""
        from torch._inductor import standalone_compile

        shapes: Literal["from_graph", "from_example_inputs"]
        shapes = "from_graph" if dynamic else "from_example_inputs"
        options: dict[str, Any] = {"size_asserts": False}  # a packed weight has no strides
        if self.fusion_pass is not None:
            options["post_grad_custom_pre_pass"] = self.fusion_pass
        with torch._inductor.config.patch(options):
            artifact = standalone_compile(graph, list(example_inputs), dynamic_shapes=shapes)
        return InductorPiece(artifact)

    def save(self, compiled: Any, path: Path) -> None:
        """Writes a compiled piece to a file."""
        compiled.artifact.save(path=str(path), format="binary")

    def load(self, path: Path) -> CompiledPiece:
        """Reads it back."""
        from torch._inductor import CompiledArtifact

        return InductorPiece(CompiledArtifact.load(path=str(path), format="binary"))


class InductorPiece:
    """What Inductor compiled, called without the wrappers around it where they do nothing.

    Torch puts wrappers around generated code that copy mutated inputs back, rebuild outputs that
    share memory with an input, and more: some 35 us a call, times the pieces of a model. Most
    pieces need none of it. Whether one does is a property of its graph, so the first call settles
    it: if the very objects that were passed in reach the generated code, and those it returns are
    returned, then the wrappers do nothing, and later calls leave them out.

    Args:
        artifact: From `standalone_compile` or from disk.
    """

    def __init__(self, artifact: Any) -> None:
        self.artifact = artifact
        self._call: CompiledPiece = self._first_call

    def __call__(self, *args: Any) -> Any:
        """Runs the piece; returns a sequence, even of one result."""
        return self._call(*args)

    @property
    def is_direct(self) -> bool:
        """Whether calls go straight to the generated code; decided by the first one."""
        return self._call not in (self._first_call, self.artifact)

    def _first_call(self, *args: Any) -> Any:
        with _observed_graphs() as calls:
            outputs = self.artifact(*args)
        self._call = self.artifact
        if len(calls) == 1:
            graph, passed, returned = calls[0]
            if _same_objects(args, passed) and _same_objects(outputs, returned):
                generated = graph.current_callable
                self._call = lambda *args: generated(list(args))
        return outputs


@contextmanager
def _observed_graphs() -> Iterator[list[tuple[Any, list[Any], list[Any]]]]:
    """Collects each generated graph that is called inside, what it is passed, what it returns."""
    from torch._inductor.output_code import CompiledFxGraph

    calls: list[tuple[Any, list[Any], list[Any]]] = []
    call = CompiledFxGraph.__call__

    def observed(graph: CompiledFxGraph, inputs: Sequence[Any]) -> Any:
        passed = list(inputs)  # generated code empties the list to free what it no longer needs
        outputs = call(graph, inputs)
        calls.append((graph, passed, list(outputs)))
        return outputs

    with mock.patch.object(CompiledFxGraph, "__call__", observed):
        yield calls


def _same_objects(these: Sequence[Any], those: Sequence[Any]) -> bool:
    return len(these) == len(those) and all(
        a is b or (type(a) is int and a == b) for a, b in zip(these, those)
    )


@contextmanager
def generated_code() -> Iterator[list[str]]:
    """Collects what Inductor generates, or loads, inside the `with` block: one text per graph."""
    from torch._inductor.graph import GraphLowering

    code: list[str] = []
    # Inductor calls this with each text and does nothing in it: it is there to be replaced.
    with mock.patch.object(GraphLowering, "save_output_code", code.append):
        yield code
