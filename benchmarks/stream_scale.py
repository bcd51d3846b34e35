"""A bucketed stream over a web-scale set: 1e9 examples in 1024 shards, which 64 processes share.

Every process's stream is the real one over a ``datasets.IterableDataset`` of generated rows; they run one after the
other in this one process, since nothing is sent between them in a real run either. Lengths are lognormal (median 60, 4
to 512 tokens), as `review` of benchmarks/batching.py. The set is never read as a whole: the first steps of each process
are as all others, its buffer being full, and what a state costs later is measured after ever more steps.

Seconds are of the CPU. What reading costs is that of the rows' source and here almost nothing.

python benchmarks/stream_scale.py
"""

from __future__ import annotations

import argparse
import json
import time
import tracemalloc
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
from batching_figures import round_up
from datasets import IterableDataset
from results_file import append
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from hf_memopt import bucketed

EXAMPLES, SHARDS, RANKS = 1_000_000_000, 1024, 64
MODES = {"batch_size=32": {"batch_size": 32}, "max_tokens=8192": {"max_tokens": 8192}}
VOCABULARY_TOKENS, DRAWN = 50_000, 1000


def rows_of(shards: list[int], rows: int, kind: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of shards; ``kind``: what the token ids are, "zeros" (one object), "list" or "numpy"."""
    for shard in shards:
        generator = np.random.default_rng(shard)
        for _ in range(0, rows, DRAWN):
            lengths = np.clip(np.exp(generator.normal(np.log(60), 0.85, DRAWN)), 4, 512).astype(int)
            for length in lengths.tolist():
                if kind == "zeros":
                    yield {"input_ids": [0] * length}
                    continue
                ids = generator.integers(5, VOCABULARY_TOKENS, length, dtype=np.int32)
                yield {"input_ids": ids.tolist() if kind == "list" else ids}


def stream_of(rank: int | None, ranks: int, *, kind: str = "zeros", **settings: Any) -> Any:
    """Return the stream of one process; ``rank`` None: of one that reads everything."""
    per_shard = EXAMPLES // SHARDS
    source = {"shards": list(range(SHARDS)), "rows": per_shard, "kind": kind}
    return bucketed(IterableDataset.from_generator(rows_of, gen_kwargs=source), rank=rank, world_size=ranks, **settings)


def padded_tokens(stream: Any, steps: int) -> tuple[list[int], float]:
    """Return the padded tokens of a stream's first batches, and the seconds until the first of them."""
    started = time.process_time()
    items, first = iter(stream), 0.0
    found = []
    for _ in range(steps):
        batch = list(islice(items, stream.batch_size)) if stream.batch_size else next(items)[0:]
        first = first or time.process_time() - started
        found.append(len(batch) * int(round_up(np.array([max(len(row["input_ids"]) for row in batch)]))[0]))
    return found, first


def measure_ranks(settings: dict[str, Any], ranks: int, steps: int) -> dict[str, float]:
    """Return the straggler ratio over the steps of all ranks, and what a rank costs."""
    found, firsts = [], []
    started = time.process_time()
    for rank in tqdm(range(ranks), desc=str(settings), unit=" ranks", leave=False):
        tokens, first = padded_tokens(stream_of(rank, ranks, **settings), steps)
        found.append(tokens)
        firsts.append(first)
    seconds = time.process_time() - started
    padded = np.array(found)  # (ranks, steps)
    ratios = padded.max(axis=0) / padded.mean(axis=0)
    apart = np.random.default_rng(0).permuted(padded, axis=1)  # as if each drew for itself
    return {
        "straggler_ratio": float(ratios.mean()),
        "straggler_ratio_worst": float(ratios.max()),
        "straggler_ratio_of_independent_draws": float((apart.max(axis=0) / apart.mean(axis=0)).mean()),
        "first_batch_seconds": float(np.median(firsts)),
        "milliseconds_per_batch": 1e3 * (seconds - sum(firsts)) / (ranks * (steps - 1)),
    }


def held_bytes(kind: str, rank: int | None, ranks: int, **settings: Any) -> int:
    """Return the bytes that the first process holds while it hands out batches of 32."""
    stream = stream_of(rank, ranks, kind=kind, batch_size=32, **settings)
    tracemalloc.start()
    try:
        items = iter(stream)
        next(items)
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def measure_resume(steps: int, ranks: int) -> dict[str, float]:
    """Return the bytes of a state after ``steps`` batches, and the seconds to the next batch from it."""
    stream = stream_of(0, ranks, batch_size=32)
    for _ in islice(stream, 32 * steps):
        pass
    state = json.dumps(stream.state_dict())
    resumed = stream_of(0, ranks, batch_size=32)
    resumed.load_state_dict(json.loads(state))
    started = time.process_time()
    next(iter(resumed))
    return {"steps": steps, "state_bytes": len(state), "seconds": time.process_time() - started}


def measure(ranks: int, steps: int, resumed_after: tuple[int, ...]) -> dict[str, Any]:
    """Return all figures."""
    return {
        "examples": EXAMPLES,
        "shards": SHARDS,
        "ranks": ranks,
        "steps": steps,
        "modes": {name: measure_ranks(settings, ranks, steps) for name, settings in MODES.items()},
        "held_bytes": {kind: held_bytes(kind, 0, ranks) for kind in ("list", "numpy")},
        "resume": [measure_resume(after, ranks) for after in resumed_after],
    }


def print_figures(figures: dict[str, Any], console: Console) -> None:
    """Print one row for each way of batching, and what holds for both."""
    columns = ("", "straggler ratio", "worst step", "of independent draws", "first batch, s", "ms per batch")
    title = f"{figures['examples']:.0e} examples, {figures['ranks']} processes, {figures['steps']} steps of each"
    table = Table(*columns, title=title)
    for name, of_mode in figures["modes"].items():
        table.add_row(name, *(f"{value:.3f}" for value in of_mode.values()))
    console.print(table)
    held = ", ".join(f"{size / 2**20:.0f} MiB as {kind}" for kind, size in figures["held_bytes"].items())
    console.print(f"held by each process: {held}")
    for one in figures["resume"]:
        steps, size, seconds = one["steps"], one["state_bytes"], one["seconds"]
        console.print(f"after {steps:,} batches: state of {size} bytes, {seconds:.2f} s to the next batch")


def main() -> None:
    """Measure, print and append a row to benchmarks/results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, help="batches of each process")
    steps = parser.parse_args().steps
    console = Console()
    figures = measure(RANKS, steps, (10, 1000, 10_000))
    print_figures(figures, console)
    console.print(f"appended to {append('stream_scale', figures)}")


if __name__ == "__main__":
    main()
