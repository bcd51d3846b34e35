"""Kernels of bitsandbytes as operators without values: what they allocate and, for a step's time, read and write.

They are operators of torch, not plain functions, because a mode below autograd, such as ``StorageTracker``, sees
operators alone: ``torch.empty`` in their place would cost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["dequantized", "quantized_rows", "rescaled"]

_LIBRARY: Any = torch.library.Library("hf_memopt", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define("dequantized(Tensor packed, Tensor absmax, int[] size, ScalarType dtype) -> Tensor")
_LIBRARY.define("quantized_rows(Tensor input) -> (Tensor, Tensor)")
_LIBRARY.define("rescaled(Tensor product) -> Tensor")


def dequantized(packed: Tensor, absmax: Tensor, size: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a weight of 16 or 32 bits from the packed one and the largest value of each block."""
    found: Tensor = torch.ops.hf_memopt.dequantized(packed, absmax, size, dtype)
    return found


def quantized_rows(input: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scale of each row, shape (rows,), and the input in 8 bits."""
    scales, quantized = torch.ops.hf_memopt.quantized_rows(input)
    return scales, quantized


def rescaled(product: Tensor) -> Tensor:
    """Return the int32 product of 8-bit operands in float16."""
    found: Tensor = torch.ops.hf_memopt.rescaled(product)
    return found


def _dequantized(packed: Tensor, absmax: Tensor, size: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(size, dtype=dtype, device=packed.device)


def _quantized_rows(input: Tensor) -> tuple[Tensor, Tensor]:
    rows = input.numel() // input.shape[-1]
    scales = torch.empty(rows, device=input.device, dtype=torch.float32)
    return scales, torch.empty(input.shape, device=input.device, dtype=torch.int8)


def _rescaled(product: Tensor) -> Tensor:
    return torch.empty_like(product, dtype=torch.float16)


for _name, _function in (("dequantized", _dequantized), ("quantized_rows", _quantized_rows), ("rescaled", _rescaled)):
    _LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")
