"""Batches of the longest rows of the data, for a measured run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa

from hf_memopt.batching.plan.lengths import token_lengths
from hf_memopt.binding.protocols import TrainingView

__all__ = ["LongestRows"]

LOOKED_AT = 2000
"""Examples whose tokens are counted where a dataset makes them on the fly."""


class LongestRows:
    """Batches of the longest rows of what the training loader reads; none for views, which begin with the largest.

    Attributes:
        note: what was not looked at; "" for nothing.
    """

    def __init__(self) -> None:
        self.note = ""
        self._loader: Any = None
        self._order: np.ndarray | None = None

    def reading(self, before: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``get_train_dataloader`` whose loader is remembered."""

        def get_train_dataloader(*args: Any, **kwargs: Any) -> Any:
            self._loader = before(*args, **kwargs)
            self._order = self._by_length(getattr(self._loader, "dataset", None))
            return self._loader

        return get_train_dataloader

    def batches(self, batch_size: int, number: int) -> list[Any] | None:
        """Return ``number`` batches, the longest rows first; None where lengths are unknown or the order is a view's.

        Of fewer rows than that the longest are taken again.
        """
        if self._order is None:
            return None
        rows = np.resize(self._order, batch_size * number).reshape(number, batch_size)
        dataset, collate = self._loader.dataset, self._loader.collate_fn
        return [collate([dataset[int(index)] for index in of_batch]) for of_batch in rows]

    def _by_length(self, dataset: Any) -> np.ndarray | None:
        if isinstance(dataset, TrainingView) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            return None
        table = getattr(getattr(dataset, "data", None), "table", None)
        is_read = isinstance(table, pa.Table) or isinstance(dataset, list)
        rows = dataset if is_read else [dataset[index] for index in range(min(len(dataset), LOOKED_AT))]
        if len(rows) < len(dataset):
            self.note = f"the longest rows are those of the first {len(rows):,} of {len(dataset):,} examples"
        try:
            lengths = token_lengths(rows)
        except (ValueError, TypeError):  # images, sound: rows of one size
            return None
        return np.argsort(-lengths.astype(np.int64), kind="stable")
