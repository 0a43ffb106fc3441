"""Shapes of known models, for `random:<preset>`: speed needs no real weights, only real sizes.

The figures are those of the models' public `config.json` files. The `tiny` ones are made up: small
enough for a test, with everything that distinguishes the families.
"""

from __future__ import annotations

from dataclasses import replace

from minivllm.config import ModelConfig, RopeScaling

_TINY = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=512,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    max_position_embeddings=2048,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
)

_QWEN3 = ModelConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=151936,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=40960,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    tie_word_embeddings=True,
    qk_norm=True,
    eos_token_ids=(151645,),
    bos_token_id=151643,
)

PRESETS: dict[str, ModelConfig] = {
    "smollm2-135m": ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_theta=1e5,
        tie_word_embeddings=True,
        eos_token_ids=(2,),
        bos_token_id=1,
    ),
    "qwen3-0.6b": _QWEN3,
    "llama-3.2-1b": ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_theta=5e5,
        rope_scaling=RopeScaling(32.0, 1.0, 4.0, 8192),
        tie_word_embeddings=True,
        eos_token_ids=(128001, 128008, 128009),
        bos_token_id=128000,
    ),
    "qwen3-8b": replace(
        _QWEN3,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        tie_word_embeddings=False,
    ),
    "tiny": _TINY,
    "tiny-mistral": replace(_TINY, architecture="MistralForCausalLM", tie_word_embeddings=False),
    "tiny-qwen2": replace(_TINY, architecture="Qwen2ForCausalLM", attention_bias=True),
    "tiny-qwen3": replace(_TINY, architecture="Qwen3ForCausalLM", qk_norm=True),
}
