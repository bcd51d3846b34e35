"""Write a plan as one HTML file: pictures, tables, reasons, and the script, for any browser and without a network.

The page is made of the JSON of a plan alone, so that the file that ``hf-memopt plan --report`` writes and the one that
``hf-memopt report plan.json`` makes later are the same, but for pictures of another matplotlib, or none where it is not
installed. Every text is escaped by jinja2, those of pictures by matplotlib.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from hf_memopt.components import CONTEXT
from hf_memopt.plotting import page_pictures
from hf_memopt.prediction.reports import rendered
from hf_memopt.prediction.reports.pictures import Bar, TimelinePicture, bars_figure, out_of_memory
from hf_memopt.prediction.reports.plan.plan_file import CandidateData, PlanData, batch_of, is_same, shown_one
from hf_memopt.prediction.reports.plan.plan_picture import bars_of, limit_of, map_figure, parts_of_candidate
from hf_memopt.training.batching import lengths_figure
from hf_memopt.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from hf_memopt.plotting import Theme


def plan_page(told: PlanData) -> str:
    """Return the page."""
    one = shown_one(told)
    return rendered("plan.html.jinja", _view(told, one), page_pictures(_pictures(told, one)))


def _pictures(told: PlanData, one: CandidateData) -> dict[str, tuple[str, Callable[[Theme], Figure]]]:
    """Return what is drawn, by its section: what a screen reader says, and what draws it."""
    figures, limit, bars = told["figures"], limit_of(told), bars_of(told)
    chart, line, padding = figures["fit_map"], figures["timeline"], figures["padding"]
    usable, parts = format_bytes(told["usable_bytes"]), parts_of_candidate(one)
    peak, margin = [Bar("", parts)], replace(limit, margin_bytes=one["margin_bytes"])
    found: dict[str, tuple[str, Callable[[Theme], Figure]]] = {
        "peak": (f"{format_bytes(one['total_bytes'])} of {usable} usable", partial(bars_figure, peak, margin)),
    }
    if bars:
        found["ladder"] = ("The set-ups as bars", partial(bars_figure, bars, limit))
    if chart is not None:
        found["map"] = ("Which batches and lengths fit", partial(map_figure, chart, one))
    if line is not None:
        batches = max(one["examples"] // (one["micro_batch_size"] or 1), 1)
        timeline = TimelinePicture(line, parts, limit, f"usable on {limit.name}: {usable}", micro_batches=batches)
        found["timeline"] = ("Memory by component over a run", timeline.draw)
    if padding is not None and told["texts"]["seq_len"] is not None:
        label = f"{padding['examples']:,} rows by length, and what is computed for them"
        found["padding"] = (label, partial(lengths_figure, padding, "tokens"))
    return found


def _view(told: PlanData, one: CandidateData) -> dict[str, Any]:
    figures = told["figures"]
    parts, line = parts_of_candidate(one), figures["timeline"]
    over = None if line is None else out_of_memory(line, parts[CONTEXT], told["usable_bytes"])
    return {
        "told": told,
        "versions": told["versions"],
        "one": one,
        "batch_of": batch_of,
        "is_same": is_same,
        "parts": parts,
        "full": "" if over is None else over[1],
        "padding": figures["padding"],
        "install": _install(told, one),
        "recipe": json.dumps(one["recipe"], indent=2),
    }


def _install(told: PlanData, one: CandidateData) -> str:
    """Return the pip command for the versions that the plan was made with; this package's is the wheel's."""
    extras = "[peft]" if one["stage"] in ("lora", "qlora") else ""
    public = {name: version.partition("+")[0] for name, version in told["versions"].items()}  # 2.13.0+cpu
    wheel = f"hf_memopt-{public.pop('hf-memopt')}-py3-none-any.whl{extras}"
    kept = [f'"{wheel}"', *(f'"{name}=={version}"' for name, version in public.items())]
    return " ".join(["pip install", *kept])
