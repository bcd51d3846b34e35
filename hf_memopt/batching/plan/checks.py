"""Check the settings of buckets, samplers, views and streams."""

from __future__ import annotations

import operator
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hf_memopt.plain_data import Count, CountOrZero, check_value, checked_array, shown

__all__ = [
    "check_batch_limits",
    "check_counts",
    "check_integers",
    "check_rank",
    "check_seed",
    "check_too_long",
    "checked_boundaries",
    "checked_lengths",
    "checked_position",
    "unknown_boundaries",
]


MOST = {name: Annotated[int, range(1, 2**20 + 1)] for name in ("world_size", "pad_to_multiple_of")}
"""Limits of counts that set the length of arrays, so that a mistyped one does not allocate gigabytes."""


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
                'dataset.filter(lambda row: row["input_ids"])'
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
    boundaries: NDArray[Any], max_tokens: int | None = None, n_buckets: int | Literal["auto"] = "auto"
) -> NDArray[np.int64]:
    """Return the limits as int64.

    Raises:
        ValueError: they do not ascend from 1, exceed ``max_tokens``, or come with a number of buckets.
    """
    is_ascending = boundaries.ndim == 1 and boundaries.size > 0 and boundaries.dtype.kind in "iu"
    if not is_ascending or boundaries[0] < 1 or (np.diff(boundaries) <= 0).any():
        raise unknown_boundaries(boundaries.tolist())
    if not isinstance(n_buckets, str) or n_buckets != "auto":
        raise ValueError(
            f"n_buckets={shown(n_buckets)}, boundaries={shown(boundaries.tolist())} both set the number of buckets; "
            "expected one of them. Leave n_buckets out"
        )
    if max_tokens is not None and boundaries[-1] > max_tokens:
        raise ValueError(
            f"boundaries[-1]={int(boundaries[-1])} is above max_tokens={max_tokens}; expected every limit to fit into "
            f"one batch. Pass max_tokens={int(boundaries[-1])} or more"
        )
    return boundaries.astype(np.int64)


def unknown_boundaries(boundaries: Any) -> ValueError:
    """Return the error for boundaries that are not ascending limits."""
    return ValueError(
        f"boundaries={shown(boundaries)} is invalid; expected 'auto' or ascending integers of 1 or more. "
        "Pass boundaries=[64, 128, 256]"
    )


def check_batch_limits(batch_size: int | None, max_tokens: int | None) -> None:
    """Raise ValueError unless exactly one of the two limits is given and is 1 or more."""
    if (batch_size is None) == (max_tokens is None):
        raise ValueError(
            f"batch_size={shown(batch_size)}, max_tokens={shown(max_tokens)}; expected exactly one of them. "
            "Pass batch_size=32 (examples per batch) or max_tokens=4096 (padded tokens per batch)"
        )
    name, value = ("batch_size", batch_size) if max_tokens is None else ("max_tokens", max_tokens)
    check_counts(**{name: value})


def check_counts(**counts: Any) -> None:
    """Raise ValueError unless every value is an integer of 1 or more, of Python or of numpy."""
    for name, value in counts.items():
        check_value(name, _plain(value), MOST.get(name, Count), example=1 if name == "world_size" else 32)


def checked_position(position: Any, size: int, item: str = "an example") -> int:
    """Return a position in a view of ``size`` items, counted from its begin.

    Raises:
        TypeError: not an integer, a slice for example.
        IndexError: outside the view.
    """
    try:
        index = operator.index(position)
    except TypeError:
        raise TypeError(
            f"position={shown(position)} is not an integer; expected the position of {item}. "
            "Read several with: [view[i] for i in range(3)]"
        ) from None
    if not -size <= index < size:
        raise IndexError(f"position={index} is not {item} of this view; expected 0 to {size - 1}")
    return index % size


def check_seed(seed: Any, name: str = "seed") -> None:
    """Raise ValueError unless ``seed`` is an integer that keys a Philox generator."""
    check_value(name, _plain(seed), CountOrZero, example=0)


def check_rank(rank: Any, world_size: int) -> None:
    """Raise ValueError unless ``rank`` is None or one of ``world_size`` processes."""
    check_value("rank", rank, Annotated[int, range(world_size)] | None, 0)


def check_too_long(too_long: Any) -> None:
    """Raise ValueError unless it is one of the two ways to treat examples that fit into no batch."""
    check_value("too_long", too_long, Literal["error", "drop"], example="drop")


def _plain(value: Any) -> Any:
    """Return a numpy integer as one of Python."""
    return int(value) if isinstance(value, np.integer) else value
