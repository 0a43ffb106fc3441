"""The Triton backend on a GPU, at real sizes, against the float64 reference; recorded launches too.

As on the CPU, every slot that belongs to no token holds NaN.
"""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
import triton

from minivllm.attention.triton_backend import TritonAttentionBackend
from minivllm.attention.triton_decode import num_kv_splits
from minivllm.attention.triton_kernels import write_cache
from tests.attention_reference import (
    OUTPUT_CANARY,
    TOLERANCE,
    AttentionCase,
    attention_error,
    random_case,
    reference_attention,
    reference_cache,
    relative_error,
)

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
HEAD_SIZES = [16, 32, 64, 80, 96, 128, 256]


def backend_for(case: AttentionCase) -> TritonAttentionBackend:
    block_size, num_kv_heads, head_size = case.kv_cache.shape[-3:]
    num_heads = case.query.shape[1]
    return TritonAttentionBackend(num_heads, num_kv_heads, head_size, block_size, case.scale)


def check(case: AttentionCase) -> None:
    assert attention_error(backend_for(case), case) < TOLERANCE[case.query.dtype]


@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_mixed_step_is_right(dtype: torch.dtype, head_size: int) -> None:
    check(
        random_case(
            [1] * 12 + [300, 17, 1000, 2, 129],
            [3000, 0, 15, 16, 17, 100, 511, 512, 513, 2047, 999, 1, 0, 1500, 700, 63, 1],
            num_heads=16,
            num_kv_heads=4,
            head_size=head_size,
            dtype=dtype,
            device="cuda",
            num_padding_tokens=11,
            num_padding_reqs=3,
        )
    )


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_of_query_heads_per_kv_head_is_right(dtype: torch.dtype, group: int) -> None:
    check(
        random_case(
            [1, 1, 1, 200, 65],
            [700, 64, 0, 0, 333],
            num_heads=3 * group,
            num_kv_heads=3,
            head_size=128,
            dtype=dtype,
            device="cuda",
        )
    )


