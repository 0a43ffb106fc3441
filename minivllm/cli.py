"""The command `minivllm`: generate, chat, inspect, doctor.

Every mistake a user can make ends in one line, `error: ...`, on standard error and exit code 1
(2 for a wrong option, 130 for Ctrl-C). A traceback means that minivllm itself is broken. Torch is
imported inside the commands, so that help and mistyped options answer at once.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from minivllm.cli_options import OptionGroup, with_options
from minivllm.config import CacheConfig, CompilationConfig, EngineConfig, SchedulerConfig
from minivllm.errors import InvalidRequestError, MinivllmError
from minivllm.sampling_params import SamplingParams
from minivllm.version import __version__

if TYPE_CHECKING:
    from minivllm.engine.llm import LLM
    from minivllm.engine.llm_engine import Prompt
    from minivllm.engine.request import RequestOutput

app = typer.Typer(
    name="minivllm",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

inspect_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Look inside.")
app.add_typer(inspect_app, name="inspect")

ENGINE_OPTIONS = OptionGroup(
    classes=(EngineConfig, CacheConfig, SchedulerConfig, CompilationConfig),
    build=dict,
    skip=frozenset({"model", "cache", "scheduler", "compilation"}),
    rename={"seed": "engine_seed"},
)
# Greedy, so that the same command prints the same text; and long enough for an answer.
SAMPLING_OPTIONS = OptionGroup(
    classes=(SamplingParams,),
    build=lambda values: SamplingParams(**values),
    defaults={"temperature": 0.0, "max_tokens": 256},
)

Model = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        metavar="NAME",
        help="`smollm2`, a folder in Hugging Face's layout, a .gguf file, a hub name, or "
        "random:<preset> for random weights.",
    ),
]
Stats = Annotated[bool, typer.Option("--stats", help="Print a line on speed to standard error.")]
Verbose = Annotated[bool, typer.Option("--verbose", help="Show what the engine logs.")]


def main() -> None:
    """Runs the command line and exits."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        # A terminal that cannot show a character must not end a generation half-way.
        stream.reconfigure(errors="surrogateescape" if stream is sys.stdin else "replace")  # type: ignore[union-attr]
    try:
        app()
    except MinivllmError as error:
        _print_error(error)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"minivllm {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Generate text with vLLM V1's execution design, small enough to read."""


@app.command()
@with_options(sampling=SAMPLING_OPTIONS, engine=ENGINE_OPTIONS)
def generate(
    prompts: Annotated[
        list[str] | None, typer.Argument(metavar="PROMPT", help="Texts to continue.")
    ] = None,
    prompt_file: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE",
            help="A text file holding one prompt, or a .json file holding a list of prompts (texts "
            'or lists of token ids); "-" is one prompt on standard input. Repeatable.',
        ),
    ] = None,
    token_ids: Annotated[
        list[str] | None,
        typer.Option(metavar="IDS", help='A prompt as token ids: "1,2,3". Repeatable.'),
    ] = None,
    model: Model = "smollm2",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document instead of text.")
    ] = False,
    stats: Stats = False,
    verbose: Verbose = False,
    *,
    sampling: SamplingParams,
    engine: dict[str, Any],
) -> None:
    """Continue prompts, as raw text; a single one is shown as it is generated."""
    all_prompts: list[Prompt] = [_checked_text(prompt) for prompt in prompts or ()]
    for name in prompt_file or ():
        all_prompts += _read_prompts(name)
    all_prompts += [_parse_token_ids(text) for text in token_ids or ()]
    if not all_prompts:
        raise typer.BadParameter("give a PROMPT, --prompt-file or --token-ids")
    with _load(model, engine, verbose) as llm:
        has_text, start = llm.engine.tokenizer is not None, time.perf_counter()
        if len(all_prompts) == 1 and sampling.n == 1 and not as_json:
            outputs = [_stream(llm, all_prompts[0], sampling)]
        else:
            outputs = llm.generate(all_prompts, sampling, use_tqdm=sys.stderr.isatty())
        seconds = time.perf_counter() - start
        _show(llm, outputs, as_json, len(all_prompts) * sampling.n > 1, has_text)
        _print_stats(llm, outputs, seconds, stats)


