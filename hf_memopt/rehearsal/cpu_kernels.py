"""What the CPU computes for operators that it has under another name, with other arguments, or not at all.

Each function takes the arguments of the CUDA operator, as tensors of the CPU, and returns the results in its order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def call_with_seed(seed: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function with random numbers of a seed; the CPU's own stream of them stays where it was."""
    generator = torch.default_generator
    before = generator.get_state()
    generator.manual_seed(seed)
    try:
        return function(*args, **kwargs)
    finally:
        generator.set_state(before)


def _wide(tensor: Tensor) -> Tensor:
    """Return 16 bits as float32, in which CUDA's kernels compute; float64 stays."""
    return tensor.float() if tensor.itemsize == 2 else tensor


class Attention:
    """Fused attention in float32: q is (batch, heads, queries, width), k and v (batch, groups, keys, width)."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, dropout: float, causal: bool, scale: float | None,
        seed: Any = None,
    ) -> None:  # fmt: skip
        self.arguments = (q, k, v, bias)
        self.groups = q.shape[1] // k.shape[1]
        self.q, self.k, self.v = q.float(), *(t.float().repeat_interleave(self.groups, 1) for t in (k, v))
        self.scale = scale or q.shape[-1] ** -0.5
        scores = self.q @ self.k.transpose(-1, -2) * self.scale  # (batch, heads, queries, keys)
        if causal:
            scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), float("-inf"))
        if bias is not None:
            scores = scores + bias.float()
        # a row without a key, as of padding on the left, is nought in the fused kernels and NaN in softmax
        self.sums = scores.logsumexp(-1).nan_to_num(0.0)
        self.weights = scores.softmax(-1).nan_to_num(0.0)
        # the forward pass leaves its seed to the backward pass, in place of the GPU's
        self.seed = torch.initial_seed() if seed is None else int(seed.flatten()[0])
        ones = torch.ones_like(self.weights)
        self.mask: Tensor = call_with_seed(self.seed, torch.dropout, ones, dropout, True) if dropout else ones

    def forward(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the output, the rows' sums and the seed."""
        output = (self.weights * self.mask) @ self.v
        return output.to(self.arguments[0].dtype), self.sums, torch.tensor(self.seed)

    def backward(self, grad: Tensor, wants_bias: bool = False) -> list[Tensor | None]:
        """Return the gradients of q, k, v and bias."""
        grad = grad.float()
        of_weights = grad @ self.v.transpose(-1, -2) * self.mask
        of_scores = self.weights * (of_weights - (of_weights * self.weights).sum(-1, keepdim=True))
        of_keys = of_scores.transpose(-1, -2) @ self.q * self.scale
        of_values = (self.weights * self.mask).transpose(-1, -2) @ grad
        of_groups = [torch.unflatten(t, 1, (-1, self.groups)).sum(2) for t in (of_keys, of_values)]
        bias = self.arguments[3]
        of_bias = of_scores.sum_to_size(bias.shape) if wants_bias and bias is not None else None
        gradients = (of_scores @ self.k * self.scale, *of_groups, of_bias)
        pairs = zip(gradients, self.arguments, strict=True)
        return [None if gradient is None or t is None else gradient.to(t.dtype) for gradient, t in pairs]


def rms_norm_backward(grad: Tensor, x: Tensor, shape: list[int], scale: Tensor, weight: Tensor | None, *_: Any) -> Any:
    unit = _wide(x) * scale
    of_unit = _wide(grad) if weight is None else _wide(grad) * _wide(weight)
    along = (of_unit * unit).mean(tuple(range(-len(shape), 0)), keepdim=True)
    of_weight = None if weight is None else (_wide(grad) * unit).sum_to_size(shape).to(weight.dtype)
    return (scale * (of_unit - unit * along)).to(x.dtype), of_weight


def layer_norm_backward(grad: Tensor, x: Tensor, shape: list[int], *others: Any) -> tuple[Tensor | None, ...]:
    """Compute in float32, as CUDA keeps mean and scale in it beside 16-bit rows, which the CPU refuses."""
    *tensors, mask = others  # mean, scale, weight, bias
    wide = [None if tensor is None else _wide(tensor) for tensor in tensors]
    found = torch.ops.aten.native_layer_norm_backward(_wide(grad), _wide(x), shape, *wide, mask)
    return tuple(None if gradient is None else gradient.to(x.dtype) for gradient in found)


