"""GGUF conversion: against the model a file was written from, and transformers' own reader."""

from __future__ import annotations

import json
import math
import re
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tokenizers import Regex, Tokenizer, models
from tokenizers import pre_tokenizers as pre
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedTokenizerBase,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from minivllm.errors import ModelError
from minivllm.models.gguf_converter import convert_gguf
from tests.gguf_files import (
    BYTE_TYPE,
    CHAT_TEMPLATE,
    CONFIGS,
    CONTROL_TYPE,
    NORMAL_TYPE,
    SPECIAL,
    TEXT,
    UNKNOWN_TYPE,
    USER_DEFINED,
    byte_level_fields,
    byte_level_vocabulary,
    tiny_model,
    write_gguf,
)

TYPES = gguf.GGMLQuantizationType
STRINGS = [
    "Hello world",
    "  two  spaces \t tab\n\n\nlines\r\n",
    "1234567890 3.14 in 2024",
    "I'm DON'T we've I'LL 'sx",
    "naïve café e\u0301 日本語 한국어",
    "👩‍👩‍👧 🎉\u200b\u0000",
    "def f(x):\n    return x**2  # ok",
    "a" * 100,
    "",
    " ",
    TEXT[:2000],
]
# Not in the ASCII range, but digits: transformers' reader of GGUF files does not know the rule.
STRANGE_DIGITS = ["½ Ⅳ ²³ १२३", "x½½", "a ½"]


def convert(file: Path, folder: Path) -> Path:
    folder.mkdir()
    convert_gguf(file, folder)
    return folder


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
    return tensors


# Weights and configuration


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_converted_model_is_the_model_the_file_was_written_from(kind: str, tmp_path) -> None:
    original = tiny_model(kind)
    folder = convert(write_gguf(tmp_path / "m.gguf", original), tmp_path / "m")
    tensors = tensors_of(folder)
    assert all(tensor.dtype == torch.bfloat16 for tensor in tensors.values())
    for name, expected in original.state_dict().items():
        if not (name == "lm_head.weight" and original.config.tie_word_embeddings):
            assert torch.equal(tensors.pop(name).float(), expected), name
    assert not tensors
    converted = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.arange(48).reshape(2, 24) * 7
    torch.testing.assert_close(converted(ids).logits, original(ids).logits, atol=1e-4, rtol=1e-5)
    for name in ("eos_token_id", "rms_norm_eps", "rope_parameters"):
        assert getattr(converted.config, name) == getattr(original.config, name)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize("quantization", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_quantised_weights_are_those_that_transformers_reads(
    kind: str, quantization: str, tmp_path
) -> None:
    file = write_gguf(tmp_path / "m.gguf", tiny_model(kind), TYPES[quantization])
    tensors = tensors_of(convert(file, tmp_path / "m"))
    reference = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="m.gguf", dtype=torch.float32
    ).state_dict()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, reference[name].bfloat16()), name


def test_weights_are_written_in_several_files_if_they_are_large(tmp_path, monkeypatch) -> None:
    file = write_gguf(tmp_path / "m.gguf")
    whole = tensors_of(convert(file, tmp_path / "whole"))
    monkeypatch.setattr("minivllm.models.gguf_converter._SHARD_BYTES", 30_000)
    folder = convert(file, tmp_path / "parts")
    assert len(list(folder.glob("*.safetensors"))) > 2
    parts = tensors_of(folder)
    assert parts.keys() == whole.keys()
    assert all(torch.equal(parts[name], whole[name]) for name in whole)
    AutoModelForCausalLM.from_pretrained(folder)


def test_fewer_tokens_than_embeddings_are_padding(tmp_path) -> None:
    tokens = byte_level_fields("smollm")
    shorter = tokens | {name: tokens[name][:-1] for name in ("tokens", "token_type")}
    folder = convert(write_gguf(tmp_path / "m.gguf", tokenizer=shorter), tmp_path / "m")
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == 601
    assert len(AutoTokenizer.from_pretrained(folder)) == 600


