"""Read the rows of a dataset as late as possible: column by column from Arrow for our collators, as rows for others.

``RowReader.read`` returns a ``RowBatch``, a list whose rows are read when something looks at them. Our collators do not
look: they take the columns straight from Arrow, without a Python object per token. Another collator, a wrapper or user
code gets the rows that the dataset itself returns. Read from Arrow are numbers and flat lists of numbers, in columns
without nulls, in the formats None, numpy and torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, SupportsIndex

import numpy as np
import pyarrow as pa
from datasets import Dataset

from hf_memopt.batching.collation.columns import Array, Column
from hf_memopt.batching.plan.lengths import LENGTH_COLUMN

__all__ = ["RowBatch", "RowReader"]


class RowReader:
    """Read the rows of a map-style dataset; holds no copy of the data, and only the dataset travels to workers.

    Examples:
        >>> reader = RowReader([{"input_ids": [5, 6]}, {"input_ids": [7]}])
        >>> reader.read([1])
        [{'input_ids': [7]}]
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self._names: frozenset[str] | None = None
        self._prepared: tuple[Any, Any, ArrowColumns | None] | None = None  # fingerprint, dataset of rows, columns

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_prepared": None}

    def keep(self, names: Iterable[str] | None) -> None:
        """Read only these columns, as ``remove_unused_columns`` does; None: all."""
        self._names = None if names is None else frozenset(names)
        self._prepared = None

    def read(self, indices: Sequence[int] | Array, width: int | None = None) -> RowBatch:
        """Return the rows at ``indices``, unread; a collator pads them to ``width``, None: to the longest row."""
        batch = RowBatch([_UNREAD] * len(indices))
        batch.width, batch._unread = width, (self, indices)
        return batch

    def columns(self, indices: Sequence[int] | Array) -> dict[str, Column] | None:
        """Return the columns at ``indices`` straight from Arrow, or None if the rows must be read one by one."""
        _, arrow = self._sources()
        return None if arrow is None else arrow.read(np.asarray(indices, dtype=np.int64))

    def rows(self, indices: Sequence[int] | Array) -> list[Any]:
        """Return the dataset's own rows at ``indices``, with the kept columns only."""
        (dataset, _), names = self._sources(), self._names
        wanted = np.asarray(indices).tolist()
        fetch = getattr(dataset, "__getitems__", None)
        rows = list(fetch(wanted)) if fetch is not None and wanted else [dataset[i] for i in wanted]
        if names is None:
            return rows
        return [
            {name: cell for name, cell in row.items() if name in names} if isinstance(row, Mapping) else row
            for row in rows
        ]

    def _sources(self) -> tuple[Any, ArrowColumns | None]:
        """Return what to read rows from and the Arrow columns, prepared again once the dataset was changed in place."""
        # `_fingerprint` is private; set_format and set_transform, which change a dataset in place, change it too
        # (datasets 3.0 to 5.2; pinned by a test).
        fingerprint = getattr(self.dataset, "_fingerprint", None)
        if self._prepared is None or self._prepared[0] != fingerprint:
            is_plain = type(self.dataset) is Dataset  # a subclass may read its rows in another way
            sources = _prepare(self.dataset, self._names) if is_plain else (self.dataset, None)
            self._prepared = (fingerprint, *sources)
        return self._prepared[1:]


def _prepare(dataset: Dataset, names: frozenset[str] | None) -> tuple[Dataset, ArrowColumns | None]:
    form = dataset.format
    if form["type"] in ("arrow", "polars"):  # their rows are tables, which no collator takes
        dataset = dataset.with_format(None, form["columns"], form["output_all_columns"])
    arrow = ArrowColumns.of(dataset, names)
    if names is None or form["type"] == "custom":  # a transform sees all columns
        return dataset, arrow
    kept = [name for name in dataset.column_names if name in names]
    return dataset.select_columns(kept) if kept else dataset, arrow


class RowBatch(list[Any]):
    """A batch of rows: a list, as tokenizers and collators ask for, that reads its rows at the first use of any.

    ``len`` is known without reading. Copies, slices and pickles are plain lists.

    Attributes:
        width: the width that the collator must pad the batch to; None: its longest row, rounded up.
    """

    width: int | None = None
    _unread: tuple[RowReader, Sequence[int] | Array] | None = None  # None: the items are the rows

    def columns(self) -> dict[str, Column] | None:
        """Return the columns straight from Arrow, or None if the rows were looked at or must be read one by one."""
        return None if self._unread is None else self._unread[0].columns(self._unread[1])

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        return list, (list(self),)

    def __radd__(self, other: Any) -> Any:
        _fill(self)  # list + RowBatch takes the items without asking for them; list.__add__ does the rest
        return NotImplemented


_UNREAD = type("UnreadRow", (), {})()  # C code that takes items without asking gets these, and fails by this name


