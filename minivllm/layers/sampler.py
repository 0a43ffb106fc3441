"""Turns one step's logits into one token per request.

A token is drawn by inverting the cumulative distribution: tokens lie on a line in vocabulary order,
each as long as it is likely, and one uniform number per request points at one of them. The number
for a request's i-th output token is a pure function of (seed, i), so no generator state has to
survive batching or preemption. If the logits of two runs differ by rounding (another batch size,
another device), the borders between tokens move by about as much, and the token changes only when
the number falls between an old border and the new one: with probability at most the sum over tokens
of |F(t) - F'(t)|, F being the cumulative distribution, about 1e-5 for float32 rounding.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import nn

from minivllm.engine.request import Logprob
from minivllm.sampling_params import SamplingParams

# A probability p becomes the integer floor(p * _ONE). Sums of integers are exact and the same in
# any order, so a parallel scan on a GPU gives the sequential result, the cumulative sum never
# decreases, and a token of weight 0 has no place on the line. 2**61 leaves room for a row that adds
# up to slightly more than 1, and is finer than the 53 bits of a uniform number.
_ONE = 2**61
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
        uniforms: float64 `[num_rows]` in [0, 1), one per row.
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
        drawing = [p for p in params if not p.greedy]
        top_ks = [p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params]
        used_top_ks = [k for k, p in zip(top_ks, params) if k < vocab_size and not p.greedy]
        with_top_p = [k for k, p in zip(top_ks, params) if p.top_p < 1.0 and not p.greedy]
        numbers = np.empty((5, len(params)))
        numbers[0] = [_temperature(p) for p in params]
        numbers[1] = top_ks
        numbers[2] = [p.top_p for p in params]
        numbers[3] = [p.min_p for p in params]
        numbers[4] = uniforms(
            [request.seed for request in requests],
            [len(request.output_token_ids) for request in requests],
        )
        # One copy for all five; float64 holds each of them exactly.
        temperature, top_k, top_p, min_p, uniform = _to_device(numbers, device).unbind(0)
        return cls(
            temperature=temperature.float(),
            top_k=top_k.long(),
            top_p=top_p.float(),
            min_p=min_p.float(),
            uniforms=uniform,
            all_greedy=not drawing,
            all_random=len(drawing) == len(params),
            max_top_k=max(used_top_ks, default=None),
            need_top_p=bool(with_top_p),
            need_min_p=any(p.min_p > 0.0 for p in drawing),
            top_p_within_top_k=all(k < vocab_size for k in with_top_p),
            stop_mask=_stop_mask(requests, vocab_size, device),
            penalties=_penalties(requests, device),
            num_logprobs=max((p.logprobs for p in params if p.logprobs is not None), default=None),
        )


@dataclass
class SamplerOutput:
    """The sampled tokens, still on the device.

    Attributes:
        token_ids: int64 `[num_rows]`.
        logprob_token_ids: int64 `[num_rows, 1 + k]`, the sampled token, then the k most likely;
            None if no row asked for log-probabilities.
        logprobs: float32 `[num_rows, 1 + k]`, their natural-log probabilities.
        sampled_token_ranks: int64 `[num_rows]`, how many tokens are at least as likely as the
            sampled one, itself included.
    """

    token_ids: torch.Tensor
    logprob_token_ids: torch.Tensor | None = None
    logprobs: torch.Tensor | None = None
    sampled_token_ranks: torch.Tensor | None = None


class Sampler(nn.Module):
    """Log-probabilities, min-tokens, penalties, temperature, min-p, top-k, top-p: in this order.

    Log-probabilities are those of the raw logits, as in vLLM. Nothing here waits for the device;
    that is left to whoever reads the output.
    """

    def forward(self, logits: torch.Tensor, metadata: SamplingMetadata) -> SamplerOutput:
        """Samples one token per row.

        Args:
            logits: `[num_rows, vocab_size]`, any floating dtype; not modified.
            metadata: One entry per row.
        """
        edited = edit_logits(logits, metadata)
        token_ids = self._sample(edited, metadata)
        if metadata.num_logprobs is None:
            return SamplerOutput(token_ids)
        return _with_logprobs(logits, token_ids, metadata.num_logprobs)

    def _sample(self, logits: torch.Tensor, metadata: SamplingMetadata) -> torch.Tensor:
        if metadata.all_greedy:
            return logits.argmax(dim=-1)
        drawn = draw(probabilities(logits, metadata), metadata.uniforms)
        if metadata.all_random:
            return drawn
        return torch.where(metadata.temperature == 0.0, logits.argmax(dim=-1), drawn)


def edit_logits(logits: torch.Tensor, metadata: SamplingMetadata) -> torch.Tensor:
    """Forbids stop tokens where it is too early for them, and applies the penalties.

    Args:
        logits: `[num_rows, vocab_size]`; returned as it is if there is nothing to do.
        metadata: One entry per row.

    Returns:
        float32 `[num_rows, vocab_size]` if anything was changed.
    """
    if metadata.stop_mask is None and metadata.penalties is None:
        return logits
    logits = logits.to(torch.float32, copy=True)
    if metadata.stop_mask is not None:
        # A Python number here would be copied to the GPU, and waited for.
        logits.index_put_(metadata.stop_mask, logits.new_full((), -torch.inf))
    if metadata.penalties is not None:
        penalties = metadata.penalties
        seen = logits[penalties.rows, penalties.tokens]
        scaled = torch.where(seen > 0, seen / penalties.repetition, seen * penalties.repetition)
        logits[penalties.rows, penalties.tokens] = scaled - penalties.subtract
    return logits


def probabilities(logits: torch.Tensor, metadata: SamplingMetadata) -> torch.Tensor:
    """The distribution that each row draws from.

    Top-k and top-p are thresholds, as top-k is in vLLM: tokens exactly as likely as the last one
    kept are kept too, so no token is preferred for its id. Top-p counts what min-p and top-k left.

    Args:
        logits: `[num_rows, vocab_size]`, with penalties applied.
        metadata: One entry per row; greedy rows come out as if their temperature were 1.

    Returns:
        float32 `[num_rows, vocab_size]`, 0 for tokens that were filtered out. What top-p removes is
        not given to the others: a row adds up to 1 or less.
    """
    temperature = torch.where(metadata.temperature == 0.0, 1.0, metadata.temperature)
    logits = logits.float()
    # The largest becomes 0 before the division, so a tiny temperature gives -inf, never NaN.
    scaled = (logits - logits.amax(dim=-1, keepdim=True)).div_(temperature[:, None])
    if metadata.need_min_p:
        # scaled is log(p / p_max) already.
        scaled.masked_fill_(scaled < metadata.min_p.log()[:, None], -torch.inf)
    ranking = None
    if metadata.max_top_k is not None:
        values, ranking = scaled.topk(metadata.max_top_k, dim=-1)
        last = (metadata.top_k - 1).clamp(max=metadata.max_top_k - 1)
        threshold = values.gather(1, last[:, None])
        threshold.masked_fill_((metadata.top_k == logits.shape[1])[:, None], -torch.inf)
        scaled.masked_fill_(scaled < threshold, -torch.inf)
    probs = scaled.softmax(dim=-1)
    if metadata.need_top_p:
        if ranking is not None and metadata.top_p_within_top_k:
            ranked = probs.gather(1, ranking)
        else:
            ranked = probs.sort(dim=-1, descending=True).values
        probs.masked_fill_(probs < _top_p_threshold(ranked, metadata.top_p), 0.0)
    return probs


def draw(probs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Draws one token per row, never one of probability zero.

    Args:
        probs: float32 `[num_rows, vocab_size]`; a row need not add up to 1.
        uniforms: float64 `[num_rows]` in [0, 1).

    Returns:
        int64 `[num_rows]`, the first token whose cumulative probability exceeds the row's uniform
        number times the row's total.
    """
    cumulative = _weights(probs).cumsum_(dim=-1)
    # A number is at most 1 - 2**-53, so the product is rounded to at most the last float64 before
    # the rounded total, and that one is below the total: some token lies behind the target.
    target = (uniforms * cumulative[:, -1].double()).long()
    token_ids = torch.searchsorted(cumulative, target[:, None], right=True).squeeze(1)
    # Only NaN in the logits can exceed the vocabulary here; an index out of range would take down
    # the CUDA context, and every other request with it.
    return token_ids.clamp_(max=probs.shape[1] - 1)


