"""Run ``F.scaled_dot_product_attention`` on meta tensors with the kernel that CUDA chooses and the copies around it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from hf_memopt.memory.cuda.attention import attention_kernel

__all__ = ["attend"]

_aten = torch.ops.aten
_HALVES = (torch.float16, torch.bfloat16)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    *,
    capability: tuple[int, int],
) -> Any:
    """Run ``F.scaled_dot_product_attention`` with the kernel that CUDA chooses; shapes (batch, heads, seq, head)."""
    needs_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    kernel = attention_kernel(
        dtype=query.dtype,
        head_dim=query.shape[-1],
        value_dim=value.shape[-1],
        capability=capability,
        query_len=query.shape[-2],
        key_len=key.shape[-2],
        has_mask=attn_mask is not None,
        mask_requires_grad=attn_mask is not None and attn_mask.requires_grad,
        is_causal=is_causal,
        dropout_p=dropout_p,
        gqa=enable_gqa and key.shape[-3] != query.shape[-3],
        requires_grad=needs_gradient,
    )
    if kernel == "flash":
        width = query.shape[-1]
        scale = width**-0.5 if scale is None else scale
        query, key, value = (F.pad(tensor, (0, -width % 8)) if width % 8 else tensor for tensor in (query, key, value))
        out = _aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
        return out[..., :width]
    if kernel == "math":
        return _math_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    bias = None if attn_mask is None else _bias(attn_mask, query, key, padded=kernel == "efficient")
    if kernel == "cudnn":
        return _aten._scaled_dot_product_cudnn_attention(
            query, key, value, bias, needs_gradient, dropout_p, is_causal, False, scale=scale
        )[0]
    return _aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, needs_gradient, dropout_p, is_causal, scale=scale
    )[0]


def _math_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, *rest: Any
) -> Any:
    """Run the kernel without fusion; in 16 bits it computes in float32."""
    dropout_p, is_causal, scale, enable_gqa = rest
    wide = (tensor.float() if tensor.dtype in _HALVES else tensor for tensor in (query, key, value))
    out = _aten._scaled_dot_product_attention_math(
        *wide, mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
    )[0]
    return out.to(query.dtype)


def _bias(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor, *, padded: bool) -> torch.Tensor:
    """Return a mask as the additive bias of a kernel, (batch, heads, query, key).

    A bool mask becomes a new tensor in every call; the memory-efficient kernel needs rows at multiples of 8 elements.
    """
    if mask.dtype == torch.bool:
        zero, least = (torch.full((), v, dtype=query.dtype, device=mask.device) for v in (0.0, float("-inf")))
        mask = torch.where(mask, zero, least)
    width = mask.shape[-1]
    if padded and width % 8:
        mask = F.pad(mask, (0, -width % 8))[..., :width]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