def rope_factors(config: LlamaConfig) -> np.ndarray:
    """llama.cpp's tensor: by how much each of transformers' frequencies has become lower."""
    plain = LlamaConfig(head_dim=config.head_dim, rope_parameters={"rope_theta": 5e5})
    rotary = [LlamaRotaryEmbedding(c).inv_freq.double() for c in (plain, config)]
    return (rotary[0] / rotary[1]).float().numpy()


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_the_rope_scaling_of_llama_3_is_found_again(factor: float, tmp_path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": factor, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    factors = rope_factors(LlamaConfig(head_dim=32, rope_parameters=rope))
    file = write_gguf(
        tmp_path / "m.gguf",
        fields={"llama.rope.freq_base": 5e5},
        extra_tensors={"rope_freqs.weight": factors},
    )
    config = AutoConfig.from_pretrained(convert(file, tmp_path / "m"))
    assert config.rope_parameters == rope


def test_rope_factors_of_another_kind_are_refused(tmp_path) -> None:
    factors = {"rope_freqs.weight": np.linspace(1, 8, 16, dtype=np.float32)}
    file = write_gguf(tmp_path / "m.gguf", extra_tensors=factors)
    with pytest.raises(ModelError, match="rope factors are not those of Llama 3"):
        convert(file, tmp_path / "m")


# Tokenizers


def read_tokenizer(tmp_path: Path, **options) -> PreTrainedTokenizerBase:
    folder = convert(write_gguf(tmp_path / "m.gguf", **options), tmp_path / "m")
    return AutoTokenizer.from_pretrained(folder)


def spelled_rule(rule: str) -> Tokenizer:
    """The rule as llama.cpp has it, one regular expression after another."""
    words = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # GPT-2's
    patterns = [r"\p{N}", words] if rule == "smollm" else [words]
    tokens, merges = byte_level_vocabulary()
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=[tuple(merge.split(" ")) for merge in merges],
        )
    )
    splits = [pre.Split(Regex(pattern), "isolated") for pattern in patterns]
    tokenizer.pre_tokenizer = pre.Sequence([*splits, pre.ByteLevel(False, use_regex=False)])
    return tokenizer


@pytest.mark.parametrize("rule", ["smollm", "gpt-2", "default", None])
def test_text_is_split_as_llama_cpp_splits_it(rule: str | None, tmp_path) -> None:
    tokenizer = read_tokenizer(tmp_path, tokenizer=byte_level_fields(rule))
    reference = spelled_rule(rule or "default")
    for text in STRINGS + STRANGE_DIGITS:
        assert tokenizer(text)["input_ids"] == reference.encode(text).ids, text


@pytest.mark.parametrize("rule", ["llama-bpe", "qwen2"])
def test_text_is_split_as_transformers_splits_it(rule: str, tmp_path) -> None:
    tokenizer = read_tokenizer(
        tmp_path, tokenizer=byte_level_fields(rule) | {"add_bos_token": False}
    )
    reference = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    for text in STRINGS + STRANGE_DIGITS:
        composed = text.replace("e\u0301", "é") if rule == "qwen2" else text
        assert tokenizer(text)["input_ids"] == reference(composed)["input_ids"], text


def test_the_rules_differ_where_they_should(tmp_path) -> None:
    split = {}
    for rule in ("smollm", "gpt-2", "llama-bpe"):
        (tmp_path / rule).mkdir()
        fields = byte_level_fields(rule) | {"add_bos_token": False}
        split[rule] = read_tokenizer(tmp_path / rule, tokenizer=fields).tokenize("12345")
    assert split["smollm"] == ["1", "2", "3", "4", "5"]
    assert split["gpt-2"] == ["12345"]
    assert split["llama-bpe"] == ["123", "45"]


@pytest.mark.parametrize("rule", ["smollm", "gpt-2", "llama-bpe", "qwen2"])
def test_decoding_gives_the_text_back(rule: str, tmp_path) -> None:
    tokenizer = read_tokenizer(tmp_path, tokenizer=byte_level_fields(rule))
    for text in STRINGS + STRANGE_DIGITS:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        expected = text.replace("e\u0301", "é") if rule == "qwen2" else text
        assert tokenizer.decode(ids) == expected


def test_control_tokens_are_whole_and_can_be_skipped(tmp_path) -> None:
    tokenizer = read_tokenizer(tmp_path)
    tokens = byte_level_vocabulary()[0]
    text = f"<|im_start|>user {USER_DEFINED}<|im_end|>"
    ids = tokenizer(text)["input_ids"]
    assert [ids[0], ids[-1], ids[-2]] == [1, 2, tokens.index(USER_DEFINED)]
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=True) == f"user {USER_DEFINED}"
    assert [tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token] == [
        "<|im_start|>",
        "<|im_end|>",
        "<|endoftext|>",
    ]


