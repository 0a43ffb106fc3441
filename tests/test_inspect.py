"""Recordings say what the engine did, change nothing of it, and can be drawn."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest

from minivllm.config import SchedulerConfig
from minivllm.engine.kv_cache import KVCacheManager
from minivllm.engine.request import FinishReason, Request
from minivllm.engine.scheduler import Scheduler
from minivllm.inspect import (
    Recording,
    draw_block_tables,
    draw_budget,
    draw_free_queue,
    draw_gap,
    draw_ownership,
    draw_timeline,
    draw_token_times,
    token_times,
)
from minivllm.inspect.style import PALETTE, color_of, text_on, tint
from minivllm.sampling_params import SamplingParams
from tests.fake_worker import FakeWorker


class Engine:
    def __init__(
        self, num_blocks: int = 16, block_size: int = 4, budget: int = 64, caching: bool = True
    ) -> None:
        self.kv = KVCacheManager(num_blocks, block_size, caching)
        config = SchedulerConfig(max_num_batched_tokens=budget, max_num_seqs=8)
        self.scheduler = Scheduler(config, self.kv, max_model_len=1000)
        self.worker = FakeWorker(num_blocks, block_size)

    def add(self, name: str, prompt: list[int], max_tokens: int) -> Request:
        request = Request(name, prompt, SamplingParams(max_tokens=max_tokens), max_tokens)
        self.scheduler.add_request(request)
        return request

    def step(self) -> None:
        plan = self.scheduler.schedule()
        self.scheduler.update(plan, self.worker.execute(plan))

    def run(self) -> None:
        while self.scheduler.has_unfinished_requests:
            self.step()


def busy_engine() -> tuple[Engine, Recording]:
    """Chunks, hits, evictions, preemptions and waiting, in one short run."""
    engine = Engine(num_blocks=8, budget=12)
    recording = Recording(engine.scheduler)
    engine.add("A", list(range(9)), 8)
    engine.step()
    engine.add("B", list(range(20, 40)), 6)
    engine.add("C", list(range(9)), 5)
    engine.add("D", [5] * 6, 3)
    engine.run()
    engine.add("E", list(range(20, 38)), 8)
    engine.step()
    engine.add("F", [*range(20, 30), 3], 8)
    engine.run()
    return engine, recording


def test_a_recording_tells_chunks_and_single_tokens_apart() -> None:
    engine = Engine(budget=4)
    recording = Recording(engine.scheduler)
    engine.add("A", list(range(10)), 3)
    engine.run()
    assert recording.outcome("A") == [
        "prefill 4",
        "prefill 4",
        "prefill 2",
        "decode 1",
        "decode 1",
    ]
    works = [step.work[0] for step in recording.steps]
    assert [work.start for work in works] == [0, 4, 8, 10, 11]
    assert [work.sampled for work in works] == [False, False, True, True, True]
    assert recording.steps[-1].finished == ["A"]


def test_a_prompt_of_one_token_is_no_decode() -> None:
    engine = Engine()
    recording = Recording(engine.scheduler)
    engine.add("A", [1], 2)
    engine.run()
    assert recording.outcome("A") == ["prefill 1", "decode 1"]


def test_a_recording_shows_who_is_preempted_and_what_is_computed_again() -> None:
    engine = Engine(num_blocks=4, caching=False)
    recording = Recording(engine.scheduler)
    engine.add("first", [1] * 7, 6)
    engine.add("second", [2] * 7, 6)
    engine.run()
    outcome = recording.outcome("second")
    lost = outcome.index("preempted")
    assert outcome[lost + 1] == "waiting"
    assert "recompute" in next(o for o in outcome[lost:] if o not in ("preempted", "waiting"))
    assert "preempted" not in recording.outcome("first")
    assert "second" not in recording.steps[lost].during.tables


def test_a_recording_shows_hits_and_indexed_blocks() -> None:
    engine = Engine()
    recording = Recording(engine.scheduler)
    engine.add("A", list(range(10)), 1)
    engine.run()
    engine.add("B", [*range(10), 99], 1)
    engine.run()
    assert recording.steps[0].indexed == [1, 2]
    assert recording.steps[1].hit_blocks == {"B": [1, 2]}
    assert recording.outcome("B") == ["", "8 cached + prefill 3"]
    assert recording.steps[0].during.owners(1) == ["A"]
    assert recording.steps[0].after.owners(1) == []


def test_a_recording_shows_evicted_blocks_in_the_step_that_takes_them() -> None:
    engine = Engine(num_blocks=4)
    recording = Recording(engine.scheduler)
    engine.add("A", list(range(12)), 1)
    engine.run()
    engine.add("B", [7] * 7, 1)
    engine.run()
    assert [step.evicted for step in recording.steps] == [[], [3]]


def test_the_filled_part_of_a_block_is_what_its_owner_has_computed() -> None:
    engine = Engine()
    recording = Recording(engine.scheduler)
    engine.add("A", list(range(6)), 3)
    engine.run()
    filled = [[step.during.num_filled(block, 4) for block in (1, 2, 3)] for step in recording.steps]
    assert filled == [[4, 2, 0], [4, 3, 0], [4, 4, 0]]


def test_a_step_without_work_is_not_recorded() -> None:
    engine = Engine()
    with Recording(engine.scheduler) as recording:
        engine.step()
    assert recording.steps == []


def test_recording_changes_no_token_and_ends_without_a_trace() -> None:
    plain, watched = Engine(num_blocks=5, budget=6), Engine(num_blocks=5, budget=6)
    with Recording(watched.scheduler) as recording:
        requests = [
            [engine.add(name, [i] * 6, 6) for i, name in enumerate("AB")]
            for engine in (plain, watched)
        ]
        plain.run()
        watched.run()
    assert [r.output_token_ids for r in requests[0]] == [r.output_token_ids for r in requests[1]]
    assert vars(plain.scheduler).keys() == vars(watched.scheduler).keys()
    num_steps = len(recording.steps)
    watched.add("C", [1], 1)
    watched.run()
    assert len(recording.steps) == num_steps


def test_a_step_that_is_updated_after_the_next_was_planned_keeps_its_own_events() -> None:
    engine = Engine()
    recording = Recording(engine.scheduler)
    engine.add("A", list(range(8)), 1)
    first = engine.scheduler.schedule()
    sampled_first = engine.worker.execute(first)
    engine.add("B", [9] * 4, 1)
    second = engine.scheduler.schedule()
    sampled_second = engine.worker.execute(second)
    engine.scheduler.update(first, sampled_first)
    engine.scheduler.update(second, sampled_second)
    assert [step.finished for step in recording.steps] == [["A"], ["B"]]


def test_an_aborted_request_leaves_the_pictures_intact() -> None:
    engine = Engine()
    recording = Recording(engine.scheduler)
    engine.add("A", [1] * 6, 9)
    engine.step()
    engine.scheduler.finish("A", FinishReason.ABORT)
    engine.add("B", [2] * 6, 2)
    engine.run()
    assert recording.request_ids == ["A", "B"]
    assert draw_ownership(recording).axes


def test_token_times_are_one_per_sampled_token_and_rise() -> None:
    engine = Engine(budget=4)
    recording = Recording(engine.scheduler)
    request = engine.add("A", list(range(10)), 5)
    engine.run()
    times = token_times(recording, "A")
    assert len(times) == request.num_output_tokens
    assert times == sorted(times)
    assert times[0] > 0


def test_the_budget_picture_has_a_piece_for_each_share_with_its_height() -> None:
    _, recording = busy_engine()
    axes = draw_budget(recording).axes[0]
    heights = [round(bar.get_height()) for bar in axes.patches]
    assert heights == [work.count for step in recording.steps for work in step.work]


def test_the_timeline_marks_preemptions_and_ends() -> None:
    _, recording = busy_engine()
    axes = draw_timeline(recording).axes[0]
    texts = [text.get_text() for text in axes.texts]
    assert texts.count("✕") == sum(len(step.preempted) for step in recording.steps) > 0
    assert texts.count("✓") == 6


def test_the_ownership_picture_marks_every_eviction_and_hit() -> None:
    _, recording = busy_engine()
    axes = draw_ownership(recording, "title").axes[0]
    texts = [text.get_text() for text in axes.texts]
    assert texts.count("✕") == sum(len(step.evicted) for step in recording.steps) > 0
    hits = [block for step in recording.steps for b in step.hit_blocks.values() for block in b]
    assert texts.count("○") == len(hits) > 0


def test_the_block_table_picture_shows_each_computed_token_in_its_slot() -> None:
    engine = Engine(num_blocks=6)
    request = engine.add("A", list(range(6)), 5)
    engine.step()
    engine.step()
    axes = draw_block_tables(engine.kv, [request]).axes[0]
    texts = [text.get_text() for text in axes.texts]
    assert [t for t in texts if t.startswith("table")] == ["table[0] = 1", "table[1] = 2"]
    # Position 5 lies in block 2, second slot: blocks are drawn four slots and a half apart.
    at = {text.get_position(): text.get_text() for text in axes.texts}
    assert at[2 * 4.5 + 1.5, 0.4] == "5"
    assert at[2 * 4.5 + 1.5, -0.2] == str(2 * 4 + 1)


def test_all_pictures_can_be_saved() -> None:
    engine, recording = busy_engine()
    request = engine.add("G", [1, 2, 3], 4)
    engine.step()
    for figure in (
        draw_budget(recording),
        draw_timeline(recording),
        draw_gap(recording, "B"),
        draw_ownership(recording),
        draw_block_tables(engine.kv, [request]),
        draw_free_queue(engine.kv.pool),
        draw_token_times({"one": recording, "two": recording}, "A"),
    ):
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png")
        assert buffer.getvalue().startswith(b"\x89PNG")


def test_requests_have_different_colours_and_readable_text() -> None:
    names = [str(i) for i in range(len(PALETTE))]
    assert len({color_of(name, names) for name in names}) == len(PALETTE)
    assert text_on("#000000") == "white"
    assert text_on("#FFFFFF") != "white"
    assert tint("#000000", 0.25) == pytest.approx((0.75, 0.75, 0.75))


def test_importing_the_helper_does_not_import_matplotlib_or_torch() -> None:
    code = "import sys, minivllm.inspect; print({'matplotlib', 'torch'} & set(sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "set()"
