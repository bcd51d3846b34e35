"""Draw what a training run took, step by step and phase by phase, beside what was predicted for its largest batch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from hf_memopt import plotting
from hf_memopt.components import COLOURS
from hf_memopt.plotting import Theme
from hf_memopt.prediction.reports import phase_name
from hf_memopt.prediction.reports.pictures import Limit, near
from hf_memopt.prediction.reports.run.run_file import Points, StepsData, phase_pairs
from hf_memopt.units import format_bytes, format_number, percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TITLE_COLUMNS, NAME_COLUMNS = 100, 40
STRETCHES = 48  # of a page, whose peaks can be read
LOOKS: dict[str, dict[str, Any]] = {  # a marker for each besides its colour
    "forward_backward": {"color": COLOURS["weights"], "marker": "o"},
    "optimizer": {"color": COLOURS["optimizer state"], "marker": "s"},
    "evaluation": {"color": COLOURS["logits and loss"], "marker": "^"},
}
CURVE_LOOK: dict[str, Any] = {"color": COLOURS["weights"], "linewidth": 1.3, "marker": "o", "markersize": 2.5}
MEASURED_COLOUR, PREDICTED_COLOUR = COLOURS["weights"], "#9FC7E3"
MOST_MARKERS = 60  # points of a curve that has markers
KINDS = {"allocated_bytes": "allocated by tensors", "rss_bytes": "resident memory of the process"}


@dataclass(frozen=True)
class RunPicture:
    """What a run took.

    Attributes:
        steps: the peaks of each phase by step.
        peaks: of the whole run by phase and kind, as ``MemoryReportCallback.summary``.
        predicted: the allocated peaks of the largest batch, by the phases of an estimate; {} where it was not.
        limit: the device; None for no line.
        name: of the model and the device, which begins the title; "" for no title.
        batch: what was predicted.
        reason: why nothing was; "" otherwise.
    """

    steps: Mapping[str, StepsData]
    peaks: Mapping[str, Mapping[str, int]]
    predicted: Mapping[str, int]
    limit: Limit | None = None
    name: str = ""
    batch: str = ""
    reason: str = ""

    def draw(self, theme: Theme) -> Figure:
        """Return the picture."""
        pairs = phase_pairs(self.peaks, self.predicted)
        measured = {phase: size or 0 for phase, (size, _) in pairs.items()}
        predicted = {phase: size for phase, (_, size) in pairs.items() if size is not None}
        most = max([1, *measured.values(), *predicted.values(), *(max(one["bytes"]) for one in self.steps.values())])
        scale, unit, digits = plotting.scale_of(most)
        below = 0.9 + 0.44 * len(measured)
        figure = plotting.new_figure(4.1 + below)
        above, bars = figure.subplots(2, 1, height_ratios=[3.0, below])
        limit = None if self.limit is None else near(self.limit, most)
        self._draw_steps(plotting.bare(above), scale, unit, predicted, limit, theme)
        _draw_phases(plotting.bare(bars), measured, predicted, scale, unit, digits)
        if self.name:
            figure.suptitle(
                fill(self._title(measured, predicted), plotting.columns(TITLE_COLUMNS)), fontsize=9.5, x=0.01, ha="left"
            )
        return figure

    def write(self, path: Path) -> None:
        """Draw it to a PNG, SVG or PDF file."""
        plotting.write_picture(path, self.draw, purpose="the picture of a memory report")

    def _title(self, measured: Mapping[str, int], predicted: Mapping[str, int]) -> str:
        said = f"{self.name}: {format_bytes(max(measured.values()))} at the peak, measured"
        if not self.predicted:
            return f"{said}. Not predicted: {self.reason}"
        both = [max(sizes[name] for name in predicted) for sizes in (predicted, measured)]
        ratio = both[0] / max(both[1], 1) - 1
        predicted_text = f"{format_bytes(both[0])} predicted ({percent(ratio, 1, signed=True)})"
        return f"{said}; {predicted_text} for the largest batch, {self.batch}"

    def _draw_steps(
        self, axes: Axes, scale: float, unit: str, predicted: Mapping[str, int], limit: Limit | None, theme: Theme
    ) -> None:
        """Draw the peak of each step, and the predicted peaks of the same phases as dashed lines."""
        from matplotlib.ticker import MaxNLocator

        for phase, points in self.steps.items():
            look = LOOKS.get(phase, {"color": theme.strong, "marker": "."})
            few = len(points["first"]) <= MOST_MARKERS
            style: dict[str, Any] = {"linestyle": "" if phase == "evaluation" else "-", "markersize": 4}
            style |= {"linewidth": 1.2, "marker": look["marker"] if few or phase == "evaluation" else ""}
            sizes, name = [size * scale for size in points["bytes"]], phase_name(phase)
            axes.plot(points["first"], sizes, color=look["color"], label=f"{name}, measured", **style)
            if phase in predicted:
                style = {"linestyle": "--", "linewidth": 1.1, "label": f"{name}, predicted"}
                axes.axhline(predicted[phase] * scale, color=look["color"], **style)
        if limit is not None:
            label = fill(f"{limit.name}: {format_bytes(limit.usable_bytes)}", plotting.columns(NAME_COLUMNS))
            axes.axhline(limit.usable_bytes * scale, color=theme.limit, linestyle=":", linewidth=1.6, label=label)
        axes.set_ylim(0, 1.1 * axes.get_ylim()[1])
        axes.set_xlim(left=0)
        axes.set_xlabel("optimizer step")
        axes.set_ylabel(f"peak in {unit}")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(loc="lower right", ncols=1 if plotting.is_narrow() else 2, framealpha=0.9)
        self._explain_steps(axes)
        kinds = next(iter(self.peaks.values()), {})
        kind = next((text for name, text in KINDS.items() if any(one.endswith(name) for one in kinds)), "")
        axes.set_title(f"Peak of each step, {kind}", loc="left")

    def _explain_steps(self, axes: Axes) -> None:
        """Let a page tell the largest peak of each phase in a stretch of steps."""
        steps = sorted({step for points in self.steps.values() for step in points["first"]})
        if not steps:
            return
        firsts, texts = steps[:: -(-len(steps) // STRETCHES)], []
        ends = [*firsts[1:], steps[-1] + 1]
        for first, end in zip(firsts, ends, strict=True):
            held = []
            for phase, points in self.steps.items():
                pairs = zip(points["first"], points["bytes"], strict=True)
                if sizes := [size for step, size in pairs if first <= step < end]:
                    held.append(f"{phase_name(phase)} {format_bytes(max(sizes))}")
            steps_text = f"step {first}" if end == first + 1 else f"steps {first} to {end - 1}"
            texts.append(f"{steps_text}: {', '.join(held)}")
        plotting.explain_stretches(axes, [first - 0.5 for first in [*firsts, ends[-1]]], texts)


def curves_figure(curves: Mapping[str, Points], theme: Theme) -> Figure:
    """Return the curves of a run, as ``curves_of`` returns them, a panel for each quantity."""
    from matplotlib.ticker import MaxNLocator

    figure = plotting.new_figure(1.35 * len(curves) + 0.6)
    panels = figure.subplots(len(curves), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (name, (steps, values)) in zip(panels, curves.items(), strict=True):
        plotting.bare(axes).set_title(name, loc="left")
        axes.plot(steps, [math.nan if value is None else value for value in values], **CURVE_LOOK)
        told: dict[float, list[str]] = {}
        for step, value in zip(steps, values, strict=True):
            told.setdefault(step, []).append("not finite" if value is None else format_number(value))
        shown = sorted(told)[:: max(-(-len(told) // STRETCHES), 1)]
        edges = [*shown, 2 * shown[-1] - shown[-2] if len(shown) > 1 else shown[-1] + 1]
        plotting.explain_stretches(axes, edges, [f"{name}, step {step:g}: {', '.join(told[step])}" for step in shown])
        if name != "loss":
            axes.set_ylim(bottom=0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    panels[-1].set_xlabel("optimizer step")
    return figure


def _draw_phases(
    axes: Axes, measured: Mapping[str, int], predicted: Mapping[str, int], scale: float, unit: str, digits: int
) -> None:
    """Draw the largest peak of each phase as a bar, and below it the predicted one."""
    for row, (phase, size) in enumerate(measured.items()):
        pairs = [("measured", size, -0.19, MEASURED_COLOUR)]
        if phase in predicted:
            pairs.append(("predicted", predicted[phase], 0.19, PREDICTED_COLOUR))
        for kind, one, offset, colour in pairs:
            hatch = "////" if kind == "predicted" else None
            look: dict[str, Any] = {
                "height": 0.36,
                "color": colour,
                "hatch": hatch,
                "edgecolor": "white",
                "linewidth": 0,
            }
            [bar] = axes.barh(row + offset, one * scale, **look)
            plotting.explain(bar, f"{phase_name(phase)}, {kind}: {format_bytes(one)}")
            text = f"{one * scale:.{digits}f} {kind}"
            if kind == "predicted" and size:
                text += f" ({percent(one / size - 1, 1, signed=True)})"
            look = {"textcoords": "offset points", "va": "center", "fontsize": 8.5}
            axes.annotate(text, (one * scale, row + offset), xytext=(4, 0), **look)
    axes.set_yticks(
        range(len(measured)), [fill(phase_name(phase), plotting.columns(NAME_COLUMNS)) for phase in measured]
    )
    axes.invert_yaxis()
    axes.set_xlim(0, (2.0 if plotting.is_narrow() else 1.35) * axes.get_xlim()[1])
    axes.set_xlabel(f"largest peak of the run, in {unit}")
