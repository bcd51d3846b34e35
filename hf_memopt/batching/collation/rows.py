"""The rows of a dataset, read as late as possible: by our collators column by column, by anything else row by row.

``RowReader.read`` gives a ``RowBatch``, a list that stays unread until something looks at it. Our collators do not
look: they take the columns straight from Arrow, which makes fetching and padding a batch one step without a Python
object per row. Everything else (another collator, a wrapper, user code) gets the very rows that the dataset gives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, SupportsIndex

import numpy as np

from hf_memopt.batching.collation.arrow_columns import ArrowColumns
from hf_memopt.batching.collation.columns import Array, Column

__all__ = ["RowBatch", "RowReader"]

_TABLES = ("arrow", "polars")  # formats whose rows are tables, which no collator takes: read as plain rows


class RowReader:
    """Read the rows of a map-style dataset; holds no copy of the data, and only the dataset travels to workers.

    Example:
        >>> reader = RowReader([{"input_ids": [5, 6]}, {"input_ids": [7]}])
        >>> reader.read([1])
        [{'input_ids': [7]}]
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self._names: frozenset[str] | None = None
        self._prepared: tuple[Any, tuple[Any, ArrowColumns | None]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_prepared": None}

    def keep(self, names: Iterable[str] | None) -> None:
        """Read only these columns, as ``remove_unused_columns`` does; None: all."""
        self._names = None if names is None else frozenset(names)
        self._prepared = None

    def read(self, indices: Sequence[int] | Array, width: int | None = None) -> RowBatch:
        """Return the rows at ``indices``, unread; ``width`` is what a collator must pad them to (None: as it likes)."""
        batch = RowBatch.__new__(RowBatch)
        list.__init__(batch, (_UNREAD,) * len(indices))
        batch.width = width
        batch._unread = (self, indices)
        return batch

    def columns(self, indices: Sequence[int] | Array) -> dict[str, Column] | None:
        """Return the columns at ``indices`` straight from Arrow, or None if the rows must be read one by one."""
        arrow = self._prepare()[1]
        return None if arrow is None else arrow.read(np.asarray(indices, dtype=np.int64))

    def rows(self, indices: Sequence[int] | Array) -> list[Any]:
        """Return the dataset's own rows at ``indices``, of the columns to keep."""
        dataset = self._prepare()[0]
        wanted = np.asarray(indices).tolist()
        fetch = getattr(dataset, "__getitems__", None)
        rows = list(fetch(wanted)) if fetch is not None and wanted else [dataset[i] for i in wanted]
        if self._names is None:
            return rows
        return [
            {name: cell for name, cell in row.items() if name in self._names} if isinstance(row, Mapping) else row
            for row in rows
        ]

    def _prepare(self) -> tuple[Any, ArrowColumns | None]:
        """Return what to read rows from and the Arrow columns, made anew when the dataset was changed in place."""
        # `_fingerprint` is private; set_format and set_transform, which change a dataset in place, change it too
        # (datasets 3.0 to 5.2; pinned by a test).
        fingerprint = getattr(self.dataset, "_fingerprint", None)
        if self._prepared is None or self._prepared[0] != fingerprint:
            self._prepared = (fingerprint, self._described())
        return self._prepared[1]

    def _described(self) -> tuple[Any, ArrowColumns | None]:
        from datasets import Dataset

        dataset = self.dataset
        if type(dataset) is not Dataset:  # a subclass may read its rows in another way
            return dataset, None
        shape = dataset.format
        if shape["type"] in _TABLES:
            dataset = dataset.with_format(None, shape["columns"], shape["output_all_columns"])
        arrow = ArrowColumns.of(dataset, self._names)
        if self._names is None or shape["type"] == "custom":
            return dataset, arrow
        kept = [name for name in dataset.column_names if name in self._names]
        return dataset.select_columns(kept) if kept else dataset, arrow


class RowBatch(list[Any]):
    """A batch of rows: an ordinary list whose items are read from the dataset at the first use of any of them.

    ``len`` is known without reading. Copies, slices and pickles are plain lists.

    Attributes:
        width: what the collator must pad the batch to; None: its longest row, rounded up.
    """

    width: int | None = None
    _unread: tuple[RowReader, Sequence[int] | Array] | None = None  # None: the items are the rows

    def columns(self) -> dict[str, Column] | None:
        """Return the columns straight from Arrow, or None if the rows were looked at or must be read one by one."""
        if self._unread is None:
            return None
        reader, indices = self._unread
        return reader.columns(indices)

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        return list, (list(self),)

    def __radd__(self, other: Any) -> Any:
        _read(self)  # list + RowBatch takes the items without asking for them; list.__add__ does the rest
        return NotImplemented


class _Unread:
    """What stands in a ``RowBatch`` for a row that was not read: of no use to anything that takes items by force."""

    __slots__ = ()

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # protocols are looked for, and not being there is their answer
            raise AttributeError(name)
        raise RuntimeError(
            f"row=<unread>.{name} was taken out of a RowBatch without reading it; expected a row of the dataset. "
            "Call: list(batch)."
        )


_UNREAD = _Unread()


def _read(batch: Any) -> None:
    """Put the rows into a ``RowBatch`` that is still unread."""
    if isinstance(batch, RowBatch) and batch._unread is not None:
        reader, indices = batch._unread
        rows = reader.rows(indices)
        batch._unread = None
        list.__init__(batch, rows)


def _reading_first(name: str) -> Callable[..., Any]:
    method = getattr(list, name)

    def call(self: RowBatch, *args: Any, **kwargs: Any) -> Any:
        _read(self)
        for arg in args:
            _read(arg)  # another RowBatch, whose items list's own method would take as they are
        return method(self, *args, **kwargs)

    call.__name__, call.__doc__ = name, method.__doc__
    return call


# What of a list does not look at its items. All the rest reads first, whatever a later Python adds.
_WITHOUT_ITEMS = {
    "__new__",
    "__init__",
    "__len__",
    "__sizeof__",
    "__hash__",
    "__getattribute__",
    "__class_getitem__",
    "__doc__",
}
for _name in vars(list).keys() - _WITHOUT_ITEMS:
    setattr(RowBatch, _name, _reading_first(_name))
