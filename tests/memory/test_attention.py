"""Attention on CUDA: the choice of the kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from blocks import A100, BF16, FP16, FP32, H100, L4, P100, RTX_3090, T4, empty
from recorded import under_cuda


def kernel_of(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **options: Any) -> str:
    """Return the kernel that runs under CUDA's semantics, "math" for parts."""
    capability = options.pop("capability")
    ran = under_cuda(lambda: F.scaled_dot_product_attention(query, key, value, mask, **options), capability=capability)
    found = [name.split("_")[4] for name in ran.operators if name.startswith("_scaled_dot_product")]
    return found[0] if found else "math"


USUAL = {"head_dim": 64, "query_len": 128, "key_len": 128}


@pytest.mark.parametrize(
    ("kernel", "capability", "dtype", "changed"),
    [
        ("flash", A100, BF16, {}),
        ("flash", RTX_3090, FP16, {"gqa": True}),
        ("efficient", RTX_3090, FP32, {}),
        ("efficient", RTX_3090, BF16, {"has_mask": True}),
        ("efficient", T4, FP16, {}),
        ("math", T4, BF16, {}),
        ("efficient", P100, FP32, {"head_dim": 33}),
        ("math", RTX_3090, FP32, {"head_dim": 33}),
        ("flash", RTX_3090, BF16, {"head_dim": 33}),  # it is padded
        ("math", RTX_3090, BF16, {"head_dim": 33, "has_mask": True}),
        ("math", RTX_3090, BF16, {"has_mask": True, "gqa": True}),
        ("efficient", RTX_3090, BF16, {"has_mask": True, "gqa": True, "release": (2, 14)}),
        ("efficient", A100, BF16, {"head_dim": 264}),
        ("flash", A100, BF16, {"head_dim": 256, "dropout_p": 0.1}),
        ("efficient", RTX_3090, BF16, {"head_dim": 256, "dropout_p": 0.1}),
        ("flash", RTX_3090, BF16, {"head_dim": 256}),
        ("efficient", L4, BF16, {"head_dim": 224}),
        ("efficient", (12, 0), BF16, {"head_dim": 224}),
        ("flash", L4, BF16, {"head_dim": 224, "requires_grad": False}),
        ("efficient", A100, BF16, {"value_dim": 128}),
        ("efficient", A100, BF16, {"is_causal": True, "query_len": 64}),
        ("math", A100, torch.float64, {}),
        ("math", A100, BF16, {"key_len": 0}),
        ("cudnn", H100, BF16, {}),
        ("cudnn", H100, BF16, {"has_mask": True, "gqa": True}),
        ("efficient", H100, BF16, {"mask_requires_grad": True}),  # T5's bias of positions
        ("cudnn", H100, BF16, {"head_dim": 256}),
        ("flash", (10, 0), BF16, {"head_dim": 256}),
        ("cudnn", (10, 3), BF16, {"head_dim": 192, "value_dim": 128}),
        ("flash", H100, BF16, {"key_len": 1, "query_len": 1}),
        ("flash", H100, BF16, {"dropout_p": 0.1}),  # no multiple of 1/16
        ("cudnn", H100, BF16, {"dropout_p": 0.125}),
        ("cudnn", H100, BF16, {"dropout_p": 0.1, "release": (2, 11)}),
        ("flash", H100, BF16, {"release": (2, 10)}),
        ("cudnn", H100, BF16, {"release": (2, 9)}),
        ("flash", H100, BF16, {"release": (2, 8)}),
        ("flash", (12, 0), BF16, {}),
        ("efficient", H100, FP32, {}),
    ],
)
def test_attention_kernel(
    monkeypatch: pytest.MonkeyPatch,
    kernel: str,
    capability: tuple[int, int],
    dtype: torch.dtype,
    changed: dict[str, Any],
) -> None:
    monkeypatch.setattr("hf_memopt.prediction.memory.cuda.attention.TORCH_RELEASE", changed.get("release", (2, 13)))
    width, queries, keys = (changed.get(name, usual) for name, usual in USUAL.items())
    rows = 2 if changed.get("gqa") else 4
    query = empty(1, 4, queries, width, dtype=dtype).requires_grad_(changed.get("requires_grad", True))
    key, value = (empty(1, rows, keys, each, dtype=dtype) for each in (width, changed.get("value_dim", width)))
    mask = empty(1, 1, queries, keys, dtype=dtype) if "has_mask" in changed else None
    if "mask_requires_grad" in changed:
        mask = empty(1, 1, queries, keys, dtype=dtype).requires_grad_()
    options = {name: value for name, value in changed.items() if name in ("dropout_p", "is_causal")}
    assert kernel_of(query, key, value, mask, **options, enable_gqa="gqa" in changed, capability=capability) == kernel


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
@pytest.mark.parametrize("has_mask", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_attention_kernel_is_the_gpus_own_choice(
    dtype: torch.dtype, has_mask: bool, dropout_p: float, head_dim: int
) -> None:
    query = torch.zeros(2, 4, 128, head_dim, dtype=dtype, device="cuda", requires_grad=True)
    mask = torch.ones(2, 1, 128, 128, dtype=torch.bool, device="cuda") if has_mask else None
    choice = torch._fused_sdp_choice(query, query, query, mask, dropout_p)
    on_meta = query.detach().to("meta").requires_grad_()
    bias = None if mask is None else mask.to("meta")
    capability = torch.cuda.get_device_capability()
    kernel = kernel_of(on_meta, on_meta, on_meta, bias, dropout_p=dropout_p, capability=capability)
    assert ("math", "flash", "efficient", "cudnn")[choice] == kernel
