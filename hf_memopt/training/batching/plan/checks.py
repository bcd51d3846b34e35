"""Check the settings of buckets, samplers and views."""

from __future__ import annotations

import operator
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hf_memopt.plain_data import Count, CountOrZero, check_value, checked_array, shown

_Few = Annotated[int, range(1, 2**20 + 1)]  # it sets the length of arrays: a mistyped one must not allocate gigabytes
_SETTINGS: dict[str, tuple[Any, Any]] = {  # what each must be, and an example
    **dict.fromkeys(("batch_size", "max_tokens", "row_tokens", "n_buckets", "max_length"), (Count, 32)),
    "world_size": (_Few, 1),
    "pad_to_multiple_of": (_Few, 32),
    **dict.fromkeys(("seed", "epoch"), (CountOrZero, 0)),  # they key a Philox generator
    "too_long": (Literal["error", "drop"], "drop"),
    "column": (str, "input_ids"),
}


def check_settings(**values: Any) -> None:
    """Raise ValueError unless each setting of that name is what it must be; integers may be numpy's."""
    for name, value in values.items():
        kind, example = _SETTINGS[name]
        check_value(name, plain_number(value), kind, example)


def checked_lengths(lengths: ArrayLike) -> NDArray[np.int32]:
    """Return the lengths as int32, not copied if they are that already.

    Raises:
        ValueError: not one integer of 1 or more per example.
    """
    found = checked_array("lengths", lengths)
    if found.ndim != 1 or found.size == 0:
        raise ValueError(
            f"lengths=<array of shape {found.shape}> is not one length per example; expected shape (examples,) with at "
            "least one. Pass token_lengths(dataset)"
        )
    check_integers(found)
    for row in (int(found.argmin()), int(found.argmax())):
        if found[row] == 0:
            raise ValueError(
                f"lengths[{row}]=0 is an example without tokens (empty or null); expected 1 or more. Drop such rows: "
                "kept = numpy.flatnonzero(token_lengths(dataset, column)), and dataset.select(kept) or, of a list, "
                "[dataset[i] for i in kept]"
            )
        if not 0 < found[row] < 2**31:
            raise ValueError(
                f"lengths[{row}]={int(found[row])} is not a number of tokens; expected 1 to 2**31 - 1. "
                "Pass token_lengths(dataset)"
            )
    return found.astype(np.int32, copy=False)


def check_integers(lengths: NDArray[Any]) -> None:
    """Raise ValueError unless an array holds integers."""
    if lengths.dtype.kind not in "iu":
        raise ValueError(
            f"lengths=<array of {lengths.dtype}> is not a number of tokens; expected integers. "
            "Pass token_lengths(dataset)"
        )


def checked_boundaries(
    boundaries: ArrayLike, max_tokens: int | None = None, n_buckets: int | Literal["auto"] = "auto"
) -> NDArray[np.int64]:
    """Return the limits as int64.

    Raises:
        ValueError: they do not ascend from 1, exceed ``max_tokens``, or come with a number of buckets.
    """
    found = checked_array("boundaries", boundaries)
    is_ascending = found.ndim == 1 and found.size > 0 and found.dtype.kind in "iu"
    if not is_ascending or found[0] < 1 or (np.diff(found) <= 0).any():
        raise ValueError(
            f"boundaries={shown(found.tolist())} is invalid; expected 'auto' or ascending integers of 1 or more. "
            "Pass boundaries=[64, 128, 256]"
        )
    if not isinstance(n_buckets, str) or n_buckets != "auto":
        raise ValueError(
            f"n_buckets={shown(n_buckets)}, boundaries={shown(found.tolist())} both set the number of buckets; "
            "expected one of them. Leave n_buckets out"
        )
    if max_tokens is not None and found[-1] > max_tokens:
        raise ValueError(
            f"boundaries[-1]={int(found[-1])} is above max_tokens={max_tokens}; expected every limit to fit into "
            f"one batch. Pass max_tokens={int(found[-1])} or more"
        )
    return found.astype(np.int64)


def check_batch_limits(batch_size: int | None, max_tokens: int | None, pad_to_multiple_of: int = 1) -> None:
    """Raise ValueError unless exactly one of the two limits is given, is 1 or more, and has room for a padded row."""
    if (batch_size is None) == (max_tokens is None):
        raise ValueError(
            f"batch_size={shown(batch_size)}, max_tokens={shown(max_tokens)}; expected exactly one of them. "
            "Pass batch_size=32 (examples per batch) or max_tokens=4096 (padded tokens per batch)"
        )
    check_settings(**({"batch_size": batch_size} if max_tokens is None else {"max_tokens": max_tokens}))
    check_settings(pad_to_multiple_of=pad_to_multiple_of)
    if max_tokens is not None and max_tokens < pad_to_multiple_of:
        raise ValueError(
            f"max_tokens={max_tokens} is less than pad_to_multiple_of={pad_to_multiple_of}, to which every row is "
            f"padded; expected {pad_to_multiple_of} or more. Pass max_tokens={1024 * pad_to_multiple_of}"
        )


def plain_number(value: Any) -> Any:
    """Return an integer of numpy as Python's, which JSON takes, and anything else as it is."""
    return int(value) if isinstance(value, np.integer) else value


def checked_position(position: Any, size: int, item: str = "an example") -> int:
    """Return a position in a view of ``size`` items, counted from its begin; raise IndexError outside the view."""
    index = operator.index(position)
    if not -size <= index < size:
        raise IndexError(f"position={index} is not {item} of this view; expected 0 to {size - 1}")
    return index % size
