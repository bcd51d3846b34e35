"""The cross entropy of the labelled rows, chunk by chunk, with the gradients made on the way where they can be."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F

from hf_memopt.binding.fused_loss.expression import Pointwise, backpropagate, evaluate
from hf_memopt.binding.fused_loss.loss import Loss

__all__ = ["RowChunks", "add_labels", "wide_product", "widened", "without_autocast"]


class _Layer:
    """One linear layer: its input (rows, hidden) and parameters, and the gradients of those that need one."""

    def __init__(self, parts: tuple[Any, ...], loss: Loss, index: int, needed: tuple[bool, ...]) -> None:
        dtype = loss.dtypes[index]
        self.hidden: torch.Tensor = parts[0].detach()
        # 16-bit copies under autocast; made without its cache, which would keep them without their graph.
        self.weight: torch.Tensor = parts[1].detach().to(dtype)
        self._bias: torch.Tensor | None = None if parts[2] is None else parts[2].detach().to(dtype)
        self._needed = needed
        self._of_hidden_dtype = torch.float32 if dtype.itemsize == 2 else self.hidden.dtype
        self.gradients: list[torch.Tensor | None] = [None, None, None]

    def logits(self, part: Any) -> torch.Tensor:
        """Return the output for some rows."""
        return F.linear(self.hidden[part].to(self.weight.dtype), self.weight, self._bias)

    def allocate(self, all_rows: bool) -> None:
        """Make the gradients that are filled part by part; ``all_rows``: each row will get one."""
        if self._needed[0]:
            make = torch.empty_like if all_rows else torch.zeros_like
            self.gradients[0] = make(self.hidden, dtype=self._of_hidden_dtype)
        if self._needed[2] and self._bias is not None:
            self.gradients[2] = torch.zeros_like(self._bias)

    def add(self, part: Any, of_logits: torch.Tensor) -> None:
        """Add the gradients of some rows."""
        of_hidden, of_weight, of_bias = self.gradients
        if of_hidden is not None:
            of_hidden[part] = wide_product(of_logits, self.weight, self._of_hidden_dtype)
        if of_bias is not None:
            of_bias += of_logits.sum(0)
        if not self._needed[1]:
            return
        if of_weight is None:
            self.gradients[1] = of_logits.t() @ self.hidden[part]
        else:
            of_weight.addmm_(of_logits.t(), self.hidden[part])

    def finished(self) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of the hidden states, the weight and the bias."""
        of_hidden, of_weight, of_bias = self.gradients
        if self._needed[1] and of_weight is None:  # no row has a label
            of_weight = torch.zeros_like(self.weight)
        return of_hidden, of_weight, of_bias


