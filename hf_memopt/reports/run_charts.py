"""Turn what a run left into bars, lines and texts: the measured peak beside the predicted one, and peaks by step."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from hf_memopt.components import COMPONENTS
from hf_memopt.reports.bars import CONTEXT, UNUSED, bar_of, css_class, legend_of, percent
from hf_memopt.reports.charts import ticks
from hf_memopt.reports.run_file import PredictedData, RunData
from hf_memopt.units import format_bytes, to_gib, to_mib

__all__ = ["ALLOCATED", "RESERVED", "largest_peak", "measured_parts", "peak_bars", "steps_chart", "total_bytes"]

HOST = "resident memory of the process"
REST = "gradients, activations and others"
ALLOCATED = ("peak_allocated_bytes", "allocated_bytes", "rss_bytes")
RESERVED = ("peak_reserved_bytes", "reserved_bytes", "rss_bytes")
"""The kinds of a reading: peaks on CUDA, ROCm and XPU, samples on MPS, the process without an accelerator."""
WIDTH, HEIGHT = 1000, 400  # of the drawing, stretched to its box
HIGHEST = 2.5  # how far above the peak the device's line is drawn to scale


def largest_peak(told: RunData, kinds: tuple[str, ...]) -> int:
    """Return the largest peak of one of ``kinds`` over all phases; 0 where nothing was measured."""
    return max((of_phase.get(kind, 0) for of_phase in told["peaks"].values() for kind in kinds), default=0)


def total_bytes(told: RunData) -> int:
    """Return what the device held at the peak: reserved bytes and the context, as far as they are known."""
    return _peaks(told)[1] + (told["context_bytes"] or 0)


def _peaks(told: RunData) -> tuple[int, int]:
    """Return the largest allocated and reserved bytes, what was held when memory ran out included."""
    lost = told["out_of_memory"]
    failed = (0, 0) if lost is None else (lost["allocated_bytes"] or 0, lost["reserved_bytes"] or 0)
    return max(largest_peak(told, ALLOCATED), failed[0]), max(largest_peak(told, RESERVED), failed[1])


def peak_bars(told: RunData) -> dict[str, Any]:
    """Return the bar of the measured peak, and of the predicted one on the same scale where there is one."""
    measured, predicted = measured_parts(told), told["predicted"]
    device = told["device_bytes"] or 0
    total = sum(size for _, size in measured)
    computed = [] if predicted is None else _predicted(predicted)
    needed = sum(size for _, size in computed)
    top = max(total, needed, 1)
    scale = max(top, device if device <= HIGHEST * top else 0)
    shown = [("measured", measured, total), *([("predicted", computed, needed)] if computed else [])]
    names = dict.fromkeys(name for _, parts, _ in shown for name, size in parts if size)
    return {
        "rows": [
            {"name": name, "parts": bar_of(parts, scale), "size": format_bytes(size)} for name, parts, size in shown
        ],
        "limit": percent(device, scale) if 0 < device <= scale else None,
        "legend": legend_of(names),
    }


def measured_parts(told: RunData) -> list[tuple[str, int]]:
    """Return the parts of the measured peak: weights and optimizer state are in it, whatever the phase."""
    if largest_peak(told, ("rss_bytes",)):
        return [(HOST, largest_peak(told, ("rss_bytes",)))]
    allocated, reserved = _peaks(told)
    parts, rest = [(CONTEXT, told["context_bytes"] or 0)], allocated
    for name in ("weights", "optimizer state"):
        size = min(told["components"].get(name, 0), rest)
        parts.append((name, size))
        rest -= size
    return [*parts, (REST, rest), (UNUSED, max(reserved - allocated, 0))]


def _predicted(predicted: PredictedData) -> list[tuple[str, int]]:
    known = [(name, predicted["components"].get(name, 0)) for name in COMPONENTS]
    unused = max(predicted["reserved_bytes"] - sum(size for _, size in known), 0)
    return [(CONTEXT, predicted["context_bytes"] or 0), *known, (UNUSED, unused)]


def steps_chart(told: RunData) -> dict[str, Any] | None:
    """Return a line of peaks by optimizer step for each phase, with the axes; None without steps."""
    found = {name: one for name, one in told["steps"].items() if one["first"]}
    if not found:
        return None
    first, last = min(one["first"][0] for one in found.values()), told["last_step"]
    last = max(last, *(one["first"][-1] for one in found.values()))
    most, device = max(1, *(max(one["bytes"]) for one in found.values())), told["device_bytes"] or 0
    is_drawn = 0 < device <= HIGHEST * most
    top = 1.12 * max(most, device if is_drawn else 0)
    unit, scale = ("GiB", to_gib(1)) if most >= 2**28 else ("MiB", to_mib(1))
    lines = []
    for name, one in found.items():
        ends = [*one["first"][1:], last + 1]
        path = ""
        for begin, end, size in zip(one["first"], ends, one["bytes"], strict=True):
            left, right = (WIDTH * (at - first) / (last + 1 - first) for at in (begin, end))
            path += f"{'L' if path else 'M'}{left:.1f},{HEIGHT * (1 - size / top):.1f}H{right:.1f}"
        largest = format_bytes(max(one["bytes"]))
        lines.append({"name": name.replace("_", " + "), "css": css_class(name), "path": path, "largest": largest})
    widths = [end - begin for one in found.values() for begin, end in pairwise(one["first"])]
    return {
        "lines": lines,
        "first": f"{first:,}",
        "last": f"{last:,}",
        "limit": percent(device, top) if is_drawn else None,
        "ticks": [{"at": 100 * at / (top * scale), "text": f"{at:g}"} for at in ticks(top * scale)],
        "unit": unit,
        "joined": min(widths, default=1),
    }
