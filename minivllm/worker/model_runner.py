"""Turns one step's plan into one forward pass, and its last rows into tokens.

The runner holds what the scheduler's plan refers to: each running request's tokens and block table,
in a row of two host arrays. A step is then a few numpy gathers into the `InputBuffers`, one call of
the model over the flat batch, one product with the vocabulary for the rows that a token is sampled
from, and the sampler. It keeps the tokens it samples, so the next plan need not repeat them.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from minivllm.compilation.piecewise_backend import CompilationStats
from minivllm.compilation.wrapper import CompiledModel, compile_model
from minivllm.config import EngineConfig
from minivllm.engine.request import Logprob
from minivllm.engine.scheduler import NewRequestData, SchedulerOutput
from minivllm.forward_context import ForwardContext, set_forward_context
from minivllm.layers.sampler import Sampler, SamplingMetadata, logprob_dicts
from minivllm.models.decoder import DecoderForCausalLM
from minivllm.sampling_params import SamplingParams
from minivllm.worker.input_buffers import BatchRows, InputBuffers, ModelInputs


@dataclass
class RequestState:
    """What the worker keeps of a running request.

    Attributes:
        row: Its row in the runner's arrays.
        num_blocks: Blocks in its table.
        num_computed_tokens: Tokens in the cache before the coming step.
    """

    request_id: str
    row: int
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    sampling_params: SamplingParams
    seed: int
    stop_token_ids: frozenset[int]
    num_blocks: int
    num_computed_tokens: int

    @property
    def num_tokens(self) -> int:
        """Tokens known so far."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)


@dataclass(frozen=True)
class ModelRunnerOutput:
    """What a step has produced, for the requests whose gap it closed.

    Attributes:
        sampled_token_ids: By request.
        logprobs: By request, for those that asked.
    """

    sampled_token_ids: dict[str, int]
    logprobs: dict[str, dict[int, Logprob]]


