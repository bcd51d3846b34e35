"""What ``batching.py`` counts on the batches of an epoch, whoever made them, and measures of the samplers that make
them.
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from batching_peers import ARMS, RANKS, Arm, Lengths, round_up
from numpy.typing import NDArray

EPOCHS = 8  # over which the lag-1 correlation is averaged: a single epoch has a standard error of 1 / sqrt(batches)
REPEATS = 3
QUICK_SECONDS = 2.0  # what takes longer is timed once and looked at for two epochs

Integers = NDArray[np.int64]


# ---- The batches of an epoch ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Epoch:
    """The batches of one epoch in reading order, each array of shape (batches,).

    ``sizes``: examples of each batch. ``rows`` and ``widths``: the tensor that it becomes. ``tokens``: its real tokens.
    """

    sizes: Integers
    rows: Integers
    widths: Integers
    tokens: Integers

    @property
    def padded_tokens(self) -> Integers:
        """Size of each batch's tensor, (batches,)."""
        return self.rows * self.widths


def epoch_of(
    batches: Iterable[Sequence[int] | NDArray[Any]],
    lengths: NDArray[Any],
    shapes: tuple[Sequence[int], Sequence[int]] | None = None,
) -> Epoch:
    """Return what batches become: a row per example, padded to the longest, unless ``shapes`` gives (rows, widths)."""
    arrays = [np.asarray(batch, dtype=np.int64) for batch in batches]
    sizes = np.array([len(array) for array in arrays])
    starts = np.cumsum(sizes) - sizes
    read = lengths[np.concatenate(arrays)].astype(np.int64)
    rows, widths = (sizes, round_up(np.maximum.reduceat(read, starts))) if shapes is None else map(np.array, shapes)
    return Epoch(sizes, rows, widths, np.add.reduceat(read, starts))


def lag_one(values: NDArray[np.float64]) -> float:
    """Return the correlation of consecutive values; 0 where they do not vary."""
    before, after = values[:-1], values[1:]
    if len(before) < 2 or before.std() == 0 or after.std() == 0:
        return 0.0
    return float(np.corrcoef(before, after)[0, 1])


def straggler_ratio(epoch: Epoch, ranks: int = RANKS) -> float | None:
    """Return how much the fullest rank of a step has over the mean, averaged over the steps; None without a full step.

    Consecutive batches go to the ranks of one step; what does not fill the last step is left out.
    """
    steps = len(epoch.rows) // ranks
    if steps == 0:
        return None
    padded = epoch.padded_tokens[: steps * ranks].reshape(steps, ranks)
    return float((padded.max(axis=1) / padded.mean(axis=1)).mean())


def figures_of(epoch: Epoch, budget: int) -> dict[str, Any]:
    """Return what one epoch shows: shares of the padded tokens and of the budget, shapes, batches over the budget."""
    padded = epoch.padded_tokens
    return {
        "padding_efficiency": float(epoch.tokens.sum() / padded.sum()),
        "fill": float(padded.mean() / budget),
        "shapes": len(np.unique(np.stack([epoch.rows, epoch.widths]), axis=1).T),
        "batches_over_budget": int((padded > budget).sum()),
    }


# ---- A sampler ------------------------------------------------------------------------------------------------------


def measure_arm(name: str, length_sets: dict[str, tuple[Lengths, int]]) -> dict[str, dict[str, Any]]:
    """Return the figures of one arm on every length set; called in a fresh process.

    ``length_sets``: (lengths, budget) by name.
    """
    arm = ARMS[name]
    warm_up, budget = next(iter(length_sets.values()))
    list(arm.build(warm_up[:2000], budget, 1).epoch(0))  # the imports are not timed
    return {title: _measure_set(arm, *length_set) for title, length_set in length_sets.items()}


def _measure_set(arm: Arm, lengths: Lengths, budget: int) -> dict[str, Any]:
    seconds: list[float] = []
    while not seconds or (len(seconds) < REPEATS and seconds[0] < QUICK_SECONDS):
        started = time.perf_counter()
        sampler = arm.build(lengths, budget, 1)
        batches = list(sampler.epoch(0))
        seconds.append(time.perf_counter() - started)
    first = epoch_of(batches, lengths, sampler.shapes(0))
    seen = range(1, EPOCHS if seconds[0] < QUICK_SECONDS else 2)
    others = [epoch_of(sampler.epoch(number), lengths, sampler.shapes(number)) for number in seen]
    of_ranks = first
    if arm.knows_ranks:
        with_ranks = arm.build(lengths, budget, RANKS)
        of_ranks = epoch_of(with_ranks.epoch(0), lengths, with_ranks.shapes(0))
    return {
        **figures_of(first, budget),
        "microseconds_per_example": 1e6 * float(np.median(seconds)) / len(lengths),
        "bytes_per_example": held_bytes(arm, lengths, budget) / len(lengths) if arm.counts_memory else None,
        "lag_one": float(np.mean([lag_one(epoch.tokens / epoch.sizes) for epoch in [first, *others]])),
        "straggler_ratio": straggler_ratio(of_ranks),
    }


def held_bytes(arm: Arm, lengths: Lengths, budget: int) -> int:
    """Return the bytes of Python and numpy objects that a sampler holds after the first batch of an epoch.

    Counted by tracemalloc, with the int32 lengths if the sampler keeps them, and whatever else it makes of them.
    """
    tracemalloc.start()
    try:
        sampler = arm.build(lengths.copy(), budget, 1)
        batches = iter(sampler.epoch(0))
        next(batches)
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
