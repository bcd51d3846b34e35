"""The cross entropy of a linear layer's output without its logits, and its gradients in one of two ways.

The loss runs over the rows that have a label, a chunk of rows at a time: under masked language modelling that is 15 %
of them. When are the gradients made?

* In the forward pass, where the head computes in float32 or float64 (``loss_by_rows``). When a chunk's logits are
  there, so is all that their gradients need; the backward pass has only to scale them by the gradient of the loss, in
  place. That is three products in all, as many as stock's, and no logits computed twice.
* In the backward pass, where the head computes in 16 bits (``gradients_by_slices``). What these round off depends on
  the scale of the gradients, which a gradient scaler, the number of labels of the whole step and accumulation decide
  after the forward pass; and what is added up in 16 bits chunk by chunk is rounded for each chunk. So the logits are
  computed once more, a slice of the vocabulary at a time: a slice of the weight's gradient is the product of the
  gradients of its logits with *all* hidden states, made once and rounded once, at the scale it has in stock. The
  gradient of the hidden states is the sum over the slices in float32, rounded once as well.

A frozen head in bfloat16 is of the first kind: bfloat16 rounds alike at every scale, and all of the gradient of a row
of hidden states comes from one chunk. It is kept in float32 and rounded in the backward pass, once it is scaled: two
products, as in stock.

Bytes, of the ``rows x vocabulary`` logits of a chunk or slice: one copy in the dtype of the loss, which becomes the
gradient in place, and one in the model's dtype. The gradient of the weight has the weight's dtype, as in stock.

torch's own ``F.linear_cross_entropy`` (2.13) is not used: it computes every row, labelled or not, and has nothing
between the product and the loss, not even the cast to float32 that almost every model of transformers does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from hf_memopt.training.binding.fused_loss.steps import ALL, Step

CHUNK_BYTES = 64 * 2**20
"""Logits that exist at a time, in the dtype of the loss, unless the hidden states are larger: the products of a chunk
must be large enough to keep a GPU busy, and one no larger than the hidden states, which exist anyway, changes little.
"""
_COLUMNS = 64  # a slice is a multiple: aligned for matrix units
_PRODUCT_BYTES = 8 * 2**20  # of a product that is added to the gradient of the hidden states

Tensors = Sequence[Any]
"""Of a linear layer, tensors or None: input (rows, hidden), weight (vocabulary, hidden) and bias (vocabulary,)."""


@dataclass(frozen=True, slots=True)
class Loss:
    """Which cross entropy of which logits, and how many of them exist at a time."""

    steps: tuple[Step, ...]  # what is done to each logit, the output of the linear layer, in order
    output_dtype: torch.dtype  # the dtype of that output; under autocast another one than that of the weight
    # the most bytes of the logits that exist at a time, in the dtype of the loss; None: the bytes of the hidden states,
    # at least `CHUNK_BYTES`
    chunk_bytes: int | None
    ignore_index: int  # the label of rows that are left out
    mean: bool  # divide by the number of labelled rows
    smoothing: float  # the share of the label spread evenly over the vocabulary

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which softmax, loss and their sums are computed."""
        read = self.steps[-1].dtype if self.steps else self.output_dtype
        return torch.float64 if read == torch.float64 else torch.float32

    def waits(self, needed: Sequence[bool]) -> bool:
        """Return whether the gradients of the ``needed`` tensors are made in the backward pass."""
        of_parameters, of_hidden = any(needed[1:]), needed[0]
        return self.output_dtype.itemsize == 2 and (of_parameters or (of_hidden and self.output_dtype == torch.float16))

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

    def read(self, held: list[torch.Tensor], kept: dict[int, torch.Tensor], columns: slice = ALL) -> torch.Tensor:
        """Return the logits that the loss reads, (rows, columns), in its dtype; they may be overwritten.

        ``held``, the output of the layer, is taken out, so that its memory is free as soon as nothing needs it;
        ``kept`` gets the results of tanh, by the number of the step.
        """
        logits = held.pop()
        for number, step in enumerate(self.steps):
            if step.kind == "cast":
                logits = logits.to(step.dtype)
            elif step.kind == "tanh":
                logits = kept[number] = torch.tanh(logits)
            elif step.kind == "add":
                logits = logits + step.operand_of(columns)
            else:
                operand = step.operand_of(columns)
                logits = logits * operand if step.kind == "multiply" else logits / operand
        found = logits.to(self.dtype)
        return found.clone() if any(found is result for result in kept.values()) else found

    def backpropagate(
        self, held: list[torch.Tensor], kept: dict[int, torch.Tensor], columns: slice = ALL
    ) -> torch.Tensor:
        """Return the gradient of the layer's output, given that of what ``read`` returned; autograd would keep more."""
        gradient = held.pop()
        for number, step in reversed(list(enumerate(self.steps))):
            gradient = gradient.to(step.dtype)
            gradient = step.backward(gradient, kept.pop(number, None), columns)
        return gradient.to(self.output_dtype)


