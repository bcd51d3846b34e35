"""Read a dataset or a stream as rows of fixed length that hold whole texts, packed by best fit.

An item is one row: a list of texts, which ``BucketedCollator`` joins. A stream packs what its buffer holds at a time.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from hf_memopt.batching import lengths_of, token_count
from hf_memopt.batching.collation import PackedRow, cut_text, keep_texts_apart
from hf_memopt.batching.plan import PackedRows, best_fit, check_settings
from hf_memopt.batching.views.bucketed_stream import BUFFER_EXAMPLES, BucketedStream
from hf_memopt.batching.views.bucketed_view import BucketedView, refuse_settings
from hf_memopt.batching.views.stream_reading import Entry
from hf_memopt.batching.views.view import is_map_style
from hf_memopt.binding.undo import UndoHandle, undo_all
from hf_memopt.plain_data import check_value

if TYPE_CHECKING:
    from transformers import Trainer


def packed(
    dataset: Any,
    row_tokens: int,
    *,
    too_long: Literal["error", "drop", "split"] = "error",
    seed: int | None = None,
    lengths: ArrayLike | None = None,
    column: str = "input_ids",
    world_size: int | None = None,
    rank: int | None = None,
    buffer_examples: int = BUFFER_EXAMPLES,
) -> PackedView | PackedStream:
    """Return a view of a dataset, or a stream, as rows of ``row_tokens`` tokens, each of several whole texts.

    For an attached Trainer with ``BucketedCollator(tokenizer)`` and ``per_device_train_batch_size=1``: a micro-batch is
    one row, whose texts do not see each other. ``attach`` gives the model attention within texts, and the first batch
    of every run is looked at: no gradient flows from one text to another. One label per text needs padded rows.

    Args:
        dataset: as of ``bucketed``.
        row_tokens: tokens of a row; what its texts leave free is padding without labels, 0.02 % of many texts.
        too_long: what to do with longer examples: raise, leave them out, or ``"split"`` them into several texts.
        seed: of the order, see ``bucketed``.
        lengths: tokens per example, which each is checked for when it is read; see ``bucketed``.
        column: the column whose length counts.
        world_size: processes that share the view, see ``bucketed``.
        rank: of a stream, see ``bucketed``.
        buffer_examples: of a stream: examples held at most, which are packed together.

    Raises:
        ValueError: an example is too long, or ``lengths`` are not its own; see also ``bucketed``.

    Examples:
        >>> rows = [{"input_ids": [7] * length} for length in (5, 3, 4, 2, 1, 9)]
        >>> view = packed(rows, 8, too_long="split")
        >>> sorted(sorted(len(text["input_ids"]) for text in view[i]) for i in range(len(view)))
        [[1, 1, 2, 4], [3, 5], [8]]
    """
    check_settings(row_tokens=row_tokens)
    check_value("column", column, str, "input_ids")
    check_value("too_long", too_long, Literal["error", "drop", "split"], "split")
    world_size = int(os.environ.get("WORLD_SIZE", "1")) if world_size is None else world_size
    settings: dict[str, Any] = {"too_long": too_long, "seed": 0 if seed is None else seed, "world_size": world_size}
    view: PackedView | PackedStream
    if is_map_style(dataset):
        refuse_settings(dataset, rank=rank)
        view = PackedView(dataset, PackedRows(lengths_of(dataset, lengths, column), row_tokens=row_tokens, **settings))
        view.column = column
    else:
        refuse_settings(None, lengths=lengths)
        settings |= {"rank": rank, "column": column, "buffer_examples": buffer_examples, "pad_to_multiple_of": 1}
        view = PackedStream(dataset, max_tokens=row_tokens, **{**settings, "too_long": "drop"})
        vars(view)["too_long"] = too_long  # which buckets do not know to split
    view.takes_seed = seed is None
    return view


class PackedView(BucketedView):
    """A dataset as packed rows; ``buckets`` planned them. An item is a row: a list of texts."""

    made_by = "packed"
    column = "input_ids"
    _is_counted_alone = False  # whether the model does not take the column whose length counts

    def keep_columns(self, names: Iterable[str] | None) -> None:
        """Read only these columns, and the one whose length counts; None: all."""
        self._is_counted_alone = names is not None and self.column not in (names := {*names})
        super().keep_columns(names if names is None else {*names, self.column})

    def __getitem__(self, position: int) -> PackedRow:
        self.check_size(len(self.buckets.lengths), "packed(dataset, ...)")
        rows, texts = self.buckets, self.plan.batch(self._checked(position))
        examples, begins, lengths = (of[texts] for of in (rows.examples, rows.begins, rows.text_lengths))
        row = PackedRow(
            cut_text(self._as_planned(number, example), self.column, int(begin), int(length))
            for number, example, begin, length in zip(
                examples.tolist(), self.reader.read(examples), begins, lengths, strict=True
            )
        )
        if self._is_counted_alone:
            row[:] = [{name: cell for name, cell in text.items() if name != self.column} for text in row]
        row.width, row.is_bound = rows.row_tokens, self.is_bound
        return row

    def _as_planned(self, number: int, example: Any) -> Any:
        """Return an example, which has as many tokens as were counted: others would be cut off without a word."""
        try:
            found = len(example[self.column])
        except (KeyError, IndexError, TypeError):
            found = token_count(example, self.column, f"row {number}")  # which says what is wrong
        if found != (planned := int(self.buckets.lengths[number])):
            raise ValueError(
                f"lengths[{number}]={planned} is not that of row {number}, whose {self.column!r} has {found} tokens; "
                "expected the tokens of each example, since rows are cut by them. Leave lengths out, or pass "
                "token_lengths(dataset)"
            )
        return example

    def __getitems__(self, positions: Sequence[int]) -> list[Any]:
        self._check_in_order(positions, most=len(self))
        return [self[position] for position in positions]

    def bind_trainer(self, trainer: Trainer) -> UndoHandle:
        """Fit the view to a Trainer, and its model to the rows, or refuse them; ``attach`` calls it."""
        return _bound(self, super().bind_trainer, trainer)

    def _pack(self, trainer: Trainer) -> UndoHandle:
        return undo_all()  # planned by their tokens already


class PackedStream(BucketedStream):
    """An endless stream of packed rows, of which ``world_size`` neighbours are read side by side."""

    made_by, limit = "packed", "row_tokens"

    def _cut(self, held: list[Entry]) -> tuple[list[list[Entry]], list[Entry]]:
        """Return groups of a row for each process; in place of its length a text has -1 less the number of its row."""
        if len(held) < (readers := self._readers):
            return [], held
        rows = best_fit(np.array([entry[0] for entry in held], dtype=np.int32), self.max_tokens or 0, readers)
        groups: list[list[Entry]] = [[] for _ in range((int(rows.max()) + 1) // readers)]
        rest: list[Entry] = []  # too few rows for all processes, where their texts are too long to be parted
        for row, entry in zip(rows.tolist(), held, strict=True):
            if row // readers < len(groups):
                groups[row // readers].append((-1 - row % readers, *entry[1:]))
            else:
                rest.append(entry)
        return groups, rest

    def _deal(self, group: list[Entry], generator: np.random.Generator) -> Iterator[list[Any]]:
        whole = [group] if group[0][0] < 0 else self._cut(group)[0]  # else what was left at the end of a pass
        for texts in whole or [[(-1 - row, *entry[1:]) for row, entry in enumerate(group)]]:
            rows = [PackedRow() for _ in range(-min(entry[0] for entry in texts))]
            for entry in texts:
                rows[-1 - entry[0]].append(entry[-1])
            for row in rows:
                row.width, row.is_bound = self.max_tokens, self.is_bound
            yield rows

    def bind_trainer(self, trainer: Trainer) -> UndoHandle:
        """Let every process read the stream, and the model keep texts apart; ``attach`` calls it."""
        return _bound(self, super().bind_trainer, trainer)


def _bound(view: PackedView | PackedStream, bind: Any, trainer: Trainer) -> UndoHandle:
    apart = keep_texts_apart(trainer)
    try:
        return undo_all(apart, bind(trainer))
    except BaseException:
        apart.remove()
        raise
