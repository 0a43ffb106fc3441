"""Keeps compiled pieces on disk, so that the second start loads what the first has compiled.

An entry's name is a hash over everything that shapes its content: the graph (its signature), the
size it was compiled for, the compiler's configuration, the versions of torch, triton and minivllm,
the source text of the code that was traced, the device and its instruction set. Where things lie is
not part of it: another home folder must not cost a compilation.

An entry is written beside its place and renamed, so nobody ever reads half of one; and one that
cannot be read costs a compilation and a line in the log, never an error and never a wrong token.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from minivllm.version import __version__

logger = logging.getLogger(__name__)


class ArtifactCache:
    """A folder of compiled pieces.

    Args:
        folder: Is made when the first entry is written.
        factors: Whatever else shapes a compiled piece, by name: the dtype, the world size.
    """

    def __init__(self, folder: Path, factors: dict[str, Any]) -> None:
        self.folder = folder
        self.factors = {**factors, **environment_factors()}

    def key(self, signature: str, num_tokens: int | None) -> str:
        """The name of an entry."""
        parts = {**self.factors, "signature": signature, "num_tokens": num_tokens}
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()

    def find(
        self, signature: str, num_tokens: int | None, load: Callable[[Path], Any]
    ) -> Any | None:
        """The compiled piece, or None if there is none that can be read."""
        path = self._path(signature, num_tokens)
        if not path.exists():
            return None
        try:
            return load(path)
        except Exception as error:  # whatever a damaged file makes unpickling do
            logger.warning("compiled piece %s is damaged, compiling again: %s", path.name, error)
            return None

    def store(
        self,
        signature: str,
        num_tokens: int | None,
        compiled: Any,
        save: Callable[[Any, Path], None],
    ) -> None:
        """Writes an entry; a folder that cannot be written costs a line in the log."""
        path = self._path(signature, num_tokens)
        temporary: Path | None = None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.folder, delete=False) as file:
                temporary = Path(file.name)
            save(compiled, temporary)
            os.replace(temporary, path)
        except Exception as error:
            logger.warning("cannot keep a compiled piece in %s: %s", self.folder, error)
            if temporary is not None:
                temporary.unlink(missing_ok=True)

    def _path(self, signature: str, num_tokens: int | None) -> Path:
        return self.folder / f"{self.key(signature, num_tokens)}.bin"


@cache
def environment_factors() -> dict[str, Any]:
    """What of this machine and this installation shapes compiled code."""
    factors: dict[str, Any] = {
        "minivllm": __version__,
        "source": _source_hash(),
        "torch": torch.__version__,
        "triton": _triton_version(),
        "inductor": torch._inductor.config.save_config_portable(),
    }
    # Both, wherever there are both: a piece for the CPU can be compiled on a machine with a GPU.
    factors["cpu"] = torch.backends.cpu.get_cpu_capability()
    factors["threads"] = torch.get_num_threads()
    if torch.cuda.is_available():
        factors["gpu"] = torch.cuda.get_device_name()
        factors["cuda"] = torch.version.cuda
    return factors


def _source_hash() -> str:
    """Hash of all source text that is traced into a graph, or that decides what becomes of it."""
    package = Path(__file__).parent.parent
    files: Sequence[Path] = sorted(
        file
        for pattern in ("models/decoder.py", "layers/*.py", "compilation/*.py")
        for file in package.glob(pattern)
    )
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def _triton_version() -> str | None:
    try:
        import triton
    except ImportError:
        return None
    return str(triton.__version__)
