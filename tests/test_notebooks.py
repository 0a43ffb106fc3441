"""The tutorials run, say what they said when committed, and their exercises really check."""

from __future__ import annotations

import copy
import importlib.util
import re
import time
from functools import cache
from pathlib import Path
from types import ModuleType

import nbformat
import pytest
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell

TUTORIALS = Path(__file__).resolve().parent.parent / "tutorials"
NOTEBOOKS = sorted(path.stem for path in TUTORIALS.glob("*.ipynb"))
MAX_SECONDS = 60


@cache
def builder(name: str = "build") -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"tutorials_{name}", TUTORIALS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def committed(name: str) -> NotebookNode:
    return nbformat.read(TUTORIALS / f"{name}.ipynb", as_version=4)


@cache
def executed(name: str) -> tuple[NotebookNode, float]:
    """A fresh run in which every exercise is also answered: rightly, and wrongly."""
    notebook = with_answers(committed(name))
    started = time.perf_counter()
    builder().execute(notebook)
    return notebook, time.perf_counter() - started


def with_answers(notebook: NotebookNode) -> NotebookNode:
    """After each check, puts the solution, the wrong answers, and a check after each of them."""
    cells, solution = [], ""
    for cell in copy.deepcopy(notebook.cells):
        cells.append(cell)
        if builder().exercise_number(cell, "solution"):
            solution = builder().solution_code(cell)
        if builder().exercise_number(cell, "check"):
            cells += [added("right", solution), added("right-check", cell.source)]
            for answer in cell.metadata["wrong_answers"]:
                check = added("wrong-check", cell.source)
                check.metadata["tags"].append("raises-exception")
                cells += [added("wrong", answer), check]
    notebook = copy.deepcopy(notebook)
    notebook.cells = cells
    for number, cell in enumerate(cells):
        cell["id"] = f"run-{number}"
    return notebook


def added(kind: str, source: str) -> NotebookNode:
    return new_code_cell(source, metadata={"tags": [f"added-{kind}"]})


def cells_of(notebook: NotebookNode, kind: str) -> list[NotebookNode]:
    return [c for c in notebook.cells if f"added-{kind}" in c.metadata.get("tags", [])]


def original_cells(notebook: NotebookNode) -> list[NotebookNode]:
    """The committed cells of an executed notebook."""
    return [
        cell
        for cell in notebook.cells
        if not any(tag.startswith("added-") for tag in cell.metadata.get("tags", []))
    ]


def text_outputs(cell: NotebookNode) -> list[str]:
    """What a cell says in words, and that it shows a picture, but not which pixels."""
    words: list[str] = []
    for output in cell.get("outputs", []):
        if output.output_type == "stream":
            words.append(output.text)
            continue
        data = output.get("data", {})
        words += ["picture" for kind in data if kind.startswith("image/")]
        words += [data[kind] for kind in data if kind == "text/plain"]
    return words


def test_there_is_a_notebook_for_every_source() -> None:
    assert [source.stem for source in builder().sources()] == NOTEBOOKS
    assert NOTEBOOKS


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_has_the_cells_of_its_source(name: str) -> None:
    source = builder().read_source(TUTORIALS / "source" / f"{name}.py")
    assert [(c.cell_type, c.source, c.metadata) for c in committed(name).cells] == [
        (c.cell_type, c.source, c.metadata) for c in source.cells
    ]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs_in_time_without_an_error(name: str) -> None:
    notebook, seconds = executed(name)
    errors = [
        output
        for cell in original_cells(notebook)
        for output in cell.get("outputs", [])
        if output.output_type == "error" or output.get("name") == "stderr"
    ]
    assert errors == []
    assert seconds < MAX_SECONDS


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebooks_committed_outputs_are_those_of_a_fresh_run(name: str) -> None:
    fresh = [text_outputs(cell) for cell in original_cells(executed(name)[0])]
    assert [text_outputs(cell) for cell in committed(name).cells] == fresh


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_has_three_exercises_with_wrong_answers(name: str) -> None:
    checks = [c for c in committed(name).cells if builder().exercise_number(c, "check")]
    assert len(checks) == 3
    assert all(cell.metadata["wrong_answers"] for cell in checks)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_an_unanswered_exercise_says_so(name: str) -> None:
    checks = [c for c in original_cells(executed(name)[0]) if builder().exercise_number(c, "check")]
    assert all(text_outputs(cell)[0].startswith("No answer yet") for cell in checks)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_every_check_accepts_its_solution(name: str) -> None:
    outputs = [text_outputs(cell) for cell in cells_of(executed(name)[0], "right-check")]
    assert len(outputs) == 3
    assert all(output[0].startswith("Correct") for output in outputs)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_every_check_refuses_every_wrong_answer_with_a_reason(name: str) -> None:
    checks = cells_of(executed(name)[0], "wrong-check")
    assert len(checks) >= 3
    for cell in checks:
        assert [output.get("ename") for output in cell.outputs] == ["AssertionError"], cell.outputs
        assert cell.outputs[0].evalue


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_solutions_are_folded_away(name: str) -> None:
    solutions = [c for c in committed(name).cells if builder().exercise_number(c, "solution")]
    assert len(solutions) == 3
    for cell in solutions:
        assert cell.source.startswith("<details>\n<summary>Solution</summary>\n\n")
        assert cell.source.endswith("</details>")


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_names_no_machine_and_the_plain_kernel(name: str) -> None:
    notebook = committed(name)
    assert notebook.metadata.kernelspec.name == "python3"
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert notebook.metadata.language_info == {"name": "python"}
    text = (TUTORIALS / f"{name}.ipynb").read_text()
    assert not re.search(r"(?<![\w.])/(root|home|work|tmp|usr|opt|Users)/", text)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_links_to_files_lead_somewhere(name: str) -> None:
    text = "\n".join(c.source for c in committed(name).cells if c.cell_type == "markdown")
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    assert links
    assert [link for link in links if not (TUTORIALS / link).exists()] == []


def test_a_source_line_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "x.py"
    source.write_text("# %% [code]\n1\n")
    with pytest.raises(ValueError, match="cannot read the cell line"):
        builder().read_source(source)


def test_a_wrong_answer_without_a_check_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "x.py"
    source.write_text('# %% tags=["wrong-1"]\n1\n')
    with pytest.raises(ValueError, match="without a check"):
        builder().read_source(source)


def test_the_figures_of_the_pages_are_what_the_engine_does(tmp_path: Path) -> None:
    figures = builder("figures")
    written = figures.write_figures(tmp_path)
    assert {path.name for path in written} == {path.name for path in figures.FIGURES.glob("*.svg")}
    for path in written:
        assert description(path) == description(figures.FIGURES / path.name)


def description(svg: Path) -> str:
    match = re.search(r"<dc:description>(.*?)</dc:description>", svg.read_text(), re.DOTALL)
    assert match is not None
    return match.group(1)


def test_a_text_that_arrives_in_pieces_is_one_output_and_pictures_stay_apart() -> None:
    pieces = [stream("stdout", "a"), stream("stdout", "b"), stream("stderr", "c")]
    pictures = [nbformat.v4.new_output("display_data") for _ in range(2)]
    cell = new_code_cell("", outputs=[*pieces, *pictures])
    builder().join_streams(cell)
    assert [output.get("text") for output in cell.outputs] == ["ab", "c", None, None]


def stream(name: str, text: str) -> NotebookNode:
    return nbformat.v4.new_output("stream", name=name, text=text)
