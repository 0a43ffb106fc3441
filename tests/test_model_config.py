"""`config.json`: what transformers' own configuration classes say it means, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from minivllm.attention.torch_backend import TorchAttentionBackend
from minivllm.config import ModelConfig, RopeScaling
from minivllm.errors import ModelError
from minivllm.layers.rotary import rotary_frequencies
from minivllm.models.decoder import DecoderForCausalLM
from minivllm.models.presets import PRESETS
from minivllm.models.registry import SUPPORTED_ARCHITECTURES, config_from_hf

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "max_position_embeddings": 512,
}
FULL = {**SIZES, "num_key_value_heads": 4, "head_dim": 16}
MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


def raw_config(architecture: str = "LlamaForCausalLM", **changes: Any) -> dict[str, Any]:
    model_type = MODEL_TYPES[architecture]
    raw = {"architectures": [architecture], "model_type": model_type, **SIZES, **changes}
    if architecture == "MistralForCausalLM":
        raw.setdefault("sliding_window", None)
    return raw


def check_against_transformers(config: ModelConfig, reference: PretrainedConfig) -> None:
    heads = reference.num_attention_heads
    head_dim = getattr(reference, "head_dim", None) or reference.hidden_size // heads
    eos = reference.eos_token_id
    for name in SIZES:
        assert getattr(config, name) == getattr(reference, name), name
    assert config.num_key_value_heads == reference.num_key_value_heads
    assert config.head_dim == head_dim
    assert config.rms_norm_eps == reference.rms_norm_eps
    assert config.rope_theta == reference.rope_parameters["rope_theta"]
    assert config.tie_word_embeddings == reference.tie_word_embeddings
    assert config.eos_token_ids == (
        () if eos is None else (eos,) if isinstance(eos, int) else (*eos,)
    )
    assert config.bos_token_id == reference.bos_token_id


def as_transformers_reads(raw: dict[str, Any], folder: Path) -> PretrainedConfig:
    (folder / "config.json").write_text(json.dumps(raw))
    return AutoConfig.from_pretrained(folder)


@pytest.mark.parametrize("architecture", SUPPORTED_ARCHITECTURES)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"head_dim": 16, "num_key_value_heads": 4},
        {"rope_theta": 5e5},
        {"rope_theta": 5e5, "rope_scaling": None},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        {"eos_token_id": [3, 5], "bos_token_id": 7},
        {"eos_token_id": None, "bos_token_id": None},
        {"tie_word_embeddings": True, "rms_norm_eps": 1e-5},
    ],
    ids=str,
)
def test_a_config_means_what_transformers_takes_it_to_mean(
    architecture: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    raw = raw_config(architecture, **changes)
    check_against_transformers(config_from_hf(raw), as_transformers_reads(raw, tmp_path))


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM"])
def test_no_number_of_key_value_heads_means_one_per_query_head(
    architecture: str, tmp_path: Path
) -> None:
    raw = raw_config(architecture, num_key_value_heads=None)
    check_against_transformers(config_from_hf(raw), as_transformers_reads(raw, tmp_path))


@pytest.mark.parametrize(
    ("config", "architecture"),
    [
        (LlamaConfig(**FULL, attention_bias=True, mlp_bias=True), "LlamaForCausalLM"),
        (
            MistralConfig(**FULL, sliding_window=None, tie_word_embeddings=True),
            "MistralForCausalLM",
        ),
        (Qwen2Config(**SIZES, num_key_value_heads=4), "Qwen2ForCausalLM"),
        (Qwen3Config(**FULL, rope_parameters={"rope_theta": 1e6}), "Qwen3ForCausalLM"),
    ],
)
def test_a_config_that_transformers_saved_is_read(
    config: PretrainedConfig, architecture: str, tmp_path: Path
) -> None:
    config.architectures = [architecture]
    config.save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    check_against_transformers(config_from_hf(raw), config)


@pytest.mark.parametrize("bias", [True, False])
def test_biases_and_norms_are_where_the_architecture_has_them(bias: bool) -> None:
    found = {}
    for name in SUPPORTED_ARCHITECTURES:
        config = config_from_hf(raw_config(name, attention_bias=bias, mlp_bias=bias))
        found[name] = (config.attention_bias, config.attention_out_bias, config.mlp_bias)
        assert config.qk_norm is (name == "Qwen3ForCausalLM")
    assert found == {
        "LlamaForCausalLM": (bias, bias, bias),
        "MistralForCausalLM": (False, False, False),
        "Qwen2ForCausalLM": (True, False, False),
        "Qwen3ForCausalLM": (bias, bias, False),
    }


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5, "rope_scaling": LLAMA3},
        {"rope_theta": 5e5, "rope_scaling": {**LLAMA3, "type": "llama3"}},
        {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}},
    ],
)
def test_the_scaling_of_llama_3_is_read_from_both_layouts(rope: dict[str, Any]) -> None:
    config = config_from_hf(raw_config(**rope))
    assert config.rope_theta == 5e5
    assert config.rope_scaling == RopeScaling(8.0, 1.0, 4.0, 64)


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        LLAMA3,
        {**LLAMA3, "factor": 32.0, "original_max_position_embeddings": 8192},
        {**LLAMA3, "low_freq_factor": 0.5, "high_freq_factor": 8.0},
    ],
    ids=str,
)
@pytest.mark.parametrize(("theta", "head_dim"), [(5e5, 64), (1e4, 128), (1e6, 80)])
def test_positions_turn_by_the_angles_that_transformers_computes(
    theta: float, head_dim: int, scaling: dict[str, Any] | None, tmp_path: Path
) -> None:
    raw = raw_config(rope_theta=theta, rope_scaling=scaling, head_dim=head_dim)
    expected = LlamaRotaryEmbedding(as_transformers_reads(raw, tmp_path)).inv_freq
    actual = rotary_frequencies(config_from_hf(raw))
    assert actual.dtype == expected.dtype == torch.float32
    torch.testing.assert_close(actual, expected, rtol=5e-7, atol=0)


# The public files of the models, as their makers wrote them.
SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 576,
    "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pad_token_id": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 49152,
}
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
LLAMA32 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {**LLAMA3, "factor": 32.0, "original_max_position_embeddings": 8192},
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "vocab_size": 128256,
}


QWEN3_8B = QWEN3 | {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_window_layers": 36,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "tie_word_embeddings": False,
}
PUBLIC = {
    "smollm2-135m": (SMOLLM2, 134_515_008),
    "qwen3-0.6b": (QWEN3, 596_049_920),
    "llama-3.2-1b": (LLAMA32, 1_235_814_400),
    "qwen3-8b": (QWEN3_8B, 8_190_735_360),
}


@pytest.mark.parametrize(("preset", "raw"), [(name, raw) for name, (raw, _) in PUBLIC.items()])
def test_a_preset_is_what_the_public_config_gives(preset: str, raw: dict[str, Any]) -> None:
    assert config_from_hf(raw) == PRESETS[preset]


def num_parameters(preset: str) -> int:
    config = PRESETS[preset]
    heads = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    with torch.device("meta"):
        backend = TorchAttentionBackend(*heads, block_size=16, scale=1.0)
        model = DecoderForCausalLM(config, backend, max_model_len=16)
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("preset", "count"), [(name, count) for name, (_, count) in PUBLIC.items()]
)
def test_a_preset_has_exactly_the_parameters_of_the_public_model(preset: str, count: int) -> None:
    assert num_parameters(preset) == count


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_has_as_many_parameters_as_transformers_gives_its_shape(preset: str) -> None:
    config = PRESETS[preset]
    shape = {name: getattr(config, name) for name in [*FULL, "tie_word_embeddings"]}
    reference = AutoConfig.for_model(MODEL_TYPES[config.architecture], **shape)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(reference)
    assert num_parameters(preset) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("MistralForCausalLM", {"sliding_window": 512}),
        ("Qwen2ForCausalLM", {"sliding_window": 64}),
        ("Qwen2ForCausalLM", {"sliding_window": 64, "use_sliding_window": True}),  # 28 full layers
        ("Qwen3ForCausalLM", {"sliding_window": None, "use_sliding_window": True}),
        (
            "Qwen2ForCausalLM",
            {
                "sliding_window": 64,
                "use_sliding_window": True,
                "max_window_layers": 0,
                "layer_types": ["full_attention"] * 2,
            },
        ),
        ("LlamaForCausalLM", {"sliding_window": 64}),
    ],
)
def test_a_window_that_hides_nothing_is_harmless(
    architecture: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    raw = raw_config(architecture, **changes)
    check_against_transformers(config_from_hf(raw), as_transformers_reads(raw, tmp_path))


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("MistralForCausalLM", {"sliding_window": 511}),
        ("Qwen2ForCausalLM", {"use_sliding_window": True, "max_window_layers": 1}),
        ("Qwen3ForCausalLM", {"layer_types": ["full_attention", "sliding_attention"]}),
    ],
)
def test_a_window_that_hides_something_is_refused(
    architecture: str, changes: dict[str, Any]
) -> None:
    raw = raw_config(architecture, **({"sliding_window": 64} | changes))
    with pytest.raises(ModelError, match=r"sliding_window=\d+, .* is not implemented; use a model"):
        config_from_hf(raw)


def test_a_mistral_that_says_nothing_of_a_window_has_one() -> None:
    raw = raw_config("MistralForCausalLM", max_position_embeddings=32768)
    del raw["sliding_window"]
    with pytest.raises(ModelError, match="sliding_window=4096"):
        config_from_hf(raw)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "'GPT2LMHeadModel' is not supported; the supp"),
        ({"architectures": None}, "no 'architectures', a list with one of LlamaForCausalLM, Mis"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported, only 'silu'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised by 'awq' are not supported"),
        ({"quantization_config": "fp8"}, "quantised by 'fp8' are not supported"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "'linear' is not supported, only"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "only 'default' and 'llama3'"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "'dynamic' is not supported"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "'longrope' is not supported"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
            "expected one set of values",
        ),
        ({"rope_scaling": "yes"}, "rope_scaling='yes': expected one set of values"),
        ({"rope_scaling": LLAMA3 | {"factor": None}}, "config.json has no 'factor'"),
        ({"rope_scaling": LLAMA3 | {"factor": 0}}, "factor=0, expected a positive number"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}}, "must be less than high_freq_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
        ({"layer_types": ["linear_attention"]}, "layer_types has 'linear_attention'"),
        ({"head_dim": 15}, "head_dim=15 must be even"),
        ({"hidden_size": 65}, "hidden_size=65 is not a multiple of num_attention_heads=32"),
        ({"num_key_value_heads": 5}, "not a multiple of num_key_value_heads=5"),
        ({"num_attention_heads": 0}, "num_attention_heads=0, expected a positive integer"),
        ({"vocab_size": "256"}, "vocab_size='256', expected a positive integer"),
        ({"num_hidden_layers": True}, "num_hidden_layers=True, expected a positive integer"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps='1e-6', expected a positive number"),
        ({"rope_theta": float("inf")}, "rope_theta=inf, expected a positive number"),
        ({"rope_theta": 10**400}, "000, expected a positive number"),  # no float is as large
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan, expected a positive number"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings='no', expected true or false"),
        ({"eos_token_id": "</s>"}, "eos_token_id='</s>': expected a token id or a list"),
        ({"bos_token_id": 1.5}, "bos_token_id=1.5: expected a token id"),
    ],
    ids=str,
)
def test_what_would_change_the_result_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError) as caught:
        config_from_hf(raw_config(**changes))
    assert message in str(caught.value)


@pytest.mark.parametrize("key", [*SIZES, "architectures"])
def test_a_key_that_is_missing_is_named(key: str) -> None:
    raw = raw_config()
    del raw[key]
    with pytest.raises(ModelError, match=f"config.json has no '{key}'"):
        config_from_hf(raw)


# Each key with a value that it may have, so that another value is what a refusal is about.
OPTIONAL = {
    "num_key_value_heads": 4,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "rope_scaling": {},
    "rope_parameters": {},
    "tie_word_embeddings": False,
    "attention_bias": False,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "hidden_act": "silu",
    "layer_types": [],
    "use_sliding_window": False,
    "max_window_layers": 28,
    "partial_rotary_factor": 1.0,
}
WRONG = ["x", -1.5, [[]], [None], [{}], {"a": {}}]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
@pytest.mark.parametrize("key", [*SIZES, "architectures", *OPTIONAL])
def test_a_value_of_the_wrong_type_is_one_clear_line_that_names_its_key(
    key: str, wrong: object
) -> None:
    raw = raw_config("Qwen3ForCausalLM", **OPTIONAL, sliding_window=64) | {key: wrong}
    with pytest.raises(ModelError) as caught:
        config_from_hf(raw)
    message = str(caught.value)
    assert "\n" not in message
    assert key.removesuffix("s") in message
