"""Read the rows of a dataset: as columns straight from Arrow for our collators, as its own rows for others.

A view that ``attach`` has bound to a Trainer with our collator hands out a ``ColumnBatch``, which holds no Python
object per token. Read so are numbers and flat lists of numbers, in the formats None, numpy and torch. Anything else, a
batch with nulls, and another collator get the rows that the dataset itself returns, in a ``RowBatch``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset

from hf_memopt.batching import LENGTH_COLUMN, is_list
from hf_memopt.batching.collation.columns import Array, Column

OF_TABLES = ("arrow", "polars")  # formats whose rows are tables, which no collator takes


class RowBatch(list[Any]):
    """The rows of a batch.

    Attributes:
        width: the width that our collator must pad the batch to; None: its longest row, rounded up.
    """

    width: int | None = None


class PackedRow(RowBatch):
    """The texts of one row, which our collator joins; ``width`` is the row's."""


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
        self._prepared: tuple[Any, Any, Dataset | None] | None = None  # format, dataset of rows, dataset of tables

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
        """Return the columns at ``indices`` straight from Arrow, or the rows where it does not have them as numbers."""
        _, tables = self._sources()
        if tables is not None and len(indices):
            table = tables[np.asarray(indices).tolist()]
            found = {name: _cells(table[name]) for name in table.column_names}
            columns = {name: cells for name, cells in found.items() if cells is not None}
            if len(columns) == len(found):
                return ColumnBatch(columns, width)
        return self.read(indices, width)

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

    def _sources(self) -> tuple[Any, Dataset | None]:
        """Return what to read rows and tables from, prepared again once the format was changed in place."""
        if type(self.dataset) is not Dataset:  # a subclass may read its rows in another way
            return self.dataset, None
        form = self.dataset.format
        if self._prepared is None or self._prepared[0] != form:
            self._prepared = form, _of_rows(self.dataset, self._names), _of_tables(self.dataset, self._names)
        return self._prepared[1:]


def cut_text(example: Mapping[str, Any], column: str, begin: int, length: int) -> Mapping[str, Any]:
    """Return a part of an example: of all columns that are as long as ``column``, so many cells from ``begin``."""
    whole = len(example[column])
    is_long = {name: hasattr(cell, "__len__") and len(cell) == whole for name, cell in example.items()}
    return {name: cell[begin : begin + length] if is_long[name] else cell for name, cell in example.items()}


def _of_rows(dataset: Dataset, names: frozenset[str] | None) -> Dataset:
    """Return the dataset with the columns among ``names``, None: all, and with rows that a collator takes."""
    form = dataset.format
    if form["type"] in OF_TABLES:
        dataset = dataset.with_format(None, form["columns"], form["output_all_columns"])
    kept = [name for name in dataset.column_names if names is None or name in names]
    if names is None or form["type"] == "custom" or not kept:  # a transform sees all columns
        return dataset
    return dataset.select_columns(kept)


def _of_tables(dataset: Dataset, names: frozenset[str] | None) -> Dataset | None:
    """Return the dataset as tables of these columns; None where it must be read row by row."""
    form, schema = dataset.format, dataset.data.schema
    if form["type"] not in (None, "numpy", "torch", *OF_TABLES) or form["format_kwargs"]:
        return None  # other containers, or other dtypes
    if form["output_all_columns"] and set(form["columns"]) != set(schema.names):
        return None  # the columns outside the format come last, and as Python lists
    kept = [name for name in schema.names if name in form["columns"] and (names is None or name in names)]
    kept = [name for name in kept if name != LENGTH_COLUMN]
    is_number = (pa.types.is_boolean, pa.types.is_integer, pa.types.is_floating)
    kinds = [kind.value_type if is_list(kind) else kind for kind in (schema.field(name).type for name in kept)]
    if not all(any(check(kind) for check in is_number) for kind in kinds):
        return None
    return dataset.with_format("arrow", kept)


def _cells(column: pa.ChunkedArray) -> Column | None:
    """Return the numbers of every row, of lists as views of one array; None with nulls."""
    cells = column.combine_chunks()
    values = cells.flatten() if is_list(cells.type) else cells
    if cells.null_count or values.null_count:
        return None
    numbers: Any = values.to_numpy(zero_copy_only=False)  # Arrow packs bools, eight to a byte: only they are copied
    if values is cells:
        return cast(Column, numbers)  # a row is a scalar of numpy
    ends = np.cumsum(pc.list_value_length(cells).to_numpy()).tolist()
    return [numbers[begin:end] for begin, end in pairwise([0, *ends])]
