"""From a Hugging Face `config.json` to a `ModelConfig`: what is supported, and what is refused.

Only what the decoder really computes is let through. A field that would change the result and that
we do not implement (a sliding window, another activation, quantised weights) is an error here, not
a model that answers nonsense.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minivllm.config import ModelConfig, RopeScaling
from minivllm.errors import ModelError

SUPPORTED_ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)


def config_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Reads a `config.json`, in the layout of transformers 4 or 5.

    Raises:
        ModelError: The architecture or something it asks for is not supported, or a value is
            missing.
    """
    architecture = _architecture(raw)
    _refuse_unsupported(raw, architecture)
    num_heads = _required(raw, "num_attention_heads")
    qwen2 = architecture == "Qwen2ForCausalLM"
    qwen3 = architecture == "Qwen3ForCausalLM"
    rope = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    attention_bias = bool(raw.get("attention_bias", False))
    return ModelConfig(
        architecture=architecture,
        vocab_size=_required(raw, "vocab_size"),
        hidden_size=_required(raw, "hidden_size"),
        intermediate_size=_required(raw, "intermediate_size"),
        num_hidden_layers=_required(raw, "num_hidden_layers"),
        num_attention_heads=num_heads,
        num_key_value_heads=raw.get("num_key_value_heads") or num_heads,
        head_dim=raw.get("head_dim") or _required(raw, "hidden_size") // num_heads,
        max_position_embeddings=_required(raw, "max_position_embeddings"),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0),
        rope_scaling=_rope_scaling(rope),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        attention_bias=qwen2 or attention_bias,
        attention_out_bias=attention_bias and not qwen2,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        qk_norm=qwen3,
        eos_token_ids=as_token_ids(raw.get("eos_token_id")),
        bos_token_id=raw.get("bos_token_id"),
    )


def as_token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """Reads a field that holds one token id, several, or none."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _architecture(raw: Mapping[str, Any]) -> str:
    names = raw.get("architectures") or [None]
    if names[0] not in SUPPORTED_ARCHITECTURES:
        raise ModelError(
            f"architecture {names[0]!r} is not supported; the supported ones are "
            f"{', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    return str(names[0])


def _required(raw: Mapping[str, Any], key: str) -> int:
    if key not in raw:
        raise ModelError(f"config.json has no {key!r}")
    value = raw[key]
    if not isinstance(value, int):
        raise ModelError(f"config.json: {key}={value!r}, expected an integer")
    return value


def _refuse_unsupported(raw: Mapping[str, Any], architecture: str) -> None:
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelError(f"config.json: hidden_act={activation!r} is not supported, only 'silu'")
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise ModelError(
            f"config.json: weights quantised by {method!r} are not supported; use a checkpoint "
            "in bfloat16, float16 or float32"
        )
    window = raw.get("sliding_window")
    used = architecture == "MistralForCausalLM" or raw.get("use_sliding_window", False)
    used = used or "sliding_attention" in (raw.get("layer_types") or ())
    # A window as long as the longest sequence hides nothing.
    if used and window is not None and window < raw.get("max_position_embeddings", 0):
        raise ModelError(
            f"config.json: sliding-window attention (sliding_window={window}) is not implemented; "
            "use a model with full attention"
        )


def _rope_scaling(rope: Mapping[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise ModelError(
            f"config.json: rope scaling {kind!r} is not supported, only 'default' and 'llama3'"
        )
    fields = RopeScaling.__dataclass_fields__
    missing = [name for name in fields if name not in rope]
    if missing:
        raise ModelError(f"config.json: rope scaling 'llama3' lacks {', '.join(missing)}")
    original = int(rope["original_max_position_embeddings"])
    return RopeScaling(
        float(rope["factor"]),
        float(rope["low_freq_factor"]),
        float(rope["high_freq_factor"]),
        original,
    )
