"""The offline API: give it prompts, get texts. Shaped like vLLM's, so a script runs on either."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from tqdm import tqdm

from minivllm.config import EngineConfig
from minivllm.engine.llm_engine import LLMEngine, Prompt
from minivllm.engine.request import RequestOutput
from minivllm.errors import ConfigError, InvalidRequestError
from minivllm.sampling_params import SamplingParams

Message = Mapping[str, str]


class LLM:
    """A model, loaded and ready to generate.

    Args:
        model: `smollm2`, a folder in Hugging Face's layout, a `.gguf` file, a hub name, or
            `random:<preset>` for random weights.
        device: `cpu`, `cuda`, or `auto`.
        dtype: `float32`, `bfloat16`, `float16`; `auto` is float32 on a CPU and bfloat16 on a GPU.
        attention_backend: `torch`, `triton`, or `auto`: triton on a GPU.
        block_size: Tokens per KV block.
        num_kv_blocks: Blocks in the pool; None is as many as fit.
        gpu_memory_utilization: Fraction of the GPU's memory that the engine may use.
        max_model_len: Longest sequence in tokens; None is as long as model and pool allow.
        max_num_batched_tokens: Token budget of a step.
        max_num_seqs: Most sequences that run at the same time.
        enable_prefix_caching: Reuse the KV blocks of equal prefixes.
        compile: `inductor`, `eager` (the pieces as they are), `none`, or `auto`: inductor on a GPU.
        compile_sizes: Numbers of tokens to compile for exactly, beside the general shape.
        compile_sizes_at_start: Compile for those now, rather than on first need.
        splitting_ops: Operations at which the model is split, and that are not compiled.
        strict: Fail, rather than compute something else, if the model branches on a size.
        compile_cache: Keep compiled pieces on disk for the next start.
        fusions: Chains of operations that Inductor is given as one; see `CompilationConfig`.
        enforce_eager: Compile nothing; the same as `compile="none"`.
        seed: For random weights, and for requests without a seed of their own.

    Raises:
        ConfigError: A value is impossible, or cannot work on this machine.
        ModelError: The model cannot be found, is damaged or not supported.
        OutOfMemoryError: It does not fit.
    """

    def __init__(
        self,
        model: str = "smollm2",
        *,
        device: str = "auto",
        dtype: str = "auto",
        attention_backend: str = "auto",
        block_size: int = 16,
        num_kv_blocks: int | None = None,
        gpu_memory_utilization: float = 0.9,
        max_model_len: int | None = None,
        max_num_batched_tokens: int = 8192,
        max_num_seqs: int = 256,
        enable_prefix_caching: bool = True,
        compile: str = "auto",
        compile_sizes: Sequence[int] = (),
        compile_sizes_at_start: bool = False,
        splitting_ops: Sequence[str] = ("minivllm::attention_with_output",),
        strict: bool = False,
        compile_cache: bool = True,
        fusions: Sequence[str] = (),
        enforce_eager: bool = False,
        seed: int = 0,
    ) -> None:
        options = {k: v for k, v in locals().items() if k not in ("self", "model")}
        self._engine: LLMEngine | None = LLMEngine(EngineConfig.from_options(model, options))
        self._ids = itertools.count()
        # Latest output of each request; a step serves all, whoever made the call that ran it.
        self._outputs: dict[str, RequestOutput] = {}

    @property
    def engine(self) -> LLMEngine:
        """The engine underneath.

        Raises:
            ConfigError: The `LLM` has been closed.
        """
        if self._engine is None:
            raise ConfigError("this LLM has been closed; make a new one")
        return self._engine

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Generates completions for all prompts together.

        Args:
            prompts: One prompt or several: strings, lists of token ids, or
                `{"prompt_token_ids": [...]}`.
            sampling_params: For all prompts, or one for each; None is the defaults.
            use_tqdm: Show a progress bar.

        Returns:
            One output for each prompt, in their order.

        Raises:
            InvalidRequestError: A prompt cannot be served. All are checked before any is started,
                so nothing is left running.
        """
        prompt_list = _as_list(prompts)
        params_list = self._params_for(prompt_list, sampling_params)
        engine = self.engine
        # All or nothing: a bad prompt is found before a good one has been started.
        prepared = []
        for prompt, params in zip(prompt_list, params_list, strict=True):
            request_id = str(next(self._ids))
            requests = engine.make_requests(request_id, prompt, params)
            prepared.append((request_id, prompt if isinstance(prompt, str) else None, requests))
        ids = [request_id for request_id, _, _ in prepared]
        try:
            for request_id, text, requests in prepared:
                engine.add_requests(request_id, text, requests)
            return self._run(ids, use_tqdm)
        except BaseException:  # Ctrl-C too: the next call must not find half-done requests
            for request_id in ids:
                engine.abort_request(request_id)
                self._outputs.pop(request_id, None)
            raise

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Answers one conversation or several, laid out by the model's chat template.

        Args:
            messages: `[{"role": "user", "content": "..."}]`, or a list of such conversations.
            sampling_params: As for `generate`.
            use_tqdm: Show a progress bar.

        Raises:
            InvalidRequestError: The model has no chat template, or it refuses the messages.
        """
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts: list[Prompt] = [self.apply_chat_template(c) for c in conversations]  # type: ignore[arg-type]
        return self.generate(prompts, sampling_params, use_tqdm)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Generates for one prompt and yields the output so far after every token.

        Leaving the loop early aborts the request.
        """
        engine, request_id = self.engine, str(next(self._ids))
        engine.add_request(request_id, prompt, sampling_params or SamplingParams(), stream=True)
        try:
            finished = False
            while not finished:
                output = self._next_output(request_id)
                finished = output.finished
                yield output
        finally:
            engine.abort_request(request_id)
            self._outputs.pop(request_id, None)

    def apply_chat_template(self, messages: Sequence[Message]) -> list[int]:
        """Lays a conversation out as the model was trained to see it, ready for an answer.

        Returns:
            Token ids.
        """
        tokenizer = self.engine.tokenizer
        if tokenizer is None or not tokenizer.chat_template:
            raise InvalidRequestError(
                f"the model {self.engine.config.model!r} has no chat template; use generate"
            )
        try:
            text = tokenizer.apply_chat_template(
                [dict(m) for m in messages], tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # templates raise what they like
            raise InvalidRequestError(f"the chat template refused the messages: {error}") from error
        # The template writes the special tokens itself.
        return list(tokenizer.encode(text, add_special_tokens=False))

    def stats(self) -> dict[str, Any]:
        """Counters of the engine, as a plain nested dict."""
        return self.engine.stats()

    def close(self) -> None:
        """Frees the model and the cache; calling it again does nothing."""
        self._engine = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self, request_ids: list[str], use_tqdm: bool) -> list[RequestOutput]:
        finished: dict[str, RequestOutput] = {}
        bar = tqdm(total=len(request_ids), desc="Generating", unit="req", disable=not use_tqdm)
        with bar:
            while len(finished) < len(request_ids):
                self._step()
                for request_id in request_ids:
                    if request_id in self._outputs:
                        finished[request_id] = self._outputs.pop(request_id)
                bar.update(len(finished) - bar.n)
        return [finished[request_id] for request_id in request_ids]

    def _next_output(self, request_id: str) -> RequestOutput:
        while request_id not in self._outputs:
            self._step()
        return self._outputs.pop(request_id)

    def _step(self) -> None:
        for output in self.engine.step():
            self._outputs[output.request_id] = output

    def _params_for(
        self,
        prompts: list[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise InvalidRequestError(
                f"{len(params)} sampling parameters for {len(prompts)} prompts: give one for all, "
                "or one for each"
            )
        return list(params)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Tells one prompt from several: a list of integers is one prompt."""
    if isinstance(prompts, str | dict):
        return [prompts]
    items = list(prompts)
    if items and all(type(item) is int for item in items):
        return [items]  # type: ignore[list-item]
    return items  # type: ignore[return-value]