class ModelRunner:
    """Runs one model on one device.

    Args:
        config: The engine's configuration, resolved.
        model: With its weights, on the device.
        max_model_len: Longest sequence, in tokens.
    """

    def __init__(self, config: EngineConfig, model: DecoderForCausalLM, max_model_len: int) -> None:
        self.model = model
        self.vocab_size = model.config.vocab_size
        self.device = torch.device(config.device)
        scheduler = config.scheduler
        self.buffers = InputBuffers(
            scheduler.max_num_batched_tokens,
            scheduler.max_num_seqs,
            max_model_len,
            config.cache.block_size,
            self.device,
        )
        self.attention_layers = {layer.name: layer for layer in model.attention_layers()}
        self.forward = compile_model(model, config, self.attention_layers)
        self.sampler = Sampler()
        self.requests: dict[str, RequestState] = {}
        self._free_rows = list(range(scheduler.max_num_seqs - 1, -1, -1))
        # Host memory that is never touched is never paid for, so the full rectangle is cheap.
        self._token_ids = np.zeros((scheduler.max_num_seqs, max_model_len), np.int32)
        self._block_tables = np.zeros(
            (scheduler.max_num_seqs, self.buffers.max_blocks_per_seq), np.int32
        )

    @torch.inference_mode()
    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Runs a step.

        Args:
            plan: What to compute, and whom to forget.
        """
        self._update_states(plan)
        batch = self._order(plan)
        if not batch:
            return ModelRunnerOutput({}, {})
        query_lens = np.array([plan.num_scheduled_tokens[r.request_id] for r in batch])
        inputs = self.buffers.fill(self._gather_rows(batch, query_lens))
        hidden = self._forward(inputs)
        output = self._sample(batch, query_lens, hidden)
        for request in batch:
            request.num_computed_tokens += plan.num_scheduled_tokens[request.request_id]
        return output

    def compilation_stats(self) -> dict[str, Any]:
        """What has been compiled, as a plain dict; all zeros if nothing is."""
        if isinstance(self.forward, CompiledModel):
            return dataclasses.asdict(self.forward.backend.stats)
        return dataclasses.asdict(CompilationStats())

    @torch.inference_mode()
    def profile(self, num_tokens: int, num_seqs: int) -> None:
        """Runs the largest step without attention, so that the memory it takes can be measured.

        Args:
            num_tokens: Tokens of the step.
            num_seqs: Rows to sample for, each in the most expensive way.
        """
        input_ids = self.buffers.input_ids.device[:num_tokens]
        positions = self.buffers.positions.device[:num_tokens]
        with set_forward_context(ForwardContext(None, self.attention_layers)):
            hidden = self.forward(input_ids, positions)
        num_seqs = min(num_seqs, num_tokens)
        params = SamplingParams(top_p=0.5, top_k=50, min_p=0.1)
        states = [
            RequestState(str(i), i, [0], [], params, i, frozenset(), 0, 0) for i in range(num_seqs)
        ]
        metadata = SamplingMetadata.build(states, self.vocab_size, self.device)
        self.sampler(self.model.compute_logits(hidden[:num_seqs]), metadata)

    def _update_states(self, plan: SchedulerOutput) -> None:
        for request_id in plan.removed_request_ids:
            self._free_rows.append(self.requests.pop(request_id).row)
        for new in plan.new_requests:
            self._add(new)
        for cached in plan.cached_requests:
            self._add_blocks(self.requests[cached.request_id], cached.new_block_ids)

    def _add(self, new: NewRequestData) -> None:
        state = RequestState(
            request_id=new.request_id,
            row=self._free_rows.pop(),
            prompt_token_ids=new.prompt_token_ids,
            output_token_ids=new.output_token_ids,
            sampling_params=new.sampling_params,
            seed=new.seed,
            stop_token_ids=new.stop_token_ids,
            num_blocks=0,
            num_computed_tokens=new.num_computed_tokens,
        )
        self.requests[new.request_id] = state
        self._token_ids[state.row, : state.num_tokens] = new.prompt_token_ids + new.output_token_ids
        self._block_tables[state.row] = 0
        self._add_blocks(state, new.block_ids)

    def _add_blocks(self, state: RequestState, block_ids: list[int]) -> None:
        if block_ids:
            end = state.num_blocks + len(block_ids)
            self._block_tables[state.row, state.num_blocks : end] = block_ids
            state.num_blocks = end

    def _order(self, plan: SchedulerOutput) -> list[RequestState]:
        """The step's requests, those with a single token first, as attention backends expect."""
        ids = sorted(plan.num_scheduled_tokens, key=lambda i: plan.num_scheduled_tokens[i] > 1)
        return [self.requests[request_id] for request_id in ids]

    def _gather_rows(self, batch: list[RequestState], query_lens: np.ndarray) -> BatchRows:
        rows = np.array([request.row for request in batch])
        num_computed = np.array([request.num_computed_tokens for request in batch])
        request_of = np.repeat(np.arange(len(batch)), query_lens)
        starts = np.cumsum(query_lens) - query_lens
        positions = num_computed[request_of] + np.arange(len(request_of)) - starts[request_of]
        return BatchRows(
            token_ids=self._token_ids[rows[request_of], positions],
            positions=positions,
            request_of=request_of,
            query_lens=query_lens,
            num_computed=num_computed,
            block_table=self._block_tables[rows],
        )

    def _forward(self, inputs: ModelInputs) -> torch.Tensor:
        with set_forward_context(ForwardContext(inputs.attn_metadata, self.attention_layers)):
            return self.forward(inputs.input_ids, inputs.positions)

    def _sample(
        self, batch: list[RequestState], query_lens: np.ndarray, hidden: torch.Tensor
    ) -> ModelRunnerOutput:
        """Samples for the requests whose last known token was computed in this step."""
        last_rows = np.cumsum(query_lens) - 1
        sampling = [
            (request, row)
            for request, row, query_len in zip(batch, last_rows, query_lens, strict=True)
            if request.num_computed_tokens + query_len == request.num_tokens
        ]
        if not sampling:
            return ModelRunnerOutput({}, {})
        requests = [request for request, _ in sampling]
        rows = torch.tensor([row for _, row in sampling], device=self.device)
        logits = self.model.compute_logits(hidden[rows])
        metadata = SamplingMetadata.build(requests, self.vocab_size, self.device)
        sampled = self.sampler(logits, metadata)
        token_ids = sampled.token_ids.tolist()
        logprobs = logprob_dicts(sampled, requests)
        for request, token_id in zip(requests, token_ids, strict=True):
            self._token_ids[request.row, request.num_tokens] = token_id
            request.output_token_ids.append(token_id)
        ids = [request.request_id for request in requests]
        return ModelRunnerOutput(
            dict(zip(ids, token_ids, strict=True)),
            {i: entry for i, entry in zip(ids, logprobs, strict=True) if entry is not None},
        )
