"""What a model does to its logits before the loss reads them, recognised and remembered.

There is no rule for an architecture: casts, scalings, an added constant, a softcap's tanh, and whatever chooses or
arranges whole rows. These run on a few rows, or a few columns, of the logits at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves  # private: pinned by a test, seen in torch 2.6 to 2.13

_T: Any = torch.Tensor  # whose properties a type checker takes for their values
_POINTWISE: dict[Any, str] = {
    **dict.fromkeys((_T.mul, _T.__mul__, _T.__rmul__, torch.mul, _T.multiply, torch.multiply), "multiply"),
    **dict.fromkeys((_T.div, _T.__truediv__, torch.div, _T.true_divide, torch.true_divide), "divide"),
    **dict.fromkeys((_T.add, _T.__add__, _T.__radd__, torch.add), "add"),
    **dict.fromkeys((_T.tanh, torch.tanh), "tanh"),
}
_IDENTITIES = {_T.contiguous, _T.clone, torch.clone}
_CASTS = {_T.to, _T.float, _T.double, _T.half, _T.bfloat16}
_RESHAPES = {_T.view, _T.reshape, torch.reshape, _T.flatten, torch.flatten}


ALL = slice(None)


class Step(NamedTuple):
    """What a model does to its logits before the loss reads them."""

    kind: str  # cast, multiply, divide, add, tanh, or rows: chooses or arranges rows
    dtype: torch.dtype  # of the result
    function: Callable[[torch.Tensor], torch.Tensor]  # the model's own operation
    # a number, or a tensor that is the same for every row; of rows: the numbers of those chosen, None if all are in
    # their order
    operand: Any = None

    def backward(self, gradient: torch.Tensor, result: torch.Tensor | None, columns: slice = ALL) -> torch.Tensor:
        """Return the gradient of the argument (..., columns), given that of the result; tanh reads its result."""
        if self.kind == "tanh":
            gradient = torch.ops.aten.tanh_backward(gradient, result)
        elif self.kind == "multiply":
            gradient = gradient * self.operand_of(columns)
        elif self.kind == "divide":
            gradient = gradient / self.operand_of(columns)
        return gradient

    def operand_of(self, columns: slice) -> Any:
        """Return the operand against (..., columns)."""
        if not isinstance(self.operand, torch.Tensor) or self.operand.dim() == 0:
            return self.operand
        flat = self.operand.reshape(-1)  # of (1, 1, vocabulary); one of (1,) decides on the dtype, as none of () does
        return flat[columns] if len(flat) > 1 else flat


def step_of(
    func: Any, before: tuple[Any, ...], like: torch.Tensor, after: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.Size, Step] | None:
    """Return the shape and the step that ``func(*before, like, *after, **kwargs)`` makes; None for other operations.

    Only the shape, dtype and device of ``like`` are read.
    """

    def function(logits: torch.Tensor) -> torch.Tensor:
        return func(*before, logits, *after, **kwargs)  # type: ignore[no-any-return]

    kind, shape, operand = "rows", like.shape, None
    one = result = torch.empty((1,) * like.dim(), dtype=like.dtype, device=like.device)  # which tells the dtype
    if func in _CASTS:
        kind, result = "cast", function(one)
    elif func in _POINTWISE:
        kind, operand = _POINTWISE[func], (*before, *after, None)[0]
        if kwargs or len(before + after) > 1 or (kind == "divide" and before):
            return None
        if kind != "tanh" and not _is_constant(operand, like):
            return None
        result = function(one)
    elif func in _RESHAPES:
        result = function(one.expand(like.shape))
        shape = result.shape
        if len(shape) < 2 or shape[-1] != like.shape[-1]:
            return None
    elif func is _T.__getitem__ and _leaves_columns(after[0], like):
        rows = torch.arange(shape[:-1].numel(), device=like.device).view(*shape[:-1], 1)[after[0]][..., 0]
        shape = torch.Size((*rows.shape, shape[-1]))
        is_chosen = any(isinstance(one, torch.Tensor) for one in tree_leaves(after))
        operand = rows.reshape(-1) if is_chosen or shape.numel() < like.numel() else None
    elif func not in _IDENTITIES:
        return None
    if (
        result.device != like.device
        or not result.is_floating_point()
        or (kind == "rows" and result.dtype != like.dtype)
    ):
        return None
    return shape, Step(kind, result.dtype, function, operand)


def _is_constant(operand: Any, like: torch.Tensor) -> bool:
    """Return whether an operand is the same for every row and needs no gradient."""
    if isinstance(operand, torch.Tensor):
        if operand.requires_grad or operand.dim() > like.dim() or (operand.dim() and operand.device != like.device):
            return False
        rows, last = operand.shape[:-1], operand.shape[-1:]
        return all(size == 1 for size in rows) and last in ((), (1,), (like.shape[-1],))
    return isinstance(operand, (int, float)) and not isinstance(operand, bool)


def _leaves_columns(given: Any, like: torch.Tensor) -> bool:
    """Return whether an index takes whole rows."""
    index = given if isinstance(given, tuple) else (given,)
    for i in index:
        is_known = isinstance(i, (int, slice, type(...), torch.Tensor)) and not isinstance(i, bool)
        if not is_known or (isinstance(i, torch.Tensor) and (i.dtype == torch.uint8 or i.is_floating_point())):
            return False
    chosen = [i for i in index if i is not ...]
    taken = sum(i.dim() if isinstance(i, torch.Tensor) and i.dtype == torch.bool else 1 for i in chosen)
    to_the_end = len(chosen) < len(index) and index[-1] is not ...
    return not (taken >= like.dim() or to_the_end) or (isinstance(chosen[-1], slice) and chosen[-1] == slice(None))
