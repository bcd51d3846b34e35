"""Which cross entropy of which logits, and how many of them exist at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_memopt.binding.fused_loss.expression import Expression

__all__ = ["CHUNK_BYTES", "Loss"]

CHUNK_BYTES = 64 * 2**20
"""Logits that exist at a time, in the dtype of the loss, unless the hidden states are larger: the products of a chunk
must be large enough to keep a GPU busy, and one no larger than the hidden states, which exist anyway, changes little.
"""
_COLUMNS = 64  # a slice is a multiple: aligned for matrix units


@dataclass(frozen=True, slots=True)
class Loss:
    """Which loss of which logits.

    Attributes:
        expression: what is done to the outputs of the products.
        dtypes: the dtype of each product's output.
        chunk_bytes: the most bytes of the logits that exist at a time, in the dtype of the loss; None: the bytes of the
            hidden states, at least ``CHUNK_BYTES``.
        ignore_index: the label of rows that are left out.
        mean: divide by the number of labelled rows.
        smoothing: the share of the label spread evenly over the vocabulary.
    """

    expression: Expression
    dtypes: tuple[torch.dtype, ...]
    chunk_bytes: int | None
    ignore_index: int
    mean: bool
    smoothing: float

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which softmax, loss and their sums are computed."""
        return torch.float64 if self.expression.dtype == torch.float64 else torch.float32

    def rows(self, hidden: torch.Tensor, vocabulary: int) -> int:
        """Return the most rows of one chunk."""
        return max(1, self._most_bytes(hidden) // (vocabulary * self.dtype.itemsize))

    def columns(self, hidden: torch.Tensor) -> int:
        """Return the most columns of one slice of the vocabulary, or as many rows of the weight.

        Half of the bytes are left for what exists beside the slice: its 16-bit copy, the gradient of the hidden states.
        """
        most = self._most_bytes(hidden) // 2 // (max(hidden.shape) * self.dtype.itemsize)
        return most - most % _COLUMNS if most > _COLUMNS else max(1, most)

    def _most_bytes(self, hidden: torch.Tensor) -> int:
        return self.chunk_bytes or max(CHUNK_BYTES, hidden.nbytes)
