"""The Triton backend, interpreted on the CPU against the float64 reference, and built for Hopper.

Every cache in these tests holds NaN wherever no token lies: in the null block, in free blocks and
behind the last token of each request. A result without NaN has read only what belongs to it.
Triton's interpreter has no bfloat16 products; those are tested on a GPU.
"""

from __future__ import annotations

import dataclasses
import random
import re
import subprocess
import tempfile

import pytest
import torch
import triton
from hypothesis import given
from hypothesis import strategies as st
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from minivllm.attention import triton_decode
from minivllm.attention.triton_backend import (
    TritonAttentionBackend,
    decode_tile,
    prefill_tile,
)
from minivllm.attention.triton_decode import (
    DecodeScratch,
    decode_attention,
    decode_kernel,
    max_split_programs,
    merge_kernel,
    num_kv_splits,
)
from minivllm.attention.triton_kernels import Tile, padded_head_size, write_cache
from minivllm.attention.triton_prefill import prefill_attention, prefill_kernel
from minivllm.errors import ConfigError
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
from tests.triton_worker import compiled, interpreted

FLOAT32 = TOLERANCE[torch.float32]


def backend_for(case: AttentionCase) -> TritonAttentionBackend:
    block_size, num_kv_heads, head_size = case.kv_cache.shape[-3:]
    num_heads = case.query.shape[1]
    return TritonAttentionBackend(num_heads, num_kv_heads, head_size, block_size, case.scale)


def assert_close(error: float, tolerance: float) -> None:
    assert error < tolerance, f"relative error {error}, tolerance {tolerance}"


def run_decode(case: AttentionCase, num_splits: int) -> None:
    """Writes the cache and decodes, with NaN in the scratch so that stale partials would show."""
    head_size = case.query.shape[2]
    num_rows = case.metadata.num_decodes * case.query.shape[1] * num_splits
    scratch = DecodeScratch(num_rows, head_size, torch.device("cpu"))
    scratch.partial.fill_(float("nan"))
    scratch.lse.fill_(float("nan"))
    write_cache(case.key, case.value, case.kv_cache, case.metadata.slot_mapping)
    tile = Tile(16, 16, 4, 1)
    decode_attention(
        case.query, case.kv_cache, case.output, case.metadata, case.scale, tile, num_splits, scratch
    )


@pytest.mark.parametrize("head_size", [8, 16, 32, 64, 80, 96, 128, 256])
@interpreted
def test_mixed_step_is_right_for_every_head_size(head_size: int) -> None:
    case = random_case([1, 1, 9, 21], [0, 40, 0, 23], head_size=head_size)
    assert_close(attention_error(backend_for(case), case), FLOAT32)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8])
@interpreted
def test_mixed_step_is_right_for_every_number_of_query_heads_per_kv_head(group: int) -> None:
    case = random_case([1, 1, 17, 30], [5, 40, 0, 23], num_heads=2 * group, num_kv_heads=2)
    assert_close(attention_error(backend_for(case), case), FLOAT32)


@interpreted
def test_more_query_heads_per_kv_head_than_a_tile_has_rows_are_right() -> None:
    case = random_case([1, 3], [20, 7], num_heads=40, num_kv_heads=1, head_size=16)
    assert_close(attention_error(backend_for(case), case), FLOAT32)


@pytest.mark.parametrize("block_size", [1, 2, 4, 8, 16, 32, 64, 128, 256])
@interpreted
def test_mixed_step_is_right_for_every_block_size(block_size: int) -> None:
    case = random_case([1, 1, 33, 40], [0, 70, 0, 50], block_size=block_size, head_size=32)
    assert_close(attention_error(backend_for(case), case), FLOAT32)


@pytest.mark.parametrize("head_size", [64, 80])
@interpreted
def test_float16_is_as_exact_as_its_rounding(head_size: int) -> None:
    case = random_case([1, 1, 40], [100, 3, 60], head_size=head_size, dtype=torch.float16)
    assert_close(attention_error(backend_for(case), case), TOLERANCE[torch.float16])


@pytest.mark.parametrize("seed", range(12))
@interpreted
def test_random_steps_are_right(seed: int) -> None:
    draw = random.Random(seed)
    num_decodes, num_others = draw.randint(0, 5), draw.randint(0, 4)
    query_lens = [1] * num_decodes + [draw.randint(2, 70) for _ in range(num_others)] or [1]
    num_kv_heads = draw.choice([1, 2, 3])
    case = random_case(
        query_lens,
        [draw.choice([0, draw.randint(1, 15), draw.randint(16, 150)]) for _ in query_lens],
        num_heads=num_kv_heads * draw.randint(1, 4),
        num_kv_heads=num_kv_heads,
        head_size=draw.choice([16, 32, 64, 96]),
        block_size=draw.choice([4, 16, 32]),
        num_padding_tokens=draw.randint(0, 5),
        num_padding_reqs=draw.randint(0, 3),
        seed=seed,
    )
    assert_close(attention_error(backend_for(case), case), FLOAT32)


