"""What compiling in pieces costs at the start, and what it gives afterwards.

Starts with an empty and with a filled cache, each in a process of its own; then tokens per second
of every way of running the model, side by side in one process, in alternating order.

    python -m benchmarks.compile --model smollm2 --output benchmarks/results/compile-cpu.json
    python -m benchmarks.compile --model random:qwen3-0.6b --device cuda --output ...
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch

from benchmarks.generate import device_name, timed
from minivllm import LLM, SamplingParams, __version__
from minivllm.config import FUSION_NAMES

MODES = ("none", "eager", "inductor")


def make_llm(model: str, device: str, dtype: str, mode: str) -> LLM:
    """Mode is a compiler, or a compiler and a fusion: `inductor+silu_mul`."""
    compile, _, fusion = mode.partition("+")
    fusions = (fusion,) if fusion else ()
    sizes = {"max_model_len": 1024, "num_kv_blocks": 1024}  # several engines share the memory
    return LLM(model, device=device, dtype=dtype, compile=compile, fusions=fusions, **sizes)


def measure_start(model: str, device: str, dtype: str) -> dict:
    """Seconds to trace and to compile or load, in a new process each time."""
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("cold", "warm"):
            environment = {
                **os.environ,
                "TORCHINDUCTOR_CACHE_DIR": str(Path(folder, f"inductor-{name}")),
                "MINIVLLM_BENCHMARK_ARTIFACTS": folder,
            }
            command = [sys.executable, "-m", "benchmarks.compile", "--child", "--model", model]
            command += ["--device", device, "--dtype", dtype]
            output = subprocess.run(
                command, env=environment, check=True, capture_output=True, text=True
            )
            results[name] = json.loads(output.stdout.strip().splitlines()[-1])
    results["ratio_compile_or_load"] = results["cold"]["seconds"] / results["warm"]["seconds"]
    results["ratio_whole_start"] = results["cold"]["start"] / results["warm"]["start"]
    return results


def child(model: str, device: str, dtype: str) -> None:
    import minivllm.compilation.wrapper as wrapper

    artifacts = Path(os.environ["MINIVLLM_BENCHMARK_ARTIFACTS"])
    wrapper.cache_root = lambda: artifacts
    start = time.perf_counter()
    llm = make_llm(model, device, dtype, "inductor")
    seconds = time.perf_counter() - start
    print(json.dumps({"start": seconds, **llm.stats()["compilation"]}))


def measure_speed(
    model: str, device: str, dtype: str, repeats: int, modes: tuple[str, ...]
) -> list[dict]:
    rng = random.Random(0)
    engines = {mode: make_llm(model, device, dtype, mode) for mode in modes}
    lengths = [(rng.randint(16, 200), rng.randint(8, 40)) for _ in range(16)]
    cases = {"batch 1": [(32, 64)], "16 mixed prompts": lengths}
    rows = []
    for name, sizes in cases.items():
        prompts = [[rng.randrange(3, 1000) for _ in range(n)] for n, _ in sizes]
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for _, n in sizes]
        tokens = sum(n for _, n in sizes)
        times: dict[str, list[float]] = {mode: [] for mode in modes}
        for repeat in range(repeats + 1):
            for mode, llm in engines.items():
                llm.engine.core.kv_cache.pool.reset_index()
                seconds = timed(partial(llm.generate, prompts, params), device)
                if repeat > 0:
                    times[mode].append(seconds)
        row = {"case": name}
        row |= {f"{m}_tokens_per_s": tokens / statistics.median(t) for m, t in times.items()}
        for mode in modes[1:]:
            # A fusion is compared with what Inductor does by itself.
            base = "inductor" if "+" in mode else "none"
            ratios = [b / m for b, m in zip(times[base], times[mode])]
            row[f"{mode}_over_{base}"] = statistics.median(ratios)
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--fusions", action="store_true", help="each fusion pass, too")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.model, args.device, args.dtype)
        return
    modes = MODES + tuple(f"inductor+{name}" for name in FUSION_NAMES) * args.fusions
    command = f"python -m benchmarks.compile --model {args.model} --device {args.device}"
    report = {
        "command": command + " --fusions" * args.fusions,
        "device": device_name(args.device),
        "versions": {
            "minivllm": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "start": measure_start(args.model, args.device, args.dtype),
        "speed": measure_speed(args.model, args.device, args.dtype, args.repeats, modes),
    }
    print(json.dumps(report["start"]))
    if args.output:
        args.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
