"""The counts by which a loss may weigh the rows of a batch: labels, masks, weights, boxes, classes.

Pure functions on what a collator returns, for ``loss_rules``, which finds out which of them the loss uses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hf_memopt.binding.model_traits import IGNORED_LABEL
from hf_memopt.techniques.microbatching.splitting import row_count

__all__ = ["Counts", "row_counts", "row_shares", "spread"]

Counts = dict[str, NDArray[np.float64]]


def row_counts(inputs: Mapping[str, Any]) -> Counts:
    """Return every count by which a mean could weigh the rows, shape (rows,) each; waits for the device once.

    - ``rows``: 1 each.
    - ``labels`` and ``shifted labels``: integer labels other than -100; the second without the first of each row, which
      a causal language model does not predict.
    - every other input with one entry per row, by its name: its values other than -100, or how long the row's list is;
      and as ``sum of <name>`` its values added up, as those of a mask or a weight are.
    - ``labels == <class>``, where there is one label per row: 1 or 0.

    Examples:
        >>> found = row_counts({"labels": torch.tensor([[4, 5, 6], [7, -100, -100]])})
        >>> {name: found[name].tolist() for name in ("rows", "labels", "shifted labels")}
        {'rows': [1.0, 1.0], 'labels': [3.0, 1.0], 'shifted labels': [2.0, 0.0]}
    """
    rows = row_count(inputs)
    found: dict[str, torch.Tensor] = {}
    sizes: Counts = {"rows": np.ones(rows)}
    for name, value in _entries(inputs, rows):
        if not torch.is_tensor(value):
            sizes[name] = np.asarray(value, dtype=np.float64)
            continue
        columns = value.detach().reshape(rows, -1)  # (rows, all others)
        if not value.is_floating_point() and value.dtype != torch.bool:
            found[name] = (columns != IGNORED_LABEL).sum(1)
        if value.dim() <= 2:  # not pixels, not embeddings
            found[f"sum of {name}"] = columns.sum(1, dtype=torch.float32 if value.is_floating_point() else None)
    if "labels" in found:
        found["shifted labels"] = found.get("shift_labels", found["labels"])
        if "shift_labels" not in found and inputs["labels"].dim() > 1:
            found["shifted labels"] = (inputs["labels"][..., 1:].reshape(rows, -1) != IGNORED_LABEL).sum(1)
    if found:
        # one transfer for all; MPS has no float64
        table = torch.stack(
            [value.float() if value.device.type == "mps" else value.double() for value in found.values()]
        )
        sizes |= dict(zip(found, np.nan_to_num(table.cpu().numpy().astype(np.float64)), strict=True))
    if "labels" in found and inputs["labels"].dim() == 1:
        labels = sizes["sum of labels"]
        sizes |= {f"labels == {int(value)}": (labels == value).astype(np.float64) for value in np.unique(labels)}
    return sizes


def _entries(inputs: Mapping[str, Any], rows: int, within: str = "") -> Iterator[tuple[str, Any]]:
    """Yield everything with one entry per row, by name: tensors, and the length of each entry of lists (object
    detection).
    """
    for key, value in inputs.items():
        name = f"{within}{key}"
        if torch.is_tensor(value):
            if value.dim() > 0 and value.shape[0] == rows and not value.is_complex():
                yield name, value
        elif isinstance(value, Mapping):
            yield from _entries(value, rows, f"{name}.")
        elif isinstance(value, (list, tuple)) and len(value) == rows:
            if all(isinstance(entry, Mapping) for entry in value):
                for inner in value[0]:
                    yield f"{name}.{inner}", [_length(entry.get(inner)) for entry in value]
            else:
                yield name, list(map(_length, value))


def _length(entry: Any) -> int:
    if torch.is_tensor(entry):
        return int(entry.shape[0]) if entry.dim() > 0 else 1
    return len(entry) if isinstance(entry, (list, tuple)) else 1


def row_shares(rule: str, counts: Counts) -> NDArray[np.float64]:
    """Return the weight of each row's loss, shape (rows,); NaN where a count is negative, so it cannot be a weight.

    Args:
        rule: ``"sum"``, or a name among the counts.
        counts: of a batch.
    """
    if rule == "sum":
        return np.ones_like(counts["rows"])
    values = counts.get(rule, counts["rows"])
    if not values.any():
        values = counts["rows"]
    return values / values.sum() if (values >= 0).all() else np.full_like(values, np.nan)


def spread(counts: NDArray[np.float64], weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the counts per unit of weight, scaled to 0 ... 1; all 0 where counts and weights give the same mean.

    A row with a count but no weight is 1, a row with neither 0.

    Examples:
        >>> spread(np.array([2.0, 4.0, 9.0]), np.array([1.0, 2.0, 3.0])).tolist()
        [0.0, 0.0, 1.0]
    """
    has_weight = weights > 0
    found = np.where(has_weight, 0.0, counts != 0)
    ratios = counts[has_weight] / weights[has_weight]
    width = np.ptp(ratios) if ratios.size else 0.0
    if width > 1e-6 * np.abs(ratios).max(initial=0.0):
        found[has_weight] = (ratios - ratios.min()) / width
    return found
