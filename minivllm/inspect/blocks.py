"""Pictures of the paged KV cache: who owns which block, and where a request's tokens lie.

`draw_ownership` takes a `Recording`; the others look at a real `KVCacheManager` as it is now.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from minivllm.engine.kv_cache import NULL_BLOCK, BlockPool, KVCacheManager
from minivllm.engine.request import Request
from minivllm.inspect.recording import PoolState, Recording, Step
from minivllm.inspect.style import (
    ALARM,
    INK,
    MUTED,
    PALE,
    add_legend,
    bare,
    color_of,
    new_figure,
    text_on,
    tint,
)

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KEPT_HATCH = "////"


def draw_ownership(recording: Recording, title: str = "") -> Figure:
    """Draws blocks (rows) over steps (columns), coloured by owner; the last column is the end.

    The strong part of a cell is what its owner has filled. A cell with two owners is split. Hatched
    cells have no owner, but content that the index still knows, in the colour of who computed it.
    A cross is content given up in this step, a ring is a hit in the prefix cache.

    Args:
        recording: With at least one step.
        title: Above the picture.
    """
    steps, num_blocks = recording.steps, recording.num_blocks
    figure, axes = new_figure(
        max(5.5, 1.9 + 0.55 * (len(steps) + 1)), max(2.6, 1.5 + 0.36 * (num_blocks + 1))
    )
    last_owner: dict[int, str] = {}
    for step in steps:
        for block in range(num_blocks + 1):
            _draw_block(axes, recording, step.during, step.number, block, last_owner)
        _mark_events(axes, step)
    for block in range(num_blocks + 1):
        _draw_block(axes, recording, steps[-1].after, len(steps) + 1, block, last_owner)
    axes.set_xlim(0.45, len(steps) + 1.55)
    axes.set_ylim(num_blocks + 0.55, -1.15 if any(step.preempted for step in steps) else -0.6)
    axes.set_yticks(range(num_blocks + 1), ["0 (null)", *map(str, range(1, num_blocks + 1))])
    labels = [str(step.number) for step in steps]
    axes.set_xticks(range(1, len(steps) + 2), [*labels, "end"])
    axes.tick_params(length=0)
    axes.set_xlabel("step", fontsize=9)
    axes.set_ylabel("block", fontsize=9)
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.set_title(title, fontsize=11, loc="left")
    add_legend(figure, _ownership_handles(recording))
    return figure


def draw_block_tables(kv_cache: KVCacheManager, requests: Sequence[Request]) -> Figure:
    """Draws how the tokens of one or two requests lie in the pool: table, blocks and slots.

    Above and below are the requests as they see themselves, token after token; between them is the
    pool as it is. The arrows are the block tables. A number in the pool is the position of the
    token there, the small number under it is the slot.

    Args:
        kv_cache: The manager that holds the requests' tables.
        requests: One or two, owning blocks; with at most about twelve blocks of four in the pool,
            everything can be read.
    """
    size, num_blocks = kv_cache.block_size, kv_cache.pool.num_blocks
    figure, axes = new_figure(
        max(7.0, 0.26 * size * (num_blocks + 1)), 2.2 + 1.2 * (len(requests) - 1)
    )
    bare(axes)
    names = [request.request_id for request in requests]
    for row, request in enumerate(requests):
        y = 2.3 if row == 0 else -2.2
        _draw_tokens(axes, kv_cache, request, color_of(request.request_id, names), y)
    for block in range(num_blocks + 1):
        _draw_slots(axes, kv_cache, requests, block)
    axes.text(-0.3, 0.4, "pool", ha="right", va="center", fontsize=9.5, color=INK)
    axes.set_xlim(-2.6, (num_blocks + 1) * (size + 0.5))
    axes.set_ylim(-2.7 if len(requests) > 1 else -0.5, 3.6)
    return figure


def draw_free_queue(pool: BlockPool) -> Figure:
    """Draws the free queue, next to be taken first. Hatched blocks hold content that can be found.

    Args:
        pool: As it is now.
    """
    blocks = list(pool.free_queue)
    figure, axes = new_figure(max(5.0, 1.6 + 0.62 * len(blocks)), 1.25)
    bare(axes)
    for place, block in enumerate(blocks):
        block_hash = pool.hashes[block]
        known = block_hash is not None
        face = tint("#0072B2", 0.22) if known else "white"
        _rectangle(axes, place, 0, 0.9, 0.8, face, MUTED, KEPT_HATCH if known else "")
        axes.text(
            place + 0.45,
            0.4,
            str(block),
            ha="center",
            va="center",
            fontsize=10,
            color=INK,
            bbox={"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none"},
        )
        text = block_hash.hex()[:4] if block_hash is not None else "unknown"
        axes.text(place + 0.45, -0.12, text, ha="center", va="top", fontsize=7, color=MUTED)
    axes.text(-0.15, 0.4, "taken next →", ha="right", va="center", fontsize=9, color=INK)
    axes.text(len(blocks) + 0.05, 0.4, "← freed last", va="center", fontsize=9, color=INK)
    axes.set_xlim(-1.9, len(blocks) + 1.7)
    axes.set_ylim(-0.5, 1.0)
    return figure


def _draw_block(
    axes: Axes,
    recording: Recording,
    state: PoolState,
    column: int,
    block: int,
    last_owner: dict[int, str],
) -> None:
    left, bottom = column - 0.46, block + 0.42
    owners = state.owners(block)
    if block == NULL_BLOCK:
        _rectangle(axes, left, bottom, 0.92, -0.84, PALE, "white")
    elif owners:
        filled = state.num_filled(block, recording.block_size) / recording.block_size
        width = 0.92 / len(owners)
        for i, name in enumerate(owners):
            color = color_of(name, recording.request_ids)
            x = left + i * width
            _rectangle(axes, x, bottom, width, -0.84, tint(color, 0.25), "white")
            _rectangle(axes, x, bottom, width, -0.84 * filled, color, "white")
        if last_owner.get(block) not in owners:
            last_owner[block] = owners[0]
    elif state.hashes[block] is not None:
        owner = last_owner.get(block)
        color = color_of(owner, recording.request_ids) if owner else MUTED
        _rectangle(axes, left, bottom, 0.92, -0.84, tint(color, 0.3), "white", KEPT_HATCH)
    else:
        _rectangle(axes, left, bottom, 0.92, -0.84, "white", PALE)


def _mark_events(axes: Axes, step: Step) -> None:
    for block in step.evicted:
        _mark(axes, step.number, block, "✕", ALARM)
    for blocks in step.hit_blocks.values():
        for block in blocks:
            _mark(axes, step.number, block, "○", INK)
    if step.preempted:
        text = "\n".join(f"✕{name}" for name in step.preempted)
        axes.text(step.number, -0.62, text, ha="center", va="bottom", fontsize=8, color=ALARM)


def _mark(axes: Axes, column: int, block: int, sign: str, color: str) -> None:
    axes.text(
        column,
        block,
        sign,
        ha="center",
        va="center",
        fontsize=8,
        color=color,
        bbox={"boxstyle": "circle,pad=0.12", "facecolor": "white", "edgecolor": "none"},
    )


def _ownership_handles(recording: Recording) -> list[Artist]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    names = recording.request_ids
    handles: list[Artist] = [Patch(facecolor=color_of(n, names), label=n) for n in names]
    if any(recording.steps[-1].after.hashes) or any(any(s.during.hashes) for s in recording.steps):
        kept = tint(MUTED, 0.4)
        handles.append(
            Patch(facecolor=kept, hatch=KEPT_HATCH, edgecolor="white", label="free, kept")
        )
    signs = []
    if any(step.evicted for step in recording.steps):
        signs.append(("x", ALARM, "evicted"))
    if any(step.hit_blocks for step in recording.steps):
        signs.append(("o", INK, "prefix hit"))
    for marker, color, label in signs:
        handles.append(
            Line2D([], [], ls="", marker=marker, color=color, mfc="none", ms=6, label=label)
        )
    return handles


def _draw_tokens(
    axes: Axes, kv_cache: KVCacheManager, request: Request, color: str, y: float
) -> None:
    """One request's tokens in their own order, with an arrow from each block to its place."""
    size, above = kv_cache.block_size, y > 0
    axes.text(-0.3, y + 0.4, request.request_id, ha="right", va="center", fontsize=11, color=color)
    for i, block in enumerate(kv_cache.block_table(request.request_id)):
        left = i * (size + 0.5)
        for offset in range(size):
            position = i * size + offset
            computed = position < request.num_computed_tokens
            face = color if computed else tint(color, 0.2)
            _rectangle(axes, left + offset, y, 1, 0.8, face, "white")
            if position < request.num_tokens:
                ink = text_on(color) if computed else INK
                _label(axes, left + offset + 0.5, y + 0.4, str(position), 8, ink)
        middle = left + size / 2
        _label(axes, middle, y + (1.05 if above else -0.25), f"table[{i}] = {block}", 8, INK)
        target = (block * (size + 0.5) + size / 2, 1.15 if above else -0.35)
        arrow = {"arrowstyle": "-|>", "color": color, "lw": 1.3, "shrinkA": 1, "shrinkB": 1}
        axes.annotate("", target, (middle, y if above else y + 0.8), arrowprops=arrow)


