"""Which examples go together: length buckets, batch sizes and the order of one epoch. Pure numpy, no torch.

Boundaries minimise the padded tokens (dynamic programming over the length histogram). Inside a bucket the examples are
shuffled anew every epoch; batches are cut from the longest bucket downwards, so what does not fill a batch of its own
bucket tops up with the next shorter one and only the very last batch is partial (in token mode: the last ``world_size``
batches share the rest). Whole batches are then shuffled, the largest one first: a card that is too small says so at
step 1. The number of batches is the same every epoch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, TypeGuard

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["EpochPlan", "LengthBuckets", "optimal_boundaries"]

MOST_BUCKETS = 64  # beyond it padding hardly falls any more
GROUPS_PER_BUCKET = 4  # fewer would make the same examples meet in almost every epoch
FINEST_GRID = 512  # distinct boundaries the dynamic programme looks at: it costs the square of it


@dataclass(frozen=True, slots=True)
class EpochPlan:
    """The order of one epoch.

    ``order``: example indices, shape (examples,). ``starts``: where each batch begins in it, with the end of the last
    one appended, shape (batches + 1,).
    """

    order: NDArray[np.int64]
    starts: NDArray[np.int64]

    def batch(self, position: int) -> NDArray[np.int64]:
        """Return the example indices of one batch."""
        return self.order[self.starts[position] : self.starts[position + 1]]


def optimal_boundaries(lengths: NDArray[np.int32], n_buckets: int, *, pad_to_multiple_of: int = 8) -> NDArray[np.int64]:
    """Return at most ``n_buckets`` upper length limits that minimise the padded tokens, ascending.

    Formula: minimise sum over buckets of (examples in the bucket) * (its upper limit), the limits being multiples of
    ``pad_to_multiple_of``; the last one holds the longest example.

    Example:
        >>> optimal_boundaries(np.array([3, 4, 5, 60, 61]), 2)
        array([ 8, 64])
    """
    grid = pad_to_multiple_of * max(1, -(-int(lengths.max()) // (pad_to_multiple_of * FINEST_GRID)))
    cells = np.maximum(1, -(-lengths // grid))  # a row without tokens still takes part in a batch
    counts = np.bincount(cells).astype(np.float64)  # counts[c]: examples of c * grid tokens at most
    occupied = np.flatnonzero(counts)
    limits = np.concatenate([[0], occupied * grid])
    below = np.concatenate([[0.0], np.cumsum(counts[occupied])])
    # cost[i, j]: padded tokens of one bucket that spans the occupied cells i + 1 .. j
    cost = (below[None, :] - below[:, None]) * limits[None, :]
    cost[np.tril_indices(len(limits))] = np.inf
    best = cost[0].copy()
    chosen = [np.zeros(len(limits), dtype=np.int64)]
    for _ in range(1, min(n_buckets, len(occupied))):
        total = best[:, None] + cost
        start = total.argmin(axis=0)
        best = total[start, np.arange(len(limits))]
        chosen.append(start)
    boundaries, end = [], len(limits) - 1
    for start in reversed(chosen):
        boundaries.append(limits[end])
        end = int(start[end])
    return np.array(boundaries[::-1], dtype=np.int64)


class LengthBuckets:
    """Plan the batches of an epoch from the lengths of its examples.

    Args:
        lengths: tokens per example, shape (examples,).
        batch_size: examples per batch; or
        max_tokens: padded tokens per batch (rows * longest row): long buckets get fewer rows.
        n_buckets: number of length classes; ``"auto"`` gives every bucket at least 4 groups of batches, 64 at most.
        seed: together with the epoch it fixes the order.
        world_size: processes that read side by side; every group of that many consecutive batches is cut from one
            bucket, with the same number of rows.
        pad_to_multiple_of: what the collator rounds the longest row of a batch up to.

    Raises:
        ValueError: a size below 1, both or neither of ``batch_size`` and ``max_tokens``, no examples, lengths that are
            negative or no integers, or an example longer than ``max_tokens``.

    Example:
        >>> buckets = LengthBuckets([3, 50, 4, 52, 5, 51], batch_size=3, n_buckets=2)
        >>> [sorted(buckets.plan(epoch=0).batch(i).tolist()) for i in range(buckets.n_batches)]
        [[1, 3, 5], [0, 2, 4]]
    """

    def __init__(
        self,
        lengths: ArrayLike,
        *,
        batch_size: int | None = None,
        max_tokens: int | None = None,
        n_buckets: int | Literal["auto"] = "auto",
        seed: int = 0,
        world_size: int = 1,
        pad_to_multiple_of: int = 8,
    ) -> None:
        self.batch_size, self.max_tokens = batch_size, max_tokens
        self.seed, self.world_size, self.pad_to_multiple_of = seed, world_size, pad_to_multiple_of
        self._check_settings(n_buckets)
        self.lengths = _checked_lengths(lengths)
        if max_tokens is not None:
            self._check_fit(max_tokens)
        if n_buckets == "auto":
            n_buckets = self._enough_buckets()
        self.boundaries = optimal_boundaries(self.lengths, n_buckets, pad_to_multiple_of=pad_to_multiple_of)

    def _check_settings(self, n_buckets: int | Literal["auto"]) -> None:
        check_batch_limits(self.batch_size, self.max_tokens)
        counts = {"world_size": self.world_size, "pad_to_multiple_of": self.pad_to_multiple_of}
        if n_buckets != "auto":
            counts["n_buckets"] = n_buckets
        for name, value in counts.items():
            if not _is_integer(value) or value < 1:
                raise ValueError(
                    f"{name}={value!r} is not a count; expected an integer of 1 or more. Pass {name}=1 or leave it out"
                )
        if not _is_integer(self.seed) or not 0 <= self.seed < 2**63:
            raise ValueError(f"seed={self.seed!r} is no seed; expected an integer from 0 to 2**63 - 1. Pass seed=0")

    def _check_fit(self, max_tokens: int) -> None:
        row = int(self.lengths.argmax())
        padded = int(self._padded(self.lengths[row : row + 1])[0])
        if padded > max_tokens:
            raise ValueError(
                f"lengths[{row}]={int(self.lengths[row])} tokens, padded to {padded}, do not fit into "
                f"max_tokens={max_tokens}; expected every example to fit into one batch. Truncate it "
                "(tokenizer(..., truncation=True, max_length=...)), drop it (dataset.filter) or raise max_tokens"
            )

    def _padded(self, lengths: NDArray[np.int32]) -> NDArray[np.int64]:
        multiple = self.pad_to_multiple_of
        return -(-np.maximum(lengths, 1).astype(np.int64) // multiple) * multiple

    def _enough_buckets(self) -> int:
        if self.batch_size is not None:
            batches = len(self.lengths) / self.batch_size
        else:
            batches = float(self._padded(self.lengths).sum()) / (self.max_tokens or 1)
        return int(np.clip(batches // (GROUPS_PER_BUCKET * self.world_size), 1, MOST_BUCKETS))

    @cached_property
    def _by_bucket(self) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """The examples sorted by bucket, longest bucket first, and where each bucket begins."""
        bucket = np.searchsorted(self.boundaries, self.lengths).astype(np.uint16)
        falling = (len(self.boundaries) - 1 - bucket).astype(np.uint16)
        examples = np.argsort(falling, kind="stable").astype(np.int32)  # a radix sort on 16 bits
        return examples, np.concatenate([[0], np.cumsum(np.bincount(falling, minlength=len(self.boundaries)))])

    @cached_property
    def _cuts(self) -> tuple[NDArray[np.int64], int]:
        """Where each batch begins before the shuffle, (batches + 1,), and how many batches stand in whole groups."""
        _, bucket_starts = self._by_bucket
        sizes = self._rows_per_batch()[::-1]
        starts, position, total = [0], 0, len(self.lengths)
        for k, size in enumerate(sizes):
            group = int(size) * self.world_size
            groups = max(0, -(-(int(bucket_starts[k + 1]) - position) // group))
            groups = min(groups, (total - position) // group)
            ends = position + int(size) * np.arange(1, groups * self.world_size + 1)
            starts.extend(ends.tolist())
            position += groups * group
        whole = len(starts) - 1
        if position < total:
            starts.extend(self._cut_rest(position, total))
        if self.max_tokens is not None:  # equal shares for all ranks are a group like any other
            whole = (len(starts) - 1) // self.world_size * self.world_size
        return np.array(starts, dtype=np.int64), whole

    def _cut_rest(self, position: int, total: int) -> list[int]:
        """Cut what does not fill a whole group: full batches in example mode, equal shares per rank in token mode."""
        if self.batch_size is not None:
            return [*range(position + self.batch_size, total, self.batch_size), total]
        shares = min(self.world_size, total - position)
        return [position + (total - position) * (i + 1) // shares for i in range(shares)]

    def _rows_per_batch(self) -> NDArray[np.int64]:
        if self.max_tokens is None:
            return np.full(len(self.boundaries), self.batch_size, dtype=np.int64)
        return np.maximum(1, self.max_tokens // self.boundaries)

    @property
    def n_batches(self) -> int:
        """The number of batches of an epoch, over all processes; the same in every epoch."""
        return len(self._cuts[0]) - 1

    def plan(self, epoch: int) -> EpochPlan:
        """Return the order of one epoch; the same ``(seed, epoch)`` always gives the same one."""
        generator = np.random.Generator(np.random.Philox(key=[self.seed, epoch]))
        examples, bucket_starts = self._by_bucket
        order = examples.astype(np.int64)
        for start, end in pairwise(bucket_starts):
            generator.shuffle(order[start:end])
        starts, whole = self._cuts
        groups = whole // self.world_size
        if groups == 0:
            return EpochPlan(order, starts)
        shuffled = generator.permutation(groups)
        sizes = np.diff(starts)[:whole]
        longest = np.maximum.reduceat(self.lengths[order], starts[:-1])[:whole]
        tokens = (self._padded(longest) * sizes).reshape(groups, self.world_size).max(axis=1)
        first = int(np.flatnonzero(shuffled == tokens.argmax())[0])
        shuffled[[0, first]] = shuffled[[first, 0]]
        batches = (shuffled[:, None] * self.world_size + np.arange(self.world_size)).ravel()
        return _reorder(order, starts, batches, sizes)

    def padding_efficiency(self, epoch: int = 0) -> float:
        """Return real tokens over padded tokens of one epoch, batches padded to their own longest row."""
        plan = self.plan(epoch)
        longest = np.maximum.reduceat(self.lengths[plan.order], plan.starts[:-1])
        return float(self.lengths.sum(dtype=np.int64) / (self._padded(longest) * np.diff(plan.starts)).sum())


def _reorder(
    order: NDArray[np.int64], starts: NDArray[np.int64], batches: NDArray[np.int64], sizes: NDArray[np.int64]
) -> EpochPlan:
    """Put the batches named first into the given order; what follows them in ``starts`` stays at the end."""
    new_sizes = sizes[batches]
    new_starts = np.concatenate([[0], np.cumsum(new_sizes)])
    source = np.repeat(starts[batches] - new_starts[:-1], new_sizes) + np.arange(new_starts[-1])
    rest = order[new_starts[-1] :]
    return EpochPlan(np.concatenate([order[source], rest]), np.concatenate([new_starts, starts[len(batches) + 1 :]]))


def _is_integer(value: Any) -> TypeGuard[int]:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _checked_lengths(lengths: ArrayLike) -> NDArray[np.int32]:
    found = np.asarray(lengths)
    if found.ndim != 1 or found.size == 0:
        raise ValueError(
            f"lengths=<array of shape {found.shape}> is not one length per example; expected shape (examples,) with at "
            "least one. Pass token_lengths(dataset)"
        )
    if found.dtype.kind not in "iu":
        raise ValueError(
            f"lengths=<array of {found.dtype}> is not a number of tokens; expected integers. "
            "Pass token_lengths(dataset)"
        )
    for row in (int(found.argmin()), int(found.argmax())):
        if not 0 <= found[row] < 2**31:
            raise ValueError(
                f"lengths[{row}]={int(found[row])} is not a number of tokens; expected 0 to 2**31 - 1. "
                "Pass token_lengths(dataset)"
            )
    return found.astype(np.int32, copy=False)


def check_batch_limits(batch_size: int | None, max_tokens: int | None) -> None:
    """Raise ValueError unless exactly one of the two limits is given and is 1 or more."""
    if (batch_size is None) == (max_tokens is None):
        raise ValueError(
            f"batch_size={batch_size!r}, max_tokens={max_tokens!r}; expected exactly one of them. "
            "Pass batch_size=32 (examples per batch) or max_tokens=4096 (padded tokens per batch)"
        )
    name, value = ("batch_size", batch_size) if max_tokens is None else ("max_tokens", max_tokens)
    if not _is_integer(value) or value < 1:
        raise ValueError(
            f"{name}={value!r} is not a size; expected an integer of 1 or more. Pass, for example, {name}=32"
        )
