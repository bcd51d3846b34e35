"""Draw set-ups as stacked bars against the memory of their GPU.

One horizontal bar for each set-up: its components at the peak of allocated bytes, what the allocator reserves beyond
them, and CUDA's context. Bars that are much longer than the GPU's line are cut, and their figures tell the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any, Literal

from hf_memopt import plotting as pictures
from hf_memopt.memory.output.estimate_text import COLOURS
from hf_memopt.memory.timeline import COMPONENTS
from hf_memopt.units import format_bytes, to_gib

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from hf_memopt.memory.result import Estimate
    from hf_memopt.plotting import Theme

__all__ = ["CONTEXT", "UNUSED", "Bar", "Limit", "bar_of", "colours_of", "draw_ladder", "height_of", "stacked_bars"]

INCHES_OF_A_ROW = 0.27
MOST_OF_GPU = 2.5  # how far the axis goes beyond the GPU's line, at most
TITLE_COLUMNS = 100
CHARACTER = 0.0142  # of the width of the axes
UNUSED, CONTEXT = "reserved, not in use", "CUDA context"


@dataclass(frozen=True)
class Bar:
    """A set-up in the picture.

    Attributes:
        group: the heading it stands under; "" for none.
        label: to the left of the bar.
        parts: bytes by the names in ``COMPONENTS``, ``UNUSED`` and ``CONTEXT``; empty where it is not estimable.
        verdict: "" where no GPU is known.
        note: behind the total.
        measured_bytes: a measured total to be marked; None for none.
        is_chosen: whether it stands out.
    """

    group: str
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
    """A GPU, and what of it is usable."""

    name: str
    usable_bytes: int


def bar_of(group: str, label: str, found: Estimate | None, *, measured_bytes: int | None = None) -> Bar:
    """Return the bar of an estimate; of None one that says so."""
    if found is None:
        return Bar(group, label, {})
    unused_bytes = found.peak_reserved_bytes - found.peak_allocated_bytes
    parts = {name: found.components[name] for name in COMPONENTS}
    parts |= {UNUSED: unused_bytes, CONTEXT: found.context_bytes or 0}
    verdict: Literal["fits", "over", ""] = "" if found.fits is None else "fits" if found.fits else "over"
    return Bar(group, label, parts, verdict, measured_bytes=measured_bytes)


def draw_ladder(bars: Sequence[Bar], path: Path, *, title: str, limit: Limit | None) -> None:
    """Draw the set-ups to a PNG, SVG or PDF file.

    Args:
        bars: in their order; those of a group one after the other.
        path: the file.
        title: what is compared.
        limit: the GPU, whose usable memory is a line; None for no line.

    Raises:
        ValueError: ``path`` is not such a file, or cannot be written.
        MissingExtraError: matplotlib is not installed.
    """
    pictures.check_picture(path, purpose="the picture of a comparison")
    with pictures.drawing():
        pictures.save_picture(_figure(bars, title, limit), path)


def _figure(bars: Sequence[Bar], title: str, limit: Limit | None) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(pictures.WIDTH_INCHES, 2.0 + height_of(bars)), layout="constrained")
    axes = figure.subplots()
    handles = stacked_bars(axes, bars, limit, pictures.LIGHT)
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    figure.suptitle(fill(title, TITLE_COLUMNS), fontsize=10, x=0.01, ha="left")
    return figure


def height_of(bars: Sequence[Bar]) -> float:
    """Return the inches of the bars with their headings; a label of several lines makes all rows higher."""
    return _row_inches(bars) * (len(bars) + len(_headings(bars)))


def colours_of(theme: Theme) -> dict[str, str]:
    """Return the colour of each part of a bar, in their order."""
    return {**COLOURS, UNUSED: theme.faint, CONTEXT: theme.strong}


def _row_inches(bars: Sequence[Bar]) -> float:
    lines = max(bar.label.count("\n") + 1 for bar in bars)
    return INCHES_OF_A_ROW + 0.15 * (lines - 1)


def _headings(bars: Sequence[Bar]) -> list[str]:
    """Return the groups that have a heading: all but the first, which is the baseline, and those without a name."""
    return [group for group in dict.fromkeys(bar.group for bar in bars) if group not in (bars[0].group, "")]


def stacked_bars(axes: Axes, bars: Sequence[Bar], limit: Limit | None, theme: Theme) -> list[Any]:
    """Draw the bars, and the line of the GPU; return what a legend explains."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    most_bytes = max(bar.total_bytes for bar in bars)
    if limit is not None:
        most_bytes = max(limit.usable_bytes, min(most_bytes, int(MOST_OF_GPU * limit.usable_bytes)))
    most_bytes = max(most_bytes, *(bar.measured_bytes or 0 for bar in bars))  # whose marks are not cut
    headings, rows = _headings(bars), len(bars) + len(_headings(bars))
    most_gib, line_gib = to_gib(most_bytes), 0.0 if limit is None else to_gib(limit.usable_bytes)
    places = [_place_of_text(bar, most_gib, line_gib) for bar in bars]
    rooms = [1 - CHARACTER * len(_text_of(bar)) - 0.03 for bar in bars]
    ends = (place / max(room, 0.2) for place, room in zip(places, rooms, strict=True))
    axes.set_xlim(0, max(1.03 * most_gib, *ends))
    axes.set_ylim(rows - 0.4, -0.7)
    axes.set_yticks([])
    axes.set_xlabel("GiB at the peak")
    axes.spines[["top", "right", "left"]].set_visible(False)
    row = 0
    for group in dict.fromkeys(bar.group for bar in bars):
        if group in headings:
            _label(axes, row, group, weight="bold")
            row += 1
        for bar in (bar for bar in bars if bar.group == group):
            _draw_bar(axes, row, bar, most_gib, line_gib, theme)
            row += 1
    colours = colours_of(theme)
    handles: list[Any] = [
        Patch(color=colour, label=name) for name, colour in colours.items() if any(bar.parts.get(name) for bar in bars)
    ]
    if any(bar.measured_bytes is not None for bar in bars):
        look: dict[str, Any] = {"marker": "D", "linestyle": "", "markersize": 5}
        handles.append(Line2D([], [], color=theme.ink, label="published, measured", **look))
    if limit is not None:
        label = f"{limit.name}: {format_bytes(limit.usable_bytes)} usable"
        line = axes.axvline(to_gib(limit.usable_bytes), color=theme.limit, linestyle="--", linewidth=1.6, label=label)
        handles.append(line)
    return handles


