"""Decides, once per step, which requests compute how many tokens.

There is no prefill phase and no decode phase. Every request has `num_tokens` (known) and
`num_computed_tokens` (in the cache), and a step has one budget of tokens with which the scheduler
closes those gaps: running requests first, in order, then waiting ones. A long prompt that does not
fit simply gets part of its tokens now ("chunked prefill"), beside the single tokens of requests
that are generating. A request whose gap closes samples a token at the end of the step.

When the pool runs out of blocks, the request that was admitted last gives up its own and goes back
to the head of the queue, to be computed again ("preemption by recompute"). The oldest request
therefore always makes progress, and nobody waits for ever.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

from minivllm.config import SchedulerConfig
from minivllm.engine.kv_cache import KVCacheManager
from minivllm.engine.request import FinishReason, Request, RequestStatus
from minivllm.errors import InvalidRequestError
from minivllm.sampling_params import SamplingParams


@dataclass(frozen=True)
class NewRequestData:
    """A request that the worker does not know, or no longer: everything about it.

    A request that was preempted comes again as a new one, with the tokens it has generated.
    """

    request_id: str
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    sampling_params: SamplingParams
    seed: int
    stop_token_ids: frozenset[int]
    block_ids: list[int]
    num_computed_tokens: int


@dataclass(frozen=True)
class CachedRequestData:
    """A request that the worker knows: only what has changed since its last step."""

    request_id: str
    new_block_ids: list[int]
    num_computed_tokens: int


@dataclass
class SchedulerOutput:
    """One step's work, as a difference to what the worker already holds.

    Attributes:
        new_requests: Requests to add, first scheduled in this step.
        cached_requests: Requests scheduled before.
        num_scheduled_tokens: Tokens to compute, by request, in batch order.
        removed_request_ids: Finished or preempted since the last step: forget them first.
    """

    new_requests: list[NewRequestData] = field(default_factory=list)
    cached_requests: list[CachedRequestData] = field(default_factory=list)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    removed_request_ids: list[str] = field(default_factory=list)

    @property
    def total_num_scheduled_tokens(self) -> int:
        """Tokens of the step, over all requests."""
        return sum(self.num_scheduled_tokens.values())


@dataclass
class SchedulerStats:
    """Totals since the start."""

    num_steps: int = 0
    num_scheduled_tokens: int = 0
    num_preemptions: int = 0


class Scheduler:
    """The queue of waiting requests, the list of running ones, and the budget between them.

    Args:
        config: Token budget and sequence limit of a step.
        kv_cache: The block tables; only `KVCacheManager` changes them, on the scheduler's order.
        max_model_len: Longest sequence in tokens, prompt and output.
    """

    def __init__(
        self, config: SchedulerConfig, kv_cache: KVCacheManager, max_model_len: int
    ) -> None:
        self.config = config
        self.kv_cache = kv_cache
        self.max_model_len = max_model_len
        self.requests: dict[str, Request] = {}
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.stats = SchedulerStats()
        self._removed: list[str] = []

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether another step has anything to do."""
        return bool(self.requests)

    def add_request(self, request: Request) -> None:
        """Queues a request.

        Raises:
            InvalidRequestError: Its id is in use, or it can never fit, however long it waits.
        """
        if request.request_id in self.requests:
            raise InvalidRequestError(f"request id {request.request_id!r} is in use already")
        # The last sampled token is never computed, so it needs no slot.
        needed = request.num_prompt_tokens + request.max_tokens - 1
        if needed + 1 > self.max_model_len:
            raise InvalidRequestError(
                f"prompt of {request.num_prompt_tokens} tokens and max_tokens={request.max_tokens} "
                f"exceed the context length of {self.max_model_len} tokens"
            )
        if needed > self.kv_cache.max_tokens:
            raise InvalidRequestError(
                f"prompt and output need {needed} slots of the KV cache, which has "
                f"{self.kv_cache.max_tokens} in all; lower max_tokens or raise num_kv_blocks"
            )
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def schedule(self) -> SchedulerOutput:
        """Plans one step, and counts its tokens as computed.

        Counting now rather than after the step is what lets the next step be planned at once.
        """
        output = SchedulerOutput()
        budget = self.config.max_num_batched_tokens
        budget, preempted = self._schedule_running(output, budget)
        # Admitting somebody now would take the very blocks that were missing a moment ago.
        if not preempted:
            self._schedule_waiting(output, budget)
        output.removed_request_ids, self._removed = self._removed, []
        self.stats.num_steps += 1
        self.stats.num_scheduled_tokens += output.total_num_scheduled_tokens
        return output

    def update(self, output: SchedulerOutput, sampled_token_ids: dict[str, int]) -> list[Request]:
        """Takes a finished step's tokens: indexes full blocks, appends, ends requests.

        Args:
            output: What was planned.
            sampled_token_ids: The sampled token of each request whose gap was closed.

        Returns:
            The requests that got a token, in batch order; finished ones have left the scheduler.
        """
        updated = []
        for request_id in output.num_scheduled_tokens:
            request = self.requests.get(request_id)
            if request is None:  # aborted while the step ran
                continue
            self.kv_cache.index_full_blocks(request)
            if request_id not in sampled_token_ids:
                continue
            request.append_output_token(sampled_token_ids[request_id])
            if request.finish_reason is not None:
                self.finish(request_id, request.finish_reason)
            updated.append(request)
        return updated

    def finish(
        self, request_id: str, reason: FinishReason, stop_reason: str | None = None
    ) -> Request | None:
        """Ends a request and frees its blocks at once, whatever its state.

        Returns:
            The request, or None if the scheduler does not have it (any more).
        """
        request = self.requests.pop(request_id, None)
        if request is None:
            return None
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            self._removed.append(request_id)
        else:
            self.waiting.remove(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        request.stop_reason = stop_reason if stop_reason is not None else request.stop_reason
        request.metrics.finished = time.perf_counter()
        self.kv_cache.free(request)
        return request

    def _schedule_running(self, output: SchedulerOutput, budget: int) -> tuple[int, bool]:
        """Gives running requests their tokens. Returns the rest of the budget, and whether any
        request was preempted for it.
        """
        preempted = False
        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            num_new = min(request.num_tokens - request.num_computed_tokens, budget)
            end = request.num_computed_tokens + num_new
            while (new_blocks := self.kv_cache.allocate_slots(request, end)) is None:
                # The victim is the last admitted, perhaps the request itself; it comes after all
                # that are planned already, so nothing planned has to be taken back.
                victim = self.running[-1]
                self._preempt(victim)
                preempted = True
                if victim is request:
                    return budget, preempted
            output.cached_requests.append(
                CachedRequestData(request.request_id, new_blocks, request.num_computed_tokens)
            )
            self._count(output, request, num_new)
            budget -= num_new
            index += 1
        return budget, preempted

    def _schedule_waiting(self, output: SchedulerOutput, budget: int) -> None:
        """Admits waiting requests in order, until the first one that does not fit."""
        while self.waiting and budget > 0 and len(self.running) < self.config.max_num_seqs:
            request = self.waiting[0]
            # Looked up at admission, never before: any allocation may evict what was found.
            cached_blocks = self.kv_cache.find_cached_prefix(request)
            num_cached = len(cached_blocks) * self.kv_cache.block_size
            num_new = min(request.num_tokens - num_cached, budget)
            end = num_cached + num_new
            blocks = self.kv_cache.allocate_slots(request, end, cached_blocks)
            if blocks is None:
                return
            self.waiting.popleft()
            self._start(request, num_cached)
            output.new_requests.append(
                NewRequestData(
                    request_id=request.request_id,
                    prompt_token_ids=request.prompt_token_ids,
                    output_token_ids=list(request.output_token_ids),
                    sampling_params=request.sampling_params,
                    seed=request.seed,
                    stop_token_ids=request.stop_token_ids,
                    block_ids=blocks,
                    num_computed_tokens=num_cached,
                )
            )
            self._count(output, request, num_new)
            budget -= num_new

    def _start(self, request: Request, num_cached: int) -> None:
        if request.num_cached_tokens < 0:  # first admission; after a preemption it is not news
            request.num_cached_tokens = num_cached
            request.metrics.scheduled = time.perf_counter()
        self.kv_cache.record_lookup(request.num_tokens, num_cached)
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = num_cached
        self.running.append(request)

    def _count(self, output: SchedulerOutput, request: Request, num_new: int) -> None:
        output.num_scheduled_tokens[request.request_id] = num_new
        request.num_computed_tokens += num_new

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._removed.append(request.request_id)
        self.kv_cache.free(request)
        request.num_computed_tokens = 0
        request.status = RequestStatus.PREEMPTED
        request.metrics.num_preemptions += 1
        self.stats.num_preemptions += 1
        self.waiting.appendleft(request)
