"""Lengths of tokenised examples, read from Arrow offsets without touching the tokens.

A ``datasets.Dataset`` of 1e6 rows takes milliseconds instead of the seconds that ``[len(x["input_ids"]) for x in ds]``
takes; any other dataset is read row by row, with a progress bar once that lasts longer than a second.
"""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import ArrayLike, NDArray

from hf_memopt.errors import did_you_mean
from hf_memopt.notices import notify
from hf_memopt.plain_data import check_value, checked_array
from hf_memopt.training.batching.plan import check_integers

logger = logging.getLogger(__name__)

COUNT_OTHERS = "Of sound or pictures pass the lengths: bucketed(dataset, ..., lengths=[...])"
COUNT_OTHERS += ", or recipe.replace(bucketing=False)"
LENGTH_COLUMN = "length"  # stock's default length_column_name, for "group_by_length"; no model takes it
_notify_once = cache(notify)  # of the same text


def token_lengths(dataset: Any, column: str = "input_ids") -> NDArray[np.int32]:
    """Return the number of tokens of every example, shape (examples,).

    A ``datasets.Dataset`` is read from its Arrow offsets, whatever its format. Anything else with rows (a list of
    dicts, a torch Dataset), and a column that a transform makes, is read row by row. A null row has length 0.

    Raises:
        ValueError: the dataset is empty or has no such column, or the column holds something else than flat lists of
            integers.
        TypeError: the dataset is indexed by column (a DataFrame, a dict of columns), or its rows are not dicts.

    Examples:
        >>> token_lengths([{"input_ids": [5, 6, 7]}, {"input_ids": [5]}])
        array([3, 1], dtype=int32)
    """
    check_value("column", column, str, example="input_ids")
    _check_rows(dataset)
    if len(dataset) == 0:
        raise ValueError("dataset=<0 examples> is empty; expected at least one example. Check the filter that made it")
    table = getattr(dataset, "data", None)
    arrow = getattr(table, "table", table)  # datasets wraps the pyarrow table once more
    if not isinstance(arrow, pa.Table) or dataset.format["type"] == "custom":  # a transform may change the column
        return _row_by_row(dataset, column)
    if column not in arrow.column_names:
        raise _missing(column, arrow.column_names)
    lengths = _of_chunks(arrow.column(column), column)
    if column == "input_ids" and "attention_mask" in arrow.column_names:
        masks = arrow.column("attention_mask")[:8].to_pylist()
        if zeros := sum((mask or []).count(0) for mask in masks):
            _notify_once(
                logger,
                f"attention_mask has {zeros} zeros in the first {len(masks)} rows, padding that counts as length; "
                "expected rows without padding. Tokenise with padding=False: a collator pads each batch",
            )
    # `_indices` is the private mapping that shuffle, select, sort and filter leave (datasets 3.0 to 5.2; pinned by a
    # test); as int64, since numpy would copy uint64 to index with it.
    mapping = getattr(dataset, "_indices", None)
    return lengths if mapping is None else lengths.take(np.asarray(mapping.column(0).to_numpy()).view(np.int64))


def lengths_of(dataset: Any, lengths: ArrayLike | None, column: str) -> NDArray[Any]:
    """Return the lengths that were given for a dataset, or read them.

    Raises:
        ValueError: they are not one per example; see ``token_lengths``.
        TypeError: the dataset is indexed by column.
    """
    _check_rows(dataset)
    found = token_lengths(dataset, column) if lengths is None else checked_array("lengths", lengths)
    if found.shape != (len(dataset),):
        raise ValueError(
            f"lengths=<array of shape {found.shape}> does not belong to a dataset of {len(dataset)} examples; expected "
            "one length per example. Leave lengths out, or pass token_lengths(dataset)"
        )
    check_integers(found)
    return found