def loss_by_rows(
    loss: Loss, target: torch.Tensor, rows: torch.Tensor | None, tensors: Tensors, needed: Sequence[bool]
) -> tuple[torch.Tensor, Tensors, list[torch.Tensor | None]]:
    """Run over the labelled rows, a chunk at a time.

    Args:
        loss: what is computed.
        target: the labels.
        rows: which row of the hidden states each label belongs to; None: all, in their order.
        tensors: of the linear layer.
        needed: which of them need a gradient.

    Returns:
        The loss; labels, rows and the logarithms of the sums of exponentials, of the labelled rows (meta tensors count
        as labelled everywhere); the gradients of the *mean* over these rows, that of 16-bit hidden states in float32.
    """
    labelled = None if target.is_meta else (target != loss.ignore_index).nonzero().squeeze(1)
    if labelled is not None and len(labelled) < len(target):
        target, rows = target[labelled], labelled if rows is None else rows[labelled]
    del labelled
    (hidden, weight, bias), dtype, count = tensors, loss.output_dtype, len(target)
    # 16-bit copies under autocast; made without its cache, which would keep them without their graph.
    weight = weight.to(dtype)
    bias = bias if bias is None else bias.to(dtype)
    make = torch.empty_like if rows is None else torch.zeros_like
    of_hidden = make(hidden, dtype=torch.float32 if dtype.itemsize == 2 else hidden.dtype) if needed[0] else None
    of_weight: torch.Tensor | None = None
    of_bias = None if bias is None or not needed[2] else torch.zeros_like(bias)

    def add(chosen: Any, of_output: torch.Tensor) -> None:
        nonlocal of_weight
        if of_hidden is not None and rows is None:
            of_hidden[chosen] = wide_product(of_output, weight, of_hidden.dtype)
        elif of_hidden is not None:  # a row may be chosen twice
            of_hidden.index_add_(0, chosen, wide_product(of_output, weight, of_hidden.dtype))
        if of_bias is not None:
            of_bias.add_(of_output.sum(0))
        if of_weight is not None:
            of_weight.addmm_(of_output.t(), hidden[chosen])
        elif needed[1]:
            of_weight = of_output.t() @ hidden[chosen]

    def run(part: slice) -> tuple[torch.Tensor, torch.Tensor]:
        kept: dict[int, torch.Tensor] = {}
        chosen, labels, scale = part if rows is None else rows[part], target[part].unsqueeze(1), 1 / count
        held = [F.linear(hidden[chosen].to(dtype), weight, bias)]
        # One tensor, (rows, vocabulary), is in turn: logits less the largest, their exponentials, the gradient.
        logits, smoothing = loss.read(held, kept), loss.smoothing
        largest = logits.amax(1, keepdim=True)
        total = logits.sub_(largest).gather(1, labels).sum() * (smoothing - 1)
        if smoothing:
            total -= logits.sum() * (smoothing / logits.shape[1])
        sums = logits.exp_().sum(1, keepdim=True)
        log_sums = sums.log()
        total += log_sums.sum()
        if any(needed):
            logits.mul_(scale / sums)
            _add_labels(logits, labels, scale, smoothing / logits.shape[1], 1 - smoothing)
            held.append(logits)
            del logits  # so that its memory is free when the gradient is cast
            add(chosen, loss.backpropagate(held, kept))
        return total, (log_sums + largest).squeeze(1)

    total = torch.zeros((), dtype=loss.dtype, device=target.device)
    log_sums = [total.new_empty(0)]
    chunks = max(1, -(-count // loss.rows(hidden, len(weight))))
    size = max(1, -(-count // chunks))  # all of one size
    with without_autocast(target.device.type):
        for start in range(0, count, size):
            of_chunk, log_sums_of_chunk = run(slice(start, min(start + size, count)))
            total += of_chunk
            log_sums.append(log_sums_of_chunk)
    if loss.mean:
        total = total / count if count else total * float("nan")  # a mean over nothing, as in stock
    if needed[1] and of_weight is None:  # no row has a label
        of_weight = torch.zeros_like(weight)
    return total, (target, rows, torch.cat(log_sums)), [of_hidden, of_weight, of_bias]


def loss_without_gradients(
    loss: Loss, target: torch.Tensor, rows: torch.Tensor | None, tensors: Tensors, dtype: torch.dtype
) -> torch.Tensor:
    """Return the loss of logits of ``dtype`` as ``cross_entropy`` itself has it, for evaluation; see ``loss_by_rows``.

    The loss of every row, and their sum, are those of torch's own operations in the same order. So it is stock's bit
    for bit in one chunk, and in several where the product of some rows has the bits of the product of all.
    """
    (hidden, weight, bias), count = tensors, len(target)
    weight, bias = weight.to(loss.output_dtype), None if bias is None else bias.to(loss.output_dtype)
    chunks, losses = max(1, -(-count // loss.rows(hidden, len(weight)))), []
    size = max(1, -(-count // chunks))
    for part in (slice(start, start + size) for start in range(0, max(count, 1), size)):
        with without_autocast(target.device.type):
            held = [F.linear(hidden[part if rows is None else rows[part]].to(loss.output_dtype), weight, bias)]
            logits = loss.read(held, {}).to(dtype)
        losses.append(F.cross_entropy(logits, target[part], ignore_index=loss.ignore_index, reduction="none"))
        del logits  # before those of the next chunk
    own = torch.where(target == loss.ignore_index, -100, 0)  # the only class of each row, whatever label is ignored
    reduction = "mean" if loss.mean else "sum"
    return F.nll_loss(-torch.cat(losses).unsqueeze(1), own, reduction=reduction)


def gradients_by_slices(
    loss: Loss, labelled: Tensors, scale: torch.Tensor, tensors: Tensors, needed: Sequence[bool]
) -> list[torch.Tensor | None]:
    """Return the gradients of the ``needed`` tensors of the linear layer.

    Args:
        loss: what was computed.
        labelled: labels, rows and log-sums of the labelled rows, from ``loss_by_rows``.
        scale: of the loss of each row.
        tensors: of the linear layer.
        needed: which of them need a gradient.
    """
    labels, rows, log_sums = labelled
    hidden, weight, bias = tensors
    dtype, vocabulary = loss.output_dtype, len(weight)
    hidden_rows = (hidden if rows is None else hidden[rows]).to(dtype)
    of_weight = torch.empty_like(weight) if needed[1] else None
    of_bias = torch.empty_like(bias) if needed[2] else None
    of_rows = torch.zeros_like(hidden_rows, dtype=loss.dtype) if needed[0] else None

    def run(columns: slice) -> None:
        kept: dict[int, torch.Tensor] = {}
        held = [F.linear(hidden_rows, weight[columns].to(dtype), None if bias is None else bias[columns].to(dtype))]
        logits = loss.read(held, kept, columns).sub_(log_sums.unsqueeze(1)).exp_().mul_(scale)
        _add_labels(logits, labels.unsqueeze(1), scale, loss.smoothing / vocabulary, 1 - loss.smoothing, columns.start)
        held.append(logits)
        del logits  # so that its memory is free when the gradient is cast
        of_output = loss.backpropagate(held, kept, columns)
        if of_rows is not None:
            factor = weight[columns].to(dtype)
            size = max(1, _PRODUCT_BYTES // (of_rows.shape[1] * of_rows.itemsize))
            for own, part in zip(torch.split(of_rows, size), torch.split(of_output, size), strict=True):
                own += wide_product(part, factor, own.dtype)
        if of_bias is not None:
            of_bias[columns] = of_output.sum(0, dtype=torch.float32)
        if of_weight is not None and of_weight.dtype == dtype:
            torch.mm(of_output.t(), hidden_rows, out=of_weight[columns])
        elif of_weight is not None:
            of_weight[columns] = of_output.t() @ hidden_rows

    with without_autocast(labels.device.type):
        width = loss.columns(hidden_rows)
        for start in range(0, vocabulary, width):
            run(slice(start, min(start + width, vocabulary)))
    of_hidden = None if of_rows is None else of_rows.to(hidden.dtype)
    if of_hidden is not None and rows is not None:
        of_hidden = torch.zeros_like(hidden).index_add_(0, rows, of_hidden)
    return [of_hidden, of_weight, of_bias]


def gradient_of_logits(
    loss: Loss, target: torch.Tensor, scale: torch.Tensor, make_logits: Callable[[], torch.Tensor]
) -> torch.Tensor:
    """Return the gradient of the logits that the loss reads, (rows, vocabulary); ``scale``: of the loss of each row."""
    logits, labels, smoothing = make_logits(), target.unsqueeze(1), loss.smoothing
    gradient = torch.softmax(logits.to(loss.dtype), 1).mul_(scale)
    _add_labels(gradient, labels, scale, smoothing / logits.shape[1], 1 - smoothing)
    return gradient.mul_(labels != loss.ignore_index).to(logits.dtype)


def _add_labels(
    gradient: torch.Tensor, labels: torch.Tensor, scale: torch.Tensor | float, spread: float, own: float, first: int = 0
) -> None:
    """Subtract the labels' distribution from a scaled softmax (rows, columns), in place.

    ``labels``: (rows, 1). Label smoothing gives ``spread`` to each column, and leaves ``own`` to the label besides.
    ``first``: number of the first column.
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
