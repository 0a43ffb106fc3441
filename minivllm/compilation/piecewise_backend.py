"""Compiles a traced model in pieces: split at attention, each distinct piece once.

Dynamo traces the model's forward one time and hands over one graph. It is cut at attention
(`splitting.py`), which leaves L + 1 computing pieces for L layers. Nearly all of them are the same
graph with other parameters, and parameters are inputs, so a signature (`signature.py`) finds that
there are only three to compile: what comes before the first attention, what lies between two, and
what comes after the last.

Each distinct piece is compiled for the general shape, in which the number of tokens is a symbol,
and, on first need, for chosen sizes, in which it is a constant. The general one serves everything
else. Neither records anything nor knows of other ranks: that is the business of whoever wraps the
pieces.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from minivllm.compilation.cache import ArtifactCache
from minivllm.compilation.compilers import (
    CompiledPiece,
    Compiler,
    InductorCompiler,
    generated_code,
)
from minivllm.compilation.signature import example_value, graph_signature
from minivllm.compilation.splitting import SplitPiece, split_graph

logger = logging.getLogger(__name__)


@dataclass
class CompilationStats:
    """What has been compiled since the start.

    Attributes:
        num_graphs: Graphs that Dynamo has handed over; more than one is a fault.
        num_pieces: Computing pieces in them.
        num_distinct_pieces: How many of those differ.
        num_compilations: Times a compiler ran, over all sizes.
        num_cache_hits: Times a result was found on disk instead.
        seconds: Spent compiling or loading.
    """

    num_graphs: int = 0
    num_pieces: int = 0
    num_distinct_pieces: int = 0
    num_compilations: int = 0
    num_cache_hits: int = 0
    seconds: float = 0.0


@dataclass
class DistinctPiece:
    """A graph that one or many pieces have, and what has been compiled of it.

    Attributes:
        signature: Its hash.
        graph: Its operations.
        example_inputs: Fake tensors and symbolic integers, as traced.
        returns_tuple: Whether it has several results; a compiled one always returns a sequence.
        general: Compiled for any number of tokens.
        exact: Compiled for one number of tokens, by that number.
        uses: How many pieces of the model are this one.
        seconds: What the general shape took to compile or load.
        code: What the compiler generated for the general shape; empty if it generates nothing.
    """

    signature: str
    graph: fx.GraphModule
    example_inputs: list[Any]
    returns_tuple: bool
    general: CompiledPiece | None = None
    exact: dict[int, CompiledPiece] = field(default_factory=dict)
    uses: int = 0
    seconds: float = 0.0
    code: str = ""


class Piece:
    """One computing piece of the model: picks the callable that fits the number of tokens.

    Args:
        name: In the stitching graph.
        content: What it shares with its equals.
        backend: Compiles sizes that are needed for the first time.
    """

    def __init__(self, name: str, content: DistinctPiece, backend: PiecewiseBackend) -> None:
        self.name = name
        self.content = content
        self._backend = backend
        self._size_of = _size_getter(content.example_inputs)

    def __call__(self, *args: Any) -> Any:
        """Runs the piece; inputs and outputs as in its graph."""
        content = self.content
        function = content.general
        if self._backend.compile_sizes:
            num_tokens = self._size_of(args)
            if num_tokens in self._backend.compile_sizes:
                function = self._backend.exact(content, num_tokens)
        assert function is not None
        outputs = function(*args)
        if content.returns_tuple or isinstance(outputs, torch.Tensor):
            return outputs
        return outputs[0]


class PiecewiseBackend:
    """A backend for `torch.compile`: called once, with the graph of the whole model.

    Args:
        compiler: Makes callables of pieces.
        splitting_ops: Names of the operations to split at.
        compile_sizes: Numbers of tokens to compile for exactly, beside the general shape.
        cache: Where compiled pieces are kept between starts; None keeps nothing.

    Attributes:
        pieces: The computing pieces, in order; empty until the model has been traced.
        distinct: By signature.
        graph: The graph as traced, for looking at.
        stitched: The graph that calls the pieces and attention in turn.
    """

    def __init__(
        self,
        compiler: Compiler,
        splitting_ops: Collection[str],
        compile_sizes: Collection[int] = (),
        cache: ArtifactCache | None = None,
    ) -> None:
        self.compiler = compiler
        self.splitting_ops = frozenset(splitting_ops)
        self.compile_sizes = frozenset(compile_sizes)
        self.cache = cache
        self.stats = CompilationStats()
        self.pieces: list[Piece] = []
        self.splits: list[SplitPiece] = []
        self.distinct: dict[str, DistinctPiece] = {}
        self.graph: fx.GraphModule | None = None
        self.stitched: fx.GraphModule | None = None
        self.example_inputs: list[Any] = []

    def __call__(self, graph: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Splits and compiles.

        Args:
            graph: From Dynamo; parameters are inputs.
            example_inputs: What the model was called with while it was traced.

        Returns:
            A function of the graph's inputs.
        """
        self.stats.num_graphs += 1
        self.graph, self.example_inputs = graph, list(example_inputs)
        stitched, self.splits = split_graph(graph, self.splitting_ops)
        for split in self.splits:
            if not split.is_splitting:
                piece = Piece(split.name, self._distinct_piece(split), self)
                self.pieces.append(piece)
                # The stitching code calls `self.submod_3(...)`: what is found there is now ours.
                stitched.__dict__[split.name] = piece
        self.stats.num_pieces = len(self.pieces)
        self.stats.num_distinct_pieces = len(self.distinct)
        logger.info(
            "%d pieces, %d distinct, %d compiled and %d loaded in %.1f s",
            len(self.pieces),
            len(self.distinct),
            self.stats.num_compilations,
            self.stats.num_cache_hits,
            self.stats.seconds,
        )
        self.stitched = stitched
        return stitched.forward

    def exact(self, content: DistinctPiece, num_tokens: int) -> CompiledPiece:
        """The piece compiled for exactly `num_tokens`; compiles it if this is the first need."""
        if num_tokens not in content.exact:
            examples = _at_size(content.example_inputs, num_tokens)
            content.exact[num_tokens] = self._compile(content, examples, num_tokens)
        return content.exact[num_tokens]

    def compile_all_sizes(self) -> None:
        """Compiles every piece for all of `compile_sizes` now, so that no step has to wait."""
        for content in self.distinct.values():
            for num_tokens in sorted(self.compile_sizes):
                self.exact(content, num_tokens)

    def _distinct_piece(self, split: SplitPiece) -> DistinctPiece:
        signature = graph_signature(split.graph)
        if signature not in self.distinct:
            inputs = [n for n in split.graph.graph.nodes if n.op == "placeholder"]
            content = DistinctPiece(
                signature,
                split.graph,
                [example_value(node) for node in inputs],
                returns_tuple=isinstance(_returned(split.graph), tuple | list),
            )
            start = time.perf_counter()
            with generated_code() as code:
                content.general = self._compile(content, content.example_inputs, None)
            content.code = "\n".join(code)
            content.seconds = time.perf_counter() - start
            self.distinct[signature] = content
        self.distinct[signature].uses += 1
        return self.distinct[signature]

    def _compile(
        self, content: DistinctPiece, examples: list[Any], num_tokens: int | None
    ) -> CompiledPiece:
        start = time.perf_counter()
        compiled = self._load(content, num_tokens)
        if compiled is None:
            # The compiler may change what it is given, and other sizes need the original.
            graph = fx.GraphModule(content.graph, fx.Graph())
            graph.graph = _copied(content.graph.graph)
            graph.recompile()
            compiled = self.compiler.compile(graph, examples, dynamic=num_tokens is None)
            self.stats.num_compilations += 1
            if self.cache is not None and isinstance(self.compiler, InductorCompiler):
                self.cache.store(content.signature, num_tokens, compiled, self.compiler.save)
        self.stats.seconds += time.perf_counter() - start
        return compiled

    def _load(self, content: DistinctPiece, num_tokens: int | None) -> CompiledPiece | None:
        if self.cache is None or not isinstance(self.compiler, InductorCompiler):
            return None
        found = self.cache.find(content.signature, num_tokens, self.compiler.load)
        self.stats.num_cache_hits += found is not None
        return found


