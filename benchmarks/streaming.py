"""What the buffer of a bucketed stream buys: padding efficiency by the number of examples held.

Lengths are the set `review` of benchmarks/batching.py, 1e5 examples, budget 8192 padded tokens, one process, one pass.

python benchmarks/streaming.py
"""

from __future__ import annotations

from itertools import islice

import numpy as np
from batching import length_sets
from batching_figures import round_up
from results_file import append
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from hf_memopt import bucketed

EXAMPLES, BUFFERS = 100_000, (1024, 4096, 8192, 32768)


class Rows:
    """A stream of examples of given lengths; the token ids are zeros, since only their number counts."""

    def __init__(self, lengths: np.ndarray) -> None:
        self.lengths = lengths.tolist()

    def __iter__(self):
        return ({"input_ids": [0] * length} for length in self.lengths)


def padding_efficiency(lengths: np.ndarray, budget: int, buffer_examples: int) -> float:
    """Return real over padded tokens of the first pass, whose batches the stream hands out first."""
    stream = bucketed(Rows(lengths), max_tokens=budget, buffer_examples=buffer_examples)
    real, padded, seen = 0, 0, 0
    for batch in tqdm(islice(stream, len(lengths)), desc=f"{buffer_examples} held", unit=" batches", leave=False):
        found = np.array([len(row["input_ids"]) for row in batch])
        real += int(found.sum())
        padded += len(found) * int(round_up(found.max(keepdims=True))[0])
        seen += len(found)
        if seen >= len(lengths):
            return real / padded
    raise RuntimeError(f"the stream ended after {seen} of {len(lengths)} examples; expected all of them")


def main() -> None:
    """Measure, print and append a row to benchmarks/results."""
    lengths, budget = length_sets(EXAMPLES)["review"]
    found = {str(held): padding_efficiency(lengths, budget, held) for held in BUFFERS}
    table = Table("examples held", "padding efficiency", title=f"A stream of {EXAMPLES:,} examples, budget {budget}")
    for held, efficiency in found.items():
        table.add_row(held, f"{efficiency:.3f}")
    Console().print(table)
    Console().print(f"appended to {append('streaming', {'padding_efficiency': found, 'budget': budget})}")


if __name__ == "__main__":
    main()
