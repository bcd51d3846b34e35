"""Columns of a ``datasets.Dataset`` at any rows, straight from the Arrow buffers: no Python object per row or token.

A mapped or memory-mapped dataset has one chunk per 1000 rows, and a bucketed batch takes its rows from as many chunks
as it has rows. So all buffers of the table are seen through one numpy array that spans their addresses, and a row is
found by arithmetic: a fixed number of numpy calls per batch and column, whatever the number of chunks. Only addresses
inside the buffers are ever read, since every position comes from Arrow's own offsets and checked row numbers.

Taken: numbers and flat lists of numbers without nulls in the rows asked for, in the formats None, numpy and torch.
Anything else is left to the dataset itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from hf_memopt.batching.columns import FOR_SAMPLERS, Array, Column, torch_dtype

__all__ = ["ArrowColumns"]

_FORMATS = (None, "numpy", "torch")  # the same numbers in all three; others have containers of their own
_LINE_BYTES = 64  # Arrow's own alignment


class ArrowColumns:
    """The columns of a dataset, described once and read often.

    Args:
        dataset: a ``datasets.Dataset``, its format one of None, numpy and torch.
        names: the columns to read, in this order.

    Raises:
        ValueError: a column holds something else than numbers or flat lists of them.
    """

    def __init__(self, dataset: Any, names: Iterable[str]) -> None:
        table = dataset.data.table
        # `_indices` is the private mapping that shuffle, select, sort and filter leave: a table of one uint64 column
        # (datasets 3.0 to 5.2; pinned by a test).
        mapping = getattr(dataset, "_indices", None)
        chunked = {name: table.column(name) for name in names}
        memory = _Memory([*chunked.values(), *([] if mapping is None else [mapping.column(0)])])
        layouts: dict[tuple[int, ...], int] = {}
        self._rows = len(dataset)
        self._mapping = None if mapping is None else _describe(mapping.column(0), memory)
        self._mapping_ends = None if mapping is None else _ends(mapping.column(0))
        self._columns = []
        for name, values in chunked.items():
            layout = layouts.setdefault(tuple(map(len, values.chunks)), len(layouts))
            self._columns.append((name, layout, _describe(values, memory)))
        self._ends = [_ends_of_lengths(lengths) for lengths in layouts]

    @classmethod
    def of(cls, dataset: Any, names: Collection[str] | None) -> ArrowColumns | None:
        """Return the columns of ``dataset`` among ``names`` (None: all), or None if it must be read row by row."""
        shape = dataset.format
        if shape["type"] not in _FORMATS or shape["format_kwargs"] or len(dataset) == 0:
            return None
        table = dataset.data.table
        shown = table.column_names if shape["output_all_columns"] else shape["columns"]
        if shape["output_all_columns"] and set(shape["columns"]) != set(table.column_names):
            return None
        kept = [name for name in table.column_names if name in shown and (names is None or name in names)]
        if not kept or any(table.column(name).null_count for name in kept if name in FOR_SAMPLERS):
            return None
        try:
            return cls(dataset, [name for name in kept if name not in FOR_SAMPLERS])
        except ValueError:
            return None

    def read(self, rows: Array) -> dict[str, Column] | None:
        """Return the columns at ``rows``, or None if a row is null or not there."""
        if len(rows) == 0 or np.maximum.reduce(rows.view(np.uint64)) >= self._rows:  # a negative row is a huge one
            return None
        if self._mapping is not None:
            rows = self._mapping.read(rows, _chunk_of(rows, self._mapping_ends)).values
        chunks = [_chunk_of(rows, ends) for ends in self._ends]
        columns = {}
        for name, layout, column in self._columns:
            if column.nulls is not None and np.isin(rows, column.nulls).any():
                return None
            columns[name] = column.read(rows, chunks[layout])
        return columns


class _Memory:
    """All Arrow buffers of some columns as one numpy array per dtype, which spans their addresses and keeps them."""

    def __init__(self, columns: list[pa.ChunkedArray]) -> None:
        buffers = [
            buffer for column in columns for chunk in column.chunks for buffer in chunk.buffers() if buffer is not None
        ]
        addresses = [buffer.address for buffer in buffers if buffer.size]
        self.base = min(addresses, default=0) // _LINE_BYTES * _LINE_BYTES
        end = max((buffer.address + buffer.size for buffer in buffers if buffer.size), default=0)
        size = -(-(end - self.base) // _LINE_BYTES) * _LINE_BYTES
        self._span = pa.foreign_buffer(self.base or _LINE_BYTES, size, base=columns)

    def view(self, dtype: Any) -> Array:
        return np.frombuffer(self._span, dtype=dtype)

    def position(self, buffer: pa.Buffer | None, itemsize: int) -> int:
        """Return the index of the buffer's first item in the view of its dtype."""
        if buffer is None or buffer.size == 0:
            return 0
        distance: int = buffer.address - self.base
        if distance % itemsize:
            raise ValueError("buffer is not aligned to its items")
        return distance // itemsize


