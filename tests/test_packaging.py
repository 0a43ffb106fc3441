"""The project's outside: what is installed, pinned, linked and promised fits together."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
BASE = [Requirement(text) for text in PROJECT["dependencies"]]
PINS = [
    Requirement(line)
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if line and not line.startswith("#")
]


def names(requirements: list[Requirement]) -> set[str]:
    return {canonicalize_name(requirement.name) for requirement in requirements}


def imported_packages(folder: str) -> set[str]:
    """Distributions that provide what the sources in a folder import."""
    modules = set()
    for source in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                modules |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                modules.add(node.module.partition(".")[0])
    providers = packages_distributions()
    own = {"minivllm", "tests", "benchmarks"} | set(sys.stdlib_module_names)
    return {canonicalize_name(name) for module in modules - own for name in providers[module]}


def test_everything_the_library_imports_is_a_dependency():
    # Triton comes with torch's CUDA builds and is looked for before it is used; only pictures need
    # matplotlib.
    optional = {"triton", "matplotlib"}
    assert imported_packages("minivllm") - optional <= names(BASE)
    assert optional <= names([Requirement(text) for extra in EXTRAS.values() for text in extra])


def test_everything_the_tests_import_is_in_the_extra_test():
    required = names(BASE + [Requirement(text) for text in EXTRAS["test"]])
    assert imported_packages("tests") <= required


def test_no_extra_is_empty():
    assert all(EXTRAS.values())


def test_make_installs_only_extras_that_exist():
    targets = re.findall(r"EXTRAS := \[(\w+)\]", (ROOT / "Makefile").read_text())
    assert targets
    assert set(targets) <= set(EXTRAS)


def test_every_direct_dependency_is_pinned_to_a_version_it_allows():
    pins = {canonicalize_name(pin.name): pin for pin in PINS}
    for requirement in BASE + [Requirement(text) for extra in EXTRAS.values() for text in extra]:
        (specifier,) = pins[canonicalize_name(requirement.name)].specifier
        assert specifier.operator == "=="
        assert requirement.specifier.contains(Version(specifier.version)), requirement


def test_the_version_is_the_same_everywhere():
    from minivllm import __version__

    done = subprocess.run(
        [sys.executable, "-m", "minivllm", "--version"], capture_output=True, text=True
    )
    assert done.stdout == f"minivllm {__version__}\n"


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_every_file_that_a_page_links_to_exists(page: str):
    links = re.findall(r"\]\(([^)#]+)", (ROOT / page).read_text(encoding="utf-8"))
    missing = [link for link in links if "://" not in link and not (ROOT / link).exists()]
    assert missing == []


def test_the_python_example_of_the_readme_runs():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", text, flags=re.S)
    done = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "'The capital of France is' -> ' Paris" in done.stdout


def test_the_commands_of_the_readme_have_the_options_they_use():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    fenced = "".join(re.findall(r"^```\w*\n(.*?)^```$", text, flags=re.S | re.M))
    commands = re.findall(r"^minivllm (\w+)(.*)$", fenced, flags=re.M)
    assert {command for command, _ in commands} == {"generate", "chat", "doctor"}
    for command, rest in commands:
        done = subprocess.run(
            [sys.executable, "-m", "minivllm", command, "--help"], capture_output=True, text=True
        )
        options = re.findall(r"--[\w-]+", rest.partition("#")[0])
        assert set(options) <= set(re.findall(r"--[\w-]+", done.stdout))
