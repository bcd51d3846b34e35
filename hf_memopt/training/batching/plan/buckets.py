"""Which examples go together: length buckets, batch sizes and the order of one epoch. Pure numpy, no torch.

Inside a bucket the examples are shuffled anew every epoch; batches are cut from the longest bucket downwards, so what
does not fill a batch of its own bucket tops up with the next shorter one and only the rest at the very end is partial.
Whole batches are then shuffled, the largest one first, so that a GPU that is too small fails at step 1. The number of
batches is the same every epoch.

A plan holds 4 bytes per example beside the 4 of its length. Rows without padding are planned by ``packed_rows.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hf_memopt.training.batching.plan.boundaries import bucket_numbers, by_bucket, optimal_boundaries
from hf_memopt.training.batching.plan.checks import (
    check_batch_limits,
    check_settings,
    checked_boundaries,
    checked_lengths,
)

MOST_BUCKETS = 63  # with the rest at the end that makes 64 shapes; padding hardly falls beyond
FEWEST_BUCKETS = 8  # on small data; one alone would pad every example to the longest
BATCHES_PER_BUCKET = 4  # fewer would make the same examples meet in almost every epoch


@dataclass(frozen=True, slots=True)
class PlanDiagnostics:
    """What the batches of one epoch are like.

    ``kept``, ``dropped``: examples. ``padding_efficiency``: real over padded tokens. ``fill``, ``budget_use``: padded
    and real tokens of a batch over ``max_tokens``, on average; None without a budget. ``shapes``: distinct (rows,
    width). ``over_budget``: batches above ``max_tokens``. ``straggler_ratio``: padded tokens of the largest batch of a
    step over the mean of its ranks, on average; at 1.0 no rank waits.
    """

    kept: int
    dropped: int
    batches: int
    padding_efficiency: float
    fill: float | None
    budget_use: float | None
    shapes: int
    over_budget: int
    straggler_ratio: float


@dataclass(frozen=True, slots=True)
class EpochPlan:
    """The order of one epoch.

    ``order``: example indices bucket by bucket, shape (examples,). ``starts``: where each batch begins in it, with the
    end of the last one appended, shape (batches + 1,). ``sequence``: which of them is read at each position, shape
    (batches,). ``widths``: what the batches are padded to, shape (batches,), or None for their own longest row.
    """

    order: NDArray[np.int32]
    starts: NDArray[np.int64]
    sequence: NDArray[np.int64]
    widths: NDArray[np.int64] | None

    def __len__(self) -> int:
        return len(self.sequence)

    def batch(self, position: int) -> NDArray[np.int32]:
        """Return the example indices of one batch, in reading order."""
        cut = self.sequence[position]
        return self.order[self.starts[cut] : self.starts[cut + 1]]

    def width(self, position: int) -> int | None:
        """Return what that batch is padded to, or None for its own longest row."""
        return None if self.widths is None else int(self.widths[self.sequence[position]])

    def sizes(self) -> NDArray[np.int64]:
        """Return the rows of every batch in reading order, shape (batches,)."""
        return np.diff(self.starts)[self.sequence]

    def flat(self) -> NDArray[np.int32]:
        """Return all example indices in reading order, shape (examples,)."""
        begins, sizes = self.starts[self.sequence], self.sizes()
        ends = np.cumsum(sizes)
        found: NDArray[np.int32] = self.order[np.repeat(begins - (ends - sizes), sizes) + np.arange(ends[-1])]
        return found


class _Cuts(NamedTuple):
    """How the examples, sorted from the longest bucket to the shortest, are cut into batches: alike in every epoch."""

    starts: NDArray[np.int64]  # (batches + 1,)
    limits: NDArray[np.int64]  # (batches,), the limit of the longest bucket that the batch's group touches
    whole: int  # batches in groups of world_size, which are shuffled as groups; the others stay at the end


class LengthBuckets:
    """Plan the batches of an epoch from the lengths of its examples.

    Args:
        lengths: tokens per example, shape (examples,).
        batch_size: examples per batch; or
        max_tokens: padded tokens per batch (rows * longest row): long buckets get fewer rows.
        n_buckets: number of length classes; ``"auto"`` gives each at least 4 batches, and one for every process, but
            makes 8 at least and 63 at most.
        boundaries: pad every batch to the limit of its bucket instead of its longest row, so that few shapes occur
            (``torch.compile``, CUDA graphs): ``"auto"`` for the best limits, or the limits themselves, ascending.
        seed: together with the epoch it fixes the order.
        world_size: processes that read side by side; every group of that many consecutive batches is cut from one
            bucket, with the same number of rows.
        pad_to_multiple_of: what the collator rounds the longest row of a batch up to.
        too_long: what to do with examples above ``max_tokens`` or the last of the ``boundaries``: raise, or leave them
            out (``dropped`` counts them).

    Raises:
        ValueError: a size below 1, both or neither of ``batch_size`` and ``max_tokens``, no examples, lengths below 1
            or no integers, boundaries that do not ascend or exceed ``max_tokens``, an example that is too long.

    Examples:
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
        boundaries: ArrayLike | Literal["auto"] | None = None,
        seed: int = 0,
        world_size: int = 1,
        pad_to_multiple_of: int = 8,
        too_long: Literal["error", "drop"] = "error",
    ) -> None:
        is_own = boundaries is not None and not isinstance(boundaries, str)
        check_batch_limits(batch_size, max_tokens, 1 if is_own else pad_to_multiple_of)
        check_settings(world_size=world_size, pad_to_multiple_of=pad_to_multiple_of, seed=seed, too_long=too_long)
        self.batch_size, self.max_tokens = batch_size, max_tokens
        self.seed, self.world_size, self.pad_to_multiple_of = seed, world_size, pad_to_multiple_of
        self.too_long = too_long
        self.lengths = checked_lengths(lengths)
        self.pads_to_boundaries = boundaries is not None
        if boundaries is None or (isinstance(boundaries, str) and boundaries == "auto"):
            fitting = self._fitting(self._longest_allowed())
            if isinstance(n_buckets, str) and n_buckets == "auto":
                n_buckets = self._enough_buckets(fitting)
            check_settings(n_buckets=n_buckets)
            self.boundaries = optimal_boundaries(
                fitting, n_buckets, pad_to_multiple_of=pad_to_multiple_of, max_tokens=max_tokens
            )
            if max_tokens is not None:  # beyond FINEST_GRID the limits are coarser than the padding
                self.boundaries = np.minimum(self.boundaries, self._longest_allowed())
        else:
            self.boundaries = checked_boundaries(boundaries, max_tokens, n_buckets)
            fitting = self._fitting(int(self.boundaries[-1]))
        self.n_examples = len(fitting)
        counts = np.bincount(bucket_numbers(self.lengths, self.boundaries), minlength=len(self.boundaries))
        # where each bucket ends in the order from the longest bucket to the shortest, shape (buckets,)
        self._bucket_ends = np.cumsum(counts[: len(self.boundaries)][::-1])
        self._cuts = self._cut()

    @property
    def dropped(self) -> int:
        """The number of examples left out because they are too long."""
        return len(self.lengths) - self.n_examples

    def _longest_allowed(self) -> int:
        """The longest example that one batch holds."""
        if self.max_tokens is None:
            return 2**31 - 1
        return self.max_tokens // self.pad_to_multiple_of * self.pad_to_multiple_of

    def _fitting(self, longest_allowed: int) -> NDArray[np.int32]:
        """Return the lengths of the examples that are kept."""
        row = int(self.lengths.argmax())
        if self.lengths[row] <= longest_allowed:
            return self.lengths
        too_long = self.lengths > longest_allowed
        if self.too_long == "error" or too_long.all():
            by_budget = self.max_tokens is not None and longest_allowed == self._longest_allowed()
            limit = f"max_tokens={self.max_tokens}" if by_budget else f"boundaries[-1]={longest_allowed}"
            raise ValueError(
                f"lengths[{row}]={int(self.lengths[row])} exceeds {longest_allowed} tokens, the longest row that "
                f"{limit} allows, as do {int(too_long.sum()) - 1} other examples; expected every example to fit into a "
                f"batch. Truncate (tokenizer(..., truncation=True, max_length={longest_allowed})), leave them out "
                f"(too_long='drop') or raise {limit.split('=')[0]}"
            )
        return self.lengths[~too_long]

    def _enough_buckets(self, lengths: NDArray[np.int32]) -> int:
        if self.batch_size is not None:
            batches = len(lengths) / self.batch_size
        else:
            batches = float(lengths.sum(dtype=np.int64)) / (self.max_tokens or 1)
        return int(np.clip(batches // max(BATCHES_PER_BUCKET, self.world_size), FEWEST_BUCKETS, MOST_BUCKETS))

    # ---- The batches, alike in every epoch --------------------------------------------------------------------------

    def _cut(self) -> _Cuts:
        # From the longest bucket downwards; a group is one batch for each process. The last group of a bucket takes the
        # longest examples of the next one, rather than being partial, so it is padded like its own bucket.
        found, position, total, rows = [np.zeros(1, dtype=np.int64)], 0, self.n_examples, 0
        for end, limit in zip(self._bucket_ends.tolist(), self.boundaries[::-1].tolist(), strict=True):
            size = self.batch_size or max(1, (self.max_tokens or 0) // limit)
            group = size * self.world_size
            groups = min(max(0, -(-(end - position) // group)), (total - position) // group)
            if groups:
                found.append(position + size * np.arange(1, groups * self.world_size + 1))
                position, rows = position + groups * group, size
        starts = np.concatenate(found)
        if self.batch_size is not None:  # full batches and one partial one, which stay at the end
            whole = len(starts) - 1
            starts = np.concatenate([starts, np.arange(position + self.batch_size, total, self.batch_size)])
            starts = np.append(starts, total) if starts[-1] < total else starts
        else:
            starts = self._share_rest(starts, total, rows)
            whole = (len(starts) - 1) // self.world_size * self.world_size
        first = np.arange(len(starts) - 1)
        first[:whole] -= first[:whole] % self.world_size
        bucket = np.searchsorted(self._bucket_ends, starts[first], side="right")
        return _Cuts(starts, self.boundaries[::-1][bucket], whole)

    def _share_rest(self, starts: NDArray[np.int64], total: int, rows: int) -> NDArray[np.int64]:
        """Cut what does not fill a whole group into equal shares for all ranks; in one group they differ by a row.

        A rest of fewer examples than ranks is shared together with the last whole group, in two groups.
        """
        world, rest = self.world_size, total - int(starts[-1])
        if rest == 0:
            return starts
        shares = min(world, rest)
        if rest < world and len(starts) > world and rows > 1:
            starts = starts[:-world]
            rest, shares = total - int(starts[-1]), 2 * world
        sizes = np.full(shares, rest // shares)
        sizes[: rest % shares] += 1
        return np.concatenate([starts, starts[-1] + np.cumsum(sizes)])

    @property
    def n_batches(self) -> int:
        """The number of batches of an epoch, over all processes; the same in every epoch."""
        return len(self._cuts.limits)

    # ---- The order of an epoch --------------------------------------------------------------------------------------

    def plan(self, epoch: int) -> EpochPlan:
        """Return the order of one epoch; the same ``(seed, epoch)`` always gives the same one."""
        check_settings(epoch=epoch)
        generator = np.random.Generator(np.random.Philox(key=[self.seed, epoch]))
        order = by_bucket(self.lengths, self.boundaries)
        for begin, end in pairwise([0, *self._bucket_ends.tolist()]):
            generator.shuffle(order[begin:end])
        starts, limits, whole = self._cuts
        groups = generator.permutation(whole // self.world_size)
        sequence = reading_order(groups, self._largest_groups(order), self.world_size, self.n_batches)
        return EpochPlan(order, starts, sequence, limits if self.pads_to_boundaries else None)

    def _largest_groups(self, order: NDArray[np.int32]) -> list[int]:
        """Return the groups to be read first: that of the most padded tokens, then that of the longest row."""
        starts, limits, whole = self._cuts
        if whole == 0:
            return []
        widths, sizes = self._widths(order)[:whole], np.diff(starts)[:whole]
        # Of several that are as large the one with the highest limits, and of these the last.
        measures = (limits[:whole], limits[:whole] * sizes, widths, widths * sizes)
        of_groups = [measure.reshape(-1, self.world_size).max(axis=1) for measure in measures]
        most, widest = int(np.lexsort(of_groups)[-1]), int(of_groups[2].argmax())
        return [most] if of_groups[2][most] == of_groups[2][widest] else [most, widest]

    def _widths(self, order: NDArray[np.int32]) -> NDArray[np.int64]:
        """Return what each batch is padded to, shape (batches,)."""
        if self.pads_to_boundaries:
            return self._cuts.limits
        longest = np.maximum.reduceat(self.lengths[order], self._cuts.starts[:-1]).astype(np.int64)
        return -(-longest // self.pad_to_multiple_of) * self.pad_to_multiple_of

    # ---- What it is worth -------------------------------------------------------------------------------------------

    def padding_efficiency(self, epoch: int = 0) -> float:
        """Return real tokens over padded tokens of one epoch."""
        return self.diagnostics(epoch).padding_efficiency

    def diagnostics(self, epoch: int = 0) -> PlanDiagnostics:
        """Return what the batches of one epoch are like."""
        plan = self.plan(epoch)
        rows, widths = np.diff(plan.starts), self._widths(plan.order)
        real, padded, budget = int(self.lengths[plan.order].sum(dtype=np.int64)), rows * widths, self.max_tokens
        steps = padded[plan.sequence][: self._cuts.whole].reshape(-1, self.world_size)
        return PlanDiagnostics(
            kept=self.n_examples,
            dropped=self.dropped,
            batches=len(plan),
            padding_efficiency=real / int(padded.sum()),
            fill=None if budget is None else float(padded.mean() / budget),
            budget_use=None if budget is None else real / len(plan) / budget,
            shapes=len(np.unique(np.stack([rows, widths], axis=1), axis=0)),
            over_budget=0 if budget is None else int((padded > budget).sum()),
            straggler_ratio=float((steps.max(axis=1) / steps.mean(axis=1)).mean()) if len(steps) else 1.0,
        )


def reading_order(groups: NDArray[np.int64], first: list[int], world_size: int, batches: int) -> NDArray[np.int64]:
    """Return the sequence of an epoch's batches, of which ``world_size`` neighbours are a group, shape (batches,).

    ``first``: groups that are read before the others. Batches that belong to no group stay at the end.
    """
    groups = np.concatenate([np.array(first, dtype=np.int64), groups[~np.isin(groups, first)]])
    sequence = np.arange(batches)
    sequence[: len(groups) * world_size] = (groups[:, None] * world_size + np.arange(world_size)).ravel()
    return sequence
