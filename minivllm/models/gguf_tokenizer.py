"""Rebuilds the tokenizer that a GGUF file describes, with the `tokenizers` library.

A GGUF file has the tokens, the merges and the NAME of the rule that splits text before merging; the
rule itself lives in the programs that read such files. The rules here are those of the models'
own `tokenizer.json` files. A name that is not known is an error: a tokenizer that splits digits
differently would still run, and only make the model a little stupid.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors
from tokenizers import pre_tokenizers as pre
from transformers import PreTrainedTokenizerFast

from minivllm.errors import ModelError

_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type
# What chat models write at the end of a turn; where it is a control token it ends the answer.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "</s>")

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def save_tokenizer(fields: Mapping[str, Any], path: Path, folder: Path) -> list[int]:
    """Writes `tokenizer.json` and `tokenizer_config.json`.

    Args:
        fields: The file's key-value pairs.
        path: The file, for messages.
        folder: Where to write.

    Returns:
        The tokens that end an answer: the end of sequence, and the chat template's end of turn.

    Raises:
        ModelError: The kind of tokenizer is not supported, or its lists are damaged.
    """
    kind = fields.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ModelError(
            f"{path}: tokenizers of the kind {kind!r} are not supported, only byte-level BPE "
            "('gpt2'); convert the model from its original folder instead"
        )
    try:
        tokens = list(fields["tokenizer.ggml.tokens"])
        merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
        types = list(fields.get("tokenizer.ggml.token_type", [1] * len(tokens)))
        tokenizer = _byte_level_bpe(fields, path, tokens, merges)
    except (KeyError, ValueError, TypeError) as error:
        raise ModelError(f"{path}: its tokenizer is damaged: {error!r}") from error
    _add_special_tokens(tokenizer, tokens, types)
    _add_bos(tokenizer, fields, tokens)
    names = {
        f"{role}_token": tokens[fields[f"tokenizer.ggml.{key}_token_id"]]
        for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if f"tokenizer.ggml.{key}_token_id" in fields
    }
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **names
    )
    template = fields.get("tokenizer.chat_template")
    wrapped.chat_template = template
    wrapped.save_pretrained(folder)
    return _ending_tokens(fields, tokens, types, template or "")


def _byte_level_bpe(
    fields: Mapping[str, Any], path: Path, tokens: list[str], merges: list[Any]
) -> Tokenizer:
    rule = fields.get("tokenizer.ggml.pre", "default")
    rules = _pre_tokenizers()
    if rule not in rules:
        raise ModelError(
            f"{path}: the pre-tokenizer {rule!r} is not supported; the supported ones are "
            f"{', '.join(rules)}"
        )
    vocab = {token: i for i, token in enumerate(tokens)}
    # Llama 3 takes a word that is a token as it is, even if the merges would not lead to it.
    bpe = models.BPE(vocab=vocab, merges=merges, ignore_merges=rule == "llama-bpe")
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = rules[rule]
    tokenizer.decoder = decoders.ByteLevel()
    if rule == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _pre_tokenizers() -> dict[str, Any]:
    gpt2 = pre.ByteLevel(add_prefix_space=False, use_regex=True)
    return {
        "default": gpt2,
        "gpt-2": gpt2,
        "smollm": pre.Sequence([pre.Digits(individual_digits=True), gpt2]),
        "llama-bpe": _split_by(rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"),
        "qwen2": _split_by(rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"),
    }


def _split_by(pattern: str) -> Any:
    return pre.Sequence(
        [
            pre.Split(Regex(pattern), behavior="isolated"),
            pre.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _add_special_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Control tokens are recognised whole in a text, and can be left out when decoding."""
    added = [
        AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    tokenizer.add_tokens(added)


def _add_bos(tokenizer: Tokenizer, fields: Mapping[str, Any], tokens: list[str]) -> None:
    if fields.get("tokenizer.ggml.add_bos_token", False):
        bos_id = fields["tokenizer.ggml.bos_token_id"]
        bos = tokens[bos_id]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, bos_id)]
        )


def _ending_tokens(
    fields: Mapping[str, Any], tokens: list[str], types: list[int], template: str
) -> list[int]:
    ids = [fields["tokenizer.ggml.eos_token_id"]] if "tokenizer.ggml.eos_token_id" in fields else []
    ids += [
        i
        for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind == _CONTROL and token in _TURN_ENDS and token in template and i not in ids
    ]
    return ids
