"""One request, from the moment it is added until its last token; and what its user gets back.

The scheduler needs only counters: how many tokens a request has (`num_tokens`), and for how many of
them keys and values are in the cache (`num_computed_tokens`). There is no prefill and no decode
state; a request is simply behind by one token or by a thousand.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from minivllm.sampling_params import SamplingParams


class RequestStatus(enum.Enum):
    """Where a request is; only the scheduler moves it."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()
    FINISHED = enum.auto()


class FinishReason(enum.StrEnum):
    """Why an output ended: a stop token or string, the length limit, or an abort."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass
class RequestMetrics:
    """When things happened to a request, in seconds of `time.perf_counter`.

    Attributes:
        arrival: Added to the engine.
        scheduled: First scheduled; the time before it was spent in the queue.
        first_token: First token sampled.
        finished: Last token sampled, or aborted.
        num_preemptions: How often it lost its blocks and had to be computed again.
    """

    arrival: float = field(default_factory=time.perf_counter)
    scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None
    num_preemptions: int = 0

    @property
    def queue_time(self) -> float | None:
        """Seconds from arrival until first scheduled."""
        return None if self.scheduled is None else self.scheduled - self.arrival

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival until the first token."""
        return None if self.first_token is None else self.first_token - self.arrival

    def time_per_output_token(self, num_output_tokens: int) -> float | None:
        """Mean seconds from one token to the next, or None with fewer than two tokens."""
        if self.finished is None or self.first_token is None or num_output_tokens < 2:
            return None
        return (self.finished - self.first_token) / (num_output_tokens - 1)


class Request:
    """What the scheduler knows of one request.

    Attributes:
        request_id: Unique among the requests of an engine.
        prompt_token_ids: The prompt; never changes.
        output_token_ids: Tokens sampled so far.
        sampling_params: How to sample, when to stop; `n` is 1 here.
        max_tokens: `sampling_params.max_tokens`, cut to what the context length allows.
        seed: For sampling; the user's, or one the engine drew.
        num_computed_tokens: Tokens whose keys and values are in the cache, or will be when the
            step that is scheduled has run.
        num_cached_tokens: Prompt tokens found in the prefix cache when it was first scheduled, or
            -1 before that.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling_params: SamplingParams,
        max_tokens: int,
        seed: int = 0,
        eos_token_ids: Sequence[int] = (),
        cache_salt: str | None = None,
    ) -> None:
        self.request_id = request_id
        self.prompt_token_ids = list(prompt_token_ids)
        self.output_token_ids: list[int] = []
        self.token_ids = list(prompt_token_ids)  # prompt and output, in one list
        self.sampling_params = sampling_params
        self.max_tokens = max_tokens
        self.seed = seed
        self.cache_salt = cache_salt
        self.status = RequestStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.num_computed_tokens = 0
        self.num_cached_tokens = -1
        self.metrics = RequestMetrics()
        eos = () if sampling_params.ignore_eos else tuple(eos_token_ids)
        self.stop_token_ids = frozenset((*eos, *sampling_params.stop_token_ids))

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens sampled so far."""
        return len(self.output_token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens known so far: prompt and output."""
        return len(self.token_ids)

    @property
    def is_finished(self) -> bool:
        """Whether it has left the scheduler."""
        return self.status is RequestStatus.FINISHED

    def append_output_token(self, token_id: int) -> None:
        """Adds a sampled token and decides whether the request is done because of it."""
        self.output_token_ids.append(token_id)
        self.token_ids.append(token_id)
        if self.metrics.first_token is None:
            self.metrics.first_token = time.perf_counter()
        enough = self.num_output_tokens >= self.sampling_params.min_tokens
        if enough and token_id in self.stop_token_ids:
            self.finish_reason, self.stop_reason = FinishReason.STOP, token_id
        elif self.num_output_tokens >= self.max_tokens:
            self.finish_reason = FinishReason.LENGTH


@dataclass(frozen=True)
class Logprob:
    """Natural-log probability of one token, its rank (1 is the most likely), and its text."""

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    """One completion of a prompt.

    Attributes:
        index: Which of the `n` completions.
        text: The text so far; empty if the model has no tokenizer.
        token_ids: The tokens so far, a stop token included.
        finish_reason: `stop`, `length`, `abort`, or None while it is running.
        stop_reason: The stop string, or the stop token's id, that ended it; else None.
        logprobs: For each token a dict from token id to `Logprob`, if asked for.
        cumulative_logprob: Sum of the sampled tokens' log-probabilities, if asked for.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None


@dataclass
class RequestOutput:
    """What `LLM.generate` returns for one prompt.

    Attributes:
        request_id: The engine's name for it.
        prompt: The prompt's text, if it was given as text.
        prompt_token_ids: The prompt's tokens.
        outputs: The `n` completions.
        finished: Whether all of them have ended.
        num_cached_tokens: Prompt tokens that came from the prefix cache.
        metrics: Timings of the first completion.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    metrics: RequestMetrics
