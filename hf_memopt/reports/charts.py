"""Turn the figures of a plan into the geometry of its charts: shares of a width or height in percent, and texts.

The page draws bars, cells and points with HTML, and only curves with SVG that is stretched to its box. So text has one
size at any width of a window, can be selected, and takes the colours of the reader's light or dark scheme.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hf_memopt.components import COMPONENTS
from hf_memopt.reports.bars import CONTEXT, UNUSED, bar_of, css_class, percent
from hf_memopt.reports.plan_file import CandidateData, FitMapData, PaddingData, PlanData
from hf_memopt.units import format_bytes, format_duration, to_gib

__all__ = ["fit_chart", "ladder", "padding_chart", "pareto_front", "parts_of", "peak_bar", "scatter", "ticks"]

MOST_OF_GPU = 2.2  # how far bars and points go beyond the GPU's size, at most
WORDS = {"fits": "fits", "tight": "tight", "over": "no"}


def parts_of(one: CandidateData) -> list[tuple[str, int]]:
    """Return names and bytes of the parts of a bar, from its beginning; together they are the total."""
    known = [(name, one["components"].get(name, 0)) for name in COMPONENTS]
    unused = max(one["reserved_bytes"] - sum(size for _, size in known), 0)
    return [(CONTEXT, one["context_bytes"]), *known, (UNUSED, unused)]


def peak_bar(one: CandidateData, usable_bytes: int, memory_bytes: int) -> dict[str, Any]:
    """Return the bar at the peak beside the size of the GPU, and the table of its parts."""
    scale = max(one["total_bytes"], memory_bytes, usable_bytes)
    parts = [(name, size) for name, size in parts_of(one) if size]
    return {
        "parts": bar_of(parts_of(one), scale),
        "usable": percent(usable_bytes, scale),
        "margin": percent(max(usable_bytes - one["margin_bytes"], 0), scale),
        "table": [
            {"name": name, "css": css_class(name), "size": format_bytes(size), "share": f"{size / usable_bytes:.1%}"}
            for name, size in sorted(parts, key=lambda part: -part[1])
        ],
        "total": format_bytes(one["total_bytes"]),
        "share": f"{one['total_bytes'] / usable_bytes:.1%}",
    }


def ladder(told: PlanData) -> dict[str, Any]:
    """Return the shown set-ups as bars of one scale, with the line of the GPU."""
    shown = [told["candidates"][place] for place in told["shown"]]
    usable = told["usable_bytes"]
    longest = max((one["total_bytes"] for one in shown), default=usable)
    scale = max(int(1.05 * usable), min(longest, int(MOST_OF_GPU * usable)))
    rows = []
    for one in shown:
        rows.append(
            {
                "name": one["name"],
                "batch": batch_of(one),
                "length": "" if one["seq_len"] == told["texts"]["seq_len"] else f"{one['seq_len']} tokens",
                "parts": bar_of(parts_of(one), scale),
                "size": _gib(one["total_bytes"]),
                "cut": one["total_bytes"] > scale,
                "speed": _time_text(one),
                "verdict": one["verdict"],
                "reason": one["reason"],
                "chosen": is_same(one, told["chosen"]),
                "settings": settings_of(one),
            }
        )
    used = {name for one in shown for name, size in parts_of(one) if size}
    names = [name for name in (CONTEXT, *COMPONENTS, UNUSED) if name in used]
    legend = [{"name": name, "css": css_class(name)} for name in names]
    return {"rows": rows, "line": percent(usable, scale), "legend": legend}


def settings_of(one: CandidateData) -> str:
    """Return the fields of a recipe that have a reason of their own, as text."""
    recipe = one["recipe"]
    reasons = recipe.get("reasons")
    names = reasons if isinstance(reasons, dict) else {}
    settings = [f"{name}={recipe[name]}" for name in names if name in recipe]
    return "\n".join([f"{one['name']}, {batch_of(one)}", *settings])


def scatter(told: PlanData) -> dict[str, Any] | None:
    """Return the set-ups by memory and time, and which of them no other one beats in both; None without times.

    Where rows differ, the time of a set-up that does not fit is that of rows of the full length, and it is left out.
    """
    texts, usable = told["texts"], told["usable_bytes"]
    alike = texts["width"] is None or texts["width"] == texts["seq_len"]
    timed = [one for one in told["candidates"] if one["seconds_per_example"] and (alike or one["verdict"] != "over")]
    shown = [one for one in timed if one["total_bytes"] <= MOST_OF_GPU * usable]
    if not shown:
        return None
    times = [one["seconds_per_example"] or 0.0 for one in shown]
    top, right = 1.1 * max(times), 1.06 * max(usable, *(one["total_bytes"] for one in shown))
    front = pareto_front([(one["total_bytes"], time) for one, time in zip(shown, times, strict=True)])
    points: list[dict[str, Any]] = []
    for one, time in zip(shown, times, strict=True):
        points.append(
            {
                "x": percent(one["total_bytes"], right),
                "y": percent(time, top),
                "verdict": "asks" if one["consents"] and one["verdict"] != "over" else one["verdict"],
                "chosen": is_same(one, told["chosen"]),
                "number": None,
                "title": f"{one['name']}, {batch_of(one)}: {_gib(one['total_bytes'])} GiB, {_per_example(time)}",
            }
        )
    last: tuple[float, float] | None = None
    for number, place in enumerate(front):
        here = points[place]["x"], points[place]["y"]
        if last is None or abs(here[0] - last[0]) > 4 or abs(here[1] - last[1]) > 6:  # room for another number
            points[place]["number"], last = number + 1, here
    corners: list[tuple[float, float]] = []
    for place in front:  # a staircase: between two of them, the memory of the second is needed for its time
        x, y = float(points[place]["x"]), float(points[place]["y"])
        corners += [*([(x, corners[-1][1])] if corners else []), (x, y)]
    return {
        "points": points,
        "line": " ".join(f"{10 * x:.1f},{1000 - 10 * y:.1f}" for x, y in corners),
        "usable": percent(usable, right),
        "front": [points[place] for place in front],
        "x_ticks": [{"at": percent(at * 2**30, right), "text": f"{at:g}"} for at in ticks(to_gib(int(right)))],
        "y_ticks": [{"at": percent(at, top), "text": _per_example(at)} for at in ticks(top)],
        "omitted": _omitted(len(timed) - len(shown), alike),
    }


def _omitted(beyond: int, alike: bool) -> str:
    """Return which set-ups the picture leaves out."""
    texts = [f"{beyond} set-ups need more memory than the picture shows."] if beyond else []
    if not alike:
        texts.append("Set-ups that do not fit are left out: their time is that of rows of the full length.")
    return " ".join(texts)


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return the places of the points that no other is at most as large as in both, in the order of the first.

    Examples:
        >>> pareto_front([(1, 9), (2, 5), (3, 6), (4, 1)])
        [0, 1, 3]
    """
    front: list[int] = []
    for place in sorted(range(len(points)), key=lambda place: points[place]):
        if not front or points[place][1] < points[front[-1]][1]:
            front.append(place)
    return front


