"""`minivllm doctor`: what this machine can do, and what minivllm will therefore use.

Each check asks the machine one question and puts the answer into a `Finding`. The choices that
follow are not repeated here: they are what `EngineConfig` resolves `auto` to, each beside the
finding that is its reason. A check that breaks is a finding too, never a traceback.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from minivllm.config import EngineConfig
from minivllm.doctor_probes import CudaDevice, Machine
from minivllm.errors import MinivllmError

_GIB = 2**30


@dataclass(frozen=True)
class Finding:
    """One thing this machine can or cannot do.

    Attributes:
        name: What was checked.
        ok: Whether it can be used.
        detail: Versions, sizes, or the reason why not, for people.
        facts: The same for programs.
    """

    name: str
    ok: bool
    detail: str
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Choice:
    """What an option left at `auto` becomes on this machine, and why."""

    option: str
    value: str
    reason: str


@dataclass(frozen=True)
class Report:
    """All findings, and what follows from them.

    Attributes:
        findings: In the order of the checks.
        choices: The resolved defaults; empty if they cannot be resolved.
        problem: What keeps minivllm from running with its defaults, or None.
    """

    findings: list[Finding]
    choices: list[Choice]
    problem: str | None

    @property
    def usable(self) -> bool:
        """Whether minivllm can run here with its defaults."""
        return self.problem is None

    def as_dict(self) -> dict[str, Any]:
        """The report as a plain nested dict."""
        return {**asdict(self), "usable": self.usable}


def examine(
    machine: Machine | None = None,
    resolve: Callable[[], EngineConfig] = lambda: EngineConfig("smollm2").resolved(),
) -> Report:
    """Runs all checks.

    Args:
        machine: What to ask; the real one by default.
        resolve: Gives the configuration that all defaults lead to.
    """
    machine = machine or Machine()
    findings = {name: _guarded(name, check, machine) for name, check in CHECKS.items()}
    try:
        choices = _explain(resolve(), findings)
        problem = _problem(choices, findings)
    except (MinivllmError, ImportError, OSError) as error:
        choices, problem = [], f"no defaults can be chosen: {error}"
    return Report(list(findings.values()), choices, problem)


def print_report(report: Report) -> None:
    """Prints the report as two tables."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # Details are the machine's own words: brackets in them are no markup.
    found = Table("this machine", "", "", box=None, pad_edge=False)
    for finding in report.findings:
        mark = Text("yes", "green") if finding.ok else Text("no", "yellow")
        found.add_row(Text(finding.name), mark, Text(finding.detail))
    chosen = Table("minivllm uses", "", "because", box=None, pad_edge=False)
    for choice in report.choices:
        chosen.add_row(Text(choice.option), Text(choice.value, "bold"), Text(choice.reason))
    console = Console()
    console.print(found)
    console.print()
    if report.choices:
        console.print(chosen)
    if report.problem is not None:
        console.print(Text(f"problem: {report.problem}", "red"))


def check_python(machine: Machine) -> Finding:
    """Whether Python is new enough."""
    version, path = machine.python()
    text = ".".join(map(str, version))
    facts = {"version": text, "path": path}
    if version < (3, 11):
        return Finding("python", False, f"{text} at {path}: minivllm needs 3.11 or newer", facts)
    return Finding("python", True, f"{text} at {path}", facts)


def check_torch(machine: Machine) -> Finding:
    """Whether torch can be imported, and what it was built for."""
    version, cuda = machine.torch_build()
    build = "CPU build" if cuda is None else f"built for CUDA {cuda}"
    return Finding("torch", True, f"{version}, {build}", {"version": version, "cuda": cuda})


def check_cuda(machine: Machine) -> Finding:
    """Which GPUs torch sees."""
    devices, (_, cuda) = machine.cuda_devices(), machine.torch_build()
    facts = {"devices": [asdict(device) for device in devices]}
    if devices:
        return Finding("CUDA devices", True, "; ".join(map(_describe_device, devices)), facts)
    if cuda is None:
        return Finding("CUDA devices", False, "torch is a CPU build and looks for none", facts)
    visible = machine.environ().get("CUDA_VISIBLE_DEVICES")
    hint = "is a driver loaded?" if visible is None else f"CUDA_VISIBLE_DEVICES={visible!r}"
    return Finding("CUDA devices", False, f"torch sees none ({hint})", facts)


def check_triton(machine: Machine) -> Finding:
    """Whether Triton kernels run: compiled where there is a GPU, interpreted elsewhere."""
    version = machine.package_version("triton")
    if version is None:
        return Finding("triton", False, "not installed", {"version": None})
    gpu = bool(machine.cuda_devices())
    tried = {"interpreted": "cpu", **({"compiled": "cuda"} if gpu else {})}
    errors = {how: _failure(machine.run_triton_kernel, dev) for how, dev in tried.items()}
    said = [
        f"a kernel {'runs' if error is None else 'fails'} {how}"
        + ("" if error is None else f" ({error})")
        for how, error in errors.items()
    ]
    facts = {"version": version, **{how: error is None for how, error in errors.items()}}
    ok = errors["compiled" if gpu else "interpreted"] is None
    return Finding("triton", ok, f"{version}; {'; '.join(said)}", facts)


