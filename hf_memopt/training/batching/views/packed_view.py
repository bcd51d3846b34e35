"""Read a dataset as rows of fixed length that hold whole texts, packed by best fit.

An item is one row: a list of texts, which ``BucketedCollator`` joins.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from numpy.typing import ArrayLike

from hf_memopt.plain_data import check_value
from hf_memopt.training.batching import lengths_of, token_count
from hf_memopt.training.batching.collation import PackedRow, cut_text, keep_texts_apart
from hf_memopt.training.batching.plan import PackedRows, check_settings
from hf_memopt.training.batching.views.bucketed_view import BucketedView
from hf_memopt.training.binding.undo import UndoHandle, undo_all

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
) -> PackedView:
    """Return a view of a dataset as rows of ``row_tokens`` tokens, each of several whole texts.

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
    view = PackedView(dataset, PackedRows(lengths_of(dataset, lengths, column), row_tokens=row_tokens, **settings))
    view.column = column
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
        apart = keep_texts_apart(trainer)
        try:
            return undo_all(apart, super().bind_trainer(trainer))
        except BaseException:
            apart.remove()
            raise

    def _pack(self, trainer: Trainer) -> UndoHandle:
        return undo_all()  # planned by their tokens already
