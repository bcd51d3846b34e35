"""Draw the timeline of a run as stacked areas, with its peak as a bar of its own beside it.

The horizontal axis counts allocations and frees, not seconds. CUDA's context is the bottom layer, so that one line is
the limit: what is usable of the GPU.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from textwrap import fill
from typing import TYPE_CHECKING, Any

from hf_memopt import plotting
from hf_memopt.components import CONTEXT
from hf_memopt.plotting import Theme
from hf_memopt.prediction.reports.pictures.bar_picture import Limit, colours_of, near
from hf_memopt.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TITLE_COLUMNS = 100
HEADROOM = 1.25  # above the highest line, for the notes
MOMENTS = 48  # of a page, whose components can be read
PHASE_SHADES = {
    "load": "#F2F2F2",
    "forward": "#D9D9D9",
    "backward": "#B3B3B3",
    "optimizer": "#595959",
    "generation": "#F0D9B5",
    "evaluation": "#D6CBE6",
}


def out_of_memory(line: Mapping[str, Any], context_bytes: int, usable_bytes: int) -> tuple[float, str] | None:
    """Return where more is reserved than is usable for the first time, and in which phase; None where it never is."""
    events = zip(line["positions"], line["reserved_bytes"], strict=True)
    over = next((at for at, size in events if size + context_bytes > usable_bytes), None)
    if over is None:
        return None
    phase = next((span["name"] for span in line["phases"] if span["from"] <= over < span["to"]), "")
    step = max((step["number"] for step in line["steps"] if step["from"] <= over), default=0)
    return over, f"step {step}, {phase}" if step and phase not in ("generation", "evaluation") else phase


@dataclass(frozen=True)
class TimelinePicture:
    """A timeline, and what stands beside it.

    Attributes:
        line: bytes over the events of a run.
        parts: what the total is made of at the peak, by name, CUDA's context first.
        limit: the GPU; None for no line.
        limit_label: what the legend says of it.
        title: above the picture.
        micro_batches: of a step, of which some may not be drawn.
    """

    line: Mapping[str, Any]
    parts: Mapping[str, int]
    limit: Limit | None
    limit_label: str = ""
    title: str = ""
    micro_batches: int = 1

    @property
    def _context_bytes(self) -> int:
        return self.parts.get(CONTEXT, 0)

    @property
    def _total_bytes(self) -> int:
        return max(sum(self.parts.values()), 1)

    def draw(self, theme: Theme) -> Figure:
        """Return the picture."""
        figure = plotting.new_figure(5.6 + 0.15 * self.title.count("\n"))
        grid = figure.add_gridspec(
            2, 2, height_ratios=[0.22, 3.6], width_ratios=[7 if plotting.is_narrow() else 20, 1.3]
        )
        strip = figure.add_subplot(grid[0, 0])
        axes = plotting.bare(figure.add_subplot(grid[1, 0], sharex=strip))
        panel = plotting.bare(figure.add_subplot(grid[1, 1], sharey=axes))
        scale, unit, digits = plotting.scale_of(self._total_bytes - self._context_bytes)
        axes.set_xlim(0, 1)
        axes.set_xticks([])
        last = self.line["steps"][-1]["from"] if self.line["steps"] else 0.0
        drawn = sum(span["name"] == "forward" and span["from"] >= last for span in self.line["phases"])
        fewer = f"; {drawn} of {self.micro_batches} micro-batches of a step are drawn"
        order = "allocations and frees in their order (no time scale)"
        order = fill(order + (fewer if 0 < drawn < self.micro_batches else ""), plotting.columns(TITLE_COLUMNS))
        axes.set_xlabel(order, labelpad=8 if plotting.is_narrow() else None)  # it may be as wide as the 0 beside it
        axes.set_ylabel(f"memory in {unit}")
        panel.set_xticks([])
        panel.set_xlabel("what\ndecides", ha="right", x=1.0)
        panel.tick_params(left=False, labelleft=False)
        self._draw_stack(axes, scale, theme)
        self._draw_limit(axes, panel, scale, theme)
        self._draw_phases(strip, axes, theme)
        self._explain_moments(axes)
        self._draw_peak(axes, panel, scale, theme)
        allocated = f"{self.line['peak']['allocated_bytes'] * scale:.{digits}f}"
        look: dict[str, Any] = {
            "ncols": 2 if plotting.is_narrow() else 3,
            "frameon": False,
            "alignment": "left",
            "labelspacing": 0.35,
        }
        title = f"{allocated} {unit} allocated where the total is decided; of components, there / at most:"
        look["title"] = fill(title, plotting.columns(TITLE_COLUMNS))
        figure.legend(handles=self._legend_of(axes, scale, digits, theme), loc="outside lower left", **look)
        if self.title:
            figure.suptitle(self.title, fontsize=9.5, x=0.01, ha="left")
        return figure

    def _used(self) -> list[str]:
        """Return the components that ever hold a byte, from the top of the stack."""
        return [name for name, sizes in reversed(self.line["components"].items()) if any(sizes)]

    def _draw_stack(self, axes: Axes, scale: float, theme: Theme) -> None:
        """Draw the sum of all components, over it that of all but the topmost one, and so on down to the context."""
        colours = colours_of(theme)
        sums = [self._context_bytes + sum(sizes) for sizes in zip(*self.line["components"].values(), strict=True)]
        for name in self._used():
            held = self._held(sums, scale)
            area = axes.stairs(*held, fill=True, color=colours.get(name, theme.strong), linewidth=0, zorder=1)
            plotting.explain(area, f"{name}: at most {format_bytes(max(self.line['components'][name]))}", name)
            sums = [total - size for total, size in zip(sums, self.line["components"][name], strict=True)]
        context = self._context_bytes * scale
        axes.stairs([context], [0, 1], fill=True, color=theme.strong, linewidth=0, zorder=1)
        reserved = [self._context_bytes + size for size in self.line["reserved_bytes"]]
        label = f"reserved{' and context' if context else ''}, {format_bytes(self._total_bytes)} at most"
        label = fill(label, plotting.columns(TITLE_COLUMNS // 2))
        look: dict[str, Any] = {"baseline": None, "color": theme.ink, "linewidth": 1.1, "label": label}
        axes.stairs(*self._held(reserved, scale), zorder=2, **look)

    def _explain_moments(self, axes: Axes) -> None:
        """Let a page tell what each component holds, at the largest moment of each stretch."""
        positions, components, texts = self.line["positions"], self.line["components"], []
        sums = [sum(sizes) for sizes in zip(*components.values(), strict=True)]
        edges = [place / MOMENTS for place in range(MOMENTS + 1)]
        for left, right in pairwise(edges):
            first = max(bisect_right(positions, left) - 1, 0)
            at = max(range(first, max(bisect_left(positions, right), first + 1)), key=lambda event: sums[event])
            where = max(positions[at], left)
            phase = next((span["name"] for span in self.line["phases"] if span["from"] <= where < span["to"]), "")
            held = [f"{name} {format_bytes(sizes[at])}" for name, sizes in components.items() if sizes[at]]
            total = f"{phase}, {format_bytes(sums[at])} allocated" if phase else f"{format_bytes(sums[at])} allocated"
            texts.append(f"{total}: {', '.join(held)}; {format_bytes(self.line['reserved_bytes'][at])} reserved")
        plotting.explain_stretches(axes, edges, texts)

    def _held(self, sizes: Sequence[int], scale: float) -> tuple[list[float], list[float]]:
        """Return the values of a line that holds each up to the next position, and the edges: one more than values."""
        changes = [event for event, size in enumerate(sizes) if not event or size != sizes[event - 1]]
        edges = [min(max(float(self.line["positions"][event]), 0.0), 1.0) for event in changes[1:]]
        return [sizes[event] * scale for event in changes], [0.0, *edges, 1.0]

    def _draw_limit(self, axes: Axes, panel: Axes, scale: float, theme: Theme) -> None:
        """Draw what is usable of the GPU, all above it in red, and where memory runs out."""
        most_bytes, limit, headroom = self._total_bytes, self.limit, 1.6 if plotting.is_narrow() else HEADROOM
        if limit is None:
            axes.set_ylim(0, headroom * most_bytes * scale)
            return
        is_drawn, usable = near(limit, most_bytes) is not None, limit.usable_bytes * scale
        label = self.limit_label if is_drawn else f"{self.limit_label} (above the picture)"
        label = fill(label, plotting.columns(TITLE_COLUMNS // 2))
        most_bytes = max(most_bytes, limit.usable_bytes) if is_drawn else most_bytes
        axes.set_ylim(0, headroom * most_bytes * scale)
        axes.axhline(usable, color=theme.limit, linestyle="--", linewidth=1.6, label=label)
        if is_drawn:
            panel.axhline(usable, color=theme.limit, linestyle="--", linewidth=1.6)
            for one in (axes, panel):
                one.axhspan(usable, headroom * most_bytes * scale, color=theme.limit, alpha=0.08, linewidth=0, zorder=0)
        over = out_of_memory(self.line, self._context_bytes, limit.usable_bytes)
        if over is not None:
            axes.plot(over[0], usable, marker="X", color=theme.limit, markersize=10, zorder=6)
            _note(axes, over[0], f"out of memory here: {over[1]}", usable, -18, theme, theme.limit)

    def _draw_phases(self, strip: Axes, axes: Axes, theme: Theme) -> None:
        strip.set_ylim(0, 1)
        strip.axis("off")
        for span in self.line["phases"]:
            left, right, name = span["from"], span["to"], span["name"]
            shade = PHASE_SHADES.get(name, theme.faint)
            plotting.explain(strip.axvspan(left, right, color=shade, linewidth=0), name)
            axes.axvspan(left, right, color=shade, alpha=0.3, linewidth=0, zorder=0)
            ink = "white" if name == "optimizer" else "black"
            if right - left >= 0.0108 * len(name) * (2 if plotting.is_narrow() else 1):  # the legend names the others
                strip.text((left + right) / 2, 0.45, name, ha="center", va="center", fontsize=8, color=ink)
        for step in self.line["steps"]:
            axes.axvline(step["from"], color=theme.ink, linewidth=0.9, linestyle=":")
            place: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "va": "top", "fontsize": 8.5}
            axes.text(step["from"], 0.99, f"\N{NO-BREAK SPACE}step {step['number']}", **place)

    def _draw_peak(self, axes: Axes, panel: Axes, scale: float, theme: Theme) -> None:
        """Draw the peak as a bar of its own, since it may be too short to be seen among all events, and name it."""
        bottom, colours, peak = 0, colours_of(theme), self.line["peak"]
        for name, size in self.parts.items():
            [part] = panel.bar(0, size * scale, bottom=bottom * scale, color=colours[name])
            plotting.explain(part, f"{name}: {format_bytes(size)}")
            bottom += size
        text = f"peak here: {format_bytes(peak['allocated_bytes'])} allocated, {peak['phase']}"
        text = fill(text, plotting.columns(TITLE_COLUMNS // 2))
        text += f"\n{fill(peak['module'], plotting.columns(TITLE_COLUMNS // 2))}" if peak["module"] else ""
        arrow = {"arrowstyle": "->", "color": theme.ink, "linewidth": 1.2}
        height = (self._context_bytes + peak["allocated_bytes"]) * scale
        axes.plot(peak["position"], height, marker="o", color=theme.ink, markersize=4, zorder=6)
        _note(axes, peak["position"], text, height, 16, theme, theme.ink, arrowprops=arrow)

    def _legend_of(self, axes: Axes, scale: float, digits: int, theme: Theme) -> list[Any]:
        """Return what explains the lines, the stack from its top with its bytes, and the phases."""
        from matplotlib.patches import Patch

        colours, stack = colours_of(theme), []
        for name in self._used():
            largest = max(self.line["components"][name]) * scale
            label = f"{name}  {self.parts.get(name, 0) * scale:.{digits}f} / {largest:.{digits}f}"
            stack.append(Patch(color=colours.get(name, theme.strong), label=label))
        if self._context_bytes:
            label = f"{CONTEXT}  {self._context_bytes * scale:.{digits}f}"
            stack.append(Patch(color=theme.strong, label=label))
        shades = [
            Patch(facecolor=PHASE_SHADES.get(name, theme.faint), edgecolor="#888888", linewidth=0.5, label=name)
            for name in dict.fromkeys(span["name"] for span in self.line["phases"])
        ]
        return [*stack, *shades, *axes.get_legend_handles_labels()[0]]


def _note(
    axes: Axes, where: float, text: str, height: float, offset: float, theme: Theme, colour: str, **look: Any
) -> None:
    """Write a note beside an event, towards the middle of the picture."""
    on_right = where > 0.5
    axes.annotate(
        text,
        xy=(where, height),
        xytext=(-20 if on_right else 20, offset),
        textcoords="offset points",
        ha="right" if on_right else "left",
        fontsize=8.5,
        color=colour,
        bbox={"boxstyle": "round,pad=0.3", "facecolor": theme.paper, "edgecolor": colour},
        zorder=6,
        **look,
    )
