"""`inspect pieces` says what the backend did, as a table, as data, and as pictures."""

from __future__ import annotations

import io
import json
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from minivllm import LLM
from minivllm.cli import main
from minivllm.errors import ConfigError
from minivllm.inspect.pieces import PiecesReport, inspect_pieces, render_graph, render_table

OPTIONS = {"device": "cpu", "max_model_len": 64, "num_kv_blocks": 16}


def report_of(compile: str, preset: str = "tiny") -> PiecesReport:
    with LLM(f"random:{preset}", compile=compile, **OPTIONS) as llm:
        return inspect_pieces(llm)


@pytest.fixture(scope="module")
def eager() -> PiecesReport:
    return report_of("eager")


@pytest.fixture(scope="module")
def inductor(tmp_path_factory: pytest.TempPathFactory) -> PiecesReport:
    folder = tmp_path_factory.mktemp("artifacts")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("minivllm.compilation.wrapper.cache_root", lambda: folder)
        return report_of("inductor")


def test_the_first_of_equal_pieces_is_compiled_and_the_others_are_not(eager: PiecesReport) -> None:
    computing = [piece for piece in eager.pieces if piece.kind == "computing"]
    assert [piece.compiled_for for piece in computing] == [("any",), ("any",), (), ("any",)]
    assert computing[1].signature == computing[2].signature


def test_a_piece_says_what_is_passed_to_it_and_what_it_returns(eager: PiecesReport) -> None:
    middle, attention = eager.pieces[2], eager.pieces[1]
    (size,) = middle.symbolic_inputs
    # Attention's result, the residual stream, cosines and sines; and weights: o, norm, gate and up,
    # down, norm, qkv.
    assert middle.inputs[:2] == (f"[{size}, 8, 64] float32", f"[{size}, 128] float32")
    assert middle.num_parameters == 6
    # Query, key, value, the buffer for attention's result, the residual stream.
    assert [text.split("]")[0] for text in middle.outputs] == [
        f"[{size}, 8, 64",
        f"[{size}, 4, 64",
        f"[{size}, 4, 64",
        f"[{size}, 8, 64",
        f"[{size}, 128",
    ]
    assert (attention.kind, attention.num_ops, attention.outputs) == ("splitting", 1, ())


def test_compiled_pieces_launch_fewer_kernels_than_they_have_operations(
    eager: PiecesReport, inductor: PiecesReport
) -> None:
    assert all(piece.num_launches is None for piece in eager.pieces)
    launches = [piece.num_launches for piece in inductor.pieces if piece.kind == "computing"]
    # The last piece: three products, and the three chains of point-wise operations between them.
    assert launches[-1] == 3 + 3
    operations = [piece.num_ops for piece in inductor.pieces if piece.kind == "computing"]
    assert all(n is not None and n < m for n, m in zip(launches, operations))


def test_the_table_folds_equal_layers_into_one_line(eager: PiecesReport) -> None:
    lines = render_table(eager).splitlines()
    assert [line.split("  ")[0] for line in lines[1:6]] == [
        "submod_0",
        "submod_1 … submod_3 (x2)",
        "submod_2 … submod_4 (x2)",
        "submod_5",
        "submod_6",
    ]
    assert lines[-1].startswith("4 computing pieces, 3 distinct; 3 compiled and 0 loaded")


def test_the_text_holds_the_stitching_graph_and_each_distinct_piece_once(
    eager: PiecesReport,
) -> None:
    text = render_graph(eager, "text")
    assert text.count("target=submod_") == 7
    assert text.count("# graph ") == 3 + 3  # three to compile, and one attention call per layer
    assert "used 2 times" in text
    assert "symbolic" not in text


def test_the_pictures_are_well_formed_and_name_every_kind_of_piece(eager: PiecesReport) -> None:
    root = ET.fromstring(render_graph(eager, "svg"))
    assert len(root.findall("{http://www.w3.org/2000/svg}rect")) == 5
    mermaid = render_graph(eager, "mermaid")
    assert mermaid.startswith("flowchart TD\n")
    assert mermaid.count("-->") == 4
    assert "submod_1 … submod_3 (x2)" in mermaid


def test_generated_code_is_shown_if_there_is_any(
    eager: PiecesReport, inductor: PiecesReport
) -> None:
    assert render_graph(inductor, "code").count("def call(") == 3
    with pytest.raises(ConfigError, match="generates no code"):
        render_graph(eager, "code")


def test_an_engine_that_compiles_nothing_has_no_pieces() -> None:
    with pytest.raises(ConfigError, match="compile='none' has no pieces"):
        report_of("none")


def run(capsys: pytest.CaptureFixture[str], patch: pytest.MonkeyPatch, *arguments: str) -> str:
    options = ["--model", "random:tiny", "--device", "cpu", "--num-kv-blocks", "16"]
    patch.setattr(sys, "argv", ["minivllm", "inspect", "pieces", *options, *arguments])
    patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    with pytest.raises(SystemExit) as stop:
        main()
    assert not stop.value.code
    return capsys.readouterr().out


def test_the_command_prints_a_table_json_or_a_picture(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("minivllm.compilation.wrapper.cache_root", lambda: tmp_path)
    eager = ("--compile", "eager")
    assert "4 computing pieces, 3 distinct" in run(capsys, monkeypatch, *eager)
    document = json.loads(run(capsys, monkeypatch, *eager, "--json"))
    assert [piece["kind"] for piece in document["pieces"]] == ["computing", "splitting"] * 3 + [
        "computing"
    ]
    ET.fromstring(run(capsys, monkeypatch, *eager, "--graph", "svg"))
    # Left to itself, the command compiles even where an engine would not.
    assert "by inductor" in run(capsys, monkeypatch)
