"""Draw totals of bytes as stacked bars against the memory of their GPU.

One horizontal bar for each: CUDA's context, the components at the moment that decides the total, and what the allocator
reserves beyond them. Bars that are much longer than the GPU's line are cut, and their figures tell the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from textwrap import fill
from typing import TYPE_CHECKING, Any, Literal

from hf_memopt import plotting
from hf_memopt.components import COLOURS, CONTEXT, UNUSED
from hf_memopt.plotting import Theme
from hf_memopt.units import format_bytes, to_gib

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, FigureBase

INCHES_OF_A_ROW = 0.27
MOST_OF_GPU = 2.5  # how far the axis goes beyond the GPU's line, at most
ROOM = 1.13  # for the figure behind the longest bar
INSIDE_SHARE = 0.2  # of the axis, from which on a bar has room for its figure
TITLE_COLUMNS, NAME_COLUMNS = 100, 50
VERDICTS = {"fits": "fits", "tight": "tight", "over": "too large", "": ""}
ALIKE = {
    "resident memory of the process": "optimizer state",
    "gradients, activations and others": "activations",
    "kept by autograd and kernels": "activations",
    "other tensors": "inputs",
}
"""What a run measures that is no component, and the component whose colour it has."""


@dataclass(frozen=True)
class Bar:
    """A set-up, or a run, in the picture.

    Attributes:
        label: to the left of the bar.
        parts: bytes by name, from the beginning of the bar; empty where it is not estimable.
        verdict: "" where no GPU is known.
        note: behind the total.
        measured_bytes: a measured total to be marked; None for none.
        is_chosen: whether it stands out.
    """

    label: str
    parts: Mapping[str, int] = field(hash=False)
    verdict: Literal["fits", "tight", "over", ""] = ""
    note: str = ""
    measured_bytes: int | None = None
    is_chosen: bool = False

    @property
    def total_bytes(self) -> int:
        """What all parts are together."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class Limit:
    """A GPU, what of it is usable, and what of that is to be left free."""

    name: str
    usable_bytes: int
    margin_bytes: int = 0


def near(limit: Limit, most_bytes: int) -> Limit | None:
    """Return a limit that is not so far above the bytes that these would be a thin line; else None."""
    return limit if 0 < limit.usable_bytes <= MOST_OF_GPU * most_bytes else None


def bars_figure(bars: Sequence[Bar], limit: Limit | None, theme: Theme, title: str = "") -> Figure:
    """Return the bars with their legend below and a title above."""
    figure = plotting.new_figure(height_of(bars) + (0.3 if title else 0))
    bars_in(figure, bars, limit, theme)
    if title:
        figure.suptitle(fill(title, plotting.columns(TITLE_COLUMNS)), fontsize=10, x=0.01, ha="left")
    return figure


def bars_in(figure: FigureBase, bars: Sequence[Bar], limit: Limit | None, theme: Theme) -> None:
    """Draw the bars and their legend in a figure or a part of one."""
    handles = _stacked_bars(figure.subplots(), bars, limit, theme)
    figure.legend(
        handles=handles, loc="outside lower center", ncols=2 if plotting.is_narrow() else 3, frameon=False, fontsize=9
    )


def height_of(bars: Sequence[Bar]) -> float:
    """Return the inches of the bars with their legend; a label of several lines makes all rows higher."""
    lines = max(bar.label.count("\n") + 1 for bar in bars)
    return (2.0 if plotting.is_narrow() else 1.7) + (INCHES_OF_A_ROW + 0.15 * (lines - 1)) * len(bars)


def colours_of(theme: Theme) -> dict[str, str]:
    """Return the colours of parts by name."""
    known = {CONTEXT: theme.strong, **COLOURS, UNUSED: theme.faint}
    return {**known, **{name: known[other] for name, other in ALIKE.items()}}


def _stacked_bars(axes: Axes, bars: Sequence[Bar], limit: Limit | None, theme: Theme) -> list[Any]:
    """Draw the bars, and the line of the GPU; return what a legend explains."""
    most_bytes = max(1, *(bar.total_bytes for bar in bars))
    if limit is not None:
        most_bytes = max(limit.usable_bytes, min(most_bytes, int(MOST_OF_GPU * limit.usable_bytes)))
    most_bytes = max(most_bytes, *(bar.measured_bytes or 0 for bar in bars))  # whose marks are not cut
    most_gib = to_gib(most_bytes)
    axes.set_xlim(0, (1.45 if plotting.is_narrow() else ROOM) * most_gib)
    axes.spines["bottom"].set_bounds(0, most_gib)
    axes.locator_params(axis="x", nbins=4 if plotting.is_narrow() else 8)
    axes.set_xticks([tick for tick in axes.get_xticks() if tick <= most_gib])
    axes.set_ylim(len(bars) - 0.4, -0.7)
    axes.set_yticks([])
    axes.set_xlabel("peak memory, GiB")
    plotting.bare(axes, "top", "right", "left")
    for row, bar in enumerate(bars):
        _draw_bar(axes, row, bar, most_gib, theme)
    return _legend_of(axes, bars, limit, theme)


