"""Bucketed streams: what their buffer buys, and what one over a web-scale set costs each of many processes.

The buffer: padding efficiency by the number of examples held; lengths are the set `review` of benchmarks/batching.py,
1e5 examples, budget 8192 padded tokens, one process, one pass.

Web scale: 1e9 examples in 1024 shards, which 64 processes share. Every process's stream is the real one over a
``datasets.IterableDataset`` of generated rows; they run one after the other in this one process, since nothing is sent
between them in a real run either. Lengths are lognormal as in `review`. The set is never read as a whole: the first
steps of each process are as all others, its buffer being full, and what a state costs later is measured after ever more
steps. Seconds are of the CPU; reading costs what the source of the rows costs, here almost nothing.

python benchmarks/streaming.py [--steps 200]
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
from batching import BUDGETS, synthetic_lengths
from batching_peers import round_up
from datasets import IterableDataset
from results_file import MACHINE, markdown, show
from tqdm import tqdm

from hf_memopt import bucketed

BUFFERED_EXAMPLES, BUFFERS = 100_000, (1024, 4096, 8192, 32768)
EXAMPLES, SHARDS, RANKS = 1_000_000_000, 1024, 64
MODES = {"batch_size=32": {"batch_size": 32}, "max_tokens=8192": {"max_tokens": 8192}}
VOCABULARY_TOKENS, DRAWN = 50_000, 1000


# ---- The buffer -----------------------------------------------------------------------------------------------------


class Rows:
    """A stream of examples of given lengths; the token ids are zeros, since only their number counts."""

    def __init__(self, lengths: np.ndarray) -> None:
        self.lengths = lengths.tolist()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return ({"input_ids": [0] * length} for length in self.lengths)


def padding_efficiency(lengths: np.ndarray, budget: int, buffer_examples: int) -> float:
    """Return real over padded tokens of the first pass, whose batches the stream hands out first."""
    real, padded, seen = 0, 0, 0
    for batch in bucketed(Rows(lengths), max_tokens=budget, buffer_examples=buffer_examples):
        found = np.array([len(row["input_ids"]) for row in batch])
        real += int(found.sum())
        padded += len(found) * int(round_up(found.max(keepdims=True))[0])
        seen += len(found)
        if seen >= len(lengths):
            break
    return real / padded


def buffer_table(figures: dict[str, Any]) -> str:
    """Return the padding efficiency of each buffer."""
    rows = [(held, f"{efficiency:.3f}") for held, efficiency in figures["padding_efficiency"].items()]
    return markdown("| examples held | padding efficiency |", rows)


# ---- Web scale ------------------------------------------------------------------------------------------------------


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


def stream_of(rank: int, ranks: int, *, kind: str = "zeros", **settings: Any) -> Any:
    """Return the stream of one process."""
    source = {"shards": list(range(SHARDS)), "rows": EXAMPLES // SHARDS, "kind": kind}
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


def held_bytes(kind: str, ranks: int) -> int:
    """Return the bytes that the first process holds while it hands out batches of 32."""
    stream = stream_of(0, ranks, kind=kind, batch_size=32)
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


def measure_scale(ranks: int, steps: int, resumed_after: tuple[int, ...]) -> dict[str, Any]:
    """Return the figures of many processes."""
    return {
        "examples": EXAMPLES,
        "shards": SHARDS,
        "ranks": ranks,
        "steps": steps,
        "modes": {name: measure_ranks(settings, ranks, steps) for name, settings in MODES.items()},
        "held_bytes": {kind: held_bytes(kind, ranks) for kind in ("list", "numpy")},
        "resume": [measure_resume(after, ranks) for after in resumed_after],
    }


def scale_table(figures: dict[str, Any]) -> str:
    """Return what a stream shared by many processes costs each."""
    rows = []
    for name, of_mode in figures["modes"].items():
        ratios = ("straggler_ratio", "straggler_ratio_worst", "straggler_ratio_of_independent_draws")
        cells = [*(f"{of_mode[key]:.3f}" for key in ratios), f"{of_mode['first_batch_seconds']:.2f}"]
        rows.append((f"`{name}`", *cells, f"{of_mode['milliseconds_per_batch']:.2f}"))
    held = {kind: size / 2**20 for kind, size in figures["held_bytes"].items()}
    resumed = ", ".join(f"{one['seconds']:.2f} s after {one['steps']:,} batches" for one in figures["resume"])
    return markdown(
        f"| {figures['examples'] / 1e9:g} billion examples, {figures['ranks']} processes | fullest over mean | of the "
        "worst step | if each drew for itself | CPU seconds to the first batch | CPU ms of a batch |",
        rows,
        f"Padded tokens of the fullest process over the mean, {figures['steps']} steps. A process holds "
        f'{held["list"]:.0f} MiB of lists, or {held["numpy"]:.0f} MiB of numpy arrays (`.with_format("numpy")`). A '
        f"state has {max(one['state_bytes'] for one in figures['resume'])} bytes; to the next batch {resumed}, "
        f"part of which the generated source takes to skip to its place in a shard. On {MACHINE}.",
    )


def main() -> None:
    """Measure, print and append the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, help="batches of each process")
    steps = parser.parse_args().steps
    lengths, budget = synthetic_lengths("review", BUFFERED_EXAMPLES), BUDGETS["review"]
    efficiencies = {str(held): padding_efficiency(lengths, budget, held) for held in BUFFERS}
    buffers = {"padding_efficiency": efficiencies, "budget": budget}
    show("streaming", buffers, buffer_table(buffers))
    figures = measure_scale(RANKS, steps, (10, 1000, 10_000))
    show("stream_scale", figures, scale_table(figures))


if __name__ == "__main__":
    main()
