"""Measure one arm of ``batching.py`` on every length set; called in a fresh process."""

from __future__ import annotations

import time
import tracemalloc
from typing import Any

import numpy as np
from batching_figures import RANKS, epoch_of, figures_of, lag_one, repeat_rate, straggler_ratio
from batching_peers import ARMS, Arm, Lengths

EPOCHS = 8  # over which the lag-1 correlation is averaged: a single epoch has a standard error of 1 / sqrt(batches)
REPEATS = 3
QUICK_SECONDS = 2.0  # what takes longer is timed once and looked at for two epochs


def measure(name: str, length_sets: dict[str, tuple[Lengths, int]]) -> dict[str, dict[str, Any]]:
    """Return the figures of one arm on every length set; called in a fresh process.

    ``length_sets``: (lengths, budget) by name.
    """
    arm = ARMS[name]
    warm_up, budget = next(iter(length_sets.values()))
    list(arm.build(warm_up[:2000], budget, 1).epoch(0))  # the imports are not timed
    return {title: _measure_set(arm, *length_set) for title, length_set in length_sets.items()}


def _measure_set(arm: Arm, lengths: Lengths, budget: int) -> dict[str, Any]:
    builds, iterations = [], []
    while not builds or (len(builds) < REPEATS and builds[0] + iterations[0] < QUICK_SECONDS):
        started = time.perf_counter()
        sampler = arm.build(lengths, budget, 1)
        built = time.perf_counter()
        batches = list(sampler.epoch(0))
        builds.append(built - started)
        iterations.append(time.perf_counter() - built)
    is_quick = builds[0] + iterations[0] < QUICK_SECONDS
    shapes = sampler.shapes or (lambda _: None)
    first = epoch_of(batches, lengths, shapes(0))
    others = [epoch_of(sampler.epoch(e), lengths, shapes(e)) for e in range(1, EPOCHS if is_quick else 2)]
    of_ranks = first
    if arm.knows_ranks:
        with_ranks = arm.build(lengths, budget, RANKS)
        tensor_shapes = None if with_ranks.shapes is None else with_ranks.shapes(0)
        of_ranks = epoch_of(with_ranks.epoch(0), lengths, tensor_shapes)
    return {
        **figures_of(first, lengths, budget),
        "microseconds_per_example": 1e6 * float(np.median(builds) + np.median(iterations)) / len(lengths),
        "build_seconds": float(np.median(builds)),
        "bytes_per_example": held_bytes(arm, lengths, budget) / len(lengths) if arm.counts_memory else None,
        "lag_one": float(np.mean([lag_one(epoch.mean_lengths) for epoch in [first, *others]])),
        "lag_one_epochs": 1 + len(others),
        "repeat_rate": repeat_rate(first, others[0]),
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
