"""Columns of a batch in numpy: read the cells of every row, tell what a column is, pad it to one array.

Stateless functions; ``collators.py`` decides with what value and on which side to pad. A cell becomes an array of one
of three dtypes, as ``torch.tensor`` would give it: int64, float32 or bool. Lists of Python ints, nearly all text data,
go through ``struct``, which refuses a float among the ints instead of rounding it. Every error names row, column and
the line that fixes it. Left out: strings, images, sound (``inner=`` of a collator).
"""

from __future__ import annotations

import reprlib
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = [
    "Array",
    "column_kind",
    "count_ids",
    "label_kind",
    "pad_column",
    "read_columns",
    "round_up",
    "take_labels",
]

Array = NDArray[Any]

_DTYPES = {"b": np.bool_, "i": np.int64, "u": np.int64, "f": np.float32}  # by numpy's kind, as in torch.tensor(list)
_LABELS = ("labels", "label", "label_ids")
_ONE_PER_TOKEN = ("attention_mask", "token_type_ids", "special_tokens_mask", "offset_mapping", "position_ids")
_OF_DECODER = ("decoder_input_ids", "decoder_attention_mask")
_FOR_SAMPLERS = ("length",)  # read by train_sampling_strategy="group_by_length"; no model takes it


def read_columns(features: Sequence[Any]) -> dict[str, list[Array]]:
    """Return the cells of every column as arrays of one dtype: int64, float32 or bool."""
    if len(features) == 0:
        raise ValueError("features=[] has no example to pad; expected at least one. Call: collator([dataset[0]]).")
    for row, feature in enumerate(features):
        if not isinstance(feature, Mapping):
            raise TypeError(
                f"features[{row}]={reprlib.repr(feature)} is a {type(feature).__name__}; expected a dict of columns. "
                "For items that are lists of dicts call: BucketedCollator(tokenizer)."
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
        if not missing and name not in _FOR_SAMPLERS:
            arrays = [_cell_array(cell, name, row) for row, cell in enumerate(cells)]
            columns[name] = _alike(arrays) if len({found.dtype for found in arrays}) > 1 else arrays
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


def take_labels(columns: dict[str, list[Array]]) -> tuple[str, list[Array] | None]:
    """Take the labels out of ``columns`` and return their name and rows."""
    names = [name for name in _LABELS if name in columns]
    if len(names) > 1:
        raise ValueError(
            f"features hold labels under {names}; expected one of these columns. Remove the others: "
            f"dataset.remove_columns({names[1:]})."
        )
    return (names[0], columns.pop(names[0])) if names else ("labels", None)


def count_ids(columns: dict[str, list[Array]]) -> Array:
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
    return np.array([len(ids) for ids in columns["input_ids"]])


def pad_column(rows: Sequence[Array], width: int, value: float, side: str) -> Array:
    """Return ``rows`` of shape ``(n, ...)`` as one array ``(batch, width, ...)`` with ``value`` on the ``side`` given.

    Example:
        >>> pad_column([np.array([5, 6]), np.array([7])], 3, 0, "left")
        array([[0, 5, 6],
               [0, 0, 7]])
    """
    inside = next((row.shape[1:] for row in rows if len(row)), ())
    padded = np.full((len(rows), width, *inside), value, dtype=rows[0].dtype)
    for target, row in zip(padded, rows, strict=True):
        if len(row):
            target[slice(len(row)) if side == "right" else slice(width - len(row), width)] = row
    return padded


def column_kind(name: str, rows: Sequence[Array], lengths: Array) -> Literal["fixed", "token", "decoder"]:
    """Tell how a column that is not the labels becomes one array: stacked, padded with the tokens, padded by itself.

    A vector whose size happens to be the number of tokens of every row counts as one entry per token.

    Raises:
        ValueError: the rows are ragged, or differ from ``input_ids`` in a column that has one entry per token.
    """
    if name in _OF_DECODER and all(row.ndim == 1 for row in rows):
        return "decoder"
    sizes = [row.shape[0] if row.ndim else -1 for row in rows]
    wrong = next((i for i, (size, length) in enumerate(zip(sizes, lengths, strict=True)) if size != length), None)
    if wrong is None and len({row.shape[1:] for row in rows if len(row)}) <= 1:
        return "token"
    if wrong is not None and name in _ONE_PER_TOKEN:
        raise ValueError(
            f"features[{wrong}][{name!r}] has {max(sizes[wrong], 0)} entries for {lengths[wrong]} input_ids; expected "
            "one per token. Cut all columns together: tokenizer(text, truncation=True, max_length=...)."
        )
    if len({row.shape for row in rows}) > 1:
        shapes = ", ".join(map(str, sorted({row.shape for row in rows})[:3]))
        raise ValueError(
            f"column {name!r} is ragged, with shapes {shapes}; expected one entry per token or one shape in all rows. "
            f"{_remedy(name)}"
        )
    return "fixed"


def label_kind(
    labels: Sequence[Array], lengths: Array, has_decoder: bool | None = None, name: str = "labels"
) -> Literal["class", "target", "token", "decoder"]:
    """Tell what the labels are: ``class`` and ``target`` are stacked as int64 and float32, the others padded.

    ``has_decoder`` is what is known of the model: True makes every list of ints decoder labels, False none. None
    tells by length, so a batch whose decoder labels are all as long as its inputs counts as token labels.

    Raises:
        ValueError: the labels mix shapes, or differ from ``input_ids`` under a model without decoder.
    """
    dtype = labels[0].dtype
    dimensions = {label.ndim for label in labels}
    if dimensions == {0}:
        return "target" if dtype == np.float32 else "class"
    same_size = len({label.shape for label in labels}) == 1
    if dimensions != {1} or (dtype != np.int64 and not same_size):
        shapes = ", ".join(map(str, sorted({label.shape for label in labels})[:3]))
        raise ValueError(
            f"column {name!r} mixes shapes {shapes}; expected one number per row, float vectors of one size, or "
            "lists of ints. Make the rows alike: dataset.map(...)."
        )
    if dtype != np.int64:
        return "target"
    wrong = next((i for i, (row, n) in enumerate(zip(labels, lengths, strict=True)) if len(row) != n), None)
    if has_decoder or (has_decoder is None and wrong is not None):
        return "decoder"
    if wrong is None:
        return "token"
    if same_size:
        return "class"
    raise ValueError(
        f"features[{wrong}][{name!r}] has {len(labels[wrong])} entries for {lengths[wrong]} input_ids, and the model "
        "has no decoder; expected one label per token. Align them: tokenizer(words, is_split_into_words=True)."
    )


def round_up(length: int, multiple: int | None) -> int:
    """Return ``length``, at least 1, as the next multiple."""
    return -(-max(length, 1) // (multiple or 1)) * (multiple or 1)
