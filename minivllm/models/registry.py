"""From a Hugging Face `config.json` to a `ModelConfig`: what is supported, and what is refused.

Only what the decoder really computes is let through. A field that would change the result and that
we do not implement (a sliding window, another activation, quantised weights) is an error here, not
a model that answers nonsense. A key that is missing means what transformers takes it to mean, which
differs from one architecture to the next.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from minivllm.config import ModelConfig, RopeScaling
from minivllm.errors import ModelError


@dataclass(frozen=True)
class _Family:
    """How an architecture differs, and its defaults for keys that are missing.

    Attributes:
        num_key_value_heads: Default; None is one for each query head.
        head_dim: Default; None divides the hidden size among the heads.
        qkv_bias: Whether there is one; None asks `attention_bias`, and then for the output too.
        qk_norm: Queries and keys are normed.
        bos_token_id: Default.
        eos_token_id: Default.
    """

    num_key_value_heads: int | None = None
    head_dim: int | None = None
    qkv_bias: bool | None = None
    qk_norm: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | None = None


_LLAMA, _MISTRAL = "LlamaForCausalLM", "MistralForCausalLM"
_FAMILIES = {
    _LLAMA: _Family(bos_token_id=1, eos_token_id=2),
    _MISTRAL: _Family(num_key_value_heads=8, qkv_bias=False, bos_token_id=1, eos_token_id=2),
    "Qwen2ForCausalLM": _Family(num_key_value_heads=32, qkv_bias=True),
    "Qwen3ForCausalLM": _Family(num_key_value_heads=32, head_dim=128, qk_norm=True),
}
SUPPORTED_ARCHITECTURES = tuple(_FAMILIES)


def config_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Reads a `config.json`, in the layout of transformers 4 or 5.

    Raises:
        ModelError: The architecture or something it asks for is not supported, or a value is
            missing or impossible.
    """
    architecture = _architecture(raw)
    family = _FAMILIES[architecture]
    _refuse_unsupported(raw, architecture)
    rope = _rope_parameters(raw)
    attention_bias = _flag(raw, "attention_bias")
    num_heads = _integer(raw, "num_attention_heads")
    return ModelConfig(
        architecture=architecture,
        vocab_size=_integer(raw, "vocab_size"),
        hidden_size=_integer(raw, "hidden_size"),
        intermediate_size=_integer(raw, "intermediate_size"),
        num_hidden_layers=_integer(raw, "num_hidden_layers"),
        num_attention_heads=num_heads,
        num_key_value_heads=_num_key_value_heads(raw, family, num_heads),
        head_dim=_head_dim(raw, family, num_heads),
        max_position_embeddings=_integer(raw, "max_position_embeddings"),
        rms_norm_eps=_positive(raw, "rms_norm_eps", 1e-6),
        rope_theta=_positive(rope, "rope_theta", 10000.0),
        rope_scaling=_rope_scaling(rope),
        tie_word_embeddings=_flag(raw, "tie_word_embeddings"),
        attention_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        attention_out_bias=attention_bias if family.qkv_bias is None else False,
        mlp_bias=architecture == _LLAMA and _flag(raw, "mlp_bias"),
        qk_norm=family.qk_norm,
        eos_token_ids=as_token_ids("eos_token_id", raw.get("eos_token_id", family.eos_token_id)),
        bos_token_id=_bos_token_id(raw, family),
    )


def as_token_ids(key: str, value: object) -> tuple[int, ...]:
    """Reads a field that holds one token id, several, or none.

    Raises:
        ModelError: It holds something else.
    """
    values = value if isinstance(value, list | tuple) else () if value is None else (value,)
    if not all(isinstance(item, int) and not isinstance(item, bool) for item in values):
        raise ModelError(f"{key}={value!r}: expected a token id or a list of token ids")
    return tuple(values)


def _architecture(raw: Mapping[str, Any]) -> str:
    supported = ", ".join(SUPPORTED_ARCHITECTURES)
    names = raw.get("architectures")
    if not isinstance(names, list) or not names:
        raise ModelError(
            f"config.json has no 'architectures', a list with one of {supported} "
            f"(it says {names!r})"
        )
    if names[0] not in SUPPORTED_ARCHITECTURES:
        raise ModelError(
            f"architecture {names[0]!r} is not supported; the supported ones are {supported}"
        )
    return str(names[0])


def _num_key_value_heads(raw: Mapping[str, Any], family: _Family, num_heads: int) -> int:
    if "num_key_value_heads" not in raw and family.num_key_value_heads is not None:
        return family.num_key_value_heads
    if raw.get("num_key_value_heads") is None:
        return num_heads
    return _integer(raw, "num_key_value_heads")


def _head_dim(raw: Mapping[str, Any], family: _Family, num_heads: int) -> int:
    if raw.get("head_dim") is not None:
        return _integer(raw, "head_dim")
    if family.head_dim is not None:
        return family.head_dim
    hidden_size = _integer(raw, "hidden_size")
    if hidden_size % num_heads:
        raise ModelError(
            f"config.json: hidden_size={hidden_size} is not a multiple of "
            f"num_attention_heads={num_heads}, and there is no head_dim"
        )
    return hidden_size // num_heads


