"""The JSON that ``MemoryReportCallback`` leaves in a run's output folder, as pages read it; ``run_report`` writes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_memopt.components import CONTEXT, UNUSED
from hf_memopt.plain_data import read_json

FORMAT = 2
"""Raised when a field changes its meaning or goes."""

RUN_FILE = "memopt_run.json"
HOST, REST = "resident memory of the process", "gradients, activations and others"
ALLOCATED = ("peak_allocated_bytes", "allocated_bytes", "rss_bytes")
RESERVED = ("peak_reserved_bytes", "reserved_bytes", "rss_bytes")
"""The kinds of a reading: peaks on CUDA, ROCm and XPU, samples on MPS, the process without an accelerator."""
PREDICTED_PHASES = {"forward_backward": ("forward", "backward"), "evaluation": ("evaluation", "generation")}
"""By the phases of a run that an estimate calls otherwise, what it calls them."""


RunData = dict[str, Any]
StepsData = Mapping[str, list[int]]
"""Of each stretch of optimizer steps its ``first`` one, and the ``bytes`` of the largest peak in it."""


def run_name(process: int) -> str:
    """Return the file name of a process's report."""
    return RUN_FILE if process == 0 else f"memopt_run-rank{process}.json"


def run_file_of(folder: Path) -> Path:
    """Return the newest report in a run's output folder."""
    found = sorted(folder.glob("memopt_run*.json"), key=lambda path: path.stat().st_mtime_ns)
    if not found:
        raise ValueError(
            f"path={str(folder)!r} is a folder without {RUN_FILE}; expected the output folder of a run with a "
            "MemoryReportCallback. Call: attach(trainer, MemoryReportCallback()) before trainer.train()"
        )
    return found[-1]


def read_run(text: str | bytes, name: str) -> RunData:
    """Return the run of a JSON text; ``name`` is what messages call it."""
    remedy = "Train again: attach(trainer, MemoryReportCallback())"
    return read_json(text, (FORMAT,), path=name, what="a run", remedy=remedy)


# ---- What the fields say together


Points = tuple[list[float], list[float | None]]
"""Of a curve: optimizer steps, and a value at each, None where there is none."""


def curves_of(told: RunData) -> dict[str, Points]:
    """Return what a run logged, each over its optimizer steps; those without a point are left out."""
    found: dict[str, Points] = {}
    if curve := told.get("curve"):
        at: list[float] = list(curve["step"])
        if any(loss is not None for loss in curve["loss"]):
            found["loss"] = at, curve["loss"]
        if at:
            found["seconds per step"] = at, list(curve["seconds_per_step"])
        if any(curve["tokens_per_second"]):
            found["tokens per second"] = at, list(curve["tokens_per_second"])
    return found


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


def measured_parts(told: RunData) -> dict[str, int]:
    """Return the parts of the measured peak: weights and optimizer state are in it, whatever the phase."""
    if host_bytes := largest_peak(told, ("rss_bytes",)):
        return {HOST: host_bytes}
    rest, reserved = _peaks(told)
    parts = {CONTEXT: told["context_bytes"] or 0}
    unused = max(reserved - rest, 0)
    for name in ("weights", "optimizer state"):
        parts[name] = min(told["components"].get(name, 0), rest)
        rest -= parts[name]
    return {**parts, REST: rest, UNUSED: unused}


def phase_pairs(
    peaks: Mapping[str, Mapping[str, int]], predicted: Mapping[str, int]
) -> dict[str, tuple[int | None, int | None]]:
    """Return the measured and the predicted allocated peak of each phase of a run, None where one is unknown.

    Args:
        peaks: measured, by phase and kind.
        predicted: by the phases of an estimate. A process holds more than what is predicted: nothing is beside it.
    """
    found: dict[str, tuple[int | None, int | None]] = {}
    for phase, kinds in peaks.items():
        size = next((kinds[kind] for kind in ALLOCATED if kind in kinds), None)
        names = PREDICTED_PHASES.get(phase, (phase,)) if "rss_bytes" not in kinds else ()
        found[phase] = size, max((predicted[name] for name in names if name in predicted), default=None)
    return found
