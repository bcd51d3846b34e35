"""The cross entropy of a linear layer's output without its logits, and its gradients in one of two ways.

The loss runs over the rows that have a label, a chunk of rows at a time (``row_chunks``): under masked language
modelling that is 15 % of them. When are the gradients made?

* In the forward pass, where the head computes in float32 or float64. When a chunk's logits are there, so is all that
  their gradients need; the backward pass has only to scale them by the gradient of the loss, in place. That is three
  products in all, as many as stock's, and no logits computed twice.
* In the backward pass, where the head computes in 16 bits. What these round off depends on the scale of the gradients,
  which a gradient scaler, the number of labels of the whole step and accumulation decide after the forward pass; and
  what is added up in 16 bits chunk by chunk is rounded for each chunk. So the logits are computed once more, a slice
  of the vocabulary at a time (``vocabulary_slices``), and each gradient is rounded once, at the scale it has in stock.

A frozen head in bfloat16 is of the first kind: bfloat16 rounds alike at every scale, and all of the gradient of a row
of hidden states comes from one chunk. It is kept in float32 and rounded in the backward pass, once it is scaled: two
products, as in stock.

Bytes, of the ``rows x vocabulary`` logits of a chunk or slice: one copy in the dtype of the loss, which becomes the
gradient in place, and one in the model's dtype. The gradient of the weight has the weight's dtype, as in stock.

torch's own ``F.linear_cross_entropy`` (2.13) is not used: it computes every row, labelled or not, and has nothing
between the product and the loss, not even the cast to float32 that almost every model of transformers does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from hf_memopt.binding.fused_loss.expression import Product
from hf_memopt.binding.fused_loss.loss import Loss
from hf_memopt.binding.fused_loss.row_chunks import RowChunks
from hf_memopt.binding.fused_loss.vocabulary_slices import gradients_by_slices

__all__ = ["chunked_cross_entropy"]


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
        ctx.waits = _waits(loss, needed)
        chunks = RowChunks(loss, target, flat, (False,) * len(flat) if ctx.waits else needed)
        total = chunks.run()
        if ctx.waits:
            ctx.save_for_backward(target, chunks.labelled, chunks.log_sums, *flat)
        else:
            ctx.found = chunks.gradients()
            ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in flat]
        ctx.count = max(1, chunks.count)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.waits:
            target, labelled, log_sums, *flat = ctx.saved_tensors
            scale = gradient / ctx.count if ctx.loss.mean else gradient
            rows = (target, labelled, log_sums)
            return (None, None, *gradients_by_slices(ctx.loss, rows, tuple(flat), scale, ctx.needs_input_grad[2:]))
        if ctx.found is None:
            raise RuntimeError(
                "loss.backward() was called a second time and the gradients of the first were given away; expected one "
                "backward pass, or retain_graph=True in all but the last. Call loss.backward(retain_graph=True) first"
            )
        if not ctx.loss.mean:
            gradient = gradient * ctx.count
        found = ctx.found
        if _keeps_graph():
            scaled = [None if each is None else each * gradient for each in found]
        else:  # there is no second gradient of the vocabulary's size
            ctx.found = None
            scaled = [None if each is None else each.mul_(gradient) for each in found]
        rounded = (None if each is None else each.to(dtype) for each, dtype in zip(scaled, ctx.dtypes, strict=True))
        return (None, None, *rounded)


def _waits(loss: Loss, needed: tuple[bool, ...]) -> bool:
    """Return whether the gradients are made in the backward pass; ``needed`` as in ``RowChunks``."""
    narrow = {dtype for dtype in loss.dtypes if dtype.itemsize == 2}
    of_parameters = any(needed[1::3]) or any(needed[2::3])
    return bool(narrow) and any(needed) and (of_parameters or torch.float16 in narrow)


def _keeps_graph() -> bool:
    """Return whether the backward pass that runs was asked to retain its graph.

    ``_get_current_graph_task_keep_graph`` is private, pinned by a test, seen in torch 2.6 to 2.13; torch's own compiled
    functions ask it for the same reason.
    """
    ask = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if ask is None else bool(ask())
