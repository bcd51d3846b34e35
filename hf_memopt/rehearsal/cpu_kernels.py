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


# ---- fused attention: (batch, heads, queries, width) of q, (batch, groups, keys, width) of k and v
def _weights(q: Tensor, k: Tensor, bias: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Return the weights of attention and the logarithm of each row's sum, both in float32."""
    scores = q.float() @ k.float().transpose(-1, -2) * scale  # (batch, heads, queries, keys)
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~seen, float("-inf"))
    if bias is not None:
        scores = scores + bias.float()
    # a row without a key, as of padding on the left, is nought in the fused kernels and NaN in softmax
    return scores.softmax(-1).nan_to_num(0.0), scores.logsumexp(-1).nan_to_num(0.0)


def _mask(weights: Tensor, dropout: float, seed: Tensor) -> Tensor | float:
    """Return the mask of dropout, drawn from the seed that the forward pass has left for the backward pass."""
    if not dropout:
        return 1.0
    mask: Tensor = call_with_seed(int(seed.flatten()[0]), torch.dropout, torch.ones_like(weights), dropout, True)
    return mask


def _attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, dropout: float, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, the rows' sums, and the seed of dropout's mask."""
    seed = torch.tensor(torch.initial_seed())  # set for this call
    groups = q.shape[1] // k.shape[1]
    weights, sums = _weights(q, k.repeat_interleave(groups, 1), bias, causal, scale or q.shape[-1] ** -0.5)
    weights = weights * _mask(weights, dropout, seed)
    return (weights @ v.repeat_interleave(groups, 1).float()).to(q.dtype), sums, seed


def _attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, dropout: float, causal: bool,
    scale: float | None, seed: Tensor, wants_bias: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Return the gradients of q, k, v and bias."""
    scale = scale or q.shape[-1] ** -0.5
    groups = q.shape[1] // k.shape[1]
    keys, values = (t.float().repeat_interleave(groups, 1) for t in (k, v))
    weights, _ = _weights(q, keys, bias, causal, scale)
    mask = _mask(weights, dropout, seed)
    of_weights = grad.float() @ values.transpose(-1, -2) * mask
    of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True))
    of_keys = of_scores.transpose(-1, -2) @ q.float() * scale
    of_values = (weights * mask).transpose(-1, -2) @ grad.float()
    of_bias = of_scores.sum_to_size(bias.shape).to(bias.dtype) if wants_bias and bias is not None else None
    of_keys, of_values = (torch.unflatten(t, 1, (-1, groups)).sum(2) for t in (of_keys, of_values))
    return (of_scores @ keys * scale).to(q.dtype), of_keys.to(k.dtype), of_values.to(v.dtype), of_bias


def efficient_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, wants_sums: bool, dropout: float = 0.0, causal: bool = False,
    *, scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, None]:  # fmt: skip
    return *_attention(q, k, v, bias, dropout, causal, scale), None


def efficient_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, sums: Tensor, seed: Tensor,
    offset: Tensor, dropout: float, mask: list[bool], causal: bool = False, *, scale: float | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    return _attention_backward(grad, q, k, v, bias, dropout, causal, scale, seed, mask[3])


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0, causal: bool = False, debug: bool = False,
    *, scale: float | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    out, sums, seed = _attention(q, k, v, None, dropout, causal, scale)
    return out, sums, None, None, None, None, seed, None, None


def flash_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: Any, scale: float | None = None
) -> tuple[Tensor | None, ...]:
    *_, dropout, causal, seed, _offset = others  # the first are results of the forward pass, and lengths of packed rows
    return _attention_backward(grad, q, k, v, None, dropout, causal, scale, seed)[:3]


# ---- norms and convolutions
def rms_norm(x: Tensor, shape: list[int], weight: Tensor | None, eps: float | None) -> tuple[Tensor, Tensor]:
    dims = tuple(range(-len(shape), 0))
    squares = x.float().pow(2).mean(dims, keepdim=True)
    scale = (squares + (torch.finfo(x.dtype).eps if eps is None else eps)).rsqrt()
    y = x.float() * scale
    return (y if weight is None else y * weight.float()).to(x.dtype), scale


