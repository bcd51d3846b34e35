"""Columns of a batch in numpy: read the cells of every row, tell what a column is, pad it to one array.

``collators.py`` decides with what value and on which side to pad. A ``Column`` leaves as one of three dtypes, as
``torch.tensor`` would give it: int64, float32 or bool. Lists of Python ints, nearly all text data, go through
``struct``, which refuses a float among the ints instead of rounding it. Every error names row, column and the line that
fixes it. Left out: strings, images, sound (``inner=`` of a collator).
"""

from __future__ import annotations

import reprlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from hf_memopt.batching.plan.lengths import LENGTH_COLUMN

__all__ = [
    "Array",
    "Column",
    "Room",
    "Windows",
    "column_kind",
    "count_ids",
    "label_kind",
    "read_columns",
    "round_up",
    "take_labels",
    "torch_dtype",
    "where_padding",
]

Array = NDArray[Any]

_DTYPES = {"b": np.dtype(np.bool_), "i": np.dtype(np.int64), "u": np.dtype(np.int64), "f": np.dtype(np.float32)}
_LABELS = ("labels", "label", "label_ids")
_ONE_PER_TOKEN = ("attention_mask", "token_type_ids", "special_tokens_mask", "offset_mapping", "position_ids")
_OF_DECODER = ("decoder_input_ids", "decoder_attention_mask")