@app.command()
@with_options(sampling=SAMPLING_OPTIONS.without("n", "logprobs"), engine=ENGINE_OPTIONS)
def chat(
    message: Annotated[
        str | None, typer.Argument(help="Answer this and exit; without it, chat line by line.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="A system message to start with.")] = None,
    model: Model = "smollm2",
    stats: Stats = False,
    verbose: Verbose = False,
    *,
    sampling: SamplingParams,
    engine: dict[str, Any],
) -> None:
    """Answer a message, or chat: lines from standard input, until Ctrl-D."""
    history = [] if system is None else [{"role": "system", "content": _checked_text(system)}]
    first = None if message is None else _checked_text(message)
    with _load(model, engine, verbose) as llm:
        # A model that cannot chat should say so before the first line is typed.
        llm.apply_chat_template([*history, {"role": "user", "content": "Hello"}])
        if first is not None:
            _answer(llm, history, first, sampling, stats)
            return
        failed = False
        for line in _typed_lines():
            try:
                _answer(llm, history, _checked_text(line), sampling, stats)
            except InvalidRequestError as error:
                _print_error(error)
                failed = True
    if failed:
        raise typer.Exit(1)


@inspect_app.command()
@with_options(engine=ENGINE_OPTIONS)
def pieces(
    model: Model = "smollm2",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document instead of a table.")
    ] = False,
    graph: Annotated[
        Literal["text", "mermaid", "svg", "code", "fusions"] | None,
        typer.Option(help="Print the split graph, or the generated code, instead of the table."),
    ] = None,
    verbose: Verbose = False,
    *,
    engine: dict[str, Any],
) -> None:
    """Show the pieces that a model is compiled in, and the graph that they were split from."""
    if as_json and graph:
        raise typer.BadParameter("--json holds the graphs already; give one of --json and --graph")
    if engine["compile"] == "auto" and not engine["enforce_eager"]:
        engine["compile"] = "inductor"  # on a CPU, too: there would be nothing to see otherwise
    with _load(model, engine, verbose) as llm:
        from minivllm.inspect.pieces import inspect_pieces, render_graph, render_table

        report = inspect_pieces(llm)
    if as_json:
        typer.echo(json.dumps(report.as_dict(), indent=2))
    else:
        typer.echo(render_graph(report, graph) if graph else render_table(report))


@app.command()
def doctor(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document instead of a table.")
    ] = False,
) -> None:
    """Say what this machine can do, and what minivllm will therefore use."""
    _silence_libraries()
    from minivllm.doctor import examine, print_report

    report = examine()
    if as_json:
        typer.echo(json.dumps(report.as_dict(), indent=2))
    else:
        print_report(report)
    if not report.usable:
        raise typer.Exit(1)


def _load(model: str, engine: dict[str, Any], verbose: bool) -> LLM:
    detail = "%(levelname)s %(name)s" if verbose else "%(name)s"
    logging.basicConfig(format=f"{detail}: %(message)s", stream=sys.stderr)
    logging.getLogger("minivllm").setLevel(logging.INFO if verbose else logging.WARNING)
    _silence_libraries()
    from minivllm.engine.llm import LLM

    return LLM(model, **engine)


def _silence_libraries() -> None:
    """Keeps what other libraries tell their own users away from ours; set variables win."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def _stream(llm: LLM, prompt: Prompt, params: SamplingParams) -> RequestOutput:
    from minivllm.cli_output import print_stream

    # Closing aborts the request, so that Ctrl-C leaves nothing running.
    with closing(llm.stream(prompt, params)) as outputs:  # type: ignore[type-var]
        return print_stream(outputs, has_text=llm.engine.tokenizer is not None)


def _show(
    llm: LLM, outputs: list[RequestOutput], as_json: bool, several: bool, has_text: bool
) -> None:
    from minivllm.cli_output import as_document, print_all

    if as_json:
        typer.echo(json.dumps(as_document(llm, outputs), indent=2, allow_nan=False))
    elif several:
        print_all(outputs, has_text)


def _answer(
    llm: LLM, history: list[dict[str, str]], message: str, params: SamplingParams, stats: bool
) -> None:
    """Streams the answer to a message; both join the history once the answer is complete."""
    turn = {"role": "user", "content": message}
    start = time.perf_counter()
    output = _stream(llm, llm.apply_chat_template([*history, turn]), params)
    _print_stats(llm, [output], time.perf_counter() - start, stats)
    history += [turn, {"role": "assistant", "content": output.outputs[0].text}]


def _typed_lines() -> Iterator[str]:
    """Lines that are not blank, from a person or a pipe, until the end of the input."""
    if not sys.stdin.isatty():
        yield from (line.rstrip("\n") for line in sys.stdin if line.strip())
        return
    while True:
        try:
            line = input("> ")
        except EOFError:
            typer.echo()  # the shell's prompt belongs on a line of its own
            return
        if line.strip():
            yield line


def _read_prompts(name: str) -> list[Prompt]:
    """Reads one text prompt, or a JSON list of prompts; the engine checks each of the latter."""
    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        text = data.decode("utf-8")
        prompts = json.loads(text) if name.endswith(".json") else [text.removesuffix("\n")]
    except OSError as error:
        raise InvalidRequestError(f"prompt file {name!r}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidRequestError(
            f"prompt file {name!r} is not UTF-8 text (byte {error.start})"
        ) from error
    except ValueError as error:
        raise InvalidRequestError(f"prompt file {name!r} is not valid JSON: {error}") from error
    if not isinstance(prompts, list) or not prompts:
        raise InvalidRequestError(
            f"prompt file {name!r}: expected a list of prompts, such as "
            '["Hello", [1, 2, 3]], with at least one'
        )
    return prompts


def _parse_token_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")] if text.strip() else []
    except ValueError:
        raise InvalidRequestError(
            f"--token-ids {text!r}: expected integers separated by commas, such as 1,2,3"
        ) from None


def _checked_text(text: str) -> str:
    """Refuses text that was not UTF-8; Python hides such bytes in surrogates."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"the text is not valid UTF-8 at character {error.start}"
        ) from error
    return text


def _print_stats(llm: LLM, outputs: list[RequestOutput], seconds: float, wanted: bool) -> None:
    if wanted:
        from minivllm.cli_output import speed_line

        typer.echo(speed_line(llm, outputs, seconds), err=True)


def _print_error(error: MinivllmError) -> None:
    # Messages of torch or of the system inside may have many lines; a user gets one.
    typer.echo(f"error: {' '.join(str(error).split())}", err=True)
