"""Turns a GGUF file into a folder in Hugging Face's layout, once.

The engine reads one format. A GGUF file holds the same things under other names: a configuration,
a tokenizer as lists of tokens and merges, and tensors, mostly quantised. Tensors are dequantised
to bfloat16 one by one and written in shards, so that a large model needs little memory. llama.cpp
rotates neighbouring coordinates where Hugging Face rotates halves, and for that reorders the rows
of the query and key projections of `llama` models; here they are put back.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from tqdm import tqdm

from minivllm.config import ModelConfig
from minivllm.errors import ModelError
from minivllm.models.gguf_tokenizer import save_tokenizer
from minivllm.models.registry import config_from_hf

_SHARD_BYTES = 1 << 30

# GGUF architecture -> Hugging Face's, and its model_type. Mistral files call themselves llama.
_ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}
_TOP_LEVEL = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"


class _Reader(gguf.GGUFReader):
    """The package's reader, but the end of the file is an error: it would read on, for ever."""

    def _get(
        self, offset: int, dtype: Any, count: int = 1, override_order: Any = None
    ) -> np.ndarray:
        if offset + int(count) * np.dtype(dtype).itemsize > len(self.data):
            raise ValueError(f"it ends at byte {len(self.data)}, before its contents do")
        return super()._get(offset, dtype, count, override_order)


@dataclass(frozen=True)
class GGUFFile:
    """An opened file: its key-value pairs, and its tensors by name."""

    path: Path
    fields: Mapping[str, Any]
    tensors: Mapping[str, Any]

    @classmethod
    def open(cls, path: Path) -> GGUFFile:
        """Reads the header.

        Raises:
            ModelError: It is not a GGUF file, or is damaged.
        """
        try:
            reader = _Reader(path)
            fields = {name: field.contents() for name, field in reader.fields.items()}
        except Exception as error:  # numpy and the reader fail in many ways on damaged bytes
            raise ModelError(f"{path} is not a GGUF file, or is damaged: {error}") from error
        return cls(path, fields, {tensor.name: tensor for tensor in reader.tensors})

    def required(self, key: str) -> Any:
        """The value of a key that must be there."""
        if key not in self.fields:
            raise ModelError(f"{self.path} is damaged: it has no {key!r}")
        return self.fields[key]

    def number(self, key: str, default: float | None = None) -> float:
        """The value of a key that must be a number."""
        value = self.required(key) if default is None else self.fields.get(key, default)
        if not isinstance(value, int | float):
            raise ModelError(f"{self.path}: {key}={value!r}, expected a number")
        return float(value)

    def integer(self, key: str, default: int | None = None) -> int:
        """The value of a key that must be a positive number, one for all layers."""
        value = self.required(key) if default is None else self.fields.get(key, default)
        if not isinstance(value, int) or value < 1:
            raise ModelError(f"{self.path}: {key}={value!r}, expected a positive integer")
        return value

    def shape(self, name: str) -> list[int]:
        """A tensor's dimensions in torch's order."""
        if name not in self.tensors:
            raise ModelError(f"{self.path} is damaged: it has no tensor {name!r}")
        return [int(size) for size in reversed(self.tensors[name].shape)]

    def dequantized(self, name: str) -> torch.Tensor:
        """A tensor in float32, its dimensions in torch's order."""
        tensor = self.tensors[name]
        try:
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
        except (ValueError, IndexError, NotImplementedError) as error:
            raise ModelError(f"{self.path}: cannot read tensor {name!r}: {error}") from error
        # Copied only if it is the file itself, which must not be written to.
        return torch.from_numpy(np.require(values, np.float32, ["C", "W"]))


def convert_gguf(path: Path, folder: Path) -> None:
    """Writes config, tokenizer and bfloat16 safetensors of a GGUF file into an empty folder.

    Args:
        path: The file.
        folder: Exists, and is given up by the caller if this raises.

    Raises:
        ModelError: The file is damaged, or holds something that is not supported.
        OSError: The folder cannot be written to.
    """
    file = GGUFFile.open(path)
    # First, for the later parts of a model have neither a configuration nor a tokenizer.
    if (count := file.integer("split.count", 1)) > 1:
        raise ModelError(
            f"{path} is one of {count} parts of a model; join them first, for instance with "
            "llama.cpp's 'llama-gguf-split --merge'"
        )
    config = _hf_config(file)
    _check(file, config)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    eos_token_ids = save_tokenizer(file.fields, path, folder)
    generation = {"bos_token_id": config["bos_token_id"], "eos_token_id": eos_token_ids or None}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2))
    try:
        _write_tensors(file, config, folder)
    except SafetensorError as error:  # what safetensors makes of a full disk
        raise OSError(f"{folder}: {error}") from error


