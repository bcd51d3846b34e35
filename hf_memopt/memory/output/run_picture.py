"""Draw what a training run took, step by step and phase by phase, beside what was predicted for its largest batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from hf_memopt import plotting as pictures
from hf_memopt.memory.timeline import phase_peaks
from hf_memopt.units import format_bytes, to_gib, to_mib

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from hf_memopt.memory.result import Estimate
    from hf_memopt.memory.run_record import RunRecord

__all__ = ["MeasuredRun", "draw_run", "predicted_peaks"]

TITLE_COLUMNS = 100
LOOKS: dict[str, dict[str, Any]] = {  # Okabe and Ito's palette, and a marker for each besides
    "forward_backward": {"color": "#0072B2", "marker": "o"},
    "optimizer": {"color": "#E69F00", "marker": "s"},
    "evaluation": {"color": "#CC79A7", "marker": "^"},
}
PREDICTED_PHASES = {
    "load": ("load",),
    "forward_backward": ("forward", "backward"),
    "optimizer": ("optimizer",),
    "evaluation": ("evaluation", "generation"),
}
MEASURED_COLOUR, PREDICTED_COLOUR = "#0072B2", "#9FC7E3"
MOST_MARKERS = 60  # points of a curve that has markers
KINDS = {"allocated_bytes": "allocated by tensors", "rss_bytes": "resident memory of the process"}


@dataclass(frozen=True)
class MeasuredRun:
    """What a run took.

    Attributes:
        name: of the model and the device.
        record: peaks by phase and step.
        summary: peaks of the whole run by phase and kind, as ``MemoryReportCallback.summary``.
        predicted: for the largest batch; None where it was not.
        reason: why not; "" otherwise.
    """

    name: str
    record: RunRecord
    summary: Mapping[str, Mapping[str, int]]
    predicted: Estimate | None
    reason: str = ""


def draw_run(run: MeasuredRun, path: Path) -> None:
    """Draw the run to a PNG, SVG or PDF file.

    Raises:
        ValueError: ``path`` is not such a file, or cannot be written.
        MissingExtraError: matplotlib is not installed.
    """
    pictures.check_picture(path, purpose="the picture of a memory report")
    with pictures.drawing():
        pictures.save_picture(_figure(run), path)


def predicted_peaks(found: Estimate | None) -> dict[str, int]:
    """Return the allocated peaks of an estimate by the phases of a memory report."""
    if found is None:
        return {}
    peaks = {name: sizes["allocated_bytes"] for name, sizes in phase_peaks(found.timeline).items()}
    return {
        phase: max(peaks[name] for name in names if name in peaks)
        for phase, names in PREDICTED_PHASES.items()
        if any(name in peaks for name in names)
    }


def _figure(run: MeasuredRun) -> Figure:
    from matplotlib.figure import Figure

    measured = {phase: _size(sizes) for phase, sizes in run.summary.items()}
    predicted = predicted_peaks(run.predicted)
    most = max(*measured.values(), *predicted.values(), 1)
    scale, unit = (to_gib(1), "GiB") if most >= 2**28 else (to_mib(1), "MiB")
    below = 0.9 + 0.44 * len(measured)
    figure = Figure(figsize=(pictures.WIDTH_INCHES, 4.1 + below), layout="constrained")
    above, bars = figure.subplots(2, 1, height_ratios=[3.0, below])
    _draw_steps(run, above, scale, unit, predicted)
    _draw_phases(bars, measured, predicted, scale, unit)
    figure.suptitle(fill(_title(run, measured, predicted), TITLE_COLUMNS), fontsize=9.5, x=0.01, ha="left")
    return figure


def _size(sizes: Mapping[str, int]) -> int:
    """Return what tensors held, or the process where nothing else is measured."""
    return next(size for kind, size in sizes.items() if kind.endswith(("allocated_bytes", "rss_bytes")))


def _title(run: MeasuredRun, measured: Mapping[str, int], predicted: Mapping[str, int]) -> str:
    peak = max(measured.values())
    said = f"{run.name}: {format_bytes(peak)} at the peak, measured"
    if run.predicted is None:
        return f"{said}. Not predicted: {run.reason}"
    shape = f"{run.predicted.batch_size}" + ("" if run.predicted.seq_len is None else f" x {run.predicted.seq_len}")
    same = [name for name in predicted if name in measured]
    both = [max(sizes[name] for name in same) for sizes in (predicted, measured)]
    ratio = both[0] / max(both[1], 1) - 1
    return f"{said}; {format_bytes(both[0])} predicted ({ratio:+.1%}) for the largest batch, {shape}"


def _draw_steps(run: MeasuredRun, axes: Axes, scale: float, unit: str, predicted: Mapping[str, int]) -> None:
    """Draw the peak of each step, and the predicted peaks of the same phases as dashed lines."""
    from matplotlib.ticker import MaxNLocator

    for phase, look in LOOKS.items():
        points = run.record.peaks.get(phase)
        if points is None:
            continue
        few = len(points.steps) <= MOST_MARKERS
        style: dict[str, Any] = {"linestyle": "" if phase == "evaluation" else "-", "markersize": 4, "linewidth": 1.2}
        marker = look["marker"] if few or phase == "evaluation" else ""
        sizes = [size * scale for size in points.sizes]
        axes.plot(points.steps, sizes, color=look["color"], marker=marker, label=f"{_named(phase)}, measured", **style)
        if phase in predicted:
            label = f"{_named(phase)}, predicted"
            axes.axhline(predicted[phase] * scale, color=look["color"], linestyle="--", linewidth=1.1, label=label)
    axes.set_ylim(0, 1.1 * axes.get_ylim()[1])
    axes.set_xlim(left=0)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel(f"peak in {unit}")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", ncols=2, framealpha=0.9)
    kinds = next(iter(run.summary.values()), {})
    kind = next((text for name, text in KINDS.items() if any(one.endswith(name) for one in kinds)), "")
    axes.set_title(f"Peak of each step, {kind}", loc="left")


def _draw_phases(
    axes: Axes, measured: Mapping[str, int], predicted: Mapping[str, int], scale: float, unit: str
) -> None:
    """Draw the largest peak of each phase as a bar, and below it the predicted one."""
    digits = 2 if unit == "GiB" else 1
    for row, (phase, size) in enumerate(measured.items()):
        pairs = [("measured", size, -0.19, MEASURED_COLOUR)]
        if phase in predicted:
            pairs.append(("predicted", predicted[phase], 0.19, PREDICTED_COLOUR))
        for kind, one, offset, colour in pairs:
            hatch = "////" if kind == "predicted" else None
            axes.barh(row + offset, one * scale, height=0.36, color=colour, hatch=hatch, edgecolor="white", linewidth=0)
            text = f"{one * scale:.{digits}f} {kind}"
            if kind == "predicted" and size:
                text += f" ({one / size - 1:+.1%})"
            look: dict[str, Any] = {"textcoords": "offset points", "va": "center", "fontsize": 8.5}
            axes.annotate(text, (one * scale, row + offset), xytext=(4, 0), **look)
    axes.set_yticks(range(len(measured)), [_named(phase) for phase in measured])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.35 * axes.get_xlim()[1])
    axes.set_xlabel(f"largest peak of the run, in {unit}")
    axes.spines[["top", "right"]].set_visible(False)


def _named(phase: str) -> str:
    return phase.replace("_", " + ")
