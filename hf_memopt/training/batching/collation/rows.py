"""Read the rows of a dataset: as columns straight from Arrow for our collators, as its own rows for others.

A view that ``attach`` has bound to a Trainer with our collator hands out a ``ColumnBatch``, which holds no Python
object per token. Read so are numbers and flat lists of numbers without nulls, in the formats None, numpy and torch.
Anything else, and another collator, gets the rows that the dataset itself returns, in a ``RowBatch``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset

from hf_memopt.training.batching import LENGTH_COLUMN
from hf_memopt.training.batching.collation.columns import Array, Column


class RowBatch(list[Any]):
    """The rows of a batch.

    Attributes:
        width: the width that our collator must pad the batch to; None: its longest row, rounded up.
    """

    width: int | None = None


class PackedRow(RowBatch):
    """The texts of one row, which our collator joins; ``width`` is the row's.

    Attributes:
        is_bound: whether ``attach`` has seen to it that the model keeps texts apart.
    """

    is_bound = False


@dataclass
class ColumnBatch:
    """The columns of a batch, for our collators; not a dict, since stock's ``RemoveColumnsCollator`` rebuilds those.

    Attributes:
        columns: the cells of every row, by name.
        width: as of a ``RowBatch``.
    """

    columns: dict[str, Column]
    width: int | None


class RowReader:
    """Read the rows of a map-style dataset; holds no copy of the data, and only the dataset travels to workers."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self._names: frozenset[str] | None = None
        self._prepared: tuple[Any, Any, ArrowColumns | None] | None = None  # format, dataset of rows, columns

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_prepared": None}

    def keep(self, names: Iterable[str] | None) -> None:
        """Read only these columns, as ``remove_unused_columns`` does; None: all."""
        self._names = None if names is None else frozenset(names)
        self._prepared = None

    def read(self, indices: Sequence[int] | Array, width: int | None = None) -> RowBatch:
        """Return the dataset's own rows at ``indices``, with the kept columns only."""
        batch = RowBatch(self._rows(np.asarray(indices).tolist()))
        batch.width = width
        return batch

    def read_columns(self, indices: Sequence[int] | Array, width: int | None = None) -> ColumnBatch | RowBatch:
        """Return the columns at ``indices`` straight from Arrow, or the rows where it does not have them all."""
        _, arrow = self._sources()
        columns = None if arrow is None else arrow.read(np.asarray(indices, dtype=np.int64))
        return self.read(indices, width) if columns is None else ColumnBatch(columns, width)

    def _rows(self, indices: list[int]) -> list[Any]:
        (dataset, _), names = self._sources(), self._names
        fetch = getattr(dataset, "__getitems__", None)
        rows = list(fetch(indices)) if fetch is not None and indices else [dataset[i] for i in indices]
        if names is None:
            return rows
        return [
            {name: cell for name, cell in row.items() if name in names} if isinstance(row, Mapping) else row
            for row in rows
        ]

    def _sources(self) -> tuple[Any, ArrowColumns | None]:
        """Return what to read rows and columns from, prepared again once the format was changed in place."""
        if type(self.dataset) is not Dataset:  # a subclass may read its rows in another way
            return self.dataset, None
        form = self.dataset.format
        if self._prepared is None or self._prepared[0] != form:
            self._prepared = form, *_prepare(self.dataset, self._names)
        return self._prepared[1:]


def cut_text(example: Mapping[str, Any], column: str, begin: int, length: int) -> Mapping[str, Any]:
    """Return a part of an example: of all columns that are as long as ``column``, so many cells from ``begin``."""
    whole = len(example[column])
    is_list = {name: hasattr(cell, "__len__") and getattr(cell, "ndim", 1) > 0 for name, cell in example.items()}
    is_long = {name: is_list[name] and len(cell) == whole for name, cell in example.items()}
    return {name: cell[begin : begin + length] if is_long[name] else cell for name, cell in example.items()}


def _prepare(dataset: Dataset, names: frozenset[str] | None) -> tuple[Dataset, ArrowColumns | None]:
    form = dataset.format
    if form["type"] in ("arrow", "polars"):  # their rows are tables, which no collator takes
        dataset = dataset.with_format(None, form["columns"], form["output_all_columns"])
    arrow = ArrowColumns.of(dataset, names)
    kept = [name for name in dataset.column_names if names is None or name in names]
    if names is None or form["type"] == "custom" or not kept:  # a transform sees all columns
        return dataset, arrow
    return dataset.select_columns(kept), arrow


class ArrowColumns:
    """The numeric columns of a table, read at any rows.

    A mapped or memory-mapped dataset has a chunk for every 1000 rows, so a shuffled batch takes each of its rows from
    another chunk, and joining chunks would copy the data. What is prepared once for every chunk makes reading a row a
    look at two offsets and a slice.
    """

    def __init__(self, table: pa.Table, mapping: pa.Table | None = None) -> None:
        batches = [batch for batch in table.to_batches() if batch.num_rows]  # no copy; cuts all columns alike
        self._ends = np.cumsum([batch.num_rows for batch in batches])  # (chunks,): the row after each one's last
        self._begins = np.append(0, self._ends)
        self._chunks = {name: [_cells(batch[name]) for batch in batches] for name in table.column_names}
        self._indices = None if mapping is None else ArrowColumns(mapping)

    @classmethod
    def of(cls, dataset: Dataset, names: frozenset[str] | None) -> ArrowColumns | None:
        """Return the columns of ``dataset`` among ``names`` (None: all), or None if it must be read row by row."""
        form, table = dataset.format, dataset.data.table
        if form["type"] not in (None, "numpy", "torch") or form["format_kwargs"]:
            return None  # other containers, or other dtypes
        if form["output_all_columns"] and set(form["columns"]) != set(table.column_names):
            return None  # the columns outside the format come last, and as Python lists
        kept = [name for name in table.column_names if name in form["columns"] and (names is None or name in names)]
        # `_indices` is the private mapping that shuffle, select, sort and filter leave: a table of one uint64 column
        # (datasets 3.0 to 5.2; pinned by a test).
        mapping = getattr(dataset, "_indices", None)
        try:
            return cls(table.select([name for name in kept if name != LENGTH_COLUMN]), getattr(mapping, "table", None))
        except ValueError:
            return None

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