@pytest.mark.parametrize(
    ("rule", "says", "expected"),
    [
        ("smollm", None, False),
        ("smollm", True, True),
        ("llama-bpe", None, True),
        ("llama-bpe", False, False),
    ],
)
def test_a_prompt_begins_with_bos_if_the_file_or_its_kind_says_so(
    rule: str, says: bool | None, expected: bool, tmp_path
) -> None:
    fields = byte_level_fields(rule) | ({} if says is None else {"add_bos_token": says})
    ids = read_tokenizer(tmp_path, tokenizer=fields)("x")["input_ids"]
    assert (ids[0] == 1) is expected


def test_llama_3_takes_a_word_that_is_a_token_without_merging(tmp_path) -> None:
    fields = byte_level_fields("llama-bpe")
    tokens, merges = list(fields["tokens"]), fields["merges"]
    tokens[-2] = "zqzq"
    fields |= {"tokens": tokens, "merges": merges[:-1], "add_bos_token": False}
    ids = read_tokenizer(tmp_path, tokenizer=fields)("zqzq")["input_ids"]
    assert ids == [len(tokens) - 2]


def test_the_chat_template_is_kept_and_its_end_of_turn_ends_the_answer(tmp_path) -> None:
    fields = {"tokenizer.chat_template": CHAT_TEMPLATE, "tokenizer.ggml.eos_token_id": 0}
    folder = convert(write_gguf(tmp_path / "m.gguf", fields=fields), tmp_path / "m")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [0, SPECIAL.index("<|im_end|>")]


def test_an_end_of_turn_named_by_the_file_ends_the_answer(tmp_path) -> None:
    fields = {"tokenizer.ggml.eos_token_id": 0, "tokenizer.ggml.eot_token_id": 1}
    folder = convert(write_gguf(tmp_path / "m.gguf", fields=fields), tmp_path / "m")
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [0, 1]


