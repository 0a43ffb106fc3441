"""A model's tokenizer and the tokens that end its sequences, from its folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm.errors import ModelError
from minivllm.models.registry import as_token_ids
from minivllm.models.source import ModelSource

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def load_tokenizer(source: ModelSource) -> PreTrainedTokenizerBase | None:
    """Loads the tokenizer of a folder, if it has one; random weights have none.

    Raises:
        ModelError: Its files are missing or damaged.
    """
    if source.folder is None or not any((source.folder / name).exists() for name in _FILES):
        return None
    from transformers import AutoTokenizer  # takes seconds, and not every command needs it

    try:
        # Not saying it lets transformers ask on the terminal whether to run a model's own code.
        return AutoTokenizer.from_pretrained(
            source.folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # tokenizers raise plain Exception for a damaged file
        first_line = str(error).strip().split("\n")[0]
        raise ModelError(f"{source.folder}: cannot load the tokenizer: {first_line}") from error


def eos_token_ids(source: ModelSource) -> tuple[int, ...]:
    """Tokens that end a sequence: those of `config.json` and of `generation_config.json`.

    Chat models end a turn with a token that only the latter names.

    Raises:
        ModelError: `generation_config.json` is damaged.
    """
    ids = source.config.eos_token_ids
    if source.folder is not None:
        path = source.folder / "generation_config.json"
        ids += as_token_ids(f"{path}: eos_token_id", _read_object(path).get("eos_token_id"))
    return tuple(dict.fromkeys(ids))


def _read_object(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ModelError(f"{path} is damaged: {error}") from error
