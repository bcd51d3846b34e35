"""Columns of a batch in numpy: read the cells of every row, find out what a column is, pad it to one array.

A column is the list of its rows' arrays. ``collators.py`` decides with what value and on which side to pad. The padded
array has one of three dtypes, as ``torch.tensor`` would give it: int64, float32 or bool. Lists of Python ints, nearly
all text data, go through ``struct``, which refuses a float among the ints instead of rounding it. Every error names
row, column and the line that fixes it. Limitations: no strings, images or sound (``inner=`` of a collator takes them).
"""

from __future__ import annotations

import reprlib
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from hf_memopt.training.batching import LENGTH_COLUMN

Array = NDArray[Any]
Column = Sequence[Array]
"""The cells of a column, ``(rows,)``: arrays of any shapes, or scalars of numpy where a row is one number."""

LABELS = ("labels", "label", "label_ids")
INPUTS = {"input_ids", "attention_mask", "token_type_ids", "position_ids", "special_tokens_mask"}
INPUTS |= {"decoder_input_ids", "decoder_attention_mask"}
_ONE_PER_TOKEN = ("attention_mask", "token_type_ids", "special_tokens_mask", "offset_mapping", "position_ids")
_OF_DECODER = ("decoder_input_ids", "decoder_attention_mask")


def _dtype(column: Column) -> Any:
    """Return int64, float32 or bool, as ``torch.tensor`` gives lists of these numbers: an empty one counts as ints."""
    kinds = {cell.dtype.kind if cell.size or cell.ndim != 1 else "i" for cell in column}
    if "f" in kinds:
        return np.float32
    return np.bool_ if kinds == {"b"} else np.int64


def stack(column: Column) -> Array:
    """Return rows of one shape as one array, ``(batch, ...)``."""
    return np.array(column, _dtype(column))


def pad(column: Column, width: int, value: int, side: str = "right") -> Array:
    """Return the rows as one array ``(batch, width, ...)`` with ``value`` on the ``side`` given."""
    inside = next((cell.shape[1:] for cell in column if len(cell)), column[0].shape[1:])  # an empty one may be (0,)
    padded = np.full((len(column), width, *inside), value, _dtype(column))
    for row, cell in zip(padded, column, strict=True):
        if len(cell):
            row[slice(len(cell)) if side == "right" else slice(-len(cell), None)] = cell
    return padded


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
    columns: dict[str, Column] = {}
    for name in features[0]:
        cells = [feature[name] for feature in features]
        missing = [row for row, cell in enumerate(cells) if cell is None]
        if missing and len(missing) < len(cells):
            raise ValueError(
                f"features[{missing[0]}][{name!r}] is None where other rows have a value; expected values in all rows "
                f"or in none. Filter them: dataset.filter(lambda row: row[{name!r}] is not None)."
            )
        if not missing and name != LENGTH_COLUMN:
            columns[name] = [_cell_array(cell, name, row) for row, cell in enumerate(cells)]
    return columns


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
    if found.dtype.kind not in ("iu" if name == "input_ids" else "biuf"):
        wrong = "is not a list of integers; expected token ids. Tokenize first: tokenizer(text)."
        if name != "input_ids":
            wrong = (
                f"is neither a number nor a list of numbers; expected a column that a tensor can hold. {_remedy(name)}"
            )
        raise TypeError(f"features[{row}][{name!r}]={reprlib.repr(cell)} {wrong}")
    return found


def _remedy(name: str) -> str:
    return (
        f"Remove it: dataset.remove_columns({name!r}) or TrainingArguments(remove_unused_columns=True); or let a "
        "collator that knows it do the work: BucketedCollator(inner=...)."
    )


def take_labels(columns: dict[str, Column]) -> tuple[str, Column | None]:
    """Take the labels out of ``columns`` and return their name and column."""
    names = [*filter(columns.__contains__, LABELS)]
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
    for row, ids in enumerate(columns["input_ids"]):
        if ids.ndim != 1:
            raise ValueError(
                f"features[{row}]['input_ids'] has shape {ids.shape}; expected one list of ids per row. Tokenize one "
                "text per row: tokenizer(text) without return_tensors."
            )
    return [*map(len, columns["input_ids"])]


def column_kind(name: str, column: Column, lengths: list[int]) -> Literal["fixed", "token", "decoder"]:
    """Return how a column that is not the labels becomes one array: stacked, padded with the tokens, padded by itself.

    A vector whose size happens to be the number of tokens of every row counts as one entry per token.

    Raises:
        ValueError: the rows are ragged, or differ from ``input_ids`` in a column that has one entry per token.
    """
    shapes = [cell.shape for cell in column]
    if name in _OF_DECODER and all(len(shape) == 1 for shape in shapes):
        return "decoder"
    sizes = [shape[0] if shape else -1 for shape in shapes]
    if sizes == lengths and len({shape[1:] for shape in shapes if shape[0]}) <= 1:
        return "token"
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
    shapes, dtype = [cell.shape for cell in labels], _dtype(labels)
    same_size = len(set(shapes)) == 1
    if same_size and not shapes[0]:
        return "target" if dtype == np.float32 else "class"
    if any(len(shape) != 1 for shape in shapes) or (dtype != np.int64 and not same_size):
        raise ValueError(
            f"column {name!r} mixes shapes {_listed(shapes)}; expected one number per row, float vectors of one size, "
            "or lists of ints. Make the rows alike: dataset.map(...)."
        )
    if dtype != np.int64:
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
