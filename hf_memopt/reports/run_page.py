"""Write a training run as one HTML file: the verdict, measured beside predicted, what was alive when memory ran out.

The page is made of the JSON that ``MemoryReportCallback`` leaves in the output folder, and of nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hf_memopt.reports.bars import bar_of, css_class, legend_of, share_text
from hf_memopt.reports.page import rendered
from hf_memopt.reports.run_charts import (
    ALLOCATED,
    RESERVED,
    largest_peak,
    peak_bars,
    steps_chart,
    total_bytes,
)
from hf_memopt.reports.run_file import OutOfMemoryData, RunData
from hf_memopt.units import format_bytes, to_gib

__all__ = ["padding_share", "run_page"]

TIGHT_SHARE = 20  # a run that leaves less than a twentieth of the device is tight
HEADLINES = {"training": "Still training", "finished": "Trained", "out of memory": "Out of memory"}
MEASURED = {
    "peak_allocated_bytes": "Peaks of torch's allocator in each phase, exact: it counts every allocation.",
    "allocated_bytes": "Samples at the end of each pass, since MPS keeps no peaks: lower bounds.",
    "rss_bytes": "The resident memory of the whole process, without an accelerator; where a phase set no new peak, "
    "what was resident at its end.",
}
LEFT_OUT = (
    "Memory of other processes on the device.",
    "Peaks between the phases: loading data, logging, saving checkpoints.",
)


def run_page(told: RunData) -> str:
    """Return the page."""
    return rendered("run.html.jinja", _view(told))


def padding_share(told: RunData) -> float | None:
    """Return which share of the tokens that were computed was padding; None where it is unknown."""
    batches = told["batches"]
    if batches["tokens"] is None or not batches["padded_tokens"]:
        return None
    return 1 - min(batches["tokens"] / batches["padded_tokens"], 1.0)


def _view(told: RunData) -> dict[str, Any]:
    lost, predicted, padding = told["out_of_memory"], told["predicted"], padding_share(told)
    return {
        "told": told,
        "versions": told["versions"],
        "verdict": _verdict(told),
        "headline": HEADLINES[told["state"]],
        "set_up": _set_up(told),
        "happened": "" if lost is None else _happened(lost),
        "fixes": [] if predicted is None else predicted["hints"],
        "tiles": list(_tiles(told)),
        "on_host": bool(largest_peak(told, ("rss_bytes",))),
        "bars": peak_bars(told),
        "components": list(_components(told)),
        "phases": list(_phases(told)),
        "alive": None if lost is None else _alive(lost),
        "steps": steps_chart(told),
        "padding": None if padding is None else {"real": 100 * (1 - padding), "share": f"{padding:.1%}"},
        "batches": _batches(told),
        "micro": _micro_batching(told),
        "certainty": list(_certainty(told)),
        "left_out": LEFT_OUT,
    }


def _verdict(told: RunData) -> str:
    if told["state"] == "out of memory":
        return "over"
    device = told["device_bytes"] or 0
    return "tight" if device and TIGHT_SHARE * (device - total_bytes(told)) < device else "fits"


def _set_up(told: RunData) -> str:
    batches, steps = told["batches"], told["arguments"].get("gradient_accumulation_steps", "1")
    length = "" if batches["largest_length"] is None else f" of up to {batches['largest_length']:,} tokens"
    if not batches["batches"]:
        return "no batch was trained"
    return f"{batches['largest_rows']} x {steps} examples{length}"


def _happened(lost: OutOfMemoryData) -> str:
    size = "" if lost["rows"] is None else f" with {lost['rows']} {'row' if lost['rows'] == 1 else 'rows'}"
    length = "" if lost["rows"] is None or lost["length"] is None else f" of {lost['length']:,} tokens"
    return f"Memory ran out at step {lost['step']:,}, {lost['phase']}{size}{length}."


def _tiles(told: RunData) -> Iterator[dict[str, str]]:
    total, device, predicted = total_bytes(told), told["device_bytes"], told["predicted"]
    of_device = "" if device is None else f" of {to_gib(device):.2f}"
    yield _tile("Memory at the peak", f"{to_gib(total):.2f}{of_device} GiB", told["device_name"])
    if predicted is not None:
        needed = predicted["reserved_bytes"] + (predicted["context_bytes"] or 0)
        of_gpu = "" if predicted["usable_bytes"] is None else f" of {to_gib(predicted['usable_bytes']):.2f}"
        length = "" if predicted["seq_len"] is None else f" x {predicted['seq_len']}"
        yield _tile("Predicted", f"{to_gib(needed):.2f}{of_gpu} GiB", f"batch {predicted['batch_size']}{length}")
    count = told["last_step"] - told["first_step"]
    yield _tile(
        "Steps", f"{count:,}", f"{told['first_step'] + 1:,} to {told['last_step']:,}" if count else "none ended"
    )
    padding = padding_share(told)
    if padding is not None:
        yield _tile("Padding", f"{padding:.1%}", f"of {told['batches']['padded_tokens']:,} tokens")
    micro = told["micro_batching"]
    if micro is not None:
        failures = _times(micro["failures"])
        yield _tile("In micro-batches", f"{micro['cut_steps']:,} of {micro['steps']:,} steps", failures)
    trained = told["trainable_parameters"]
    what = "all trained" if trained == told["parameters"] else f"{trained / 1e6:,.1f} M trained"
    yield _tile("Parameters", f"{told['parameters'] / 1e6:,.1f} M", what)


def _times(failures: int) -> str:
    often = {0: "never", 1: "once"}.get(failures, f"{failures} times")
    return f"memory ran out {often}" if failures else "memory never ran out"


def _tile(label: str, value: str, detail: str) -> dict[str, str]:
    return {"label": label, "value": value, "detail": detail}


def _components(told: RunData) -> Iterator[dict[str, Any]]:
    """Yield measured beside predicted bytes of each component that is known of either."""
    predicted = {} if told["predicted"] is None else told["predicted"]["components"]
    for name in dict.fromkeys([*told["components"], *(name for name, size in predicted.items() if size)]):
        row = _row(name, told["components"].get(name), predicted.get(name))
        yield {**row, "cells": row["cells"][:2]}  # their difference would be of two moments


def _phases(told: RunData) -> Iterator[dict[str, Any]]:
    """Yield the peak of each phase, allocated, beside the predicted one; and the peak of what is reserved."""
    is_known = told["predicted"] is not None and not largest_peak(told, ("rss_bytes",))  # a process has more in it
    predicted = dict(told["predicted"]["phases"]) if told["predicted"] is not None and is_known else {}
    passes = [predicted[name] for name in ("forward", "backward") if name in predicted]
    if passes:
        predicted["forward_backward"] = max(passes)
    for name, kinds in told["peaks"].items():
        size = next((kinds[kind] for kind in ALLOCATED if kind in kinds), None)
        yield {**_row(name.replace("_", " + "), size, predicted.get(name)), "css": ""}
    if reserved := largest_peak(told, RESERVED[:2]):
        needed = None if told["predicted"] is None else told["predicted"]["reserved_bytes"]
        yield {**_row("reserved by torch", reserved, needed), "css": ""}
    if told["context_bytes"] is not None:
        needed = None if told["predicted"] is None else told["predicted"]["context_bytes"]
        yield {**_row("CUDA context", told["context_bytes"], needed), "css": ""}


def _row(name: str, measured: int | None, predicted: int | None) -> dict[str, Any]:
    both = measured is not None and predicted is not None
    cells = ["" if size is None else format_bytes(size) for size in (measured, predicted)]
    change = share_text(predicted or 0, measured or 0) if both else ""
    return {"name": name, "css": css_class(name), "cells": [*cells, change]}


def _alive(lost: OutOfMemoryData) -> dict[str, Any]:
    """Return what was alive: a bar by component, the largest tensors, and blocks without a name."""
    parts = sorted(lost["components"].items(), key=lambda part: -part[1])
    total = sum(size for _, size in parts)
    held = lost["allocated_bytes"]
    return {
        "bar": bar_of(parts, total),
        "legend": legend_of(name for name, size in parts if size),
        "total": format_bytes(total if held is None else held),
        "reserved": None if lost["reserved_bytes"] is None else format_bytes(lost["reserved_bytes"]),
        "rows": [
            {"name": name, "css": css_class(name), "cells": [format_bytes(size), f"{size / max(total, 1):.1%}"]}
            for name, size in parts
        ],
        "tensors": [
            {
                "name": one["component"],
                "css": css_class(one["component"]),
                "cells": [
                    " x ".join(map(str, one["shape"])) or "scalar",
                    one["dtype"],
                    f"{one['count']:,}",
                    format_bytes(one["bytes"]),
                ],
            }
            for one in lost["tensors"]
        ],
        "blocks": [
            {
                "name": format_bytes(one["bytes"]),
                "css": "",
                "cells": [f"{one['count']:,}", format_bytes(one["bytes"] * one["count"])],
            }
            for one in lost["blocks"] or ()
        ],
    }


def _batches(told: RunData) -> str:
    batches = told["batches"]
    largest = f"{batches['largest_rows']:,} rows"
    if batches["largest_length"] is not None:
        largest += f" of {batches['largest_length']:,} tokens"
    return f"{batches['batches']:,} batches with {batches['examples']:,} examples; the largest {largest}."


def _micro_batching(told: RunData) -> dict[str, Any] | None:
    micro = told["micro_batching"]
    if micro is None:
        return None
    limits = {name: "none" if limit is None else f"{limit:,}" for name, limit in micro["limits"].items()}
    given = ", ".join(f"{name}={limit}" for name, limit in micro["limits"].items() if limit is not None)
    return {
        "figures": {
            "optimizer steps": f"{micro['steps']:,}",
            "of them in micro-batches": f"{micro['cut_steps']:,}",
            "attempts that ran out of memory": f"{micro['failures']:,}",
            "what these took": f"{micro['lost_seconds']:.1f} s",
            **{f"{name} at the end": limit for name, limit in limits.items()},
        },
        "call": f"MicrobatchCallback({given})" if given and micro["failures"] else "",
    }


def _certainty(told: RunData) -> Iterator[dict[str, str]]:
    """Yield each figure, what it is, and what it rests on."""
    kinds = {kind for of_phase in told["peaks"].values() for kind in of_phase}
    for kind, detail in MEASURED.items():
        if kind in kinds:
            yield {"figure": "memory", "kind": "measured", "detail": detail}
    if told["components"]:
        detail = "Weights, gradients and optimizer state are the bytes of their tensors after the first step."
        yield {"figure": "components", "kind": "measured", "detail": detail}
    if told["batches"]["tokens"] is not None:
        detail = "Every batch that the Trainer got, by its attention mask."
        yield {"figure": "padding", "kind": "measured", "detail": detail}
    if told["predicted"] is not None:
        detail = (
            "One simulated step of the largest batch, or of the one that failed; components as they are at its peak."
        )
        yield {"figure": "prediction", "kind": "computed", "detail": detail}
    else:
        reason = next((note for note in told["notes"] if note.startswith("not predicted: ")), "not asked for")
        detail = f"{reason.removeprefix('not predicted: ')}. MemoryReportCallback(predict=True) simulates a step."
        yield {"figure": "prediction", "kind": "none", "detail": detail}
    if told["out_of_memory"] is not None:
        detail = "Tensors that Python could reach as the error passed; of what autograd keeps only sizes are known."
        yield {"figure": "what was alive", "kind": "measured", "detail": detail}
