"""Which texts share a row without padding: best fit, the longest text first, for all texts of a length at once.

Each text goes to the row with the least room that still holds it, else to a new row, as TRL's ``bfd`` does. A row that
takes a text takes as many of its length as fit before another row is looked at, so the cost is that of the distinct
lengths: 0.1 s of CPU for a million texts (benchmarks/packed_rows.py).

Trade: the rows are alike in every epoch but for texts of equal length, which trade places; the order of rows is new.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hf_memopt.training.batching.plan.buckets import EpochPlan, reading_order
from hf_memopt.training.batching.plan.checks import check_settings, checked_lengths


def best_fit(lengths: NDArray[np.int32], row_tokens: int, multiple: int = 1) -> NDArray[np.int32]:
    """Return the row of every text, shape (texts,); their number is a ``multiple`` unless there are too few texts."""
    counts = np.bincount(lengths)
    sizes = np.flatnonzero(counts)[::-1]
    free: dict[int, list[tuple[int, int]]] = {}  # by room: ranges of rows (first, number)
    rooms: list[int] = []  # those with rows, ascending
    placed: list[tuple[int, int, int]] = []  # first row, number of rows, texts in each; longest texts first
    rows = 0

    def leave(room: int, first: int, number: int) -> None:
        if not free.setdefault(room, []):
            insort(rooms, room)
        free[room].append((first, number))

    for size, left in zip(sizes.tolist(), counts[sizes].tolist(), strict=True):
        while left:
            place = bisect_left(rooms, size)
            if place < len(rooms):
                room = rooms[place]
                first, number = free[room].pop()
                if not free[room]:
                    del rooms[place]
            else:
                room, first, number = row_tokens, rows, -(-left // (row_tokens // size))
                rows += number
            each = room // size  # a row takes all that fit before the next one is begun
            full = min(number, left // each)
            begun = int(full < number and left > full * each)  # and one takes what is left
            for begin, many, texts in ((first, full, each), (first + full, begun, left - full * each)):
                if many:
                    placed.append((begin, many, texts))
                    leave(room - texts * size, begin, many)
                    left -= many * texts
            if number > full + begun:
                leave(room, first + full + begun, number - full - begun)
    begins, numbers, texts_each = np.array(placed).T
    ends = np.cumsum(numbers)
    touched = np.repeat(begins - (ends - numbers), numbers) + np.arange(ends[-1])
    found = np.empty(len(lengths), dtype=np.int32)
    found[_by_number(-lengths)] = np.repeat(touched, np.repeat(texts_each, numbers))
    return _complete(found, multiple)


def _by_number(values: NDArray[np.int32]) -> NDArray[np.int64]:
    """Return the stable order of integers; numpy sorts 16 bits at a time by their digits, much faster than 32."""
    values = values - values.min()
    order = np.argsort((values & 0xFFFF).astype(np.uint16), kind="stable")
    if values.max() > 0xFFFF:
        order = order[np.argsort((values >> 16).astype(np.uint16)[order], kind="stable")]
    return order


def _complete(rows: NDArray[np.int32], multiple: int) -> NDArray[np.int32]:
    """Give as many texts of the last rows, the least full, a row of their own as make the number of rows a multiple."""
    missing = -(int(rows.max()) + 1) % multiple
    order = _by_number(rows)[::-1]
    shared = order[1:][np.diff(rows[order]) == 0]  # of each row all texts but one, the last rows first
    if 0 < missing <= len(shared):
        rows[shared[:missing]] = int(rows.max()) + 1 + np.arange(missing)
    return rows


class PackedRows:
    """Plan rows of at most ``row_tokens`` tokens that hold whole texts, by best fit; the same number in every epoch.

    Args:
        lengths: tokens per example, shape (examples,).
        row_tokens: tokens of a row, and of the longest text.
        too_long: what to do with longer examples: raise, leave them out, or split them into texts of ``row_tokens``.
        seed: together with the epoch it fixes the order.
        world_size: processes that read side by side; the number of rows is a multiple of it.

    Raises:
        ValueError: a setting or a length is out of range, or an example too long.

    Examples:
        >>> rows = PackedRows([50, 3, 20, 41, 14, 64], row_tokens=64)
        >>> sorted(sorted(rows.lengths[rows.plan(epoch=0).batch(i)].tolist()) for i in range(rows.n_batches))
        [[3, 20, 41], [14, 50], [64]]
    """

    batch_size = None
    padded: Any = None  # the length buckets that this plan stands for

    def __init__(
        self,
        lengths: ArrayLike,
        *,
        row_tokens: int,
        too_long: Literal["error", "drop", "split"] = "error",
        seed: int = 0,
        world_size: int = 1,
    ) -> None:
        check_settings(row_tokens=row_tokens, seed=seed, world_size=world_size)
        row_tokens = min(row_tokens, int(np.iinfo(np.int32).max))  # in which lengths are counted
        self.row_tokens, self.too_long, self.seed, self.world_size = row_tokens, too_long, seed, world_size
        self.lengths = checked_lengths(lengths)
        self.examples, self.begins, self.text_lengths = self._texts()
        self.n_examples = len(self.lengths) if too_long == "split" else len(self.text_lengths)
        rows = best_fit(self.text_lengths, row_tokens, world_size)
        self._places = _by_number(rows)  # of the texts, row by row
        self._starts = np.concatenate([[0], np.cumsum(np.bincount(rows))])
        self.row_lengths = np.bincount(rows, self.text_lengths).astype(np.int64)
        self.n_batches, self.dropped = len(self.row_lengths), len(self.lengths) - self.n_examples

    def plan(self, epoch: int) -> EpochPlan:
        """Return the texts of the rows of one epoch, a function of ``(seed, epoch)``; the fullest row comes first."""
        check_settings(epoch=epoch)
        generator = np.random.Generator(np.random.Philox(key=[self.seed, epoch]))
        # Texts of equal length trade places: the i-th of them in a random order takes the i-th place of that length.
        shuffled = generator.permutation(len(self.text_lengths)).astype(np.int32)
        order = np.empty_like(shuffled)
        order[_by_number(self.text_lengths[self._places])] = shuffled[_by_number(self.text_lengths[shuffled])]
        groups = generator.permutation(self.n_batches // self.world_size)
        whole = self.row_lengths[: len(groups) * self.world_size]  # rows of the last group may be too few
        first = [int(whole.argmax()) // self.world_size] if len(groups) else []
        sequence = reading_order(groups, first, self.world_size, self.n_batches)
        return EpochPlan(order, self._starts, sequence, None)

    def _texts(self) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
        """Return the example of every text, its first token in it and its length, shape (texts,) each."""
        longest, is_long = self.row_tokens, self.lengths > self.row_tokens
        pieces = -(-self.lengths // longest) if self.too_long == "split" else (~is_long).astype(np.int32)
        if is_long.any() and (self.too_long == "error" or not pieces.any()):
            row = int(self.lengths.argmax())
            raise ValueError(
                f"lengths[{row}]={int(self.lengths[row])} exceeds row_tokens={longest}, as do {int(is_long.sum()) - 1} "
                "other examples; expected every text to fit into a row. Split them (too_long='split'), leave them out "
                "(too_long='drop') or raise row_tokens"
            )
        examples = np.repeat(np.arange(len(pieces), dtype=np.int32), pieces)
        begins = (np.arange(len(examples)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * longest
        return examples, begins.astype(np.int32), np.minimum(self.lengths[examples] - begins, longest).astype(np.int32)
