"""Attention on CUDA: which kernel a call gets, and what the kernels allocate inside one operator.

The rules follow the CUDA source; each names its file and function. ``kernel_buffers`` names the releases seen.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_memopt.prediction.memory.settings import NotEstimableError
from hf_memopt.training.devices import Chip

_aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
WIDEST_HEAD = 2**16  # of the memory-efficient kernel

TORCH_RELEASE = tuple(int(part) for part in torch.__version__.split(".")[:2])


# ---- which kernel


def attention_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    enable_gqa: bool = False,
    *,
    capability: tuple[int, int],
) -> Literal["flash", "efficient", "cudnn", "math"]:
    """Return the kernel that ``F.scaled_dot_product_attention`` picks on CUDA for dense, four-dimensional inputs.

    The order is flash, efficient, math; cuDNN comes first on 9.0 and 10.x where the release and its cuDNN say so:
    never before torch 2.9; in 2.9 with cuDNN 9.9 and later; since 2.10 with cuDNN after 9.15, which the wheels bundle
    since 2.11. Otherwise cuDNN comes after math and is never reached. Assumed: all kernels enabled, no environment
    variable, last dimensions with stride 1, a mask that broadcasts over (batch, heads, query, key). cuDNN takes no mask
    that requires a gradient, such as a learned bias of positions; efficient does.
    The head dimensions that cuDNN takes are those of 2.9 to 2.13.

    ``attend`` does what the call does around its kernel, by the last of these sources.

    Source: transformers/cuda/sdp_utils.cpp, ``select_sdp_backend``, ``can_use_*_attention``,
    ``check_prefer_cudnn_attention``; transformers/sdp_utils_cpp.h, ``check_attn_mask_shape``;
    transformers/attention.cpp, ``scaled_dot_product_attention``. Pull requests 162073 (2.9), 171627 (2.10), 174245
    (2.12) of pytorch/pytorch; for the bundled cuDNN, 48163 of huggingface/transformers.

    Examples:
        >>> query = torch.empty(1, 8, 128, 64, dtype=torch.bfloat16, device="meta")
        >>> attention_kernel(query, query, query, capability=(8, 6))
        'flash'
    """
    dtype, query_len, head_dim = query.dtype, query.shape[-2], query.shape[-1]
    key_len, value_dim = key.shape[-2], value.shape[-1]
    if 0 in (query_len, key_len):
        return "math"
    half = dtype in _HALF and capability >= (8, 0)
    newest = (9, 0) if TORCH_RELEASE < (2, 7) else (12, 1)
    mask_requires_grad = attn_mask is not None and attn_mask.requires_grad
    if half and not mask_requires_grad and _prefers_cudnn(capability):
        limit = 256 if capability == (9, 0) else 128
        widths = max(head_dim, value_dim) <= limit or (head_dim, value_dim) == (192, 128)
        whole = head_dim % 8 == 0 and value_dim % 8 == 0 and key_len > 1
        dropout = query_len > 1 and (TORCH_RELEASE < (2, 12) or float(dropout_p * 16).is_integer())
        if widths and whole and (dropout or not dropout_p):
            return "cudnn"
    if half and capability <= newest and attn_mask is None and head_dim == value_dim <= 256:
        small = (8, 6) <= capability <= (8, 9) or capability >= (12, 0)
        backward = head_dim <= 192 or (head_dim > 224 and not dropout_p)
        if (backward or not small or not _needs_gradient(query, key, value)) and not (
            is_causal and query_len != key_len
        ):
            return "flash"
    types = (torch.float16, torch.float32) if capability < (8, 0) else (*_HALF, torch.float32)
    aligned = head_dim % _alignment(dtype, capability) == 0 and value_dim % _alignment(dtype, capability) == 0
    gqa = enable_gqa and key.shape[-3] != query.shape[-3]
    if dtype in types and (5, 0) <= capability <= newest and aligned and (not gqa or TORCH_RELEASE >= (2, 14)):
        return "efficient"
    return "math"


def _needs_gradient(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _prefers_cudnn(capability: tuple[int, int]) -> bool:
    """Return whether cuDNN goes first, with the cuDNN of the release's CUDA 13 wheel: 9.10.2, from 2.11 on 9.19.

    2.10 asks for more than 9.15, so its own is too old.
    """
    if TORCH_RELEASE < (2, 11):
        return TORCH_RELEASE == (2, 9) and capability in ((9, 0), (10, 0))
    return capability in ((9, 0), (10, 0), (10, 3))


def _alignment(dtype: torch.dtype, capability: tuple[int, int]) -> int:
    """Source: sdp_utils.cpp, ``minimum_gemm_alignment``."""
    if dtype in _HALF:
        return 8 if capability >= (7, 0) else 1
    return 4 if capability >= (8, 0) else 1


# ---- inside the kernels


def divide_up(a: int, b: int) -> int:
    """Return ``a / b``, rounded up."""
    return -(-a // b)


def round_up(a: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is at least ``a``."""
    return divide_up(a, multiple) * multiple