def _copied(graph: fx.Graph) -> fx.Graph:
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    return copy


def _returned(graph: fx.GraphModule) -> Any:
    return next(iter(reversed(graph.graph.nodes))).args[0]


def _size_getter(examples: Sequence[Any]) -> Callable[[Sequence[Any]], int]:
    """How to read the number of tokens off a piece's arguments."""
    for index, example in enumerate(examples):
        if isinstance(example, torch.SymInt):
            return lambda args: args[index]
    for index, example in enumerate(examples):
        if isinstance(example, torch.Tensor) and isinstance(example.shape[0], torch.SymInt):
            return lambda args: args[index].shape[0]
    raise ValueError("a piece has no input that depends on the number of tokens")


def _at_size(examples: Sequence[Any], num_tokens: int) -> list[Any]:
    """Example inputs in which the number of tokens is a constant."""

    def concrete(value: Any) -> Any:
        if not isinstance(value, torch.SymInt):
            return value
        expression = value.node.expr
        return int(expression.subs(dict.fromkeys(expression.free_symbols, num_tokens)))

    def example_at(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
            return concrete(value)
        shape, strides = map(concrete, value.shape), map(concrete, value.stride())
        return torch.empty_strided(
            tuple(shape), tuple(strides), dtype=value.dtype, device=value.device
        )

    return [example_at(value) for value in examples]