def _fill(batch: Any) -> None:
    """Put the rows into a ``RowBatch`` that is still unread."""
    if isinstance(batch, RowBatch) and batch._unread is not None:
        reader, indices = batch._unread
        rows = reader.rows(indices)
        batch._unread = None
        list.__init__(batch, rows)


def _filled_first(name: str) -> Callable[..., Any]:
    """Return list's method of that name for a ``RowBatch``: it reads the rows of all its arguments first."""
    method = getattr(list, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        for arg in args:  # the batch itself, and another one that it is compared with or extended by
            _fill(arg)
        return method(*args, **kwargs)

    return call


_WITHOUT_ITEMS = {"__new__", "__init__", "__len__", "__sizeof__", "__hash__", "__getattribute__", "__doc__"}
for _name in (
    vars(list).keys() - _WITHOUT_ITEMS - {"__class_getitem__"}
):  # all that a later Python adds to list reads first as well
    setattr(RowBatch, _name, _filled_first(_name))


class ArrowColumns:
    """The numeric columns of a table, read at any rows.

    A mapped or memory-mapped dataset has a chunk for every 1000 rows, so a shuffled batch takes each of its rows from
    another chunk, and joining chunks would copy the data. What is prepared once for every chunk makes reading a row a
    look at two offsets and a slice.
    """

    def __init__(self, table: pa.Table) -> None:
        batches = [batch for batch in table.to_batches() if batch.num_rows]  # no copy; cuts all columns alike
        self._ends = np.cumsum([batch.num_rows for batch in batches])  # (chunks,): the row after each one's last
        self._begins = np.append(0, self._ends)
        self._chunks = {name: [_cells(batch[name]) for batch in batches] for name in table.column_names}
        self._indices: ArrowColumns | None = None

    @classmethod
    def of(cls, dataset: Dataset, names: Iterable[str] | None) -> ArrowColumns | None:
        """Return the columns of ``dataset`` among ``names`` (None: all), or None if it must be read row by row."""
        form, table = dataset.format, dataset.data.table
        if form["type"] not in (None, "numpy", "torch") or form["format_kwargs"]:
            return None  # other containers, or other dtypes
        if form["output_all_columns"] and set(form["columns"]) != set(table.column_names):
            return None  # the columns outside the format come last, and as Python lists
        kept = [name for name in table.column_names if name in form["columns"] and (names is None or name in names)]
        try:
            columns = cls(table.select([name for name in kept if name != LENGTH_COLUMN]))
        except ValueError:
            return None
        # `_indices` is the private mapping that shuffle, select, sort and filter leave: a table of one uint64 column
        # (datasets 3.0 to 5.2; pinned by a test).
        mapping = getattr(dataset, "_indices", None)
        columns._indices = None if mapping is None else cls(mapping.table)
        return columns

    def read(self, rows: Array) -> dict[str, Column] | None:
        """Return the columns at ``rows``, or None where one is out of range."""
        if self._indices is not None:
            mapped = self._indices.read(rows)
            if mapped is None:
                return None
            [column] = mapped.values()
            rows = np.array(column, np.int64)
        if not len(rows) or rows.min() < 0 or rows.max() >= self._begins[-1]:
            return None
        chunk = self._ends.searchsorted(rows, side="right")
        places = [*zip(chunk.tolist(), (rows - self._begins[chunk]).tolist(), strict=True)]
        return {name: [chunks[i][row] for i, row in places] for name, chunks in self._chunks.items()}


def _cells(chunk: pa.Array) -> Any:
    """Return what has the numbers of row r at [r], as a view wherever Arrow has them as numpy does.

    Raises:
        ValueError: a chunk of something else than numbers and flat lists of them, or with nulls.
    """
    kind = chunk.type
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    values = chunk.values if is_list else chunk.flatten() if pa.types.is_fixed_size_list(kind) else chunk
    is_number = (
        pa.types.is_boolean(values.type) or pa.types.is_integer(values.type) or pa.types.is_floating(values.type)
    )
    if not is_number or chunk.null_count or values.null_count:
        raise ValueError(f"it is a chunk of type {kind} with {values.null_count} nulls")
    if is_list:
        return _Lists(chunk.offsets, values)
    numbers = values.to_numpy(zero_copy_only=False)  # Arrow packs bools, eight to a byte: only they are copied
    return numbers if values is chunk else numbers.reshape(len(chunk), -1)


class _Lists:
    """The lists of a chunk. Those of a slice have the values of all rows, and offsets that begin where it was cut."""

    def __init__(self, offsets: pa.Array, values: pa.Array) -> None:
        self._offsets = memoryview(offsets.to_numpy())
        self._values = values if pa.types.is_boolean(values.type) else values.to_numpy()

    def __getitem__(self, row: int) -> Array:
        found = self._values[self._offsets[row] : self._offsets[row + 1]]
        return found if isinstance(found, np.ndarray) else found.to_numpy(zero_copy_only=False)