def torch_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in which numbers of ``dtype`` leave: int64, float32 or bool, as in ``torch.tensor(list)``."""
    return _DTYPES[dtype.kind]


class Windows(dict[int, Array]):
    """An array as windows, by their width: window i is ``array[i : i + width]``."""

    def __init__(self, array: Array) -> None:
        self.array = array

    def __missing__(self, width: int) -> Array:
        array = self.array
        shape, strides = (len(array) - width + 1, width), (array.itemsize, array.itemsize)
        self[width] = np.ndarray(shape, array.dtype, array, 0, strides)
        return self[width]


@dataclass(slots=True)
class Room:
    """What lies beside rows in memory and may be read with them; columns whose rows lie alike share one.

    Args:
        before: how many entries before each row may be read, ``(batch,)``, and
        to_end: how many from its start on, negative, ``(batch,)``.
        sizes: of the rows, ``(batch,)``.
    """

    before: Array
    to_end: Array
    sizes: Array
    _after: int | None = None

    def fits(self, width: int, side: str) -> bool:
        """Tell whether every row, with what lies on the ``side`` to pad, fills ``width`` entries that may be read."""
        # Of so few numbers Python finds the least faster than numpy.
        if side == "left":
            return bool(min((self.before + self.sizes).tolist()) >= width)
        if self._after is None:
            self._after = -max(self.to_end.tolist())
        return self._after >= width


@dataclass(slots=True)
class Column:
    """One column of a batch, its rows still unpadded somewhere in one array.

    Args:
        values: the numbers of all rows, and maybe others: ``(batch,)`` in the order of the rows where each is one
            number; else row i is ``values[starts[i] : starts[i] + sizes[i]]``, of shape ``(sizes[i], ...)``.
        dtype: int64, float32 or bool: what the numbers become.
        starts: ``(batch,)``, or None where each row is one number; as ``sizes``.
        sizes: ``(batch,)``; the same object as another column's where the rows are known to be as long.
        room: what may be read beside the rows, and
        windows: of ``values``; None: nothing.
        odd_shapes: the shape of every row where they do not follow from ``values``: rows that do not go into one array
            (then ``sizes`` is None and ``values`` empty), and those among vectors of rows that are empty.
    """

    values: Array
    dtype: np.dtype[Any]
    starts: Array | None = None
    sizes: Array | None = None
    room: Room | None = None
    windows: Windows | None = None
    odd_shapes: list[tuple[int, ...]] | None = None

    @classmethod
    def of_rows(cls, rows: list[Array]) -> Column:
        """Return the column of arrays of one dtype.

        Example:
            >>> Column.of_rows([np.array([5, 6]), np.array([7])]).sizes
            array([2, 1])
        """
        shapes = [row.shape for row in rows]
        if not any(shapes):
            return cls(np.stack(rows), rows[0].dtype)
        filled = [row for row in rows if row.shape and len(row)]
        if not all(shapes) or len({row.shape[1:] for row in filled}) > 1:
            return cls(np.empty(0), rows[0].dtype, odd_shapes=shapes)
        sizes = np.array([shape[0] for shape in shapes])
        odd_shapes = shapes if len(set(map(len, shapes))) > 1 else None
        values = np.concatenate(filled or rows[:1])
        return cls(values, values.dtype, sizes.cumsum() - sizes, sizes, odd_shapes=odd_shapes)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shape of every row."""
        if self.odd_shapes is not None:
            return self.odd_shapes
        if self.sizes is None:
            return [()] * len(self.values)
        return [(size, *self.values.shape[1:]) for size in self.sizes.tolist()]

    @property
    def ndim(self) -> int | None:
        """The number of dimensions of every row, or None where they differ."""
        if self.odd_shapes is None:
            return 0 if self.sizes is None else self.values.ndim
        dimensions = set(map(len, self.odd_shapes))
        return dimensions.pop() if len(dimensions) == 1 else None

    def stack(self) -> Array:
        """Return rows of one shape as one array, ``(batch, ...)``."""
        if self.sizes is None:
            return self.values.astype(self.dtype, copy=False)
        return self.pad(int(self.sizes[0]), 0)

    def pad(self, width: int, value: float, side: str = "right", padding: Array | None = None) -> Array:
        """Return the rows as one array ``(batch, width, ...)`` with ``value`` on the ``side`` given.

        ``padding`` is ``where_padding(sizes, width, side)``, for callers that have it already.

        Example:
            >>> Column.of_rows([np.array([5, 6]), np.array([7])]).pad(3, 0, "left")
            array([[0, 5, 6],
                   [0, 0, 7]])
        """
        if self.starts is None or self.sizes is None:
            raise TypeError("rows of one number have no width; expected rows of shape (n, ...). Call: column.stack().")
        if self.windows is None or self.room is None or not self.room.fits(width, side):
            return self._pad_row_by_row(self.starts.tolist(), self.sizes.tolist(), width, value, side)
        if padding is None:
            padding = where_padding(self.sizes, width, side)
        # A row and its neighbours in memory, which the padding then covers.
        first = self.starts if side == "right" else self.starts + (self.sizes - width)
        padded = self.windows[width][first]
        if padded.dtype.kind != "f":  # no unsigned integer holds -100; floats of a neighbour may be out of range
            padded = padded.astype(self.dtype, copy=False)
        np.copyto(padded, value, where=padding)
        return padded.astype(self.dtype, copy=False)

    def _pad_row_by_row(self, starts: list[int], sizes: list[int], width: int, value: float, side: str) -> Array:
        inside = self.values.shape[1:]
        padded = np.full((len(sizes), width, *inside), value, dtype=self.dtype)
        flat = padded.reshape(-1, *inside)
        for row, (start, size) in enumerate(zip(starts, sizes, strict=True)):
            first = row * width if side == "right" else (row + 1) * width - size
            flat[first : first + size] = self.values[start : start + size]
        return padded


def where_padding(sizes: Array, width: int, side: str) -> Array:
    """Return where rows of sizes up to ``width`` are padding, ``(batch, width)``."""
    is_padding: Array = _padding_of_sizes(width, side)[sizes]
    return is_padding


@lru_cache(maxsize=256)
def _padding_of_sizes(width: int, side: str) -> Array:
    """Return where a row of each size from 0 to ``width`` is padding, ``(width + 1, width)``, in 2 * width bytes."""
    places = np.arange(2 * width)
    if side == "left":
        return sliding_window_view(places < width, width)
    return sliding_window_view(places >= width, width)[::-1]


