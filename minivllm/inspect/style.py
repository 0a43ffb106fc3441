"""The look that all pictures share: one colour per request, one hatch per kind of work.

matplotlib is imported when a picture is drawn, never with the engine. Figures are made without
`pyplot`, so drawing leaves no state behind; a notebook shows a returned figure by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette (2008), which people with colour-blindness can tell apart.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#B8A800", "#7A5195")
INK = "#222222"
MUTED = "#8A8A8A"
PALE = "#EDEDED"
ALARM = "#C1121F"
HATCHES = {"prefill": "", "decode": "////", "recompute": "xxx"}
WORDS = {
    "prefill": "prompt tokens (prefill)",
    "decode": "newest token (decode)",
    "recompute": "computed once before",
}


def color_of(request_id: str, request_ids: Sequence[str]) -> str:
    """The request's colour: the same in all pictures of a recording."""
    return PALETTE[list(request_ids).index(request_id) % len(PALETTE)]


def tint(color: str, strength: float) -> tuple[float, float, float]:
    """Mixes a colour with white; strength 1 is the colour itself, 0 is white."""
    from matplotlib.colors import to_rgb

    red, green, blue = to_rgb(color)
    return (
        1 - strength * (1 - red),
        1 - strength * (1 - green),
        1 - strength * (1 - blue),
    )


def text_on(color: str) -> str:
    """Black or white, whichever can be read on the colour."""
    from matplotlib.colors import to_rgb

    red, green, blue = to_rgb(color)
    return "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 0.55 else INK


def new_figure(width: float, height: float) -> tuple[Figure, Axes]:
    """A white figure with one set of axes, sizes in inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white", dpi=110)
    axes = figure.subplots()
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(labelsize=9, colors=INK)
    return figure, axes


def bare(axes: Axes) -> None:
    """Takes spines and ticks away, for drawings that are no plots."""
    axes.set_axis_off()


def add_legend(figure: Figure, handles: list[Artist]) -> None:
    """Puts a legend under the picture, in as few rows as its width allows."""
    labels = [str(handle.get_label()) for handle in handles]
    num_chars = figure.get_figwidth() / 0.07  # the mean width of a letter of 8.5 points
    num_columns = len(labels)
    while num_columns > 1 and _legend_chars(labels, num_columns) > num_chars:
        num_columns -= 1
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=num_columns,
        fontsize=8.5,
        frameon=False,
        handlelength=1.6,
        columnspacing=1.4,
    )


def _legend_chars(labels: Sequence[str], num_columns: int) -> int:
    """Width of a legend in letters; it is filled column by column, and a swatch takes six."""
    num_rows = -(-len(labels) // num_columns)
    columns = [labels[i : i + num_rows] for i in range(0, len(labels), num_rows)]
    return sum(max(len(label) for label in column) + 6 for column in columns)
