"""Which operators CUDA's autocast casts, and how: the lists of ATen operators by policy, and their Python functions.

torch answers which operators have an autocast kernel, but not what that kernel does to their arguments, so the lists
are repeated here. ``tests/memory/test_kernel_buffers.py`` checks them against torch's header and against the operators
that the installed torch registers for the dispatch key ``AutocastCUDA``, which a CPU-only build has too.

Source: torch 2.13, ``aten/src/ATen/autocast_mode.h`` (the ``AT_FORALL_*`` lists) and ``autocast_mode.cpp`` (what it
adds for one device). The lists of 2.14 are the same. Limitations: ``binary_cross_entropy``, which raises under autocast
on CUDA, and the cache of weight casts, which is in ``semantics``.

A name without a dot is the default overload.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import Enum, auto
from typing import Any

import torch
import torch.nn.functional as F

__all__ = ["CUDA_CASTS", "Policy", "casts_of", "functions_of"]


class Policy(Enum):
    """What autocast does to the floating-point arguments of an operator, in the words of ``autocast_mode.h``."""

    LOWER_PRECISION = auto()  # cast to the autocast dtype
    FLOAT32 = auto()  # cast from 16 bits to float32
    FLOAT32_BY_DTYPE_ARGUMENT = auto()  # not cast: dtype=float32 is passed instead, where the caller passed none
    PROMOTE = auto()  # cast to the widest dtype among them


LOWER_PRECISION: tuple[str, ...] = (
    "_convolution",
    "_convolution.deprecated",
    "_scaled_dot_product_flash_attention",
    "_thnn_fused_gru_cell",
    "_thnn_fused_lstm_cell",
    "addbmm",
    "addmm",
    "addmv",
    "addr",
    "baddbmm",
    "bmm",
    "chain_matmul",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_tbc",
    "conv_transpose1d",
    "conv_transpose2d.input",
    "conv_transpose3d.input",
    "convolution",
    "cudnn_convolution",
    "cudnn_convolution_transpose",
    "einsum",
    "gru_cell",
    "linalg_multi_dot",
    "linalg_vecdot",
    "linear",
    "lstm_cell",
    "matmul",
    "mm",
    "mv",
    "prelu",
    "rnn_relu_cell",
    "rnn_tanh_cell",
    "scaled_dot_product_attention",
)
"""Floating-point arguments on the GPU are cast to the autocast dtype (float64 stays)."""

FLOAT32: tuple[str, ...] = (
    "_upsample_bicubic2d_aa",
    "_upsample_bilinear2d_aa",
    "_upsample_nearest_exact1d",
    "_upsample_nearest_exact2d",
    "_upsample_nearest_exact3d",
    "acos",
    "asin",
    "binary_cross_entropy_with_logits",
    "cdist",
    "cosh",
    "cosine_embedding_loss",
    "cosine_similarity",
    "dist",
    "erfinv",
    "exp",
    "expm1",
    "frobenius_norm.dim",
    "group_norm",
    "hinge_embedding_loss",
    "huber_loss",
    "kl_div",
    "l1_loss",
    "layer_norm",
    "log",
    "log10",
    "log1p",
    "log2",
    "logsumexp",
    "margin_ranking_loss",
    "mse_loss",
    "multi_margin_loss",
    "multilabel_margin_loss",
    "native_layer_norm",
    "nll_loss",
    "nll_loss2d",
    "nuclear_norm",
    "nuclear_norm.dim",
    "pdist",
    "poisson_nll_loss",
    "pow.Scalar",
    "pow.Tensor_Scalar",
    "pow.Tensor_Tensor",
    "reciprocal",
    "renorm",
    "rms_norm",
    "rsqrt",
    "sinh",
    "smooth_l1_loss",
    "soft_margin_loss",
    "softplus",
    "tan",
    "triplet_margin_loss",
    "upsample_bicubic2d",
    "upsample_bilinear2d",
    "upsample_linear1d",
    "upsample_nearest1d",
    "upsample_nearest2d",
    "upsample_nearest3d",
    "upsample_trilinear3d",
)
"""16-bit floating-point arguments on the GPU are cast to float32."""

FLOAT32_SET_OPT_DTYPE: tuple[str, ...] = (
    "cumprod",
    "cumsum",
    "linalg_matrix_norm",
    "linalg_matrix_norm.str_ord",
    "linalg_vector_norm",
    "log_softmax.int",
    "prod",
    "prod.dim_int",
    "softmax.int",
    "sum",
    "sum.dim_IntList",
)
"""Called with ``dtype=float32`` where the caller passed no ``dtype`` and the first argument has 16 bits."""

FLOAT32_APPEND_DTYPE: tuple[str, ...] = (
    "norm.Scalar",
    "norm.ScalarOpt_dim",
)
"""Called through the overload that takes a ``dtype``, with float32, where the first argument has 16 bits."""

PROMOTE: tuple[str, ...] = (
    "addcdiv",
    "addcmul",
    "atan2",
    "bilinear",
    "cross",
    "dot",
    "grid_sampler",
    "index_put",
    "scatter_add",
    "tensordot",
    "vdot",
)
"""All floating-point arguments are cast to the widest dtype among them."""

_ALIASES = {  # torch.Tensor's methods that run the operator themselves, where a function mode is off
    "matmul": ("__matmul__", "__rmatmul__"),
    "pow": ("__pow__", "__rpow__"),
    "reciprocal": ("__rdiv__",),
}


def functions_of(names: Iterable[str]) -> set[Callable[..., Any]]:
    """Return every Python function that runs one of these ATen operators: in torch, as a method, in ``torch.nn``."""
    plain = {name.partition(".")[0] for name in names}
    plain |= {alias for name in plain for alias in _ALIASES.get(name, ())}
    spaces = (torch, F, torch.linalg, torch._C._nn, torch.Tensor)  # _nn is private: pinned by a test, torch 2.6 to 2.13
    plain |= {name.removeprefix("linalg_") for name in plain}
    return {getattr(space, name) for name in plain for space in spaces if hasattr(space, name)}


def casts_of(lists: Mapping[Policy, Iterable[str]]) -> dict[Callable[..., Any], Policy]:
    """Return the policy of each Python function of these operators."""
    return {function: policy for policy, names in lists.items() for function in functions_of(names)}


CUDA_CASTS = casts_of(
    {
        Policy.LOWER_PRECISION: LOWER_PRECISION,
        Policy.FLOAT32: FLOAT32,
        Policy.FLOAT32_BY_DTYPE_ARGUMENT: FLOAT32_SET_OPT_DTYPE + FLOAT32_APPEND_DTYPE,
        Policy.PROMOTE: PROMOTE,
    }
)
