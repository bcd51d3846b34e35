"""Draw a plan: its set-ups as stacked bars against the GPU, and which batches and lengths fit with the chosen one.

As the page, the picture is made of the JSON of a plan alone.
"""

from __future__ import annotations

from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from hf_memopt import plotting as pictures
from hf_memopt.memory.output.ladder_picture import Bar, Limit, height_of, stacked_bars
from hf_memopt.plotting import LIGHT, Theme
from hf_memopt.reports.charts import batch_of, fit_chart, is_same, parts_of
from hf_memopt.reports.plan_file import CandidateData, PlanData
from hf_memopt.units import format_bytes, format_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_plan"]

LABEL_COLUMNS, TITLE_COLUMNS, MAP_TITLE_COLUMNS = 38, 105, 68
INCHES_OF_A_CELL = 0.3
NOTE_ROWS = 0.62  # of the map, for each percentile above it


def draw_plan(told: PlanData, path: Path, *, theme: Theme = LIGHT) -> None:
    """Draw a plan to a PNG, SVG or PDF file.

    Raises:
        ValueError: ``path`` is not such a file, or cannot be written.
        MissingExtraError: matplotlib is not installed.
    """
    pictures.check_picture(path, purpose="the picture of a plan")
    with pictures.drawing(theme):
        pictures.save_picture(_figure(told, theme), path)


def _figure(told: PlanData, theme: Theme) -> Figure:
    from matplotlib.figure import Figure

    one = told["chosen"]
    if one is None:
        assert told["shortfall"] is not None  # checked when it was read
        one = told["shortfall"]["nearest"]
    bars = [_bar(told["candidates"][place], told) for place in told["shown"]]
    figures = told["figures"]
    chart = None
    if figures["fit_map"] is not None:
        chart = fit_chart(figures["fit_map"], one, figures["padding"])
    heights = [height_of(bars) + 1.0]
    if chart is not None:
        heights.append(INCHES_OF_A_CELL * (len(chart["rows"]) + NOTE_ROWS * len(chart["marks"])) + 0.9)
    figure = Figure(figsize=(pictures.WIDTH_INCHES, sum(heights) + 0.5), layout="constrained")
    axes = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    handles = stacked_bars(axes[0], bars, Limit(told["gpu"], told["usable_bytes"]), theme)
    # within the axes' own row, below its label
    axes[0].legend(handles=handles, loc="upper right", bbox_to_anchor=(1, -0.9 / heights[0]), ncols=4, frameon=False)
    if chart is not None:
        _draw_map(axes[1], chart, one, theme)
    figure.suptitle(_title(told, one), fontsize=9.5, x=0.01, ha="left")
    return figure


def _title(told: PlanData, one: CandidateData) -> str:
    size = format_bytes(one["total_bytes"])
    length = "" if one["seq_len"] is None else f", {one['seq_len']} tokens"
    said = f"{told['model']} on {told['gpu']}{length}: {one['name']}, {batch_of(one)}, "
    if one["verdict"] == "over":
        return fill(f"{said}needs {size}: nothing fits. Computed, not measured.", TITLE_COLUMNS)
    return fill(f"{said}{size}. Computed, not measured.", TITLE_COLUMNS)


def _bar(one: CandidateData, told: PlanData) -> Bar:
    """Return a set-up as a bar, with its speed where it fits."""
    length = "" if one["seq_len"] == told["texts"]["seq_len"] else f", {one['seq_len']} tokens"
    batch = batch_of(one).replace(" ", "\N{NO-BREAK SPACE}")
    label = fill(f"{one['name']}{length}, {batch}", LABEL_COLUMNS)
    speed = ""
    if one["seconds"] and one["verdict"] != "over":
        amount, unit = (one["tokens"], "tokens/s") if one["tokens"] else (one["examples"], "examples/s")
        speed = f"{format_number(float(amount) / one['seconds'])} {unit}"
    chosen = is_same(one, told["chosen"])
    return Bar("", label, dict(parts_of(one)), one["verdict"], note=speed, is_chosen=chosen)


def _draw_map(axes: Axes, chart: dict[str, Any], one: CandidateData, theme: Theme) -> None:
    """Draw a cell for each batch and length, the largest batch on top, and the percentiles of the data above."""
    from matplotlib.patches import Rectangle

    areas = {"fits": theme.fits_area, "tight": theme.tight_area, "over": theme.faint}
    columns, rows = chart["columns"], chart["rows"]
    for place, row in enumerate(rows):
        for column, cell in enumerate(row["cells"]):
            edges: dict[str, Any] = {"facecolor": areas[cell["verdict"]], "edgecolor": theme.paper, "linewidth": 1.5}
            axes.add_patch(Rectangle((column, place), 1, 1, **edges))
            weight = "bold" if cell["chosen"] else "normal"
            text = cell["word"] if cell["size"] is None else f"{cell['word']}, {cell['size']}"
            axes.text(column + 0.5, place + 0.5, text, ha="center", va="center", fontsize=8.5, weight=weight)
    for place, row in enumerate(rows):
        for column, cell in enumerate(row["cells"]):
            if cell["chosen"]:
                axes.add_patch(Rectangle((column, place), 1, 1, fill=False, edgecolor=theme.ink, linewidth=1.8))
    for mark in chart["marks"]:
        where, height = mark["at"] / 100 * columns, -NOTE_ROWS * (mark["row"] + 0.5)
        text = f"{mark['text']}, beyond" if mark["out"] else mark["text"]
        axes.plot([where, where], [height, 0], color=theme.ink, linewidth=0.9, linestyle=":")
        axes.plot(where, -0.1, marker="v", color=theme.ink, markersize=4)
        side = "right" if where > 0.8 * columns else "left"
        gap = -0.04 if side == "right" else 0.04
        axes.text(where + gap, height, text, ha=side, va="center", fontsize=8.5)
    axes.set_xlim(0, columns)
    axes.set_ylim(len(rows), -NOTE_ROWS * len(chart["marks"]))
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    axes.set_yticks([place + 0.5 for place in range(len(rows))], [f"{row['rows']}" for row in rows])
    lengths = ["one size" if length is None else f"{length:,}" for length in chart["lengths"]]
    axes.set_xticks([column + 0.5 for column in range(columns)], lengths)
    data = "; above: lengths of the data" if chart["marks"] else ""
    axes.set_xlabel(f"tokens of the longest row{data}" if columns > 1 else "")
    axes.set_ylabel("rows of a micro-batch")
    axes.set_title(fill(f"What fits with {one['name']}, in GiB where simulated", MAP_TITLE_COLUMNS), loc="left")
