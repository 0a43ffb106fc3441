"""The torch backend against attention's definition in float64, on a cache full of NaN elsewhere."""

from __future__ import annotations

import random

import pytest
import torch

from minivllm.attention.torch_backend import TorchAttentionBackend
from tests.attention_reference import (
    OUTPUT_CANARY,
    AttentionCase,
    random_case,
    reference_attention,
    reference_cache,
    relative_error,
)


def run(case: AttentionCase) -> AttentionCase:
    backend = TorchAttentionBackend(
        case.query.shape[1],
        case.key.shape[1],
        case.query.shape[2],
        case.kv_cache.shape[2],
        case.scale,
    )
    backend.forward(case.query, case.key, case.value, case.kv_cache, case.output, case.metadata)
    return case


def check(case: AttentionCase, tolerance: float = 1e-6) -> None:
    expected_cache = reference_cache(case)
    run(case)
    real = case.output[: case.metadata.num_actual_tokens]
    assert relative_error(real, reference_attention(case)) < tolerance
    torch.testing.assert_close(case.kv_cache, expected_cache, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("seed", range(12))
def test_random_mixed_steps_are_right(seed: int) -> None:
    rng = random.Random(seed)
    num_kv_heads = rng.choice([1, 2, 3])
    prefills = [rng.randint(2, 40) for _ in range(rng.randint(0, 3))]
    query_lens = [1] * rng.randint(0 if prefills else 1, 4) + prefills
    case = random_case(
        query_lens,
        [rng.choice([0, rng.randint(1, 70)]) for _ in query_lens],
        num_heads=num_kv_heads * rng.choice([1, 2, 3, 7]),
        num_kv_heads=num_kv_heads,
        head_size=rng.choice([16, 64, 80, 96, 128]),
        block_size=rng.choice([1, 4, 16, 64]),
        seed=seed,
    )
    check(case)


@pytest.mark.parametrize("query_lens", [[1], [1, 1, 1], [5], [1, 1, 7, 3]])
def test_a_nan_in_a_slot_nobody_owns_reaches_no_output(query_lens: list[int]) -> None:
    case = run(random_case(query_lens, [9 * i for i in range(len(query_lens))]))
    assert case.output.isfinite().all()


def test_equal_lengths_need_no_mask_and_are_right() -> None:
    check(random_case([1, 1, 1, 1], [20, 20, 20, 20]))


def test_padding_writes_nothing_and_changes_no_real_row() -> None:
    plain = run(random_case([1, 1, 6], [5, 30, 8]))
    padded = random_case([1, 1, 6], [5, 30, 8], num_padding_tokens=4, num_padding_reqs=3)
    padded.query[:8], padded.key[:8], padded.value[:8] = plain.query, plain.key, plain.value
    check(padded)
    assert (padded.output[8:] == OUTPUT_CANARY).all()


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.bfloat16, 1e-2), (torch.float16, 2e-3)], ids=str
)
def test_half_precision_is_as_right_as_its_digits(dtype: torch.dtype, tolerance: float) -> None:
    check(random_case([1, 1, 9], [40, 3, 20], dtype=dtype), tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_gpu_gives_the_same(dtype: torch.dtype) -> None:
    tolerance = 1e-5 if dtype is torch.float32 else 1e-2
    case = random_case([1, 1, 300, 9], [400, 3, 200, 0], dtype=dtype, device="cuda")
    check(case, tolerance)
