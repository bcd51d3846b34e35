"""Draw the lengths of data as a histogram, and what each way of batching computes for its padding."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from hf_memopt import plotting
from hf_memopt.components import COLOURS
from hf_memopt.plotting import Theme
from hf_memopt.units import percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_OF_REAL = 6.0  # how long a bar of the picture is, at most
REAL, OURS, MEAN = (COLOURS[name] for name in ("weights", "activations", "gradients"))
CELLS = "#9ECAE1"
LINES = {"p50": "-", "p90": "--", "p95": "-.", "p99": ":"}


def draw_lengths(report: Mapping[str, Any], path: Path, unit: str) -> None:
    """Draw the lengths and what each way of batching pads to a file; see ``PaddingReport.plot``."""
    purpose = "the picture of a padding report"
    plotting.write_picture(path, partial(lengths_figure, report, unit), purpose=purpose)


def lengths_figure(report: Mapping[str, Any], unit: str, theme: Theme) -> Figure:
    """Return the picture, of lengths in a unit such as "tokens"."""
    rows = (0.75 if plotting.is_narrow() else 0.42) * len(report["strategies"])
    figure = plotting.new_figure(4.3 + rows)
    above, below = figure.subplots(2, 1, height_ratios=[3.0, 0.9 + rows])
    _draw_histogram(report, plotting.bare(above), unit, theme)
    _draw_strategies(report, plotting.bare(below), unit, theme)
    return figure


def _draw_histogram(report: Mapping[str, Any], axes: Axes, unit: str, theme: Theme) -> None:
    edges, counts = report["histogram"]["edges"], report["histogram"]["counts"]
    has_tail = report["histogram"]["has_tail"]
    cells = max(len(counts) - has_tail, 1)
    look: dict[str, Any] = {"color": CELLS, "edgecolor": theme.paper, "linewidth": 0.5}
    bars = axes.bar(edges[:cells], counts[:cells], width=edges[1] - edges[0], align="edge", **look)
    for bar, low, high, count in zip(bars, edges, edges[1:], counts, strict=False):
        plotting.explain(bar, f"{low:,} to {high - 1:,} {unit}: {count:,} examples")
    axes.set_xlim(0, max(edges[cells], 1))
    shown: dict[int, list[str]] = {}  # percentiles that are equal share a line
    for name in (name for name in LINES if name in report["percentiles"]):
        shown.setdefault(report["percentiles"][name], []).append(name)
    for length, names in shown.items():
        label = f"{', '.join(names)} = {length:,}"
        axes.axvline(length, color=REAL, linestyle=LINES[names[0]], linewidth=1.6, label=label)
    axes.axvline(report["mean"], color=MEAN, linewidth=1.6, label=f"mean = {report['mean']:,.1f}")
    beyond = f"; {counts[-1]:,} longer ones, up to {report['longest']:,}, not drawn" if has_tail else ""
    axes.set_title(f"Lengths of {report['examples']:,} examples", fontsize=10, loc="left")
    axes.set_xlabel(fill(f"{unit} per example{beyond}", plotting.columns(90)))
    axes.set_ylabel("examples")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.legend(loc="upper right", framealpha=0.9)


def _draw_strategies(report: Mapping[str, Any], axes: Axes, unit: str, theme: Theme) -> None:
    """Draw what is computed for each way of batching, padding included, as a multiple of what is real."""
    found = report["strategies"]
    factors = [1 / max(min(float(one["padding_efficiency"]), 1.0), 1e-9) for one in found]
    most = min(max(factors, default=1.0), MOST_OF_REAL)
    for row, (one, computed) in enumerate(zip(found, factors, strict=True)):
        is_ours = one["name"].startswith(("bucketed", "packed"))
        [real] = axes.barh(row, 1, color=OURS if is_ours else REAL, height=0.66)
        said = (
            f"{one['name']}: {computed:.2f} tokens are computed for one of a text, {percent(1 - 1 / computed)} padding"
        )
        plotting.explain(real, said)
        padding: dict[str, Any] = {"color": theme.faint, "hatch": "////", "edgecolor": theme.strong, "linewidth": 0}
        axes.barh(row, min(computed, most) - 1, left=1, height=0.66, **padding)
        axes.annotate(
            f"{'» ' if computed > most else ''}{computed:.2f} x, {percent(1 - 1 / computed)} padding",
            (min(computed, most), row),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize=8.5,
            weight="bold" if is_ours else "normal",
        )
    names = [f"{one['name']}\nlargest batch {one['largest_batch_tokens']:,} {unit}" for one in found]
    times = [f", about {seconds:,.0f} s an epoch" if (seconds := one.get("epoch_seconds")) else "" for one in found]
    names = [f"{name}{time}" for name, time in zip(names, times, strict=True)]
    if plotting.is_narrow():
        names = ["\n".join(fill(line, 24) for line in name.splitlines()) for name in names]
    axes.set_yticks(range(len(found)), names, fontsize=8.5)
    axes.invert_yaxis()
    axes.set_xlim(0, (2.4 if plotting.is_narrow() else 1.38) * most)  # room for the figures
    axes.spines["bottom"].set_bounds(0, most)
    axes.set_xticks(range(int(most) + 1))
    title = f"What one epoch computes: real {unit}, and padding (hatched), in batches of {report['batch_size']}"
    axes.set_title(fill(title, 24 if plotting.is_narrow() else 64), fontsize=10, loc="left")
    axes.set_xlabel(f"{unit} computed for each real one")
