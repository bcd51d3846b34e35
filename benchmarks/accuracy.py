"""Does the model lose accuracy? Set-ups (a) and (c) of the demo over several seeds, on the same test texts.

Each pair shares its seed: initial weights, and with it data order as far as the set-up leaves it to the seed. Printed
are the accuracies and the 95 % t-interval of the mean of (c) - (a) over the seeds.

    python benchmarks/accuracy.py [--seeds 5] [--max-train N] [--out FILE]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import results_file
from rich.console import Console
from rich.table import Table

from hf_memopt.demo.run import prepare, run_child

SETUPS = ("baseline", "memopt")

# Quantile 0.975 of Student's t for 1 to 9 degrees of freedom (any table of the distribution).
T_QUANTILE = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


def t_interval(differences: list[float]) -> tuple[float, float, float]:
    """Return the mean and the limits of its 95 % interval; 2 to 10 values."""
    mean = statistics.mean(differences)
    half = T_QUANTILE[len(differences) - 1] * statistics.stdev(differences) / len(differences) ** 0.5
    return mean, mean - half, mean + half


def accuracies(seeds: int, max_train: int | None, console: Console) -> tuple[list[dict[str, float]], int]:
    """Return the accuracy of each set-up by seed, and the number of test texts."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        task = prepare(work, max_train=max_train, console=console)
        for seed in range(seeds):
            row = {setup: run_child(work, setup, seed=seed, epochs=1, sizes={})["accuracy"] for setup in SETUPS}
            console.print(f"seed {seed}: {row}")
            rows.append(row)
    return rows, len(task.test_texts)


def summarise(rows: list[dict[str, float]], test_texts: int) -> dict[str, Any]:
    """Return the figures of a result row, with the sentence that README quotes."""
    mean, low, high = t_interval([row["memopt"] - row["baseline"] for row in rows])
    means = {setup: statistics.mean(row[setup] for row in rows) for setup in SETUPS}
    return {
        "accuracies": rows,
        "mean_difference": mean,
        "interval": [low, high],
        "sentence": (
            f"(a) {means['baseline']:.3f}, (c) {means['memopt']:.3f}, mean of {len(rows)} seeds on {test_texts} unseen "
            f"texts; (c) - (a) is {mean:+.3f} with the 95 % interval [{low:+.3f}, {high:+.3f}]."
        ),
    }


def main() -> int:
    """Run the seeds, print the table, append the row; return 1 if the interval lies below 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5, choices=range(2, 11), metavar="N")
    parser.add_argument("--max-train", type=int, default=None, metavar="N")
    parser.add_argument("--out", type=Path, default=None, metavar="FILE")
    options = parser.parse_args()
    console = Console()
    rows, test_texts = accuracies(options.seeds, options.max_train, console)
    figures = summarise(rows, test_texts)
    table = Table("seed", "(a) naive", "(c) hf_memopt", "difference", title="accuracy on unseen texts")
    for seed, row in enumerate(rows):
        table.add_row(str(seed), *(f"{row[setup]:.4f}" for setup in SETUPS), f"{row['memopt'] - row['baseline']:+.4f}")
    console.print(table)
    console.print(figures["sentence"], soft_wrap=True)
    console.print(f"appended to {results_file.append('accuracy', figures, path=options.out)}", soft_wrap=True)
    return int(figures["interval"][1] < 0)


if __name__ == "__main__":
    raise SystemExit(main())