def rms_norm_backward(
    grad: Tensor, x: Tensor, shape: list[int], scale: Tensor, weight: Tensor | None, mask: list[bool]
) -> tuple[Tensor, Tensor | None]:
    dims = tuple(range(-len(shape), 0))
    unit = x.float() * scale.float()
    of_unit = grad.float() if weight is None else grad.float() * weight.float()
    of_x = scale.float() * (of_unit - unit * (of_unit * unit).mean(dims, keepdim=True))
    of_weight = None if weight is None else (grad.float() * unit).sum_to_size(shape).to(weight.dtype)
    return of_x.to(x.dtype), of_weight


def cudnn_convolution(
    x: Tensor, weight: Tensor, padding: list[int], stride: list[int], dilation: list[int], groups: int, *settings: bool
) -> Any:
    transposed, output_padding = False, [0] * len(stride)
    return torch.ops.aten.convolution(x, weight, None, stride, padding, dilation, transposed, output_padding, groups)


def depthwise_convolution(
    x: Tensor, weight: Tensor, size: list[int], bias: Tensor | None, stride: list[int], padding: list[int], dilation: list[int]
) -> Any:
    return torch.ops.aten.convolution(x, weight, bias, stride, padding, dilation, False, [0] * len(size), x.shape[1])


def cudnn_batch_norm(x: Tensor, weight: Tensor, *others: Any) -> tuple[Tensor, ...]:
    reserve = torch.empty(0, dtype=torch.uint8)
    return *torch.ops.aten.native_batch_norm(x, weight, *others), reserve


def cudnn_batch_norm_backward(x: Tensor, grad: Tensor, weight: Tensor, *others: Any) -> Any:
    *statistics, eps, _reserve = others
    training, mask = True, [True, True, True]
    return torch.ops.aten.native_batch_norm_backward(grad, x, weight, *statistics, training, eps, mask)


# ---- the CPU's softmax does not change dtypes by itself
def _softmax(name: str) -> Callable[[Tensor, int, bool], Tensor]:
    overload = getattr(torch.ops.aten, name).default
    return lambda x, dim, widens: overload(x.float() if widens else x, dim, False)


def _softmax_backward(name: str) -> Callable[[Tensor, Tensor, int, torch.dtype], Tensor]:
    overload = getattr(torch.ops.aten, name).default
    return lambda grad, out, dim, dtype: overload(grad.float(), out.float(), dim, torch.float32).to(dtype)


CPU_KERNELS: dict[str, Callable[..., Any]] = {
    "_fused_rms_norm": rms_norm,
    "_fused_rms_norm_backward": rms_norm_backward,
    "_log_softmax": _softmax("_log_softmax"),
    "_log_softmax_backward_data": _softmax_backward("_log_softmax_backward_data"),
    "_scaled_dot_product_efficient_attention": efficient_attention,
    "_scaled_dot_product_efficient_attention_backward": efficient_attention_backward,
    "_scaled_dot_product_flash_attention": flash_attention,
    "_scaled_dot_product_flash_attention_backward": flash_attention_backward,
    "_softmax": _softmax("_softmax"),
    "_softmax_backward_data": _softmax_backward("_softmax_backward_data"),
    "cudnn_batch_norm": cudnn_batch_norm,
    "cudnn_batch_norm_backward": cudnn_batch_norm_backward,
    "_conv_depthwise2d": depthwise_convolution,
    "_masked_scale": lambda x, mask, scale: x * mask * scale,
    "bmm.dtype": lambda a, b, dtype: (a.float() @ b.float()).to(dtype),
    "conv_depthwise3d": depthwise_convolution,
    "cudnn_convolution": cudnn_convolution,
    "mm.dtype": lambda a, b, dtype: (a.float() @ b.float()).to(dtype),
    "histc": lambda x, bins=100, low=0, high=0: torch.histc(x.float(), bins, low, high).to(x.dtype),
    "log_sigmoid_backward": lambda grad, x, buffer: grad * torch.sigmoid(-x),  # CUDA's has no buffer
}
"""By the operator's name."""