class RowChunks:
    """One pass over the labelled rows, and the gradients that it makes.

    Attributes:
        labelled: the numbers of the labelled rows; None if all are.
        count: how many they are.
        log_sums: the logarithm of the sum of each labelled row's exponentials, (count,), after ``run``.
    """

    def __init__(self, loss: Loss, target: torch.Tensor, flat: tuple[Any, ...], needed: tuple[bool, ...]) -> None:
        self.loss, self.target = loss, target
        self._layers = [
            _Layer(flat[3 * i : 3 * i + 3], loss, i, needed[3 * i : 3 * i + 3]) for i in range(len(loss.dtypes))
        ]
        self._learns = any(needed)
        self.labelled = self._find_labelled()
        self.count = len(target) if self.labelled is None else len(self.labelled)
        self.log_sums = torch.empty(0, dtype=loss.dtype, device=target.device)

    def run(self) -> torch.Tensor:
        """Return the loss; make the gradients of the mean over the labelled rows, to be scaled to those of the loss."""
        total = torch.zeros((), dtype=self.loss.dtype, device=self.target.device)
        log_sums = []
        for layer in self._layers:
            layer.allocate(self.labelled is None)
        with without_autocast(self.target.device.type):
            for part in self._parts():
                of_part, log_sums_of_part = self._run_part(part)
                total += of_part
                log_sums.append(log_sums_of_part)
        if log_sums:
            self.log_sums = torch.cat(log_sums)
        if not self.loss.mean:
            return total
        return total / self.count if self.count else total * float("nan")  # a mean over nothing, as in stock

    def gradients(self) -> tuple[torch.Tensor | None, ...]:
        """Return the gradient of each hidden state, weight and bias; None where none is needed."""
        return tuple(found for layer in self._layers for found in layer.finished())

    def _find_labelled(self) -> torch.Tensor | None:
        """Return the numbers of the labelled rows, None for all; meta tensors count as labelled everywhere."""
        if self.target.is_meta:
            return None
        labelled = (self.target != self.loss.ignore_index).nonzero().squeeze(1)
        return None if len(labelled) == len(self.target) else labelled

    def _parts(self) -> list[slice] | list[torch.Tensor]:
        """Return the rows of each chunk."""
        if self.count == 0:
            return []
        chunks = -(-self.count // self.loss.rows(self._layers[0].hidden, len(self._layers[0].weight)))
        size = -(-self.count // chunks)  # all of one size
        if self.labelled is None:
            return [slice(start, min(start + size, self.count)) for start in range(0, self.count, size)]
        return list(torch.split(self.labelled, size))

    def _run_part(self, part: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss and the log-sums of some rows; add their gradients.

        One tensor, (rows, vocabulary), is in turn: logits less the largest, their exponentials, the gradient.
        """
        kept: dict[Pointwise, torch.Tensor] = {}
        logits = widened(
            evaluate(self.loss.expression, [layer.logits(part) for layer in self._layers], kept), self.loss
        )
        labels, smoothing = self.target[part].unsqueeze(1), self.loss.smoothing
        largest = logits.amax(1, keepdim=True)
        total = logits.sub_(largest).gather(1, labels).sum() * (smoothing - 1)
        if smoothing:
            total -= logits.sum() * (smoothing / logits.shape[1])
        sums = logits.exp_().sum(1, keepdim=True)
        log_sums = sums.log()
        total += log_sums.sum()
        if self._learns:
            scale = 1 / max(1, self.count)
            add_labels(logits.mul_(scale / sums), labels, scale, smoothing / logits.shape[1], 1 - smoothing)
            outputs: list[torch.Tensor | None] = [None] * len(self._layers)
            held = [logits]
            del logits  # so that its memory is free when the gradient is cast
            backpropagate(self.loss.expression, held.pop(), kept, outputs)
            for layer, output in zip(self._layers, outputs, strict=True):
                assert output is not None  # each product is in the expression
                layer.add(part, output)
        return total, (log_sums + largest).squeeze(1)


def widened(logits: torch.Tensor, loss: Loss) -> torch.Tensor:
    """Return logits in the dtype of the loss that may be overwritten."""
    is_kept = isinstance(loss.expression, Pointwise) and loss.expression.kind == "tanh"
    return logits.to(loss.dtype, copy=is_kept)


def add_labels(
    gradient: torch.Tensor, labels: torch.Tensor, scale: torch.Tensor | float, spread: float, own: float, first: int = 0
) -> None:
    """Subtract the labels' distribution from a scaled softmax (rows, columns), in place.

    Args:
        gradient: softmax times ``scale``, of the columns from ``first`` on.
        labels: (rows, 1).
        scale: of the loss of each row.
        spread: the probability that label smoothing gives to each column.
        own: the probability that it leaves to the label, besides.
        first: number of the first column.
    """
    if spread:
        gradient.sub_(scale * spread)
    column = labels - first
    is_inside = (column >= 0) & (column < gradient.shape[1])
    share = is_inside.to(gradient.dtype).mul_(-own * scale)
    gradient.scatter_add_(1, column.clamp_(0, gradient.shape[1] - 1), share)


def wide_product(one: torch.Tensor, other: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the product of two matrices; of 16-bit ones in float32, in which it is summed anyway.

    ``out_dtype`` came with torch 2.8 and has no implementation on the CPU (2.13).
    """
    if one.itemsize > 2:
        return one @ other
    if one.device.type == "cpu":
        return one.to(dtype) @ other.to(dtype)
    if hasattr(torch.ops.aten.mm, "dtype"):
        return torch.mm(one, other, out_dtype=dtype)
    return one @ other  # rounded once for each chunk or slice


def without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Return a region without autocast, since all that it would cast is cast; the meta device has none."""
    if not torch.amp.is_autocast_available(device_type) or not torch.is_autocast_enabled(device_type):
        return nullcontext()
    return torch.autocast(device_type, enabled=False)
