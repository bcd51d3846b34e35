"""What a model does to its logits before the loss reads them, as data that runs on a few rows at a time.

An expression is a tree: the products with a linear layer's weights (``Product``, one for an ordinary head, several with
LoRA on it), and over them casts, scalings, an added bias, a softcap's tanh and sums of two products. ``evaluate`` runs
it for a chunk of rows, ``backpropagate`` takes the gradient of the result back to each product. The rules of
differentiation are written out, rather than left to autograd, since each one is a line and autograd would keep
tensors of the chunk's size that none of them needs: only tanh keeps its result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

__all__ = ["Expression", "Logits", "Pointwise", "Product", "Sum", "backpropagate", "evaluate"]


class Product(NamedTuple):
    """The input and the parameters of one linear layer whose output is logits.

    ``dtype`` is that of its output: under autocast another one than that of the parameters.
    """

    hidden: torch.Tensor  # (..., hidden)
    weight: torch.Tensor  # (vocabulary, hidden)
    bias: torch.Tensor | None  # (vocabulary,)
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, eq=False)
class Logits:
    """The output of the product with this index."""

    index: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, eq=False)
class Pointwise:
    """An operation on each element: ``kind`` is one of cast, multiply, divide, add, tanh.

    ``operand`` is a number, or a tensor that is the same for every row.
    """

    kind: str
    source: Expression
    dtype: torch.dtype
    operand: torch.Tensor | float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Sum:
    """The sum of two expressions of one shape."""

    one: Expression
    other: Expression
    dtype: torch.dtype


Expression = Logits | Pointwise | Sum


_ALL = slice(None)


def evaluate(
    expression: Expression,
    outputs: list[torch.Tensor | None],
    kept: dict[Pointwise, torch.Tensor],
    columns: slice = _ALL,
) -> torch.Tensor:
    """Return the logits that the loss reads, (rows, columns).

    Args:
        expression: what the model did.
        outputs: the output of each product, (rows, columns); each is taken out when it is used, so that its memory
            is free as soon as nothing needs it.
        kept: gets what ``backpropagate`` needs.
        columns: which part of the vocabulary the outputs are of.
    """
    if isinstance(expression, Logits):
        output, outputs[expression.index] = outputs[expression.index], None
        assert output is not None  # a product is in the tree once
        return output
    if isinstance(expression, Sum):
        return evaluate(expression.one, outputs, kept, columns) + evaluate(expression.other, outputs, kept, columns)
    source = evaluate(expression.source, outputs, kept, columns)
    if expression.kind == "cast":
        return source.to(expression.dtype)
    if expression.kind == "tanh":
        kept[expression] = torch.tanh(source)
        return kept[expression]
    operand = _operand(expression, columns)
    if expression.kind == "add":
        return source + operand
    return source * operand if expression.kind == "multiply" else source / operand


def backpropagate(
    expression: Expression,
    gradient: torch.Tensor,
    kept: dict[Pointwise, torch.Tensor],
    found: list[torch.Tensor | None],
    columns: slice = _ALL,
) -> None:
    """Put the gradient of each product's output into ``found``, in the output's dtype, given that of the result."""
    gradient = gradient.to(expression.dtype)
    while isinstance(expression, Pointwise):
        if expression.kind == "multiply":
            gradient = gradient * _operand(expression, columns)
        elif expression.kind == "divide":
            gradient = gradient / _operand(expression, columns)
        elif expression.kind == "tanh":
            gradient = torch.ops.aten.tanh_backward(gradient, kept.pop(expression))
        expression = expression.source
        gradient = gradient.to(expression.dtype)
    if isinstance(expression, Sum):
        backpropagate(expression.one, gradient, kept, found, columns)
        backpropagate(expression.other, gradient, kept, found, columns)
        return
    found[expression.index] = gradient


def _operand(expression: Pointwise, columns: slice) -> torch.Tensor | float:
    """Return the operand against (rows, columns)."""
    operand = expression.operand
    assert operand is not None
    if isinstance(operand, torch.Tensor) and operand.numel() > 1:
        return operand.reshape(-1)[columns]  # of (1, 1, vocabulary)
    return operand.reshape(()) if isinstance(operand, torch.Tensor) else operand
