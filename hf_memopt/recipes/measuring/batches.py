"""The batches of a measured run: their shapes, and batches of the longest rows of the data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from hf_memopt.batching.plan.lengths import token_lengths
from hf_memopt.binding.protocols import TrainingView

__all__ = ["BatchShape", "LongestRows"]

LOOKED_AT = 2000
"""Examples whose tokens are counted where a dataset makes them on the fly."""


@dataclass(frozen=True)
class BatchShape:
    """What a batch holds.

    Attributes:
        rows: examples.
        seq_len: tokens of a row, padding included; None without ``input_ids``.
        labels_length: tokens of a row of labels; None where labels are not a row of tokens.
        real: tokens that are not padding, a count on the batch's device; None where it is unknown.
    """

    rows: int
    seq_len: int | None
    labels_length: int | None
    real: torch.Tensor | None

    @property
    def padded_tokens(self) -> int:
        """Tokens of all rows, padding included; of other data the examples."""
        return self.rows * (self.seq_len or 1)

    @property
    def tokens(self) -> int | None:
        """Tokens without padding; waits for the device."""
        return None if self.real is None else int(self.real)

    @classmethod
    def of(cls, batch: Any) -> BatchShape:
        """Return the shape of a batch as the Trainer gets it."""
        items = batch.items() if isinstance(batch, Mapping) else ()
        tensors = {name: one for name, one in items if isinstance(one, torch.Tensor) and one.dim()}
        ids, mask, labels = (tensors.get(name) for name in ("input_ids", "attention_mask", "labels"))
        first = ids if ids is not None else next(iter(tensors.values()), None)
        real = None
        if mask is not None and ids is not None and mask.shape == ids.shape:
            real = mask.sum()
        elif ids is not None:
            real = torch.tensor(ids.numel())
        return cls(
            rows=0 if first is None else first.shape[0],
            seq_len=None if ids is None or ids.dim() < 2 else ids.shape[-1],
            labels_length=None if labels is None or labels.dim() < 2 else labels.shape[-1],
            real=real,
        )


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
