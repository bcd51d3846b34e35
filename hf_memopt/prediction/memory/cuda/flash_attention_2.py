"""FlashAttention-2 on the meta device: what transformers allocates around its kernel, and the kernel's own shapes.

The package ``flash_attn`` needs a GPU. Its kernel saves what torch's own flash kernel saves (query, key, value, the
output, and one float32 per head and token), so torch's is run instead. In a batch with padding the real tokens are
gathered before it and scattered back after it; here all tokens are, which is an upper bound.

Source: transformers 5.23, ``modeling_flash_attention_utils.py``, ``_flash_attention_forward``; the same in 5.8.1.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from hf_memopt.prediction.memory.settings import NotEstimableError

STAND_IN = "hf_memopt_fa2"
"""The name under which transformers knows the stand-in; with "flash" in it transformers would look for the package."""


def use_stand_in(model: Any) -> None:
    """Give a transformers model on the meta device the allocations of ``attn_implementation="flash_attention_2"``.

    The stand-in is registered with transformers under its own name; nothing else in transformers changes.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import flash_attention_mask

    if not getattr(model, "_supports_flash_attn", False):  # seen in transformers 5.8.1, 5.17.0 and 5.23.0
        raise NotEstimableError(
            f"not estimable: {type(model).__name__} does not support attn_implementation='flash_attention_2'; expected "
            "'sdpa' or 'eager'. Pass attn_implementation='sdpa'"
        )
    AttentionInterface.register(STAND_IN, attend)
    AttentionMaskInterface.register(STAND_IN, flash_attention_mask)
    model.set_attn_implementation(STAND_IN)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Return (batch, seq, heads, head) from query, key and value of (batch, heads, seq, head), and no weights."""
    batch, heads, seq = query.shape[:3]
    causal = bool(getattr(module, "is_causal", False) if is_causal is None else is_causal)
    if query.dtype == torch.float32 and torch.is_autocast_enabled("cuda"):  # after rotary angles
        lower = torch.get_autocast_dtype("cuda")
        query, key, value = query.to(lower), key.to(lower), value.to(lower)
    if attention_mask is not None:
        every = torch.arange(batch * seq, device=query.device)
        query, key, value = (_gathered(tensor, every) for tensor in (query, key, value))
    out = F.scaled_dot_product_attention(
        query,
        key,
        value,
        dropout_p=dropout,
        is_causal=causal and seq == key.shape[2],
        scale=scaling,
        enable_gqa=key.shape[1] != heads,
    )
    if out.dtype == torch.float32:
        raise NotEstimableError(
            "not estimable: attn_implementation='flash_attention_2' computes in 16 bits only; expected 16-bit weights "
            "or autocast. Pass precision='bf16'"
        )
    out = out.transpose(1, 2)
    if attention_mask is not None:
        whole = torch.zeros(batch * seq, *out.shape[2:], dtype=out.dtype, device=out.device)
        whole[every] = out.reshape(batch * seq, *out.shape[2:])
        out = whole.view(batch, seq, *out.shape[2:])
    return out, None


def _gathered(tensor: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return a tensor of (batch, heads, seq, head) whose tokens were gathered, one copy; its shape stays."""
    turned = tensor.transpose(1, 2)
    rows = turned.reshape(-1, *turned.shape[2:])
    return rows[tokens[: rows.shape[0]]].view(turned.shape).transpose(1, 2)