@interpreted
def test_scores_far_from_zero_do_not_overflow() -> None:
    case = random_case([1, 20], [90, 30])
    case.query.mul_(1000)
    assert_close(attention_error(backend_for(case), case), 1e-4)


@interpreted
def test_heads_may_be_strided_too() -> None:
    case = random_case([1, 6], [10, 4], head_size=32)
    for name in ("query", "key", "value"):
        spread = torch.full((*getattr(case, name).shape[:2], 48), float("nan"))
        spread[..., :32] = getattr(case, name)
        setattr(case, name, spread[..., :32])
    assert_close(attention_error(backend_for(case), case), FLOAT32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@interpreted
def test_cache_write_stores_new_tokens_exactly_and_changes_no_other_slot(
    dtype: torch.dtype,
) -> None:
    case = random_case([1, 19, 33], [30, 0, 8], num_kv_heads=3, num_heads=3, head_size=80,
                       dtype=dtype, num_padding_tokens=6)  # fmt: skip
    expected = reference_cache(case)
    write_cache(case.key, case.value, case.kv_cache, case.metadata.slot_mapping)
    assert torch.equal(case.kv_cache.view(torch.uint8), expected.view(torch.uint8)), (
        "the cache differs from the expected bytes"
    )


@interpreted
def test_key_rows_beyond_the_slot_mapping_are_padding() -> None:
    case = random_case([1, 5], [3, 0], num_padding_tokens=7)
    expected = reference_cache(case)
    # Behind the mapping lie slots of an earlier step, in use by now.
    stale = case.metadata.slot_mapping.clone()
    stale[6:] = stale[0]
    write_cache(case.key, case.value, case.kv_cache, stale[:6])
    assert torch.equal(case.kv_cache.view(torch.uint8), expected.view(torch.uint8)), (
        "the cache differs from the expected bytes"
    )


@interpreted
def test_padding_changes_no_real_row_and_its_own_rows_stay() -> None:
    case = random_case([1, 1, 20], [50, 0, 9], num_padding_tokens=8, num_padding_reqs=5)
    assert_close(attention_error(backend_for(case), case), FLOAT32)
    assert (case.output[22:] == OUTPUT_CANARY).all(), "a padding row was written"


@pytest.mark.parametrize("num_splits", [1, 2, 3, 4, 7, 16, 17, 40])
@interpreted
def test_decode_is_right_for_every_split_count_whatever_the_lengths(num_splits: int) -> None:
    case = random_case([1] * 6, [0, 15, 16, 47, 200, 599], num_heads=3, num_kv_heads=1,
                       head_size=32)  # fmt: skip
    expected = reference_attention(case)
    run_decode(case, num_splits)
    assert_close(relative_error(case.output, expected), FLOAT32)


@pytest.mark.parametrize("num_splits", [1, 2, 5])
@interpreted
def test_decode_of_padding_requests_writes_zeros(num_splits: int) -> None:
    case = random_case([1, 1], [30, 60], num_padding_tokens=3, num_padding_reqs=2)
    expected = reference_attention(case)
    # As a recorded graph for four decodes sees a step that has two.
    case.metadata = dataclasses.replace(case.metadata, num_decodes=4)
    run_decode(case, num_splits)
    assert_close(relative_error(case.output[:2], expected), FLOAT32)
    assert (case.output[2:4] == 0).all(), "a padding request's row is not zero"
    assert (case.output[4:] == OUTPUT_CANARY).all(), "a row without a request was written"


@interpreted
def test_one_split_leaves_the_scratch_alone() -> None:
    case = random_case([1, 1], [30, 60])
    scratch = DecodeScratch(8, 64, torch.device("cpu"))
    scratch.partial.fill_(3.0)
    scratch.lse.fill_(3.0)
    write_cache(case.key, case.value, case.kv_cache, case.metadata.slot_mapping)
    decode_attention(case.query, case.kv_cache, case.output, case.metadata, case.scale,
                     Tile(16, 16, 4, 1), 1, scratch)  # fmt: skip
    assert (scratch.partial == 3.0).all(), "partial results were written"
    assert (scratch.lse == 3.0).all(), "partial sums were written"


@interpreted
def test_backend_splits_long_contexts_of_small_batches() -> None:
    case = random_case([1], [700], num_heads=2, num_kv_heads=1, head_size=32)
    backend = backend_for(case)
    backend.allocate_scratch(torch.device("cpu"))
    assert num_kv_splits(1, 1, 701, num_sms=1) == 4
    assert backend._scratch is not None
    backend._scratch.lse.fill_(float("nan"))
    assert_close(attention_error(backend, case), FLOAT32)
    written = backend._scratch.lse.isfinite().sum()
    assert written == 8, f"expected 2 heads x 4 splits of partial results, found {written}"


@interpreted
def test_prefill_kernel_takes_steps_that_hold_every_kind_of_request() -> None:
    case = random_case([1, 1, 12, 40], [20, 0, 0, 30], num_padding_tokens=4, num_padding_reqs=3)
    # As a graph recorded for any step of up to so many rows and requests runs it.
    case.metadata = dataclasses.replace(case.metadata, num_decodes=0)
    assert_close(attention_error(backend_for(case), case), FLOAT32)
    assert (case.output[54:] == OUTPUT_CANARY).all(), "a padding row was written"


@interpreted
def test_prefill_leaves_earlier_requests_alone() -> None:
    case = random_case([1, 1, 12, 5], [20, 7, 0, 30])
    expected = reference_attention(case)
    write_cache(case.key, case.value, case.kv_cache, case.metadata.slot_mapping)
    prefill_attention(case.query, case.kv_cache, case.output, case.metadata, 2, case.scale,
                      Tile(16, 16, 4, 1))  # fmt: skip
    assert (case.output[:2] == OUTPUT_CANARY).all(), "a decode's row was written"
    assert_close(relative_error(case.output[2:], expected[2:]), FLOAT32)


@pytest.mark.parametrize(("block_m", "block_n"), [(16, 16), (16, 64), (64, 16), (64, 128)])
@interpreted
def test_prefill_is_right_for_every_tile(block_m: int, block_n: int) -> None:
    case = random_case([37, 5, 64, 2], [100, 3, 0, 64], num_heads=3, num_kv_heads=1, head_size=32)
    expected = reference_attention(case)
    write_cache(case.key, case.value, case.kv_cache, case.metadata.slot_mapping)
    prefill_attention(case.query, case.kv_cache, case.output, case.metadata, 0, case.scale,
                      Tile(block_m, block_n, 4, 1))  # fmt: skip
    assert_close(relative_error(case.output, expected), FLOAT32)


@interpreted
def test_bfloat16_is_refused_where_the_interpreter_cannot_multiply_it() -> None:
    with pytest.raises(ConfigError, match="interpreter"):
        TritonAttentionBackend(4, 2, 64, 16, 0.125, dtype=torch.bfloat16)


@given(
    num_decodes=st.integers(1, 4096),
    num_kv_heads=st.integers(1, 128),
    max_seq_len=st.integers(0, 2**20),
    num_sms=st.integers(1, 200),
)
def test_splits_never_need_more_scratch_than_there_is(
    num_decodes: int, num_kv_heads: int, max_seq_len: int, num_sms: int
) -> None:
    splits = num_kv_splits(num_decodes, num_kv_heads, max_seq_len, num_sms)
    assert splits >= 1
    assert splits == 1 or num_decodes * num_kv_heads * splits <= max_split_programs(num_sms)


def test_short_contexts_are_not_split() -> None:
    assert num_kv_splits(1, 8, triton_decode.MIN_TOKENS_PER_SPLIT, 132) == 1


def test_batches_that_fill_the_device_are_not_split() -> None:
    assert num_kv_splits(256, 8, 100_000, 132) == 1


def test_long_contexts_at_batch_one_occupy_every_multiprocessor() -> None:
    assert num_kv_splits(1, 8, 32_768, 132) * 8 >= 132


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((4, 2, 264, 16, 1.0), "head_size=264"),
        ((4, 2, 65, 16, 1.0), "head_size=65"),
        ((4, 2, 0, 16, 1.0), "head_size=0"),
        ((5, 2, 64, 16, 1.0), "num_heads=5"),
        ((4, 2, 64, 24, 1.0), "block_size=24"),
        ((4, 2, 64, 16, -1.0), "scale=-1.0"),
    ],
)
def test_shapes_that_do_not_work_are_refused_at_construction(
    arguments: tuple[int, int, int, int, float], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        TritonAttentionBackend(*arguments)


def test_dtypes_that_do_not_work_are_refused_at_construction() -> None:
    with pytest.raises(ConfigError, match="float64"):
        TritonAttentionBackend(4, 2, 64, 16, 0.125, dtype=torch.float64)


@dataclasses.dataclass
class HopperBuild:
    """What a kernel compiled for compute capability 9.0 uses."""

    stack_bytes: int
    shared_bytes: int
    ptx: str


POINTERS = {
    "table_ptr": "*i32",
    "seq_lens_ptr": "*i32",
    "query_start_ptr": "*i32",
    "partial_ptr": "*fp32",
    "lse_ptr": "*fp32",
}


def build_for_hopper(
    kernel: triton.JITFunction, dtype: torch.dtype, tile: Tile, constants: dict[str, int]
) -> HopperBuild:
    """Compiles as a launch does, with aligned pointers and strides; takes no GPU."""
    element = {torch.float32: "*fp32", torch.bfloat16: "*bf16"}[dtype]
    signature, hints, values = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        is_pointer = name.endswith("_ptr")
        if name in constants:
            signature[name], values[(i,)] = "constexpr", constants[name]
        elif name == "scale":
            signature[name] = "fp32"
        else:
            signature[name] = POINTERS.get(name, element) if is_pointer else "i32"
        if is_pointer or name.endswith(("_stride", "_offset")):
            hints[(i,)] = [["tt.divisibility", 16]]
    built = triton.compile(
        ASTSource(kernel, signature, values, hints),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": tile.num_warps, "num_stages": tile.num_stages},
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        report = subprocess.check_output([tool, "-res-usage", file.name], text=True)
    stack = re.search(r"STACK:(\d+)", report)
    assert stack is not None, f"no stack size in: {report}"
    return HopperBuild(int(stack[1]), built.metadata.shared, built.asm["ptx"])


def constants(head_size: int, tile: Tile, **more: int) -> dict[str, int]:
    return {
        "GROUP": 4,
        "NUM_KV_HEADS": 8,
        "HEAD_SIZE": head_size,
        "HEAD_PADDED": padded_head_size(head_size),
        "BLOCK_SIZE": 16,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        **more,
    }


MAX_SHARED_BYTES = 227 * 1024  # of one program on Hopper
HEAD_SIZES_BY_TILE = [64, 80, 128, 256]


@pytest.mark.parametrize("head_size", HEAD_SIZES_BY_TILE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@compiled
def test_prefill_kernel_fits_hoppers_registers_and_shared_memory(
    dtype: torch.dtype, head_size: int
) -> None:
    tile = prefill_tile(head_size, dtype)
    build = build_for_hopper(prefill_kernel, dtype, tile, constants(head_size, tile))
    assert build.stack_bytes == 0, f"registers spill to {build.stack_bytes} bytes of stack"
    assert build.shared_bytes <= MAX_SHARED_BYTES, f"{build.shared_bytes} bytes of shared memory"


@pytest.mark.parametrize("head_size", HEAD_SIZES_BY_TILE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@compiled
def test_two_programs_of_the_decode_kernel_share_a_multiprocessor_without_spills(
    dtype: torch.dtype, head_size: int
) -> None:
    tile = decode_tile(head_size, dtype)
    build = build_for_hopper(decode_kernel, dtype, tile, constants(head_size, tile, SPLIT=True))
    assert build.stack_bytes == 0, f"registers spill to {build.stack_bytes} bytes of stack"
    assert 2 * build.shared_bytes <= MAX_SHARED_BYTES, (
        f"{build.shared_bytes} bytes of shared memory"
    )


@pytest.mark.parametrize("head_size", [64, 128])
@compiled
def test_bfloat16_prefill_uses_hoppers_matrix_instructions(head_size: int) -> None:
    tile = prefill_tile(head_size, torch.bfloat16)
    build = build_for_hopper(prefill_kernel, torch.bfloat16, tile, constants(head_size, tile))
    assert "wgmma.mma_async" in build.ptx
    assert "mma.sync" not in build.ptx


@compiled
def test_float32_products_are_not_rounded_to_tf32() -> None:
    tile = prefill_tile(64, torch.float32)
    build = build_for_hopper(prefill_kernel, torch.float32, tile, constants(64, tile))
    assert "tf32" not in build.ptx


@compiled
def test_unsplit_decode_and_merge_compile_for_hopper() -> None:
    tile = decode_tile(128, torch.bfloat16)
    unsplit = constants(128, tile, SPLIT=False)
    assert build_for_hopper(decode_kernel, torch.bfloat16, tile, unsplit).stack_bytes == 0
    merge = {"HEAD_SIZE": 128, "HEAD_PADDED": 128, "BLOCK_N": tile.block_n, "CHUNK": 16}
    assert build_for_hopper(merge_kernel, torch.bfloat16, tile, merge).stack_bytes == 0
