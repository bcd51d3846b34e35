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
        indices = getattr(dataset, "_indices", None)
        mapping = None if indices is None else indices.column(0)
        chunked = {name: table.column(name) for name in names}
        memory = _Memory([*chunked.values(), *([] if mapping is None else [mapping])])
        self._size = len(dataset)
        self._names = list(chunked)
        self._mapping = None if mapping is None else _Group({"indices": _Place.of(mapping, memory)}, _lengths(mapping))
        groups: dict[Any, dict[str, _Place]] = {}
        for name, values in chunked.items():
            place = _Place.of(values, memory)
            groups.setdefault((_lengths(values), *place.alike), {})[name] = place
        self._groups = [_Group(places, lengths) for (lengths, *_), places in groups.items()]
        self._in_order = [name for group in self._groups for name, _ in group.places] == self._names

    @classmethod
    def of(cls, dataset: Any, names: Collection[str] | None) -> ArrowColumns | None:
        """Return the columns of ``dataset`` among ``names`` (None: all), or None if it must be read row by row."""
        shape = dataset.format
        if shape["type"] not in _FORMATS or shape["format_kwargs"] or len(dataset) == 0:
            return None
        table = dataset.data.table
        if shape["output_all_columns"] and set(shape["columns"]) != set(table.column_names):
            return None  # the columns outside the format come last, and as Python lists
        kept = [name for name in table.column_names if name in shape["columns"] and (names is None or name in names)]
        if not kept or any(table.column(name).null_count for name in kept if name in FOR_SAMPLERS):
            return None
        try:
            return cls(dataset, [name for name in kept if name not in FOR_SAMPLERS])
        except ValueError:
            return None

    def read(self, rows: Array) -> dict[str, Column] | None:
        """Return the columns at ``rows``, int64, or None if a row is null or not there."""
        if len(rows) == 0 or np.maximum.reduce(rows.view(np.uint64)) >= self._size:  # a negative row is a huge one
            return None
        if self._mapping is not None:
            rows = self._mapping.read(rows)["indices"].values
        found: dict[str, Column] = {}
        for group in self._groups:
            if group.nulls is not None and np.isin(rows, group.nulls).any():
                return None
            found.update(group.read(rows))
        return found if self._in_order else {name: found[name] for name in self._names}


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

    def position(self, buffer: pa.Buffer | None, dtype: np.dtype[Any]) -> int:
        """Return the index of the buffer's first item in the view of its dtype."""
        if buffer is None or buffer.size == 0:
            return 0
        distance: int = buffer.address - self.base
        if distance % dtype.itemsize:
            raise ValueError("buffer is not aligned to its items")
        return distance // dtype.itemsize


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a column lies: positions count the items of a view of all memory, or bits where bools are packed."""

    values: Array  # the view
    dtype: np.dtype[Any]  # what the values become
    is_packed: bool
    offsets: Array | None  # the view that holds the offsets of lists
    list_size: int | None  # of fixed-size lists; 1 for plain numbers
    at: list[int]  # per chunk; plus an offset, or plus row * list_size: the position of a value
    offset_at: list[int]  # per chunk; plus the row: the position of its offset
    low: list[int]  # per chunk: where its values start, and
    high: list[int]  # where they end
    is_list: bool
    nulls: Array | None  # row numbers

    @property
    def alike(self) -> tuple[Any, ...]:
        """What columns that are read together must share."""
        return self.is_list, self.list_size, None if self.offsets is None else self.offsets.dtype

    @classmethod
    def of(cls, values: pa.ChunkedArray, memory: _Memory) -> _Place:
        kind = values.type
        is_large = pa.types.is_large_list(kind)
        has_offsets = pa.types.is_list(kind) or is_large
        is_list = has_offsets or pa.types.is_fixed_size_list(kind)
        item = kind.value_type if is_list else kind
        is_packed = pa.types.is_boolean(item)
        if not (is_packed or pa.types.is_integer(item) or pa.types.is_floating(item)):
            raise ValueError(f"column of type {kind}")
        list_size = None if has_offsets else kind.list_size if is_list else 1
        stored = np.dtype(np.uint8 if is_packed else item.to_pandas_dtype())
        offset_dtype = np.dtype(np.int64 if is_large else np.int32)
        at, offset_at, low, high, nulls = [], [], [], [], []
        first = 0
        for chunk in (chunk for chunk in values.chunks if len(chunk)):
            items = chunk.values if is_list else chunk
            if is_list and items.null_count:
                raise ValueError("null in a list")
            if chunk.null_count:
                nulls.append(first + np.flatnonzero(chunk.is_null().to_numpy(zero_copy_only=False)))
            start = memory.position(items.buffers()[1], stored) * (8 if is_packed else 1)
            low.append(start + (items.offset if is_list else 0))
            high.append(start + items.offset + len(items))
            if list_size is None:
                at.append(start + items.offset)
                offset_at.append(memory.position(chunk.buffers()[1], offset_dtype) + chunk.offset - first)
            else:
                skipped = chunk.offset * list_size + (items.offset if is_list else 0)
                at.append(start + skipped - first * list_size)
            first += len(chunk)
        return cls(
            values=memory.view(stored),
            dtype=torch_dtype(np.dtype(np.bool_) if is_packed else stored),
            is_packed=is_packed,
            offsets=memory.view(offset_dtype) if has_offsets else None,
            list_size=list_size,
            at=at,
            offset_at=offset_at,
            low=low,
            high=high,
            is_list=is_list,
            nulls=np.concatenate(nulls) if nulls else None,
        )


class _Group:
    """Columns that are read together: of one kind, in chunks of the same rows."""

    def __init__(self, places: dict[str, _Place], lengths: tuple[int, ...]) -> None:
        self.places = list(places.items())
        one = self.places[0][1]
        self.is_list, self.offsets, self.list_size = one.is_list, one.offsets, one.list_size
        ends = np.cumsum([length for length in lengths if length])
        self.ends = ends if len(ends) > 1 else None
        of_columns = [
            (place.at, place.low, place.high, place.offset_at or [0] * len(place.at)) for _, place in self.places
        ]
        self.positions = np.array(of_columns, dtype=np.int64).transpose(1, 0, 2).copy()  # (4, columns, chunks)
        nulls = [place.nulls for _, place in self.places if place.nulls is not None]
        self.nulls = np.concatenate(nulls) if nulls else None

    def read(self, rows: Array) -> dict[str, Column]:
        """Return the columns at ``rows``, numbers of rows that are there and not null."""
        positions = self.positions  # of one chunk, (4, columns, 1), or of the chunk of every row, (4, columns, batch)
        if self.ends is not None:
            positions = positions.take(self.ends.searchsorted(rows, side="right"), axis=2)
        if not self.is_list:
            numbers = zip(self.places, rows + positions[0], strict=True)
            return {name: _numbers(place, found) for (name, place), found in numbers}
        at, low, high, offset_at = positions
        if self.offsets is None:
            starts = rows * self.list_size + at
            sizes = np.full(starts.shape, self.list_size)
        else:
            offset_at = rows + offset_at
            first = self.offsets.take(offset_at)
            sizes = self.offsets.take(offset_at + 1) - first
            starts = first + at
        after = np.minimum.reduce(high - starts, axis=1).tolist()
        columns = {}
        known = sizes[0]
        bytes_of_known = known.tobytes() if len(sizes) > 1 else b""
        for i, (name, place) in enumerate(self.places):
            own = sizes[i]
            if i == 0 or own.tobytes() == bytes_of_known:
                own = known  # the same object: the columns need not be compared again
            columns[name] = _lists(place, starts[i], own, after[i], low[i])
        return columns


def _numbers(place: _Place, positions: Array) -> Column:
    found = _unpack(place.values, positions) if place.is_packed else place.values.take(positions)
    return Column(found.astype(place.dtype, copy=False), place.dtype)


def _lists(place: _Place, starts: Array, sizes: Array, after: int, low: Array) -> Column:
    if place.is_packed:
        column = _unpacked(place, starts, sizes)
    else:
        column = Column(place.values, place.dtype, starts, sizes, after, low)
    # As from Python lists: an empty one has no floats or bools to tell by, so it counts as ints.
    if place.dtype != np.int64 and not sizes.all():
        column.dtype = torch_dtype(np.dtype(np.float32 if place.dtype.kind == "f" and sizes.any() else np.int64))
    return column


def _lengths(values: pa.ChunkedArray) -> tuple[int, ...]:
    return tuple(map(len, values.chunks))


def _unpack(packed: Array, positions: Array) -> Array:
    """Return the bits at some positions, counted from the lowest bit of the first byte."""
    return (packed.take(positions >> 3) >> (positions & 7).astype(np.uint8) & 1).astype(np.bool_)


def _unpacked(place: _Place, starts: Array, sizes: Array) -> Column:
    """Return the column of lists of packed bits, read entry by entry."""
    ends = sizes.cumsum()
    entries = np.repeat(starts - (ends - sizes), sizes) + np.arange(ends[-1])
    return Column(_unpack(place.values, entries), place.dtype, ends - sizes, sizes)
