"""Small GGUF files for tests, written as llama.cpp's own converter writes them.

The names of the tensors come from the `gguf` package, and the order of the query and key rows is
llama.cpp's, so that nothing here repeats what `gguf_converter` believes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import Tokenizer, models, trainers
from tokenizers import pre_tokenizers as pre
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

F32 = gguf.GGMLQuantizationType.F32
TEXT = (Path(__file__).parent.parent / "LICENSE").read_text()
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
USER_DEFINED = "<tool>"
NORMAL_TYPE, UNKNOWN_TYPE, CONTROL_TYPE, USER_TYPE, UNUSED_TYPE, BYTE_TYPE = range(1, 7)
SIZES = {
    "vocab_size": 601,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES, head_dim=32, tie_word_embeddings=True),
    "llama-bias": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True, rms_norm_eps=1e-5),
    "qwen2": Qwen2Config(**SIZES, rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
    "qwen3": Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=True),
}


@cache
def tiny_model(kind: str = "llama") -> PreTrainedModel:
    """A model with random weights that bfloat16 can hold exactly, computed with in float32."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind]).float().eval()
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.2)
        parameter.data = parameter.data.bfloat16().float()
    return model


@cache
def byte_level_vocabulary() -> tuple[list[str], list[str]]:
    """Tokens and merges learnt from a text; numbers and blanks may merge, so splitting matters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre.ByteLevel(add_prefix_space=False, use_regex=False)
    # Merges within 12 characters, so that a rule that splits differently gives other tokens.
    words = [TEXT[i : i + 12] for i in range(0, len(TEXT), 12)]
    for word in (
        "12345",
        "123",
        "45",
        "½½",
        " ½",
        "DON'T",
        " don't",
        "I'LL",
        "'sx",
        "\n\n\n    x",
        "\r\n",
    ):
        words += [word] * 300
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=SPECIAL,
        initial_alphabet=pre.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(words, trainer)
    vocab = tokenizer.get_vocab()
    pairs = [" ".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]
    return [*sorted(vocab, key=lambda token: vocab[token]), USER_DEFINED], pairs


def byte_level_fields(rule: str | None) -> dict[str, Any]:
    """The `tokenizer.ggml.*` fields of a byte-level vocabulary."""
    tokens, merges = byte_level_vocabulary()
    types = [CONTROL_TYPE if token in SPECIAL else NORMAL_TYPE for token in tokens]
    types[-1] = USER_TYPE
    fields: dict[str, Any] = {"model": "gpt2", "tokens": tokens, "merges": merges}
    fields |= {"token_type": types, "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return fields if rule is None else fields | {"pre": rule}


def write_gguf(
    path: Path,
    model: PreTrainedModel | None = None,
    quantization: gguf.GGMLQuantizationType = F32,
    tokenizer: Mapping[str, Any] | None = None,
    fields: Mapping[str, Any] | None = None,
    extra_tensors: Mapping[str, np.ndarray] | None = None,
    without: Sequence[str] = (),
) -> Path:
    """Writes a model as llama.cpp would.

    Args:
        path: Of the new file.
        model: Its weights and configuration; the tiny Llama if None.
        quantization: Of the matrices.
        tokenizer: Values by name after `tokenizer.ggml.`.
        fields: More values, by full name; they replace the usual ones.
        extra_tensors: More tensors, in float32.
        without: Fields and tensors to leave out.
    """
    model = model or tiny_model()
    values = _config_fields(model.config)
    tokenizer = byte_level_fields("smollm") if tokenizer is None else tokenizer
    values |= {f"tokenizer.ggml.{name}": value for name, value in tokenizer.items()}
    values |= fields or {}
    writer = gguf.GGUFWriter(path, model.config.model_type)
    for key, value in values.items():
        if key not in without:
            _add_field(writer, key, value)
    tensors = {name: (array, quantization) for name, array in gguf_tensors(model).items()}
    tensors |= {name: (array, F32) for name, array in (extra_tensors or {}).items()}
    for name, (array, kind) in tensors.items():
        if name in without:
            continue
        kind = kind if array.ndim == 2 else F32
        writer.add_tensor(name, gguf.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_tensors(model: PreTrainedModel) -> dict[str, np.ndarray]:
    """A model's tensors under llama.cpp's names, in llama.cpp's order of rows."""
    config = model.config
    architecture = {arch: number for number, arch in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(architecture[config.model_type], config.num_hidden_layers)
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = tensor.float().numpy()
        if config.model_type == "llama" and ".q_proj." in name:
            array = _interleaved(array, config.num_attention_heads)
        if config.model_type == "llama" and ".k_proj." in name:
            array = _interleaved(array, config.num_key_value_heads)
        tensors[names.get_name(name, try_suffixes=(".weight", ".bias"))] = array
    return tensors


def _interleaved(array: np.ndarray, num_heads: int) -> np.ndarray:
    rows = array.shape[0]
    halves = array.reshape(num_heads, 2, rows // num_heads // 2, *array.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(array.shape))


def _config_fields(config: PretrainedConfig) -> dict[str, Any]:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    values = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "rope.dimension_count": head_dim,
    }
    return {f"{config.model_type}.{name}": value for name, value in values.items()}


def _add_field(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
