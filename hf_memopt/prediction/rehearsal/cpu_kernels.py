"""What the CPU computes for operators that it has under another name, with other arguments, or not at all.

Each function takes the arguments of the CUDA operator, as tensors of the CPU, and returns the results in its order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decomposition_table  # private, seen in torch 2.14, as is what follows

aten = torch.ops.aten
WITH_AUTOGRAD = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
"""Of dispatch keys, as they are outside of kernels."""


def call_with_seed(seed: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function with random numbers of a seed; the CPU's own stream of them stays where it was."""
    generator = torch.default_generator
    before = generator.get_state()
    generator.manual_seed(seed)
    try:
        return function(*args, **kwargs)
    finally:
        generator.set_state(before)


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *rest: Any, scale: float | None = None) -> Tensor:
    """Attention in float32, as the fused kernels sum, and as they do with nought for a row without a key."""
    wide = (None if t is None else t.float() for t in (q, k, v, bias))
    found: Tensor = aten._scaled_dot_product_attention_math(*wide, *rest, scale=scale, enable_gqa=True)[0]
    return found.to(q.dtype)


def attend_backward(grad: Tensor, inputs: Any, seed: Tensor, *rest: Any, **scale: Any) -> list[Tensor | None]:
    """Return the gradients of q, k, v and bias by autograd, below which kernels run."""
    with torch._C._ForceDispatchKeyGuard(*WITH_AUTOGRAD), torch.enable_grad():
        leaves = [None if t is None else t.detach().requires_grad_() for t in inputs]
        output = call_with_seed(int(seed.flatten()[0]), attend, *leaves, *rest, **scale)
        found = iter(torch.autograd.grad(output, [leaf for leaf in leaves if leaf is not None], grad))
    return [None if leaf is None else next(found) for leaf in leaves]


def seed_now() -> Tensor:
    """Return what a forward pass leaves to its backward pass in place of the GPU's seed."""
    return torch.tensor(torch.initial_seed())


def efficient_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Any, *others: Any, **scale: Any) -> Any:
    _out, _sums, seed, _offset, dropout, _mask, *causal = others  # torch hands no default on
    return attend_backward(grad, (q, k, v, bias), seed, dropout, *causal, **scale)


def flash_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: Any, **scale: Any) -> Any:
    *_, dropout, causal, seed, _offset = others
    return attend_backward(grad, (q, k, v, None), seed, dropout, causal, **scale)[:3]


def convolution(x: Tensor, w: Tensor, bias: Any, stride: Any, padding: Any, dilation: Any, groups: int) -> Any:
    return aten.convolution(x, w, bias, stride, padding, dilation, False, [0] * len(stride), groups)


def product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    return (a.float() @ b.float()).to(dtype)


DECOMPOSED = (  # by torch, in float32 where CUDA's kernels compute in it, which the CPU's refuse
    *("_softmax", "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data", "log_sigmoid_backward"),
    *("native_layer_norm_backward", "_fused_rms_norm_backward", "cudnn_batch_norm", "cudnn_batch_norm_backward"),
)
CPU_KERNELS: dict[str, Callable[..., Any]] = {
    **{name: decomposition_table[getattr(aten, name).default] for name in DECOMPOSED},
    "_conv_depthwise2d": lambda x, w, size, bias, stride, padding, dilation: convolution(
        x, w, bias, stride, padding, dilation, x.shape[1]
    ),
    "_scaled_dot_product_efficient_attention": lambda q, k, v, bias, wants_sums, *rest, **scale: (
        *(attend(q, k, v, bias, *rest, **scale), None),
        seed_now(),
    ),
    "_scaled_dot_product_efficient_attention_backward": efficient_backward,
    "_scaled_dot_product_flash_attention": lambda q, k, v, *rest, **scale: (
        *(attend(q, k, v, None, *rest[:2], **scale), *[None] * 5),
        seed_now(),
    ),
    "_scaled_dot_product_flash_attention_backward": flash_backward,
    "bmm.dtype": product,
    "cudnn_convolution": lambda x, w, padding, stride, dilation, groups, *_: convolution(
        x, w, None, stride, padding, dilation, groups
    ),
    "histc": lambda x, bins=100, low=0, high=0: torch.histc(x.float(), bins, low, high).to(x.dtype),
    "mm.dtype": product,
}
"""By the operator's name."""
