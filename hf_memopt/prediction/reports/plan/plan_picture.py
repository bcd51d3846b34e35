"""Draw a plan: its set-ups as stacked bars against the GPU, and which batches and lengths fit with the chosen one.

As the page, the picture is made of the JSON of a plan alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from hf_memopt import plotting
from hf_memopt.components import parts_of
from hf_memopt.plotting import Theme
from hf_memopt.prediction.reports.pictures import Bar, Limit, bars_in, height_of
from hf_memopt.prediction.reports.plan.plan_file import CandidateData, PlanData, batch_of, is_same, shown_one
from hf_memopt.units import format_bytes, format_number, to_gib

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LABEL_COLUMNS, TITLE_COLUMNS = 38, 105
INCHES_OF_A_CELL = 0.3
LEAST_INCHES = 2.0  # of a map, for the label of its rows
WORDS = {"fits": "fits", "tight": "tight", "over": "no"}


def draw_plan(told: PlanData, path: Path, *, theme: Theme | None = None) -> None:
    """Draw a plan to a PNG, SVG or PDF file."""
    plotting.write_picture(path, partial(_figure, told), purpose="the picture of a plan", theme=theme)


def _figure(told: PlanData, theme: Theme) -> Figure:
    one, bars, chart = shown_one(told), bars_of(told), told["figures"]["fit_map"]
    heights = [height_of(bars), *([] if chart is None else [_height_of_map(chart) + 0.2])]
    figure = plotting.new_figure(sum(heights) + 0.3)
    parts = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    bars_in(parts[0], bars, limit_of(told), theme)
    if chart is not None:
        axes = parts[1].subplots()
        _draw_map(axes, chart, one, theme)
        axes.set_title(fill(f"What fits with {one['name']}, in GiB where simulated", TITLE_COLUMNS), loc="left")
    figure.suptitle(_title(told, one), fontsize=9.5, x=0.01, ha="left")
    return figure


def _title(told: PlanData, one: CandidateData) -> str:
    size = format_bytes(one["total_bytes"])
    length = "" if one["seq_len"] is None else f", {one['seq_len']} tokens"
    said = f"{told['model']} on {told['gpu']}{length}: {one['name']}, {batch_of(one)}, "
    if one["verdict"] == "over":
        return fill(f"{said}needs {size}: nothing fits. Computed, not measured.", TITLE_COLUMNS)
    return fill(f"{said}{size}. Computed, not measured.", TITLE_COLUMNS)


# ---- Bars


def limit_of(told: PlanData) -> Limit:
    """Return the line of the GPU."""
    return Limit(told["gpu"], told["usable_bytes"])


def parts_of_candidate(one: CandidateData) -> dict[str, int]:
    """Return what the total of a set-up is made of."""
    return parts_of(one["components"], one["reserved_bytes"], one["context_bytes"])


def bars_of(told: PlanData) -> list[Bar]:
    """Return each shown set-up as a bar, with its speed where it fits."""
    bars = []
    for one in (told["candidates"][place] for place in told["shown"]):
        length = "" if one["seq_len"] == told["texts"]["seq_len"] else f", {one['seq_len']} tokens"
        batch = batch_of(one).replace(" ", "\N{NO-BREAK SPACE}")
        label = fill(f"{one['name']}{length}, {batch}", plotting.columns(LABEL_COLUMNS))
        speed = ""
        if one["seconds"] and one["verdict"] != "over":
            amount, unit = (one["tokens"], "tokens/s") if one["tokens"] else (one["examples"], "examples/s")
            speed = f"{format_number(float(amount) / one['seconds'])} {unit}"
        chosen = is_same(one, told["chosen"])
        bars.append(Bar(label, parts_of_candidate(one), verdict=one["verdict"], note=speed, is_chosen=chosen))
    return bars


# ---- Batches and lengths


def map_figure(chart: Mapping[str, Any], one: CandidateData, theme: Theme) -> Figure:
    """Return a picture of which batches and lengths fit."""
    figure = plotting.new_figure(_height_of_map(chart))
    _draw_map(figure.subplots(), chart, one, theme)
    return figure


def _height_of_map(chart: Mapping[str, Any]) -> float:
    return max(INCHES_OF_A_CELL * (1.5 if plotting.is_narrow() else 1) * len(chart["rows"]) + 0.9, LEAST_INCHES)


def _draw_map(axes: Axes, chart: Mapping[str, Any], one: CandidateData, theme: Theme) -> None:
    """Draw a cell for each batch and length, the largest batch on top."""
    from matplotlib.patches import Rectangle

    between = "\n" if plotting.is_narrow() else ", "
    areas = {"fits": theme.fits_area, "tight": theme.tight_area, "over": theme.faint}
    columns, rows = len(chart["lengths"]), list(zip(chart["rows"], chart["cells"], strict=True))[::-1]
    for place, (count, cells) in enumerate(rows):
        for column, (length, cell) in enumerate(zip(chart["lengths"], cells, strict=True)):
            is_chosen = count == one["micro_batch_size"] and length == one["seq_len"]
            word, size = WORDS[cell["verdict"]], cell["total_bytes"]
            look: dict[str, Any] = {"facecolor": areas[cell["verdict"]], "edgecolor": theme.paper, "linewidth": 1.5}
            area = axes.add_patch(Rectangle((column, place), 1, 1, **look))
            text = f"{count} example{'s' * (count != 1)}{'' if length is None else f' of {length} tokens'}"
            text += f", {max(one['examples'] // count, 1)} times: {word}, "
            plotting.explain(area, text + ("as smaller or larger batches show" if size is None else format_bytes(size)))
            said = word if size is None else f"{word}{between}{to_gib(size):.2f}"
            look = {"ha": "center", "va": "center", "fontsize": 8.5, "weight": "bold" if is_chosen else "normal"}
            axes.text(column + 0.5, place + 0.5, said, **look)
            if is_chosen:
                edge = Rectangle((column, place), 1, 1, fill=False, edgecolor=theme.ink, linewidth=1.8, zorder=2)
                axes.add_patch(edge)
    axes.set_xlim(0, columns)
    axes.set_ylim(len(rows), 0)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    axes.set_yticks([place + 0.5 for place in range(len(rows))], [str(count) for count, _ in rows])
    lengths = ["one size" if length is None else f"{length:,}" for length in chart["lengths"]]
    axes.set_xticks([column + 0.5 for column in range(columns)], lengths)
    axes.set_xlabel("tokens of the longest example" if columns > 1 else "")
    axes.set_ylabel("examples at a time")
