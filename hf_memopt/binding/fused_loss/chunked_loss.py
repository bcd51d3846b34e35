"""The cross entropy of a linear layer's output, chunk by chunk of its rows, with the gradients made on the way.

Of all logits only one chunk exists at a time, and only rows with a label are computed: under masked language modelling
15 % of them. When a chunk's logits are there, so is all that their gradients need; they are multiplied with the hidden
states and with the weight at once, and the chunk is freed. The backward pass has only to scale what is there by the
gradient of the loss, in place. That is three products in all, as many as stock's, and no logits computed twice.

float16 is the exception: a gradient scaler multiplies the loss so that small gradients can be represented, and those
made before the scale is known would be lost. There, the backward pass computes each chunk's logits once more.

Bytes, of a chunk of ``rows x vocabulary`` elements: logits in the model's dtype and in that of the loss, then the
log-softmax, which becomes the gradient in place. At most two of the loss's dtype exist at a time. The gradient of the
weight has the weight's dtype, as in stock.

torch's own ``F.linear_cross_entropy`` (2.13) is not used: it computes every row, labelled or not, and has nothing
between the product and the loss, not even the cast to float32 that almost every model of transformers does.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from hf_memopt.binding.fused_loss.expression import Expression, Pointwise, Product, backpropagate, evaluate

__all__ = ["CHUNK_BYTES", "Loss", "chunked_cross_entropy"]

CHUNK_BYTES = 64 * 2**20
"""Logits of one chunk, in the dtype of the loss, unless the hidden states are larger: the products of a chunk must be
large enough to keep a GPU busy, and a chunk no larger than the hidden states, which exist anyway, changes little.
"""
_SLICE_BYTES = 64 * 2**20  # of a weight's gradient that is added in another dtype than its own


@dataclass(frozen=True, slots=True)
class Loss:
    """Which loss of which logits.

    Attributes:
        expression: what is done to the outputs of the products.
        dtypes: the dtype of each product's output.
        chunk_bytes: the most bytes of the logits of one chunk, in the dtype that the loss reads; None: the bytes of the
            hidden states, at least ``CHUNK_BYTES``.
        ignore_index: the label of rows that are left out.
        mean: divide by the number of labelled rows.
        smoothing: the share of the label spread evenly over the vocabulary.
        softmax: the dtype of the log-softmax, which autocast may widen.
    """

    expression: Expression
    dtypes: tuple[torch.dtype, ...]
    chunk_bytes: int | None
    ignore_index: int
    mean: bool
    smoothing: float
    softmax: torch.dtype

    @property
    def in_backward(self) -> bool:
        """Whether gradients have to wait for the scale that they are multiplied with."""
        return torch.float16 in self.dtypes

    def rows(self, hidden: torch.Tensor, vocabulary: int) -> int:
        """Return the most rows of one chunk."""
        most = self.chunk_bytes or max(CHUNK_BYTES, hidden.nbytes)
        return max(1, most // (vocabulary * self.expression.dtype.itemsize))


def chunked_cross_entropy(products: tuple[Product, ...], target: torch.Tensor, loss: Loss) -> torch.Tensor:
    """Return the loss, a scalar in float32 or float64, from hidden states (rows, hidden) and labels (rows,)."""
    flat: list[torch.Tensor | None] = []
    for product in products:
        flat += [product.hidden.reshape(-1, product.hidden.shape[-1]), product.weight, product.bias]
    found: torch.Tensor = _ChunkedCrossEntropy.apply(loss, target, *flat)  # type: ignore[no-untyped-call]
    return found


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Loss, target: torch.Tensor, *flat: torch.Tensor | None) -> torch.Tensor:
        needed = ctx.needs_input_grad[2:]
        ctx.loss, ctx.found = loss, None
        if loss.in_backward and any(needed):
            ctx.save_for_backward(target, *flat)
            return _Chunks(loss, target, flat, (False,) * len(flat)).run(None)
        chunks = _Chunks(loss, target, flat, needed)
        total = chunks.run(None)
        ctx.found, ctx.factor = chunks.gradients(), 1 if loss.mean else max(1, chunks.count)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.loss.in_backward:
            target, *flat = ctx.saved_tensors
            chunks = _Chunks(ctx.loss, target, tuple(flat), ctx.needs_input_grad[2:])
            chunks.run(gradient)
            return (None, None, *chunks.gradients())
        if ctx.found is None:
            raise RuntimeError(
                "loss.backward() was called a second time and the gradients of the first were given away; expected one "
                "backward pass, or retain_graph=True in all but the last. Call loss.backward(retain_graph=True) first"
            )
        gradient = gradient * ctx.factor
        if _keeps_graph():  # else there is no second gradient of the vocabulary's size
            return (None, None, *(None if found is None else found * gradient for found in ctx.found))
        found, ctx.found = ctx.found, None
        return (None, None, *(None if each is None else each.mul_(gradient) for each in found))


def _keeps_graph() -> bool:
    """Return whether the backward pass that runs was asked to retain its graph.

    ``_get_current_graph_task_keep_graph`` is private, pinned by a test, seen in torch 2.6 to 2.13; torch's own compiled
    functions ask it for the same reason.
    """
    ask = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if ask is None else bool(ask())


class _Layer:
    """One linear layer: its input (rows, hidden) and parameters, and the gradients of those that need one."""

    def __init__(self, parts: tuple[Any, ...], dtype: torch.dtype, needed: tuple[bool, ...]) -> None:
        hidden, weight, bias = parts
        self.hidden: torch.Tensor = hidden.detach()
        self.needed = needed
        self._weight_dtype, self._bias_dtype = weight.dtype, None if bias is None else bias.dtype
        self.dtype = dtype
        # 16-bit copies under autocast; made without its cache, which would keep them without their graph.
        self.weight: torch.Tensor = weight.detach().to(dtype)
        self.bias: torch.Tensor | None = None if bias is None else bias.detach().to(dtype)
        self.gradients: list[torch.Tensor | None] = [None, None, None]

    def logits(self, part: Any) -> torch.Tensor:
        """Return the output for some rows."""
        return F.linear(self.hidden[part].to(self.dtype), self.weight, self.bias)

    def allocate(self, all_rows: bool, accumulated: torch.dtype) -> None:
        """Make the gradients that are filled part by part; ``all_rows``: each row will get one."""
        if self.needed[0]:
            self.gradients[0] = (torch.empty_like if all_rows else torch.zeros_like)(self.hidden)
        if self.needed[1] and self._weight_dtype != self.dtype:
            self.gradients[1] = torch.zeros_like(self.weight, dtype=self._weight_dtype)
        if self.needed[2] and self.bias is not None:
            self.gradients[2] = torch.zeros_like(self.bias, dtype=accumulated)

    def add(self, part: Any, of_logits: torch.Tensor) -> None:
        """Add the gradients of some rows."""
        of_hidden, of_weight, of_bias = self.gradients
        if of_hidden is not None:
            of_hidden[part] = (of_logits @ self.weight).to(of_hidden.dtype)
        if of_bias is not None:
            of_bias += of_logits.sum(0, dtype=of_bias.dtype)
        if not self.needed[1]:
            return
        rows, hidden = of_logits.t(), self.hidden[part].to(self.dtype)
        if of_weight is None:
            self.gradients[1] = rows @ hidden
        elif of_weight.dtype == self.dtype:
            of_weight.addmm_(rows, hidden)
        else:  # a slice at a time, so that no whole product is made beside the gradient
            size = max(1, _SLICE_BYTES // (hidden.shape[1] * hidden.dtype.itemsize))
            for start in range(0, len(rows), size):
                of_weight[start : start + size] += rows[start : start + size] @ hidden

    def finished(self) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients in the dtypes of what they belong to."""
        of_hidden, of_weight, of_bias = self.gradients
        if self.needed[1] and of_weight is None:  # no row has a label
            of_weight = torch.zeros_like(self.weight)
        return of_hidden, of_weight, None if of_bias is None else of_bias.to(self._bias_dtype)


