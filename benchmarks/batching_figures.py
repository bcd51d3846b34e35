"""What ``batching.py`` counts on the batches of an epoch, whoever made them. Pure numpy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

PAD_TO_MULTIPLE_OF = 8
RANKS = 8

Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Epoch:
    """The batches of one epoch in reading order.

    ``order``: example indices, shape (examples read,). ``starts``: where each batch begins in it, with the end of the
    last one appended, (batches + 1,). ``rows`` and ``widths``: the tensor that each batch becomes, (batches,).
    ``tokens``: its real tokens, ``mean_lengths``: those per example, (batches,).
    """

    order: Integers
    starts: Integers
    rows: Integers
    widths: Integers
    tokens: Integers

    @property
    def padded_tokens(self) -> Integers:
        """Size of each batch's tensor, (batches,)."""
        return self.rows * self.widths

    @property
    def mean_lengths(self) -> NDArray[np.float64]:
        """Real tokens per example of each batch, (batches,)."""
        return self.tokens / np.diff(self.starts)


def round_up(lengths: NDArray[Any]) -> Integers:
    """Round lengths up to what the collator pads to; an empty text still takes a column."""
    return -(-np.maximum(lengths, 1).astype(np.int64) // PAD_TO_MULTIPLE_OF) * PAD_TO_MULTIPLE_OF


def epoch_of(
    batches: Iterable[Sequence[int] | NDArray[Any]],
    lengths: NDArray[Any],
    shapes: tuple[Sequence[int], Sequence[int]] | None = None,
) -> Epoch:
    """Return what batches become: a row per example, padded to the longest, unless ``shapes`` gives (rows, widths)."""
    arrays = [np.asarray(batch, dtype=np.int64) for batch in batches]
    sizes = np.array([len(array) for array in arrays])
    order, starts = np.concatenate(arrays), np.concatenate([[0], np.cumsum(sizes)])
    read = lengths[order].astype(np.int64)
    rows, widths = (
        (sizes, round_up(np.maximum.reduceat(read, starts[:-1]))) if shapes is None else map(np.array, shapes)
    )
    return Epoch(order, starts, rows, widths, np.add.reduceat(read, starts[:-1]))


def lag_one(values: NDArray[np.float64]) -> float:
    """Return the correlation of consecutive values; 0 where they do not vary."""
    before, after = values[:-1], values[1:]
    if len(before) < 2 or before.std() == 0 or after.std() == 0:
        return 0.0
    return float(np.corrcoef(before, after)[0, 1])


def repeat_rate(first: Epoch, second: Epoch) -> float:
    """Return the chance that two examples of a batch of the first epoch share a batch of the second one too."""
    in_first, in_second = (np.repeat(np.arange(len(e.rows)), np.diff(e.starts)) for e in (first, second))
    batch_of = np.full(max(first.order.max(), second.order.max()) + 1, -1)
    batch_of[second.order] = in_second
    later = batch_of[first.order]
    together = np.unique(np.stack([in_first, later])[:, later >= 0], axis=1, return_counts=True)[1]
    sizes = np.diff(first.starts)
    pairs = (sizes * (sizes - 1)).sum()
    return float((together * (together - 1)).sum() / pairs) if pairs else 0.0


def straggler_ratio(epoch: Epoch, ranks: int = RANKS) -> float | None:
    """Return how much the fullest rank of a step has over the mean, averaged over the steps; None without a full step.

    Consecutive batches go to the ranks of one step; what does not fill the last step is left out.
    """
    steps = len(epoch.rows) // ranks
    if steps == 0:
        return None
    padded = epoch.padded_tokens[: steps * ranks].reshape(steps, ranks)
    return float((padded.max(axis=1) / padded.mean(axis=1)).mean())


def figures_of(epoch: Epoch, lengths: NDArray[Any], budget: int) -> dict[str, Any]:
    """Return what one epoch shows: shares of the padded tokens and of the budget, shapes, batches over the budget."""
    padded = epoch.padded_tokens
    return {
        "batches": len(padded),
        "padding_efficiency": float(epoch.tokens.sum() / padded.sum()),
        "fill": float(padded.mean() / budget),
        "real_tokens_over_budget": float(epoch.tokens.mean() / budget),
        "shapes": len(np.unique(np.stack([epoch.rows, epoch.widths]), axis=1).T),
        "batches_over_budget": int((padded > budget).sum()),
        "largest_batch_tokens": int(padded.max()),
        "left_out_examples": len(lengths) - len(np.unique(epoch.order)),
    }
