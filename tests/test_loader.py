"""Loading: a checkpoint's tensors land where they belong, and one that does not fit is refused."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from minivllm.attention.torch_backend import TorchAttentionBackend
from minivllm.config import ModelConfig
from minivllm.errors import ModelError
from minivllm.models.decoder import DecoderForCausalLM
from minivllm.models.loader import load_weights
from minivllm.models.presets import PRESETS
from minivllm.models.source import ModelSource, find_model
from minivllm.models.tokenizer import eos_token_ids, load_tokenizer

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES, head_dim=32, tie_word_embeddings=True),
    "llama-bias": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "mistral": MistralConfig(**SIZES, sliding_window=None),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=32),
}
KEY = "model.layers.1.self_attn.k_proj.weight"


@dataclass
class Targets:
    """The least that the loader needs of a model."""

    targets: dict[str, torch.Tensor]

    def weight_targets(self) -> dict[str, torch.Tensor]:
        return self.targets


def reference_model(kind: str = "llama") -> PreTrainedModel:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind]).float()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    return model


def empty_decoder(config: ModelConfig, dtype: torch.dtype = torch.float32) -> DecoderForCausalLM:
    heads = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    backend = TorchAttentionBackend(*heads, block_size=16, scale=1.0)
    decoder = DecoderForCausalLM(config, backend, max_model_len=8).to(dtype)
    for parameter in decoder.parameters():
        parameter.data.fill_(torch.nan)
    return decoder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    reference_model().save_pretrained(tmp_path)
    return tmp_path


def load(folder: Path, dtype: torch.dtype = torch.float32) -> DecoderForCausalLM:
    source = find_model(str(folder))
    decoder = empty_decoder(source.config, dtype)
    load_weights(decoder, source)
    return decoder


def change(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replaces, adds or (None) removes tensors of a folder's checkpoint."""
    tensors: dict[str, Any] = load_file(folder / "model.safetensors") | changes
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def check_equal(decoder: DecoderForCausalLM, reference: PreTrainedModel) -> None:
    """Compares by the structure of the modules, not by the names that the loader goes by."""
    assert torch.equal(decoder.embed_tokens, reference.model.embed_tokens.weight)
    assert torch.equal(decoder.lm_head, reference.lm_head.weight)
    assert torch.equal(decoder.norm.weight, reference.model.norm.weight)
    for ours, theirs in zip(decoder.layers, reference.model.layers, strict=True):
        attention, mlp = theirs.self_attn, theirs.mlp
        merged = [
            (ours.self_attn.qkv_proj, [attention.q_proj, attention.k_proj, attention.v_proj]),
            (ours.self_attn.o_proj, [attention.o_proj]),
            (ours.mlp.gate_up_proj, [mlp.gate_proj, mlp.up_proj]),
            (ours.mlp.down_proj, [mlp.down_proj]),
        ]
        for linear, parts in merged:
            assert torch.equal(linear.weight, torch.cat([part.weight for part in parts]))
            biases = [part.bias for part in parts if part.bias is not None]
            assert (linear.bias is None) == (not biases)
            assert not biases or torch.equal(linear.bias, torch.cat(biases))
        for name in ("input_layernorm", "post_attention_layernorm"):
            assert torch.equal(getattr(ours, name).weight, getattr(theirs, name).weight)
        if hasattr(attention, "q_norm"):
            assert torch.equal(ours.self_attn.q_norm.weight, attention.q_norm.weight)
            assert torch.equal(ours.self_attn.k_norm.weight, attention.k_norm.weight)


@pytest.mark.parametrize("shard_size", ["1GB", "30KB"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_every_tensor_lands_in_its_place(kind: str, shard_size: str, tmp_path: Path) -> None:
    reference = reference_model(kind)
    reference.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 2) == (shard_size == "30KB")
    check_equal(load(tmp_path), reference)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16, torch.float16])
def test_tensors_are_converted_to_the_dtype_of_the_model(
    stored: torch.dtype, wanted: torch.dtype, tmp_path: Path
) -> None:
    reference = reference_model().to(stored)
    reference.save_pretrained(tmp_path)
    check_equal(load(tmp_path, wanted), reference.to(wanted))


def test_one_file_is_preferred_to_a_stale_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone"}}')
    check_equal(load(folder), reference_model())


def test_missing_tensors_are_named_and_counted(folder: Path) -> None:
    names = [f"model.layers.{i}.mlp.{part}_proj.weight" for i in (0, 1) for part in ("up", "down")]
    change(folder, **dict.fromkeys(names))
    with pytest.raises(ModelError, match=r"lacks model\.layers\.0\.mlp\.down_.* and 1 more"):
        load(folder)


