"""Write the page "Does it fit?" and its data: python benchmarks/fit_data.py (``make fit-data``)

``docs/does-it-fit.html`` answers without a network or a server; ``docs/does-it-fit.parquet`` has its points. Every
well-known model that lacks a method in the data is simulated and put there, so that a run goes on where it stopped; one
of the same shape as another has its points. Each row has the CPU seconds that it took.
The page says how far random points between them are off.

python benchmarks/fit_data.py --only 'Qwen2.5*'   # simulate these again
python benchmarks/fit_data.py --page              # simulate nothing
python benchmarks/fit_data.py --check 60          # as many random points against simulations; appends to results/
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatch
from functools import cache

import fit_page
import results_file
import torch
from fit_moments import Row
from fit_points import KERNELS, METHODS, Subject, errors_of, names, points_of, random_point
from rich.progress import track

SECONDS_BETWEEN_WRITES = 120.0
ROWS_OF_A_MODEL = len(METHODS) * len(KERNELS)


def simulated(name: str, known: Sequence[Row]) -> list[Row]:
    """Return the rows of a model, with the CPU seconds that each took; one of the same shape has the same."""
    began = time.process_time()
    subject, counts = Subject.of(name), Counter(row["model"] for row in known)
    whole = (other for other, count in counts.items() if other != name and count == ROWS_OF_A_MODEL)
    twin = next((other for other in whole if shape_of(other) == subject.shape), None)
    rows = [{**row, "model": name} for row in known if row["model"] == twin] or list(points_of(subject))
    return [{**row, "cpu_seconds": (time.process_time() - began) / len(rows)} for row in rows]


@cache
def shape_of(name: str) -> str:
    """Return what decides the points of a model."""
    return Subject.of(name).shape


def checked(rows: Sequence[Row], count: int) -> dict[str, float]:
    """Return how far random points of all rows, GPUs and lengths are from simulations of them."""
    chance = random.Random(count)
    found: dict[str, list[float]] = {"allocated": [], "total": [], "seconds": []}
    for _ in track(range(count), description="Simulating random points"):
        for name, error in errors_of(random_point(rows, chance)).items():
            found[name].append(abs(error))
    figures: dict[str, float] = {"points": count}
    for name, errors in found.items():
        within = sum(error <= 0.01 for error in errors) / len(errors)
        figures |= {
            f"{name}_median": statistics.median(errors),
            f"{name}_worst": max(errors),
            f"{name}_within_1": within,
        }
    return figures


def main() -> None:
    """Simulate what is missing, then write data and page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", metavar="PATTERN", help="models by name, simulated again")
    parser.add_argument("--check", type=int, metavar="POINTS", help="random points to simulate in full")
    parser.add_argument("--page", action="store_true", help="only write page and data of what was simulated")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rows = fit_page.read_data()
    wanted = [name for name in names() if fnmatch(name, asked.only or "*")]
    if not asked.only:
        done = Counter(row["model"] for row in rows)
        wanted = [name for name in wanted if done[name] < ROWS_OF_A_MODEL]
    written = time.monotonic()
    try:
        for name in track([] if asked.page or asked.check else wanted, description="Simulating models"):
            rows = [row for row in rows if row["model"] != name] + simulated(name, [] if asked.only else rows)
            rows.sort(key=lambda row: names().index(row["model"]))
            if time.monotonic() > written + SECONDS_BETWEEN_WRITES:
                fit_page.write_data(rows)
                written = time.monotonic()
    finally:
        fit_page.write_data(rows)
    if asked.check:
        figures = {"models": len({row["model"] for row in rows})} | checked(rows, asked.check)
        results_file.show("fit_data", figures, json.dumps(figures))
    print(f"{sum(row['cpu_seconds'] for row in rows) / 60:.0f} CPU minutes of simulation are in the data")
    fit_page.write(rows)


if __name__ == "__main__":
    main()
