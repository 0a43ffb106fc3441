"""Turns one step's logits into one token per request.

A token is drawn by walking down a tree: its leaves are the tokens in vocabulary order, a node is as
heavy as the leaves below it, and at each level one uniform number picks one of 16 children by their
weights. The numbers for a request's i-th output token are a pure function of (seed, i), so that no
generator state has to survive batching or preemption.

Why a tree and not one cumulative sum: logits of two runs differ by rounding (another batch size,
another device), which moves the borders between tokens, and a number between an old border and the
new one picks another token. One sum over the vocabulary has tens of thousands of borders at which
this can happen, a walk has at most 15 per level. On SmolLM2-135M in float32 (one pass over a prompt
against token by token, temperature 1, no filters) the token changes with probability 5e-4 for the
sum and 7e-6 for the tree; no method at all can be below 1e-6, half the sum of |p - p'|.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from minivllm.engine.request import Logprob
from minivllm.layers.sampling_metadata import FAN_OUT, SamplingMetadata, SamplingRequest

# A probability p becomes the integer floor(p * _ONE). Sums of integers are exact and the same in
# any order: a parallel sum on a GPU gives the sequential result, a cumulative sum never decreases,
# and a token of weight 0 can not be picked. 2**61 leaves room for a row that adds up to slightly
# more than 1, and is finer than the 53 bits of a uniform number.
_ONE = 2**61


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
        uniforms: float64 `[num_rows, num_levels]` in [0, 1), from the root's down.

    Returns:
        int64 `[num_rows]`.
    """
    num_rows, vocab_size = probs.shape
    tree, nodes = [], _weights(probs)
    while nodes.shape[1] > 1:
        nodes = F.pad(nodes, (0, -nodes.shape[1] % FAN_OUT))
        tree.append(nodes.view(num_rows, -1, FAN_OUT))  # the children of each parent
        nodes = tree[-1].sum(dim=-1)
    rows = torch.arange(num_rows, device=probs.device)
    node = torch.zeros_like(rows)
    for level, uniform in zip(reversed(tree), uniforms.unbind(1), strict=True):
        # Only NaN in the logits can lead past the last node (here or below); an index out of range
        # would take down the CUDA context, and every other request with it.
        node.clamp_(max=level.shape[1] - 1)
        node = node * FAN_OUT + _pick(level[rows, node], uniform)
    return node.clamp_(max=vocab_size - 1)


def _pick(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The first child whose cumulative weight exceeds the number times the total, `[num_rows]`."""
    cumulative = weights.cumsum(dim=-1)
    # A number is at most 1 - 2**-53, so the product is rounded to at most the last float64 before
    # the rounded total, and that one is below the total: some child lies behind the target.
    target = (uniform * cumulative[:, -1].double()).long()
    return torch.searchsorted(cumulative, target[:, None], right=True).squeeze(1)


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
