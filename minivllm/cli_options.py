"""Command-line options made from the dataclasses they fill.

`SamplingParams` and the configuration classes already name, type, default and explain every value.
Here their fields become options with the same names, so the command line cannot drift away from the
library. Nothing in this module imports torch: `minivllm --help` has to be quick.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import typer


@dataclass(frozen=True)
class OptionGroup:
    """The fields of some dataclasses, as options of a command.

    Attributes:
        classes: Where the fields come from; their docstrings explain each under `Attributes:`.
        build: Makes a command's argument of the values, by field name.
        skip: Fields that do not become options.
        defaults: Defaults that differ from the dataclass.
        rename: Option names that differ from the field, where two groups share a name.
    """

    classes: tuple[type, ...]
    build: Callable[[dict[str, Any]], Any]
    skip: frozenset[str] = frozenset()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    rename: Mapping[str, str] = field(default_factory=dict)

    def without(self, *names: str) -> OptionGroup:
        """The same group without some fields."""
        return dataclasses.replace(self, skip=self.skip | set(names))

    def parameters(self) -> list[inspect.Parameter]:
        """One keyword parameter per option, annotated the way typer reads them."""
        return [
            self._parameter(item, hints[item.name], helps.get(item.name, ""))
            for cls in self.classes
            for hints, helps in [(get_type_hints(cls), attribute_docs(cls))]
            for item in dataclasses.fields(cls)
            if item.name not in self.skip
        ]

    def collect(self, values: dict[str, Any]) -> Any:
        """Takes this group's values out of a command's arguments and builds its argument."""
        names = [f.name for c in self.classes for f in dataclasses.fields(c)]
        return self.build(
            {name: values.pop(self._option(name)) for name in names if name not in self.skip}
        )

    def _option(self, name: str) -> str:
        return self.rename.get(name, name)

    def _parameter(
        self, item: dataclasses.Field[Any], hint: Any, help_text: str
    ) -> inspect.Parameter:
        kind = option_type(hint)
        default = self.defaults.get(item.name, item.default)
        if get_origin(kind) is list:
            default = list(default)
        name = self._option(item.name)
        flag = "--" + name.replace("_", "-")
        if kind is bool and default:
            flag += f"/--no-{flag[2:]}"
        option = typer.Option(
            flag,
            help=help_text,
            metavar=None if kind is bool else _metavar(kind),
            show_default=default is not None and default != [] and default is not False,
        )
        return inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=default,
            annotation=Annotated[kind, option],
        )


def with_options(**groups: OptionGroup) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorates a command: each named parameter is replaced by the options of its group.

    Args:
        groups: By the name of the parameter that takes what the group builds.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(**values: Any) -> None:
            built = {name: group.collect(values) for name, group in groups.items()}
            command(**values, **built)

        own = inspect.signature(command, eval_str=True).parameters.values()
        kept = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own if p.name not in groups]
        added = [p for group in groups.values() for p in group.parameters()]
        run.__signature__ = inspect.Signature([*kept, *added])  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in (*kept, *added)}
        return run

    return decorate


def attribute_docs(cls: type) -> dict[str, str]:
    """Reads what a class's docstring says under `Attributes:`, by attribute."""
    section = inspect.getdoc(cls) or ""
    section = section.partition("Attributes:\n")[2].split("\n\n")[0]
    entries = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", section, flags=re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}


def option_type(hint: Any) -> Any:
    """The type an option is parsed as: a sequence is given by repeating the option.

    Raises:
        TypeError: The field has a type that no option can express.
    """
    choices = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    for choice in choices:
        if get_origin(choice) in (Sequence, tuple, list):
            return list[get_args(choice)[0]]  # type: ignore[misc]
    plain = [c for c in choices if c in (bool, int, float, str)]
    if len(plain) != 1:
        raise TypeError(f"no command-line option can express the type {hint!r}")
    return plain[0] if type(None) not in choices else plain[0] | None


def _metavar(kind: Any) -> str:
    names = {int: "INT", float: "NUMBER", str: "TEXT"}
    return next(name for plain, name in names.items() if plain in (kind, *get_args(kind)))
