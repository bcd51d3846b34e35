"""Stand-ins on the meta device for the quantised linears of bitsandbytes, with the same allocations as on CUDA.

bitsandbytes 0.50 quantises when a weight is moved to a real device, and its operations have no meta kernels that would
show the temporaries of the CUDA kernels. The stand-ins hold a quantised weight on meta, with its statistics as buffers,
and perform the steps of the CUDA operation on tensors that are allocated and never filled. They are subclasses of the
real modules, so peft wraps them in its own layers. ``tests/memory/test_quantized.py`` runs bitsandbytes' CUDA sources
against them, without a GPU.

That of 4 bits saves nothing for backward, and both passes hold a dequantised copy of the weight while they multiply
(backward two, where the weight was loaded in another dtype than the gradient has).

Assumed: 5 to 1536 rows of 16 bits may use a fused kernel since bitsandbytes 0.50, by a table of GPUs, whose forward
needs no copy; backward makes one anyway. The copy is counted. Fewer rows use the fused kernel on every GPU, and so
here. The input in 8 bits is held until the loss is freed. Assumed, where there is a threshold: no input value exceeds
it. A column that does costs 2 bytes per row until backward.

Limitations: the table of 256 values that bitsandbytes keeps once per process (1 KiB).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from bitsandbytes.nn.modules import Int8Params, Linear4bit, Linear8bitLt, Params4bit
from torch import Tensor, nn

from hf_memopt.prediction.memory.settings import NotEstimableError

if TYPE_CHECKING:
    from transformers import BitsAndBytesConfig, PreTrainedModel

# _gemm_4bit_use_custom_cuda of bitsandbytes/backends/cuda/ops.py (0.50): so many rows are fused on every NVIDIA GPU
_FUSED_ROWS = 4  # of 16 bits
_FUSED_ROWS_FP32 = 7  # and never more
_NESTED_BLOCK = 256  # values of absmax that share a statistic; quantize_4bit has no other


def stand_in(module: nn.Module) -> nn.Module | None:
    """Return the stand-in of a quantised module for the meta device, None for a module that runs there itself.

    Examples:
        >>> stand_in(torch.nn.Linear(8, 8)) is None
        True
        >>> type(stand_in(Linear4bit(8, 8))).__name__
        'Linear4bitStandIn'
    """
    if isinstance(module, Linear4bitStandIn | Linear8bitStandIn):
        return None
    if isinstance(module, Linear4bit):
        return Linear4bitStandIn(module)
    if isinstance(module, Linear8bitLt):
        if module.state.has_fp16_weights:
            raise NotEstimableError(
                "not estimable: Linear8bitLt with has_fp16_weights=True quantises a trainable weight in every step; "
                "expected a frozen 8-bit weight. Pass BitsAndBytesConfig(load_in_8bit=True)"
            )
        return Linear8bitStandIn(module)
    return None


def quantize(model: PreTrainedModel, config: BitsAndBytesConfig | Mapping[str, Any]) -> PreTrainedModel:
    """Replace the linears that ``from_pretrained(quantization_config=config)`` would quantise, in place, by stand-ins.

    transformers' own quantizer selects them, so the output head, tied weights and ``llm_int8_skip_modules`` are
    treated as there. Everything else keeps its dtype and its ``requires_grad``; peft freezes what it does not train.
    """
    from transformers import BitsAndBytesConfig
    from transformers.quantizers.auto import AutoHfQuantizer

    if not isinstance(config, BitsAndBytesConfig):
        config = BitsAndBytesConfig(**config)  # type: ignore[no-untyped-call]
    loaded = {name: (module.weight.dtype, module.bias) for name, module in _with_weight(model).items()}
    AutoHfQuantizer.from_config(config, pre_quantized=False).preprocess_model(model=model, device_map=None)
    for name, module in _with_weight(model).items():
        if not isinstance(module, Linear4bit | Linear8bitLt):
            continue
        dtype, bias = loaded[name]
        module.weight.data = module.weight.data.to(dtype)  # replaced linears are created in the default dtype
        if bias is not None:
            module.bias = nn.Parameter(bias.data)  # a loaded bias requires a gradient until peft freezes it
        replacement = stand_in(module)
        if replacement is not None:
            model.set_submodule(name, replacement)
    # from_pretrained sets this once the weights are loaded; peft and the Trainer read it
    setattr(model, "is_loaded_in_4bit" if config.load_in_4bit else "is_loaded_in_8bit", True)
    return model


def _with_weight(model: nn.Module) -> dict[str, Any]:
    """Return the modules that have a weight and a bias, or None for it, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(getattr(module, "weight", None), torch.Tensor) and hasattr(module, "bias")
    }


# ---- 4 bits