def uniforms(seeds: Sequence[int], indices: Sequence[int]) -> np.ndarray:
    """The random numbers of some (seed, index) pairs: a hash, not a stream.

    SplitMix64 (Steele, Lea and Flood 2014), started at its own hash of the seed, so that streams of
    seeds that are multiples of its increment apart do not overlap.

    Args:
        seeds: `[n]`, taken modulo 2**64.
        indices: `[n]`, at least 0.

    Returns:
        float64 `[n]` in [0, 1), multiples of 2**-53.
    """
    increment = np.uint64(0x9E3779B97F4A7C15)
    state = _mix(np.array([seed % 2**64 for seed in seeds], np.uint64) + increment)
    bits = _mix(state + increment * (np.array(indices, np.uint64) + np.uint64(1)))
    return (bits >> np.uint64(11)) * 2.0**-53


def logprob_dicts(
    output: SamplerOutput, requests: Sequence[SamplingRequest]
) -> list[dict[int, Logprob] | None]:
    """Copies the log-probabilities to the host.

    Args:
        output: Of the step.
        requests: One per row.

    Returns:
        For each row None if it did not ask, else its sampled token and its `logprobs` most likely
        ones (those by descending probability), without their text.
    """
    if output.logprobs is None:
        return [None] * len(requests)
    assert output.logprob_token_ids is not None
    assert output.sampled_token_ranks is not None
    columns = zip(
        requests,
        output.logprob_token_ids.tolist(),
        output.logprobs.tolist(),
        output.sampled_token_ranks.tolist(),
        strict=True,
    )
    return [_logprob_dict(request.sampling_params.logprobs, *row) for request, *row in columns]


