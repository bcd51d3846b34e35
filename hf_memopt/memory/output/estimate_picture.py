"""Draw the timeline of an ``Estimate`` as a stacked area chart.

The horizontal axis counts allocations and frees, not seconds. A long timeline is reduced to the extremes of about 2,000
stretches, each of them a state that was reached: no peak is lost and nothing is averaged.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_memopt import plotting as pictures
from hf_memopt.memory.output.estimate_text import COLOURS, describe, verdict
from hf_memopt.memory.timeline import COMPONENTS, phase_spans
from hf_memopt.units import format_bytes, to_gib, to_mib

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from hf_memopt.memory.result import Estimate
    from hf_memopt.memory.timeline import Timeline

__all__ = ["check_picture", "draw", "drawn_events", "event_positions"]

STRETCHES = 2000

PHASE_SHADES = {
    "load": "#F2F2F2",
    "forward": "#D9D9D9",
    "backward": "#B3B3B3",
    "optimizer": "#595959",
    "generation": "#F0D9B5",
    "evaluation": "#D6CBE6",
}


def check_picture(path: Path) -> None:
    """Refuse a path to which no picture can be written; see ``pictures.check_picture``."""
    pictures.check_picture(path, purpose="the picture of an estimate")


def draw(estimate: Estimate, path: str | Path) -> None:
    """Draw the timeline to a PNG, SVG or PDF file: components stacked, phases shaded, the peak labelled.

    Raises:
        ValueError: ``path`` is not such a file, or cannot be written.
        MissingExtraError: matplotlib is not installed.
    """
    path = Path(path)
    check_picture(path)
    pictures.save_picture(_figure(estimate), path)


def drawn_events(timeline: Timeline, stretches: int = STRETCHES) -> np.ndarray:
    """Return the events that the picture shows, ascending: all of a short timeline, the extremes of a long one.

    Each of ``stretches`` stretches of equal width keeps the events of most and fewest allocated bytes, of most reserved
    bytes, and its last; the first event of every phase is kept too. So the maximum of any stretch is exact, and so is
    what is held from one stretch to the next.
    """
    import numpy as np

    events = len(timeline.reserved)
    if events <= 4 * stretches:
        return np.arange(events)
    allocated, reserved = timeline.components.sum(axis=1), timeline.reserved
    positions = event_positions(timeline)
    edges = np.unique(np.searchsorted(positions, np.linspace(0, positions[-1], stretches + 1)))
    kept = {first for first, _, _ in phase_spans(timeline)}
    for first, end in pairwise(edges.tolist()):
        kept |= {first + int(allocated[first:end].argmax()), first + int(allocated[first:end].argmin())}
        kept |= {first + int(reserved[first:end].argmax()), end - 1}
    return np.array(sorted(kept))


def event_positions(timeline: Timeline) -> np.ndarray:
    """Return the horizontal position of each event and of the end; a phase of few events still gets 1.5 %."""
    import numpy as np

    events = len(timeline.reserved)
    spans = list(phase_spans(timeline))
    least = events * min(0.015, 0.5 / len(spans))
    ends = np.cumsum([0, *(max(end - first, least) for first, end, _ in spans)])
    return np.asarray(np.interp(np.arange(events + 1), [*(first for first, _, _ in spans), events], ends))


def _figure(estimate: Estimate) -> Figure:
    from matplotlib.figure import Figure

    positions = event_positions(estimate.timeline)
    in_gib = estimate.peak_reserved_bytes >= 2**28
    scale, unit = (to_gib(1), "GiB") if in_gib else (to_mib(1), "MiB")
    figure = Figure(figsize=(14, 7), layout="constrained")
    strip, axes = figure.subplots(2, 1, sharex=True, height_ratios=[1, 20])
    axes.set_xlim(0, positions[-1])
    axes.set_xticks([])
    axes.set_xlabel("allocations and frees in their order (no time scale)")
    axes.set_ylabel(f"memory in {unit}")
    axes.spines[["top", "right"]].set_visible(False)
    _draw_stack(estimate, axes, positions, scale)
    _draw_limits(estimate, axes, scale)
    _draw_phases(estimate.timeline, strip, axes, positions)
    _draw_peak(estimate, axes, positions, scale)
    _draw_legends(estimate, axes)
    figure.suptitle(f"{describe(estimate)}\n{verdict(estimate)}", fontsize=10.5, x=0.01, ha="left", wrap=True)
    return figure


def _draw_stack(estimate: Estimate, axes: Axes, positions: np.ndarray, scale: float) -> None:
    import numpy as np

    timeline = estimate.timeline
    shown = drawn_events(timeline)
    where = np.append(positions[shown], positions[-1])
    rows = np.append(shown, shown[-1])  # the last state is held to the end
    used = [number for number in range(len(COMPONENTS)) if timeline.components[:, number].any()]
    axes.stackplot(
        where,
        (timeline.components[rows][:, used] * scale).T,
        labels=[f"{COMPONENTS[n]}  {format_bytes(estimate.components[COMPONENTS[n]])}" for n in used],
        colors=[COLOURS[COMPONENTS[n]] for n in used],
        step="post",
        linewidth=0,
    )
    label = f"reserved, peak {format_bytes(estimate.peak_reserved_bytes)}"
    axes.step(where, timeline.reserved[rows] * scale, where="post", color="#222222", linewidth=1.3, label=label)


def _draw_limits(estimate: Estimate, axes: Axes, scale: float) -> None:
    top_bytes = estimate.peak_reserved_bytes
    if estimate.gpu is not None:
        limit_bytes = estimate.gpu.usable_bytes - (estimate.context_bytes or 0)
        without = "" if estimate.context_bytes is None else ", without the context"
        label = f"usable on {estimate.gpu.name}{without}:\n{format_bytes(limit_bytes)}"
        if limit_bytes <= 2 * top_bytes:
            top_bytes = max(top_bytes, limit_bytes)
        else:  # drawn to scale, it would leave the run a thin line at the bottom
            label += " (above the picture)"
        axes.axhline(limit_bytes * scale, color="#B00020", linestyle="--", linewidth=1.6, label=label)
    axes.set_ylim(0, 1.2 * top_bytes * scale)


def _draw_phases(timeline: Timeline, strip: Axes, axes: Axes, positions: np.ndarray) -> None:
    strip.set_ylim(0, 1)
    strip.axis("off")
    for first, end, name in phase_spans(timeline):
        left, right = positions[first], positions[end]
        strip.axvspan(left, right, color=PHASE_SHADES[name], linewidth=0)
        axes.axvspan(left, right, color=PHASE_SHADES[name], alpha=0.3, linewidth=0, zorder=0)
        wide = right - left >= 0.007 * len(name) * positions[-1]
        ink = "white" if name == "optimizer" else "black"
        strip.text(
            (left + right) / 2, 0.5, name if wide else name[:1], ha="center", va="center", fontsize=8.5, color=ink
        )
    for first, number in timeline.steps:
        if first < len(timeline.reserved):
            axes.axvline(positions[first], color="#222222", linewidth=0.9, linestyle=":")
            axes.text(
                positions[first], 0.99, f" step {number}", transform=axes.get_xaxis_transform(), va="top", fontsize=9
            )


def _draw_legends(estimate: Estimate, axes: Axes) -> None:
    """Add legends for the lines and the stack, in their order from the top, and for the phases."""
    from matplotlib.patches import Patch

    look: dict[str, Any] = {"frameon": False, "borderaxespad": 0, "alignment": "left"}
    handles, labels = axes.get_legend_handles_labels()
    lines = sum(not label.startswith(COMPONENTS) for label in labels)
    handles, labels = handles[::-1], labels[::-1]
    handles.insert(lines, Patch(alpha=0))
    labels.insert(lines, f"allocated at the peak {format_bytes(estimate.peak_allocated_bytes)}:")
    explained = axes.legend(handles, labels, loc="upper left", bbox_to_anchor=(1.01, 1.0), **look)
    axes.add_artist(explained)  # a second legend would replace it
    explained.set_clip_on(False)  # else the layout leaves it no room
    names = dict.fromkeys(name for _, _, name in phase_spans(estimate.timeline))
    shades = [Patch(facecolor=PHASE_SHADES[name], edgecolor="#888888", linewidth=0.5, label=name) for name in names]
    axes.legend(handles=shades, loc="lower left", bbox_to_anchor=(1.01, 0.0), title="phases", **look)


def _draw_peak(estimate: Estimate, axes: Axes, positions: np.ndarray, scale: float) -> None:
    event = int(estimate.timeline.components.sum(axis=1).argmax())
    where, height = positions[event], estimate.peak_allocated_bytes * scale
    name = f"peak {format_bytes(estimate.peak_allocated_bytes)}, {estimate.phase}"
    right_half = where > positions[-1] / 2
    axes.annotate(
        f"{name}\n{estimate.module}" if estimate.module else name,
        xy=(where, height),
        xytext=(-25 if right_half else 25, 30),
        textcoords="offset points",
        ha="right" if right_half else "left",
        fontsize=9.5,
        bbox={"boxstyle": "round,pad=0.3", "facecolor": "white", "edgecolor": "#222222"},
        arrowprops={"arrowstyle": "->", "color": "#222222", "linewidth": 1.2},
        zorder=5,
    )
