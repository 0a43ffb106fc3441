"""What the command line shows of an output: text as it comes, a JSON document, a line on speed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from minivllm.engine.llm import LLM
    from minivllm.engine.request import CompletionOutput, Logprob, RequestOutput


def print_stream(outputs: Iterable[RequestOutput], has_text: bool) -> RequestOutput:
    """Prints a growing output as it grows; returns it when it is complete.

    Args:
        outputs: What `LLM.stream` yields; at least one.
        has_text: Whether the model has a tokenizer; without one, token ids are shown.
    """
    shown = 0
    for output in outputs:
        text = readable(output.outputs[0], has_text)
        if len(text) > shown:
            typer.echo(text[shown:], nl=False)
            shown = len(text)
    typer.echo()
    return output


def print_all(outputs: list[RequestOutput], has_text: bool) -> None:
    """Prints completed outputs, each under a heading that tells prompt and completion apart."""
    for number, output in enumerate(outputs, 1):
        for completion in output.outputs:
            heading = f"prompt {number} of {len(outputs)}"
            if len(output.outputs) > 1:
                heading += f", completion {completion.index + 1} of {len(output.outputs)}"
            typer.echo(f"--- {heading} ---\n{readable(completion, has_text)}")


def readable(completion: CompletionOutput, has_text: bool) -> str:
    """The completion's text, or its token ids if the model has no tokenizer."""
    return completion.text if has_text else " ".join(map(str, completion.token_ids))


def speed_line(llm: LLM, outputs: list[RequestOutput], seconds: float) -> str:
    """Tokens and seconds in one line.

    Args:
        llm: What generated them.
        outputs: All of them.
        seconds: From the first prompt's arrival to the last token.
    """
    num_tokens = sum(len(c.token_ids) for output in outputs for c in output.outputs)
    config = llm.engine.config
    first = [o.metrics.time_to_first_token for o in outputs]
    waited = [seconds for seconds in first if seconds is not None]
    delay = f"; first token after {min(waited):.2f} s" if waited else ""
    return (
        f"{num_tokens} tokens in {seconds:.2f} s: {num_tokens / seconds:.1f} tokens/s{delay} "
        f"({config.device}, {config.dtype}, {config.attention_backend} attention)"
    )


def as_document(llm: LLM, outputs: list[RequestOutput]) -> dict[str, Any]:
    """All outputs and the engine's counters as one value that JSON can hold.

    Times are in seconds; a time that does not exist (no second token, say) is None.
    """
    config = llm.engine.config
    return {
        "model": config.model,
        "device": config.device,
        "dtype": config.dtype,
        "attention_backend": config.attention_backend,
        "outputs": [_output(output) for output in outputs],
        "stats": llm.stats(),
    }


def _output(output: RequestOutput) -> dict[str, Any]:
    metrics, first = output.metrics, output.outputs[0]
    return {
        "prompt": output.prompt,
        "prompt_token_ids": output.prompt_token_ids,
        "num_cached_tokens": output.num_cached_tokens,
        "completions": [_completion(completion) for completion in output.outputs],
        "timings": {
            "queue_time": metrics.queue_time,
            "time_to_first_token": metrics.time_to_first_token,
            "time_per_output_token": metrics.time_per_output_token(len(first.token_ids)),
        },
        "num_preemptions": metrics.num_preemptions,
    }


def _completion(completion: CompletionOutput) -> dict[str, Any]:
    logprobs = completion.logprobs
    return {
        **dataclasses.asdict(completion),
        "cumulative_logprob": _finite(completion.cumulative_logprob),
        "logprobs": None if logprobs is None else [_position(entry) for entry in logprobs],
    }


def _position(entry: dict[int, Logprob]) -> dict[str, dict[str, Any]]:
    return {
        str(token): {**dataclasses.asdict(logprob), "logprob": _finite(logprob.logprob)}
        for token, logprob in entry.items()
    }


def _finite(value: float | None) -> float | None:
    """JSON has no infinity and no NaN."""
    return value if value is None or math.isfinite(value) else None