class _Chunks:
    """One pass over the labelled rows, and the gradients that it makes."""

    def __init__(self, loss: Loss, target: torch.Tensor, flat: tuple[Any, ...], needed: tuple[bool, ...]) -> None:
        self.loss, self.target, self.count = loss, target, 0
        self.layers = [
            _Layer(flat[3 * i : 3 * i + 3], dtype, needed[3 * i : 3 * i + 3]) for i, dtype in enumerate(loss.dtypes)
        ]
        self.learns = any(needed)
        self.accumulated = torch.float64 if loss.expression.dtype == torch.float64 else torch.float32

    def run(self, gradient: torch.Tensor | None) -> torch.Tensor:
        """Return the loss; make gradients, scaled by that of the loss if it is given."""
        parts, self.count = self._parts()
        total = torch.zeros((), dtype=self.accumulated, device=self.target.device)
        # That of the mean, for the sum as well, which most models divide by the number of labels: 16 bits are then
        # rounded as in stock. Unscaled, the gradient of each label's own logit is nearly -1, and rounding it errs to
        # the same side in every row.
        scale: torch.Tensor | float = 1 / max(1, self.count)
        if gradient is not None:
            scale = gradient * scale if self.loss.mean else gradient
        for layer in self.layers:
            layer.allocate(len(self.target) == self.count, self.accumulated)
        with _without_autocast(self.target.device.type):
            for part in parts:
                total += self._run_part(part, scale)
        if not self.loss.mean:
            return total
        return total / self.count if self.count else total * float("nan")  # a mean over nothing, as in stock

    def _run_part(self, part: Any, scale: torch.Tensor | float) -> torch.Tensor:
        """Add the gradients of some rows; return their loss. What is made for them is freed at the end."""
        log_probabilities, kept = self._log_probabilities(part)
        labels = self.target[part].unsqueeze(1)
        total = self._sum(log_probabilities, labels)
        if self.learns:
            of_logits = self._gradient(log_probabilities, labels, scale)
            del log_probabilities  # its memory is the gradient's, or free
            outputs: list[torch.Tensor | None] = [None] * len(self.layers)
            backpropagate(self.loss.expression, of_logits, kept, outputs)
            for layer, output in zip(self.layers, outputs, strict=True):
                assert output is not None  # each product is in the expression
                layer.add(part, output)
        return total

    def gradients(self) -> tuple[torch.Tensor | None, ...]:
        """Return the gradient of each hidden state, weight and bias; None where none is needed."""
        return tuple(found for layer in self.layers for found in layer.finished())

    def _parts(self) -> tuple[list[slice] | list[torch.Tensor], int]:
        """Return the rows of each chunk and the number of labelled rows; meta tensors count as labelled everywhere."""
        total = len(self.target)
        labelled = None
        if not self.target.is_meta:
            labelled = (self.target != self.loss.ignore_index).nonzero().squeeze(1)
            if len(labelled) == total:
                labelled = None
        count = total if labelled is None else len(labelled)
        if count == 0:
            return [], 0
        chunks = -(-count // self.loss.rows(self.layers[0].hidden, len(self.layers[0].weight)))
        size = -(-count // chunks)  # all of one size
        if labelled is None:
            return [slice(start, min(start + size, total)) for start in range(0, total, size)], count
        return list(torch.split(labelled, size)), count

    def _log_probabilities(self, part: Any) -> tuple[torch.Tensor, dict[Pointwise, torch.Tensor]]:
        """Return the log-softmax of some rows' logits in stock's dtype, and what the gradient needs."""
        kept: dict[Pointwise, torch.Tensor] = {}
        logits = evaluate(self.loss.expression, [layer.logits(part) for layer in self.layers], kept)
        return torch.log_softmax(logits, -1, dtype=self.loss.softmax), kept

    def _sum(self, log_probabilities: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        total = -log_probabilities.gather(1, labels).sum(dtype=self.accumulated)
        if (smoothing := self.loss.smoothing) == 0:
            return total
        spread = log_probabilities.sum(dtype=self.accumulated) / log_probabilities.shape[1]
        return total * (1 - smoothing) - spread * smoothing

    def _gradient(
        self, log_probabilities: torch.Tensor, labels: torch.Tensor, scale: torch.Tensor | float
    ) -> torch.Tensor:
        """Return the gradient of the logits that the loss read, which takes the memory of a wide log-softmax."""
        smoothing = self.loss.smoothing
        gradient = log_probabilities.to(self.accumulated).exp_().mul_(scale)
        if smoothing:
            gradient.sub_(scale * (smoothing / gradient.shape[1]))
        own = torch.full_like(labels, smoothing - 1, dtype=gradient.dtype).mul_(scale)
        return gradient.scatter_add_(1, labels, own).to(self.loss.softmax).to(self.loss.expression.dtype)


def _without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Return a region without autocast, since all that it would cast is cast; the meta device has none."""
    if not torch.amp.is_autocast_available(device_type) or not torch.is_autocast_enabled(device_type):
        return nullcontext()
    return torch.autocast(device_type, enabled=False)
