"""Tokens per second of minivllm and of `transformers.generate`, side by side in one process.

Three cases: one prompt; 16 prompts of equal length; 32 prompts of mixed lengths, which transformers
can only serve as one padded batch. Both get the same weights, prompts and numbers of tokens, decode
greedily and ignore the end of sequence. The runs alternate, so that a noisy machine disturbs both;
the ratio is taken within each pair and its median reported.

    OMP_NUM_THREADS=1 python benchmarks/generate.py --output benchmarks/results/generate-cpu.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from minivllm import LLM, SamplingParams, __version__
from minivllm.models.source import find_model


@dataclass(frozen=True)
class Case:
    """Prompts and the number of tokens each is to get."""

    name: str
    prompts: list[list[int]]
    num_tokens: list[int]

    @property
    def total(self) -> int:
        return sum(self.num_tokens)


def make_cases(vocab_size: int) -> list[Case]:
    rng = random.Random(0)

    def prompt(length: int) -> list[int]:
        return [rng.randrange(3, vocab_size) for _ in range(length)]

    mixed_in = [rng.randint(16, 512) for _ in range(32)]
    mixed_out = [rng.randint(16, 128) for _ in range(32)]
    return [
        Case("batch 1", [prompt(64)], [128]),
        Case("16 equal prompts", [prompt(128) for _ in range(16)], [64] * 16),
        Case("32 mixed prompts", [prompt(n) for n in mixed_in], mixed_out),
    ]


def run_minivllm(llm: LLM, case: Case) -> list[list[int]]:
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in case.num_tokens]
    outputs = llm.generate([{"prompt_token_ids": p} for p in case.prompts], params)
    return [output.outputs[0].token_ids for output in outputs]


def run_transformers(model: PreTrainedModel, case: Case) -> list[list[int]]:
    """One padded batch; each prompt's first `num_tokens` new tokens count."""
    longest, steps = max(map(len, case.prompts)), max(case.num_tokens)
    ids = [[0] * (longest - len(p)) + p for p in case.prompts]
    mask = [[0] * (longest - len(p)) + [1] * len(p) for p in case.prompts]
    device = model.device
    generated = model.generate(
        torch.tensor(ids, device=device),
        attention_mask=torch.tensor(mask, device=device),
        do_sample=False,
        min_new_tokens=steps,
        max_new_tokens=steps,
        pad_token_id=0,
    )
    return [row[longest : longest + n].tolist() for row, n in zip(generated, case.num_tokens)]


def timed(function: Callable[[], object], device: str) -> float:
    """Seconds; of CPU time where one thread does all the work, since no other job disturbs that."""
    clock = time.process_time if cpu_clock(device) else time.perf_counter
    if device == "cuda":
        torch.cuda.synchronize()
    start = clock()
    function()
    if device == "cuda":
        torch.cuda.synchronize()
    return clock() - start


def cpu_clock(device: str) -> bool:
    return device == "cpu" and torch.get_num_threads() == 1


def measure(llm: LLM, model: PreTrainedModel, case: Case, repeats: int, device: str) -> dict:
    ours, theirs = run_minivllm(llm, case), run_transformers(model, case)  # warm-up, and a check
    agreement = sum(a == b for a, b in zip(ours, theirs)) / len(ours)
    pairs = []
    for _ in range(repeats):
        # Prompts are the same each time: without this, all but the first run would skip prefill.
        llm.engine.core.kv_cache.pool.reset_index()
        pairs.append(
            (
                timed(lambda: run_minivllm(llm, case), device),
                timed(lambda: run_transformers(model, case), device),
            )
        )
    ratios = [theirs / ours for ours, theirs in pairs]
    return {
        "case": case.name,
        "output_tokens": case.total,
        "minivllm_tokens_per_s": case.total / statistics.median(p[0] for p in pairs),
        "transformers_tokens_per_s": case.total / statistics.median(p[1] for p in pairs),
        "ratio_median": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "identical_outputs": agreement,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    folder = find_model(args.model).folder
    llm = LLM(args.model, device=args.device, dtype=args.dtype, max_model_len=1024)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, args.dtype))
    model = model.to(args.device).eval()
    results = []
    for case in make_cases(model.config.vocab_size):
        results.append(measure(llm, model, case, args.repeats, args.device))
        print(json.dumps(results[-1]), flush=True)
    report = {
        "command": "python " + " ".join([os.path.relpath(sys.argv[0]), *sys.argv[1:]]),
        "device": device_name(args.device),
        "threads": torch.get_num_threads(),
        "clock": "CPU time" if cpu_clock(args.device) else "wall time",
        "versions": {
            "minivllm": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "results": results,
    }
    if args.output:
        args.output.write_text(json.dumps(report, indent=1) + "\n")


def device_name(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return f"{line.split(':')[1].strip()}, {os.cpu_count()} cores"
    return platform.processor()


if __name__ == "__main__":
    main()
