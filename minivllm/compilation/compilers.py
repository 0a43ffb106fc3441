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
from typing import Any, Literal, Protocol
from unittest import mock

import torch
from torch import fx

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
    """Compiles with Inductor, and keeps the results on disk.

    Args:
        artifacts: Where compiled pieces are looked up and kept; None compiles anew at each start.
    """

    name = "inductor"

    def compile(
        self, graph: fx.GraphModule, example_inputs: Sequence[Any], dynamic: bool
    ) -> CompiledPiece:
        """See `Compiler`."""
        from torch._inductor import standalone_compile

        shapes: Literal["from_graph", "from_example_inputs"]
        shapes = "from_graph" if dynamic else "from_example_inputs"
        # A packed weight has no strides to assert.
        with torch._inductor.config.patch(size_asserts=False):
            return standalone_compile(graph, list(example_inputs), dynamic_shapes=shapes)

    def save(self, compiled: Any, path: Path) -> None:
        """Writes a compiled piece to a file."""
        compiled.save(path=str(path), format="binary")

    def load(self, path: Path) -> CompiledPiece:
        """Reads it back."""
        from torch._inductor import CompiledArtifact

        return CompiledArtifact.load(path=str(path), format="binary")


@contextmanager
def generated_code() -> Iterator[list[str]]:
    """Collects what Inductor generates, or loads, inside the `with` block: one text per graph."""
    from torch._inductor.graph import GraphLowering

    code: list[str] = []
    # Inductor calls this with each text and does nothing in it: it is there to be replaced.
    with mock.patch.object(GraphLowering, "save_output_code", code.append):
        yield code
