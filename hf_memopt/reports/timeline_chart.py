"""Turn the timeline of a plan into stacked areas for SVG, the context at the bottom and one line for the GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hf_memopt.reports.bars import CONTEXT, css_class, legend_of
from hf_memopt.reports.charts import ticks
from hf_memopt.reports.plan_file import PlanData, TimelineData
from hf_memopt.units import format_bytes, to_gib, to_mib

__all__ = ["timeline_chart"]

WIDTH, HEIGHT = 1000, 400  # of the drawing, stretched to its box
HIGHEST = 2.5  # how far above the peak the GPU's line is drawn to scale


def timeline_chart(told: PlanData, line: TimelineData, context_bytes: int) -> dict[str, Any]:
    """Return areas, phases, the peak, and where memory runs out."""
    usable = told["usable_bytes"]
    where = [min(max(float(at), 0.0), 1.0) for at in line["positions"]]
    reserved = [context_bytes + size for size in line["reserved_bytes"]]
    most = max(*reserved, 1)
    is_drawn = usable <= HIGHEST * most
    top = 1.12 * (max(most, usable) if is_drawn else most)
    unit, scale = ("GiB", to_gib(1)) if most >= 2**28 else ("MiB", to_mib(1))
    areas = [{"name": CONTEXT, "css": css_class(CONTEXT), "path": _area([0.0], [context_bytes], top)}]
    sums = [context_bytes] * len(where)
    for name, sizes in line["components"].items():
        sums = [total + size for total, size in zip(sums, sizes, strict=True)]
        areas.append({"name": name, "css": css_class(name), "path": _area(where, sums, top)})
    peak = line["peak"]
    return {
        "areas": list(reversed(areas)),  # the highest sum first: the lower ones are painted over it
        "legend": legend_of(reversed([CONTEXT, *line["components"]])),
        "table": [
            {"name": name, "css": css_class(name), "largest": format_bytes(max(sizes))}
            for name, sizes in line["components"].items()
        ],
        "reserved": _steps(where, reserved, top),
        "limit": 100 * usable / top if is_drawn else None,
        "phases": [
            {
                "left": 100 * float(span["from"]),
                "width": 100 * (float(span["to"]) - float(span["from"])),
                "name": span["name"],
            }
            for span in line["phases"]
        ],
        "names": list(dict.fromkeys(span["name"] for span in line["phases"])),
        "steps": [{"left": 100 * float(step["from"]), "number": step["number"]} for step in line["steps"]],
        "peak": {
            "left": 100 * float(peak["position"]),
            "bottom": 100 * min((context_bytes + peak["allocated_bytes"]) / top, 1.0),
            "text": f"{format_bytes(peak['allocated_bytes'])} allocated in the {peak['phase']} phase",
            "module": peak["module"],
            "on_right": float(peak["position"]) > 0.5,
        },
        "full": _out_of_memory(line, where, reserved, usable),
        "ticks": [{"at": 100 * at / (top * scale), "text": f"{at:g}"} for at in ticks(top * scale)],
        "unit": unit,
    }


def _out_of_memory(
    line: TimelineData, where: Sequence[float], reserved: Sequence[int], usable: int
) -> dict[str, Any] | None:
    """Return where more is reserved than is usable for the first time, and in which phase; None where it never is."""
    over = next((at for at, size in zip(where, reserved, strict=True) if size > usable), None)
    if over is None:
        return None
    phase = next((span["name"] for span in line["phases"] if float(span["from"]) <= over < float(span["to"])), "")
    step = max((step["number"] for step in line["steps"] if float(step["from"]) <= over), default=None)
    name = phase if step is None or phase == "evaluation" else f"step {step}, {phase}"
    return {"left": 100 * over, "text": f"out of memory here: {name}", "on_right": over > 0.5}


def _area(where: Sequence[float], sizes: Sequence[int], top: float) -> str:
    return f"M0,{HEIGHT}{_steps(where, sizes, top, start='L')}V{HEIGHT}Z"


def _steps(where: Sequence[float], sizes: Sequence[int], top: float, start: str = "M") -> str:
    """Return a path that holds each value up to the next position, and the last one to the end."""
    path, last = [], None
    for at, size in zip(where, sizes, strict=True):
        height = f"{HEIGHT * (1 - size / top):.1f}"
        if last is None:
            path.append(f"{start}0,{height}")
        elif height != last:
            path.append(f"H{WIDTH * at:.1f}V{height}")
        last = height
    return "".join([*path, f"H{WIDTH}"])
