"""Write a training run as one HTML file: the verdict, measured beside predicted, what was alive when memory ran out.

The page is made of the JSON that ``MemoryReportCallback`` leaves in the output folder, and of nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from hf_memopt.components import MARGIN_SHARE, parts_of
from hf_memopt.plotting import page_pictures
from hf_memopt.prediction.reports import phase_name, rendered
from hf_memopt.prediction.reports.pictures import Bar, Limit, bars_figure, near
from hf_memopt.prediction.reports.run.run_file import (
    RESERVED,
    RunData,
    StepsData,
    curves_of,
    largest_peak,
    measured_parts,
    phase_pairs,
    total_bytes,
)
from hf_memopt.prediction.reports.run.run_picture import RunPicture, curves_figure
from hf_memopt.units import format_bytes, percent

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from hf_memopt.plotting import Theme

MUCH_PADDING = 0.2  # of the tokens, from which on buckets pay
UNPREDICTED = "not predicted: "
HEADLINES = {"training": "Still training", "finished": "Trained", "out of memory": "Out of memory"}


def run_page(told: RunData) -> str:
    """Return the page."""
    return rendered("run.html.jinja", _view(told), page_pictures(_pictures(told)))


def _pictures(told: RunData) -> dict[str, tuple[str, Callable[[Theme], Figure]]]:
    """Return what is drawn, by its section: what a screen reader says, and what draws it."""
    bars, lost, predicted = [Bar("measured", measured_parts(told))], told["out_of_memory"], told["predicted"]
    if predicted is not None:
        parts = parts_of(predicted["components"], predicted["reserved_bytes"], predicted["context_bytes"])
        bars.append(Bar("predicted", parts))
    device = Limit(told["device_name"], told["device_bytes"] or 0)
    limit = near(device, max(bar.total_bytes for bar in bars))
    said = ", ".join(f"{format_bytes(bar.total_bytes)} {bar.label}" for bar in bars)
    found: dict[str, tuple[str, Callable[[Theme], Figure]]] = {"peak": (said, partial(bars_figure, bars, limit))}
    if lost is not None:
        alive = Bar("", dict(sorted(lost["components"].items(), key=lambda part: -part[1])))
        found["alive"] = (f"{format_bytes(alive.total_bytes)} by component", partial(bars_figure, [alive], None))
    if curves := curves_of(told):
        found["curves"] = ("Loss, seconds per step and tokens per second", partial(curves_figure, curves))
    if steps := _steps(told):
        phases = {} if predicted is None else predicted["phases"]
        picture = RunPicture(steps, told["peaks"], phases, device)
        found["timeline"] = ("Peaks by optimizer step and phase", picture.draw)
    return found


def _steps(told: RunData) -> dict[str, StepsData]:
    """Return the phases of which there are steps."""
    return {name: one for name, one in told["steps"].items() if one["first"]}


def padding_share(told: RunData) -> float | None:
    """Return which share of the tokens that were computed was padding; None where it is unknown."""
    batches = told["batches"]
    if batches["tokens"] is None or not batches["padded_tokens"]:
        return None
    return float(1 - min(batches["tokens"] / batches["padded_tokens"], 1.0))


def _view(told: RunData) -> dict[str, Any]:
    padding = padding_share(told)
    return {
        "told": told,
        "versions": told["versions"],
        "verdict": _verdict(told),
        "headline": HEADLINES[told["state"]],
        "total_bytes": total_bytes(told),
        "components": list(_components(told)),
        "phases": list(_phases(told)),
        "steps": _steps_text(told),
        "curve": told.get("curve"),
        "padding": "" if padding is None else percent(padding, 1),
        "next": list(_next(told, padding)),
        "kinds": {kind for of_phase in told["peaks"].values() for kind in of_phase},
        "unpredicted": next(
            (note for note in told["notes"] if note.startswith(UNPREDICTED)), "not asked for"
        ).removeprefix(UNPREDICTED),
    }


def _next(told: RunData, padding: float | None) -> Iterator[tuple[str, str]]:
    """Yield what to change, each with its reason and its code."""
    micro, rows = told["micro_batching"], told["batches"]["largest_rows"]
    if told["out_of_memory"] is not None and told["plan"]:
        yield "Memory ran out; find what fits", told["plan"]
    if padding is not None and padding >= MUCH_PADDING:
        is_cut = f"train_dataset=bucketed(train_dataset, batch_size={rows})"
        yield f"{percent(padding, 1)} of all tokens are padding; batch examples of like lengths", is_cut
    limits = {} if micro is None or not micro["failures"] else micro["limits"]
    if given := ", ".join(f"{name}={limit}" for name, limit in limits.items() if limit is not None):
        yield "Steps were repeated after memory ran out; cut them from the start", f"MicrobatchCallback({given})"


def _verdict(told: RunData) -> str:
    if told["state"] == "out of memory":
        return "over"
    device = told["device_bytes"] or 0
    return "tight" if device and MARGIN_SHARE * (device - total_bytes(told)) < device else "fits"


def _components(told: RunData) -> Iterator[list[str]]:
    """Yield measured beside predicted bytes of each component that is known of either."""
    predicted = {} if told["predicted"] is None else told["predicted"]["components"]
    for name in dict.fromkeys([*told["components"], *(name for name, size in predicted.items() if size)]):
        row = _row(name, told["components"].get(name), predicted.get(name))
        yield row[:-1]  # their difference would be of two moments


def _phases(told: RunData) -> Iterator[list[str]]:
    """Yield the peak of each phase, allocated, beside the predicted one; and the peak of what is reserved."""
    predicted = told["predicted"]
    pairs = phase_pairs(told["peaks"], {} if predicted is None else predicted["phases"])
    for name, pair in pairs.items():
        yield _row(phase_name(name), *pair)
    if reserved := largest_peak(told, RESERVED[:2]):
        yield _row("reserved by torch", reserved, None if predicted is None else predicted["reserved_bytes"])
    if told["context_bytes"] is not None:
        yield _row("CUDA context", told["context_bytes"], None if predicted is None else predicted["context_bytes"])


def _row(name: str, measured: int | None, predicted: int | None) -> list[str]:
    cells = ["" if size is None else format_bytes(size) for size in (measured, predicted)]
    change = "" if predicted is None or not measured else percent(predicted / measured - 1, 1, signed=True)
    return [name, *cells, change]


def _steps_text(told: RunData) -> str:
    """Return the largest peak of each phase by step; "" without steps."""
    found = _steps(told)
    largest = (f"{phase_name(name)} at most {format_bytes(max(one['bytes']))}" for name, one in found.items())
    widths = [end - begin for one in found.values() for begin, end in pairwise(one["first"])]
    joined = min(widths, default=1)
    stretches = f" Each point is the largest of {joined} steps or more." if joined > 1 else ""
    return f"{', '.join(largest)}.{stretches}" if found else ""
