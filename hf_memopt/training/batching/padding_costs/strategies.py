"""Replay the ways to batch and pad on lengths alone: what each one wastes, and which token budget fits a mean batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hf_memopt.training.batching.plan import LengthBuckets, PackedRows

STOCK_MEGA_BATCH = 50  # batches that transformers' get_length_grouped_indices sorts together


@dataclass(frozen=True, slots=True)
class PaddingStrategy:
    """One way to batch and pad.

    ``padding_efficiency``: real tokens over padded tokens. ``largest_batch_tokens``: padded tokens of the largest
    batch, which sets the memory peak. ``shapes``: distinct (rows, width) of the batches. ``epoch_tokens``: padded ones.
    """

    name: str
    padding_efficiency: float
    batches: int
    largest_batch_tokens: int
    shapes: int
    epoch_tokens: int

    @property
    def wasted_fraction(self) -> float:
        """The share of the padded tokens that is padding."""
        return 1.0 - self.padding_efficiency


def pad_lengths(lengths: NDArray[np.int32], multiple: int) -> NDArray[np.int64]:
    """Return the lengths, at least 1, as the next multiples."""
    return -(-np.maximum(lengths, 1).astype(np.int64) // multiple) * multiple


def fixed_strategies(
    lengths: NDArray[np.int32], batch_size: int, max_length: int | None, multiple: int
) -> list[PaddingStrategy]:
    """Return what padding every batch to one width wastes, on all examples."""
    longest = int(pad_lengths(lengths.max(keepdims=True), multiple)[0])
    name = f"fixed to longest, {longest}"
    if max_length is None:
        widths = {name: longest}
    else:  # the row that shows what truncating saves
        uncut = ", uncut" if lengths.max() > max_length else ""
        widths = {name + uncut: longest, f"fixed to max_length={max_length}": max_length}
    whole, rest = divmod(len(lengths), batch_size)
    return [
        PaddingStrategy(
            name=name,
            padding_efficiency=float(np.minimum(lengths, width).mean(dtype=np.float64)) / width,
            batches=whole + (rest > 0),
            largest_batch_tokens=min(batch_size, len(lengths)) * width,
            shapes=(whole > 0) + (rest > 0),
            epoch_tokens=len(lengths) * width,
        )
        for name, width in widths.items()
    ]


def ordered_strategies(
    sample: NDArray[np.int32], batch_size: int, budget: int, multiple: int, seed: int, examples: int
) -> list[PaddingStrategy]:
    """Replay one epoch of each strategy that reads the examples in an order; scale its batches up to all examples."""
    shuffled = np.random.default_rng(seed).permutation(len(sample))
    starts = np.arange(0, len(sample), batch_size)
    by_size = LengthBuckets(sample, batch_size=batch_size, seed=seed, pad_to_multiple_of=multiple)
    by_tokens = LengthBuckets(sample, max_tokens=budget, seed=seed, pad_to_multiple_of=multiple)
    orders = {
        "random + dynamic padding": (sample[shuffled], starts),
        "group_by_length (stock)": (sample[grouped_by_length(sample, batch_size, shuffled)], starts),
        f"bucketed(batch_size={batch_size})": _first_epoch(by_size),
        f"bucketed(max_tokens={budget})": _first_epoch(by_tokens),
    }
    batches = -(-examples // batch_size)
    of_tokens = round(by_tokens.n_batches * examples / len(sample))
    found = [
        _measured(name, *order, multiple, of_tokens if "max_tokens" in name else batches, examples)
        for name, order in orders.items()
    ]
    rows = PackedRows(sample, row_tokens=budget)
    fill, of_rows = float(rows.row_lengths.mean()) / budget, round(rows.n_batches * examples / len(sample))
    return [*found, PaddingStrategy(f"packed(row_tokens={budget})", fill, of_rows, budget, 1, of_rows * budget)]


def _first_epoch(buckets: LengthBuckets) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Return the lengths in reading order and where each batch begins."""
    plan = buckets.plan(0)
    sizes = plan.sizes()
    return buckets.lengths[plan.flat()], np.cumsum(sizes) - sizes


def _measured(
    name: str, ordered: NDArray[np.int32], starts: NDArray[np.int64], multiple: int, batches: int, examples: int
) -> PaddingStrategy:
    widths = pad_lengths(np.maximum.reduceat(ordered, starts), multiple)
    rows = np.diff(starts, append=len(ordered))
    tokens = widths * rows
    return PaddingStrategy(
        name=name,
        padding_efficiency=float(ordered.sum(dtype=np.int64) / tokens.sum()),
        batches=batches,
        largest_batch_tokens=int(tokens.max()),
        shapes=len(np.unique(widths * (int(rows.max()) + 1) + rows)),
        epoch_tokens=round(int(tokens.sum()) * examples / len(ordered)),
    )


def grouped_by_length(lengths: NDArray[np.int32], batch_size: int, shuffled: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the order into which stock ``group_by_length`` sorts a random order.

    Source: transformers.trainer_pt_utils.get_length_grouped_indices, 5.8 to 5.23: mega-batches of 50 batches (fewer on
    small data), each sorted with the longest example first; the longest of all is swapped with the very first.
    """
    mega_batch = batch_size * max(1, min(len(lengths) // (batch_size * 4), STOCK_MEGA_BATCH))
    order = shuffled[np.lexsort((-lengths[shuffled], np.arange(len(shuffled)) // mega_batch))]
    heads = order[::mega_batch]
    longest = int(lengths[heads].argmax()) * mega_batch
    order[[0, longest]] = order[[longest, 0]]
    return order


def fitting_budget(lengths: NDArray[np.int32], batch_size: int, multiple: int, seed: int) -> int:
    """Return the ``max_tokens`` whose mean batch has about ``batch_size`` examples and that holds the longest example.

    Rounded to an eighth of its power of two (..., 3840, 4096, 4608, ...), so to 6 % at most.
    """
    padded = pad_lengths(lengths, multiple)
    least, most = int(padded.max()), int(padded.max()) * batch_size
    wanted = min(batch_size, len(lengths))
    budget = float(padded.mean()) * batch_size
    for _ in range(3):  # the plan shows by how much its batches stay below the budget
        budget = min(max(budget, least), most)
        budget *= wanted / mean_batch(lengths, int(budget), multiple, seed)
    if budget <= least:
        return least
    step = max(multiple, 2 ** (int(budget).bit_length() - 4))
    return int(max(round(min(budget, most) / step) * step, least))


def mean_batch(lengths: NDArray[np.int32], budget: int, multiple: int, seed: int) -> float:
    """Return the examples per batch under a token budget, on average."""
    buckets = LengthBuckets(lengths, max_tokens=budget, seed=seed, pad_to_multiple_of=multiple)
    return len(lengths) / buckets.n_batches