def test_surplus_tensors_are_named(folder: Path) -> None:
    change(folder, **{"model.layers.0.self_attn.q_proj.lora_A": torch.ones(2)})
    with pytest.raises(ModelError, match=r"no place for: model\.layers\.0\.self_attn\.q_proj\.lor"):
        load(folder)


def test_the_rotary_frequencies_of_old_checkpoints_are_ignored(folder: Path) -> None:
    change(folder, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)})
    check_equal(load(folder), reference_model())


def test_a_tensor_of_another_shape_is_named_with_both_shapes(folder: Path) -> None:
    change(folder, **{KEY: torch.ones(32, 64)})
    with pytest.raises(ModelError, match=r"k_proj\.weight' has shape \[32, 64\].*\[64, 64\]"):
        load(folder)


def test_a_transposed_matrix_of_equal_size_is_not_taken(folder: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    change(folder, **{name: torch.ones(64, 96)})
    with pytest.raises(ModelError, match=r"has shape \[64, 96\].*\[96, 64\]"):
        load(folder)


def test_quantised_numbers_are_refused(folder: Path) -> None:
    change(folder, **{KEY: torch.ones(64, 64, dtype=torch.int8)})
    with pytest.raises(ModelError, match=r"k_proj\.weight' is torch\.int8, which looks quantised"):
        load(folder)


def test_a_tied_output_projection_may_be_stored_again(folder: Path) -> None:
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    change(folder, **{"lm_head.weight": embedding.clone()})
    check_equal(load(folder), reference_model())


@pytest.mark.parametrize("rows", [95, 96])
def test_a_tied_output_projection_must_be_the_embedding(folder: Path, rows: int) -> None:
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    other = embedding[:rows].clone()
    other[3, 3] += 1
    change(folder, **{"lm_head.weight": other})
    with pytest.raises(ModelError, match=r"'lm_head\.weight' differs.*set tie_word_embeddings to"):
        load(folder)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    reference_model().save_pretrained(tmp_path, max_shard_size="30KB")
    files = sorted(tmp_path.glob("*.safetensors"))
    save_file(load_file(files[0]) | load_file(files[1]), files[1])
    with pytest.raises(ModelError, match="is in another file of the checkpoint too"):
        load(tmp_path)


# Damage


def test_a_folder_without_weights_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"model\.safetensors does not exist; weights are read"):
        load(folder)


@pytest.mark.parametrize("content", [b"", b"version https://git-lfs.github.com", bytes(64)])
def test_a_file_that_is_no_safetensors_file_is_refused(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=r"model\.safetensors is damaged"):
        load(folder)


@settings(max_examples=25, deadline=None)
@given(fraction=st.floats(0, 1, exclude_max=True))
def test_a_file_that_ends_early_is_refused(tmp_path_factory, fraction: float) -> None:
    folder = tmp_path_factory.mktemp("cut")
    reference_model().save_pretrained(folder)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[: int(fraction * path.stat().st_size)])
    with pytest.raises(ModelError, match=r"model\.safetensors is damaged"):
        load(folder)


DAMAGED = ["", "[]", "{}", "[" * 100_000]
DAMAGED += [f'{{"weight_map": {value}}}' for value in ("3", '{"a": 3}', '{"a": [1]}')]


