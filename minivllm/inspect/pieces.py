"""What the piecewise backend made of a model: its pieces, the graph between them, and the code.

    with LLM("smollm2", compile="inductor") as llm:
        report = inspect_pieces(llm)
    print(render_table(report))
    print(render_graph(report, "mermaid"))

The report is plain data, taken from the very objects that run the model.
"""

from __future__ import annotations

import dataclasses
import html
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import fx

from minivllm.compilation.compilers import InductorCompiler
from minivllm.compilation.piecewise_backend import PiecewiseBackend
from minivllm.compilation.signature import example_value, graph_signature
from minivllm.compilation.wrapper import CompiledModel
from minivllm.errors import ConfigError

if TYPE_CHECKING:
    from minivllm.compilation.fusion import FusedGraph
    from minivllm.engine.llm import LLM

GraphFormat = Literal["text", "mermaid", "svg", "code", "fusions"]

# What Inductor's Python calls to do work: its own kernels, library calls, operations as they are.
_LAUNCH = re.compile(
    r"^ +(?:\w+ = )?(?:cpp_fused\w*\(|triton_\w+\.run\(|extern_kernels\.|aten\.|torch\.ops\.)",
    re.MULTILINE,
)


@dataclass(frozen=True)
class PieceRow:
    """One piece, in the order in which they run.

    Attributes:
        name: In the stitching graph.
        kind: `computing`, or `splitting`: attention, which runs as it is.
        signature: Hash of its graph; pieces with the same one are the same piece.
        num_ops: Operations in its graph; taking an element out of a tuple is none.
        num_launches: Kernels and library calls that the compiled code makes; None if nothing was
            generated.
        symbolic_inputs: Sizes that are passed in as integers.
        inputs: Shapes of the tensors that come from pieces before it; parameters are not counted.
        num_parameters: Other tensors passed in: weights, tables, token ids and positions.
        outputs: Shapes of what it returns.
        compiled_for: What was compiled or loaded for this piece: `any` number of tokens, or one;
            empty if an equal piece came before it.
        seconds: What the general shape took.
    """

    name: str
    kind: Literal["computing", "splitting"]
    signature: str
    num_ops: int
    num_launches: int | None
    symbolic_inputs: tuple[str, ...]
    inputs: tuple[str, ...]
    num_parameters: int
    outputs: tuple[str, ...]
    compiled_for: tuple[str, ...]
    seconds: float


