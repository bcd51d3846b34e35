"""``BatchShape``: rows and lengths of a batch as the Trainer gets it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["BatchShape"]


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
    def of(cls, batch: Any, *, count_tokens: bool = True) -> BatchShape:
        """Return the shape of a batch as the Trainer gets it; ``real`` is None unless tokens are counted."""
        items = batch.items() if isinstance(batch, Mapping) else ()
        tensors = {name: one for name, one in items if isinstance(one, torch.Tensor) and one.dim()}
        ids, mask, labels = (tensors.get(name) for name in ("input_ids", "attention_mask", "labels"))
        first = ids if ids is not None else next(iter(tensors.values()), None)
        real = None
        if count_tokens and mask is not None and ids is not None and mask.shape == ids.shape:
            real = mask.sum()
        elif count_tokens and ids is not None:
            real = torch.tensor(ids.numel())
        return cls(
            rows=0 if first is None else first.shape[0],
            seq_len=None if ids is None or ids.dim() < 2 else ids.shape[-1],
            labels_length=None if labels is None or labels.dim() < 2 else labels.shape[-1],
            real=real,
        )
