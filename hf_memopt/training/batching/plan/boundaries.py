"""Choose the length limits of buckets that waste the fewest padded tokens, by dynamic programming; sort by them.

Quantile or geometric limits pad more with as many buckets, so they are not offered.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

FINEST_GRID = 512  # distinct limits the dynamic programme considers: its cost grows with their square


def optimal_boundaries(
    lengths: NDArray[np.int32], n_buckets: int, *, pad_to_multiple_of: int = 8, max_tokens: int | None = None
) -> NDArray[np.int64]:
    """Return at most ``n_buckets`` upper length limits that waste the fewest tokens, ascending.

    Formula: minimise the sum over buckets of ``examples * limit``, the limits being multiples of
    ``pad_to_multiple_of`` and the last one holding the longest example. With ``max_tokens`` every batch costs its
    budget as well, ``examples * max_tokens / (max_tokens // limit)``: of two limits that pad alike, the one that fills
    whole budgets wins.

    Examples:
        >>> optimal_boundaries(np.array([3, 4, 5, 60, 61]), 2)
        array([ 8, 64])
    """
    # Candidates are the multiples of a grid that occur, at most FINEST_GRID of them ("cells"). best[i] is the least
    # cost of all examples up to limits[i] with the buckets used so far; each round allows one more bucket, which spans
    # the cells from its begin to i. Following the begins of all rounds backwards gives the limits.
    grid = pad_to_multiple_of * max(1, -(-int(lengths.max()) // (pad_to_multiple_of * FINEST_GRID)))
    counts = np.bincount(np.maximum(1, -(-lengths // grid)))  # counts[c]: examples of c * grid tokens at most
    occupied = np.flatnonzero(counts)
    limits = np.concatenate([[0], occupied * grid])
    below = np.concatenate([[0.0], np.cumsum(counts[occupied])])
    price = limits.astype(np.float64)  # of one example in a bucket with that limit
    if max_tokens is not None:
        price += max_tokens / np.maximum(1, max_tokens // np.maximum(1, limits))
    # cost[j, i]: of one bucket that spans the occupied cells i + 1 .. j
    cost = (below[:, None] - below[None, :]) * price[:, None]
    cost[np.triu_indices(len(limits))] = np.inf
    best = cost[:, 0].copy()
    begins = [np.zeros(len(limits), dtype=np.int64)]
    total, every = np.empty_like(cost), np.arange(len(limits))
    for _ in range(1, min(n_buckets, len(occupied))):
        np.add(cost, best, out=total)
        begin = total.argmin(axis=1)
        best = total[every, begin]
        begins.append(begin)
    boundaries, end = [], len(limits) - 1
    for begin in reversed(begins):
        boundaries.append(limits[end])
        end = int(begin[end])
    return np.array(boundaries[::-1], dtype=np.int64)


def bucket_numbers(lengths: NDArray[np.int32], boundaries: NDArray[np.int64]) -> NDArray[Any]:
    """Return the bucket of every example, shape (examples,); ``len(boundaries)`` for those above the last limit."""
    dtype = np.uint8 if len(boundaries) < 2**8 else np.uint16  # argsort is a radix sort on both
    if len(lengths) > lengths.max():  # faster by a table of all lengths
        table = np.searchsorted(boundaries, np.arange(int(lengths.max()) + 1)).astype(dtype)
        found: NDArray[Any] = table[lengths]
        return found
    return np.searchsorted(boundaries, lengths).astype(dtype)


def by_bucket(lengths: NDArray[np.int32], boundaries: NDArray[np.int64]) -> NDArray[np.int32]:
    """Return the examples from the longest bucket to the shortest, ascending inside each, without those too long."""
    numbers = bucket_numbers(lengths, boundaries)
    falling = numbers.dtype.type(len(boundaries)) - numbers  # 0: too long
    too_long = np.count_nonzero(falling == 0)
    return np.argsort(falling, kind="stable")[too_long:].astype(np.int32)
