"""What the rows of one step need to be sampled, collected on the host and copied in one go.

Only what some row asks for is built, and nothing here waits for the device: the copies start from
pinned memory, and every decision that Python has to take later is a host value.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from minivllm.sampling_params import SamplingParams

FAN_OUT = 16  # children of a node in the tree that tokens are drawn from
# Normal float32 numbers: a GPU may flush anything smaller to 0, and 0 / 0 is NaN; so is -inf / inf.
_MIN_TEMPERATURE = float(np.finfo(np.float32).tiny)
_MAX_TEMPERATURE = float(np.finfo(np.float32).max)


class SamplingRequest(Protocol):
    """What the sampler needs to know of a request."""

    @property
    def sampling_params(self) -> SamplingParams: ...  # noqa: D102
    @property
    def seed(self) -> int: ...  # noqa: D102
    @property
    def prompt_token_ids(self) -> Sequence[int]: ...  # noqa: D102
    @property
    def output_token_ids(self) -> Sequence[int]: ...  # noqa: D102
    @property
    def stop_token_ids(self) -> Collection[int]: ...  # noqa: D102


@dataclass
class Penalties:
    """The logits that penalties change, one entry per (row, token) seen; no pair comes twice.

    Attributes:
        rows: int64 `[num_entries]`.
        tokens: int64 `[num_entries]`.
        repetition: float32 `[num_entries]`, divides a positive logit, multiplies a negative one.
        subtract: float32 `[num_entries]`, presence penalty plus frequency penalty times count.
    """

    rows: torch.Tensor
    tokens: torch.Tensor
    repetition: torch.Tensor
    subtract: torch.Tensor


@dataclass
class SamplingMetadata:
    """How the rows of one step are sampled. Tensors lie on the logits' device.

    The flags and counts are host values, so that work nobody needs is skipped without a
    device-to-host copy.

    Attributes:
        temperature: float32 `[num_rows]`, 0 for greedy rows.
        top_k: int64 `[num_rows]`, the vocabulary's size where it is off.
        top_p: float32 `[num_rows]`, 1 where it is off.
        min_p: float32 `[num_rows]`, 0 where it is off.
        uniforms: float64 `[num_rows, num_levels]` in [0, 1), one per level of the tree over the
            vocabulary that tokens are drawn from.
        all_greedy: No row draws.
        all_random: Every row draws.
        max_top_k: Largest `top_k` among the rows that use it; None if none does.
        need_top_p: Some row uses it.
        need_min_p: Some row uses it.
        top_p_within_top_k: Every row that uses top-p uses top-k too, so that the `max_top_k` most
            likely tokens are all that has to be sorted.
        stop_mask: (rows, tokens), int64 `[num_entries]` each: the stop tokens of rows that have
            not reached their `min_tokens`; None if there are none.
        penalties: None if no row has any.
        num_logprobs: Largest number of log-probabilities any row asked for; None if none asked.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    uniforms: torch.Tensor
    all_greedy: bool
    all_random: bool
    max_top_k: int | None
    need_top_p: bool
    need_min_p: bool
    top_p_within_top_k: bool
    stop_mask: tuple[torch.Tensor, torch.Tensor] | None
    penalties: Penalties | None
    num_logprobs: int | None

    @classmethod
    def build(
        cls,
        requests: Sequence[SamplingRequest],
        vocab_size: int,
        device: torch.device | str,
    ) -> SamplingMetadata:
        """Collects the parameters of the requests that sample in this step.

        Args:
            requests: One per row of the logits, in their order.
            vocab_size: Columns of the logits.
            device: Where the logits are.
        """
        params = [request.sampling_params for request in requests]
        top_ks = [p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params]
        drawing = [(p, k) for p, k in zip(params, top_ks) if not p.greedy]
        # One copy for all of them; float64 holds each of them exactly.
        numbers = _to_device(_numbers(requests, top_ks, vocab_size), device)
        temperature, top_k, top_p, min_p = numbers[:4].unbind(0)
        return cls(
            temperature=temperature.float(),
            top_k=top_k.long(),
            top_p=top_p.float(),
            min_p=min_p.float(),
            uniforms=numbers[4:].T,
            all_greedy=not drawing,
            all_random=len(drawing) == len(params),
            max_top_k=max((k for _, k in drawing if k < vocab_size), default=None),
            need_top_p=any(p.top_p < 1.0 for p, _ in drawing),
            need_min_p=any(p.min_p > 0.0 for p, _ in drawing),
            top_p_within_top_k=all(k < vocab_size for p, k in drawing if p.top_p < 1.0),
            stop_mask=_stop_mask(requests, vocab_size, device),
            penalties=_penalties(requests, device),
            num_logprobs=max((p.logprobs for p in params if p.logprobs is not None), default=None),
        )


