"""The stand-in on the meta device for bitsandbytes' 4-bit linear, with the allocations of its CUDA operations.

It saves nothing for backward, and both passes hold a dequantised copy of the weight while they multiply (backward two,
where the weight was loaded in another dtype than the gradient has).

Assumed: 5 to 1536 rows of 16 bits may use a fused kernel since bitsandbytes 0.50, by a table of GPUs, whose forward
needs no copy; backward makes one anyway. The copy is counted. Fewer rows use the fused kernel on every GPU, and so
here.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from bitsandbytes.nn.modules import Linear4bit, Params4bit

from hf_memopt.memory.quantized.kernels import dequantized
from hf_memopt.memory.quantized.quantized_linear import cast_bias, copy_bias_and_mode, matmul

__all__ = ["Linear4bitStandIn"]

# _gemm_4bit_use_custom_cuda of bitsandbytes/backends/cuda/ops.py (0.50): so many rows are fused on every NVIDIA GPU
_FUSED_ROWS = 4  # of 16 bits
_FUSED_ROWS_FP32 = 7  # and never more
_NESTED_BLOCK = 256  # values of absmax that share a statistic; quantize_4bit has no other


class Linear4bitStandIn(Linear4bit):
    """A quantised ``Linear4bit`` without values.

    Args:
        module: the linear to replace, quantised or not.
    """

    weight: Any  # Params4bit
    absmax: torch.Tensor
    offset: torch.Tensor

    def __init__(self, module: Linear4bit) -> None:
        weight: Any = module.weight  # Params4bit
        super().__init__(  # type: ignore[no-untyped-call]
            module.in_features,
            module.out_features,
            bias=module.bias is not None,
            compute_dtype=module.compute_dtype if module.compute_type_is_set else None,
            compress_statistics=weight.compress_statistics,
            quant_type=weight.quant_type,
            quant_storage=weight.quant_storage,
            device="meta",
        )
        quant_state = getattr(weight, "quant_state", None) or getattr(module, "quant_state", None)
        self.weight_dtype: torch.dtype = weight.dtype if quant_state is None else quant_state.dtype
        self.blocksize: int = weight.blocksize
        self.compress_statistics: bool = weight.compress_statistics
        elements = self.in_features * self.out_features
        packed = (elements + 1) // (weight.quant_storage.itemsize * 2)
        packed_weight = torch.empty((packed, 1), dtype=weight.quant_storage, device="meta")
        self.weight = _like(weight, packed_weight)
        self._add_statistics(-(-elements // self.blocksize))
        copy_bias_and_mode(module, self)

    def _add_statistics(self, blocks: int) -> None:
        """Register what ``QuantState`` holds; every module has its own tables."""
        sizes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {"code": ((16,), torch.float32)}
        if self.compress_statistics:
            sizes["absmax"] = ((blocks,), torch.uint8)
            sizes["offset"] = ((), torch.float32)
            sizes["nested_absmax"] = ((-(-blocks // _NESTED_BLOCK),), torch.float32)
            sizes["nested_code"] = ((256,), torch.float32)
        else:
            sizes["absmax"] = ((blocks,), torch.float32)
        for name, (size, dtype) in sizes.items():
            self.register_buffer(name, torch.empty(size, dtype=dtype, device="meta"), persistent=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> Linear4bitStandIn:
        """Copy as any module; ``Params4bit`` itself cannot be copied on the meta device."""
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        memo[id(self.weight)] = _like(self.weight, torch.empty_like(self.weight.data))
        copied.__setstate__(copy.deepcopy(self.__dict__, memo))  # type: ignore[no-untyped-call]
        return copied

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the output's shape and dtype, with the temporaries of the CUDA operation."""
        input_dtype = x.dtype
        compute_dtype = self.compute_dtype
        if compute_dtype is None and input_dtype != torch.float16:
            compute_dtype = input_dtype  # as Linear4bit.set_compute_type chooses it, at the first forward pass
        if compute_dtype is not None:
            x = x.to(compute_dtype)
        cast_bias(self, x.dtype)
        return self._multiply(x).to(input_dtype)

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        """Mirror ``bitsandbytes.matmul_4bit``."""
        bias = self.bias
        if torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)):
            return _MatMul4bit.apply(x, bias, self)  # type: ignore[no-any-return, no-untyped-call]
        return self.multiply(x, bias)

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Mirror the kernel of ``bitsandbytes::gemm_4bit`` (``_dequant_linear_fallback`` or the fused one)."""
        fused_rows = _FUSED_ROWS_FP32 if x.dtype == torch.float32 else _FUSED_ROWS
        if x.numel() <= fused_rows * self.in_features and self.in_features % self.blocksize == 0:
            x = x.contiguous()
            return x.new_empty((*x.shape[:-1], self.out_features))
        if self.compress_statistics:  # both are held until the product is computed
            _dequantized = torch.empty_like(self.absmax, dtype=torch.float32)
            _absmax = _dequantized + self.offset
        return F.linear(x, self._dequantized(x.dtype), bias)

    def dequantize(self) -> torch.Tensor:
        """Mirror ``bitsandbytes.functional.dequantize_4bit``: the weight in the dtype in which it was loaded."""
        if self.compress_statistics:
            _absmax = torch.empty_like(self.absmax, dtype=torch.float32)
            _absmax += self.offset
        return self._dequantized(self.weight_dtype)

    def _dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        return dequantized(self.weight.data, self.absmax, (self.out_features, self.in_features), dtype)


def _like(weight: Any, packed: torch.Tensor) -> Params4bit:
    """Return a quantised weight with the settings of another ``Params4bit`` and no values."""
    return Params4bit(
        packed,
        requires_grad=False,
        blocksize=weight.blocksize,
        compress_statistics=weight.compress_statistics,
        quant_type=weight.quant_type,
        quant_storage=weight.quant_storage,
        bnb_quantized=True,
    )


class _MatMul4bit(torch.autograd.Function):
    """Mirror ``bitsandbytes.autograd._functions.MatMul4Bit``: it saves the quantised weight and nothing else."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: torch.Tensor | None, linear: Linear4bitStandIn) -> torch.Tensor:
        ctx.linear = linear
        ctx.bias_dtype = None if bias is None else bias.dtype
        return linear.multiply(x, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        grad_x = grad_bias = None
        if ctx.needs_input_grad[1]:
            grad_bias = grad.sum(0, dtype=ctx.bias_dtype)
        if ctx.needs_input_grad[0]:
            grad_x = matmul(grad, ctx.linear.dequantize().to(grad.dtype))
        return grad_x, grad_bias, None
