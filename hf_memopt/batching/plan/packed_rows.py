"""Which texts share a row of fixed length: best fit, the longest text first, for all texts of a length at once.

Each text goes to the row with the least room that still holds it, else to a new row (best-fit decreasing, as TRL's
``bfd``). Texts of one length are placed together, since a row that takes one of them takes as many as fit before
another row is looked at: the cost is that of the distinct lengths, not of the texts. A million lengths take less than
0.1 s of CPU and leave 0.02 % of the rows empty (benchmarks/packed_rows.py).

Trade: the rows are alike in every epoch but for texts of equal length, which trade places; the order of rows is new.
Where the lengths of the batches need not be equal, ``PackedBatches`` mixes texts of similar length as well.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hf_memopt.batching.plan.buckets import EpochPlan, reading_order
from hf_memopt.batching.plan.checks import check_settings, checked_lengths
from hf_memopt.plain_data import check_value

TooLong = Literal["error", "drop", "split"]


def best_fit(lengths: NDArray[np.int32], row_tokens: int, multiple: int = 1) -> NDArray[np.int32]:
    """Return the row of every text, shape (texts,), by best-fit decreasing; no length is above ``row_tokens``.

    The number of rows is a ``multiple``, unless there are fewer texts: some texts get a row of their own for it.

    Examples:
        >>> best_fit(np.array([5, 3, 4, 2, 1], dtype=np.int32), 8)
        array([0, 0, 1, 1, 1], dtype=int32)
    """
    counts = np.bincount(lengths)
    sizes = np.flatnonzero(counts)[::-1]
    free: dict[int, list[tuple[int, int]]] = {}  # by room: ranges of rows (first, number)
    rooms: list[int] = []  # those with rows, ascending
    placed: list[tuple[int, int, int]] = []  # first row, number of rows, texts in each; longest texts first
    rows = 0

    def leave(room: int, first: int, number: int) -> None:
        if room not in free:
            free[room] = []
            insort(rooms, room)
        free[room].append((first, number))

    for size, left in zip(sizes.tolist(), counts[sizes].tolist(), strict=True):
        while left:
            place = bisect_left(rooms, size)
            if place < len(rooms):
                room = rooms[place]
                first, number = free[room].pop()
                if not free[room]:
                    del free[room], rooms[place]
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
    if missing == 0:
        return rows
    order = _by_number(rows)[::-1]
    shared = order[1:][np.diff(rows[order]) == 0]  # of each row all texts but one, the last rows first
    if len(shared) < missing:
        return rows
    found = rows.copy()
    found[shared[:missing]] = int(rows.max()) + 1 + np.arange(missing)
    return found


class PackedRows:
    """Plan rows of a fixed number of tokens that hold whole texts, by best fit; a ``packed`` view reads them.

    Args:
        lengths: tokens per example, shape (examples,).
        row_tokens: tokens of a row. What its texts leave free is padding, which the collator makes a text of its own.
        max_length: the longest text; None: ``row_tokens``. Less where the model has fewer positions than a row tokens.
        too_long: what to do with examples above it: raise, leave them out (``dropped`` counts them), or split them
            into texts of ``max_length`` tokens and what is left.
        seed: together with the epoch it fixes the order.
        world_size: processes that read side by side; the number of rows is a multiple of it.

    Raises:
        ValueError: a size below 1, ``max_length`` above ``row_tokens``, no examples, lengths below 1 or no integers, an
            example that is too long.

    Examples:
        >>> rows = PackedRows([50, 3, 20, 41, 14, 64], row_tokens=64)
        >>> [sorted(rows.lengths[rows.plan(epoch=0).batch(i)].tolist()) for i in range(rows.n_batches)]
        [[14, 50], [64], [3, 20, 41]]
    """

    batch_size = None

    def __init__(
        self,
        lengths: ArrayLike,
        *,
        row_tokens: int,
        max_length: int | None = None,
        too_long: TooLong = "error",
        seed: int = 0,
        world_size: int = 1,
    ) -> None:
        self.row_tokens, self.max_length = row_tokens, checked_max_length(row_tokens, max_length, too_long)
        check_settings(seed=seed, world_size=world_size)
        self.too_long, self.seed, self.world_size = too_long, seed, world_size
        self.lengths = checked_lengths(lengths)
        self.examples, self.begins, self.text_lengths = self._texts()
        self.n_examples = len(self.lengths) if too_long == "split" else len(self.text_lengths)
        rows = best_fit(self.text_lengths, row_tokens, world_size)
        self._places = _by_number(rows)  # of the texts, row by row
        self._starts = np.concatenate([[0], np.cumsum(np.bincount(rows))])

    @property
    def dropped(self) -> int:
        """The number of examples left out because they are too long."""
        return len(self.lengths) - self.n_examples

    @property
    def n_batches(self) -> int:
        """The number of rows of an epoch, over all processes; the same in every epoch."""
        return len(self._starts) - 1

    @property
    def fill(self) -> float:
        """The share of the rows' tokens that is texts."""
        return int(self.text_lengths.sum(dtype=np.int64)) / (self.n_batches * self.row_tokens)

    def plan(self, epoch: int) -> EpochPlan:
        """Return the texts of the rows of one epoch; a function of ``(seed, epoch)``."""
        check_settings(epoch=epoch)
        generator = np.random.Generator(np.random.Philox(key=[self.seed, epoch]))
        # Texts of equal length trade places: the i-th of them in a random order takes the i-th place of that length.
        shuffled = generator.permutation(len(self.text_lengths)).astype(np.int32)
        drawn = shuffled[_by_number(self.text_lengths[shuffled])]
        order = np.empty_like(drawn)
        order[_by_number(self.text_lengths[self._places])] = drawn
        whole = self.n_batches // self.world_size
        sequence = reading_order(generator.permutation(whole), [], self.world_size, self.n_batches)
        return EpochPlan(order, self._starts, sequence, None)

    def _texts(self) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
        """Return the example of every text, its first token in it and its length, shape (texts,) each."""
        longest, indices = self.max_length, np.arange(len(self.lengths), dtype=np.int32)
        is_long = self.lengths > longest
        if self.too_long == "split":
            pieces = -(-self.lengths // longest)
            examples = np.repeat(indices, pieces)
            begins = (np.arange(len(examples)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * longest
            return examples, begins.astype(np.int32), np.minimum(self.lengths[examples] - begins, longest, dtype="i4")
        if is_long.any() and (self.too_long == "error" or is_long.all()):
            row = int(self.lengths.argmax())
            raise ValueError(
                f"lengths[{row}]={int(self.lengths[row])} exceeds max_length={longest}, as do {int(is_long.sum()) - 1} "
                "other examples; expected every text to fit into a row. Split them (too_long='split'), leave them out "
                "(too_long='drop') or raise row_tokens"
            )
        kept = indices[~is_long]
        return kept, np.zeros(len(kept), dtype=np.int32), self.lengths[kept]


def checked_max_length(row_tokens: int, max_length: int | None, too_long: TooLong) -> int:
    """Return the longest text of packed rows.

    Raises:
        ValueError: a setting is out of range, or texts may be longer than rows.
    """
    check_settings(row_tokens=row_tokens)
    check_value("too_long", too_long, TooLong, "split")
    if max_length is None:
        return row_tokens
    check_settings(max_length=max_length)
    if max_length > row_tokens:
        raise ValueError(
            f"max_length={max_length} is above row_tokens={row_tokens}; expected every text to fit into a row. "
            f"Pass row_tokens={max_length} or more"
        )
    return max_length
