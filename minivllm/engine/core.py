"""The one loop: schedule, execute, update.

`EngineCore` owns the scheduler and the model runner and knows nothing of text: tokens come in,
tokens go out. Data goes one way around: only the scheduler changes requests, only the KV-cache
manager changes block tables, and the runner only ever sees a plan.
"""

from __future__ import annotations

import dataclasses
import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from minivllm.attention import make_backend
from minivllm.config import EngineConfig, ModelConfig
from minivllm.engine.kv_cache import KVCacheManager
from minivllm.engine.request import FinishReason, Logprob, Request
from minivllm.engine.scheduler import Scheduler
from minivllm.errors import ConfigError, InvalidRequestError
from minivllm.layers.linear import can_pack
from minivllm.models.decoder import DecoderForCausalLM
from minivllm.models.loader import load_weights
from minivllm.models.source import ModelSource
from minivllm.sampling_params import SamplingParams
from minivllm.worker.memory import allocate_kv_cache, choose_num_kv_blocks, explain_out_of_memory
from minivllm.worker.model_runner import ModelRunner

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepResult:
    """What one step brought.

    Attributes:
        updated: Requests that got a token, in batch order.
        logprobs: Of those tokens, by request id, where asked for.
    """

    updated: list[Request]
    logprobs: dict[str, dict[int, Logprob]]


class EngineCore:
    """A model with its cache, ready to step.

    Args:
        config: Resolved (see `EngineConfig.resolved`).
        source: The model, as found by `find_model`.
        eos_token_ids: Tokens that end a sequence.

    Raises:
        ConfigError: The pool is too small for one sequence, or the like.
        OutOfMemoryError: Weights or cache do not fit.
        ModelError: The weights are damaged.
    """

    def __init__(
        self, config: EngineConfig, source: ModelSource, eos_token_ids: Sequence[int]
    ) -> None:
        self.config = config
        self.model_config = source.config
        self.eos_token_ids = tuple(eos_token_ids)
        wanted_len = _wanted_model_len(config, source.config)
        with explain_out_of_memory("the weights"):
            model = _build_model(config, source, wanted_len)
        with explain_out_of_memory("the input buffers"):
            self.runner = ModelRunner(config, model, wanted_len)
        num_blocks = choose_num_kv_blocks(config, source.config, self.runner, wanted_len)
        self.max_model_len = _fitting_model_len(config, num_blocks, wanted_len)
        with explain_out_of_memory("the KV cache"):
            allocate_kv_cache(config, model, num_blocks)
        cache = config.cache
        self.kv_cache = KVCacheManager(num_blocks, cache.block_size, cache.enable_prefix_caching)
        self.scheduler = Scheduler(config.scheduler, self.kv_cache, self.max_model_len)
        self._seeds = random.Random(config.seed)

    def make_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        cache_salt: str | None = None,
    ) -> Request:
        """Checks a prompt and makes a request of it, without adding it.

        Raises:
            InvalidRequestError: The prompt is empty, too long, or has a token that the model does
                not know.
        """
        num_prompt, limit = len(prompt_token_ids), self.max_model_len
        if num_prompt == 0:
            raise InvalidRequestError("the prompt is empty: at least one token is needed")
        vocab_size = self.model_config.vocab_size
        for token in (*prompt_token_ids, *params.stop_token_ids):
            if not 0 <= token < vocab_size:
                raise InvalidRequestError(
                    f"token id {token} is out of range: the model has ids 0 to {vocab_size - 1}"
                )
        if num_prompt >= limit:
            raise InvalidRequestError(
                f"the prompt has {num_prompt} tokens, but the context length is {limit} and "
                "leaves no room for an answer; shorten the prompt or raise max_model_len"
            )
        if params.logprobs is not None and params.logprobs > vocab_size:
            raise InvalidRequestError(
                f"logprobs={params.logprobs} exceeds the vocabulary of {vocab_size} tokens"
            )
        room = limit - num_prompt
        if params.min_tokens > room:
            raise InvalidRequestError(
                f"min_tokens={params.min_tokens} cannot be reached: a prompt of {num_prompt} "
                f"tokens leaves room for {room} of the context length of {limit}"
            )
        return Request(
            request_id,
            prompt_token_ids,
            params,
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            seed=self._seeds.getrandbits(63) if params.seed is None else params.seed,
            eos_token_ids=self.eos_token_ids,
            cache_salt=cache_salt,
        )

    def add_request(self, request: Request) -> None:
        """Queues a request; see `Scheduler.add_request` for what is refused."""
        self.scheduler.add_request(request)

    def finish_request(
        self, request_id: str, reason: FinishReason, stop_reason: str | None = None
    ) -> None:
        """Ends a request now and frees everything it holds; unknown ids are ignored."""
        self.scheduler.finish(request_id, reason, stop_reason)

    def step(self) -> StepResult:
        """Runs one step. With nothing to do, it does nothing."""
        plan = self.scheduler.schedule()
        output = self.runner.execute(plan)
        updated = self.scheduler.update(plan, output.sampled_token_ids)
        return StepResult(updated, output.logprobs)

    def stats(self) -> dict[str, Any]:
        """Counters since the start and the state of the pool, as a plain nested dict."""
        pool = self.kv_cache.pool
        return {
            "compilation": self.runner.compilation_stats(),
            "scheduler": {
                **dataclasses.asdict(self.scheduler.stats),
                "num_running": len(self.scheduler.running),
                "num_waiting": len(self.scheduler.waiting),
            },
            "kv_cache": {
                "num_blocks": pool.num_blocks,
                "num_free_blocks": pool.num_free,
                "num_used_blocks": pool.num_blocks - pool.num_free,
                "block_size": self.kv_cache.block_size,
                "num_evictions": pool.num_evictions,
            },
            "prefix_cache": {
                "num_queried_tokens": self.kv_cache.stats.queries,
                "num_hit_tokens": self.kv_cache.stats.hits,
            },
        }


def _build_model(
    config: EngineConfig, source: ModelSource, max_model_len: int
) -> DecoderForCausalLM:
    """Builds the model on its device in its dtype, and fills in the weights."""
    dtype = getattr(torch, config.dtype)
    backend = make_backend(config, source.config)
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(config.device):
            model = DecoderForCausalLM(source.config, backend, max_model_len)
    finally:
        torch.set_default_dtype(previous)
    load_weights(model, source, config.seed)
    if can_pack(config.device, config.dtype):
        model.pack()
    return model.eval()


def _wanted_model_len(config: EngineConfig, model: ModelConfig) -> int:
    limit = model.max_position_embeddings
    if config.max_model_len is None:
        return limit
    if config.max_model_len > limit:
        raise ConfigError(
            f"max_model_len={config.max_model_len} is more than the model was made for "
            f"({limit} positions)"
        )
    return config.max_model_len


def _fitting_model_len(config: EngineConfig, num_blocks: int, wanted: int) -> int:
    """The context length, given the pool: one sequence must fit alone, or it could never end."""
    capacity = num_blocks * config.cache.block_size
    if capacity >= wanted:
        return wanted
    if config.max_model_len is not None:
        raise ConfigError(
            f"max_model_len={wanted} needs {-(-wanted // config.cache.block_size)} KV blocks of "
            f"{config.cache.block_size} tokens, but the pool has {num_blocks}; lower max_model_len "
            "or give the pool more memory (num_kv_blocks, gpu_memory_utilization)"
        )
    logger.info("context length cut from %d to %d tokens to fit the KV pool", wanted, capacity)
    return capacity
