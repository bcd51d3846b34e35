"""Which texts share a row without padding, ``max_tokens`` long at most: batches of nearly the same number of tokens.

Where a batch costs its tokens alone, texts of any lengths may share it. They are dealt out from the longest to the
shortest, each to the batch with the fewest tokens so far (LPT scheduling), so that every batch has long and short ones
and nearly the mean number of tokens. A text counts as long as the longest of its size class: which text of a class goes
where is drawn anew every epoch, and still no batch exceeds the budget and their number stays the same.

Trade: a class has 16 texts or more on average, so that texts meet different ones in every epoch; rounding up to classes
leaves about 1 % of the budget unused (benchmarks/padding_free.py), more where there are few texts.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hf_memopt.batching.plan.boundaries import bucket_ends, by_bucket, optimal_boundaries, shuffle_buckets
from hf_memopt.batching.plan.buckets import EpochPlan, LengthBuckets, reading_order
from hf_memopt.batching.plan.checks import check_settings

MOST_CLASSES = 256  # rounding up costs under 1 % then
FEWEST_CLASSES = 8
TEXTS_PER_CLASS = 16


class PackedBatches:
    """Plan batches by the sum of their lengths, from the settings of length buckets; a view reads the same of both.

    Args:
        buckets: with ``max_tokens``; their lengths, seed and number of processes are taken over.

    Raises:
        ValueError: the buckets have boundaries to pad to.

    Examples:
        >>> packed = PackedBatches(LengthBuckets([3, 50, 4, 52, 5, 51], max_tokens=56, pad_to_multiple_of=1))
        >>> [packed.lengths[packed.plan(epoch=0).batch(i)].tolist() for i in range(packed.n_batches)]
        [[52, 3], [51, 4], [50, 5]]
    """

    batch_size = None

    def __init__(self, buckets: LengthBuckets) -> None:
        if buckets.pads_to_boundaries:
            raise ValueError(
                f"boundaries={buckets.boundaries.tolist()} are what batches are padded to, and these batches have "
                "no padding; expected none. Leave boundaries out of bucketed(...)"
            )
        self.padded = buckets
        self.max_tokens = buckets.max_tokens or 0
        self.lengths, self.n_examples, self.dropped = buckets.lengths, buckets.n_examples, buckets.dropped
        self.seed, self.world_size = buckets.seed, buckets.world_size
        fitting = self.lengths[self.lengths <= int(buckets.boundaries[-1])]
        n_classes = int(np.clip(self.n_examples // TEXTS_PER_CLASS, FEWEST_CLASSES, MOST_CLASSES))
        limits = optimal_boundaries(fitting, n_classes, pad_to_multiple_of=1)
        self.limits = np.minimum(limits, int(fitting.max()))  # beyond a grid of 512 lengths they are rounded up
        self._ends = bucket_ends(self.lengths, self.limits)
        batches = self._fewest_batches()
        self._places = np.argsort(batches, kind="stable").astype(np.int32)  # of the texts, batch by batch
        self._starts = np.concatenate([[0], np.cumsum(np.bincount(batches))])
        self._whole = self.n_batches // self.world_size * self.world_size  # batches in groups of one for each process

    @property
    def n_batches(self) -> int:
        """The number of batches of an epoch, over all processes; the same in every epoch."""
        return len(self._starts) - 1

    def plan(self, epoch: int) -> EpochPlan:
        """Return the order of one epoch, the group of the largest batch first; a function of ``(seed, epoch)``."""
        check_settings(epoch=epoch)
        generator = np.random.Generator(np.random.Philox(key=[self.seed, epoch]))
        order = by_bucket(self.lengths, self.limits)
        shuffle_buckets(order, self._ends, generator)
        order = order[self._places]
        groups = generator.permutation(self._whole // self.world_size)
        tokens = np.add.reduceat(self.lengths[order].astype(np.int64), self._starts[:-1])
        of_groups = tokens[: self._whole].reshape(-1, self.world_size).max(axis=1)
        largest = [int(of_groups.argmax())] if self._whole else []
        return EpochPlan(order, self._starts, reading_order(groups, largest, self.world_size, self.n_batches), None)

    # ---- The batches, alike in every epoch --------------------------------------------------------------------------

    def _fewest_batches(self) -> NDArray[np.int32]:
        """Return the batch of every text, from the longest class to the shortest, shape (examples,).

        There are as few batches as the rule fits into the budget, and a multiple of the processes; where too few texts
        are there for that, each has a batch of its own.
        """
        world, counts = self.world_size, np.diff(self._ends, prepend=0)
        sizes = self.limits[::-1]
        least = -(-int(counts @ sizes) // (self.max_tokens * world))  # steps of world batches
        most = self.n_examples // world
        too_few, steps, found = least - 1, least, None
        # More batches hardly ever fit worse than fewer: doubling the distance brackets the fewest, halving finds it.
        while found is None and too_few < most:
            steps = min(steps, most)
            found = _deal(counts, sizes, steps * world, self.max_tokens)
            if found is None:
                too_few, steps = steps, 2 * steps - least + 1
        if found is None:
            return np.arange(self.n_examples, dtype=np.int32)
        while steps - too_few > 1:
            middle = (steps + too_few) // 2
            better = _deal(counts, sizes, middle * world, self.max_tokens)
            too_few, steps, found = (middle, steps, found) if better is None else (too_few, middle, better)
        return found


def _deal(
    counts: NDArray[np.int64], sizes: NDArray[np.int64], batches: int, max_tokens: int
) -> NDArray[np.int32] | None:
    """Return the batch of every text, dealt out class by class to the batch with the fewest tokens, or None if one
    exceeds the budget. ``counts`` texts of ``sizes`` tokens, the longest first.
    """
    numbers = np.arange(batches, dtype=np.int32)
    loads, dealt = np.zeros(batches, dtype=np.int64), []
    for count, size in zip(counts.tolist(), sizes.tolist(), strict=True):
        texts = _least_loaded(loads, count, size)
        loads += texts * size
        if loads.max() > max_tokens:
            return None
        dealt.append(np.repeat(numbers, texts))
    return np.concatenate(dealt)


def _least_loaded(loads: NDArray[np.int64], count: int, size: int) -> NDArray[np.int64]:
    """Return how many of ``count`` texts each batch gets if each text goes to the least loaded one, shape (batches,).

    A batch takes its k-th text at the load ``loads + (k - 1) * size``, and the ``count`` least of all these loads are
    taken. So the highest level below which no more than ``count`` of them lie is searched for, by bisection; what is
    left goes to batches that are exactly at it.
    """
    low, high = int(loads.min()), (int(loads.sum()) + count * size) // len(loads) + 1
    while high - low > 1:
        level = (low + high) // 2
        if int(_texts_below(loads, size, level).sum()) <= count:
            low = level
        else:
            high = level
    texts = _texts_below(loads, size, low)
    at_level = np.flatnonzero(loads + texts * size == low)
    texts[at_level[: count - int(texts.sum())]] += 1
    return texts


def _texts_below(loads: NDArray[np.int64], size: int, level: int) -> NDArray[np.int64]:
    """Return how many texts each batch takes while its load is below a level."""
    found: NDArray[np.int64] = -(-np.maximum(level - loads, 0) // size)
    return found