def _label(axes: Axes, row: float, text: str, weight: str = "normal") -> None:
    """Write a label to the left of the axis; the layout makes room for it."""
    axes.text(
        -0.01, row, text, transform=axes.get_yaxis_transform(), ha="right", va="center", fontsize=8.5, weight=weight
    )


def _text_of(bar: Bar) -> str:
    """Return what stands behind a bar."""
    verdict = "" if bar.verdict == "over" else bar.verdict  # the line says it, and so does the colour
    words = ", ".join(word for word in (verdict, bar.note) if word)
    return f"{to_gib(bar.total_bytes):.1f} {words}".rstrip()


def _place_of_text(bar: Bar, most_gib: float, line_gib: float) -> float:
    """Return where the text behind a bar begins: not on the GPU's line."""
    end = min(to_gib(max(bar.total_bytes, bar.measured_bytes or 0)), most_gib)
    crosses = end <= line_gib < end + CHARACTER * len(_text_of(bar)) * 1.5 * most_gib
    return line_gib if crosses else end


def _draw_bar(axes: Axes, row: int, bar: Bar, most_gib: float, line_gib: float, theme: Theme) -> None:
    _label(axes, row, bar.label, weight="bold" if bar.is_chosen else "normal")
    if not bar.parts:
        axes.text(0, row, " not estimable", va="center", fontsize=8.5)
        return
    left = 0.0
    for name, colour in colours_of(theme).items():
        width = min(to_gib(bar.parts.get(name, 0)), most_gib - left)
        axes.barh(row, width, left=left, height=0.78, color=colour, linewidth=0)
        left += width
    if bar.measured_bytes is not None:
        where = to_gib(bar.measured_bytes)
        axes.plot(where, row, marker="D", color=theme.ink, markersize=5, markeredgecolor=theme.paper, zorder=4)
    cut = "» " if to_gib(bar.total_bytes) > most_gib else ""
    colour = {"fits": theme.fits, "tight": theme.tight, "over": theme.limit, "": theme.ink}[bar.verdict]
    axes.annotate(
        cut + _text_of(bar),
        (_place_of_text(bar, most_gib, line_gib), row),
        xytext=(6, 0),
        textcoords="offset points",
        va="center",
        fontsize=8.5,
        color=colour,
        weight="bold" if bar.is_chosen else "normal",
    )
