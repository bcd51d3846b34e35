"""Columns of a batch in numpy: read the cells of every row, find out what a column is, pad it to one array.

``collators.py`` decides with what value and on which side to pad. A ``Column`` leaves as one of three dtypes, as
``torch.tensor`` would give it: int64, float32 or bool. Lists of Python ints, nearly all text data, go through
``struct``, which refuses a float among the ints instead of rounding it. Every error names row, column and the line that
fixes it. Limitations: no strings, images or sound (``inner=`` of a collator takes them).
"""

from __future__ import annotations

import math
import reprlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from hf_memopt.batching.plan.lengths import LENGTH_COLUMN

__all__ = [
    "Array",
    "Cell",
    "Column",
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
Cell = Any  # the entries of one row: a contiguous array, or a memoryview, whose shape mypy takes for optional

_DTYPES = {"b": np.dtype(np.bool_), "i": np.dtype(np.int64), "u": np.dtype(np.int64), "f": np.dtype(np.float32)}
_LABELS = ("labels", "label", "label_ids")
_ONE_PER_TOKEN = ("attention_mask", "token_type_ids", "special_tokens_mask", "offset_mapping", "position_ids")
_OF_DECODER = ("decoder_input_ids", "decoder_attention_mask")


def torch_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in which numbers of ``dtype`` leave: int64, float32 or bool, as in ``torch.tensor(list)``."""
    return _DTYPES[dtype.kind]


@dataclass(slots=True)
class Column:
    """One column of a batch, its rows still unpadded.

    Args:
        cells: the cell of each row, ``(batch,)``: buffers of ``stored``, of any shapes; where each row is one number,
            one array of them.
        stored: the dtype of the cells. An empty one may have another.
        dtype: int64, float32 or bool: the dtype of the padded array.
        sizes: the number of entries of each row, ``(batch,)``; None where the rows cannot be padded to one array.
        ndim: the number of dimensions of a row; None where they differ.
    """

    cells: Sequence[Cell] | Array
    stored: np.dtype[Any]
    dtype: np.dtype[Any]
    sizes: list[int] | None
    ndim: int | None

    @classmethod
    def of_arrays(cls, arrays: list[Array]) -> Column:
        """Return the column of arrays of one dtype.

        Examples:
            >>> Column.of_arrays([np.array([5, 6]), np.array([7])]).sizes
            [2, 1]
        """
        dtype, dimensions = arrays[0].dtype, {found.ndim for found in arrays}
        if dimensions == {0}:
            return cls(np.stack(arrays), dtype, dtype, None, 0)
        can_pad = 0 not in dimensions and len({found.shape[1:] for found in arrays if len(found)}) <= 1
        sizes = [len(found) for found in arrays] if can_pad else None
        return cls(arrays, dtype, dtype, sizes, dimensions.pop() if len(dimensions) == 1 else None)

    @classmethod
    def of_lists(cls, cells: list[Cell], sizes: list[int], stored: np.dtype[Any]) -> Column:
        """Return the column of flat buffers of one dtype."""
        dtype = torch_dtype(stored)
        if dtype.kind != "i" and not all(sizes):
            # As from Python lists: an empty one shows neither floats nor bools, so it counts as ints.
            dtype = np.dtype(np.float32 if dtype.kind == "f" and any(sizes) else np.int64)
        return cls(cells, stored, dtype, sizes, 1)

    @classmethod
    def of_numbers(cls, numbers: list[Any], stored: np.dtype[Any]) -> Column:
        """Return the column of one number per row."""
        dtype = torch_dtype(stored)
        return cls(np.array(numbers, stored).astype(dtype, copy=False), dtype, dtype, None, 0)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shape of every row."""
        return [cell.shape for cell in self.cells]

    def stack(self) -> Array:
        """Return rows of one shape as one array, ``(batch, ...)``."""
        if self.ndim == 0:
            return np.asarray(self.cells).astype(self.dtype, copy=False)
        return self.pad(len(self.cells[0]), 0)

    def pad(self, width: int, value: int, side: str = "right") -> Array:
        """Return the rows as one array ``(batch, width, ...)`` with ``value`` on the ``side`` given.

        Examples:
            >>> Column.of_arrays([np.array([5, 6]), np.array([7])]).pad(3, 0, "left")
            array([[0, 5, 6],
                   [0, 0, 7]])
        """
        # One join of bytes, row, padding, row, padding ..., is several times faster than an assignment for each row,
        # and a bytearray, unlike bytes, makes a tensor that can be written to.
        cells, stored = self.cells, self.stored
        if not _holds(stored, value):  # -100 among unsigned integers
            cells, stored = [np.asarray(cell).astype(self.dtype) for cell in cells], self.dtype
        inside = next(filter(len, cells), cells[0]).shape[1:]  # an empty row among (n, 3) may have shape (0,)
        paddings = _paddings(1 << width.bit_length(), math.prod(inside), value, stored)
        rests = map(paddings.__getitem__, map(width.__sub__, map(len, cells)))
        parts: list[Any] = [None] * (2 * len(cells))
        parts[0::2], parts[1::2] = (cells, rests) if side == "right" else (rests, cells)
        joined = bytearray().join(parts)
        return np.ndarray((len(cells), width, *inside), stored, joined).astype(self.dtype, copy=False)


@lru_cache(256)
def _holds(dtype: np.dtype[Any], value: int) -> bool:
    return bool(np.array(value).astype(dtype) == value)


@lru_cache(64)
def _paddings(most: int, entry: int, value: int, dtype: np.dtype[Any]) -> list[Cell]:
    """Return the padding of 0, 1, ... ``most`` entries, each of ``entry`` numbers: made once, used for all rows."""
    padding = np.full(most * entry, value, dtype).data
    return [padding[: size * entry] for size in range(most + 1)]


def where_padding(sizes: list[int], width: int, side: str) -> Array:
    """Return where rows of these sizes are padding, ``(batch, width)``."""
    places, column = np.arange(width), np.array(sizes)[:, None]
    is_padding: Array = places < width - column if side == "left" else places >= column
    return is_padding


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
            columns[name] = Column.of_arrays(_alike(arrays) if len({found.dtype for found in arrays}) > 1 else arrays)
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
    return found.astype(_DTYPES[found.dtype.kind], order="C", copy=False)


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


def count_ids(columns: dict[str, Column]) -> list[int]:
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


def column_kind(name: str, column: Column, lengths: list[int]) -> Literal["fixed", "token", "decoder"]:
    """Return how a column that is not the labels becomes one array: stacked, padded with the tokens, padded by itself.

    A vector whose size happens to be the number of tokens of every row counts as one entry per token.

    Raises:
        ValueError: the rows are ragged, or differ from ``input_ids`` in a column that has one entry per token.
    """
    if name in _OF_DECODER and column.ndim == 1:
        return "decoder"
    if column.sizes == lengths:
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


def _first_different(sizes: list[int], lengths: list[int]) -> int | None:
    """Return the first row whose size is not its number of ids."""
    return next((i for i, (size, length) in enumerate(zip(sizes, lengths, strict=True)) if size != length), None)


def _listed(shapes: list[tuple[int, ...]]) -> str:
    return ", ".join(map(str, sorted(set(shapes))[:3]))


def label_kind(
    labels: Column, lengths: list[int], has_decoder: bool | None = None, name: str = "labels"
) -> Literal["class", "target", "token", "decoder"]:
    """Return what the labels are: ``class`` and ``target`` are stacked as int64 and float32, the others padded.

    ``has_decoder`` is what is known of the model: True makes every list of ints decoder labels, False none. None
    decides by length, so a batch whose decoder labels are all as long as its inputs counts as token labels.

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
