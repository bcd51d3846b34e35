"""Read the rows of a dataset as late as possible: column by column from Arrow for our collators, as rows for others.

``RowReader.read`` returns a ``RowBatch``, a list whose rows are read when something looks at them. Our collators do not
look: they take the columns straight from Arrow, without a Python object per token. Another collator, a wrapper or user
code gets the rows that the dataset itself returns. Read from Arrow are numbers and flat lists of numbers, in columns
without nulls, in the formats None, numpy and torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import getitem, sub
from typing import Any, NamedTuple, SupportsIndex

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


class _Chunks(NamedTuple):
    """A column of a table. Row r of a chunk is ``values[offsets[r] : offsets[r + 1]]``, a slice that copies nothing."""

    dtype: np.dtype[Any]
    values: list[Any]  # of each chunk: its numbers, where Arrow has them
    offsets: list[Sequence[int]] | None  # of each chunk: (rows + 1,); None: row r is the number values[r]


class ArrowColumns:
    """The numeric columns of a table, read at any rows.

    A mapped or memory-mapped dataset has a chunk for every 1000 rows, so a shuffled batch takes each of its rows from
    another chunk, and joining chunks would copy the data. What is prepared once for every chunk makes reading a row a
    look at two offsets and a slice.
    """

    def __init__(self, table: pa.Table) -> None:
        batches = [batch for batch in table.to_batches() if batch.num_rows]  # no copy; cuts all columns alike
        rows = [batch.num_rows for batch in batches]
        self._ends = np.cumsum(rows)  # (chunks,): the row after the last one of each chunk
        self._begins = self._ends - rows  # (chunks,)
        self._rows = sum(rows)
        self._columns: dict[str, _Chunks] = {}
        self._indices: ArrowColumns | None = None
        for name in table.column_names:
            column = _chunks([batch[name] for batch in batches])
            for other in self._columns.values():  # ids, mask and types have the same offsets: look them up once
                if column.offsets and other.offsets and all(map(np.array_equal, column.offsets, other.offsets)):
                    column = column._replace(offsets=other.offsets)
                    break
            self._columns[name] = column

    @classmethod
    def of(cls, dataset: Dataset, names: Iterable[str] | None) -> ArrowColumns | None:
        """Return the columns of ``dataset`` among ``names`` (None: all), or None if it must be read row by row."""
        form, table = dataset.format, dataset.data.table
        if form["type"] not in (None, "numpy", "torch") or form["format_kwargs"]:
            return None  # other containers, or other dtypes
        if form["output_all_columns"] and set(form["columns"]) != set(table.column_names):
            return None  # the columns outside the format come last, and as Python lists
        kept = [name for name in table.column_names if name in form["columns"] and (names is None or name in names)]
        if any(table.column(name).null_count for name in kept):
            return None
        try:
            columns = cls(table.select([name for name in kept if name != LENGTH_COLUMN]))
        except ValueError:  # text, nested lists, nulls inside a list (pyarrow's ArrowInvalid is a ValueError)
            return None
        # `_indices` is the private mapping that shuffle, select, sort and filter leave: a table of one uint64 column
        # (datasets 3.0 to 5.2; pinned by a test).
        mapping = getattr(dataset, "_indices", None)
        columns._indices = None if mapping is None else cls(mapping.table)
        return columns

    def read(self, rows: Array) -> dict[str, Column] | None:
        """Return the columns at ``rows``, int64, or None where one is out of range."""
        if self._indices is not None:
            mapped = self._indices.read(rows)
            if mapped is None:
                return None
            [column] = mapped.values()
            rows = column.stack()
        numbers = rows.tolist()  # for a batch, lists and loops in C (map) are faster than arrays
        if not numbers or min(numbers) < 0 or max(numbers) >= self._rows:
            return None
        chunk = self._ends.searchsorted(rows, side="right")
        chunks, within = chunk.tolist(), (rows - self._begins[chunk]).tolist()
        after = [row + 1 for row in within]
        cuts: dict[int, tuple[list[slice], list[int]]] = {}
        found = {}
        for name, (dtype, values, offsets) in self._columns.items():
            cells = map(values.__getitem__, chunks)
            if offsets is None:
                found[name] = Column.of_numbers([*map(getitem, cells, within)], dtype)
                continue
            if id(offsets) not in cuts:
                begins = [*map(getitem, map(offsets.__getitem__, chunks), within)]
                ends = [*map(getitem, map(offsets.__getitem__, chunks), after)]
                cuts[id(offsets)] = [*map(slice, begins, ends)], [*map(sub, ends, begins)]
            where, sizes = cuts[id(offsets)]
            found[name] = Column.of_lists([*map(getitem, cells, where)], sizes, dtype)
        return found


def _chunks(chunks: list[pa.Array]) -> _Chunks:
    """Return the numbers and offsets of the chunks of one column.

    Raises:
        ValueError: it holds something else than numbers and flat lists of them, or nulls inside of lists.
    """
    kind = chunks[0].type
    has_offsets = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    is_list = has_offsets or pa.types.is_fixed_size_list(kind)
    item = kind.value_type if is_list else kind
    if not (pa.types.is_boolean(item) or pa.types.is_integer(item) or pa.types.is_floating(item)):
        raise ValueError(f"column of type {kind}")
    dtype = np.dtype(item.to_pandas_dtype())
    if not is_list:  # Arrow packs bools, eight to a byte: only they are copied
        return _Chunks(dtype, [chunk.to_numpy(zero_copy_only=False) for chunk in chunks], None)
    # A slice of a list array keeps the values of all rows, and its offsets begin wherever it was cut.
    values = [chunk.values if has_offsets else chunk.flatten() for chunk in chunks]
    offsets: list[Sequence[int]]
    if has_offsets:
        offsets = [memoryview(chunk.offsets.to_numpy()) for chunk in chunks]
    else:
        offsets = [range(0, (len(chunk) + 1) * kind.list_size, kind.list_size) for chunk in chunks]
    if any(chunk.null_count for chunk in values):
        raise ValueError("null in a list")
    is_packed = pa.types.is_boolean(item)
    return _Chunks(dtype, [_Bits(chunk) if is_packed else memoryview(chunk.to_numpy()) for chunk in values], offsets)


class _Bits:
    """The values of lists of bools, unpacked where they are read."""

    def __init__(self, values: pa.BooleanArray) -> None:
        self._values = values

    def __getitem__(self, where: slice) -> Array:
        found: Array = self._values[where].to_numpy(zero_copy_only=False)
        return found
