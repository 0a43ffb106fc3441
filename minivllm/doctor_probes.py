"""How `minivllm doctor` asks the machine: every look at the outside world is a method of `Machine`.

A probe tries the thing itself where that is possible: it compiles a program, runs a kernel, opens
memory in a second process. That a package or a file is present does not mean that it works. Tests
replace single methods, to see what the doctor makes of a machine that is not theirs.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

from minivllm.models import source

_CPP_PROGRAM = """
#include <atomic>
int main() { std::atomic<unsigned> flag{0}; flag.store(1, std::memory_order_release); return 0; }
"""
_TIMEOUT = 60.0  # seconds, for anything that another program does


@dataclass(frozen=True)
class CudaDevice:
    """One GPU: its name, memory in bytes, and compute capability."""

    name: str
    total_memory: int
    free_memory: int
    capability: tuple[int, int]


class Machine:
    """The machine this process runs on."""

    def environ(self) -> Mapping[str, str]:
        """The environment variables."""
        return os.environ

    def python(self) -> tuple[tuple[int, int, int], str]:
        """Python's version and path."""
        return sys.version_info[:3], sys.executable

    def package_version(self, name: str) -> str | None:
        """The version of an installed package, or None."""
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return None

    def torch_build(self) -> tuple[str, str | None]:
        """Torch's version, and the CUDA version it was built for, or None for a CPU build.

        Raises:
            ImportError: Torch is missing or broken.
        """
        import torch

        return torch.__version__, torch.version.cuda

    def cuda_devices(self) -> list[CudaDevice]:
        """The GPUs torch sees."""
        import torch

        devices = []
        for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
            properties = torch.cuda.get_device_properties(index)
            free, total = torch.cuda.mem_get_info(index)
            capability = (properties.major, properties.minor)
            devices.append(CudaDevice(properties.name, total, free, capability))
        return devices

    def which(self, name: str) -> str | None:
        """The path of a program, or None; `name` may be a path itself."""
        return shutil.which(name)

    def output_of(self, *command: str) -> str:
        """What a program prints.

        Raises:
            OSError: It cannot be started.
            subprocess.SubprocessError: It failed, or did not end in time.
        """
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT, check=True, errors="replace"
        )
        return done.stdout

    def compile_cpp(self, compiler: str) -> None:
        """Compiles and links a small C++17 program.

        Raises:
            OSError: The compiler cannot be started.
            subprocess.SubprocessError: It failed.
        """
        with tempfile.TemporaryDirectory() as folder:
            program = Path(folder, "probe.cpp")
            program.write_text(_CPP_PROGRAM)
            output = ("-o", str(program.with_suffix("")))
            self.output_of(compiler, "-std=c++17", "-pthread", str(program), *output)

    def run_triton_kernel(self, device: str) -> None:
        """Runs a small Triton kernel: compiled for `cuda`, interpreted for `cpu`.

        Raises:
            Exception: Whatever Triton raises where it does not work.
        """
        from minivllm.doctor_kernel import run_kernel

        run_kernel(device)

    def share_cuda_memory(self) -> None:
        """Lets a second process read this process's GPU memory.

        Raises:
            Exception: Whatever CUDA says where that is not allowed.
        """
        import torch

        values = torch.arange(4, device="cuda")
        # This context sends a CUDA tensor as an IPC handle, never as a copy.
        with torch.multiprocessing.get_context("spawn").Pool(1) as pool:
            total = pool.apply_async(_sum, (values,)).get(_TIMEOUT)
        if total != 6:
            raise RuntimeError(f"the other process read {total} instead of 6")

    def share_host_memory(self) -> int:
        """Creates, opens by name and removes a POSIX shared memory segment.

        Returns:
            Free bytes for such segments.

        Raises:
            OSError: There is none to be had.
        """
        segment = shared_memory.SharedMemory(create=True, size=4096)
        try:
            _bytes(segment)[0] = 42
            other = shared_memory.SharedMemory(segment.name)
            value = _bytes(other)[0]
            other.close()
        finally:
            segment.close()
            segment.unlink()
        if value != 42:
            raise OSError("what one mapping wrote, another did not read")
        return shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0

    def default_model(self) -> tuple[str, str]:
        """Where the default model is: `cached` or `installed` with its place, or `fetchable`.

        Raises:
            OSError: pip cannot be started.
            subprocess.SubprocessError: pip finds the model's package in no index.
        """
        folder, package = source._converted_folder(source._GGUF_SHA256), source._PACKAGE
        if folder.exists():
            return "cached", str(folder)
        if (found := find_spec(package.replace("-", "_"))) is not None:
            return "installed", str(found.origin)
        # Without retries, so that a machine without a network is told so at once.
        quick = ("--retries", "0", "--timeout", "10", "--disable-pip-version-check")
        self.output_of(sys.executable, "-m", "pip", "index", "versions", package, *quick)
        return "fetchable", f"package {package}"

    def num_cores(self) -> int:
        """CPU cores this process may run on."""
        affinity = getattr(os, "sched_getaffinity", None)
        return len(affinity(0)) if affinity else os.cpu_count() or 1

    def memory(self) -> tuple[int, int]:
        """Total and available memory in bytes."""
        page = os.sysconf("SC_PAGE_SIZE")
        total, free = os.sysconf("SC_PHYS_PAGES") * page, os.sysconf("SC_AVPHYS_PAGES") * page
        try:
            lines = Path("/proc/meminfo").read_text().splitlines()
        except OSError:
            return total, free
        # What the page cache holds can be had as well, and only this file says how much that is.
        kib = [int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
        return total, kib[0] * 1024 if kib else free


def _bytes(segment: shared_memory.SharedMemory) -> memoryview:
    assert segment.buf is not None  # only after it has been closed
    return segment.buf


def _sum(values: Any) -> int:
    return int(values.sum())
