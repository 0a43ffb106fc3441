"""Pictures of a schedule: how each step's budget was spent, and what each request went through.

All take a `Recording` and return a matplotlib figure. A request has the same colour in all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING

from minivllm.inspect.recording import Recording, Step, Work
from minivllm.inspect.style import (
    ALARM,
    HATCHES,
    INK,
    MUTED,
    PALE,
    WORDS,
    add_legend,
    color_of,
    new_figure,
    text_on,
    tint,
)

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw_budget(recording: Recording, title: str = "") -> Figure:
    """Draws each step's tokens as a bar, stacked by request, under the line of the budget.

    Plain pieces are prompt tokens, hatched ones a request's newest token, cross-hatched ones tokens
    that are computed again after a preemption.

    Args:
        recording: With at least one step.
        title: Above the picture.
    """
    steps = recording.steps
    figure, axes = new_figure(max(5.5, 1.6 + 0.55 * len(steps)), 3.6)
    highest = max(step.total_tokens for step in steps)
    top = recording.budget if recording.budget <= 2 * highest else highest
    for step in steps:
        _draw_bar(axes, recording, step, top)
    if recording.budget == top:
        axes.axhline(recording.budget, color=ALARM, linewidth=1.4, linestyle="--", zorder=1)
        label = f"budget: {recording.budget} tokens"
        axes.text(
            len(steps) + 0.5, top * 1.015, label, color=ALARM, fontsize=9, ha="right", va="bottom"
        )
    axes.set_xlim(0.4, len(steps) + 0.6)
    axes.set_ylim(0, top * 1.22)
    _label_steps(axes, len(steps))
    axes.set_ylabel("tokens computed")
    axes.set_title(title, fontsize=11, loc="left")
    kinds = [k for k in WORDS if any(work.kind == k for step in steps for work in step.work)]
    add_legend(figure, _request_patches(recording) + [_kind_patch(kind) for kind in kinds])
    return figure


def draw_timeline(recording: Recording, title: str = "") -> Figure:
    """Draws one row per request and one column per step: what happened to whom, and when.

    A coloured cell is work, with the number of tokens; a pale one is waiting; a red one is the loss
    of all blocks. A small `+n` is the number of tokens that came from the prefix cache, a tick is
    the end.

    Args:
        recording: With at least one step.
        title: Above the picture.
    """
    steps, names = recording.steps, recording.request_ids
    figure, axes = new_figure(max(5.5, 1.6 + 0.55 * len(steps)), 1.35 + 0.5 * len(names))
    for row, name in enumerate(names):
        color = color_of(name, names)
        for step in steps:
            _draw_cell(axes, row, step, name, color)
    axes.set_xlim(0.4, len(steps) + 0.6)
    axes.set_ylim(len(names) - 0.45, -0.55)
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", length=0, labelsize=10)
    _label_steps(axes, len(steps))
    axes.spines["left"].set_visible(False)
    axes.set_title(title, fontsize=11, loc="left")
    add_legend(figure, _timeline_patches(recording))
    return figure


def draw_gap(recording: Recording, request_id: str, title: str = "") -> Figure:
    """Draws one request's two counters: tokens known, tokens computed, and the gap between them.

    Args:
        recording: In which the request was scheduled.
        request_id: Whose counters.
        title: Above the picture.
    """
    figure, axes = new_figure(max(5.5, 1.6 + 0.5 * len(recording.steps)), 3.4)
    color = color_of(request_id, recording.request_ids)
    steps = [step for step in recording.steps if request_id in step.num_tokens]
    highest = max(step.num_tokens[request_id] for step in steps)
    for step in steps:
        known, work = step.num_tokens[request_id], step.work_of(request_id)
        axes.plot([step.number - 0.42, step.number + 0.42], [known, known], color=INK, lw=2.2)
        if work is None:
            continue
        axes.bar(step.number, work.start, 0.8, color=tint(color, 0.3))
        axes.bar(step.number, work.count, 0.8, bottom=work.start, color=color)
        fits = work.count >= highest / 12
        y = work.start + work.count / 2 if fits else work.start - highest / 24
        ink = text_on(color) if fits else INK
        axes.text(
            step.number, y, f"+{work.count}", ha="center", va="center", fontsize=8.5, color=ink
        )
    axes.set_ylim(0, highest * 1.1)
    axes.set_xlim(0.4, len(recording.steps) + 0.6)
    _label_steps(axes, len(recording.steps))
    axes.set_ylabel("tokens")
    axes.set_title(title or f"request {request_id}", fontsize=11, loc="left")
    add_legend(figure, _gap_patches(color))
    return figure


def draw_token_times(recordings: Mapping[str, Recording], request_id: str) -> Figure:
    """Draws when one request got its tokens, in real time: one row of ticks per recording.

    A wide gap between two ticks is a pause that the request's reader sees.

    Args:
        recordings: By the name that stands beside the row.
        request_id: A request that all of them have.
    """
    figure, axes = new_figure(8.5, 0.9 + 0.62 * len(recordings))
    for row, recording in enumerate(recordings.values()):
        color = color_of(request_id, recording.request_ids)
        times = token_times(recording, request_id)
        axes.vlines(times, row - 0.3, row + 0.3, color=color, linewidth=1.6)
        gaps = [after - before for before, after in pairwise(times)]
        if gaps:
            widest = gaps.index(max(gaps))
            axes.annotate(
                "",
                (times[widest + 1], row),
                (times[widest], row),
                arrowprops={"arrowstyle": "<->", "color": ALARM, "shrinkA": 0, "shrinkB": 0},
            )
            axes.text(
                times[-1],
                row,
                f"  longest pause {1000 * max(gaps):.0f} ms",
                va="center",
                fontsize=9,
            )
    axes.set_yticks(range(len(recordings)), list(recordings))
    axes.set_ylim(len(recordings) - 0.4, -0.6)
    axes.margins(x=0.02)
    axes.set_xlim(right=axes.get_xlim()[1] * 1.28)
    axes.set_xlabel(f"seconds since the start; each tick is a token of {request_id}", fontsize=9)
    return figure


def token_times(recording: Recording, request_id: str) -> list[float]:
    """When a request got its tokens, in seconds since the recording's first step began."""
    start = recording.steps[0].started
    works = [(step, step.work_of(request_id)) for step in recording.steps]
    return [step.ended - start for step, work in works if work is not None and work.sampled]


