"""From tokens to what a user reads: text, stop strings, log-probabilities, `n` completions in one.

The core ends a request at a stop token or at the length limit. A stop STRING can only be seen in
text, and may begin in one token and end in another, so it is found here, and the core is told to
end the request.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from minivllm.engine.core import StepResult
from minivllm.engine.detokenizer import IncrementalDetokenizer
from minivllm.engine.request import (
    CompletionOutput,
    FinishReason,
    Logprob,
    Request,
    RequestOutput,
)


@dataclass
class _Completion:
    """One of a prompt's `n` completions: an engine request and its text so far."""

    request: Request
    detokenizer: IncrementalDetokenizer
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    cumulative_logprob: float = 0.0


@dataclass
class _Parent:
    """What the user asked for, under the user's request id."""

    request_id: str
    prompt: str | None
    completions: list[_Completion]
    stream: bool


class OutputProcessor:
    """Holds the user's side of all unfinished requests.

    Args:
        tokenizer: The model's, or None if it has none: then there is no text, only tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self.tokenizer = tokenizer
        self._parents: dict[str, _Parent] = {}
        self._owners: dict[str, tuple[_Parent, _Completion]] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._parents

    def add(
        self, request_id: str, prompt: str | None, requests: Sequence[Request], stream: bool
    ) -> None:
        """Registers a user's request, made of one engine request per completion."""
        completions = [
            _Completion(
                request,
                IncrementalDetokenizer(
                    self.tokenizer, request.prompt_token_ids, request.sampling_params
                ),
            )
            for request in requests
        ]
        parent = _Parent(request_id, prompt, completions, stream)
        self._parents[request_id] = parent
        for completion in completions:
            self._owners[completion.request.request_id] = (parent, completion)

    def process(self, step: StepResult) -> tuple[list[RequestOutput], list[tuple[str, str]]]:
        """Takes a step's tokens.

        Returns:
            Outputs to show: finished requests, and those that stream; and for the core the
            requests that a stop string has ended, with that string.
        """
        touched: dict[str, _Parent] = {}
        stopped: list[tuple[str, str]] = []
        for request in step.updated:
            parent, completion = self._owners[request.request_id]
            stop_string = self._append(completion, step.logprobs.get(request.request_id))
            if stop_string is not None and request.finish_reason is not FinishReason.ABORT:
                # A stop string counts even if the same token also reached the length limit.
                request.finish_reason, request.stop_reason = FinishReason.STOP, stop_string
                stopped.append((request.request_id, stop_string))
            touched[parent.request_id] = parent
        return self._collect(touched.values()), stopped

    def abort(self, request_id: str) -> tuple[list[str], RequestOutput | None]:
        """Forgets a request.

        Returns:
            The engine requests to end, and the output so far; empty and None for an unknown id.
        """
        parent = self._parents.get(request_id)
        if parent is None:
            return [], None
        running = [c.request for c in parent.completions if c.request.finish_reason is None]
        for request in running:
            request.finish_reason = FinishReason.ABORT
        output = self._output(parent)
        self._forget(parent)
        return [request.request_id for request in running], output

    def _append(self, completion: _Completion, logprobs: dict[int, Logprob] | None) -> str | None:
        request = completion.request
        token = request.output_token_ids[-1]
        if logprobs is not None:
            completion.logprobs.append(self._with_text(logprobs))
            completion.cumulative_logprob += logprobs[token].logprob
        at_stop_token = request.finish_reason is FinishReason.STOP
        return completion.detokenizer.append([token], at_stop_token)

    def _with_text(self, logprobs: dict[int, Logprob]) -> dict[int, Logprob]:
        if self.tokenizer is None:
            return logprobs
        return {
            token: Logprob(entry.logprob, entry.rank, str(self.tokenizer.decode([token])))
            for token, entry in logprobs.items()
        }

    def _collect(self, parents: Iterable[_Parent]) -> list[RequestOutput]:
        outputs = []
        for parent in parents:
            finished = all(c.request.finish_reason is not None for c in parent.completions)
            if finished or parent.stream:
                outputs.append(self._output(parent))
            if finished:
                self._forget(parent)
        return outputs

    def _forget(self, parent: _Parent) -> None:
        del self._parents[parent.request_id]
        for completion in parent.completions:
            del self._owners[completion.request.request_id]

    def _output(self, parent: _Parent) -> RequestOutput:
        completions = []
        for index, completion in enumerate(parent.completions):
            request = completion.request
            asked = request.sampling_params.logprobs is not None
            reason = request.finish_reason
            completions.append(
                CompletionOutput(
                    index=index,
                    text=completion.detokenizer.visible_text(finished=reason is not None),
                    token_ids=list(request.output_token_ids),
                    finish_reason=None if reason is None else reason.value,
                    stop_reason=request.stop_reason,
                    logprobs=list(completion.logprobs) if asked else None,
                    cumulative_logprob=completion.cumulative_logprob if asked else None,
                )
            )
        first = parent.completions[0].request
        return RequestOutput(
            request_id=parent.request_id,
            prompt=parent.prompt,
            prompt_token_ids=first.prompt_token_ids,
            outputs=completions,
            finished=all(c.finish_reason is not None for c in completions),
            num_cached_tokens=max(0, first.num_cached_tokens),
            metrics=first.metrics,
        )