def _draw_slots(
    axes: Axes, kv_cache: KVCacheManager, requests: Sequence[Request], block: int
) -> None:
    """One block of the pool: its slots, and the position of the token that lies in each."""
    size, names = kv_cache.block_size, [request.request_id for request in requests]
    left = block * (size + 0.5)
    owners = [r for r in requests if block in kv_cache.block_table(r.request_id)]
    for offset in range(size):
        x = left + offset
        _rectangle(axes, x, 0, 1, 0.8, PALE if block == NULL_BLOCK else "white", MUTED)
        for i, owner in enumerate(owners):
            position = kv_cache.block_table(owner.request_id).index(block) * size + offset
            computed = position < owner.num_computed_tokens
            color = color_of(owner.request_id, names)
            height = 0.8 / len(owners)
            y = 0.8 - (i + 1) * height  # the first request is drawn above the pool, so it is on top
            _rectangle(axes, x, y, 1, height, color if computed else tint(color, 0.2), "white")
            if computed:
                _label(axes, x + 0.5, y + height / 2, str(position), 8, text_on(color))
        _label(axes, x + 0.5, -0.2, str(block * size + offset), 6.5, MUTED)
    name = "null" if block == NULL_BLOCK else f"block {block}"
    _label(axes, left + size / 2, 1.0, name, 7, MUTED)


def _label(axes: Axes, x: float, y: float, text: str, size: float, color: str) -> None:
    axes.text(x, y, text, ha="center", va="center", fontsize=size, color=color)


def _rectangle(
    axes: Axes,
    left: float,
    bottom: float,
    width: float,
    height: float,
    face: object,
    edge: object,
    hatch: str = "",
) -> None:
    from matplotlib.patches import Rectangle

    axes.add_patch(
        Rectangle(
            (left, bottom),
            width,
            height,
            facecolor=face,
            edgecolor=edge,
            hatch=hatch,
            linewidth=0.8,
        )
    )