@dataclass(frozen=True)
class PiecesReport:
    """All pieces of a model.

    Attributes:
        model: Its name.
        compiler: `eager` or `inductor`.
        splitting_ops: Where it was split.
        pieces: In order.
        stats: The backend's counters.
        stitched: The graph that calls the pieces, as text.
        graphs: Each distinct graph as text, by signature.
        code: What was generated for each distinct computing piece, by signature.
        fusions: What the fusion passes did to each graph that was compiled: its text before and
            after, and how many chains of each kind were replaced.
    """

    model: str
    compiler: str
    splitting_ops: tuple[str, ...]
    pieces: tuple[PieceRow, ...]
    stats: dict[str, Any]
    stitched: str
    graphs: dict[str, str]
    code: dict[str, str]
    fusions: list[FusedGraph]

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON can hold it."""
        return dataclasses.asdict(self)


def inspect_pieces(llm: LLM) -> PiecesReport:
    """Reads the pieces of a running engine.

    Raises:
        ConfigError: Nothing is compiled in this engine.
    """
    forward = llm.engine.core.runner.forward
    if not isinstance(forward, CompiledModel):
        raise ConfigError("compile='none' has no pieces; choose compile='inductor' or 'eager'")
    backend = forward.backend
    assert backend.stitched is not None
    seen: set[str] = set()
    graphs: dict[str, str] = {}
    rows = []
    for split in backend.splits:
        signature = graph_signature(split.graph)
        graphs.setdefault(signature, str(split.graph.graph))
        rows.append(_row(backend, split.name, split.graph, split.is_splitting, signature, seen))
        seen.add(signature)
    return PiecesReport(
        model=llm.engine.config.model,
        compiler=backend.compiler.name,
        splitting_ops=tuple(sorted(backend.splitting_ops)),
        pieces=tuple(rows),
        stats=dataclasses.asdict(backend.stats),
        stitched=str(backend.stitched.graph),
        graphs=graphs,
        code={signature: content.code for signature, content in backend.distinct.items()},
        fusions=_fused_graphs(backend),
    )


def render_table(report: PiecesReport) -> str:
    """The pieces as a table; equal neighbours are one line."""
    header = ("piece", "kind", "graph", "ops", "launches", "sizes in", "compiled for", "seconds")
    lines = [header, *(_cells(rows) for rows in _folded(report.pieces))]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    text = ["  ".join(cell.ljust(w) for cell, w in zip(line, widths)).rstrip() for line in lines]
    stats = report.stats
    summary = (
        f"{stats['num_pieces']} computing pieces, {stats['num_distinct_pieces']} distinct; "
        f"{stats['num_compilations']} compiled and {stats['num_cache_hits']} loaded "
        f"in {stats['seconds']:.1f} s by {report.compiler}; "
        f"split at {', '.join(report.splitting_ops)}"
    )
    return "\n".join([*text, "", summary])


def render_graph(report: PiecesReport, form: GraphFormat) -> str:
    """The split graph.

    Args:
        report: From `inspect_pieces`.
        form: `text` is the stitching graph and each distinct piece in FX's own words; `mermaid` and
            `svg` are pictures, with equal layers drawn once; `code` is what the compiler wrote;
            `fusions` is each graph before and after the fusion passes.

    Raises:
        ConfigError: There is no generated code, as pieces run as they are; or no fusion pass ran.
    """
    renderers: dict[GraphFormat, Callable[[PiecesReport], str]] = {
        "text": _as_text,
        "mermaid": _as_mermaid,
        "svg": _as_svg,
        "code": _as_code,
        "fusions": _as_fusions,
    }
    return renderers[form](report)


def _row(
    backend: PiecewiseBackend,
    name: str,
    graph: fx.GraphModule,
    is_splitting: bool,
    signature: str,
    seen: set[str],
) -> PieceRow:
    content = backend.distinct.get(signature)
    stitching = {str(n.target): n for n in backend.stitched.graph.nodes}[name]  # type: ignore[union-attr]
    placeholders = [n for n in graph.graph.nodes if n.op == "placeholder"]
    inputs: list[str] = []
    sizes: list[str] = []
    for node, source in zip(placeholders, stitching.args):
        value = example_value(node)
        if isinstance(value, torch.SymInt):
            sizes.append(str(value))
        elif isinstance(source, fx.Node) and source.op != "placeholder":
            inputs.append(_shape(value))
    output = next(iter(reversed(graph.graph.nodes))).args[0]
    outputs = output if isinstance(output, tuple | list) else (output,)
    is_first = content is not None and signature not in seen
    return PieceRow(
        name=name,
        kind="splitting" if is_splitting else "computing",
        signature=signature[:10],
        num_ops=sum(_is_operation(node) for node in graph.graph.nodes),
        num_launches=len(_LAUNCH.findall(content.code)) if content and content.code else None,
        symbolic_inputs=tuple(sizes),
        inputs=tuple(inputs),
        num_parameters=len(placeholders) - len(inputs) - len(sizes),
        outputs=tuple(_shape(example_value(n)) for n in outputs if isinstance(n, fx.Node)),
        compiled_for=("any", *map(str, sorted(content.exact))) if content and is_first else (),
        seconds=content.seconds if content and is_first else 0.0,
    )


def _is_operation(node: fx.Node) -> bool:
    return node.op.startswith("call_") and node.target is not operator.getitem


def _shape(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return str(value)
    return f"[{', '.join(map(str, value.shape))}] {str(value.dtype).removeprefix('torch.')}"


def _folded(pieces: tuple[PieceRow, ...]) -> list[list[PieceRow]]:
    """Pieces, with runs of equal layers (attention and what follows it) put together."""
    pairs = [pieces[:1], *(pieces[i : i + 2] for i in range(1, len(pieces), 2))]
    folded: list[list[PieceRow]] = []
    for _, run in groupby(pairs, key=lambda pair: [piece.signature for piece in pair][1:]):
        folded += [list(column) for column in zip(*run)]
    return folded


def _label(rows: list[PieceRow]) -> str:
    return rows[0].name if len(rows) == 1 else f"{rows[0].name} … {rows[-1].name} (x{len(rows)})"


def _graph_name(rows: list[PieceRow]) -> str:
    # Attention calls hold their layer's name, which is why they are kept out of what is compiled.
    return rows[0].signature if len({row.signature for row in rows}) == 1 else "one each"


def _cells(rows: list[PieceRow]) -> tuple[str, ...]:
    first = rows[0]
    return (
        _label(rows),
        first.kind,
        _graph_name(rows),
        str(first.num_ops),
        "-" if first.num_launches is None else str(first.num_launches),
        " ".join(first.symbolic_inputs) or "-",
        " ".join(first.compiled_for) or "-",
        f"{first.seconds:.2f}" if first.compiled_for else "-",
    )


def _as_text(report: PiecesReport) -> str:
    parts = [f"# the stitching graph\n{report.stitched}"]
    for signature, text in report.graphs.items():
        uses = sum(signature.startswith(piece.signature) for piece in report.pieces)
        parts.append(f"# graph {signature[:10]}, used {uses} times\n{text}")
    return "\n\n".join(parts)


def _as_code(report: PiecesReport) -> str:
    if not any(report.code.values()):
        raise ConfigError(f"compile={report.compiler!r} generates no code; use compile='inductor'")
    return "\n\n".join(f"# graph {s[:10]}\n{code}" for s, code in report.code.items())


def _as_fusions(report: PiecesReport) -> str:
    if not report.fusions:
        raise ConfigError(
            "no fusion pass ran: choose some with fusions=(...), and compile_cache=False, since a "
            "piece that is loaded from disk has been fused before"
        )
    return "\n\n".join(
        f"# before\n{graph.before}\n\n# after {graph.counts}\n{graph.after}"
        for graph in report.fusions
    )


def _fused_graphs(backend: PiecewiseBackend) -> list[FusedGraph]:
    compiler = backend.compiler
    if isinstance(compiler, InductorCompiler) and compiler.fusion_pass is not None:
        return compiler.fusion_pass.fused
    return []


def _as_mermaid(report: PiecesReport) -> str:
    lines = ["flowchart TD"]
    columns = _folded(report.pieces)
    for index, rows in enumerate(columns):
        left, right = ("([", "])") if rows[0].kind == "splitting" else ("[", "]")
        lines.append(f'    n{index}{left}"{_label(rows)}<br/>{_contents(rows)}"{right}')
    for index, (before, _) in enumerate(pairwise(columns)):
        label = "<br/>".join(before[0].outputs) or "writes output in place"
        lines.append(f'    n{index} -->|"{label}"| n{index + 1}')
    return "\n".join(lines)


def _contents(rows: list[PieceRow]) -> str:
    row = rows[0]
    launches = "" if row.num_launches is None else f", {row.num_launches} launches"
    operations = "operation" if row.num_ops == 1 else "operations"
    return f"{row.num_ops} {operations}{launches}, graph {_graph_name(rows)}"


def _as_svg(report: PiecesReport) -> str:
    """Boxes from top to bottom; what is passed on stands beside the arrows."""
    columns, width, box = _folded(report.pieces), 620, 46
    parts: list[str] = []
    top = 10
    for index, rows in enumerate(columns):
        color = "#fde7c8" if rows[0].kind == "splitting" else "#d6e6f5"
        parts.append(
            f'<rect x="10" y="{top}" width="300" height="{box}" rx="6" fill="{color}" '
            'stroke="#555"/>'
            + _svg_text(20, top + 19, _label(rows), "bold")
            + _svg_text(20, top + 37, _contents(rows))
        )
        top += box
        if index + 1 < len(columns):
            passed = rows[0].outputs or ("writes output in place",)
            gap = max(24, 15 * len(passed) + 8)
            parts.append(
                f'<path d="M160 {top} V{top + gap - 6}" stroke="#555" fill="none"/>'
                f'<path d="M155 {top + gap - 7} l5 7 l5 -7 z" fill="#555"/>'
                + "".join(_svg_text(175, top + 15 * (i + 1), s) for i, s in enumerate(passed))
            )
            top += gap
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {top + 10}" '
    style = f'width="{width}" font-family="sans-serif" font-size="12">'
    return head + style + "".join(parts) + "</svg>"


def _svg_text(x: int, y: int, text: str, weight: str = "normal") -> str:
    return f'<text x="{x}" y="{y}" font-weight="{weight}">{html.escape(text)}</text>'