def _draw_bar(axes: Axes, recording: Recording, step: Step, top: int) -> None:
    bottom = 0
    for work in step.work:
        color = color_of(work.request_id, recording.request_ids)
        axes.bar(
            step.number,
            work.count,
            0.86,
            bottom=bottom,
            color=color,
            hatch=HATCHES[work.kind],
            edgecolor="white",
            linewidth=0.8,
            zorder=2,
        )
        # A label needs room: about a fourteenth of the picture's height.
        if work.count >= top / 14 and len(recording.steps) <= 40:
            axes.text(
                step.number,
                bottom + work.count / 2,
                str(work.count),
                ha="center",
                va="center",
                fontsize=8.5,
                color=text_on(color) if work.kind == "prefill" else INK,
                zorder=3,
                bbox=None if work.kind == "prefill" else _plate(),
            )
        bottom += work.count
    if step.preempted:
        text = "\n".join(f"✕ {name}" for name in step.preempted)
        axes.text(
            step.number,
            bottom + top * 0.02,
            text,
            ha="center",
            va="bottom",
            fontsize=8,
            color=ALARM,
        )


def _draw_cell(axes: Axes, row: int, step: Step, name: str, color: str) -> None:
    work = step.work_of(name)
    if work is None and name in step.preempted:
        _box(axes, row, step.number, "white", "", ALARM)
        _write(axes, row, step.number, "✕", ALARM)
    elif work is None and name in step.waiting:
        _box(axes, row, step.number, PALE, "", "white")
        _write(axes, row, step.number, "·", MUTED)
    elif work is not None:
        _box(axes, row, step.number, color, HATCHES[work.kind], "white")
        plain = work.kind == "prefill"
        axes.text(
            step.number,
            row,
            _cell_text(work),
            ha="center",
            va="center",
            fontsize=8.5,
            color=text_on(color) if plain else INK,
            bbox=None if plain else _plate(),
        )
        if name in step.finished:
            axes.text(step.number + 0.5, row, "✓", va="center", fontsize=11, color=INK)


def _cell_text(work: Work) -> str:
    return f"{work.count}\n+{work.num_cached}" if work.num_cached else str(work.count)


def _box(axes: Axes, row: int, number: int, face: str, hatch: str, edge: str) -> None:
    axes.barh(row, 0.92, 0.86, number - 0.46, color=face, hatch=hatch, edgecolor=edge, linewidth=1)


def _write(axes: Axes, row: int, number: int, text: str, color: str) -> None:
    axes.text(number, row, text, ha="center", va="center", fontsize=10, color=color)


def _plate() -> dict[str, object]:
    return {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none"}


def _label_steps(axes: Axes, num_steps: int) -> None:
    every = 1 if num_steps <= 30 else 5 if num_steps <= 100 else 20
    axes.set_xticks([n for n in range(1, num_steps + 1) if n == 1 or n % every == 0])
    axes.set_xlabel("step", fontsize=9)


def _request_patches(recording: Recording) -> list[Artist]:
    from matplotlib.patches import Patch

    names = recording.request_ids
    return [Patch(facecolor=color_of(name, names), label=name) for name in names]


def _kind_patch(kind: str) -> Artist:
    from matplotlib.patches import Patch

    return Patch(facecolor=MUTED, edgecolor="white", hatch=HATCHES[kind], label=WORDS[kind])


def _timeline_patches(recording: Recording) -> list[Artist]:
    from matplotlib.patches import Patch

    works = [work for step in recording.steps for work in step.work]
    patches = [_kind_patch(kind) for kind in WORDS if any(work.kind == kind for work in works)]
    if any(set(step.waiting) - {w.request_id for w in step.work} for step in recording.steps):
        patches.append(Patch(facecolor=PALE, label="waiting"))
    if any(step.preempted for step in recording.steps):
        patches.append(Patch(facecolor="white", edgecolor=ALARM, label="✕ preempted"))
    if any(work.num_cached for work in works):
        patches.append(Patch(facecolor="none", label="+n: tokens from the prefix cache"))
    return patches


def _gap_patches(color: str) -> list[Artist]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    return [
        Line2D([], [], color=INK, linewidth=2.2, label="known (num_tokens)"),
        Patch(facecolor=tint(color, 0.3), label="computed before the step"),
        Patch(facecolor=color, label="computed in the step"),
    ]
