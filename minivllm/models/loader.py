"""Fills a model's parameters: from safetensors, tensor by tensor, or with random numbers.

The model says where each tensor of a checkpoint goes (`weight_targets`), as a view of the parameter
that holds it, so merging needs no code here. Every tensor must be there, once, in the right shape,
and nothing may be left over: a checkpoint that almost fits is an error that names the tensor.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator
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
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


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
    loaded: set[str] = set()
    surplus: list[str] = []
    tied: torch.Tensor | None = None
    for file, name, tensor in _tensors(folder, len(targets)):
        if name in loaded:
            raise ModelError(f"{file}: tensor {name!r} is in another file of the checkpoint too")
        if name in targets:
            _copy(file, name, tensor, targets[name])
            loaded.add(name)
        elif name == _TIED:
            tied = tensor  # the embedding may come after it
        elif not name.endswith(".rotary_emb.inv_freq"):  # old checkpoints; it follows from config
            surplus.append(name)
    if missing := set(targets) - loaded:
        raise ModelError(f"{folder}: the checkpoint lacks {_some(missing)}")
    if surplus:
        raise ModelError(
            f"{folder}: the checkpoint has tensors that the model has no place for: "
            f"{_some(surplus)}"
        )
    if tied is not None:
        _check_tied(tied, targets[_EMBEDDING], folder)


def _copy(file: Path, name: str, tensor: torch.Tensor, target: torch.Tensor) -> None:
    if tensor.shape != target.shape:
        raise ModelError(
            f"{file}: tensor {name!r} has shape {list(tensor.shape)}, but config.json asks for "
            f"{list(target.shape)}"
        )
    if tensor.dtype not in _DTYPES:
        raise ModelError(
            f"{file}: tensor {name!r} is {tensor.dtype}, which looks quantised; use a checkpoint "
            "in bfloat16, float16 or float32"
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


def _tensors(folder: Path, total: int) -> Iterator[tuple[Path, str, torch.Tensor]]:
    """Yields a checkpoint's tensors, one in memory at a time, with the file each lies in."""
    with tqdm(total=total, desc="Loading weights", leave=False, disable=None) as bar:
        for file in _files(folder):
            try:
                with safe_open(file, framework="pt") as handle:
                    for name in handle.keys():  # noqa: SIM118 (no mapping)
                        yield file, name, handle.get_tensor(name)
                        bar.update()
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{file} is damaged: {error}") from error


def _files(folder: Path) -> list[Path]:
    """The safetensors files; a single one comes before an index, as in transformers."""
    single, index = folder / _SINGLE, folder / _INDEX
    if single.exists() or not index.exists():
        files = [single]
    else:
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            names = sorted(set(weight_map.values()))
            files = [folder / name for name in names]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ModelError(f"{index} is damaged: {error!r}") from error
        # An index is data from elsewhere: it must not lead out of the folder.
        if outside := [name for name in names if os.path.basename(name) != name]:
            raise ModelError(f"{index}: {outside[0]!r} is not the name of a file in this folder")
    for file in files:
        if not os.path.isfile(file):
            raise ModelError(f"{file} does not exist; weights are read from safetensors files only")
    return files


def _some(names: Collection[str], count: int = 3) -> str:
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