def copy_bytes(tensor: Tensor) -> int:
    """Return what ``tensor.contiguous()`` allocates."""
    return 0 if tensor.is_contiguous() else tensor.numel() * tensor.element_size()


def flash_forward(
    chip: Chip, out: Any, query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, *_: Any, **__: Any
) -> tuple[int, ...]:
    """Return partial results of split keys: without dropout, and only where heads and queries do not fill the GPU.

    Source: flash_attn/flash_api.cpp, ``mha_fwd``, ``set_params_splitkv``, ``num_splits_heuristic``.
    """
    if dropout_p > 0:
        return ()
    batch, heads, query_len, head_dim = query.shape
    keys_per_block = 256 if head_dim <= 64 else 128 if head_dim <= 128 else 64
    tiles = batch * heads * divide_up(query_len, 64)
    splits = _flash_splits(tiles, 2 * chip.multiprocessors, divide_up(key.shape[2], keys_per_block))
    if splits == 1:
        return ()
    rows = splits * batch * heads * query_len
    return rows * 4, rows * round_up(head_dim, 32 if head_dim <= 128 else 64) * 4


def _flash_splits(tiles: int, slots: int, key_blocks: int) -> int:
    if tiles >= 0.8 * slots:
        return 1
    efficiency = {}
    for splits in range(1, min(128, slots, key_blocks) + 1):
        if splits == 1 or divide_up(key_blocks, splits) != divide_up(key_blocks, splits - 1):
            waves = tiles * splits / slots
            efficiency[splits] = waves / math.ceil(waves)
    return next(splits for splits, share in efficiency.items() if share >= 0.85 * max(efficiency.values()))


def flash_backward(
    chip: Chip, out: Any, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, *_: Any, **__: Any
) -> tuple[int, ...]:
    """Return the float32 accumulator of dq, the row sums, and dk and dv of all query heads where key heads are fewer.

    Source: attention_backward.cu, ``_flash_attention_backward``; flash_attn/flash_api.cpp, ``mha_bwd``.
    """
    batch, heads, query_len, head_dim = query.shape
    rows = batch * heads * round_up(query_len, 128)
    blocks = [
        copy_bytes(grad.transpose(1, 2)),
        copy_bytes(output.transpose(1, 2)),
        rows * 4,
        rows * round_up(head_dim, 32 if head_dim <= 128 else 64) * 4,
    ]
    if key.shape[1] != heads:
        blocks += 2 * [batch * key.shape[2] * heads * head_dim * key.element_size()]
    return tuple(blocks)


def efficient_forward(
    chip: Chip, out: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
) -> tuple[int, ...]:
    """Return the float32 accumulator of the output, which heads wider than 128 keep outside of the registers.

    Source: attention.cu, ``_efficient_attention_forward``; kernel_forward.h, ``kNeedsOutputAccumulatorBuffer``.
    """
    if query.dtype not in _HALF or max(query.shape[3], value.shape[3]) <= 128:
        return ()
    batch, heads, query_len, _head_dim = query.shape
    return (batch * query_len * heads * value.shape[3] * 4,)


def efficient_backward(
    chip: Chip, out: Any, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **_: Any
) -> tuple[int, ...]:
    """Return delta (row sums of grad * output) and the workspace in which dq, dk and dv are summed in float32.

    Source: attention_backward.cu, ``_efficient_attention_backward``; kernel_backward.h, ``Params::workspace_size``,
    ``GradQTempStorage`` (a tile and 16 bytes of locks), ``kKernelComputesDelta``.
    """
    _bias, _output, _logsumexp, _seed, _offset, dropout_p = rest[:6]
    batch, heads, query_len, head_dim = query.shape  # (batch, heads, seq, head)
    key_len, value_dim = value.shape[2:]
    half = query.dtype in _HALF
    queries, keys, in_registers = _efficient_tile(chip, half, max(head_dim, value_dim), dropout_p > 0)
    per_head = 0
    if half or chip.capability >= (7, 0):
        per_head += divide_up(query_len, queries) * divide_up(head_dim, keys) * (queries * keys + 4)
    if half and not in_registers:
        splits = _key_splits(chip, batch * heads, key_len, keys)
        per_head += splits * keys * (round_up(head_dim, queries) + round_up(value_dim, queries))
    workspace = batch * heads * round_up(per_head, 4) * 4
    rows = batch * heads * query_len
    grad_copy, delta = copy_bytes(grad.transpose(1, 2)), rows * 4
    volta = (7, 0) <= chip.capability < (7, 5)
    last = (grad_copy, delta, workspace)
    if half and (in_registers or not volta):
        return last
    product = rows * value_dim * 4
    first = (grad_copy, *(2 * (product,) if half else ()), product, delta, delta)
    return max(first, last, key=sum)


