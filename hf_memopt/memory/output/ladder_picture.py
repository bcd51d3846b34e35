"""Draw several estimates as stacked bars against the memory of their GPU.

One horizontal bar for each set-up: its components at the peak of allocated bytes, what the allocator reserves beyond
them, and CUDA's context. Bars that are much longer than the GPU's line are cut, and their figures tell the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hf_memopt import plotting as pictures
from hf_memopt.memory.output.estimate_text import COLOURS
from hf_memopt.memory.timeline import COMPONENTS
from hf_memopt.units import format_bytes, to_gib

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from hf_memopt.memory.result import Estimate

__all__ = ["Bar", "draw_ladder"]

WIDTH_INCHES, INCHES_OF_A_ROW = 8.0, 0.27
MOST_OF_GPU = 2.5  # how far the axis goes beyond the GPU's line, at most
UNUSED, CONTEXT = "reserved, not in use", "CUDA context"
ALL_COLOURS = {**COLOURS, UNUSED: "#DDDDDD", CONTEXT: "#555555"}
FITS, DOES_NOT_FIT, UNKNOWN = "#00694E", "#B00020", "#222222"


@dataclass(frozen=True)
class Bar:
    """A set-up in the picture: the heading it stands under, its label, and its estimate where there is one."""

    group: str
    label: str
    estimate: Estimate | None


def draw_ladder(bars: Sequence[Bar], path: Path) -> None:
    """Draw the set-ups to a PNG, SVG or PDF file.

    Raises:
        ValueError: ``path`` is not such a file, or cannot be written.
        MissingExtraError: matplotlib is not installed.
    """
    pictures.check_picture(path, purpose="the picture of a comparison")
    pictures.save_picture(_figure(bars), path)


def _figure(bars: Sequence[Bar]) -> Figure:
    from matplotlib.figure import Figure

    known = [bar.estimate for bar in bars if bar.estimate is not None]
    gpu, longest_bytes = known[0].gpu, max(found.total_bytes for found in known)
    most_bytes = (
        longest_bytes if gpu is None else max(gpu.usable_bytes, min(longest_bytes, int(MOST_OF_GPU * gpu.usable_bytes)))
    )
    groups = list(dict.fromkeys(bar.group for bar in bars))
    rows = len(bars) + sum(group != bars[0].group for group in groups)
    figure = Figure(figsize=(WIDTH_INCHES, 2.0 + INCHES_OF_A_ROW * rows), layout="constrained")
    axes = figure.subplots()
    axes.set_xlim(0, 1.17 * to_gib(most_bytes))
    axes.set_ylim(rows - 0.4, -0.7)
    axes.set_yticks([])
    axes.set_xlabel("GiB at the peak")
    axes.spines[["top", "right", "left"]].set_visible(False)
    row = 0
    for group in groups:
        if group != bars[0].group:
            _label(axes, row, group, weight="bold")
            row += 1
        for bar in (bar for bar in bars if bar.group == group):
            _draw_bar(axes, row, bar, to_gib(most_bytes))
            row += 1
    if gpu is not None:
        label = f"{gpu.name}: {format_bytes(gpu.usable_bytes)} usable"
        axes.axvline(to_gib(gpu.usable_bytes), color="#B00020", linestyle="--", linewidth=1.6, label=label)
    _add_legend(figure, axes, known)
    length = "" if known[0].seq_len is None else f" of {known[0].seq_len} tokens"
    examples = known[0].batch_size * known[0].settings.gradient_accumulation_steps
    title = f"{known[0].model}: {examples} examples{length} per optimizer step"
    figure.suptitle(title, fontsize=11, x=0.01, ha="left", wrap=True)
    return figure


def _label(axes: Axes, row: float, text: str, weight: str = "normal") -> None:
    """Write a label to the left of the axis; the layout makes room for it."""
    axes.text(
        -0.01, row, text, transform=axes.get_yaxis_transform(), ha="right", va="center", fontsize=9, weight=weight
    )


def _draw_bar(axes: Axes, row: int, bar: Bar, most_gib: float) -> None:
    _label(axes, row, bar.label)
    found = bar.estimate
    if found is None:
        axes.text(0, row, " not estimable", va="center", fontsize=8.5, color=UNKNOWN)
        return
    left = 0.0
    for name, size_bytes in _parts(found).items():
        width = min(to_gib(size_bytes), most_gib - left)
        axes.barh(row, width, left=left, height=0.78, color=ALL_COLOURS[name], linewidth=0)
        left += width
    total_gib = to_gib(found.total_bytes)
    mark, colour = {True: ("fits", FITS), False: ("", DOES_NOT_FIT), None: ("", UNKNOWN)}[found.fits]
    cut = "» " if total_gib > most_gib else ""
    label = f"{cut}{total_gib:.1f} {mark}".rstrip()
    paper = {"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none"}  # over the GPU's line
    axes.annotate(
        label, (left, row), xytext=(5, 0), textcoords="offset points", va="center", fontsize=9, color=colour, bbox=paper
    )


def _parts(found: Estimate) -> dict[str, int]:
    """Return the bytes of a bar by name; together they are the total."""
    unused_bytes = found.peak_reserved_bytes - found.peak_allocated_bytes
    return {
        **{name: found.components[name] for name in COMPONENTS},
        UNUSED: unused_bytes,
        CONTEXT: found.context_bytes or 0,
    }


def _add_legend(figure: Figure, axes: Axes, known: Sequence[Estimate]) -> None:
    from matplotlib.patches import Patch

    used = [name for name in ALL_COLOURS if any(_parts(found)[name] for found in known)]
    handles: list[object] = [Patch(color=ALL_COLOURS[name], label=name) for name in used]
    lines, _ = axes.get_legend_handles_labels()
    figure.legend(handles=[*handles, *lines], loc="outside lower center", ncols=3, frameon=False, fontsize=9)
