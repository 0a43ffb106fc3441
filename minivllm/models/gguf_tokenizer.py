"""Rebuilds the tokenizer that a GGUF file describes, with the `tokenizers` library.

A GGUF file has the tokens and either merges or scores, and the NAME of the rule that splits text
before merging; the rule itself lives in the programs that read such files. The rules here are those
of the models' own `tokenizer.json` files. A name that is not known is an error: a tokenizer that
splits digits differently would still run, and only make the model a little stupid.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors
from tokenizers import pre_tokenizers as pre
from transformers import PreTrainedTokenizerFast

from minivllm.errors import ModelError

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # values of tokenizer.ggml.token_type
_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
# What chat models write at the end of a turn, if the chat template has it.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "</s>")

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"
_SPACE = "▁"  # stands for a space in SentencePiece's tokens


@dataclass(frozen=True)
class _Vocabulary:
    """The lists of `tokenizer.ggml.*`, checked to belong together; and its single values."""

    tokens: list[str]
    types: list[int]
    fields: Mapping[str, Any]

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> _Vocabulary:
        tokens = list(fields["tokenizer.ggml.tokens"])
        types = list(fields.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens)))
        if len(types) != len(tokens):
            raise ValueError(f"{len(tokens)} tokens, but {len(types)} token types")
        if len(set(tokens)) != len(tokens):
            raise ValueError("a token occurs twice")
        return cls(tokens, types, fields)

    def get(self, key: str, default: Any = None) -> Any:
        return self.fields.get(f"tokenizer.ggml.{key}", default)

    def id_of(self, role: str) -> int | None:
        """The token that plays a role, such as `bos`."""
        token_id = self.get(f"{role}_token_id")
        if token_id is not None and token_id not in range(len(self.tokens)):
            raise ValueError(
                f"{role}_token_id={token_id!r}, but there are {len(self.tokens)} tokens"
            )
        return token_id

    @property
    def ids(self) -> dict[str, int]:
        return {token: i for i, token in enumerate(self.tokens)}


def save_tokenizer(fields: Mapping[str, Any], path: Path, folder: Path) -> list[int]:
    """Writes `tokenizer.json`, `tokenizer_config.json` and the chat template.

    Args:
        fields: The file's key-value pairs.
        path: The file, for messages.
        folder: Where to write.

    Returns:
        The tokens that end an answer: the end of sequence, and the chat template's end of turn.

    Raises:
        ModelError: The kind of tokenizer is not supported, or its lists are damaged.
    """
    builder = _choose(_BUILDERS, fields.get("tokenizer.ggml.model"), "tokenizer", path)
    if builder is _byte_level_bpe:
        _choose(_PRE_TOKENIZERS, fields.get("tokenizer.ggml.pre", "default"), "pre-tokenizer", path)
    try:
        vocabulary = _Vocabulary.of(fields)
        tokenizer = builder(vocabulary)
        _add_special_tokens(tokenizer, vocabulary)
        _add_bos(tokenizer, vocabulary)
        roles = {name: vocabulary.id_of(role) for name, role in _ROLES.items()}
        wrapped = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            clean_up_tokenization_spaces=False,
            **{name: vocabulary.tokens[i] for name, i in roles.items() if i is not None},
        )
        template = fields.get("tokenizer.chat_template")
        if not isinstance(template, str | None):
            raise ValueError(f"chat_template={template!r}, expected a text")
        wrapped.chat_template = template
        ending = _ending_tokens(vocabulary, template or "")
    except Exception as error:  # the library raises plain Exception for lists that contradict
        raise ModelError(f"{path}: its tokenizer is damaged: {error!r}") from error
    wrapped.save_pretrained(folder)
    return ending


def _choose(choices: Mapping[str, Any], name: object, what: str, path: Path) -> Any:
    if name not in tuple(choices):  # equality, for a damaged name may be a list
        raise ModelError(
            f"{path}: {what} {name!r} is not supported, only {', '.join(choices)}; use the model's "
            "original folder instead"
        )
    return choices[str(name)]


def _byte_level_bpe(vocabulary: _Vocabulary) -> Tokenizer:
    """The kind of GPT-2, Llama 3, Qwen and SmolLM: tokens are bytes, spelled as visible letters."""
    rule = vocabulary.get("pre", "default")
    merges = [tuple(merge.split(" ", 1)) for merge in vocabulary.get("merges")]
    # Llama 3 takes a word that is a token as it is, even if the merges would not lead to it.
    bpe = models.BPE(vocab=vocabulary.ids, merges=merges, ignore_merges=_is_llama3(vocabulary))
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[rule]
    tokenizer.decoder = decoders.ByteLevel()
    if rule == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _sentencepiece_bpe(vocabulary: _Vocabulary) -> Tokenizer:
    """The kind of Llama 2 and Mistral: tokens are text, spaces are letters, bytes a last resort."""
    unknown = vocabulary.id_of("unknown")
    bpe = models.BPE(
        vocab=vocabulary.ids,
        merges=_merges_by_score(vocabulary),
        unk_token=vocabulary.tokens[0 if unknown is None else unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(bpe)
    spaces = normalizers.Replace(" ", _SPACE)
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.get("add_space_prefix", True):
        # So that a word is the same tokens at the start of a text as within it.
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = spaces
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges_by_score(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """SentencePiece joins the two neighbours whose union scores best; merges say the same."""
    scores = vocabulary.get("scores")
    normal = [i for i, kind in enumerate(vocabulary.types) if kind in (_NORMAL, _USER_DEFINED)]
    ids = {vocabulary.tokens[i]: i for i in normal}
    merges = []
    for i in sorted(normal, key=lambda i: -scores[i]):
        token = vocabulary.tokens[i]
        cuts = [(token[:at], token[at:]) for at in range(1, len(token))]
        merges += [(left, right) for left, right in cuts if left in ids and right in ids]
    return merges


def _split_by(pattern: str) -> Any:
    return pre.Sequence(
        [
            pre.Split(Regex(pattern), behavior="isolated"),
            pre.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


_GPT2 = pre.ByteLevel(add_prefix_space=False, use_regex=True)
_PRE_TOKENIZERS: dict[str, Any] = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "smollm": pre.Sequence([pre.Digits(individual_digits=True), _GPT2]),
    "llama-bpe": _split_by(_LLAMA3),
    "llama3": _split_by(_LLAMA3),
    "llama-v3": _split_by(_LLAMA3),
    "qwen2": _split_by(_QWEN2),
}
_BUILDERS = {"gpt2": _byte_level_bpe, "llama": _sentencepiece_bpe}


def _is_llama3(vocabulary: _Vocabulary) -> bool:
    return vocabulary.get("pre") in ("llama-bpe", "llama3", "llama-v3")


def _add_special_tokens(tokenizer: Tokenizer, vocabulary: _Vocabulary) -> None:
    """Control tokens are recognised whole in a text, and can be left out when decoding."""
    added = [
        AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    tokenizer.add_tokens(added)


def _add_bos(tokenizer: Tokenizer, vocabulary: _Vocabulary) -> None:
    """A prompt begins with BOS if the file says so; old files leave it to the kind."""
    by_kind = vocabulary.get("model") == "llama" or _is_llama3(vocabulary)
    bos_id = vocabulary.id_of("bos")
    if bos_id is not None and vocabulary.get("add_bos_token", by_kind):
        bos = vocabulary.tokens[bos_id]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, bos_id)]
        )


def _ending_tokens(vocabulary: _Vocabulary, template: str) -> list[int]:
    named = [vocabulary.id_of(role) for role in ("eos", "eot", "eom")]
    added = {
        token: i
        for i, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if kind in (_CONTROL, _USER_DEFINED)
    }
    ends = [added[token] for token in _TURN_ENDS if token in template and token in added]
    return list(dict.fromkeys([i for i in named if i is not None] + ends))