def read_columns(features: Sequence[Any]) -> dict[str, Column]:
    """Return the columns of rows that are dicts, without those of None and those that only samplers read."""
    if len(features) == 0:
        raise ValueError("features=[] has no example to pad; expected at least one. Call: collator([dataset[0]]).")
    for row, feature in enumerate(features):
        if not isinstance(feature, Mapping):
            raise TypeError(
                f"features[{row}]={reprlib.repr(feature)} is not a row; expected a dict of columns. "
                "Call: collator([dataset[0]])."
            )
        if feature.keys() != features[0].keys():
            different = sorted(feature.keys() ^ features[0].keys())
            raise ValueError(
                f"features[{row}] and features[0] do not share the columns {different}; expected the same "
                "columns in every row. Remove or fill them: dataset.map(...)."
            )
    columns = {}
    for name in features[0]:
        cells = [feature[name] for feature in features]
        missing = [row for row, cell in enumerate(cells) if cell is None]
        if missing and len(missing) < len(cells):
            raise ValueError(
                f"features[{missing[0]}][{name!r}] is None where other rows have a value; expected values in all rows "
                f"or in none. Filter them: dataset.filter(lambda row: row[{name!r}] is not None)."
            )
        if not missing and name != LENGTH_COLUMN:
            arrays = [_cell_array(cell, name, row) for row, cell in enumerate(cells)]
            columns[name] = Column.of_rows(_alike(arrays) if len({found.dtype for found in arrays}) > 1 else arrays)
    return columns


def _alike(arrays: list[Array]) -> list[Array]:
    """Return arrays of mixed dtypes in the one that torch would give them together: floats first, then ints."""
    dtype = np.float32 if any(found.dtype == np.float32 for found in arrays) else np.int64
    return [found.astype(dtype) for found in arrays]


def _cell_array(cell: Any, name: str, row: int) -> Array:
    """Return one cell as an array."""
    if type(cell) is list and cell and type(cell[0]) is int:
        try:
            return np.frombuffer(struct.pack(f"{len(cell)}q", *cell), dtype=np.int64)
        except struct.error:
            pass  # not ints only: numpy says below what they are
    if isinstance(cell, torch.Tensor):
        found = cell.detach().cpu().numpy()
    else:
        try:
            found = np.asarray(cell)
        except ValueError:  # lists of different lengths inside the cell
            found = np.asarray(None)
    if found.size == 0 and found.ndim == 1:
        return np.empty(0, dtype=np.int64)
    if found.dtype.kind not in _DTYPES or (name == "input_ids" and found.dtype.kind not in "iu"):
        raise TypeError(_cell_error(cell, name, row))
    return found.astype(_DTYPES[found.dtype.kind], copy=False)


def _cell_error(cell: Any, name: str, row: int) -> str:
    where = f"features[{row}][{name!r}]={reprlib.repr(cell)}"
    if name == "input_ids":
        return f"{where} is not a list of integers; expected token ids. Tokenize first: tokenizer(text)."
    return (
        f"{where} is neither a number nor a list of numbers; expected a column that a tensor can hold. {_remedy(name)}"
    )


def _remedy(name: str) -> str:
    return (
        f"Remove it: dataset.remove_columns({name!r}) or TrainingArguments(remove_unused_columns=True); or let a "
        "collator that knows it do the work: BucketedCollator(inner=...)."
    )


def take_labels(columns: dict[str, Column]) -> tuple[str, Column | None]:
    """Take the labels out of ``columns`` and return their name and column."""
    names = [*filter(columns.__contains__, _LABELS)]
    if len(names) > 1:
        raise ValueError(
            f"features hold labels under {names}; expected one of these columns. Remove the others: "
            f"dataset.remove_columns({names[1:]})."
        )
    return (names[0], columns.pop(names[0])) if names else ("labels", None)


