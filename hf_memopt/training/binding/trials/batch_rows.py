"""The rows of a batch as a collator returns it: how many, and some of them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

BATCH_NAMES = ("input_ids", "inputs_embeds", "pixel_values", "input_features", "input_values", "labels")
"""The number of rows is read from the first of these that a batch has; else from its first tensor with a dimension."""


def row_count(inputs: Mapping[str, Any]) -> int:
    """Return the number of rows of a batch."""
    for value in (*(inputs.get(name) for name in BATCH_NAMES), *inputs.values()):
        if torch.is_tensor(value) and value.dim() > 0:
            return int(value.shape[0])
    raise ValueError(
        f"inputs=<{', '.join(inputs)}> have no tensor with a batch dimension; expected one of "
        f"{', '.join(BATCH_NAMES)}. Return tensors from the collator: return_tensors='pt'."
    )


def count_rows(inputs: Any) -> int:
    """The same of anything; 1 of what has no rows, such as a list."""
    try:
        return row_count(inputs) if isinstance(inputs, Mapping) else 1
    except ValueError:
        return 1


def copied_batch(inputs: Any) -> Any:
    """Return a copy of a batch and of the containers inside it; tensors are shared."""
    copied: Any = copy.copy(inputs)
    if isinstance(copied, list):
        copied[:] = map(copied_batch, copied)
    elif isinstance(inputs, Mapping):
        for name, value in inputs.items():
            if isinstance(value, (list, Mapping)):
                copied[name] = copied_batch(value)
    return copied


def select_rows(value: Any, rows: list[int] | slice, count: int) -> Any:
    """Return these rows of everything that has one entry for each of ``count`` rows: tensors, lists and tuples, in
    nested dicts too. A slice of a tensor is a view of it.
    """
    if isinstance(value, Mapping):
        return {key: select_rows(inner, rows, count) for key, inner in value.items()}
    if torch.is_tensor(value):
        return value[rows] if value.shape[:1] == (count,) else value
    if not isinstance(value, (list, tuple)) or len(value) != count:
        return value
    chosen = value[rows] if isinstance(rows, slice) else [value[row] for row in rows]
    return list(chosen) if isinstance(value, list) else tuple(chosen)
