"""Fills a model's parameters: from safetensors, tensor by tensor, or with random numbers.

The model says where each tensor of a checkpoint goes (`weight_targets`), as a view of the parameter
that holds it, so merging needs no code here. Every tensor must be there, once, in the right shape,
and nothing may be left over: a checkpoint that almost fits is an error that names the tensor.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from minivllm.errors import ModelError
from minivllm.models.source import ModelSource

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_TIED = "lm_head.weight"
_EMBEDDING = "model.embed_tokens.weight"


class LoadableModel(Protocol):
    """What the loader needs of a model."""

    def weight_targets(self) -> dict[str, torch.Tensor]:
        """Where each tensor of a checkpoint goes, by its Hugging Face name."""


def load_weights(model: LoadableModel, source: ModelSource, seed: int = 0) -> None:
    """Fills all parameters.

    Args:
        model: On its device, in its dtype; tensors are converted on the way.
        source: A folder, or random weights.
        seed: Of random weights.

    Raises:
        ModelError: A tensor is missing, surplus or misshapen, or a file is damaged.
    """
    targets = model.weight_targets()
    if source.folder is None:
        _fill_randomly(targets, seed)
    else:
        _fill_from_folder(targets, source.folder)


def _fill_from_folder(targets: dict[str, torch.Tensor], folder: Path) -> None:
    missing, surplus = set(targets), []
    tied = _TIED not in targets
    for name, tensor in _tensors(folder, len(targets)):
        if name in targets:
            _copy(name, tensor, targets[name])
            missing.discard(name)
        elif name == _TIED and tied:
            _check_tied(tensor, targets[_EMBEDDING], folder)
        elif not name.endswith(".rotary_emb.inv_freq"):  # old checkpoints; it follows from config
            surplus.append(name)
    if missing:
        raise ModelError(f"{folder}: the checkpoint lacks {_some(missing)}")
    if surplus:
        raise ModelError(
            f"{folder}: the checkpoint has tensors that the model has no place for: "
            f"{_some(surplus)}"
        )


def _copy(name: str, tensor: torch.Tensor, target: torch.Tensor) -> None:
    if tensor.shape != target.shape:
        raise ModelError(
            f"tensor {name!r} has shape {list(tensor.shape)} in the checkpoint, but the "
            f"configuration asks for {list(target.shape)}"
        )
    target.copy_(tensor)


def _check_tied(tensor: torch.Tensor, embedding: torch.Tensor, folder: Path) -> None:
    if tensor.shape != embedding.shape or not torch.equal(
        tensor.to(embedding.device, embedding.dtype), embedding
    ):
        raise ModelError(
            f"{folder}: config.json ties the output projection to the embedding, but {_TIED!r} "
            "differs from it; set tie_word_embeddings to false"
        )


def _tensors(folder: Path, total: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields a checkpoint's tensors, the embedding before a tied copy of it."""
    with tqdm(total=total, desc="Loading weights", leave=False, disable=None) as bar:
        names = [(name, file) for file in _files(folder) for name in _names(file)]
        for name, file in sorted(names, key=lambda pair: pair[0] == _TIED):
            yield name, _read(file, name)
            bar.update()


def _files(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{index} is damaged: {error!r}") from error
        files = [folder / name for name in names]
    else:
        files = [folder / _SINGLE]
    for file in files:
        if not file.exists():
            raise ModelError(f"{file} does not exist; a model's folder holds its safetensors files")
    return files


def _names(file: Path) -> list[str]:
    try:
        with safe_open(file, framework="pt") as handle:
            return list(handle.keys())
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} is damaged: {error}") from error


def _read(file: Path, name: str) -> torch.Tensor:
    try:
        with safe_open(file, framework="pt") as handle:
            return handle.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} is damaged: {error}") from error


def _some(names: set[str] | list[str], count: int = 3) -> str:
    shown = ", ".join(sorted(names)[:count])
    rest = len(names) - count
    return f"{shown} and {rest} more" if rest > 0 else shown


def _fill_randomly(targets: dict[str, torch.Tensor], seed: int) -> None:
    """Draws weights that keep activations in range through any number of layers.

    Norms are one and biases zero; a matrix's entries have a variance of one over its input width,
    so that it keeps the size of what it is given.
    """
    generators: dict[torch.device, torch.Generator] = {}
    for name, target in targets.items():
        device = target.device
        if device not in generators:
            generators[device] = torch.Generator(device).manual_seed(seed)
        if name.endswith("norm.weight"):
            target.fill_(1.0)
        elif name.endswith(".bias"):
            target.zero_()
        else:
            target.normal_(0.0, target.shape[-1] ** -0.5, generator=generators[device])
