"""The sampler against independent references in float64, in plain Python and numpy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
import pytest
import scipy.stats
import torch

from minivllm import SamplingParams
from minivllm.layers.sampler import (
    Sampler,
    SamplingMetadata,
    draw,
    edit_logits,
    logprob_dicts,
    probabilities,
)
from minivllm.layers.sampling_metadata import uniforms

LARGEST_UNIFORM = 1.0 - 2.0**-53


def num_levels(vocab_size: int) -> int:
    return next(levels for levels in range(10) if 16**levels >= vocab_size)


def all_levels(number: float, probs: torch.Tensor) -> torch.Tensor:
    """The same number for all rows and levels."""
    shape = (probs.shape[0], num_levels(probs.shape[1]))
    return torch.full(shape, number, dtype=torch.float64, device=probs.device)


@dataclass
class FakeRequest:
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    prompt_token_ids: list[int] = field(default_factory=list)
    output_token_ids: list[int] = field(default_factory=list)
    stop_token_ids: frozenset[int] = frozenset()


def random_logits(num_rows: int, vocab_size: int, seed: int = 0, scale: float = 2.0):
    return scale * torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed))


def metadata_of(requests: Sequence[FakeRequest], logits: torch.Tensor) -> SamplingMetadata:
    return SamplingMetadata.build(requests, logits.shape[1], logits.device)


def sample(logits: torch.Tensor, requests: Sequence[FakeRequest]) -> list[int]:
    return Sampler()(logits, metadata_of(requests, logits)).token_ids.tolist()


def filtered(logits: torch.Tensor, requests: Sequence[FakeRequest]) -> np.ndarray:
    """The sampler's own distributions, each row made to add up to 1."""
    probs = probabilities(logits, metadata_of(requests, logits)).double().numpy()
    return probs / probs.sum(axis=1, keepdims=True)


def reference_distribution(logits: Sequence[float], params: SamplingParams) -> np.ndarray:
    """What vLLM's documentation says, token by token, in float64."""
    scaled = np.asarray(logits, np.float64) / params.temperature
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    kept = [t for t in range(len(probs)) if probs[t] >= params.min_p * probs.max()]
    kept.sort(key=lambda token: -probs[token])
    if params.top_k > 0 and params.top_k < len(kept):
        kept = [t for t in kept if probs[t] >= probs[kept[params.top_k - 1]]]
    if params.top_p < 1.0:
        mass, nucleus = sum(probs[t] for t in kept), 0.0
        for last in kept:
            nucleus += probs[last]
            if nucleus >= params.top_p * mass:
                break
        kept = [t for t in kept if probs[t] >= probs[last]]
    result = np.zeros_like(probs)
    result[kept] = probs[kept]
    return result / result.sum()


FILTERS = [
    {},
    {"temperature": 0.7},
    {"temperature": 1.8},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 1000},
    {"top_p": 0.8},
    {"top_p": 0.05},
    {"top_p": 0.999},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 9, "top_p": 0.7},
    {"top_k": 9, "min_p": 0.2},
    {"top_p": 0.6, "min_p": 0.05},
    {"temperature": 1.3, "top_k": 12, "top_p": 0.9, "min_p": 0.02},
]


# ---------------------------------------------------------------- the distribution drawn from


@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_a_row_has_the_distribution_of_the_reference(options):
    logits = random_logits(25, 60)
    params = SamplingParams(**options)
    actual = filtered(logits, [FakeRequest(params)] * len(logits))
    expected = np.stack([reference_distribution(row, params) for row in logits.tolist()])
    np.testing.assert_array_equal(actual > 0, expected > 0)
    np.testing.assert_allclose(actual, expected, rtol=2e-5)


