"""Greedy generation against transformers, in float32, with everything that could change a token.

The reference is teacher-forced: transformers computes prompt and output in one forward pass, and
each token of the output must be its most likely one there. If all are, its own greedy decoding
gives the same tokens, at a fraction of the time.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from minivllm import LLM, RequestOutput, SamplingParams
from minivllm.models.source import find_model

TEXT = (Path(__file__).parent.parent / "LICENSE").read_text()
SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
TINY: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama-3": LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE, attention_bias=True),
    "mistral": MistralConfig(**SIZES, sliding_window=None),
    "qwen2": Qwen2Config(**{k: v for k, v in SIZES.items() if k != "head_dim"}),
    "qwen3": Qwen3Config(**SIZES),
}


def check_against(model: PreTrainedModel, output: RequestOutput, tolerance: float) -> None:
    """Each token must be the reference's most likely, each log-probability the reference's."""
    completion = output.outputs[0]
    prompt, tokens = output.prompt_token_ids, completion.token_ids
    with torch.inference_mode():
        ids = torch.tensor([prompt + tokens], device=model.device)
        logits = model(ids).logits[0, len(prompt) - 1 : -1].cpu()
    reference = logits.float().log_softmax(-1)
    assert tokens == reference.argmax(-1).tolist()
    assert completion.logprobs is not None
    for row, entries in zip(reference, completion.logprobs, strict=True):
        ids = list(entries)
        ours = torch.tensor([entries[i].logprob for i in ids])
        torch.testing.assert_close(ours, row[ids], atol=tolerance, rtol=0)


def generate_in_random_order(
    llm: LLM, prompts: list[list[int]], params: SamplingParams, seed: int
) -> list[RequestOutput]:
    """Adds the prompts one by one between steps, in random order."""
    rng = random.Random(seed)
    order = rng.sample(range(len(prompts)), len(prompts))
    outputs: dict[str, RequestOutput] = {}
    for i in order:
        llm.engine.add_request(str(i), {"prompt_token_ids": prompts[i]}, params)
        for _ in range(rng.randint(0, 3)):
            outputs |= {o.request_id: o for o in llm.engine.step()}
    while llm.engine.has_unfinished_requests:
        outputs |= {o.request_id: o for o in llm.engine.step()}
    return [outputs[str(i)] for i in range(len(prompts))]


@pytest.fixture(scope="module", params=TINY)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(TINY[request.param]).eval()
    for name, parameter in model.named_parameters():
        # The initial weights are so small that no token would depend on the one before.
        torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.2)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return model, str(folder)


@pytest.mark.parametrize(
    ("device", "backend"),
    [
        ("cpu", "torch"),
        pytest.param("cuda", "torch", marks=pytest.mark.gpu),
        pytest.param("cuda", "triton", marks=pytest.mark.gpu),
    ],
)
def test_tiny_models_give_the_tokens_and_logits_of_transformers(tiny, device, backend) -> None:
    model, folder = tiny
    rng = random.Random(1)
    prompts = [[rng.randrange(256) for _ in range(n)] for n in (1, 2, 15, 16, 17, 33, 70, 150)]
    with LLM(
        folder,
        device=device,
        dtype="float32",
        attention_backend=backend,
        max_model_len=256,
        num_kv_blocks=20,
        max_num_batched_tokens=48,
    ) as llm:
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=256)
        outputs = generate_in_random_order(llm, prompts, params, seed=2)
        assert llm.stats()["scheduler"]["num_preemptions"] > 0
    for output in outputs:
        assert len(output.outputs[0].token_ids) == 24
        check_against(model, output, tolerance=1e-4)


@pytest.fixture(scope="module")
def smollm2():
    folder = find_model("smollm2").folder
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def smollm2_llm():
    # 110 blocks hold the longest request and little more, so the others are preempted; 256 tokens a
    # step cut every long prompt into chunks.
    with LLM(
        "smollm2",
        device="cpu",
        dtype="float32",
        max_model_len=1600,
        num_kv_blocks=110,
        max_num_batched_tokens=256,
    ) as llm:
        yield llm


def test_smollm2_gives_the_tokens_of_transformers(smollm2, smollm2_llm) -> None:
    text_ids = smollm2_llm.engine.tokenize(TEXT)
    lengths = [1, 2, 3, 16, 17, 40, 100, 150, 256, 257, 700, 1500]
    prompts = [text_ids[i * 50 : i * 50 + n] for i, n in enumerate(lengths)]
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, logprobs=10)
    outputs = generate_in_random_order(smollm2_llm, prompts, params, seed=0)
    stats = smollm2_llm.stats()
    assert stats["scheduler"]["num_preemptions"] > 0
    for output in outputs:
        assert len(output.outputs[0].token_ids) == 64
        check_against(smollm2, output, tolerance=1e-4)


def test_a_warm_prefix_cache_changes_no_token(smollm2, smollm2_llm) -> None:
    prompt = smollm2_llm.engine.tokenize(TEXT[3000:5000])
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=10)
    smollm2_llm.engine.core.kv_cache.pool.reset_index()
    cold, warm = (smollm2_llm.generate([prompt], params)[0] for _ in range(2))
    assert cold.num_cached_tokens == 0
    assert warm.num_cached_tokens == (len(prompt) - 1) // 16 * 16
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids
    check_against(smollm2, warm, tolerance=1e-4)


def test_a_chat_gets_a_sensible_answer(smollm2_llm) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    output = smollm2_llm.chat(messages, SamplingParams(temperature=0, max_tokens=40))[0]
    assert "Paris" in output.outputs[0].text
    assert output.outputs[0].finish_reason == "stop"
    assert "<|im_end|>" not in output.outputs[0].text
