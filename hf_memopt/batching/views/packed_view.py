"""Read a dataset or a stream as rows of fixed length that hold whole texts, packed by best fit.

An item is one row: a list of texts, which ``BucketedCollator`` joins. ``attach`` sees to it that the model keeps them
apart (``keep_texts_apart``), or refuses it. As of a bucketed view the order is a pure function of (seed, epoch), so a
resumed run sees the very rows of the straight run; a stream packs what its buffer holds.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from hf_memopt.batching import lengths_of
from hf_memopt.batching.collation import PackedRow, keep_texts_apart
from hf_memopt.batching.plan import PackedRows, best_fit, checked_max_length
from hf_memopt.batching.views.bucketed_stream import BUFFER_EXAMPLES, BucketedStream
from hf_memopt.batching.views.bucketed_view import BucketedView, refuse_settings
from hf_memopt.batching.views.stream_reading import Entry
from hf_memopt.batching.views.view import is_map_style
from hf_memopt.binding.undo import UndoHandle, undo_all

if TYPE_CHECKING:
    from transformers import Trainer

TooLong = Literal["error", "drop", "split"]


def packed(
    dataset: Any,
    row_tokens: int,
    *,
    max_length: int | None = None,
    too_long: TooLong = "error",
    seed: int | None = None,
    lengths: ArrayLike | None = None,
    column: str = "input_ids",
    world_size: int | None = None,
    rank: int | None = None,
    buffer_examples: int | None = None,
) -> PackedView | PackedStream:
    """Return a view of a dataset, or a stream, as rows of ``row_tokens`` tokens, each of several whole texts.

    For an attached Trainer with ``BucketedCollator(tokenizer)`` and ``per_device_train_batch_size=1``: a micro-batch is
    one row, whose texts do not see each other, so a row of 16,384 tokens trains as eight rows of 2,048 do. ``attach``
    gives the model attention within texts where its code takes it, and the first batch of every run is looked at: no
    gradient flows from one text to another, or the run stops. One label per text needs padded rows.

    Args:
        dataset: as of ``bucketed``.
        row_tokens: tokens of a row; what its texts leave free is padding without labels, 0.02 % of many texts.
        max_length: the longest text; None: ``row_tokens``. Less for a model with fewer positions than that.
        too_long: what to do with longer examples: raise, leave them out, or ``"split"`` them into several texts.
        seed: as of ``bucketed``.
        lengths: as of ``bucketed``.
        column: as of ``bucketed``.
        world_size: as of ``bucketed``.
        rank: as of ``bucketed``.
        buffer_examples: as of ``bucketed``.

    Raises:
        ValueError: a size below 1, ``max_length`` above ``row_tokens``, an example that is too long, an empty dataset
            or one without the column, a setting of streams for a dataset or the other way round.
        TypeError: the dataset can neither be indexed nor iterated again.

    Examples:
        >>> rows = [{"input_ids": [7] * length} for length in (5, 3, 4, 2, 1, 9)]
        >>> view = packed(rows, 8, too_long="split")
        >>> sorted(sorted(len(text["input_ids"]) for text in view[i]) for i in range(len(view)))
        [[1, 1, 2, 4], [3, 5], [8]]
    """
    if world_size is None:
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
    settings: dict[str, Any] = {"row_tokens": row_tokens, "max_length": max_length, "too_long": too_long}
    settings |= {"seed": 0 if seed is None else seed, "world_size": world_size}
    view: PackedView | PackedStream
    if is_map_style(dataset):
        refuse_settings(dataset, buffer_examples=buffer_examples, rank=rank)
        view = PackedView(dataset, PackedRows(lengths_of(dataset, lengths, column), **settings), column)
    else:
        refuse_settings(None, lengths=lengths)
        view = PackedStream(dataset, column=column, rank=rank, buffer_examples=buffer_examples, **settings)
    view.takes_seed = seed is None
    return view


class PackedView(BucketedView):
    """A dataset as packed rows; ``buckets`` planned them. An item is a row: a list of texts."""

    buckets: PackedRows

    def __init__(self, dataset: Any, rows: PackedRows, column: str) -> None:
        super().__init__(dataset, rows)
        self.column = column

    def __getitems__(self, positions: Sequence[int]) -> list[Any]:
        """Return the rows at consecutive positions; to our collator with cells of numpy."""
        self._check_in_order(positions, most=len(self))
        return [self._row(position, self._as_columns) for position in positions]

    def __getitem__(self, position: int) -> Any:
        return self._row(self._checked(position), in_numpy=False)

    def indices_of(self, positions: Sequence[int]) -> list[int]:
        """Return the dataset's indices of the examples that the rows at ``positions`` hold, or parts of them."""
        return [int(self.buckets.examples[text]) for position in positions for text in self._batch([position])[0]]

    def _row(self, position: int, in_numpy: bool) -> PackedRow:
        texts, rows = self._batch([position])[0], self.buckets
        parts = [(int(rows.examples[i]), int(rows.begins[i]), int(rows.text_lengths[i])) for i in texts]
        return self.reader.read_texts(parts, self.column, rows.row_tokens, in_numpy)

    def bind_trainer(self, trainer: Trainer) -> UndoHandle:
        """Fit view and model to a Trainer, whose rows are read in order; ``attach`` calls it.

        Raises:
            ValueError: the Trainer's arguments or collator do not fit the view, or its model mixes texts of one row.
        """
        return _bound(super().bind_trainer, trainer)

    def _pack(self, trainer: Trainer) -> UndoHandle:
        return undo_all()  # planned by their tokens already