def _check_rows(dataset: Any) -> None:
    """Raise TypeError for a stream, and for columns in place of rows: their number would be taken for that of rows."""
    name, library = type(dataset).__name__, type(dataset).__module__.split(".")[0]
    if isinstance(dataset, Mapping) and 0 not in dataset:
        if all(hasattr(part, "column_names") for part in dataset.values()) and dataset:
            fix = f"Pass one of its parts: dataset[{next(iter(dataset))!r}]"
        else:
            fix = "Pass datasets.Dataset.from_dict(dict(dataset))"
    elif library in ("pandas", "polars", "pyarrow") and hasattr(dataset, "columns"):
        fix = f"Pass datasets.Dataset{'' if library == 'pyarrow' else f'.from_{library}'}(dataset)"
    elif not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__") or getattr(dataset, "shape", 1) == ():
        raise TypeError(
            f"dataset=<{name}> is a stream, or has no rows by number; expected a datasets.Dataset or a list of rows. "
            "Load it without streaming=True, or take rows of a stream: "
            "datasets.Dataset.from_list(list(itertools.islice(stream, 100_000)))"
        )
    else:
        return
    raise TypeError(f"dataset=<{name}> is indexed by column; expected rows: dataset[0] an example. {fix}")


def is_list(kind: pa.DataType) -> bool:
    """Return whether an Arrow type is one of lists."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _of_chunks(values: pa.ChunkedArray, column: str) -> NDArray[np.int32]:
    kind = values.type
    if not is_list(kind) or not pa.types.is_integer(kind.value_type):
        raise _not_tokens(column, f"of type {kind}")
    lengths = pc.list_value_length(values).fill_null(0)  # from the offsets; null where the row is null
    return np.array(lengths.to_numpy(), dtype=np.int32)


def _row_by_row(dataset: Any, column: str) -> NDArray[np.int32]:
    from tqdm.auto import tqdm

    rows: Iterable[Any] = (dataset[i] for i in range(len(dataset)))
    lengths = np.empty(len(dataset), dtype=np.int32)
    for i, row in enumerate(tqdm(rows, total=len(dataset), desc="Reading lengths", delay=1.0, leave=False)):
        lengths[i] = token_count(row, column, f"row {i}", COUNT_OTHERS)
    return lengths


def token_count(row: Any, column: str, where: str, otherwise: str = "") -> int:
    """Return the tokens of a row, 0 for None; ``where`` names it in errors, which end with what to do ``otherwise``.

    Raises:
        ValueError: the row has no such column, or it is no flat list of integers.
        TypeError: the row has no columns.
    """
    if not isinstance(row, Mapping):
        raise TypeError(
            f"{where}=<{type(row).__name__}> has no columns; expected a dict with {column!r}. "
            f"Give dicts: {{{column!r}: [...], 'labels': ...}}. {otherwise}".rstrip()
        )
    if column not in row:
        raise _missing(column, list(row), where, otherwise)
    tokens = row[column]
    if tokens is not None and not _are_token_ids(tokens):
        raise _not_tokens(column, f"like {reprlib.repr(tokens)} in {where}", otherwise)
    return 0 if tokens is None else len(tokens)


def _are_token_ids(tokens: Any) -> bool:
    """Return whether a cell is one flat list, array or tensor of integers."""
    dtype = getattr(tokens, "dtype", None)
    if dtype is not None:  # a numpy array or a torch tensor
        return "int" in str(dtype) and len(tokens.shape) == 1
    if not isinstance(tokens, Sequence) or isinstance(tokens, str):
        return False
    return all(issubclass(kind, (int, np.integer)) and kind is not bool for kind in set(map(type, tokens)))


def _missing(
    column: str, known: Sequence[Any], where: str = "the dataset", otherwise: str = COUNT_OTHERS
) -> ValueError:
    fix = f'Tokenise text first: dataset.map(lambda row: tokenizer(row["text"])). {otherwise}'.rstrip()
    answers = sorted({"chosen_ids", "rejected_ids", "completion_ids", "KL_completion_ids"}.intersection(known))
    if answers:  # of TRL, after the prompt where there is one
        counts = ", ".join(f"token_lengths(dataset, {name!r})" for name in answers)
        prompt = "token_lengths(dataset, 'prompt_ids') + " * ("prompt_ids" in known)
        fix = f"Tokenised already: pass lengths={prompt}numpy.max([{counts}], axis=0)"
    return ValueError(
        f"column={column!r} is not in {where}; expected one of {sorted(known, key=str)}."
        f"{did_you_mean(column, map(str, known))} {fix}"
    )


def _not_tokens(column: str, found: str, otherwise: str = COUNT_OTHERS) -> ValueError:
    return ValueError(
        f"column={column!r} does not hold token ids but values {found}; expected one flat list of integers per row. "
        f'Tokenise text without return_tensors: dataset.map(lambda row: tokenizer(row["text"])). {otherwise}'.rstrip()
    )