@pytest.mark.parametrize("content", DAMAGED, ids=lambda content: content[:20])
def test_a_damaged_index_is_refused(tmp_path: Path, content: str) -> None:
    reference_model().save_pretrained(tmp_path, max_shard_size="30KB")
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ModelError, match=r"index\.json is damaged"):
        load(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    reference_model().save_pretrained(tmp_path, max_shard_size="30KB")
    gone = sorted(tmp_path.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(ModelError, match=f"{gone.name} does not exist"):
        load(tmp_path)


@pytest.fixture
def split_folder(tmp_path: Path) -> tuple[Path, Path]:
    """A checkpoint in several files, the first of which lies outside; and that file."""
    folder = tmp_path / "model"
    reference_model().save_pretrained(folder, max_shard_size="30KB")
    first = sorted(folder.glob("*.safetensors"))[0]
    return folder, first.rename(tmp_path / first.name)


@pytest.mark.parametrize("absolute", [False, True])
def test_an_index_does_not_lead_out_of_its_folder(split_folder, absolute: bool) -> None:
    folder, outside = split_folder
    index = folder / "model.safetensors.index.json"
    name = str(outside) if absolute else f"../{outside.name}"
    index.write_text(index.read_text().replace(outside.name, name))
    with pytest.raises(ModelError, match=f"'{name}' is not the name of a file in this folder"):
        load(folder)


def test_a_file_may_be_a_link_as_in_the_cache_of_the_hub(split_folder) -> None:
    folder, outside = split_folder
    (folder / outside.name).symlink_to(outside)
    check_equal(load(folder), reference_model())


def test_a_file_name_that_is_too_long_is_refused(split_folder) -> None:
    folder, _ = split_folder
    index = {"weight_map": {"model.embed_tokens.weight": "x" * 300}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="x does not exist; weights are read from safetensors"):
        load(folder)


# Random weights


def random_targets(preset: str, seed: int) -> dict[str, torch.Tensor]:
    source = ModelSource(f"random:{preset}", PRESETS[preset], None)
    decoder = empty_decoder(source.config)
    load_weights(decoder, source, seed)
    return decoder.weight_targets()


def test_random_weights_follow_from_the_seed() -> None:
    first, again, other = (random_targets("tiny-qwen3", seed) for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    matrices = [name for name in first if first[name].ndim == 2]
    assert not any(torch.equal(first[name], other[name]) for name in matrices)
    assert len({first[name].flatten()[0].item() for name in matrices}) == len(matrices)


def test_random_norms_are_one_and_biases_zero() -> None:
    targets = random_targets("tiny-qwen2", 0) | random_targets("tiny-qwen3", 0)
    norms = [tensor for name, tensor in targets.items() if name.endswith("norm.weight")]
    biases = [tensor for name, tensor in targets.items() if name.endswith(".bias")]
    assert len(norms) == 3 * 4 + 1
    assert all((tensor == 1).all() for tensor in norms)
    assert len(biases) == 3 * 3
    assert all((tensor == 0).all() for tensor in biases)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_random_weights_keep_activations_in_range_through_36_layers(dtype: torch.dtype) -> None:
    config = Qwen3Config(**(SIZES | {"num_hidden_layers": 36}), head_dim=32)
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    targets = {name: parameter.data for name, parameter in model.named_parameters()}
    load_weights(Targets(targets), ModelSource("random:x", PRESETS["tiny"], None))
    output = model(torch.arange(64)[None], output_hidden_states=True)
    assert all(hidden.float().abs().max() < 1000 for hidden in output.hidden_states)
    assert 0.5 < output.logits.float().std() < 2


# Tokenizers, and the tokens that end a sequence


def save_tokenizer(folder: Path) -> None:
    vocab = {chr(97 + i): i for i in range(26)}
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocab, []))).save_pretrained(
        folder
    )


def test_a_folder_gives_its_tokenizer(folder: Path) -> None:
    save_tokenizer(folder)
    tokenizer = load_tokenizer(find_model(str(folder)))
    assert tokenizer is not None
    assert tokenizer("cab")["input_ids"] == [2, 0, 1]


def test_random_weights_and_bare_folders_have_no_tokenizer(folder: Path) -> None:
    assert load_tokenizer(find_model("random:tiny")) is None
    assert load_tokenizer(find_model(str(folder))) is None


@pytest.mark.parametrize("content", ["", "{", '{"model": {"type": "BPE", "vocab": 3}}', "[]"])
def test_a_damaged_tokenizer_is_refused_in_one_line(folder: Path, content: str) -> None:
    save_tokenizer(folder)
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match="cannot load the tokenizer") as caught:
        load_tokenizer(find_model(str(folder)))
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_tokenizers_own_code_is_not_run_and_nobody_is_asked_to(folder, monkeypatch) -> None:
    save_tokenizer(folder)
    path = folder / "tokenizer_config.json"
    own = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]}}
    path.write_text(json.dumps(json.loads(path.read_text()) | own))
    (folder / "own.py").write_text("raise SystemExit('run')")
    monkeypatch.setattr("builtins.input", lambda *_args: pytest.fail("asked"))
    with pytest.raises(ModelError, match=r"cannot load the tokenizer.*contains custom code"):
        load_tokenizer(find_model(str(folder)))


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        (None, (2,)),
        ({}, (2,)),
        ({"eos_token_id": 7}, (2, 7)),
        ({"eos_token_id": [7, 2, 9]}, (2, 7, 9)),
        ({"eos_token_id": None}, (2,)),
    ],
)
def test_a_sequence_ends_where_either_config_says(
    folder: Path, generation: dict | None, expected: tuple[int, ...]
) -> None:
    (folder / "generation_config.json").unlink()
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    assert eos_token_ids(find_model(str(folder))) == expected


def test_random_weights_end_where_the_preset_says() -> None:
    assert eos_token_ids(find_model("random:llama-3.2-1b")) == (128001, 128008, 128009)
    assert eos_token_ids(find_model("random:tiny")) == ()


@pytest.mark.parametrize("content", ["{", "3", '{"eos_token_id": "x"}', "[" * 100_000])
def test_a_damaged_generation_config_is_refused(folder: Path, content: str) -> None:
    (folder / "generation_config.json").write_text(content)
    with pytest.raises(ModelError, match=r"generation_config\.json(: eos_token_id=| is damaged)"):
        eos_token_ids(find_model(str(folder)))
