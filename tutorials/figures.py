"""Draws the figures of the pages on the scheduler and the KV cache, from runs of the real objects.

    python tutorials/figures.py [FOLDER]   # docs/modules/figures if no folder is given

Every figure carries what it shows as text (the SVG's description), so that a test can see whether the
committed file is still what the engine does.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from minivllm.config import SchedulerConfig
from minivllm.engine.kv_cache import KVCacheManager
from minivllm.engine.request import Request
from minivllm.engine.scheduler import Scheduler
from minivllm.inspect import (
    Recording,
    draw_block_tables,
    draw_budget,
    draw_gap,
    draw_ownership,
    draw_timeline,
)
from minivllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIGURES = Path(__file__).resolve().parent.parent / "docs" / "modules" / "figures"


class Stage:
    """A scheduler and a cache whose "model" gives every request some next token."""

    def __init__(self, num_blocks: int, budget: int, caching: bool = True) -> None:
        self.kv_cache = KVCacheManager(num_blocks, block_size=4, enable_caching=caching)
        config = SchedulerConfig(max_num_batched_tokens=budget, max_num_seqs=8)
        self.scheduler = Scheduler(config, self.kv_cache, max_model_len=10_000)
        self.recording = Recording(self.scheduler)
        self._tokens = itertools.count(1000)

    def add(self, name: str, prompt: range, max_tokens: int) -> Request:
        """Queues a request."""
        request = Request(name, prompt, SamplingParams(max_tokens=max_tokens), max_tokens)
        self.scheduler.add_request(request)
        return request

    def step(self) -> None:
        """One step of the engine."""
        plan = self.scheduler.schedule()
        requests = [self.scheduler.requests[name] for name in plan.num_scheduled_tokens]
        closed = [r.request_id for r in requests if r.num_computed_tokens == r.num_tokens]
        self.scheduler.update(plan, {name: next(self._tokens) for name in closed})

    def run(self) -> None:
        """Steps until nothing is left to do."""
        while self.scheduler.has_unfinished_requests:
            self.step()


def chunks() -> Recording:
    """A long prompt arrives beside a request that is generating."""
    stage = Stage(num_blocks=64, budget=8, caching=False)
    stage.add("A", range(3), 9)
    stage.step()
    stage.step()
    stage.add("B", range(20), 4)
    stage.run()
    return stage.recording


def preemption() -> Recording:
    """Three requests in a pool that is too small for all of them."""
    stage = Stage(num_blocks=6, budget=16, caching=False)
    stage.add("A", range(6), 8)
    stage.add("B", range(5), 8)
    stage.add("C", range(3), 4)
    stage.run()
    return stage.recording


def shared_prefix() -> tuple[Stage, list[Request]]:
    """Two requests with a common prefix, stopped while both run."""
    stage = Stage(num_blocks=8, budget=64)
    requests = [stage.add("A", range(11), 8)]
    stage.step()
    requests.append(stage.add("B", range(9), 8))
    stage.step()
    return stage, requests


def life_of_blocks() -> Recording:
    """Filling, sharing, keeping, evicting and finding again."""
    stage = Stage(num_blocks=7, budget=64)
    stage.add("A", range(16), 3)
    stage.run()
    stage.add("B", range(100, 111), 8)
    stage.run()
    stage.add("C", range(17), 4)
    stage.step()
    stage.add("D", range(18), 3)
    stage.run()
    return stage.recording


def describe(recording: Recording) -> str:
    """A recording in words."""
    lines = [f"{name}: {recording.outcome(name)}" for name in recording.request_ids]
    lines += [f"step {s.number}: evicted {s.evicted}, hits {s.hit_blocks}" for s in recording.steps]
    return "; ".join(lines)


def figures() -> dict[str, tuple[Figure, str]]:
    """All figures, by file name, with what they show in words."""
    chunked, cramped, blocks = chunks(), preemption(), life_of_blocks()
    stage, requests = shared_prefix()
    tables = {r.request_id: stage.kv_cache.block_table(r.request_id) for r in requests}
    return {
        "scheduler-gap.svg": (draw_gap(chunked, "B", "B's two counters"), describe(chunked)),
        "scheduler-budget.svg": (draw_budget(chunked), describe(chunked)),
        "scheduler-preemption.svg": (draw_timeline(cramped), describe(cramped)),
        "kv-cache-tables.svg": (draw_block_tables(stage.kv_cache, requests), str(tables)),
        "kv-cache-blocks.svg": (draw_ownership(blocks), describe(blocks)),
    }


def write_figures(folder: Path) -> list[Path]:
    """Writes all figures into a folder, as SVG without dates or random names."""
    from matplotlib import rc_context

    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    with rc_context({"svg.hashsalt": "minivllm"}):
        for name, (figure, description) in figures().items():
            metadata = {"Date": None, "Creator": None, "Description": description}
            figure.savefig(folder / name, format="svg", metadata=metadata)
            paths.append(folder / name)
    return paths


if __name__ == "__main__":
    for path in write_figures(Path(sys.argv[1]) if len(sys.argv) > 1 else FIGURES):
        print("wrote", path.name)