@pytest.mark.parametrize("seed", range(20))
def test_rows_with_different_filters_do_not_disturb_each_other(seed):
    rng = np.random.default_rng(seed)
    logits = random_logits(16, 80, seed)
    requests = [
        FakeRequest(
            SamplingParams(
                temperature=rng.choice([0.3, 1.0, 2.0]),
                top_k=int(rng.choice([0, 1, 5, 40])),
                top_p=rng.choice([1.0, rng.uniform(0.1, 1.0)]),
                min_p=rng.choice([0.0, rng.uniform(0.0, 0.3)]),
            )
        )
        for _ in logits
    ]
    expected = [
        reference_distribution(row, request.sampling_params)
        for row, request in zip(logits.tolist(), requests)
    ]
    np.testing.assert_allclose(filtered(logits, requests), expected, rtol=2e-5, atol=1e-12)


def test_tokens_as_likely_as_the_last_one_of_top_k_are_kept():
    logits = torch.tensor([[0.0, 3.0, 1.0, 1.0, 1.0, -1.0]])
    probs = filtered(logits, [FakeRequest(SamplingParams(top_k=2))])
    assert (probs[0] > 0).tolist() == [False, True, True, True, True, False]


@pytest.mark.parametrize("top_k", [0, 3])
def test_tokens_as_likely_as_the_last_one_of_top_p_are_kept(top_k):
    logits = torch.tensor([[0.4, 0.2, 0.2, 0.2]]).log()
    probs = filtered(logits, [FakeRequest(SamplingParams(top_p=0.5, top_k=top_k))])
    assert (probs[0] > 0).all()


def test_top_p_counts_what_top_k_has_left():
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    probs = filtered(logits, [FakeRequest(SamplingParams(top_p=0.55, top_k=2))])
    # 0.4 is 57 percent of 0.4 + 0.3, but would not be 55 percent of everything.
    assert (probs[0] > 0).tolist() == [True, False, False, False]


def test_a_row_without_top_p_keeps_its_whole_tail_beside_one_with_it():
    logits = random_logits(2, 20_000, scale=1.0)
    requests = [FakeRequest(SamplingParams(top_p=0.5)), FakeRequest()]
    assert (filtered(logits, requests)[1] > 0).all()


@pytest.mark.parametrize("top_p", [1e-6, 1e-30, 1e-300])
def test_a_tiny_top_p_keeps_the_most_likely_token(top_p):
    logits = random_logits(8, 100)
    probs = filtered(logits, [FakeRequest(SamplingParams(top_p=top_p))] * 8)
    np.testing.assert_array_equal(probs, np.eye(100)[logits.argmax(dim=1).numpy()])


@pytest.mark.parametrize("temperature", [1e-6, 1e-45, 1e-300])
def test_a_tiny_temperature_takes_the_most_likely_token(temperature):
    logits = random_logits(8, 100, scale=20.0)
    logits[:, 0] = -torch.inf
    probs = filtered(logits, [FakeRequest(SamplingParams(temperature=temperature))] * 8)
    np.testing.assert_array_equal(probs, np.eye(100)[logits.argmax(dim=1).numpy()])


def test_a_huge_temperature_makes_all_allowed_tokens_equal():
    logits = random_logits(1, 10)
    logits[0, 3] = -torch.inf
    probs = filtered(logits, [FakeRequest(SamplingParams(temperature=1e300))])
    np.testing.assert_allclose(np.delete(probs[0], 3), 1 / 9, rtol=1e-6)
    assert probs[0, 3] == 0.0


# ---------------------------------------------------------------- draws


def chi_square_p_value(tokens: Sequence[int], expected: np.ndarray) -> float:
    """How probable draws at least this far from `expected` are; 0 if an impossible one came."""
    counts = np.bincount(tokens, minlength=len(expected))
    if counts[expected == 0].any():
        return 0.0
    possible = expected > 0
    if possible.sum() == 1:
        return 1.0
    return scipy.stats.chisquare(counts[possible], expected[possible] * len(tokens)).pvalue