def _bos_token_id(raw: Mapping[str, Any], family: _Family) -> int | None:
    ids = as_token_ids("bos_token_id", raw.get("bos_token_id", family.bos_token_id))
    return ids[0] if ids else None


def _refuse_unsupported(raw: Mapping[str, Any], architecture: str) -> None:
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelError(f"config.json: hidden_act={activation!r} is not supported, only 'silu'")
    if quantization := raw.get("quantization_config"):
        known = isinstance(quantization, Mapping)
        method = quantization.get("quant_method", "unknown") if known else quantization
        raise ModelError(
            f"config.json: weights quantised by {method!r} are not supported; use a checkpoint "
            "in bfloat16, float16 or float32"
        )
    window = _sliding_window(raw, architecture)
    max_position = _integer(raw, "max_position_embeddings")
    # A window as long as the longest sequence hides nothing.
    if window is not None and window < max_position:
        raise ModelError(
            f"config.json: attention in a sliding window (sliding_window={window}, "
            f"max_position_embeddings={max_position}) is not implemented; use a model with full "
            f"attention, or lower max_position_embeddings to {window}, which makes it full"
        )


def _sliding_window(raw: Mapping[str, Any], architecture: str) -> int | None:
    """The window of the layers that have one, in tokens; None if none has."""
    kinds = _layer_types(raw)
    if architecture == _MISTRAL:
        slides = True
    elif kinds or architecture == _LLAMA:
        slides = "sliding_attention" in kinds
    else:
        # The layers after these slide.
        full_layers = _integer({"max_window_layers": 28, **raw}, "max_window_layers", at_least=0)
        num_layers = _integer(raw, "num_hidden_layers")
        slides = _flag(raw, "use_sliding_window") and full_layers < num_layers
    if not slides or raw.get("sliding_window", 4096) is None:
        return None
    return _integer({"sliding_window": 4096, **raw}, "sliding_window")


def _layer_types(raw: Mapping[str, Any]) -> list[str]:
    kinds = raw.get("layer_types") or []
    known = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list):
        raise ModelError(f"config.json: layer_types={kinds!r}, expected a list")
    if unknown := [kind for kind in kinds if kind not in known]:
        raise ModelError(
            f"config.json: layer_types has {unknown[0]!r}, expected {' or '.join(known)}"
        )
    return kinds


def _rope_parameters(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Both layouts in one: `rope_theta` and `rope_scaling`, or `rope_parameters` with all of it."""
    rope: dict[str, Any] = {}
    if raw.get("rope_theta") is not None:
        rope["rope_theta"] = raw["rope_theta"]
    for key in ("rope_scaling", "rope_parameters"):
        part = raw.get(key) or {}
        if not isinstance(part, Mapping) or any(isinstance(v, Mapping) for v in part.values()):
            raise ModelError(f"config.json: {key}={part!r}: expected one set of values, not nested")
        rope |= {name: value for name, value in part.items() if value is not None}
    fraction = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if fraction not in (None, 1, 1.0):
        raise ModelError(
            f"config.json: partial_rotary_factor={fraction!r} is not supported, only whole heads "
            "are rotated"
        )
    return rope


def _rope_scaling(rope: Mapping[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise ModelError(
            f"config.json: rope scaling {kind!r} is not supported, only 'default' and 'llama3'"
        )
    low, high = (_positive(rope, f"{name}_freq_factor") for name in ("low", "high"))
    if low >= high:
        raise ModelError(
            f"config.json: low_freq_factor={low} must be less than high_freq_factor={high}"
        )
    return RopeScaling(
        factor=_positive(rope, "factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=_integer(rope, "original_max_position_embeddings"),
    )


def _integer(raw: Mapping[str, Any], key: str, at_least: int = 1) -> int:
    value = _required(raw, key)
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        kind = "a positive integer" if at_least == 1 else f"an integer from {at_least} up"
        raise ModelError(f"config.json: {key}={value!r}, expected {kind}")
    return value


def _positive(raw: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = _required(raw, key) if default is None else raw.get(key, default)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    # JSON's integers have no upper limit, and one beyond the largest float cannot become one.
    if not number or not 0 < value <= sys.float_info.max:
        raise ModelError(f"config.json: {key}={value!r}, expected a positive number")
    return float(value)


def _flag(raw: Mapping[str, Any], key: str) -> bool:
    value = raw.get(key, False)
    if value is not None and not isinstance(value, bool):
        raise ModelError(f"config.json: {key}={value!r}, expected true or false")
    return bool(value)


def _required(raw: Mapping[str, Any], key: str) -> Any:
    if key not in raw:
        raise ModelError(f"config.json has no {key!r}")
    return raw[key]
