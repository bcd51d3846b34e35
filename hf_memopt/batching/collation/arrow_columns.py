"""Columns of a ``datasets.Dataset`` at any rows, straight from the Arrow buffers: no Python object per row or token.

A mapped or memory-mapped dataset has one chunk per 1000 rows, and a bucketed batch takes its rows from as many chunks
as it has rows. So all buffers of the table are seen through one numpy array that spans their addresses, and a row is
found by arithmetic: a fixed number of numpy calls per batch and column, whatever the number of chunks. Only addresses
inside the buffers are ever read, since every position comes from Arrow's own offsets and checked row numbers.

Taken: numbers and flat lists of numbers without nulls in the rows asked for, in the formats None, numpy and torch.
Anything else is left to the dataset itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from hf_memopt.batching.collation.columns import Array, Column, Room, Windows, torch_dtype
from hf_memopt.batching.plan.lengths import LENGTH_COLUMN

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
        self._mapping = None if mapping is None else _Group("indices", _Place.of(mapping, memory))
        self._groups: list[_Group] = []
        for name, values in chunked.items():
            place = _Place.of(values, memory)
            if not any(group.takes_in(name, place) for group in self._groups):
                self._groups.append(_Group(name, place))
        self._in_order = [name for group in self._groups for name in group.places] == self._names

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
        if not kept or any(table.column(name).null_count for name in kept if name == LENGTH_COLUMN):
            return None
        try:
            return cls(dataset, [name for name in kept if name != LENGTH_COLUMN])
        except ValueError:
            return None

    def read(self, rows: Array) -> dict[str, Column] | None:
        """Return the columns at ``rows``, int64, or None if a row is null or not there."""
        if len(rows) == 0 or max(rows.view(np.uint64).tolist()) >= self._size:  # a negative row is a huge one
            return None
        if self._mapping is not None:
            rows = self._mapping.read(rows)["indices"].stack()
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
        self._views: dict[Any, Windows] = {}
        self._span = pa.foreign_buffer(self.base or _LINE_BYTES, size, base=columns)

    def view(self, dtype: Any) -> Windows:
        """Return the array of a dtype, one for all columns."""
        if dtype not in self._views:
            self._views[dtype] = Windows(np.frombuffer(self._span, dtype=dtype))
        return self._views[dtype]

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

    values: Array  # the view, and
    windows: Windows  # its windows
    dtype: np.dtype[Any]  # what the values become
    is_packed: bool
    offsets: Array | None  # the view that holds the offsets of lists
    list_size: int | None  # of fixed-size lists; 1 for plain numbers
    at: list[int]  # per chunk; plus an offset less the origin, or plus row * list_size: the position of a value
    offset_at: list[int]  # per chunk; plus the row: the position of its offset
    origin: list[int]  # per chunk: its first offset
    low: list[int]  # per chunk: where its values start, and
    high: list[int]  # where they end
    lengths: list[int]  # per chunk, in rows
    is_list: bool
    nulls: Array | None  # row numbers

    def lies_like(self, other: _Place) -> bool:
        """Tell whether every row starts as far into its chunk's values, and is as long, as in the other column."""
        if (self.is_list, self.list_size, self.lengths) != (other.is_list, other.list_size, other.lengths):
            return False
        return self.list_size is not None or all(map(np.array_equal, self._counted(), other._counted()))

    def _counted(self) -> Iterator[Array]:
        """Yield the offsets of every chunk, counted from its first."""
        first = 0
        for at, origin, length in zip(self.offset_at, self.origin, self.lengths, strict=True):
            if self.offsets is not None:
                yield self.offsets[at + first : at + first + length + 1] - origin
            first += length

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
        offsets = memory.view(offset_dtype).array
        at, offset_at, origin, low, high, lengths, nulls = [], [], [], [], [], [], []
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
                position = memory.position(chunk.buffers()[1], offset_dtype) + chunk.offset
                offset_at.append(position - first)
                origin.append(int(offsets[position]))
                at.append(start + items.offset + origin[-1])
            else:
                skipped = chunk.offset * list_size + (items.offset if is_list else 0)
                offset_at.append(0)
                origin.append(0)
                at.append(start + skipped - first * list_size)
            lengths.append(len(chunk))
            first += len(chunk)
        return cls(
            values=memory.view(stored).array,
            windows=memory.view(stored),
            dtype=torch_dtype(np.dtype(np.bool_) if is_packed else stored),
            is_packed=is_packed,
            offsets=offsets if has_offsets else None,
            list_size=list_size,
            at=at,
            offset_at=offset_at,
            origin=origin,
            low=low,
            high=high,
            lengths=lengths,
            is_list=is_list,
            nulls=np.concatenate(nulls) if nulls else None,
        )


