"""Text in, text out, one step at a time: the engine behind `LLM`, the command line and a server.

It tokenizes and checks prompts, fans a request out into its `n` completions, steps the core, and
turns tokens into text. `add_request` may be called between any two steps: that is continuous
batching.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypedDict

from minivllm.config import EngineConfig
from minivllm.engine.core import EngineCore
from minivllm.engine.output_processor import OutputProcessor
from minivllm.engine.request import FinishReason, Request, RequestOutput
from minivllm.errors import InvalidRequestError
from minivllm.models.source import find_model
from minivllm.models.tokenizer import eos_token_ids, load_tokenizer
from minivllm.sampling_params import SamplingParams


class TokensPrompt(TypedDict):
    """A prompt given as token ids, as vLLM writes it."""

    prompt_token_ids: list[int]


Prompt = str | Sequence[int] | TokensPrompt


class LLMEngine:
    """A core, a tokenizer, and the text side of all requests.

    Args:
        config: From `EngineConfig.from_options`.
    """

    def __init__(self, config: EngineConfig) -> None:
        source = find_model(config.model)
        self.config = config
        self.tokenizer = load_tokenizer(source)
        self.core = EngineCore(config, source, eos_token_ids(source))
        self.output_processor = OutputProcessor(self.tokenizer)

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether another step has anything to do."""
        return self.core.scheduler.has_unfinished_requests

    def make_requests(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        cache_salt: str | None = None,
    ) -> list[Request]:
        """Checks a prompt and makes one engine request for each of its `n` completions.

        Raises:
            InvalidRequestError: The prompt cannot be served; nothing has been added.
        """
        if self.tokenizer is None and params.stop:
            raise InvalidRequestError(
                f"stop={list(params.stop)!r} needs a tokenizer, and {self.config.model!r} has none;"
                " use stop_token_ids"
            )
        token_ids = self.tokenize(prompt)
        if params.n == 1:
            return [self.core.make_request(request_id, token_ids, params, cache_salt)]
        requests = []
        for i in range(params.n):
            # Completions differ by their seed alone; a given seed gives the same n completions.
            seed = None if params.seed is None else (params.seed + i) % 2**63
            child = replace(params, n=1, seed=seed)
            child_id = f"{request_id}/{i}"
            requests.append(self.core.make_request(child_id, token_ids, child, cache_salt))
        return requests

    def add_requests(
        self, request_id: str, prompt: str | None, requests: Sequence[Request], stream: bool = False
    ) -> None:
        """Queues what `make_requests` made: all completions, or none.

        Args:
            request_id: The user's name for it.
            prompt: The prompt's text, if it had one.
            requests: The completions.
            stream: Report it after every step, not only when it has finished.

        Raises:
            InvalidRequestError: The id is in use, or the request can never fit into the KV pool.
        """
        if request_id in self.output_processor:
            raise InvalidRequestError(f"request id {request_id!r} is in use already")
        added: list[Request] = []
        try:
            for request in requests:
                self.core.add_request(request)
                added.append(request)
        except InvalidRequestError:
            for request in added:
                self.core.finish_request(request.request_id, FinishReason.ABORT)
            raise
        self.output_processor.add(request_id, prompt, requests, stream)

    def add_request(
        self, request_id: str, prompt: Prompt, params: SamplingParams, stream: bool = False
    ) -> None:
        """Checks and queues a request; see `make_requests` and `add_requests`."""
        text = prompt if isinstance(prompt, str) else None
        self.add_requests(request_id, text, self.make_requests(request_id, prompt, params), stream)

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """Ends a request at once and frees its blocks.

        Returns:
            What it had produced, or None for an id that is unknown or finished.
        """
        running, output = self.output_processor.abort(request_id)
        for child_id in running:
            self.core.finish_request(child_id, FinishReason.ABORT)
        return output

    def step(self) -> list[RequestOutput]:
        """Runs one step; returns the requests that finished, and all that stream."""
        outputs, stopped = self.output_processor.process(self.core.step())
        for request_id, stop_string in stopped:
            self.core.finish_request(request_id, FinishReason.STOP, stop_string)
        return outputs

    def tokenize(self, prompt: Prompt) -> list[int]:
        """Turns a prompt into token ids.

        Raises:
            InvalidRequestError: It is text and the model has no tokenizer, or it is neither text
                nor a list of integers.
        """
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise InvalidRequestError(
                    f"the model {self.config.model!r} has no tokenizer: give the prompt as a list "
                    "of token ids"
                )
            return list(self.tokenizer.encode(prompt))
        token_ids = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else prompt
        if not isinstance(token_ids, Sequence) or not all(type(t) is int for t in token_ids):
            raise InvalidRequestError(
                f"prompt={str(prompt)[:60]!r}: expected a string, a list of token ids, or "
                "{'prompt_token_ids': [...]}"
            )
        return list(token_ids)

    def stats(self) -> dict[str, Any]:
        """See `EngineCore.stats`."""
        return self.core.stats()
