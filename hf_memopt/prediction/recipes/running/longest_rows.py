"""The longest rows of what a Trainer reads, whose batches have the peaks of a whole run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa

from hf_memopt.training.batching import token_lengths
from hf_memopt.training.binding import TrainingView

LOOKED_AT = 2000
"""Examples whose tokens are counted where a dataset makes them on the fly."""


class LongestRows:
    """Batches of the longest rows of what the training loader reads; none for views, which begin with the largest."""

    def __init__(self) -> None:
        self.note = ""  # what was not looked at
        self.longest_row: int | None = None  # tokens
        self._loader: Any = None
        self._order: np.ndarray | None = None

    def reading(self, before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._loader = before(*args, **kwargs)
        lengths = self.lengths(getattr(self._loader, "dataset", None))
        if lengths is not None and len(lengths):
            self._order, self.longest_row = np.argsort(-lengths, kind="stable"), int(lengths.max())
        return self._loader

    def batches(self, batch_size: int, number: int) -> list[Any] | None:
        """Return ``number`` batches, each of the longest rows; None where lengths are unknown or the order is a view's.

        The longest batch of a run may be any of a step, so all of a step are: gradients are there from the second on.
        """
        if self._order is None:
            return None
        rows = np.resize(self._order[:batch_size], (number, batch_size))
        dataset, collate = self._loader.dataset, self._loader.collate_fn
        return [collate([dataset[int(index)] for index in of_batch]) for of_batch in rows]

    def lengths(self, dataset: Any) -> np.ndarray | None:
        """Return the tokens of the rows, or of those that are looked at; None where they are unknown, and of a view."""
        if isinstance(dataset, TrainingView) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            return None
        table = getattr(getattr(dataset, "data", None), "table", None)
        is_made = isinstance(table, pa.Table) and dataset.format["type"] == "custom"  # by a transform
        is_read = (isinstance(table, pa.Table) and not is_made) or isinstance(dataset, list)
        rows = dataset if is_read else [dataset[index] for index in range(min(len(dataset), LOOKED_AT))]
        if len(rows) < len(dataset):
            self.note = f"the longest rows are those of the first {len(rows):,} of {len(dataset):,} examples"
        try:
            return token_lengths(rows).astype(np.int64)
        except (ValueError, TypeError):  # images, sound: rows of one size
            return None