class PackedStream(BucketedStream):
    """An endless stream of a stream's examples as packed rows, of what its buffer holds at a time.

    ``world_size`` neighbours are the rows that the processes take side by side. Every text of a pass is handed out
    exactly once. See ``packed`` for the arguments and ``BucketedStream`` for streams.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        row_tokens: int,
        max_length: int | None = None,
        too_long: TooLong = "error",
        buffer_examples: int | None = None,
        **settings: Any,
    ) -> None:
        longest = checked_max_length(row_tokens, max_length, too_long)
        if buffer_examples is None:
            buffer_examples = BUFFER_EXAMPLES * (settings["world_size"] if settings["rank"] is None else 1)
        self.row_tokens = row_tokens
        super().__init__(
            dataset,
            max_tokens=longest,
            buffer_examples=buffer_examples,
            pad_to_multiple_of=1,
            too_long="drop" if too_long == "drop" else "error",
            **settings,
        )
        self.splits = too_long == "split"

    def _cut(self, held: list[Entry]) -> tuple[list[list[Entry]], list[Entry]]:
        """Return rows in groups of one for each process, the number of the row in place of its texts' lengths."""
        readers = self._readers
        if len(held) < readers:
            return [], held
        rows = best_fit(np.array([entry[0] for entry in held], dtype=np.int32), self.row_tokens, readers)
        groups: list[list[Entry]] = [[] for _ in range((int(rows.max()) + 1) // readers)]
        for row, entry in zip(rows.tolist(), held, strict=True):
            groups[row // readers].append((row % readers, *entry[1:]))
        return groups, []

    def _cut_rest(self, held: list[Entry]) -> list[list[Entry]]:
        return self._cut(held)[0] or [[(row, *entry[1:]) for row, entry in enumerate(held)]]

    def _deal(self, group: list[Entry], generator: np.random.Generator) -> Iterator[list[Any]]:
        rows = [PackedRow() for _ in range(1 + max(entry[0] for entry in group))]
        for entry in group:
            rows[entry[0]].append(entry[-1])
        for row in rows:
            row.width = self.row_tokens
        yield rows

    def _order(self) -> dict[str, Any]:
        return {**super()._order(), "row_tokens": self.row_tokens, "splits": self.splits}

    def bind_trainer(self, trainer: Trainer) -> UndoHandle:
        """Let every process read the stream, and the model keep texts apart; ``attach`` calls it."""
        return _bound(super().bind_trainer, trainer)


def _bound(bind: Any, trainer: Trainer) -> UndoHandle:
    """Bind a view, then the model that its rows are for; nothing is bound where either is refused."""
    handle = bind(trainer)
    try:
        return undo_all(handle, keep_texts_apart(trainer))
    except BaseException:
        handle.remove()
        raise
