"""The stand-in on the meta device for bitsandbytes' 8-bit linear, with the allocations of its CUDA operations.

Its input is held until the loss is freed. Assumed, where there is a threshold: no input value exceeds it. A column that
does costs 2 bytes per row until backward.
"""

from __future__ import annotations

from typing import Any

import torch
from bitsandbytes.nn.modules import Int8Params, Linear8bitLt

from hf_memopt.memory.quantized.kernels import quantized_rows, rescaled
from hf_memopt.memory.quantized.quantized_linear import cast_bias, copy_bias_and_mode, matmul

__all__ = ["Linear8bitStandIn"]


class Linear8bitStandIn(Linear8bitLt):
    """A quantised ``Linear8bitLt`` (``has_fp16_weights=False``) without values.

    Args:
        module: the linear to replace, quantised or not.
    """

    weight: Any  # Int8Params
    scales: torch.Tensor

    def __init__(self, module: Linear8bitLt) -> None:
        super().__init__(
            module.in_features,
            module.out_features,
            bias=module.bias is not None,
            has_fp16_weights=False,
            threshold=module.state.threshold,
            index=module.index,
            device="meta",
        )
        weight = torch.empty((self.out_features, self.in_features), dtype=torch.int8, device="meta")
        self.weight = Int8Params(weight, requires_grad=False, has_fp16_weights=False)
        self.register_buffer("scales", torch.empty(self.out_features, device="meta"), persistent=False)  # SCB
        copy_bias_and_mode(module, self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the output's shape and dtype, with the temporaries of the CUDA operation."""
        cast_bias(self, x.dtype)
        return _MatMul8bit.apply(x, self.bias, self)  # type: ignore[no-any-return, no-untyped-call]

    def quantize_rows(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Mirror the CUDA kernel of ``bitsandbytes::int8_vectorwise_quant`` for an input without outliers."""
        row_scales, quantized = quantized_rows(x)
        columns = None
        if self.state.threshold > 0.0:
            outliers = x.abs() >= self.state.threshold
            outliers.any()
            columns = torch.empty(0, device=x.device, dtype=torch.int64)
            if row_scales.numel() > 1:
                quantized[:, columns] = 0
        return quantized, row_scales, columns

    def multiply(self, quantized: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        """Mirror ``bitsandbytes::int8_scaled_mm``: the int32 product is held until the output has its dtype."""
        product = self._multiply(quantized)
        return _rescale(product, bias, dtype)

    def _multiply(self, quantized: torch.Tensor) -> torch.Tensor:
        """Mirror ``bitsandbytes::int8_linear_matmul``: cuBLASLt needs an inner dimension divisible by 4."""
        if self.in_features % 4 == 0:
            return torch._int_mm(quantized, self.weight.data.t())  # of torch 2.6 to 2.13; one int32 tensor
        product = torch.empty((*quantized.shape[:-1], self.out_features), device=quantized.device, dtype=torch.int32)
        result = torch.matmul(quantized.float(), self.weight.data.float().t()).to(torch.int32)
        return product.copy_(result)


def _rescale(product: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Mirror ``bitsandbytes::int8_mm_dequant``, whose CUDA kernel writes fp16 and nothing else."""
    output = rescaled(product)
    if bias is not None and bias.dtype != torch.float16:
        output.add_(bias)
    return output.to(dtype)


class _MatMul8bit(torch.autograd.Function):
    """Mirror ``bitsandbytes.autograd._functions.MatMul8bitLt`` for a frozen weight.

    What backward needs is stored on ``ctx`` itself and not as saved tensors, so it is freed with the loss.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: torch.Tensor | None, linear: Linear8bitStandIn) -> torch.Tensor:
        shape = x.shape
        if len(shape) == 3:
            x = x.reshape(-1, shape[-1])
        quantized, _row_scales, columns = linear.quantize_rows(x.to(torch.float16))
        outlier_input = None if columns is None else torch.empty(0, device=x.device, dtype=x.dtype)
        output = linear.multiply(quantized, bias, x.dtype)
        ctx.linear, ctx.shape, ctx.dtype = linear, shape, x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.tensors = (outlier_input, x, columns) if ctx.needs_input_grad[0] else ()
        return output.reshape((*shape[:-1], linear.out_features)) if len(shape) == 3 else output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        linear = ctx.linear
        grad_x = grad_bias = None
        if ctx.needs_input_grad[1]:
            grad_bias = grad.sum(0, dtype=ctx.bias_dtype)
        if len(grad.shape) == 3:
            grad = grad.reshape(-1, grad.shape[-1]).contiguous()
        if ctx.needs_input_grad[0]:
            scales = linear.scales.unsqueeze(1)
            weight = linear.weight.data.to(ctx.dtype, copy=True).mul_(scales.mul(1.0 / 127.0))
            grad_x = matmul(grad.to(ctx.dtype), weight).view(ctx.shape)
        return grad_x, grad_bias, None
