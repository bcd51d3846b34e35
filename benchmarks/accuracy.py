"""Does the model lose accuracy? Set-ups (a) and (c) of ``four_setups.py`` over several seeds, on the same test texts.

Each pair shares its seed: initial weights, and with it data order as far as the set-up leaves it to the seed. Printed
are the mean accuracies and the 95 % t-interval of the mean of (c) - (a) over the seeds.

    python benchmarks/accuracy.py [--seeds 5] [--max-train N]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from demo_task import prepare
from four_setups import run_setup
from fresh_process import in_fresh_process
from results_file import show

SETUPS = ("baseline", "memopt")

# Quantile 0.975 of Student's t for 1 to 9 degrees of freedom (any table of the distribution).
T_QUANTILE = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


def t_interval(differences: list[float]) -> tuple[float, float, float]:
    """Return the mean and the limits of its 95 % interval; 2 to 10 values."""
    mean = statistics.mean(differences)
    half = T_QUANTILE[len(differences) - 1] * statistics.stdev(differences) / len(differences) ** 0.5
    return mean, mean - half, mean + half


def accuracies(seeds: int, max_train: int | None) -> tuple[list[dict[str, float]], int]:
    """Return the accuracy of each set-up by seed, and the number of test texts."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        task = prepare(work, max_train=max_train)
        for seed in range(seeds):
            row = {setup: in_fresh_process(run_setup, folder, setup, seed)["accuracy"] for setup in SETUPS}
            print(f"seed {seed}: {row}", flush=True)
            rows.append(row)
    return rows, len(task.test_texts)


def summarise(rows: list[dict[str, float]], test_texts: int) -> dict[str, Any]:
    """Return the figures of a result row, with the sentence that docs/ quotes."""
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


def table(figures: dict[str, Any]) -> str:
    """Return the accuracies in a sentence."""
    return str(figures["sentence"])


def main() -> None:
    """Run the seeds, print the sentence, append the row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5, choices=range(2, 11), metavar="N")
    parser.add_argument("--max-train", type=int, default=None, metavar="N")
    options = parser.parse_args()
    figures = summarise(*accuracies(options.seeds, options.max_train))
    show("accuracy", figures, table(figures))


if __name__ == "__main__":
    main()