def uniforms(seeds: Sequence[int], indices: Sequence[int], num_levels: int) -> np.ndarray:
    """The random numbers of some (seed, index) pairs: a hash, not a stream.

    SplitMix64 (Steele, Lea and Flood 2014), used as a tree: the seed's hash starts a generator
    whose outputs, one per index, start generators of their own.

    Args:
        seeds: `[n]`, taken modulo 2**64.
        indices: `[n]`, at least 0.
        num_levels: How many numbers per pair.

    Returns:
        float64 `[n, num_levels]` in [0, 1), multiples of 2**-53.
    """
    first = np.zeros(1, np.uint64)
    state = _splitmix64(np.array([seed % 2**64 for seed in seeds], np.uint64), first)
    state = _splitmix64(state, np.array(indices, np.uint64))
    bits = _splitmix64(state[:, None], np.arange(num_levels, dtype=np.uint64))
    return (bits >> np.uint64(11)) * 2.0**-53


def _splitmix64(state: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Output number `index` of the generator that starts at `state`; uint64, wrapping."""
    z = state + (index + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _num_levels(vocab_size: int) -> int:
    levels = 0
    while vocab_size > 1:
        levels, vocab_size = levels + 1, -(-vocab_size // FAN_OUT)
    return levels


def _numbers(
    requests: Sequence[SamplingRequest], top_ks: Sequence[int], vocab_size: int
) -> np.ndarray:
    """float64 `[4 + num_levels, num_rows]`: temperature, top-k, top-p, min-p, uniform numbers."""
    params = [request.sampling_params for request in requests]
    uniform = uniforms(
        [request.seed for request in requests],
        [len(request.output_token_ids) for request in requests],
        _num_levels(vocab_size),
    )
    columns = [(_temperature(p), k, p.top_p, p.min_p) for p, k in zip(params, top_ks)]
    return np.concatenate([np.array(columns, np.float64).T, uniform.T])


def _temperature(params: SamplingParams) -> float:
    if params.greedy:
        return 0.0
    return min(max(params.temperature, _MIN_TEMPERATURE), _MAX_TEMPERATURE)


def _to_device(array: np.ndarray, device: torch.device | str) -> torch.Tensor:
    """Copies without waiting for the device: from pinned memory the copy is only enqueued."""
    tensor = torch.from_numpy(array)
    if torch.device(device).type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def _stop_mask(
    requests: Sequence[SamplingRequest], vocab_size: int, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor] | None:
    entries = [
        (row, token)
        for row, request in enumerate(requests)
        if len(request.output_token_ids) < request.sampling_params.min_tokens
        for token in request.stop_token_ids
        if token < vocab_size
    ]
    if not entries:
        return None
    rows, tokens = _to_device(np.array(entries, np.int64).T.copy(), device).unbind(0)
    return rows, tokens


def _penalties(requests: Sequence[SamplingRequest], device: torch.device | str) -> Penalties | None:
    """Counts tokens on the host: work and memory follow the lengths, not the vocabulary."""
    entries = [
        _penalty_entries(row, request)
        for row, request in enumerate(requests)
        if request.sampling_params.has_penalties
    ]
    if not entries:
        return None
    rows, tokens, repetition, subtract = _to_device(np.concatenate(entries, axis=1), device)
    return Penalties(rows.long(), tokens.long(), repetition.float(), subtract.float())


def _penalty_entries(row: int, request: SamplingRequest) -> np.ndarray:
    """float64 `[4, num_tokens]`: row, token, repetition penalty, what is subtracted."""
    params = request.sampling_params
    counts = Counter(request.output_token_ids)
    unseen: set[int] = set()
    if params.repetition_penalty != 1.0:
        unseen = set(request.prompt_token_ids) - counts.keys()
    entries = np.zeros((4, len(counts) + len(unseen)))
    entries[0] = row
    entries[1] = [*counts, *unseen]
    entries[2] = params.repetition_penalty
    frequencies = np.array(list(counts.values()), np.float64)
    entries[3, : len(counts)] = params.presence_penalty + params.frequency_penalty * frequencies
    return entries