@dataclass(slots=True)
class _Numbers:
    """One number per row."""

    values: Array
    at: Array  # (chunks,) add the row number in the table: its position in `values`
    dtype: Any
    is_packed: bool  # bools: a position counts bits
    nulls: Array | None  # row numbers in the table

    def read(self, rows: Array, chunk: Any) -> Column:
        positions = rows + self.at[chunk]
        found = _unpack(self.values, positions) if self.is_packed else self.values.take(positions)
        return Column(found.astype(self.dtype, copy=False), self.dtype)


@dataclass(slots=True)
class _Lists:
    """A list of numbers per row, between two offsets or of one size."""

    values: Array
    at: Array  # (chunks,) add a value's offset: its position in `values`
    dtype: Any
    is_packed: bool
    nulls: Array | None
    offsets: Array | None
    offset_at: Array  # (chunks,) add the row number in the table: its position in `offsets`, or times the list size
    list_size: int
    low: Array  # (chunks,) the positions in `values` between which a chunk's values lie
    high: Array

    def read(self, rows: Array, chunk: Any) -> Column:
        if self.offsets is None:
            starts = rows * self.list_size + self.at[chunk]
            sizes = np.full(len(rows), self.list_size)
        else:
            positions = rows + self.offset_at[chunk]
            first = self.offsets.take(positions)
            positions += 1
            sizes = self.offsets.take(positions) - first
            starts = first + self.at[chunk]
        column = Column(self.values, self.dtype, starts, sizes, self.low[chunk], self.high[chunk])
        if self.is_packed:
            column = _unpacked(self.values, self.dtype, starts, sizes)
        # As from lists: an empty one has no floats or bools to tell by, so it counts as ints.
        if self.dtype != np.int64 and not sizes.all():
            column.dtype = np.dtype(np.float32 if self.dtype == np.float32 and sizes.any() else np.int64)
        return column


def _describe(values: pa.ChunkedArray, memory: _Memory) -> _Numbers | _Lists:
    """Return where a column lies in memory."""
    kind = values.type
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    is_fixed = pa.types.is_fixed_size_list(kind)
    item = kind.value_type if is_list or is_fixed else kind
    is_packed = pa.types.is_boolean(item)
    if not (is_packed or pa.types.is_integer(item) or pa.types.is_floating(item)):
        raise ValueError(f"column of type {kind}")
    stored = np.dtype(np.uint8 if is_packed else item.to_pandas_dtype())
    at, offset_at, low, high, nulls = [], [], [], [], []
    first = 0
    for chunk in (chunk for chunk in values.chunks if len(chunk)):
        items = chunk.values if is_list or is_fixed else chunk
        if items is not chunk and items.null_count:
            raise ValueError("null in a list")
        if chunk.null_count:
            nulls.append(first + np.flatnonzero(chunk.is_null().to_numpy(zero_copy_only=False)))
        start = memory.position(items.buffers()[1], stored.itemsize) * (8 if is_packed else 1) + items.offset
        if is_list:
            itemsize = 8 if pa.types.is_large_list(kind) else 4
            offset_at.append(memory.position(chunk.buffers()[1], itemsize) + chunk.offset - first)
            at.append(start)
        elif is_fixed:
            at.append(start + (chunk.offset - first) * kind.list_size)
        else:
            at.append(start - first)
        low.append(start)
        high.append(start + len(items))
        first += len(chunk)
    shared = (
        memory.view(stored),
        _positions(at),
        torch_dtype(np.dtype(np.bool_) if is_packed else stored),
        is_packed,
        np.concatenate(nulls) if nulls else None,
    )
    if not (is_list or is_fixed):
        return _Numbers(*shared)
    offsets = memory.view(np.int64 if pa.types.is_large_list(kind) else np.int32) if is_list else None
    size = kind.list_size if is_fixed else 0
    return _Lists(*shared, offsets, _positions(offset_at), size, _positions(low), _positions(high))


def _positions(found: list[int]) -> Array:
    return np.array(found, dtype=np.int64)


def _ends(values: pa.ChunkedArray) -> Array | None:
    return _ends_of_lengths(map(len, values.chunks))


def _ends_of_lengths(lengths: Iterable[int]) -> Array | None:
    """Return the row after each chunk, or None where there is but one chunk."""
    ends = np.cumsum([length for length in lengths if length])
    return ends if len(ends) > 1 else None


def _chunk_of(rows: Array, ends: Array | None) -> Any:
    return 0 if ends is None else ends.searchsorted(rows, side="right")


def _unpack(packed: Array, positions: Array) -> Array:
    """Return the bits at some positions, counted from the lowest bit of the first byte."""
    return (packed.take(positions >> 3) >> (positions & 7).astype(np.uint8) & 1).astype(np.bool_)


def _unpacked(packed: Array, dtype: Any, starts: Array, sizes: Array) -> Column:
    """Return the column of lists of packed bits, read entry by entry."""
    ends = sizes.cumsum()
    entries = np.repeat(starts - (ends - sizes), sizes) + np.arange(ends[-1])
    return Column(_unpack(packed, entries), dtype, ends - sizes, sizes, high=len(entries))