class Linear4bitStandIn(Linear4bit):
    """A ``Linear4bit``, quantised already or not, without values."""

    weight: Any  # Params4bit
    absmax: torch.Tensor
    code: torch.Tensor
    offset: torch.Tensor
    nested_absmax: torch.Tensor
    nested_code: torch.Tensor

    def __init__(self, module: Linear4bit, device: str | torch.device = "meta") -> None:
        weight: Any = module.weight  # Params4bit
        super().__init__(  # type: ignore[no-untyped-call]
            module.in_features,
            module.out_features,
            bias=module.bias is not None,
            compute_dtype=module.compute_dtype if module.compute_type_is_set else None,
            compress_statistics=weight.compress_statistics,
            quant_type=weight.quant_type,
            quant_storage=weight.quant_storage,
            device=device,
        )
        quant_state = getattr(weight, "quant_state", None) or getattr(module, "quant_state", None)
        self.weight_dtype: torch.dtype = weight.dtype if quant_state is None else quant_state.dtype
        self.blocksize: int = weight.blocksize
        self.compress_statistics: bool = weight.compress_statistics
        elements = self.in_features * self.out_features
        packed = (elements + 1) // (weight.quant_storage.itemsize * 2)
        packed_weight = torch.empty((packed, 1), dtype=weight.quant_storage, device=device)
        self.weight = _like(weight, packed_weight)
        self._add_statistics(-(-elements // self.blocksize), device)
        _copy_bias_and_mode(module, self, device)

    def _add_statistics(self, blocks: int, device: str | torch.device) -> None:
        """Register what ``QuantState`` holds; every module has its own tables."""
        sizes: dict[str, tuple[int, ...]] = {"code": (16,), "absmax": (blocks,)}
        if self.compress_statistics:
            sizes |= {"offset": (), "nested_absmax": (-(-blocks // _NESTED_BLOCK),), "nested_code": (256,)}
        for name, size in sizes.items():
            dtype = torch.uint8 if name == "absmax" and self.compress_statistics else torch.float32
            self.register_buffer(name, torch.empty(size, dtype=dtype, device=device), persistent=False)

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
        _cast_bias(self, x.dtype)
        bias = self.bias  # from here on as bitsandbytes.matmul_4bit
        if torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)):
            return _MatMul4bit.apply(x, bias, self).to(input_dtype)  # type: ignore[no-any-return, no-untyped-call]
        return self.multiply(x, bias).to(input_dtype)

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
        size = self.out_features, self.in_features
        found: Tensor = _OPERATORS.dequantized(self.weight.data, self.absmax, size, dtype)
        return found


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
            grad_x = _matmul(grad, ctx.linear.dequantize().to(grad.dtype))
        return grad_x, grad_bias, None


# ---- 8 bits


class Linear8bitStandIn(Linear8bitLt):
    """A ``Linear8bitLt`` (``has_fp16_weights=False``), quantised already or not, without values."""

    weight: Any  # Int8Params
    scales: torch.Tensor

    def __init__(self, module: Linear8bitLt, device: str | torch.device = "meta") -> None:
        super().__init__(
            module.in_features,
            module.out_features,
            bias=module.bias is not None,
            has_fp16_weights=False,
            threshold=module.state.threshold,
            index=module.index,
            device=device,
        )
        self.weight_dtype: torch.dtype = module.weight.dtype  # as it was loaded, unless it is quantised already
        weight = torch.empty((self.out_features, self.in_features), dtype=torch.int8, device=device)
        self.weight = Int8Params(weight, requires_grad=False, has_fp16_weights=False)
        self.register_buffer("scales", torch.empty(self.out_features, device=device), persistent=False)  # SCB
        _copy_bias_and_mode(module, self, device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the output's shape and dtype, with the temporaries of the CUDA operation."""
        _cast_bias(self, x.dtype)
        return _MatMul8bit.apply(x, self.bias, self)  # type: ignore[no-any-return, no-untyped-call]

    def quantize_rows(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Mirror the CUDA kernel of ``bitsandbytes::int8_vectorwise_quant`` for an input without outliers."""
        row_scales, quantized = _OPERATORS.quantized_rows(x)
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
    output: Tensor = _OPERATORS.rescaled(product)
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
            grad_x = _matmul(grad.to(ctx.dtype), weight).view(ctx.shape)
        return grad_x, grad_bias, None


# ---- Kernels: operators of torch, since a mode below autograd, such as ``StorageTracker``, sees operators alone


def _dequantized(packed: Tensor, absmax: Tensor, size: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a weight of 16 or 32 bits from the packed one and the largest value of each block."""
    return torch.empty(size, dtype=dtype, device=packed.device)


def _quantized_rows(input: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scale of each row, shape (rows,), and the input in 8 bits."""
    rows = input.numel() // input.shape[-1]
    scales = torch.empty(rows, device=input.device, dtype=torch.float32)
    return scales, torch.empty(input.shape, device=input.device, dtype=torch.int8)


def _rescaled(product: Tensor) -> Tensor:
    """Return the int32 product of 8-bit operands in float16."""
    return torch.empty_like(product, dtype=torch.float16)


_LIBRARY: Any = torch.library.Library("hf_memopt", "DEF")  # type: ignore[no-untyped-call]
for _schema, _function in (
    ("dequantized(Tensor packed, Tensor absmax, int[] size, ScalarType dtype) -> Tensor", _dequantized),
    ("quantized_rows(Tensor input) -> (Tensor, Tensor)", _quantized_rows),
    ("rescaled(Tensor product) -> Tensor", _rescaled),
):
    _LIBRARY.define(_schema)
    _LIBRARY.impl(_schema.partition("(")[0], _function, "CompositeExplicitAutograd")
_OPERATORS: Any = torch.ops.hf_memopt


# ---- What both stand-ins do


# aten's own operator: the emulated autocast casts the operands of torch.matmul, but a backward pass is outside autocast
_matmul = torch.ops.aten.matmul


def _copy_bias_and_mode(module: nn.Linear, stand_in: nn.Linear, device: str | torch.device) -> None:
    """Give the stand-in a bias of the module's dtype, and the module's mode."""
    if module.bias is not None:
        bias = torch.empty(module.out_features, dtype=module.bias.dtype, device=device)
        stand_in.bias = nn.Parameter(bias, requires_grad=module.bias.requires_grad)
    stand_in.train(module.training)


def _cast_bias(linear: nn.Linear, dtype: torch.dtype) -> None:
    """Cast the bias permanently, as the real linears do in their first forward pass."""
    if linear.bias is not None and linear.bias.dtype != dtype:
        linear.bias.data = linear.bias.data.to(dtype)
