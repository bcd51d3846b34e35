"""Operations of torch that consist of others, written so that a function mode sees each part.

Autocast on CUDA works below Python: it casts the arguments of every ATen operator that it lists, also inside a function
that calls several. A ``TorchFunctionMode`` is off while it handles a call and so sees the outer function only. What is
run here instead allocates the same and calls the parts one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F

__all__ = ["OPENED", "cross_entropy", "grouped_product"]


def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Run ``cross_entropy_loss`` in the steps of its C++ code, each of which autocast may cast.

    The log-softmax gets the dtype of the logits as an argument; ``nll_loss`` is cast to float32, which it saves.

    Source: torch 2.13, ``aten/src/ATen/native/LossNLL.cpp``.

    Args:
        logits: (batch, classes, ...) or (classes,).
        target: (batch, ...) classes, or probabilities in the shape of ``logits``.
        weight: (classes,).
        reduction: 0 none, 1 mean, 2 sum.
        ignore_index: the class of targets that are ignored.
        label_smoothing: the share of the loss that is spread over all classes.
    """
    dim = 1 if logits.dim() > 1 else 0
    classes = logits.shape[dim]
    found = F.log_softmax(logits, dim, dtype=logits.dtype)
    wide = None if weight is None else weight.view([-1 if axis == dim else 1 for axis in range(logits.dim())])
    if logits.shape == target.shape:
        if label_smoothing > 0:
            target = target * (1 - label_smoothing) + label_smoothing / classes
        product = found * target if wide is None else found * target * wide
        if reduction == 0:
            return -product.sum(dim)
        return -product.sum() / (logits.numel() / classes) if reduction == 1 else -product.sum()
    name = ("none", "mean", "sum")[reduction]
    loss = F.nll_loss(found, target, weight, ignore_index=ignore_index, reduction=name)
    if label_smoothing <= 0:
        return loss
    smooth = -(found if wide is None else found * wide).sum(dim)
    ignored = target == ignore_index
    smooth.masked_fill_(ignored, 0.0)
    if reduction:
        smooth = smooth.sum()
    if reduction == 1 and weight is None:
        smooth = smooth / (~ignored).sum()
    elif reduction == 1 and weight is not None:
        smooth = smooth / weight.gather(0, target.masked_fill(ignored, 0).flatten()).sum()
    return (1 - label_smoothing) * loss + smooth * (label_smoothing / classes)


def grouped_product(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the handler of a grouped matrix product: CUDA takes more dtypes than the meta device.

    Source: torch 2.13, ``aten/src/ATen/native/cuda/GroupedBlas.cpp``, ``_grouped_mm_cuda``.
    """

    def grouped(rows: Any, weights: Any, *args: Any, **kwargs: Any) -> Any:
        options = {name: value for name, value in kwargs.items() if name != "offs" and value is not None}
        if rows.dtype == torch.bfloat16 or rows.dim() != 2 or weights.dim() != 3 or options:
            return function(rows, weights, *args, **kwargs)
        return _GroupedProduct.apply(rows, weights)  # type: ignore[no-untyped-call]

    return grouped


class _GroupedProduct(torch.autograd.Function):
    """Rows (tokens, inputs), sorted by expert, times weights (experts, inputs, outputs): one product for each row."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows, weights)
        return rows @ weights[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        rows, weights = ctx.saved_tensors
        of_rows = grad @ weights[0].t() if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return of_rows, None
        of_weights = torch.empty_like(weights)
        torch.mm(rows.t(), grad, out=of_weights[0])
        return of_rows, of_weights


def _opened() -> dict[Any, FunctionType]:
    """Return a copy of each Python function of ``torch.nn.functional`` that does not call the mode for itself.

    Each of them first calls ``has_torch_function`` and, under a mode, passes itself to the mode. The copies have
    globals in which that function returns False; the functions that they call are unchanged and reach the mode. The
    names are pinned by a test, seen in torch 2.6 to 2.13.
    """
    asking = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    found = {**vars(F), **dict.fromkeys(asking, lambda *_: False)}
    copies = {}
    for function in vars(F).values():
        if not isinstance(function, FunctionType) or function.__globals__ is not vars(F):
            continue
        if not set(asking).isdisjoint(function.__code__.co_names):
            copy = FunctionType(
                function.__code__, found, function.__name__, function.__defaults__, function.__closure__
            )
            copy.__kwdefaults__ = function.__kwdefaults__
            copies[function] = copy
    return copies


OPENED = _opened()
"""The copy by the function, such as ``F.normalize`` and ``F.multi_head_attention_forward``."""
