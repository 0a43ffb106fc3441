"""How fast Triton attention is, beside a plain copy and a plain matrix product on the same GPU.

Decode reads the KV cache once, so its figure is GB/s and its ceiling a copy's; prefill computes, so
its figure is TFLOP/s and its ceiling a large matrix product's. All are measured in one run:

    python -m benchmarks.attention --output attention.json
    python -m benchmarks.attention --sweep --output attention_sweep.json    # other tiles and splits

Launches are recorded in a CUDA graph and replayed, so the host's time to launch is not in them; the
caches that the launches of one graph read are together larger than the L2 cache.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import triton

from minivllm.attention.backend import AttentionMetadata
from minivllm.attention.triton_backend import decode_tile, prefill_tile
from minivllm.attention.triton_decode import DecodeScratch, decode_attention, num_kv_splits
from minivllm.attention.triton_kernels import Tile
from minivllm.attention.triton_prefill import prefill_attention

BLOCK_SIZE = 16
NUM_HEADS = 32
NUM_KV_HEADS = 8
DTYPE = torch.bfloat16
HEAD_SIZES = (128, 64)
BYTES_BEYOND_L2 = 256 * 2**20

DECODE_TILES = [
    Tile(16, 32, 2, 4),
    Tile(16, 32, 4, 3),
    Tile(16, 32, 4, 5),
    Tile(16, 64, 2, 3),
    Tile(16, 64, 4, 2),
    Tile(16, 64, 4, 3),
    Tile(16, 64, 4, 4),
    Tile(16, 64, 8, 3),
    Tile(16, 128, 4, 2),
    Tile(16, 128, 4, 3),
    Tile(16, 128, 8, 2),
    Tile(16, 128, 8, 3),
]
PREFILL_TILES = [
    Tile(64, 32, 4, 4),
    Tile(64, 64, 4, 2),
    Tile(64, 64, 4, 3),
    Tile(64, 128, 4, 2),
    Tile(128, 32, 8, 3),
    Tile(128, 64, 4, 3),
    Tile(128, 64, 8, 2),
    Tile(128, 64, 8, 3),
    Tile(128, 64, 8, 4),
    Tile(128, 128, 8, 2),
    Tile(128, 128, 8, 3),
]
DECODE_SPLITS = {64: (1, 2, 3, 4, 8), 1: (1, 4, 8, 16, 32, 64)}


@dataclass
class Row:
    """One measurement. `rate` is in GB/s for decode and copy, in TFLOP/s for the others."""

    name: str
    head_size: int
    batch: int
    query_len: int
    context_len: int
    microseconds: float
    rate: float
    unit: str
    fraction_of_ceiling: float
    tile: Tile | None = None
    num_splits: int | None = None


@dataclass
class Step:
    """Tensors of one attention launch; random values, and blocks in random order."""

    query: torch.Tensor
    kv_cache: torch.Tensor
    output: torch.Tensor
    metadata: AttentionMetadata


@dataclass
class Report:
    """All rows of a run, and where they come from."""

    command: str
    device: str
    versions: dict[str, str]
    copy_gb_per_s: float
    matmul_tflop_per_s: float
    rows: list[Row] = field(default_factory=list)


def make_step(batch: int, query_len: int, context_len: int, head_size: int) -> Step:
    seq_len = query_len + context_len
    blocks_per_seq = -(-seq_len // BLOCK_SIZE)
    num_blocks = batch * blocks_per_seq + 1
    cache_shape = (2, num_blocks, BLOCK_SIZE, NUM_KV_HEADS, head_size)
    table = torch.randperm(num_blocks - 1, device="cuda").int().view(batch, -1) + 1
    query = torch.randn(batch * query_len, NUM_HEADS, head_size, dtype=DTYPE, device="cuda")
    starts = torch.arange(batch + 1, dtype=torch.int32, device="cuda") * query_len
    metadata = AttentionMetadata(
        num_actual_tokens=batch * query_len,
        num_reqs=batch,
        num_decodes=batch if query_len == 1 else 0,
        query_start_loc=starts,
        seq_lens=torch.full((batch,), seq_len, dtype=torch.int32, device="cuda"),
        block_table=table,
        slot_mapping=torch.empty(0, dtype=torch.int64, device="cuda"),  # nothing is written here
        max_query_len=query_len,
        max_seq_len=seq_len,
        query_lens_cpu=[query_len] * batch,
        seq_lens_cpu=[seq_len] * batch,
    )
    cache = torch.randn(cache_shape, dtype=DTYPE, device="cuda")
    return Step(query, cache, torch.empty_like(query), metadata)


def make_steps(batch: int, query_len: int, context_len: int, head_size: int) -> list[Step]:
    """As many equal steps as it takes for their caches not to fit into L2 together."""
    first = make_step(batch, query_len, context_len, head_size)
    cache_bytes = first.kv_cache.numel() * first.kv_cache.element_size()
    count = min(64, max(1, BYTES_BEYOND_L2 // cache_bytes))
    return [first, *(make_step(batch, query_len, context_len, head_size) for _ in range(count - 1))]


def microseconds(launches: list[Callable[[], object]], repeats: int = 15) -> float:
    """Median time of one launch, replayed from a graph that holds them all."""
    for launch in launches:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    times = []
    for i in range(repeats + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if i >= 3:
            times.append(start.elapsed_time(end) * 1000 / len(launches))
    return statistics.median(times)


def measure_copy() -> float:
    """GB/s, read and written bytes together, of the better of two copies.

    A recorded `copy_` is run by the copy engine, which an H200 gives two thirds of the bandwidth
    that a kernel reaches; the ceiling must be the higher one.
    """
    source = torch.randn(2**30, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    copies = [lambda: target.copy_(source), lambda: torch.mul(source, 1.0, out=target)]
    return max(2 * source.nbytes / microseconds([copy]) / 1e3 for copy in copies)


def measure_matmul(size: int = 8192) -> float:
    a, b = (torch.randn(size, size, dtype=DTYPE, device="cuda") for _ in range(2))
    c = torch.empty_like(a)
    return 2 * size**3 / microseconds([lambda: torch.mm(a, b, out=c)] * 4) / 1e6


def make_scratch(num_rows: int, head_size: int) -> DecodeScratch:
    return DecodeScratch(num_rows, head_size, torch.device("cuda"))


def measure_decode(steps: list[Step], tile: Tile, num_splits: int, ceiling: float) -> Row:
    batch, head_size = steps[0].metadata.num_decodes, steps[0].query.shape[2]
    scratch = make_scratch(batch * NUM_HEADS * num_splits, head_size)

    def launch(step: Step) -> Callable[[], None]:
        return lambda: decode_attention(
            step.query,
            step.kv_cache,
            step.output,
            step.metadata,
            head_size**-0.5,
            tile,
            num_splits,
            scratch,
        )

    time = microseconds([launch(step) for step in steps])
    seq_len = steps[0].metadata.max_seq_len
    moved = 2 * (batch * seq_len * NUM_KV_HEADS + batch * NUM_HEADS) * head_size * DTYPE.itemsize
    rate = moved / time / 1e3
    return Row("decode", head_size, batch, 1, seq_len - 1, time, rate, "GB/s", rate / ceiling,
               tile, num_splits)  # fmt: skip


def measure_prefill(step: Step, tile: Tile, ceiling: float) -> Row:
    head_size = step.query.shape[2]
    metadata = step.metadata
    query_len, context_len = metadata.max_query_len, metadata.max_seq_len - metadata.max_query_len
    time = microseconds(
        [
            lambda: prefill_attention(
                step.query, step.kv_cache, step.output, metadata, 0, head_size**-0.5, tile
            )
        ]
        * 2
    )
    pairs = query_len * context_len + query_len * (query_len + 1) / 2
    rate = 4 * pairs * NUM_HEADS * head_size * metadata.num_reqs / time / 1e6
    return Row("prefill", head_size, metadata.num_reqs, query_len, context_len, time, rate,
               "TFLOP/s", rate / ceiling, tile)  # fmt: skip


def measure(report: Report) -> None:
    """The constants that the backend chooses."""
    num_sms = torch.cuda.get_device_properties("cuda").multi_processor_count
    for head_size in HEAD_SIZES:
        for batch, context_len in ((64, 2047), (8, 2047), (1, 127), (1, 2047), (1, 8191)):
            steps = make_steps(batch, 1, context_len, head_size)
            splits = num_kv_splits(batch, NUM_KV_HEADS, context_len + 1, num_sms)
            tile = decode_tile(head_size, DTYPE)
            add(report, measure_decode(steps, tile, splits, report.copy_gb_per_s))
        for query_len, context_len in ((8192, 0), (2048, 6144), (512, 0)):
            step = make_step(1, query_len, context_len, head_size)
            tile = prefill_tile(head_size, DTYPE)
            add(report, measure_prefill(step, tile, report.matmul_tflop_per_s))


def sweep(report: Report) -> None:
    """Every candidate; those that do not fit the GPU are left out. The best come last."""
    for head_size in HEAD_SIZES:
        for batch, split_counts in DECODE_SPLITS.items():
            steps = make_steps(batch, 1, 2047, head_size)
            best = decode_tile(head_size, DTYPE)
            rows = [measure_decode(steps, best, n, report.copy_gb_per_s) for n in split_counts]
            num_splits = max(rows, key=lambda row: row.rate).num_splits or 1
            rows += candidates(
                DECODE_TILES,
                lambda tile, steps=steps, n=num_splits: measure_decode(
                    steps, tile, n, report.copy_gb_per_s
                ),
            )
            add(report, *sorted(rows, key=lambda row: row.rate))
        step = make_step(1, 8192, 0, head_size)
        rows = candidates(
            PREFILL_TILES,
            lambda tile, step=step: measure_prefill(step, tile, report.matmul_tflop_per_s),
        )
        add(report, *sorted(rows, key=lambda row: row.rate))


def candidates(tiles: list[Tile], measure_one: Callable[[Tile], Row]) -> list[Row]:
    rows = []
    for tile in tiles:
        try:
            rows.append(measure_one(tile))
        except triton.runtime.errors.OutOfResources:
            print(f"{tile}: does not fit into shared memory or registers", flush=True)
    return rows


def add(report: Report, *rows: Row) -> None:
    report.rows += rows
    for row in rows:
        tile = row.tile
        print(
            f"{row.name:8} d={row.head_size:<4} batch={row.batch:<3} q={row.query_len:<5}"
            f"ctx={row.context_len:<5} {row.microseconds:10.1f} us {row.rate:8.1f} {row.unit:8}"
            f"{row.fraction_of_ceiling:6.1%}  splits={row.num_splits or '-':<3} "
            f"tile={tile.block_m if tile else 0}x{tile.block_n if tile else 0} "
            f"warps={tile.num_warps if tile else 0} stages={tile.num_stages if tile else 0}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sweep", action="store_true", help="measure other tiles and splits")
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this measures a GPU, and torch sees none")
    torch.manual_seed(0)
    report = Report(
        command=f"python -m benchmarks.attention {'--sweep ' * arguments.sweep}"
        f"--output {arguments.output.name}",
        device=torch.cuda.get_device_name(),
        versions={
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "cuda": str(torch.version.cuda),
        },
        copy_gb_per_s=measure_copy(),
        matmul_tflop_per_s=measure_matmul(),
    )
    print(f"{report.device}, {report.versions}")
    print(f"copy {report.copy_gb_per_s:.0f} GB/s, product {report.matmul_tflop_per_s:.0f} TFLOP/s")
    if arguments.sweep:
        sweep(report)
    else:
        measure(report)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(asdict(report), indent=1) + "\n")


if __name__ == "__main__":
    main()
