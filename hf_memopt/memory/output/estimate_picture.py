"""Draw the timeline of an ``Estimate`` as a stacked area chart, with its peak as a bar of its own beside it.

The horizontal axis counts allocations and frees, not seconds. A long timeline is reduced to the extremes of about 2,000
stretches, each of them a state that was reached: no peak is lost and nothing is averaged. CUDA's context is the bottom
layer, so that one line is the limit: what is usable of the GPU. A last step that repeats the one before is left out.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from textwrap import fill
from typing import TYPE_CHECKING, Any

from hf_memopt import plotting as pictures
from hf_memopt.memory.output.estimate_text import COLOURS, describe, verdict
from hf_memopt.memory.timeline import COMPONENTS, phase_spans, without_repeated_steps
from hf_memopt.plain_data import checked_path
from hf_memopt.units import format_bytes, to_gib, to_mib

if TYPE_CHECKING:
    import os

    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from hf_memopt.memory.result import Estimate
    from hf_memopt.memory.timeline import Timeline

__all__ = ["draw", "drawn_events", "event_positions"]

STRETCHES = 2000
CONTEXT = "CUDA context"
TITLE_COLUMNS = 100
HEADROOM = 1.25  # above the highest line, for the notes
THEME = pictures.LIGHT

PHASE_SHADES = {
    "load": "#F2F2F2",
    "forward": "#D9D9D9",
    "backward": "#B3B3B3",
    "optimizer": "#595959",
    "generation": "#F0D9B5",
    "evaluation": "#D6CBE6",
}


def draw(estimate: Estimate, path: str | os.PathLike[str]) -> None:
    """Draw the timeline to a PNG, SVG or PDF file: components stacked, phases shaded, the peak labelled.

    Raises:
        ValueError: ``path`` is not such a file, or cannot be written.
        MissingExtraError: matplotlib is not installed.
    """
    path = checked_path("path", path)
    pictures.check_picture(path, purpose="the picture of an estimate", name="path")
    with pictures.drawing():
        pictures.save_picture(_figure(replace(estimate, timeline=without_repeated_steps(estimate.timeline))), path)


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
    fits = verdict(estimate).partition(";")[0]  # without the advice
    title = "\n".join(fill(text, TITLE_COLUMNS) for text in (describe(estimate), fits))
    legend_inches = 0.19 * (2 + max((len(_used(estimate.timeline)) + 2) // 2, len(_names(estimate.timeline))))
    figure = Figure(figsize=(pictures.WIDTH_INCHES, 4.4 + legend_inches), layout="constrained")
    grid = figure.add_gridspec(3, 2, height_ratios=[0.22, 3.6, legend_inches], width_ratios=[20, 1.3])
    strip = figure.add_subplot(grid[0, 0])
    axes = figure.add_subplot(grid[1, 0], sharex=strip)
    panel = figure.add_subplot(grid[1, 1], sharey=axes)
    axes.set_xlim(0, positions[-1])
    for one in (axes, panel):
        one.set_xticks([])
        one.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("allocations and frees in their order (no time scale)")
    axes.set_ylabel(f"memory in {unit}")
    panel.set_xlabel("at the\npeak")
    panel.tick_params(left=False, labelleft=False)
    _draw_stack(estimate, axes, positions, scale)
    _draw_limits(estimate, axes, panel, positions, scale)
    _draw_phases(estimate.timeline, strip, axes, positions)
    _draw_peak(estimate, axes, panel, positions, scale)
    _draw_legends(estimate, figure.add_subplot(grid[2, :]), axes, scale, unit)
    figure.suptitle(title, fontsize=9.5, x=0.01, ha="left")
    return figure


def _used(timeline: Timeline) -> list[int]:
    """Return the numbers of the components that ever hold a byte."""
    return [number for number in range(len(COMPONENTS)) if timeline.components[:, number].any()]


def _names(timeline: Timeline) -> list[str]:
    """Return the phases, each once."""
    return list(dict.fromkeys(name for _, _, name in phase_spans(timeline)))


def _draw_stack(estimate: Estimate, axes: Axes, positions: np.ndarray, scale: float) -> None:
    import numpy as np

    timeline, context_bytes = estimate.timeline, estimate.context_bytes or 0
    shown = drawn_events(timeline)
    where = np.append(positions[shown], positions[-1])
    rows = np.append(shown, shown[-1])  # the last state is held to the end
    used = _used(timeline)
    colours = [THEME.strong, *(COLOURS[COMPONENTS[number]] for number in used)]
    layers = np.vstack([np.full(len(where), context_bytes), timeline.components[rows][:, used].T]) * scale
    first = 0 if context_bytes else 1
    axes.stackplot(where, layers[first:], colors=colours[first:], step="post", linewidth=0)
    reserved = (timeline.reserved[rows] + context_bytes) * scale
    label = f"reserved{' and context' if context_bytes else ''}, peak {format_bytes(estimate.total_bytes)}"
    axes.step(where, reserved, where="post", color=THEME.ink, linewidth=1.1, label=label)


def _draw_limits(estimate: Estimate, axes: Axes, panel: Axes, positions: np.ndarray, scale: float) -> None:
    """Draw what is usable of the GPU, all above it in red, and where memory runs out."""
    top_bytes, gpu = estimate.total_bytes, estimate.gpu
    if gpu is not None:
        without = "" if estimate.context_bytes is not None else ", less a context of unknown size"
        label = f"usable on {gpu.name}{without}: {format_bytes(gpu.usable_bytes)}"
        is_drawn = gpu.usable_bytes <= 2 * top_bytes
        if is_drawn:
            top_bytes = max(top_bytes, gpu.usable_bytes)
        else:  # drawn to scale, it would leave the run a thin line at the bottom
            label += " (above the picture)"
        limit = gpu.usable_bytes * scale
        axes.axhline(limit, color=THEME.limit, linestyle="--", linewidth=1.6, label=label)
        if is_drawn:
            panel.axhline(limit, color=THEME.limit, linestyle="--", linewidth=1.6)
            for one in (axes, panel):
                one.axhspan(limit, HEADROOM * top_bytes * scale, color=THEME.limit, alpha=0.08, linewidth=0, zorder=0)
        _mark_out_of_memory(estimate, axes, positions, gpu.usable_bytes, scale)
    axes.set_ylim(0, HEADROOM * top_bytes * scale)


def _mark_out_of_memory(estimate: Estimate, axes: Axes, positions: np.ndarray, usable_bytes: int, scale: float) -> None:
    """Mark the first event at which more is reserved than is usable; none where that is never so."""
    timeline = estimate.timeline
    over = timeline.reserved + (estimate.context_bytes or 0) > usable_bytes
    if not over.any():
        return
    event = int(over.argmax())
    phase = next(name for first, end, name in phase_spans(timeline) if first <= event < end)
    step = max((number for first, number in timeline.steps if first <= event), default=0)
    name = f"step {step}, {phase}" if step and phase not in ("generation", "evaluation") else phase
    limit = usable_bytes * scale
    axes.plot(positions[event], limit, marker="X", color=THEME.limit, markersize=10, zorder=6)
    text = f"out of memory here: {name}"
    _note(axes, positions, event, text, height=limit, offset=-18, colour=THEME.limit)


def _draw_phases(timeline: Timeline, strip: Axes, axes: Axes, positions: np.ndarray) -> None:
    strip.set_ylim(0, 1)
    strip.axis("off")
    for first, end, name in phase_spans(timeline):
        left, right = positions[first], positions[end]
        strip.axvspan(left, right, color=PHASE_SHADES[name], linewidth=0)
        axes.axvspan(left, right, color=PHASE_SHADES[name], alpha=0.3, linewidth=0, zorder=0)
        ink = "white" if name == "optimizer" else "black"
        if right - left >= 0.0108 * len(name) * positions[-1]:  # the legend names the others
            strip.text((left + right) / 2, 0.45, name, ha="center", va="center", fontsize=8, color=ink)
    for first, number in timeline.steps:
        if first < len(timeline.reserved):
            axes.axvline(positions[first], color=THEME.ink, linewidth=0.9, linestyle=":")
            axes.text(
                positions[first], 0.99, f" step {number}", transform=axes.get_xaxis_transform(), va="top", fontsize=8.5
            )


def _draw_legends(estimate: Estimate, place: Axes, axes: Axes, scale: float, unit: str) -> None:
    """Explain the lines, the stack from its top with its bytes, and the phases, below the picture."""
    from matplotlib.patches import Patch

    place.axis("off")
    look: dict[str, Any] = {"frameon": False, "borderaxespad": 0, "alignment": "left", "labelspacing": 0.35}
    timeline = estimate.timeline
    digits = 2 if unit == "GiB" else 1
    largest = timeline.components.max(axis=0).tolist()
    stack = []
    for number in reversed(_used(timeline)):
        name = COMPONENTS[number]
        sizes = f"{estimate.components[name] * scale:.{digits}f} / {largest[number] * scale:.{digits}f}"
        stack.append(Patch(color=COLOURS[name], label=f"{name}  {sizes}"))
    if estimate.context_bytes:
        stack.append(Patch(color=THEME.strong, label=f"{CONTEXT}  {estimate.context_bytes * scale:.{digits}f}"))
    allocated = (
        f"{estimate.peak_allocated_bytes * scale:.{digits}f} {unit} allocated at the peak; at the peak / largest:"
    )
    lines = place.legend(*axes.get_legend_handles_labels(), loc="upper left", bbox_to_anchor=(0, 1.1), ncols=2, **look)
    place.add_artist(lines)  # a second legend would replace it
    rows = place.legend(handles=stack, loc="upper left", bbox_to_anchor=(0, 0.9), title=allocated, ncols=2, **look)
    place.add_artist(rows)
    shades = [
        Patch(facecolor=PHASE_SHADES[name], edgecolor="#888888", linewidth=0.5, label=name) for name in _names(timeline)
    ]
    place.legend(handles=shades, loc="upper right", bbox_to_anchor=(1, 0.9), title="phases", **look)


def _draw_peak(estimate: Estimate, axes: Axes, panel: Axes, positions: np.ndarray, scale: float) -> None:
    """Draw the peak as a bar of its own, since it may be too short to be seen among all events, and name it."""
    bottom = context_bytes = estimate.context_bytes or 0
    panel.bar(0, context_bytes * scale, color=THEME.strong)
    for name in COMPONENTS:
        panel.bar(0, estimate.components[name] * scale, bottom=bottom * scale, color=COLOURS[name])
        bottom += estimate.components[name]
    panel.bar(
        0, (estimate.total_bytes - bottom) * scale, bottom=bottom * scale, color=THEME.faint
    )  # reserved, not in use
    event = int(estimate.timeline.components.sum(axis=1).argmax())
    height = (context_bytes + estimate.peak_allocated_bytes) * scale
    text = f"peak {format_bytes(estimate.peak_allocated_bytes)}, {estimate.phase}"
    text += f"\n{estimate.module}" if estimate.module else ""
    arrow = {"arrowstyle": "->", "color": THEME.ink, "linewidth": 1.2}
    _note(axes, positions, event, text, height=height, offset=16, colour=THEME.ink, arrowprops=arrow)


def _note(
    axes: Axes, positions: np.ndarray, event: int, text: str, *, height: float, offset: float, colour: str, **look: Any
) -> None:
    """Write a note beside an event, towards the middle of the picture."""
    right_half = positions[event] > positions[-1] / 2
    axes.annotate(
        text,
        xy=(positions[event], height),
        xytext=(-20 if right_half else 20, offset),
        textcoords="offset points",
        ha="right" if right_half else "left",
        fontsize=8.5,
        color=colour,
        bbox={"boxstyle": "round,pad=0.3", "facecolor": THEME.paper, "edgecolor": colour},
        zorder=6,
        **look,
    )