def _hf_config(file: GGUFFile) -> dict[str, Any]:
    name = file.required("general.architecture")
    if name not in tuple(_ARCHITECTURES):  # equality, for a damaged one may be a list
        raise ModelError(
            f"{file.path}: architecture {name!r} is not supported; the supported ones are "
            f"{', '.join(_ARCHITECTURES)}"
        )
    architecture, model_type = _ARCHITECTURES[name]
    hidden_size = file.integer(f"{name}.embedding_length")
    num_heads = file.integer(f"{name}.attention.head_count")
    head_dim = file.integer(f"{name}.attention.key_length", hidden_size // num_heads)
    _refuse_unsupported(file, name, head_dim)
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": (file.shape("token_embd.weight") or [0])[0],
        "hidden_size": hidden_size,
        "intermediate_size": file.integer(f"{name}.feed_forward_length"),
        "num_hidden_layers": file.integer(f"{name}.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": file.integer(f"{name}.attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": file.integer(f"{name}.context_length"),
        "rms_norm_eps": _short(file.number(f"{name}.attention.layer_norm_rms_epsilon")),
        "rope_parameters": _rope_parameters(file, name, head_dim),
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.fields.get("tokenizer.ggml.eos_token_id"),
        "dtype": "bfloat16",
    }


def _check(file: GGUFFile, raw_config: Mapping[str, Any]) -> None:
    """Finds what would be wrong with the result before hours go into making it."""
    try:
        config = config_from_hf(raw_config)
    except ModelError as error:
        raise ModelError(f"{file.path}: {error}") from error
    tokens = file.required("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or len(tokens) > config.vocab_size:
        given = f"{len(tokens)}" if isinstance(tokens, list) else "no list of"
        raise ModelError(f"{file.path} is damaged: {given} tokens, {config.vocab_size} embeddings")
    surplus = dict.fromkeys(file.tensors)
    for name, shape in _expected_shapes(config):
        if file.shape(name) != shape:
            raise ModelError(
                f"{file.path} is damaged: tensor {name!r} has shape {file.shape(name)}, but the "
                f"file's configuration asks for {shape}"
            )
        del surplus[name]
    surplus.pop(_ROPE_FACTORS, None)
    if surplus:
        raise ModelError(
            f"{file.path}: tensor {next(iter(surplus))!r} has no place in a decoder of the Llama "
            "family with the file's configuration"
        )


def _expected_shapes(config: ModelConfig) -> Iterator[tuple[str, list[int]]]:
    """The tensors that a model of this configuration has, their dimensions in torch's order."""
    hidden, inner = config.hidden_size, config.intermediate_size
    matrices = {
        "attn_q": ([config.q_size, hidden], config.attention_bias),
        "attn_k": ([config.kv_size, hidden], config.attention_bias),
        "attn_v": ([config.kv_size, hidden], config.attention_bias),
        "attn_output": ([hidden, config.q_size], config.attention_out_bias),
        "ffn_gate": ([inner, hidden], config.mlp_bias),
        "ffn_up": ([inner, hidden], config.mlp_bias),
        "ffn_down": ([hidden, inner], config.mlp_bias),
    }
    norms = {"attn_norm": [hidden], "ffn_norm": [hidden]}
    if config.qk_norm:
        norms |= {"attn_q_norm": [config.head_dim], "attn_k_norm": [config.head_dim]}
    yield "token_embd.weight", [config.vocab_size, hidden]
    yield "output_norm.weight", [hidden]
    if not config.tie_word_embeddings:
        yield "output.weight", [config.vocab_size, hidden]
    for i in range(config.num_hidden_layers):
        for part, shape in norms.items():
            yield f"blk.{i}.{part}.weight", shape
        for part, (shape, has_bias) in matrices.items():
            yield f"blk.{i}.{part}.weight", shape
            if has_bias:
                yield f"blk.{i}.{part}.bias", shape[:1]


def _short(value: float) -> float:
    """The shortest decimal that is the same float32: 1e-05 rather than 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _rope_parameters(file: GGUFFile, name: str, head_dim: int) -> dict[str, Any]:
    theta = file.number(f"{name}.rope.freq_base", 10000.0)
    if _ROPE_FACTORS not in file.tensors:
        return {"rope_type": "default", "rope_theta": theta}
    return _llama3_parameters(file, theta, head_dim)


def _refuse_unsupported(file: GGUFFile, name: str, head_dim: int) -> None:
    plain = {
        "rope.scaling.type": "none",
        "rope.scaling.factor": 1.0,  # of a linear scaling, if there is no type
        "rope.scale_linear": 1.0,  # its name in old files
        "rope.dimension_count": head_dim,
        "attention.sliding_window": 0,
        "expert_count": 0,
    }
    for key, expected in plain.items():
        value = file.fields.get(f"{name}.{key}", expected)
        if value != expected:
            raise ModelError(
                f"{file.path}: {name}.{key}={value!r} is not supported, only {expected!r}"
            )


def _llama3_parameters(file: GGUFFile, theta: float, head_dim: int) -> dict[str, Any]:
    """GGUF holds Llama-3's scaling as one factor per frequency; find the numbers they come from.

    Only the factor differs between the published models; that the others are the usual ones is
    checked by computing all factors again.
    """
    if file.shape(_ROPE_FACTORS) != [head_dim // 2]:
        raise ModelError(f"{file.path}: {_ROPE_FACTORS} has not one factor for each frequency")
    stored = file.dequantized(_ROPE_FACTORS).double()
    parameters: dict[str, Any] = {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": float(stored.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    wavelengths = 2 * math.pi * theta**exponents
    keep = ((8192 / wavelengths - 1.0) / 3.0).clamp(0.0, 1.0)
    expected = 1.0 / (keep + (1.0 - keep) / parameters["factor"])
    if not torch.allclose(stored, expected, rtol=1e-3):
        raise ModelError(f"{file.path}: its rope factors are not those of Llama 3")
    return parameters


def _write_tensors(file: GGUFFile, config: Mapping[str, Any], folder: Path) -> None:
    """Writes shards as they fill up, then the index that says which tensor is where."""
    shards: list[list[str]] = []
    pending: dict[str, torch.Tensor] = {}
    for name, tensor in _hf_tensors(file, config):
        pending[name] = tensor
        if sum(t.nbytes for t in pending.values()) >= _SHARD_BYTES:
            _write_shard(pending, folder, shards)
            pending = {}
    if pending:
        _write_shard(pending, folder, shards)
    weight_map = {name: _shard_name(i) for i, names in enumerate(shards) for name in names}
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def _write_shard(tensors: dict[str, torch.Tensor], folder: Path, shards: list[list[str]]) -> None:
    save_file(tensors, folder / _shard_name(len(shards)), metadata={"format": "pt"})
    shards.append(list(tensors))


def _shard_name(index: int) -> str:
    return f"model-{index + 1:05d}.safetensors"


def _hf_tensors(file: GGUFFile, config: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    names = [name for name in file.tensors if name != _ROPE_FACTORS]
    permuted = file.fields["general.architecture"] == "llama"
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for name in tqdm(names, desc=f"Converting {file.path.name}", unit="tensor", disable=None):
        tensor = file.dequantized(name)
        part = name.split(".")[2] if name.startswith("blk.") else ""
        if permuted and part in heads:
            tensor = _halves_rotated(tensor, heads[part])
        yield _hf_name(name), tensor.to(torch.bfloat16).contiguous()


def _hf_name(name: str) -> str:
    parts = name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{_IN_LAYER[parts[2]]}.{parts[3]}"
    return f"{_TOP_LEVEL[parts[0]]}.{parts[1]}"


def _halves_rotated(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Reorders each head's rows from (pair, half) to (half, pair)."""
    head_dim = tensor.shape[0] // num_heads
    pairs = tensor.view(num_heads, head_dim // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)