def many_draws(row: torch.Tensor, params: SamplingParams, num_draws: int = 20_000) -> list[int]:
    """One request per draw, in batches, every one with a seed and an output length of its own."""
    tokens: list[int] = []
    for first in range(0, num_draws, 2000):
        requests = [
            FakeRequest(params, seed=i // 4, output_token_ids=[0] * (i % 4))
            for i in range(first, first + 2000)
        ]
        tokens += sample(row.expand(2000, -1), requests)
    return tokens


@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_draws_follow_the_reference_distribution(options):
    row = random_logits(1, 40, seed=3)
    params = SamplingParams(**options)
    tokens = many_draws(row, params)
    assert chi_square_p_value(tokens, reference_distribution(row[0].tolist(), params)) > 1e-3


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        ({"temperature": 1.0}, {"temperature": 1.05}),
        ({"top_k": 8}, {"top_k": 9}),
        ({"top_k": 8}, {"top_k": 7}),
        ({"top_p": 0.8}, {"top_p": 0.85}),
        ({"top_p": 0.8}, {"top_p": 0.75}),
        ({"min_p": 0.1}, {"min_p": 0.07}),
        ({"min_p": 0.1}, {"min_p": 0.14}),
    ],
    ids=str,
)
def test_the_statistical_test_would_notice_a_slightly_wrong_filter(options, wrong):
    row = random_logits(1, 40, seed=3)
    tokens = many_draws(row, SamplingParams(**wrong))
    right = reference_distribution(row[0].tolist(), SamplingParams(**options))
    assert chi_square_p_value(tokens, right) < 1e-6


@pytest.mark.parametrize("uniform", [0.0, 2.0**-53, 0.25, 0.5, 1 - 2.0**-30, LARGEST_UNIFORM])
@pytest.mark.parametrize("vocab_size", [5, 1000, 152_064])
def test_a_token_of_probability_zero_is_never_drawn(uniform, vocab_size):
    rng = np.random.default_rng(vocab_size)
    probs = torch.from_numpy(rng.random((8, vocab_size), np.float32))
    probs[torch.from_numpy(rng.random(probs.shape) < 0.7)] = 0.0
    probs[:, :2] = probs[:, -2:] = 0.0
    probs[:, 2] = 1e-7
    probs /= probs.sum(dim=1, keepdim=True)
    tokens = draw(probs, all_levels(uniform, probs))
    assert (probs.gather(1, tokens[:, None]) > 0).all()


def test_the_first_and_the_last_number_give_the_first_and_the_last_possible_token():
    probs = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]]).expand(4, -1)
    numbers = torch.tensor([[0.0], [0.5 - 2.0**-53], [0.5], [LARGEST_UNIFORM]]).double()
    numbers[1], numbers[3] = 0.5 - 2.0**-53, LARGEST_UNIFORM
    assert draw(probs, numbers).tolist() == [1, 1, 3, 3]


@pytest.mark.parametrize("tail", [k * 2.0**-54 for k in range(1, 33)])
@pytest.mark.parametrize("head", [0.5, 1.0 - 2.0**-24, 1.0])
def test_the_largest_number_stays_below_the_total_however_that_is_rounded(head, tail):
    probs = torch.tensor([[head, tail, 0.0, 0.0]])
    assert draw(probs, all_levels(LARGEST_UNIFORM, probs)).item() in (0, 1)


def test_a_very_unlikely_token_keeps_its_chance():
    probs = torch.tensor([[1.0, 2.0**-40]])
    numbers = torch.tensor([[1.0 - 2.0**-40], [1.0 - 2.0**-39]], dtype=torch.float64)
    assert draw(probs.expand(2, -1), numbers).tolist() == [1, 0]


def reference_draw(probs: Sequence[float], numbers: Sequence[float]) -> int:
    """Walks down the tree in exact fractions."""
    weights, node = [Fraction(p) for p in probs], 0
    sizes = [16**level for level in range(len(numbers) - 1, -1, -1)]
    for size, number in zip(sizes, numbers):
        children = [
            sum(weights[c * size : (c + 1) * size]) for c in range(node * 16, node * 16 + 16)
        ]
        target, child = Fraction(number) * sum(children), 0
        while target >= children[child]:
            target -= children[child]
            child += 1
        node = node * 16 + child
    return node