def _legend_of(axes: Axes, bars: Sequence[Bar], limit: Limit | None, theme: Theme) -> list[Any]:
    """Draw the line of the GPU; return what a legend explains, in the order of the bars."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    colours, least = colours_of(theme), max(bar.total_bytes for bar in bars) / 1000  # less is no area
    found = dict.fromkeys(name for bar in bars for name, size in bar.parts.items() if size > least)
    order = [name for name in colours if name in found]
    handles: list[Any] = [
        Patch(color=colours.get(name, theme.strong), label=fill(name, plotting.columns(NAME_COLUMNS)))
        for name in dict.fromkeys([*order, *found])
    ]
    if any(bar.measured_bytes is not None for bar in bars):
        look: dict[str, Any] = {"marker": "D", "linestyle": "", "markersize": 5}
        handles.append(Line2D([], [], color=theme.ink, label="published, measured", **look))
    if limit is not None:
        label = fill(f"{limit.name}: {format_bytes(limit.usable_bytes)} usable", plotting.columns(NAME_COLUMNS))
        end = to_gib(limit.usable_bytes)
        if limit.margin_bytes:
            free = axes.axvspan(end - to_gib(limit.margin_bytes), end, fill=False, hatch="////", linewidth=0)
            plotting.explain(free, f"{format_bytes(limit.margin_bytes)}, kept free")
        line = axes.axvline(end, color=theme.limit, linestyle="--", linewidth=1.6, label=label)
        handles.append(line)
    return handles


def _draw_bar(axes: Axes, row: int, bar: Bar, most_gib: float, theme: Theme) -> None:
    weight = "bold" if bar.is_chosen else "normal"
    _text_beside(axes, row, bar.label, "left", weight=weight)
    if not bar.parts:
        axes.text(0, row, " not estimable", va="center", fontsize=8.5)
        return
    left, colours = 0.0, colours_of(theme)
    for name, size in bar.parts.items():
        width = min(to_gib(size), most_gib - left)
        if width > 0:
            look: dict[str, Any] = {"color": colours.get(name, theme.strong), "linewidth": 0}
            [part] = axes.barh(row, width, left=left, height=0.78, **look)
            said = f"{' '.join(bar.label.split())}, " if bar.label else ""
            plotting.explain(part, f"{said}{name}: {format_bytes(size)}", name)
        left += width
    if bar.measured_bytes is not None:
        where = to_gib(bar.measured_bytes)
        axes.plot(where, row, marker="D", color=theme.ink, markersize=5, markeredgecolor=theme.paper, zorder=4)
    total, cut = to_gib(bar.total_bytes), "» " if to_gib(bar.total_bytes) > most_gib else ""
    look = {"ha": "left", "va": "center", "fontsize": 8.5, "weight": weight, "zorder": 5}
    box = {"facecolor": theme.paper, "edgecolor": "none", "pad": 0.6}  # above the parts of the bar
    if left > INSIDE_SHARE * most_gib:
        look["ha"] = "right"  # inside the bar, where the line of the GPU does not strike it through
    where = left + (-0.01 if left > INSIDE_SHARE * most_gib else 0.01) * most_gib
    axes.text(where, row, f"{cut}{total:.{2 if total < 10 else 1}f}", bbox=box, **look)
    measured = "" if bar.measured_bytes is None else f"{to_gib(bar.measured_bytes):.2f} measured"
    words = ", ".join(word for word in (VERDICTS[bar.verdict], bar.note, measured) if word)
    words = VERDICTS[bar.verdict] if plotting.is_narrow() else words
    colour = {"fits": theme.fits, "tight": theme.tight, "over": theme.limit, "": theme.ink}[bar.verdict]
    _text_beside(axes, row, words, "right", weight=weight, color=colour)


def _text_beside(axes: Axes, row: float, text: str, side: Literal["left", "right"], **look: Any) -> None:
    """Write a text to the left or right of the axes; the layout makes room for it."""
    where, align = {"left": (-0.01, "right"), "right": (1.01, "left")}[side]
    axes.text(where, row, text, transform=axes.get_yaxis_transform(), ha=align, va="center", fontsize=8.5, **look)