def check_nvcc(machine: Machine) -> Finding:
    """Whether there is a CUDA compiler, and its version."""
    environ = machine.environ()
    homes = [environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if environ.get(name)]
    candidates = [*(f"{home}/bin/nvcc" for home in homes), "nvcc", "/usr/local/cuda/bin/nvcc"]
    path = next((found for name in candidates if (found := machine.which(name))), None)
    if path is None:
        detail = "not found on PATH, in CUDA_HOME or in /usr/local/cuda"
        return Finding("nvcc", False, detail, {"path": None})
    output = machine.output_of(path, "--version")
    release = output.partition("release ")[2].partition(",")[0] or "of unknown version"
    return Finding("nvcc", True, f"{release} at {path}", {"path": path, "version": release})


def check_compiler(machine: Machine) -> Finding:
    """Whether a C++ compiler builds a program with atomics."""
    chosen = machine.environ().get("CXX")
    candidates = [chosen] if chosen else ["c++", "g++", "clang++"]
    path = next((found for name in candidates if (found := machine.which(name))), None)
    if path is None:
        detail = f"not found: {', '.join(candidates)}"
        return Finding("C++ compiler", False, detail, {"path": None})
    version = machine.output_of(path, "--version").splitlines()[0]
    machine.compile_cpp(path)
    return Finding("C++ compiler", True, f"{version} at {path}", {"path": path, "version": version})


def check_shared_memory(machine: Machine) -> Finding:
    """Whether processes can share host memory by name."""
    free = machine.share_host_memory()
    detail = f"{free / _GIB:.1f} GiB free for processes to share"
    return Finding("shared memory", True, detail, {"free_bytes": free})


def check_cuda_ipc(machine: Machine) -> Finding:
    """Whether a process can open another's GPU memory."""
    if not machine.cuda_devices():
        return Finding("CUDA IPC", False, "no GPU")
    environ = machine.environ()
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if "expandable_segments:true" in environ.get(name, "").lower().replace(" ", ""):
            detail = f"{name} asks for expandable segments, which cudaIpcGetMemHandle refuses"
            return Finding("CUDA IPC", False, detail)
    machine.share_cuda_memory()
    return Finding("CUDA IPC", True, "a second process reads this one's GPU memory")


def check_ranks(machine: Machine) -> Finding:
    """How many ranks have a device of their own: GPUs, or cores where there is none."""
    num_gpus, num_cores = len(machine.cuda_devices()), machine.num_cores()
    ranks = num_gpus or num_cores
    what = "one for each GPU" if num_gpus else "one for each CPU core"
    facts = {"ranks": ranks, "gpus": num_gpus, "cores": num_cores}
    return Finding("ranks", True, f"room for {ranks}: {what} ({num_cores} cores)", facts)


def check_memory(machine: Machine) -> Finding:
    """How much host memory there is."""
    total, available = machine.memory()
    detail = f"{available / _GIB:.1f} of {total / _GIB:.1f} GiB available"
    return Finding("memory", True, detail, {"total_bytes": total, "available_bytes": available})


def check_default_model(machine: Machine) -> Finding:
    """Whether the default model is here, or can be had."""
    try:
        state, place = machine.default_model()
    except (OSError, subprocess.SubprocessError):
        detail = "neither in the cache nor installed, and pip reaches no index that has it"
        return Finding("default model", False, detail, {"state": "absent"})
    detail = f"smollm2 is {state}: {place}"
    return Finding("default model", True, detail, {"state": state, "place": place})


CHECKS: dict[str, Callable[[Machine], Finding]] = {
    "python": check_python,
    "torch": check_torch,
    "CUDA devices": check_cuda,
    "triton": check_triton,
    "nvcc": check_nvcc,
    "C++ compiler": check_compiler,
    "shared memory": check_shared_memory,
    "CUDA IPC": check_cuda_ipc,
    "ranks": check_ranks,
    "memory": check_memory,
    "default model": check_default_model,
}


def _guarded(name: str, check: Callable[[Machine], Finding], machine: Machine) -> Finding:
    """Runs a check; whatever it raises is what was found."""
    try:
        return check(machine)
    except Exception as error:  # a broken installation may raise anything
        return Finding(name, False, _one_line(error))


def _failure(action: Callable[[str], None], argument: str) -> str | None:
    try:
        action(argument)
    except Exception as error:  # as above
        return _one_line(error)
    return None


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__


def _describe_device(device: CudaDevice) -> str:
    major, minor = device.capability
    return (
        f"{device.name}, {device.free_memory / _GIB:.1f} of {device.total_memory / _GIB:.1f} GiB "
        f"free, compute capability {major}.{minor}"
    )


def _explain(config: EngineConfig, findings: dict[str, Finding]) -> list[Choice]:
    """Puts beside each resolved default the finding it comes from."""
    cuda, triton = findings["CUDA devices"], findings["triton"]
    if config.device == "cuda":
        dtype_reason = "tensor cores are fast in it, and models are published in it"
        backend_reason = f"triton {triton.detail}" if triton.ok else triton.detail
        compile_reason = "compiled once, then every step is faster"
    else:
        dtype_reason = "exact, and not every CPU is fast in a shorter type"
        backend_reason = "the device is a CPU, on which Triton kernels are only interpreted"
        compile_reason = "compiling takes longer than most programs run on a CPU"
    return [
        Choice("device", config.device, cuda.detail),
        Choice("dtype", config.dtype, dtype_reason),
        Choice("attention backend", config.attention_backend, backend_reason),
        Choice("compile", config.compilation.compile, compile_reason),
    ]


def _problem(choices: list[Choice], findings: dict[str, Finding]) -> str | None:
    chosen = {choice.option: choice.value for choice in choices}
    if not findings["python"].ok:
        return findings["python"].detail
    triton = findings["triton"]
    if chosen["attention backend"] == "triton" and not triton.ok:
        return f"{triton.detail}; use --attention-backend torch"
    return None