def sentencepiece_fields() -> dict:
    """A vocabulary as of Llama 2: `<unk> <s> </s>`, 256 bytes, then text by falling score."""
    letters = sorted(set("▁ehlowrdt!é日"))
    joined = ["▁h", "▁t", "he", "▁he", "ll", "▁▁", "llo", "▁hello", "▁w", "or", "▁wor", "▁world"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [UNKNOWN_TYPE, CONTROL_TYPE, CONTROL_TYPE, *[BYTE_TYPE] * 256]
    tokens += [*joined, *letters]
    types += [NORMAL_TYPE] * (len(joined) + len(letters))
    scores = [0.0] * 259 + [-float(i) for i in range(len(joined) + len(letters))]
    fields = {"model": "llama", "tokens": tokens, "token_type": types, "scores": scores}
    return fields | {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}


def test_sentencepiece_text_becomes_the_tokens_transformers_makes_of_it(tmp_path) -> None:
    tokenizer = read_tokenizer(tmp_path, tokenizer=sentencepiece_fields())
    reference = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    for text in ["hello world", "hello  world!", "the hero 日é", "X🎉\n", "héhé", ""]:
        ids = tokenizer(text)["input_ids"]
        assert ids == reference(text)["input_ids"], text
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_sentencepiece_joins_the_best_scores_first(tmp_path) -> None:
    tokenizer = read_tokenizer(tmp_path, tokenizer=sentencepiece_fields())
    assert tokenizer.tokenize("hello") == ["▁hello"]
    # One space more than SentencePiece's own, which the text begins with.
    assert tokenizer.tokenize(" hello") == ["▁", "▁hello"]
    assert tokenizer.tokenize("\n") == ["▁", "<0x0A>"]
    assert tokenizer("hello")["input_ids"][0] == 1


def test_sentencepiece_without_a_leading_space(tmp_path) -> None:
    fields = sentencepiece_fields() | {"add_space_prefix": False, "add_bos_token": False}
    tokenizer = read_tokenizer(tmp_path, tokenizer=fields)
    assert tokenizer.tokenize("he hello") == ["he", "▁hello"]
    assert tokenizer.decode(tokenizer(" he")["input_ids"]) == " he"


# What is refused, and damage

# Fields whose values the converter goes by; each must be of its own type.
CONFIG_NAMES = [
    "split.count",
    *(f"llama.{name}" for name in ("block_count", "context_length", "embedding_length")),
    *(f"llama.{name}" for name in ("feed_forward_length", "rope.freq_base", "expert_count")),
    *(f"llama.attention.{name}" for name in ("head_count", "head_count_kv", "key_length")),
    *(f"llama.attention.{name}" for name in ("layer_norm_rms_epsilon", "sliding_window")),
    *(f"llama.rope.{name}" for name in ("dimension_count", "scaling.type", "scaling.factor")),
    *(f"tokenizer.ggml.{name}" for name in ("model", "pre", "tokens", "token_type", "merges")),
    *(f"tokenizer.ggml.{name}_token_id" for name in ("bos", "eos", "eot", "unknown")),
]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"general.architecture": "mamba"}, "'mamba' is not supported; the supported ones are"),
        ({"tokenizer.ggml.pre": "bloom"}, "pre-tokenizer 'bloom' is not supported, only default"),
        ({"tokenizer.ggml.model": "t5"}, "tokenizer 't5' is not supported, only gpt2, llama"),
        ({"llama.rope.scaling.type": "yarn"}, "'yarn' is not supported"),
        ({"llama.rope.scale_linear": 4.0}, "scale_linear=4.0 is not supported"),
        ({"llama.rope.dimension_count": 16}, "dimension_count=16 is not supported, only 32"),
        ({"llama.attention.sliding_window": 64}, "sliding_window=64 is not supported"),
        ({"llama.attention.head_count_kv": [2, 1]}, r"head_count_kv=\[2, 1\], expected a positive"),
        ({"llama.attention.head_count_kv": 3}, "not a multiple of num_key_value_heads=3"),
        ({"llama.block_count": 0}, "block_count=0, expected a positive integer"),
        ({"llama.block_count": 2**32 - 1}, "has no tensor 'blk.2.attn_norm.weight'"),
        ({"llama.block_count": 3}, "has no tensor 'blk.2.attn_norm.weight'"),
        ({"llama.rope.scaling.factor": 4.0}, "scaling.factor=4.0 is not supported, only 1.0"),
        ({"llama.expert_count": 8}, "expert_count=8 is not supported, only 0"),
        ({"split.count": 4}, "is one of 4 parts"),
        ({"tokenizer.chat_template": 3}, "tokenizer is damaged.*chat_template=3, expected a text"),
        ({"tokenizer.ggml.tokens": ["a"] * 601}, "tokenizer is damaged.*occurs twice"),
        ({"tokenizer.ggml.tokens": ["a", "b"]}, "tokenizer is damaged.*2 tokens, but 601"),
        ({"tokenizer.ggml.tokens": [str(i) for i in range(602)]}, "602 tokens, 601 embeddings"),
        ({"tokenizer.ggml.merges": ["ž ž"]}, "tokenizer is damaged.*ž"),
        ({"tokenizer.ggml.merges": ["one"]}, "tokenizer is damaged"),
        ({"tokenizer.ggml.eos_token_id": 9999}, "eos_token_id=9999, but there are 601 tokens"),
    ],
)
def test_what_cannot_be_converted_is_refused_by_name(
    fields: dict, message: str, tmp_path: Path
) -> None:
    file = write_gguf(tmp_path / "broken.gguf", fields=fields)
    with pytest.raises(ModelError, match=message) as caught:
        convert(file, tmp_path / "m")
    assert "broken.gguf" in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        "general.architecture",
        "llama.block_count",
        "llama.embedding_length",
        "llama.context_length",
        "tokenizer.ggml.tokens",
        "tokenizer.ggml.merges",
        "tokenizer.ggml.model",
        "token_embd.weight",
        "output_norm.weight",
        "blk.1.ffn_down.weight",
    ],
)
def test_something_missing_is_named(name: str, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "broken.gguf", without=[name])
    if name == "general.architecture":  # written by the writer itself
        file.write_bytes(
            file.read_bytes().replace(b"general.architecture", b"general.architectura")
        )
    with pytest.raises(ModelError, match=r"broken\.gguf") as caught:
        convert(file, tmp_path / "m")
    assert name.removeprefix("tokenizer.ggml.") in str(caught.value) or "None" in str(caught.value)


def test_a_tensor_without_a_place_is_named(tmp_path: Path) -> None:
    extra = {"blk.0.ffn_gate_exps.weight": np.zeros((4, 4), np.float32)}
    file = write_gguf(tmp_path / "m.gguf", extra_tensors=extra)
    with pytest.raises(ModelError, match=r"'blk.0.ffn_gate_exps.weight' has no place"):
        convert(file, tmp_path / "m")