def convolution(x: Tensor, w: Tensor, bias: Any, stride: Any, padding: Any, dilation: Any, groups: int) -> Any:
    return torch.ops.aten.convolution(x, w, bias, stride, padding, dilation, False, [0] * len(stride), groups)


def depthwise(x: Tensor, w: Tensor, size: Any, bias: Any, stride: Any, padding: Any, dilation: Any) -> Any:
    return convolution(x, w, bias, stride, padding, dilation, x.shape[1])


def softmax(name: str) -> Callable[[Tensor, int, bool], Tensor]:
    """Return a softmax that widens half precision itself; the CPU's does not."""
    overload = getattr(torch.ops.aten, name).default
    return lambda x, dim, widens: overload(x.float() if widens else x, dim, False)


def softmax_backward(name: str) -> Callable[[Tensor, Tensor, int, torch.dtype], Tensor]:
    overload = getattr(torch.ops.aten, name).default
    return lambda grad, out, dim, dtype: overload(_wide(grad), _wide(out), dim, _wide(grad).dtype).to(dtype)


def efficient_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Any, *others: Any, **scale: Any) -> Any:
    _out, _sums, seed, _offset, dropout, mask, *causal = others
    causal_or_default = bool(causal and causal[0])  # torch hands no default on
    return Attention(q, k, v, bias, dropout, causal_or_default, scale.get("scale"), seed).backward(grad, mask[3])


def flash_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: Any, **scale: Any) -> Any:
    *_, dropout, causal, seed, _offset = others
    return Attention(q, k, v, None, dropout, causal, scale.get("scale"), seed).backward(grad)[:3]


def flash(q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0, causal: bool = False, *_: Any, **scale: Any) -> Any:
    out, sums, seed = Attention(q, k, v, None, dropout, causal, scale.get("scale")).forward()
    return out, sums, None, None, None, None, seed


CPU_KERNELS: dict[str, Callable[..., Any]] = {
    "_conv_depthwise2d": depthwise,
    "_fused_rms_norm_backward": rms_norm_backward,
    "_log_softmax": softmax("_log_softmax"),
    "_log_softmax_backward_data": softmax_backward("_log_softmax_backward_data"),
    "_scaled_dot_product_efficient_attention": lambda q, k, v, bias, sums, dropout=0.0, causal=False, scale=None: (
        Attention(q, k, v, bias, dropout, causal, scale).forward()
    ),
    "_scaled_dot_product_efficient_attention_backward": efficient_backward,
    "_scaled_dot_product_flash_attention": flash,
    "_scaled_dot_product_flash_attention_backward": flash_backward,
    "_softmax": softmax("_softmax"),
    "_softmax_backward_data": softmax_backward("_softmax_backward_data"),
    "bmm.dtype": lambda a, b, dtype: (a.float() @ b.float()).to(dtype),
    "cudnn_batch_norm": lambda *inputs: (*torch.ops.aten.native_batch_norm(*inputs), torch.empty(0)),
    "cudnn_batch_norm_backward": lambda x, grad, w, mean, var, saved_mean, saved_var, eps, reserve: (
        torch.ops.aten.native_batch_norm_backward(grad, x, w, mean, var, saved_mean, saved_var, True, eps, [True] * 3)
    ),
    "cudnn_convolution": lambda x, w, padding, stride, dilation, groups, *settings: convolution(
        x, w, None, stride, padding, dilation, groups
    ),
    "histc": lambda x, bins=100, low=0, high=0: torch.histc(x.float(), bins, low, high).to(x.dtype),
    "log_sigmoid_backward": lambda grad, x, buffer: grad * torch.sigmoid(-x),  # CUDA's has no buffer
    "mm.dtype": lambda a, b, dtype: (a.float() @ b.float()).to(dtype),
    "native_layer_norm_backward": layer_norm_backward,
}
"""By the operator's name."""
