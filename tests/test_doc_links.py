"""What the pages say about the code exists: files, functions, attributes, tests and figures."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
PAGES = [
    REPOSITORY / "docs" / name
    for name in ("architecture.md", "vllm-map.md", "modules/scheduler.md", "modules/kv-cache.md")
]
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
IMAGE = re.compile(r"!\[([^\]]*)\]\(([^)\s]+)\)")


def page_id(page: Path) -> str:
    return page.stem


@cache
def names_in(path: Path) -> set[str]:
    """Everything that a file defines: `function`, `Class`, `Class.method`, `Class.attribute`."""
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        names |= defined(node)
        if isinstance(node, ast.ClassDef):
            for child in ast.walk(node):
                names |= {f"{node.name}.{name}" for name in defined(child)}
    return names


def defined(node: ast.AST) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else []
    targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
    return {
        target.attr if isinstance(target, ast.Attribute) else target.id
        for target in targets
        if isinstance(target, ast.Name | ast.Attribute)
    }


def code_links(page: Path) -> list[tuple[str, Path]]:
    """Names in the text of links to source files, with the file."""
    links = []
    for text, target in LINK.findall(page.read_text()):
        if target.endswith(".py"):
            names = re.findall(r"`([A-Za-z_][\w.]*)`", text)
            links += [(name, (page.parent / target).resolve()) for name in names]
    return links


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_to_files(page: Path) -> None:
    targets = [target.split("#")[0] for _, target in LINK.findall(page.read_text())]
    local = [target for target in targets if target and "://" not in target]
    assert local
    assert [target for target in local if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_named_functions_and_classes_are_in_the_files_they_are_linked_to(page: Path) -> None:
    links = [(name, path) for name, path in code_links(page) if not name.endswith(".py")]
    assert links
    assert [(name, path.name) for name, path in links if name not in names_in(path)] == []


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_named_tests_and_checks_exist(page: Path) -> None:
    tests = "\n".join(path.read_text() for path in (REPOSITORY / "tests").glob("*.py"))
    named = re.findall(r"`((?:test|check)_\w+)`", page.read_text())
    assert [name for name in named if f"def {name}(" not in tests] == []


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_figures_exist_and_say_what_they_show(page: Path) -> None:
    for description, target in IMAGE.findall(page.read_text()):
        assert (page.parent / target).exists(), target
        assert len(description) > 20


def test_a_name_that_does_not_exist_would_be_found() -> None:
    scheduler = names_in(REPOSITORY / "minivllm" / "engine" / "scheduler.py")
    assert {"Scheduler", "Scheduler.schedule", "Scheduler.waiting"} <= scheduler
    assert "Scheduler.no_such_method" not in scheduler
