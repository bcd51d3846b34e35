"""Write a plan as one HTML file: pictures, tables, reasons, and the script, for any browser and without a network.

The page is made of the JSON of a plan alone, so that the file that ``hf-memopt plan --report`` writes and the one that
``hf-memopt report plan.json`` makes later, on any machine, are the same. Every text in it is escaped by jinja2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hf_memopt.reports.bars import CONTEXT, css_class, legend_of
from hf_memopt.reports.charts import (
    batch_of,
    fit_chart,
    is_same,
    ladder,
    padding_chart,
    parts_of,
    peak_bar,
    scatter,
    settings_of,
    ticks,
)
from hf_memopt.reports.page import rendered
from hf_memopt.reports.plan_file import CandidateData, PlanData, TimelineData
from hf_memopt.units import format_bytes, format_duration, format_number, to_gib, to_mib

__all__ = ["plan_page"]

HEADLINES = {"fits": "Fits", "tight": "Fits, with little to spare", "over": "Does not fit"}


def plan_page(told: PlanData) -> str:
    """Return the page."""
    return rendered("plan.html.jinja", _view(told))


def _view(told: PlanData) -> dict[str, Any]:
    one = told["chosen"]
    if one is None:
        assert told["shortfall"] is not None  # checked when it was read
        one = told["shortfall"]["nearest"]
    figures, texts = told["figures"], told["texts"]
    chart, line, padding = figures["fit_map"], figures["timeline"], figures["padding"]
    return {
        "told": told,
        "versions": told["versions"],
        "one": one,
        "batch": batch_of(one),
        "verdict": one["verdict"],
        "headline": HEADLINES[one["verdict"]],
        "usable": format_bytes(told["usable_bytes"]),
        "total": format_bytes(one["total_bytes"]),
        "tiles": _tiles(told, one),
        "wanted": _would_fit(told),
        "bar_view": peak_bar(one, told["usable_bytes"], told["memory_bytes"]),
        "ladder": ladder(told),
        "every": [_row(other, told) for other in told["candidates"]],
        "scatter": scatter(told),
        "map": None if chart is None else fit_chart(chart, one, padding),
        "timeline": None if line is None else timeline_chart(told, line, one["context_bytes"]),
        "at_peak": {name: format_bytes(size) for name, size in parts_of(one)},
        "padding": None if padding is None else padding_chart(padding, texts["seq_len"]),
        "choices": [_choice(choice, one) for choice in figures["choices"]],
        "certainty": figures["certainty"],
        "install": _install(told, one),
        "recipe": _recipe_text(one),
    }


def _tiles(told: PlanData, one: CandidateData) -> list[dict[str, str]]:
    """Return the figures of the verdict, each with what it is made of."""
    spare = told["usable_bytes"] - one["total_bytes"]
    tiles = [
        {
            "label": "Memory",
            "value": f"{to_gib(one['total_bytes']):.2f} of {to_gib(told['usable_bytes']):.2f} GiB",
            "detail": f"{format_bytes(spare)} to spare" if spare >= 0 else f"{format_bytes(-spare)} too much",
        },
        {
            "label": "Batch",
            "value": batch_of(one),
            "detail": f"{one['examples']} examples a step"
            + (f", on {told['world_size']} GPUs" if told["world_size"] > 1 else ""),
        },
    ]
    if told["texts"]["seq_len"] is not None:
        cut, rows = told["texts"]["cut"], told["texts"]["rows"]
        detail = f"cuts {cut / rows:.1%} of {rows:,} rows" if cut and rows else "of the longest row"
        tiles.append({"label": "Length", "value": f"{one['seq_len']:,} tokens", "detail": detail})
    if not one["seconds"] or one["verdict"] == "over":
        return tiles
    seconds, unit = float(one["seconds"]), "tokens/s" if one["tokens"] else "examples/s"
    amount = float(one["tokens"] or one["examples"])
    spread = ""
    if one["low"] and one["high"]:
        spread = f"{format_number(amount / one['high'])} to {format_number(amount / one['low'])}"
    tiles.append({"label": "Speed", "value": f"{format_number(amount / seconds)} {unit}", "detail": spread})
    tiles.append({"label": "Step", "value": f"{seconds:.3g} s", "detail": "one optimizer step"})
    if told["texts"]["rows"] is not None:
        epoch = seconds / one["examples"] * told["texts"]["rows"]
        tiles.append({"label": "Epoch", "value": format_duration(epoch), "detail": f"{told['texts']['rows']:,} rows"})
    return tiles


def _would_fit(told: PlanData) -> list[str]:
    """Return what would fit where nothing does."""
    short = told["shortfall"]
    if short is None:
        return []
    found = []
    if short["consents"]:
        found.append(f"with your consent: --allow {','.join(short['consents'])}")
    if short["longest"] is not None:
        found.append(f"rows of {short['longest']:,} tokens")
    if short["batch"] is not None:
        found.append(f"an effective batch of {short['batch']}")
    if short["parameters"] >= 10**6:
        found.append(f"a model of about {short['parameters'] / 1e6:,.0f} M parameters")
    if short["gpu"]:
        found.append(f"a GPU such as {short['gpu']}")
    return found


def _row(one: CandidateData, told: PlanData) -> dict[str, Any]:
    seconds = one["seconds_per_example"]
    return {
        "name": one["name"],
        "batch": batch_of(one),
        "length": one["seq_len"],
        "size": f"{to_gib(one['total_bytes']):.2f}",
        "spare": f"{to_gib(told['usable_bytes'] - one['total_bytes']):.2f}",
        "time": f"{1000 * seconds:,.3g}" if seconds and one["verdict"] != "over" else "",
        "verdict": one["verdict"],
        "reason": one["reason"],
        "chosen": is_same(one, told["chosen"]),
        "settings": settings_of(one),
    }


def _choice(choice: Any, one: CandidateData) -> dict[str, Any]:
    alternatives = []
    for other in choice["alternatives"]:
        more = None if other["total_bytes"] is None else other["total_bytes"] - one["total_bytes"]
        ratio = other["time_ratio"]
        alternatives.append(
            {
                **other,
                "size": "" if more is None else f"{'+' if more >= 0 else '−'}{format_bytes(abs(more))}",
                "time": "" if ratio is None else f"{ratio:.2f} x",
            }
        )
    return {**choice, "alternatives": alternatives}


def _install(told: PlanData, one: CandidateData) -> str:
    """Return the pip command for the versions that the plan was made with."""
    extras = "[peft]" if one["stage"] in ("lora", "qlora") else ""
    names = {"hf-memopt": f"hf-memopt{extras}"}
    public = {name: version.partition("+")[0] for name, version in told["versions"].items()}  # 2.13.0+cpu
    kept = [f'"{names.get(name, name)}=={version}"' for name, version in public.items()]
    return " ".join(["pip install", *kept])


def _recipe_text(one: CandidateData) -> str:
    import json

    return json.dumps(one["recipe"], indent=2)


# ---- The timeline


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
