"""Makes the notebooks from their sources, with outputs of a real run.

    python tutorials/build.py              # all of them
    python tutorials/build.py 01_scheduler # one

A source is a Python file in `tutorials/source/`, cut into cells by lines `# %%` (the "percent"
format that editors and jupytext know). Markdown cells are strings. Tags hold an exercise together:

    answer-1    the cell for the learner's answer
    solution-1  the solution, folded away
    check-1     the cell that checks the answer on real engine objects
    wrong-1     an answer that the check must refuse; kept in the check cell's metadata, not shown
"""

from __future__ import annotations

import argparse
import json
import os
import re
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

TUTORIALS = Path(__file__).resolve().parent
REPOSITORY = TUTORIALS.parent
CELL_LINE = re.compile(r"^# %%(?P<markdown> \[markdown\])?(?: tags=(?P<tags>\[.*\]))?$")


def sources() -> list[Path]:
    """All notebook sources, in the order of the course."""
    return sorted((TUTORIALS / "source").glob("*.py"))


def notebook_path(source: Path) -> Path:
    """Where a source's notebook lies."""
    return TUTORIALS / f"{source.stem}.ipynb"


def read_source(source: Path) -> nbformat.NotebookNode:
    """Makes a notebook without outputs from a source file.

    Raises:
        ValueError: A line begins a cell but cannot be read, or a wrong answer has no check.
    """
    cells: list[nbformat.NotebookNode] = []
    wrong: dict[str, list[str]] = {}
    for tags, is_markdown, text in _split(source.read_text()):
        if tags and tags[0].startswith("wrong-"):
            wrong.setdefault(tags[0].removeprefix("wrong-"), []).append(text)
            continue
        cell = new_markdown_cell(_unquote(text)) if is_markdown else new_code_cell(_magics(text))
        cell["id"] = f"cell-{len(cells) + 1:02d}"
        if tags:
            cell.metadata["tags"] = tags
        cells.append(cell)
    for cell in cells:
        number = exercise_number(cell, "check")
        if number is not None:
            cell.metadata["wrong_answers"] = wrong.pop(number, [])
    if wrong:
        raise ValueError(f"{source.name}: wrong answers without a check cell: {sorted(wrong)}")
    return new_notebook(cells=cells, metadata=_notebook_metadata())


def execute(notebook: nbformat.NotebookNode, timeout: float = 120.0) -> None:
    """Runs all cells of a notebook in a fresh kernel, in place.

    Raises:
        nbclient.exceptions.CellExecutionError: A cell failed.
    """
    paths = [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        # A library's wish for ipywidgets; its text names a path of the machine.
        "PYTHONWARNINGS": "ignore:IProgress not found",
    }
    client = NotebookClient(
        notebook, timeout=timeout, kernel_name="python3", record_timing=False, store_widget_state=False
    )
    client.create_kernel_manager()
    with client.setup_kernel(env=environment, cwd=str(TUTORIALS)):
        for index, cell in enumerate(notebook.cells):
            client.execute_cell(cell, index)
            join_streams(cell)
    notebook.metadata.update(_notebook_metadata())


def join_streams(cell: nbformat.NotebookNode) -> None:
    """Makes one output of a text that the kernel sent in pieces; where it is cut is chance."""
    joined: list[nbformat.NotebookNode] = []
    for output in cell.get("outputs", []):
        is_text = output.output_type == "stream"
        if is_text and joined and joined[-1].get("name") == output.name:
            joined[-1]["text"] += output.text
        else:
            joined.append(output)
    if cell.cell_type == "code":
        cell["outputs"] = joined


def exercise_number(cell: nbformat.NotebookNode, kind: str) -> str | None:
    """The number of the exercise whose `kind` (answer, solution, check) this cell is, or None."""
    for tag in cell.metadata.get("tags", []):
        if tag.startswith(f"{kind}-"):
            return str(tag.removeprefix(f"{kind}-"))
    return None


def solution_code(cell: nbformat.NotebookNode) -> str:
    """The code in a folded solution."""
    match = re.search(r"```python\n(.*?)```", cell.source, re.DOTALL)
    if match is None:
        raise ValueError(f"{cell['id']}: the solution has no python block")
    return match.group(1)


def _split(text: str) -> list[tuple[list[str], bool, str]]:
    cells: list[tuple[list[str], bool, list[str]]] = []
    for line in text.splitlines():
        if line.startswith("# %%"):
            match = CELL_LINE.match(line)
            if match is None:
                raise ValueError(f"cannot read the cell line {line!r}")
            cells.append((json.loads(match["tags"] or "[]"), match["markdown"] is not None, []))
        elif cells:
            cells[-1][2].append(line)
    return [(tags, is_markdown, "\n".join(lines).strip("\n")) for tags, is_markdown, lines in cells]


def _unquote(text: str) -> str:
    return text.removeprefix('r"""').removeprefix('"""').removesuffix('"""').strip("\n")


def _magics(text: str) -> str:
    return re.sub(r"^# (%\w+)", r"\1", text, flags=re.MULTILINE)


def _notebook_metadata() -> dict[str, object]:
    return {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }


def main() -> None:
    """Builds the notebooks that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", help="01_scheduler, ...; all if none is given")
    names = parser.parse_args().names or [source.stem for source in sources()]
    for name in names:
        notebook = read_source(TUTORIALS / "source" / f"{name}.py")
        execute(notebook)
        nbformat.write(notebook, notebook_path(Path(name)))
        print(f"wrote tutorials/{name}.ipynb")


if __name__ == "__main__":
    main()
