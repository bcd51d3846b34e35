"""The figures that ``gpu.py`` quotes: errors of a case, and their statistics by GPU.

An error is (predicted - measured) / measured in percent: below zero the prediction promised too little memory.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import results_file

CASE = "estimate_errors"  # of the rows in benchmarks/results
MEASURED, OOM, SKIPPED, CRASH, TIMEOUT = "measured", "oom", "skipped", "crash", "timeout"

Figures = dict[str, Any]


@dataclass(frozen=True)
class Spread:
    """Errors of one quantity over several cases, in percent: sizes without sign, and the lowest with it (0 if none
    is below zero).
    """

    cases: int
    median: float
    p95: float
    worst: float
    worst_under: float


def errors_of(predicted: Figures, measured: Figures) -> dict[str, float]:
    """Return the errors in percent by quantity, of those that were both predicted and measured.

    "total" is predicted as reserved bytes and the context measured in the same process right after its first kernel:
    what CUDA loads later (kernels on first use, handles of libraries) counts as error. A device that lacks a component
    altogether names it in ``without``: the host has no workspace of cuBLAS.
    """
    lacking_bytes = sum(predicted["components_at_peak"][name] for name in measured.get("without", ()))
    pairs = {
        "allocated": (predicted["allocated_bytes"] - lacking_bytes, measured["allocated_bytes"]),
        "reserved": (predicted.get("reserved_bytes"), measured.get("reserved_bytes")),
        "total": (_sum(predicted.get("reserved_bytes"), measured.get("context_bytes")), measured.get("device_bytes")),
    }
    for name, size_bytes in (measured.get("components") or {}).items():
        pairs[name] = ((predicted.get("components") or {}).get(name), size_bytes)
    return {
        name: round(100 * (guess - truth) / truth, 3)
        for name, (guess, truth) in pairs.items()
        if guess is not None and truth
    }


def _sum(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one + other


def spread_of(errors: Iterable[float]) -> Spread | None:
    """Return the statistics of signed errors, or None for no error; p95 is the nearest rank, so a real case's error."""
    signed = sorted(errors)
    if not signed:
        return None
    sizes = sorted(abs(error) for error in signed)
    rank = math.ceil(0.95 * len(sizes))
    return Spread(len(sizes), statistics.median(sizes), sizes[rank - 1], sizes[-1], min(signed[0], 0.0))


def spreads_of(rows: Iterable[Figures]) -> dict[str, Spread]:
    """Return the statistics of the measured cases by quantity, in the order of ``errors_of``."""
    by_name: dict[str, list[float]] = {}
    for row in rows:
        if row["status"] == MEASURED:
            for name, error in row["errors"].items():
                by_name.setdefault(name, []).append(error)
    return {name: spread for name, errors in by_name.items() if (spread := spread_of(errors)) is not None}


def read_rows(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """Return the rows of this benchmark in the files that exist, in their order."""
    lines = [line for path in paths if path.exists() for line in path.read_text(encoding="utf-8").splitlines()]
    return [row for line in lines if line.strip() and (row := json.loads(line))["case"] == CASE]


def latest(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the last row of each case on each GPU; rows of one second keep the order of their file."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: row["date"]):
        found[row["figures"]["gpu"], row["figures"]["name"]] = row
    return list(found.values())


def estimate_errors() -> str:
    """Return the errors of ``estimate`` against what GPUs measured."""
    paths = sorted(results_file.RESULTS.glob("*.jsonl"))
    rows = [row for row in latest(read_rows(paths)) if row["figures"]["device"] == "cuda"]
    if not rows:
        return (
            "No figures yet: no CUDA GPU was available when this was written. `make bench-gpu` measures them on yours."
        )
    return errors_table(rows)


def errors_table(rows: list[dict[str, Any]]) -> str:
    """Return a line of errors for each GPU."""
    head = (
        "| GPU | measured | allocated: median | p95 | worst | worst under | reserved: median | p95 | total: median "
        "| worst | not measured |"
    )
    lines = [_errors_of_gpu(gpu, rows) for gpu in sorted({row["figures"]["gpu"] for row in rows})]
    versions = sorted({results_file.versions_of(row["figures"], "torch", "transformers", "cuda") for row in rows})
    note = (
        "Errors of the prediction in percent of the measurement; all but `worst under` without sign. `total` is the "
        "memory of the process, predicted as reserved bytes and the context measured after a first kernel. "
        f"With {'; '.join(versions)} (`make bench-gpu`)."
    )
    return results_file.markdown(head, lines, note)


def _errors_of_gpu(gpu: str, rows: list[dict[str, Any]]) -> list[str]:
    """Return a GPU's line of the table of errors."""
    figures = [row["figures"] for row in rows if row["figures"]["gpu"] == gpu]
    spreads = spreads_of(figures)
    cells = [gpu, str(sum(row["status"] == MEASURED for row in figures))]
    for name, keys in (
        ("allocated", ("median", "p95", "worst", "worst_under")),
        ("reserved", ("median", "p95")),
        ("total", ("median", "worst")),
    ):
        cells += [f"{getattr(spreads[name], key):.2f}" if name in spreads else "-" for key in keys]
    others = Counter(row["status"] for row in figures if row["status"] != MEASURED)
    cells.append(", ".join(f"{count} {status}" for status, count in sorted(others.items())) or "0")
    return cells