@pytest.mark.parametrize("block_size", [1, 2, 4, 8, 16, 32, 64, 128, 256])
def test_every_block_size_is_right(block_size: int) -> None:
    check(
        random_case(
            [1, 1, 1, 200, 65],
            [700, 64, 0, 0, 333],
            num_heads=8,
            block_size=block_size,
            dtype=torch.bfloat16,
            device="cuda",
        )
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_reqs", [1, 8, 64])
def test_decode_is_right_up_to_8192_tokens(num_reqs: int, dtype: torch.dtype) -> None:
    draw = random.Random(num_reqs)
    contexts = [8191, *[draw.randint(0, 8191) for _ in range(num_reqs - 1)]]
    check(
        random_case(
            [1] * num_reqs,
            contexts,
            num_heads=8,
            num_kv_heads=2,
            head_size=128,
            dtype=dtype,
            device="cuda",
        )
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("query_len", "context_len"), [(8192, 0), (2048, 6144), (100, 8000)])
def test_prefill_is_right_up_to_8192_tokens(
    query_len: int, context_len: int, dtype: torch.dtype
) -> None:
    check(
        random_case(
            [query_len],
            [context_len],
            num_heads=4,
            num_kv_heads=1,
            head_size=128,
            dtype=dtype,
            device="cuda",
        )
    )


@pytest.mark.parametrize("seed", range(10))
def test_random_steps_are_right(seed: int) -> None:
    draw = random.Random(seed)
    num_decodes, num_others = draw.randint(0, 40), draw.randint(0, 8)
    query_lens = [1] * num_decodes + [draw.randint(2, 600) for _ in range(num_others)] or [1]
    num_kv_heads = draw.choice([1, 2, 3, 8])
    check(
        random_case(
            query_lens,
            [draw.choice([0, draw.randint(1, 50), draw.randint(51, 3000)]) for _ in query_lens],
            num_heads=num_kv_heads * draw.randint(1, 8),
            num_kv_heads=num_kv_heads,
            head_size=draw.choice(HEAD_SIZES),
            block_size=draw.choice([8, 16, 32, 128]),
            dtype=draw.choice(DTYPES),
            device="cuda",
            num_padding_tokens=draw.randint(0, 40),
            num_padding_reqs=draw.randint(0, 9),
            seed=seed,
        )
    )


def test_cache_write_changes_no_other_slot() -> None:
    case = random_case(
        [1, 19, 333],
        [30, 0, 800],
        num_heads=3,
        num_kv_heads=3,
        head_size=80,
        dtype=torch.bfloat16,
        device="cuda",
        num_padding_tokens=60,
    )
    expected = reference_cache(case)
    write_cache(case.key, case.value, case.kv_cache, case.metadata.slot_mapping)
    assert torch.equal(case.kv_cache.view(torch.uint8), expected.view(torch.uint8))


def test_caches_of_more_than_2_to_the_31_elements_are_addressed_right() -> None:
    case = random_case(
        [1, 70], [100, 30], head_size=128, num_heads=8, num_kv_heads=8, dtype=torch.bfloat16,
        device="cuda",
    )  # fmt: skip
    expected = reference_attention(case)
    small, block_elements = case.kv_cache, case.kv_cache[0, 0].numel()
    num_blocks = 2**31 // block_elements + small.shape[1]
    shift = num_blocks - small.shape[1]
    case.kv_cache = torch.zeros(2, num_blocks, *small.shape[2:], dtype=small.dtype, device="cuda")
    case.kv_cache[:, shift:] = small
    metadata = case.metadata
    case.metadata = dataclasses.replace(
        metadata,
        block_table=metadata.block_table + shift,
        slot_mapping=metadata.slot_mapping + shift * small.shape[2],
    )
    backend_for(case).forward(
        case.query, case.key, case.value, case.kv_cache, case.output, case.metadata
    )
    assert relative_error(case.output, expected) < TOLERANCE[torch.bfloat16]


def record(backend: TritonAttentionBackend, case: AttentionCase) -> torch.cuda.CUDAGraph:
    """Records one forward on the case's tensors, after a run that compiles the kernels."""
    backend.allocate_scratch(case.query.device)
    arguments = (case.query, case.key, case.value, case.kv_cache, case.output, case.metadata)
    backend.forward(*arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backend.forward(*arguments)
    return graph


def load(buffers: AttentionCase, step: AttentionCase) -> None:
    """Copies a step into the tensors that a graph was recorded on, clearing the rest."""
    for name in ("query", "key", "value"):
        getattr(buffers, name)[: step.query.shape[0]] = getattr(step, name)
    buffers.kv_cache.fill_(float("nan"))
    buffers.kv_cache[:, : step.kv_cache.shape[1]] = step.kv_cache
    buffers.output.fill_(OUTPUT_CANARY)
    target, source = buffers.metadata, step.metadata
    num_reqs = source.num_reqs
    target.query_start_loc.fill_(source.num_actual_tokens)
    target.query_start_loc[: num_reqs + 1] = source.query_start_loc
    target.seq_lens.zero_()
    target.seq_lens[:num_reqs] = source.seq_lens
    target.block_table.zero_()
    target.block_table[:num_reqs, : source.block_table.shape[1]] = source.block_table
    target.slot_mapping.fill_(-1)
    target.slot_mapping[: source.slot_mapping.shape[0]] = source.slot_mapping


def shape_arguments(dtype: torch.dtype) -> dict[str, object]:
    return {"num_heads": 8, "num_kv_heads": 2, "head_size": 64, "dtype": dtype, "device": "cuda"}


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_recorded_decode_is_right_for_other_steps(dtype: torch.dtype) -> None:
    buffers = random_case([1] * 8, [4000] * 8, **shape_arguments(dtype))
    backend = backend_for(buffers)
    num_sms = torch.cuda.get_device_properties("cuda").multi_processor_count
    assert num_kv_splits(8, 2, 4001, num_sms) > 1
    graph = record(backend, buffers)
    for seed, contexts in enumerate([[0], [100, 1, 3999], [17] * 8, [4000, 0, 0, 2000, 130]]):
        step = random_case([1] * len(contexts), contexts, seed=seed, **shape_arguments(dtype))
        expected = reference_attention(step)
        load(buffers, step)
        graph.replay()
        assert relative_error(buffers.output[: len(contexts)], expected) < TOLERANCE[dtype]
        assert (buffers.output[len(contexts) :] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_recorded_mixed_step_is_right_for_other_steps(dtype: torch.dtype) -> None:
    buffers = random_case([2] * 6 + [500], [900] * 7, **shape_arguments(dtype))
    assert buffers.metadata.num_decodes == 0
    graph = record(backend_for(buffers), buffers)
    steps = [([1, 1, 1, 300], [50, 0, 1300, 20]), ([512], [0]), ([5, 2, 130], [0, 1000, 7])]
    for seed, (query_lens, contexts) in enumerate(steps):
        step = random_case(query_lens, contexts, seed=seed, **shape_arguments(dtype))
        expected = reference_attention(step)
        load(buffers, step)
        graph.replay()
        num_tokens = sum(query_lens)
        assert relative_error(buffers.output[:num_tokens], expected) < TOLERANCE[dtype]
        assert (buffers.output[num_tokens:] == OUTPUT_CANARY).all()


def test_recording_without_scratch_memory_is_refused() -> None:
    case = random_case([1], [4000], **shape_arguments(torch.bfloat16))
    backend = backend_for(case)
    backend.forward(case.query, case.key, case.value, case.kv_cache, case.output, case.metadata)
    unprepared = backend_for(case)
    with (
        pytest.raises(RuntimeError, match="allocate_scratch"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        unprepared.forward(
            case.query, case.key, case.value, case.kv_cache, case.output, case.metadata
        )


def run_in_service(query_lens: list[int], contexts: list[int]) -> None:
    """Runs a step whose table and cache have an engine's shapes, which no step changes."""
    case = random_case(query_lens, contexts, **shape_arguments(torch.bfloat16))
    table = torch.zeros(len(query_lens), 256, dtype=torch.int32, device="cuda")
    table[:, : case.metadata.block_table.shape[1]] = case.metadata.block_table
    case.metadata = dataclasses.replace(case.metadata, block_table=table)
    cache = torch.zeros(2, 2000, *case.kv_cache.shape[2:], dtype=torch.bfloat16, device="cuda")
    cache[:, : case.kv_cache.shape[1]] = case.kv_cache
    case.kv_cache = cache
    check(case)


def test_new_lengths_and_batch_sizes_compile_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compilation in service stalls every request for as long as it takes."""
    compiled: list[str] = []

    def note(*, fn: object, **_: object) -> None:
        compiled.append(str(fn))

    run_in_service([1, 1, 40], [2000, 10, 0])
    run_in_service([1], [20])  # not split
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", note)
    run_in_service([1] * 16 + [3, 100, 16], [100] * 19)
    run_in_service([1] * 7, [3000, 1, 2, 3, 4, 5, 6])
    run_in_service([1] * 3, [30, 1, 2])
    run_in_service([64], [160])
    assert compiled == []
