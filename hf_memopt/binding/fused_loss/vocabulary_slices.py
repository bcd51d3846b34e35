"""The gradients of a cross entropy in the backward pass, a slice of the vocabulary at a time.

A slice of the weight's gradient is the product of the gradients of its logits with *all* hidden states, so it is made
once and rounded once. The gradient of the hidden states is the sum over the slices in float32, rounded once as well.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from hf_memopt.binding.fused_loss.expression import Pointwise, backpropagate, evaluate
from hf_memopt.binding.fused_loss.loss import Loss
from hf_memopt.binding.fused_loss.row_chunks import add_labels, wide_product, widened, without_autocast

__all__ = ["gradients_by_slices"]

_PRODUCT_BYTES = 8 * 2**20  # of a product that is added to the gradient of the hidden states


class _Layer:
    """One linear layer on the labelled rows, (count, hidden), and its gradients."""

    def __init__(
        self, parts: tuple[Any, ...], loss: Loss, index: int, labelled: torch.Tensor | None, needed: tuple[bool, ...]
    ) -> None:
        self._hidden, self._weight = parts[0].detach(), parts[1].detach()
        self._bias: torch.Tensor | None = None if parts[2] is None else parts[2].detach()
        self._dtype, self._labelled, self.vocabulary = loss.dtypes[index], labelled, len(parts[1])
        self.rows: torch.Tensor = (self._hidden if labelled is None else self._hidden[labelled]).to(self._dtype)
        self._of_weight = torch.empty_like(self._weight) if needed[1] else None
        self._of_bias = None if self._bias is None or not needed[2] else torch.empty_like(self._bias)
        self._of_rows = torch.zeros_like(self.rows, dtype=loss.dtype) if needed[0] else None

    def logits(self, columns: slice) -> torch.Tensor:
        """Return the output for some columns, (count, columns)."""
        bias = None if self._bias is None else self._bias[columns].to(self._dtype)
        return F.linear(self.rows, self._weight[columns].to(self._dtype), bias)

    def add(self, columns: slice, of_logits: torch.Tensor) -> None:
        """Add the gradients of some columns."""
        if self._of_rows is not None:
            weight = self._weight[columns].to(self._dtype)
            size = max(1, _PRODUCT_BYTES // (self._of_rows.shape[1] * self._of_rows.itemsize))
            for own, part in zip(torch.split(self._of_rows, size), torch.split(of_logits, size), strict=True):
                own += wide_product(part, weight, own.dtype)
        if self._of_bias is not None:
            self._of_bias[columns] = of_logits.sum(0, dtype=torch.float32)
        if self._of_weight is None:
            return
        if self._of_weight.dtype == self._dtype:
            torch.mm(of_logits.t(), self.rows, out=self._of_weight[columns])
        else:
            self._of_weight[columns] = of_logits.t() @ self.rows

    def finished(self) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients in the dtypes of what they belong to; rows without a label have none."""
        if self._of_rows is None:
            return None, self._of_weight, self._of_bias
        if self._labelled is None:
            return self._of_rows.to(self._hidden.dtype), self._of_weight, self._of_bias
        of_hidden = torch.zeros_like(self._hidden)
        of_hidden[self._labelled] = self._of_rows.to(of_hidden.dtype)
        return of_hidden, self._of_weight, self._of_bias


def gradients_by_slices(
    loss: Loss,
    rows: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor],
    flat: tuple[Any, ...],
    scale: torch.Tensor,
    needed: tuple[bool, ...],
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradient of each hidden state, weight and bias; None where none is needed.

    Args:
        loss: what was computed.
        rows: all labels; the numbers of the labelled rows (None for all) and their log-sums, as in ``RowChunks``.
        flat: hidden states (rows, hidden), weight and bias of each product.
        scale: of the loss of each row.
        needed: which of ``flat`` need a gradient.
    """
    target, labelled, log_sums = rows
    labels = (target if labelled is None else target[labelled]).unsqueeze(1)
    layers = [
        _Layer(flat[3 * i : 3 * i + 3], loss, i, labelled, needed[3 * i : 3 * i + 3]) for i in range(len(loss.dtypes))
    ]
    vocabulary, width = layers[0].vocabulary, loss.columns(layers[0].rows)
    with without_autocast(target.device.type):
        slices = [slice(start, min(start + width, vocabulary)) for start in range(0, vocabulary, width)]
        for columns in slices:
            _add_slice(loss, layers, columns, (labels, log_sums, scale))
    return tuple(found for layer in layers for found in layer.finished())


def _add_slice(
    loss: Loss, layers: list[_Layer], columns: slice, rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
) -> None:
    """Add the gradients of some columns to those of each layer. What is made for them is freed at the end."""
    labels, log_sums, scale = rows
    kept: dict[Pointwise, torch.Tensor] = {}
    logits = widened(evaluate(loss.expression, [layer.logits(columns) for layer in layers], kept, columns), loss)
    logits.sub_(log_sums.unsqueeze(1)).exp_().mul_(scale)
    add_labels(logits, labels, scale, loss.smoothing / layers[0].vocabulary, 1 - loss.smoothing, columns.start)
    outputs: list[torch.Tensor | None] = [None] * len(layers)
    held = [logits]
    del logits  # so that its memory is free when the gradient is cast
    backpropagate(loss.expression, held.pop(), kept, outputs, columns)
    for layer, output in zip(layers, outputs, strict=True):
        assert output is not None  # each product is in the expression
        layer.add(columns, output)