def count_ids(columns: dict[str, Column]) -> Array:
    """Return the number of ids of every row, ``(batch,)``."""
    if "input_ids" not in columns:
        raise ValueError(
            f"features have the columns {sorted(columns)} and no 'input_ids'; expected token ids. Tokenize first, "
            "tokenizer(text), or pass inner= the collator of this kind of data."
        )
    ids = columns["input_ids"]
    if ids.ndim != 1 or ids.sizes is None:
        row, shape = next((row, shape) for row, shape in enumerate(ids.shapes) if len(shape) != 1)
        raise ValueError(
            f"features[{row}]['input_ids'] has shape {shape}; expected one list of ids per row. Tokenize one "
            "text per row: tokenizer(text) without return_tensors."
        )
    return ids.sizes


def column_kind(name: str, column: Column, lengths: Array) -> Literal["fixed", "token", "decoder"]:
    """Tell how a column that is not the labels becomes one array: stacked, padded with the tokens, padded by itself.

    A vector whose size happens to be the number of tokens of every row counts as one entry per token.

    Raises:
        ValueError: the rows are ragged, or differ from ``input_ids`` in a column that has one entry per token.
    """
    if name in _OF_DECODER and column.ndim == 1:
        return "decoder"
    if column.sizes is not None and (column.sizes is lengths or np.logical_and.reduce(column.sizes == lengths)):
        return "token"
    shapes = column.shapes
    sizes = [shape[0] if shape else -1 for shape in shapes]
    wrong = _first_different(sizes, lengths)
    if wrong is not None and name in _ONE_PER_TOKEN:
        raise ValueError(
            f"features[{wrong}][{name!r}] has {max(sizes[wrong], 0)} entries for {lengths[wrong]} input_ids; expected "
            "one per token. Cut all columns together: tokenizer(text, truncation=True, max_length=...)."
        )
    if len(set(shapes)) > 1:
        raise ValueError(
            f"column {name!r} is ragged, with shapes {_listed(shapes)}; expected one entry per token or one shape in "
            f"all rows. {_remedy(name)}"
        )
    return "fixed"


def _first_different(sizes: list[int], lengths: Array) -> int | None:
    """Return the first row whose size is not its number of ids."""
    return next((i for i, (size, length) in enumerate(zip(sizes, lengths, strict=True)) if size != length), None)


def _listed(shapes: list[tuple[int, ...]]) -> str:
    return ", ".join(map(str, sorted(set(shapes))[:3]))


def label_kind(
    labels: Column, lengths: Array, has_decoder: bool | None = None, name: str = "labels"
) -> Literal["class", "target", "token", "decoder"]:
    """Tell what the labels are: ``class`` and ``target`` are stacked as int64 and float32, the others padded.

    ``has_decoder`` is what is known of the model: True makes every list of ints decoder labels, False none. None
    tells by length, so a batch whose decoder labels are all as long as its inputs counts as token labels.

    Raises:
        ValueError: the labels mix shapes, or differ from ``input_ids`` under a model without decoder.
    """
    if labels.ndim == 0:
        return "target" if labels.dtype == np.float32 else "class"
    shapes = labels.shapes
    same_size = len(set(shapes)) == 1
    if labels.ndim != 1 or (labels.dtype != np.int64 and not same_size):
        raise ValueError(
            f"column {name!r} mixes shapes {_listed(shapes)}; expected one number per row, float vectors of one size, "
            "or lists of ints. Make the rows alike: dataset.map(...)."
        )
    if labels.dtype != np.int64:
        return "target"
    sizes = [size for (size,) in shapes]
    wrong = _first_different(sizes, lengths)
    if has_decoder or (has_decoder is None and wrong is not None):
        return "decoder"
    if wrong is None:
        return "token"
    if same_size:
        return "class"
    raise ValueError(
        f"features[{wrong}][{name!r}] has {sizes[wrong]} entries for {lengths[wrong]} input_ids, and the model "
        "has no decoder; expected one label per token. Align them: tokenizer(words, is_split_into_words=True)."
    )


def round_up(length: int, multiple: int | None) -> int:
    """Return ``length``, at least 1, as the next multiple."""
    return -(-max(length, 1) // (multiple or 1)) * (multiple or 1)
