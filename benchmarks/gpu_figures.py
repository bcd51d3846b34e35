"""The figures that ``gpu.py`` quotes: errors of a case, their statistics, and what they are to reach. Only the standard
library.

An error is (predicted - measured) / measured in percent: below zero the prediction promised too little memory.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CASE = "estimate_errors"  # of the rows in benchmarks/results
MEASURED, OOM, SKIPPED, CRASH, TIMEOUT = "measured", "oom", "skipped", "crash", "timeout"

MEDIAN_PERCENT = {"allocated": 1.5, "reserved": 4.0}
WORST_PERCENT = {"allocated": 5.0, "total": 5.0}
UNDER_PERCENT = {"allocated": 3.0}

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


@dataclass(frozen=True)
class Aim:
    """What is to be reached, the figure, and whether it was."""

    claim: str
    figure: str
    reached: bool


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
        "forward": (predicted.get("forward_bytes"), measured.get("forward_bytes")),
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


def is_beyond_aims(errors: dict[str, float]) -> bool:
    """Tell whether a single case misses what every case is to reach."""
    too_wide = any(abs(errors[name]) > limit for name, limit in WORST_PERCENT.items() if name in errors)
    return too_wide or any(errors[name] < -limit for name, limit in UNDER_PERCENT.items() if name in errors)


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


def aims_of(rows: Iterable[Figures]) -> list[Aim]:
    """Return what the measured cases are to reach, with what they did; a quantity nobody measured is left out."""
    spreads = spreads_of(rows)
    aims = []
    for name, spread in spreads.items():
        if name in MEDIAN_PERCENT:
            limit = MEDIAN_PERCENT[name]
            aims.append(Aim(f"{name}: median <= {limit} %", f"{spread.median:.2f} %", spread.median <= limit))
        if name in WORST_PERCENT:
            limit = WORST_PERCENT[name]
            aims.append(Aim(f"{name}: worst <= {limit} %", f"{spread.worst:.2f} %", spread.worst <= limit))
        if name in UNDER_PERCENT:
            limit = UNDER_PERCENT[name]
            claim = f"{name}: never more than {limit} % under"
            aims.append(Aim(claim, f"{spread.worst_under:+.2f} %", spread.worst_under >= -limit))
    return aims


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