def _logprob_dict(
    num_logprobs: int | None, token_ids: list[int], logprobs: list[float], sampled_rank: int
) -> dict[int, Logprob] | None:
    if num_logprobs is None:
        return None
    entries = {token_ids[0]: Logprob(logprobs[0], sampled_rank)}
    top = zip(token_ids[1 : num_logprobs + 1], logprobs[1:])
    for rank, (token_id, logprob) in enumerate(top, start=1):
        entries.setdefault(token_id, Logprob(logprob, rank))
    return entries


def _with_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num: int) -> SamplerOutput:
    logprobs = logits.float().log_softmax(dim=-1)
    sampled = logprobs.gather(1, token_ids[:, None])
    top = logprobs.topk(min(num, logits.shape[1]), dim=-1)
    return SamplerOutput(
        token_ids=token_ids,
        logprob_token_ids=torch.cat([token_ids[:, None], top.indices], dim=1),
        logprobs=torch.cat([sampled, top.values], dim=1),
        sampled_token_ranks=(logprobs >= sampled).sum(dim=-1),
    )


def _temperature(params: SamplingParams) -> float:
    if params.greedy:
        return 0.0
    return min(max(params.temperature, _MIN_TEMPERATURE), _MAX_TEMPERATURE)


def _top_p_threshold(ranked: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The probability of the last token that top-p keeps, `[num_rows, 1]`.

    A token is kept if the ones before it do not reach `top_p` yet; `ranked` is descending.
    """
    weights = _weights(ranked)
    before = weights.cumsum(dim=-1).sub_(weights)
    target = (top_p.double() * _ONE).ceil().long().clamp_(min=1)
    num_kept = (before < target[:, None]).sum(dim=-1, keepdim=True)
    threshold = ranked.gather(1, num_kept - 1)
    # Rounding can make a row reach 1 before its last token; rows without top-p keep all of them.
    return threshold.masked_fill_((top_p >= 1.0)[:, None], 0.0)


def _weights(probs: torch.Tensor) -> torch.Tensor:
    # Scaling by a power of two is exact in float32; the conversion drops what is below 2**-61.
    return (probs * float(_ONE)).to(torch.int64)


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


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
    output, counts = np.unique(np.array(request.output_token_ids, np.int64), return_counts=True)
    subtract = params.presence_penalty + params.frequency_penalty * counts
    tokens = output
    if params.repetition_penalty != 1.0:
        unseen = np.setdiff1d(np.array(request.prompt_token_ids, np.int64), output)
        tokens = np.concatenate([output, unseen])
        subtract = np.concatenate([subtract, np.zeros(len(unseen))])
    repetition = np.full(len(tokens), params.repetition_penalty)
    return np.stack([np.full(len(tokens), float(row)), tokens, repetition, subtract])