def fit_chart(chart: FitMapData, one: CandidateData, padding: PaddingData | None) -> dict[str, Any]:
    """Return the cells of the map, largest batch on top, and where the percentiles of the data lie."""
    rows = []
    for count, cells in sorted(zip(chart["rows"], chart["cells"], strict=True), key=lambda pair: -pair[0]):
        steps = max(one["examples"] // count, 1)
        rows.append(
            {
                "rows": count,
                "cells": [
                    {
                        "verdict": cell["verdict"],
                        "word": WORDS[cell["verdict"]],
                        "size": None if cell["total_bytes"] is None else _gib(cell["total_bytes"]),
                        "chosen": count == one["micro_batch_size"] and length == one["seq_len"],
                        "title": f"{count} rows"
                        + ("" if length is None else f" of {length} tokens")
                        + f", {steps} times: {WORDS[cell['verdict']]}"
                        + ("" if cell["total_bytes"] is not None else ", as smaller or larger batches show"),
                    }
                    for length, cell in zip(chart["lengths"], cells, strict=True)
                ],
            }
        )
    lengths = [length for length in chart["lengths"] if length is not None]
    marks = [] if padding is None else _percentile_marks(lengths, padding)
    return {"lengths": chart["lengths"], "rows": rows, "marks": marks, "columns": len(chart["lengths"])}


def _percentile_marks(lengths: Sequence[int], padding: PaddingData) -> list[dict[str, Any]]:
    """Return the percentiles at their places between the middles of the columns, whose lengths grow by factors."""
    found = {name: padding["percentiles"].get(name, 0) for name in ("p50", "p90", "p99")}
    found["max"] = padding["longest"]
    marks = []
    for row, (name, tokens) in enumerate(found.items()):
        if not lengths or tokens < 1:
            continue
        marks.append(
            {"at": 100 * _place(lengths, tokens), "text": f"{name} {tokens:,}", "row": row, "out": tokens > lengths[-1]}
        )
    return marks


def _place(lengths: Sequence[int], tokens: int) -> float:
    """Return where between 0 and 1 a length is, with columns of equal width around the given ones."""
    middles = [(number + 0.5) / len(lengths) for number in range(len(lengths))]
    logs = [math.log2(length) for length in lengths]
    wanted = math.log2(tokens)
    if len(lengths) == 1:
        return 0.5
    for number in range(len(lengths) - 1):
        if wanted <= logs[number + 1] or number == len(lengths) - 2:
            slope = (middles[number + 1] - middles[number]) / max(logs[number + 1] - logs[number], 1e-9)
            return min(max(middles[number] + (wanted - logs[number]) * slope, 0.0), 1.0)
    return 1.0


def padding_chart(padding: PaddingData, seq_len: int | None) -> dict[str, Any]:
    """Return the lengths as a histogram, and real tokens beside padding for each way of batching."""
    edges, counts = padding["histogram"]["edges"], padding["histogram"]["counts"]
    most = max(*counts, 1)
    strategies = []
    for found in padding["strategies"]:
        efficiency = min(max(float(found["padding_efficiency"]), 0.0), 1.0)
        strategies.append(
            {
                "name": found["name"],
                "real": 100 * efficiency,
                "padding": f"{1 - efficiency:.1%}",
                "factor": 1 / efficiency if efficiency else None,
                "after": found["name"].startswith("bucketed(batch_size"),
                "largest": f"{found['largest_batch_tokens']:,}",
            }
        )
    return {
        "bars": [
            {"height": 100 * count / most, "title": f"{low:,} to {high - 1:,} tokens: {count:,} rows"}
            for low, high, count in zip(edges, edges[1:], counts, strict=False)
        ],
        "first": edges[0],
        "last": f"{edges[-1] - 1:,}",
        "tail": padding["histogram"]["has_tail"],
        "percentiles": [f"{name} {tokens:,}" for name, tokens in padding["percentiles"].items()],
        "longest": f"{padding['longest']:,}",
        "cut": seq_len if seq_len is not None and seq_len < padding["longest"] else None,
        "strategies": strategies,
        "batch_size": padding["batch_size"],
        "examples": f"{padding['examples']:,}",
    }


# ---- Texts and numbers ----------------------------------------------------------------------------------------------


def batch_of(one: CandidateData) -> str:
    """Return the rows of a micro-batch times the micro-batches."""
    return f"{one['micro_batch_size']} x {one['accumulation_steps']}"


def is_same(one: CandidateData, other: CandidateData | None) -> bool:
    """Return whether two are the same set-up."""
    names = ("name", "micro_batch_size", "seq_len")
    return other is not None and all(one.get(name) == other.get(name) for name in names)


def ticks(most: float, count: int = 5) -> list[float]:
    """Return about ``count`` round numbers from 0 to ``most``.

    Examples:
        >>> ticks(11.3)
        [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    """
    if most <= 0:
        return [0.0]
    power = 10.0 ** math.floor(math.log10(most / count))
    step = min((factor * power for factor in (1, 2, 5, 10)), key=lambda step: abs(most / step - count))
    return [round(number * step, 12) for number in range(int(most / step) + 1)]


def _gib(size: int) -> str:
    return f"{to_gib(size):.2f}"


def _per_example(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 or not seconds else f"{1000 * seconds:.3g} ms"


def _time_text(one: CandidateData) -> str:
    if not one["seconds"] or one["verdict"] == "over":
        return ""
    return f"{one['seconds']:.3g} s a step" if one["seconds"] < 90 else f"{format_duration(one['seconds'])} a step"