@pytest.mark.parametrize("name", ["blk.0.attn_q.bias", "blk.1.ffn_up.bias", "blk.2.attn_q.weight"])
def test_a_tensor_that_the_configuration_has_no_place_for_is_named(name: str, tmp_path) -> None:
    extra = {name: np.zeros(5, np.float32)}
    file = write_gguf(tmp_path / "m.gguf", tiny_model("qwen3"), extra_tensors=extra)
    with pytest.raises(ModelError, match=re.escape(repr(name))):
        convert(file, tmp_path / "m")


def test_a_bias_of_another_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    extra = {"blk.0.attn_q.bias": np.zeros(5, np.float32)}
    file = write_gguf(tmp_path / "m.gguf", tiny_model("qwen2"), extra_tensors=extra)
    with pytest.raises(ModelError, match=r"'blk\.0\.attn_q\.bias' has shape \[5\].*\[64\]"):
        convert(file, tmp_path / "m")


def test_a_later_part_of_a_model_is_called_a_part_not_damaged(tmp_path: Path) -> None:
    without = [name for name in CONFIG_NAMES if name != "split.count"]
    file = write_gguf(tmp_path / "m.gguf", fields={"split.count": 3}, without=without)
    with pytest.raises(ModelError, match="is one of 3 parts of a model; join them first"):
        convert(file, tmp_path / "m")


WRONG = ["x", -1.5, ["a", "b"], [1, 2], [1.5]]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
@pytest.mark.parametrize("name", CONFIG_NAMES)
def test_a_field_of_the_wrong_type_is_one_clear_line(name: str, wrong, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", fields={name: wrong})
    with pytest.raises(ModelError, match=r"m\.gguf") as caught:
        convert(file, tmp_path / "m")
    assert "\n" not in str(caught.value)


def test_a_type_of_numbers_that_is_none_of_weights_is_refused(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf")
    data, name = file.read_bytes(), b"blk.0.attn_v.weight"
    at = data.index(name) + len(name) + 4 + 2 * 8  # past the number of dimensions, and two of them
    assert int.from_bytes(data[at : at + 4], "little") == TYPES.F32
    file.write_bytes(data[:at] + TYPES.I32.to_bytes(4, "little") + data[at + 4 :])
    with pytest.raises(ModelError, match=r"cannot read tensor 'blk\.0\.attn_v\.weight'"):
        convert(file, tmp_path / "m")


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a model at all" * 100, bytes(4096)])
def test_a_file_of_another_kind_is_refused(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(content)
    with pytest.raises(ModelError, match=r"m\.gguf is not a GGUF file, or is damaged"):
        convert(file, tmp_path / "m")


@cache
def intact() -> bytes:
    with TemporaryDirectory() as folder:
        return write_gguf(Path(folder) / "m.gguf").read_bytes()


@settings(max_examples=40, deadline=None)
@given(fraction=st.floats(0, 1, exclude_max=True))
def test_a_file_that_ends_early_is_refused(tmp_path_factory, fraction: float) -> None:
    folder = tmp_path_factory.mktemp("cut")
    (folder / "m.gguf").write_bytes(intact()[: math.floor(fraction * len(intact()))])
    with pytest.raises(ModelError, match=r"m\.gguf"):
        convert(folder / "m.gguf", folder / "m")


def test_a_list_longer_than_the_file_is_refused_at_once(tmp_path: Path) -> None:
    data = intact()
    key = b"tokenizer.ggml.token_type"
    at = data.index(key) + len(key) + 4 + 4  # past the types of the value and of its items
    assert int.from_bytes(data[at : at + 8], "little") == 601
    (tmp_path / "m.gguf").write_bytes(data[:at] + (1 << 50).to_bytes(8, "little") + data[at + 8 :])
    with pytest.raises(ModelError, match="is damaged: it ends at byte"):
        convert(tmp_path / "m.gguf", tmp_path / "m")


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_damaged_bytes_in_the_header_give_a_model_or_an_error(tmp_path_factory, data) -> None:
    header = intact().index(b"blk.1.ffn_down.weight")
    folder = tmp_path_factory.mktemp("flipped")
    damaged = bytearray(intact())
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, header))] = data.draw(st.integers(0, 255))
    (folder / "m.gguf").write_bytes(damaged)
    try:
        convert(folder / "m.gguf", folder / "m")
    except ModelError:
        return
    assert AutoConfig.from_pretrained(folder / "m").num_hidden_layers >= 1
