"""The runner: padding harms nobody, and what is left of a request is forgotten with it."""

from __future__ import annotations

import random

import pytest
import torch

from minivllm import LLM, SamplingParams
from minivllm.worker.input_buffers import BatchRows, InputBuffers, ModelInputs

ON = [
    pytest.param("cpu", "torch", id="cpu"),
    pytest.param("cuda", "torch", id="cuda-torch", marks=pytest.mark.gpu),
    pytest.param("cuda", "triton", id="cuda-triton", marks=pytest.mark.gpu),
]


def make_llm(device: str, backend: str) -> LLM:
    """A small pool, so that blocks change hands, full of NaN, so that no stray read goes unseen."""
    llm = LLM(
        "random:tiny",
        device=device,
        dtype="float32",
        attention_backend=backend,
        max_model_len=96,
        num_kv_blocks=14,
        max_num_batched_tokens=40,
        max_num_seqs=8,
    )
    for layer in llm.engine.core.runner.model.attention_layers():
        layer.kv_cache.fill_(float("nan"))
    return llm


def run(llm: LLM) -> list[list[int]]:
    rng = random.Random(0)
    prompts = [[rng.randrange(512) for _ in range(rng.randint(1, 60))] for _ in range(8)]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


@pytest.mark.parametrize(("device", "backend"), ON)
def test_padding_changes_no_token_and_writes_to_no_slot(
    device: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run(make_llm(device, backend))
    fill, rng = InputBuffers.fill, random.Random(1)
    padded_steps = []

    def fill_padded(self: InputBuffers, rows: BatchRows) -> ModelInputs:
        num_tokens, num_reqs = len(rows.token_ids), len(rows.query_lens)
        tokens, reqs = rng.randint(num_tokens, 40), rng.randint(num_reqs, 8)
        padded_steps.append(tokens > num_tokens and reqs > num_reqs)
        return fill(self, rows, tokens, reqs)

    monkeypatch.setattr(InputBuffers, "fill", fill_padded)
    llm = make_llm(device, backend)
    assert run(llm) == expected
    assert sum(padded_steps) > 10
    assert llm.stats()["scheduler"]["num_preemptions"] > 0
    for layer in llm.engine.core.runner.model.attention_layers():
        assert layer.kv_cache[:, 0].isnan().all(), "something was written to the null block"


@pytest.mark.parametrize(("device", "backend"), ON)
def test_one_requests_nan_does_not_reach_the_next_owner_of_its_blocks(
    device: str, backend: str
) -> None:
    llm = make_llm(device, backend)
    clean = run(llm)
    for layer in llm.engine.core.runner.model.attention_layers():
        layer.kv_cache.fill_(float("nan"))  # what an overflow in half precision leaves behind
    llm.engine.core.kv_cache.pool.reset_index()
    assert run(llm) == clean


def test_the_runner_forgets_requests_that_ended() -> None:
    llm = make_llm("cpu", "torch")
    run(llm)
    runner = llm.engine.core.runner
    llm.generate([[1, 2]], SamplingParams(max_tokens=1))  # the next plan says who has left
    assert len(runner.requests) <= 1
    assert len(runner.requests) + len(runner._free_rows) == 8


def test_profiling_runs_the_largest_step_without_a_cache() -> None:
    llm = make_llm("cpu", "torch")
    runner, steps = llm.engine.core.runner, []
    original = runner.model.forward

    def forward(input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        steps.append(len(input_ids))
        return original(input_ids, positions)

    runner.model.forward = forward
    runner.profile(40, 8)
    assert steps == [40]