class _Group:
    """Columns whose rows lie alike, so that one look finds them all."""

    def __init__(self, name: str, place: _Place) -> None:
        self.places = {name: place}
        self._is_list, self._list_size, self._offsets = place.is_list, place.list_size, place.offsets
        self._next_offsets = None if place.offsets is None else place.offsets[1:]
        ends = np.cumsum(place.lengths)
        self._ends = ends if len(ends) > 1 else None
        self._positions = self._of_chunks()
        self.nulls = place.nulls

    def takes_in(self, name: str, place: _Place) -> bool:
        """Add a column if its rows lie like those of the group, and tell whether they do."""
        if not place.lies_like(next(iter(self.places.values()))):
            return False
        self.places[name] = place
        self._positions = self._of_chunks()
        nulls = [found for found in (self.nulls, place.nulls) if found is not None]
        self.nulls = np.concatenate(nulls) if nulls else None
        return True

    def _of_chunks(self) -> Array:
        """Return what to add to a row for its offset, for the room around it, and what to add for every column."""
        places = list(self.places.values())
        at = np.array([place.at for place in places], dtype=np.int64) - places[0].origin
        low = np.max([place.low for place in places] - at, axis=0)
        high = np.min([place.high for place in places] - at, axis=0)
        return np.stack([places[0].offset_at, -low, -high, *at])  # (3 + columns, chunks)

    def read(self, rows: Array) -> dict[str, Column]:
        """Return the columns at ``rows``, numbers of rows that are there and not null."""
        positions = self._positions  # of one chunk, or of the chunk of every row
        if self._ends is not None:
            positions = positions.take(self._ends.searchsorted(rows, side="right"), axis=1)
        if not self._is_list:
            found = rows + positions[3:]
            return {name: _numbers(place, found[i]) for i, (name, place) in enumerate(self.places.items())}
        if self._offsets is None or self._next_offsets is None:
            first = rows * self._list_size
            sizes = np.full(rows.shape, self._list_size)
        else:
            offset_at = rows + positions[0]
            first = self._offsets.take(offset_at)
            sizes = self._next_offsets.take(offset_at) - first
        before, to_end, *starts = first + positions[1:]
        room = Room(before, to_end, sizes)
        return {name: _lists(place, starts[i], room) for i, (name, place) in enumerate(self.places.items())}


def _numbers(place: _Place, positions: Array) -> Column:
    found = _unpack(place.values, positions) if place.is_packed else place.values.take(positions)
    return Column(found, place.dtype)


def _lists(place: _Place, starts: Array, room: Room) -> Column:
    sizes = room.sizes
    if place.is_packed:
        column = _unpacked(place, starts, sizes)
    else:
        column = Column(place.values, place.dtype, starts, sizes, room, place.windows)
    # As from Python lists: an empty one has no floats or bools to tell by, so it counts as ints.
    if place.dtype.kind != "i" and not sizes.all():
        column.dtype = torch_dtype(np.dtype(np.float32 if place.dtype.kind == "f" and sizes.any() else np.int64))
    return column


def _unpack(packed: Array, positions: Array) -> Array:
    """Return the bits at some positions, counted from the lowest bit of the first byte."""
    return (packed.take(positions >> 3) >> (positions & 7).astype(np.uint8) & 1).astype(np.bool_)


def _unpacked(place: _Place, starts: Array, sizes: Array) -> Column:
    """Return the column of lists of packed bits, read entry by entry."""
    ends = sizes.cumsum()
    entries = np.repeat(starts - (ends - sizes), sizes) + np.arange(ends[-1])
    return Column(_unpack(place.values, entries), place.dtype, ends - sizes, sizes)