@pytest.mark.parametrize("vocab_size", [1, 2, 16, 17, 300, 5000])
def test_the_walk_down_the_tree_is_that_of_exact_fractions(vocab_size):
    probs = random_logits(20, vocab_size).softmax(dim=1)
    probs[probs < probs.median()] = 0.0
    numbers = uniforms(list(range(20)), [0] * 20, num_levels(vocab_size))
    expected = [reference_draw(p, u) for p, u in zip(probs.tolist(), numbers.tolist())]
    assert draw(probs, torch.from_numpy(numbers)).tolist() == expected


@pytest.mark.parametrize("part", [1e-12, 1.0 - 1e-12])
def test_the_borders_are_exact_for_a_vocabulary_of_152_064(part):
    vocab_size, counts = 152_064, [1]
    while 16 * counts[-1] < vocab_size:
        counts.append(16 * counts[-1])
    tokens = np.linspace(0, vocab_size - 1, 30, dtype=int).tolist()
    numbers = []
    for token in tokens:
        walk = []
        for size in reversed(counts):  # leaves below each child, fewer below the last ones
            first = token // (16 * size) * 16 * size
            total = min(16 * size, vocab_size - first)
            before = token // size * size - first
            own = min(size, vocab_size - first - before)
            walk.append((before + part * own) / total)
        numbers.append(walk)
    probs = torch.full((1, vocab_size), 1.0 / vocab_size).expand(len(tokens), -1)
    assert draw(probs, torch.tensor(numbers, dtype=torch.float64)).tolist() == tokens


