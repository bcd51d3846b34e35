"""Columns of a ``datasets.Dataset`` at any rows, as slices of the Arrow buffers: no Python object per token.

Read are numbers and flat lists of numbers, in columns without nulls, in the formats None, numpy and torch. Anything
else is left to the dataset.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import getitem, sub
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from datasets import Dataset

from hf_memopt.batching.collation.columns import Array, Column
from hf_memopt.batching.plan.lengths import LENGTH_COLUMN

__all__ = ["ArrowColumns"]


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