def _efficient_tile(chip: Chip, half: bool, head_dim: int, dropout: bool) -> tuple[int, int, bool]:
    """Return queries and keys of a tile, and whether dk and dv stay in registers, of the first kernel that fits.

    Source: kernels/cutlassB.h and generate_kernels.py: tiles of 128 queries need the shared memory of the large chips.
    """
    if head_dim > WIDEST_HEAD:
        raise NotEstimableError(
            f"not estimable: an attention head has {head_dim} numbers; expected at most {WIDEST_HEAD}, as torch has no "
            "kernel for more. Pass attn_implementation='eager', or a model with more heads"
        )
    width = next(width for width in (32, 64, 128, WIDEST_HEAD) if head_dim <= width)
    ampere = chip.capability >= (8, 0)
    if half and chip.capability in ((8, 6), (8, 9)) and 64 < head_dim <= 96 and not dropout:
        return 128, 64, True
    queries = 128 if width > 64 and chip.wide_shared_memory and (ampere or half) else 64
    in_registers = half and width <= queries
    return queries, 128 if in_registers and ampere and width > 64 else 64, in_registers


def _key_splits(chip: Chip, heads: int, key_len: int, keys: int) -> int:
    if chip.capability < (7, 0) or (heads >= 256 and key_len <= 2 * keys):
        return 1
    return max(1, min(divide_up(key_len, keys), 200 // heads))


# ---- the call


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    capability: tuple[int, int],
) -> Any:
    """Run ``F.scaled_dot_product_attention`` with the kernel that CUDA chooses; shapes (batch, heads, seq, head)."""
    needs_gradient = _needs_gradient(query, key, value)
    kernel = attention_kernel(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa, capability=capability)
    if kernel == "flash":
        width = query.shape[-1]
        scale = width**-0.5 if scale is None else scale
        query, key, value = (F.pad(tensor, (0, -width % 8)) if width % 8 else tensor for tensor in (query, key, value))
        out = _aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
        return out[..., :width]
    bias = None if attn_mask is None else _bias(attn_mask, query, key, padded=kernel == "efficient")
    if kernel == "math":
        return _math_attention(query, key, value, bias, dropout_p, is_causal, scale, enable_gqa)
    if kernel == "cudnn":
        return _aten._scaled_dot_product_cudnn_attention(
            query, key, value, bias, needs_gradient, dropout_p, is_causal, False, scale=scale
        )[0]
    return _aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, needs_gradient, dropout_p, is_causal, scale=scale
    )[0]


def _math_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *rest: Any) -> Any:
    """Run the kernel without fusion; in 16 bits it computes in float32, unless allowed not to."""
    dropout_p, is_causal, scale, enable_gqa = rest
    wide = (tensor.float() if tensor.dtype in _HALF else tensor for tensor in (query, key, value))
    out = _aten._scaled_dot_product_attention_math(
        *wide, mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
    )[0]
    return out.to(query.dtype)


def _bias(mask: Tensor, query: Tensor, key: Tensor, *, padded: bool) -> Tensor:
    """Return a mask as the additive bias of a kernel, (batch, heads, query, key).

    A bool mask becomes a new tensor in every call; the memory-efficient kernel needs rows at multiples of 8 elements.
    """
    if mask.dtype == torch.bool:
        zero, least = (torch.full((), v, dtype=query.dtype, device=mask.device) for v in (0.0, float("-inf")))
        mask = torch.where(mask, zero, least)
    width = mask.shape[-1]
    if padded and width % 8:
        mask = F.pad(mask, (0, -width % 8))[..., :width]
    return mask.expand(*query.shape[:-1], key.shape[-2])