@pytest.mark.parametrize("vocab_size", [1, 2, 3, 8, 50, 51, 1001])
def test_broken_logits_give_a_valid_token_and_leave_the_other_rows_alone(vocab_size):
    logits = random_logits(40, vocab_size)
    params = [SamplingParams(), SamplingParams(top_k=5, top_p=0.9)]
    requests = [FakeRequest(params[i % 2], seed=i) for i in range(40)]
    expected = sample(logits, requests)
    logits[10:20] = torch.nan
    logits[20:30, vocab_size // 2 :] = torch.inf
    tokens = sample(logits, requests)
    assert all(0 <= token < vocab_size for token in tokens)
    assert (tokens[:10], tokens[30:]) == (expected[:10], expected[30:])


# ---------------------------------------------------------------- uniform numbers


def reference_splitmix64(state: int, index: int) -> int:
    """An output of the published generator, in Python's integers."""
    z = (state + (index + 1) * 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def test_the_numbers_are_a_tree_of_splitmix64_generators():
    assert reference_splitmix64(1234567, 0) == 6457827717110365317  # published test vectors
    assert reference_splitmix64(1234567, 1) == 3203168211198807973
    seeds = [0, 1, 12345, 2**63 - 1, 2**64 - 1]
    indices = [0, 1, 7, 100_000, 5]
    expected = []
    for seed, index in zip(seeds, indices):
        state = reference_splitmix64(reference_splitmix64(seed, 0), index)
        expected.append([(reference_splitmix64(state, level) >> 11) / 2**53 for level in range(4)])
    assert uniforms(seeds, indices, 4).tolist() == expected


@pytest.mark.parametrize(
    ("seeds", "indices"),
    [
        (np.arange(20_000), np.zeros(20_000, int)),
        (np.zeros(20_000, int), np.arange(20_000)),
        (np.arange(20_000) // 100, np.arange(20_000) % 100),
        ([i * 0x9E3779B97F4A7C15 for i in range(20_000)], np.full(20_000, 3)),
        ([i << 44 for i in range(20_000)], np.full(20_000, 1)),
    ],
    ids=["seeds", "indices", "both", "multiples of the increment", "high bits"],
)
def test_the_numbers_are_uniform_and_independent(seeds, indices):
    numbers = uniforms([int(seed) for seed in seeds], [int(index) for index in indices], 3)
    assert numbers.min() >= 0.0
    assert numbers.max() < 1.0
    level, next_level = numbers[:, 0], numbers[:, 1]
    for first, second in ((level[:-1], level[1:]), (level, next_level)):
        assert scipy.stats.kstest(first, "uniform").pvalue > 1e-3
        assert scipy.stats.pearsonr(first, second).pvalue > 1e-3
        pairs = np.histogram2d(first[::2], second[::2], bins=10)[0].ravel()
        assert scipy.stats.chisquare(pairs).pvalue > 1e-3


def test_streams_of_seeds_that_are_increments_apart_do_not_overlap():
    increment = 0x9E3779B97F4A7C15
    indices = list(range(1000))
    ahead = set(uniforms([7 + increment] * 1000, indices, 4).ravel())
    assert not ahead & set(uniforms([7] * 1000, indices, 4).ravel())


# ---------------------------------------------------------------- batches


def mixed_requests(num_rows: int, seed: int = 0) -> list[FakeRequest]:
    rng = np.random.default_rng(seed)
    options = [
        {"temperature": 0.0},
        *FILTERS,
        {"repetition_penalty": 1.3, "frequency_penalty": 1.0},
    ]
    return [
        FakeRequest(
            SamplingParams(**options[i % len(options)], min_tokens=int(rng.choice([0, 4]))),
            seed=int(rng.integers(2**63)),
            prompt_token_ids=rng.integers(0, 300, 20).tolist(),
            output_token_ids=rng.integers(0, 300, rng.integers(0, 8)).tolist(),
            stop_token_ids=frozenset(rng.integers(0, 300, 3).tolist()),
        )
        for i in range(num_rows)
    ]


def test_a_request_gets_the_same_token_alone_and_in_any_batch():
    requests, logits = mixed_requests(50), random_logits(50, 300)
    alone = [sample(logits[i : i + 1], requests[i : i + 1])[0] for i in range(50)]
    assert sample(logits, requests) == alone
    order = np.random.default_rng(1).permutation(50)
    assert sample(logits[order], [requests[i] for i in order]) == [alone[i] for i in order]


def test_rounding_of_the_logits_does_not_change_the_tokens():
    requests, logits = mixed_requests(500), random_logits(500, 300)
    noise = 1 + 1e-7 * random_logits(500, 300, seed=1)
    assert sample(logits * noise, requests) == sample(logits, requests)


def test_rounding_does_not_change_the_tokens_of_a_large_vocabulary_with_a_long_tail():
    # With one cumulative sum over the vocabulary, about 7 of these 640 tokens change.
    for seed in range(10):
        logits = random_logits(64, 50_000, seed)
        requests = [FakeRequest(seed=64 * seed + row) for row in range(64)]
        noise = 1 + 3e-7 * random_logits(64, 50_000, seed + 100, scale=1.0)
        assert sample(logits * noise, requests) == sample(logits, requests)


def test_the_next_token_is_drawn_with_another_number():
    logits = torch.zeros(200, 1000)
    one = FakeRequest(seed=5)
    requests = [FakeRequest(seed=5, output_token_ids=[0] * i) for i in range(200)]
    assert len(set(sample(logits, requests))) > 150
    assert len(set(sample(logits, [one] * 200))) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_rows_take_the_most_likely_token_beside_rows_that_draw(dtype):
    logits = random_logits(40, 500).to(dtype)
    greedy = FakeRequest(SamplingParams(temperature=0.0, top_k=3, top_p=0.5))
    requests = [greedy if i % 2 else FakeRequest(seed=i) for i in range(40)]
    expected = logits.argmax(dim=1).tolist()
    tokens = sample(logits, requests)
    assert tokens[1::2] == expected[1::2]
    assert tokens[::2] != expected[::2]
    assert sample(logits, [greedy] * 40) == expected


def test_filters_of_greedy_rows_cost_the_other_rows_nothing():
    greedy = SamplingParams(temperature=0.0, top_k=3, top_p=0.5, min_p=0.1)
    metadata = SamplingMetadata.build([FakeRequest(), FakeRequest(greedy)], 100, "cpu")
    assert metadata.max_top_k is None
    assert not metadata.need_top_p
    assert not metadata.need_min_p


def test_rows_without_top_p_do_not_make_the_others_sort_the_whole_vocabulary():
    both = FakeRequest(SamplingParams(top_k=3, top_p=0.5))
    top_p = FakeRequest(SamplingParams(top_p=0.5))
    assert SamplingMetadata.build([FakeRequest(), both], 100, "cpu").top_p_within_top_k
    assert not SamplingMetadata.build([both, top_p], 100, "cpu").top_p_within_top_k


def test_the_callers_logits_are_not_modified():
    requests, logits = mixed_requests(50), random_logits(50, 300)
    before = logits.clone()
    sample(logits, requests)
    assert torch.equal(logits, before)


# ---------------------------------------------------------------- penalties and minimum length


def reference_penalties(logits: list[float], request: FakeRequest) -> list[float]:
    params, result = request.sampling_params, list(logits)
    for token in range(len(logits)):
        count = request.output_token_ids.count(token)
        if count or token in request.prompt_token_ids:
            if result[token] > 0:
                result[token] /= params.repetition_penalty
            else:
                result[token] *= params.repetition_penalty
        result[token] -= params.frequency_penalty * count
        result[token] -= params.presence_penalty * (count > 0)
    return result


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.5},
        {"repetition_penalty": 0.6},
        {"presence_penalty": 1.2},
        {"frequency_penalty": -0.7},
        {"repetition_penalty": 1.2, "presence_penalty": -0.5, "frequency_penalty": 0.9},
    ],
    ids=str,
)
def test_penalties_are_those_of_the_reference(options):
    rng, logits = np.random.default_rng(0), random_logits(6, 30)
    requests = [
        FakeRequest(
            # Every other row has none, so that the rows' numbers matter.
            SamplingParams(**options) if row % 2 else SamplingParams(),
            prompt_token_ids=rng.integers(0, 30, 12).tolist(),
            output_token_ids=rng.integers(0, 30, 3 * row).tolist(),
        )
        for row in range(6)
    ]
    actual = edit_logits(logits, metadata_of(requests, logits))
    expected = [reference_penalties(row, r) for row, r in zip(logits.tolist(), requests)]
    np.testing.assert_allclose(actual.numpy(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_penalties_decide_the_token(temperature):
    logits = torch.zeros(1, 10)
    logits[0, 4] = 60.0
    params = SamplingParams(temperature=temperature, frequency_penalty=2.0)
    request = FakeRequest(params)
    tokens = []
    for _ in range(31):
        tokens += sample(logits, [request])
        request.output_token_ids.append(tokens[-1])
    assert tokens[:20] == [4] * 20
    logits[0, 4] = 1.0
    assert sample(logits, [request]) != [4]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_stop_token_comes_before_min_tokens_and_then_it_may(temperature):
    logits = torch.full((1, 8), -50.0)
    logits[0, 2], logits[0, 5], logits[0, 6] = 50.0, 40.0, 0.0
    # 99 is a stop token that the model's vocabulary does not have.
    request = FakeRequest(
        SamplingParams(temperature=temperature, min_tokens=2),
        stop_token_ids=frozenset({2, 5, 99}),
    )
    tokens = []
    for _ in range(3):
        tokens += sample(logits, [request])
        request.output_token_ids.append(tokens[-1])
    assert tokens == [6, 6, 2]


# ---------------------------------------------------------------- log-probabilities


def test_logprobs_are_those_of_the_raw_logits_with_ranks():
    requests, logits = mixed_requests(40), random_logits(40, 300)
    for i, request in enumerate(requests):
        asked = None if i % 5 == 4 else i % 5
        request.sampling_params = SamplingParams(
            **{**vars(request.sampling_params), "logprobs": asked}
        )
    output = Sampler()(logits, metadata_of(requests, logits))
    exact = torch.log_softmax(logits.double(), dim=1)
    for row, entries in enumerate(logprob_dicts(output, requests)):
        asked = requests[row].sampling_params.logprobs
        if asked is None:
            assert entries is None
            continue
        order = exact[row].argsort(descending=True).tolist()
        sampled = output.token_ids[row].item()
        assert next(iter(entries)) == sampled
        assert set(entries) == {sampled, *order[:asked]}
        assert [token for token in entries if token in order[:asked] and token != sampled] == [
            token for token in order[:asked] if token != sampled
        ]
        for token, entry in entries.items():
            assert entry.logprob == pytest.approx(exact[row, token].item(), abs=1e-5)
            assert entry.rank == order.index(token) + 1


def test_asking_for_logprobs_does_not_change_the_token():
    requests, logits = mixed_requests(20), random_logits(20, 300)
    plain = sample(logits, requests)
    for request in requests:
        request.sampling_params = SamplingParams(**{**vars(request.sampling_params), "logprobs": 2})
    assert sample(logits, requests) == plain


def test_the_rank_of_a_sampled_token_counts_the_ones_as_likely_as_itself():
    logits = torch.tensor([[1.0, 2.0, 1.0, 0.0]])
    request = FakeRequest(SamplingParams(logprobs=0))
    metadata = metadata_of([request], logits)
    metadata.uniforms[0, 0] = 0.0  # token 0
    (entries,) = logprob_dicts(Sampler()(logits, metadata), [request])
    assert entries is not None
    assert entries[0].rank == 3


def test_more_logprobs_than_tokens_gives_all_tokens():
    logits = random_logits(1, 6)
    request = FakeRequest(SamplingParams(logprobs=20))
    (entries,) = logprob_dicts(Sampler()(logits, metadata_of([request], logits)), [request])
    assert entries is not None
    assert sorted(entries) == list(range(6))
    assert math.fsum(math.exp(entry.logprob) for entry in entries.values()) == pytest.approx(1.0)


# ---------------------------------------------------------------- GPU


@pytest.mark.gpu
@pytest.mark.parametrize("vocab_size", [300, 49_152, 151_936])
def test_a_gpu_gives_the_tokens_that_the_cpu_gives(vocab_size):
    requests, logits = mixed_requests(200), random_logits(200, vocab_size)
    assert sample(logits.cuda(), requests) == sample(logits, requests)


@pytest.mark.gpu
def test_a_gpu_never_draws_a_token_of_probability_zero():
    generator = torch.Generator("cuda").manual_seed(0)
    probs = torch.rand(64, 151_936, generator=generator, device="cuda")
    probs[torch.rand(probs.shape, generator=generator, device="cuda") < 0.9] = 0.0
    probs /= probs.sum(dim=1, keepdim=True)
    shape = all_levels(0.0, probs).shape
    numbers = torch.rand(shape, dtype=torch.float64, generator=generator, device="cuda")
    numbers[0], numbers[1] = 0.0, LARGEST_UNIFORM
    tokens = draw(probs, numbers)
    assert (probs.gather(1, tokens[:, None]) > 0).all()
    assert tokens.tolist() == draw(probs.cpu(), numbers.cpu()).tolist()


@pytest.mark.gpu
def test_nothing_in_the_sampler_waits_for_the_gpu():
    requests, logits = mixed_requests(50), random_logits(50, 300).cuda()
    requests[0].sampling_params = SamplingParams(logprobs=3)
    sample(logits, requests)
    torch.cuda.set_sync_debug_mode("error")
    try:
        Sampler()(logits, metadata_of(requests, logits))
    finally:
        torch.cuda.set_sync_debug_mode("default")
