"""Shared by the stand-ins of 4-bit and 8-bit linears: their bias, and the product of their backward pass."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["cast_bias", "copy_bias_and_mode", "matmul"]

# aten's own operator: the emulated autocast casts the operands of torch.matmul, but a backward pass is outside autocast
matmul = torch.ops.aten.matmul


def copy_bias_and_mode(module: nn.Linear, stand_in: nn.Linear) -> None:
    """Give the stand-in a bias of the module's dtype, and the module's mode."""
    if module.bias is not None:
        bias = torch.empty(module.out_features, dtype=module.bias.dtype, device="meta")
        stand_in.bias = nn.Parameter(bias, requires_grad=module.bias.requires_grad)
    stand_in.train(module.training)


def cast_bias(linear: nn.Linear, dtype: torch.dtype) -> None:
    """Cast the bias permanently, as the real linears do in their first forward pass."""
    if linear.bias is not None and linear.bias.dtype != dtype:
        linear.bias.data = linear.bias.data.to(dtype)
