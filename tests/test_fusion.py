"""Fusion passes: what they replace, that results stay, and the kernels behind the operations."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch._inductor.utils import fresh_cache

from minivllm import LLM, SamplingParams
from minivllm.compilation.compilers import InductorCompiler
from minivllm.compilation.fusion import FUSIONS, FusedGraph
from minivllm.compilation.wrapper import CompiledModel
from minivllm.config import FUSION_NAMES
from minivllm.errors import ConfigError
from minivllm.inspect.pieces import inspect_pieces, render_graph
from minivllm.layers import fused
from tests.triton_worker import interpreted

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def nothing_compiled_before():
    """Inductor remembers graphs between runs, and then runs no pass over them."""
    with fresh_cache():
        yield


def make_llm(preset: str, device: str = "cpu", dtype: str = "float32", **options: object) -> LLM:
    options = {"compile": "inductor", "compile_cache": False, **options}
    sizes = {"max_model_len": 128, "num_kv_blocks": 32}
    return LLM(f"random:{preset}", device=device, dtype=dtype, **sizes, **options)  # type: ignore[arg-type]


def generate(llm: LLM) -> list[list[int]]:
    rng = random.Random(1)
    prompts = [[rng.randrange(512) for _ in range(n)] for n in (1, 5, 40)]
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


def fused_graphs(llm: LLM) -> list[FusedGraph]:
    forward = llm.engine.core.runner.forward
    assert isinstance(forward, CompiledModel)
    compiler = forward.backend.compiler
    assert isinstance(compiler, InductorCompiler)
    assert compiler.fusion_pass is not None
    return compiler.fusion_pass.fused


@pytest.mark.parametrize("device", DEVICES)
def test_fused_models_give_the_same_tokens_and_every_chain_is_found(device: str) -> None:
    llm = make_llm("tiny-qwen3", device, fusions=FUSION_NAMES)
    assert generate(llm) == generate(make_llm("tiny-qwen3", device, compile="none"))
    # First, middle and last piece: the first norm has nothing to add, the last no query and key.
    assert [graph.counts for graph in fused_graphs(llm)] == [
        {"add_rms_norm": 0, "silu_mul": 0, "qk_norm_rope": 1},
        {"add_rms_norm": 2, "silu_mul": 1, "qk_norm_rope": 1},
        {"add_rms_norm": 2, "silu_mul": 1, "qk_norm_rope": 0},
    ]


def test_chains_are_found_in_bfloat16_too() -> None:
    llm = make_llm("tiny-qwen3", dtype="bfloat16", fusions=FUSION_NAMES)
    assert fused_graphs(llm)[1].counts == {"add_rms_norm": 2, "silu_mul": 1, "qk_norm_rope": 1}


def test_only_what_was_chosen_is_fused_and_both_graphs_are_shown() -> None:
    llm = make_llm("tiny", fusions=("silu_mul",))
    middle = fused_graphs(llm)[1]
    assert middle.counts == {"silu_mul": 1}
    assert "aten.exp" in middle.before
    assert "aten.exp" not in middle.after
    assert middle.after.count("minivllm.silu_mul") == 1
    text = render_graph(inspect_pieces(llm), "fusions")
    assert text.count("# before") == text.count("# after") == 3


def test_a_model_without_norms_of_queries_and_keys_has_no_such_chain() -> None:
    llm = make_llm("tiny", fusions=("qk_norm_rope",))
    assert [graph.counts for graph in fused_graphs(llm)] == [{}] * 3


def test_nothing_is_fused_by_default_and_then_there_is_nothing_to_show() -> None:
    llm = make_llm("tiny")
    with pytest.raises(ConfigError, match="no fusion pass ran: choose some"):
        render_graph(inspect_pieces(llm), "fusions")


def test_a_fused_piece_on_disk_is_not_taken_for_one_that_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minivllm.compilation.wrapper.cache_root", lambda: tmp_path)

    def compilations(fusions: tuple[str, ...]) -> int:
        llm = make_llm("tiny", compile_cache=True, fusions=fusions)
        return llm.stats()["compilation"]["num_compilations"]

    assert [compilations(f) for f in [(), ("silu_mul",), (), ("silu_mul",)]] == [3, 3, 0, 0]


def test_the_names_in_the_configuration_are_those_of_the_passes() -> None:
    assert tuple(FUSIONS) == FUSION_NAMES
    with pytest.raises(ConfigError, match="fusions='norm': expected one of add_rms_norm"):
        make_llm("tiny", fusions=("norm",))
    with pytest.raises(ConfigError, match="passes of Inductor's; choose compile='inductor'"):
        make_llm("tiny", compile="eager", fusions=("silu_mul",))


def chain_inputs(device: str, dtype: torch.dtype) -> dict[str, tuple]:
    """Sizes that fill no block evenly; queries and keys lie in a wider tensor, as in the model."""
    torch.manual_seed(0)
    options = {"device": device, "dtype": dtype}
    x, residual, weight = (torch.randn(s, **options) for s in ((5, 100), (5, 100), (100,)))
    heads = torch.randn(5, 8, 24, **options)[:, :6]
    weights = torch.randn(2, 24, **options)
    angles = torch.rand(5, 1, 12, **options).repeat(1, 1, 2) * 6
    return {
        "add_rms_norm": (residual, x, weight, 1e-5),
        "silu_mul": (torch.randn(5, 2 * 1100, **options),),
        "qk_norm_rope": (heads, weights[0], weights[1], angles.cos(), angles.sin(), 4, 1e-5),
    }


def check_kernels(device: str, dtype: torch.dtype, tolerance: float) -> None:
    from minivllm.layers import fused_kernels

    for name, inputs in chain_inputs(device, dtype).items():
        wide = [t.double() if isinstance(t, torch.Tensor) else t for t in inputs]
        expected = getattr(fused, name)(*wide)
        results = getattr(fused_kernels, name)(*inputs)
        if not isinstance(results, tuple):
            expected, results = (expected,), (results,)
        for result, reference in zip(results, expected, strict=True):
            assert result.is_contiguous()
            assert result.dtype == dtype
            torch.testing.assert_close(result.double(), reference, rtol=tolerance, atol=tolerance)


@interpreted
def test_the_kernels_compute_what_the_operations_say() -> None:
    check_kernels("cpu", torch.float32, 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_the_kernels_compute_what_the_operations_say_on_a_gpu(
    dtype: torch.dtype, tolerance: float
) -> None:
    check_kernels("cuda", dtype, tolerance)


@pytest.mark.parametrize("name", FUSION_NAMES)
def test_the_operations_keep_the_promises_of_their_schemas(name: str) -> None:
    inputs = chain_inputs("cpu", torch.float32)[name]
    torch.library.opcheck(getattr(torch.ops.minivllm, name).default, inputs)
