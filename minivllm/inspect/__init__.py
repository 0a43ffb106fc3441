"""What happened inside: records the steps of real engine objects and draws them.

    with Recording(llm.engine.core.scheduler) as recording:
        llm.generate(prompts)
    draw_budget(recording)

Recording needs nothing but the engine; drawing needs matplotlib, imported when the first picture is
drawn. All pictures are matplotlib figures, which a notebook shows by itself.
"""

from minivllm.inspect.blocks import draw_block_tables, draw_free_queue, draw_ownership
from minivllm.inspect.recording import PoolState, Recording, Step, Work
from minivllm.inspect.schedule import (
    draw_budget,
    draw_gap,
    draw_timeline,
    draw_token_times,
    token_times,
)

__all__ = [
    "PoolState",
    "Recording",
    "Step",
    "Work",
    "draw_block_tables",
    "draw_budget",
    "draw_free_queue",
    "draw_gap",
    "draw_ownership",
    "draw_timeline",
    "draw_token_times",
    "token_times",
]
