"""What CUDA does differently: autocast's dtypes, grouped products, attention, offload."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from blocks import BF16, FP16, FP32
from blocks import empty as meta
from recorded import prepared, record, under_cuda

import tiny
from hf_memopt import StepSettings

VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])


CUDA_DTYPES: list[tuple[Callable[[torch.Tensor], torch.Tensor], torch.dtype, torch.dtype]] = [
    # call, dtype of the result for float32, for bfloat16
    (lambda x: x @ x, BF16, BF16),
    (lambda x: torch.einsum("ij,jk->ik", x, x), BF16, BF16),
    (lambda x: F.layer_norm(x, [8]), FP32, FP32),
    (lambda x: F.softmax(x, -1), FP32, FP32),
    (lambda x: x.softmax(-1), FP32, FP32),
    (lambda x: torch.softmax(x, -1), FP32, FP32),
    (lambda x: F.softmax(x, -1, dtype=BF16), BF16, BF16),
    (lambda x: F.log_softmax(x, -1), FP32, FP32),
    (lambda x: x**2, FP32, FP32),
    (lambda x: 2**x, FP32, FP32),
    (lambda x: torch.rsqrt(x), FP32, FP32),
    (lambda x: 1.0 / x, FP32, FP32),
    (lambda x: F.interpolate(x[None, None], scale_factor=2.0, mode="bilinear"), FP32, FP32),
    (lambda x: x.norm(), FP32, FP32),
    (lambda x: x.sum(), FP32, FP32),
    (lambda x: x.sum(dtype=BF16), BF16, BF16),
    (lambda x: torch.linalg.vector_norm(x), FP32, FP32),
    (lambda x: F.softplus(x), FP32, FP32),
    (lambda x: torch.addcmul(x, x, x), FP32, BF16),
    (lambda x: torch.addcmul(x, x.float(), x.to(BF16)), FP32, FP32),
    # on no list
    (lambda x: x.mean(), FP32, BF16),
    (lambda x: x + x, FP32, BF16),
    (lambda x: torch.cat([x, x]), FP32, BF16),
]


@pytest.mark.parametrize(("call", "of_float32", "of_bfloat16"), CUDA_DTYPES)
def test_dtypes_of_cudas_policies(
    call: Callable[[Any], Any], of_float32: torch.dtype, of_bfloat16: torch.dtype
) -> None:
    found = [under_cuda(lambda d=dtype: call(meta(8, 8, dtype=d)), autocast=BF16).out.dtype for dtype in (FP32, BF16)]
    assert found == [of_float32, of_bfloat16]


@pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="torch 2.10 and later")
@pytest.mark.parametrize("dtype", [FP32, FP16])
@pytest.mark.parametrize("turned", [False, True])
def test_grouped_product_of_other_types_than_bfloat16(dtype: torch.dtype, turned: bool) -> None:
    """One row of the result for each row; the gradient of the weights has their layout."""
    weights = meta(4, 16, 32, dtype=dtype, requires_grad=True)
    rows, offsets = meta(24, 32 if turned else 16, dtype=dtype, requires_grad=True), meta(4, dtype=torch.int32)
    shape = (24, 16 if turned else 32)
    given = weights.transpose(-2, -1) if turned else weights
    ran = under_cuda(lambda: F.grouped_mm(rows, given, offs=offsets), rows, weights, offsets, backward=True)
    assert ran.deltas == [shape[0] * shape[1] * dtype.itemsize]
    assert rows.grad is not None
    assert weights.grad is not None
    assert (weights.grad.shape, weights.grad.stride()) == (weights.shape, weights.stride())
    assert ran.flops == 3 * 2 * 24 * 16 * 32
    frozen = rows.detach()
    ran = under_cuda(lambda: F.grouped_mm(frozen, given, offs=offsets), backward=True)
    assert ran.flops == 2 * 2 * 24 * 16 * 32


def attention(
    capability: tuple[int, int],
    dtype: torch.dtype,
    *,
    length: int = 16,
    width: int = 32,
    key_heads: int = 4,
    mask: torch.dtype | None = None,
    **options: Any,
) -> tuple[list[int], list[str], torch.Tensor]:
    """Return what attention of 2 rows and 4 heads allocates in its forward pass, the operators of both, the result."""
    query = meta(2, 4, length, width, dtype=dtype, requires_grad=True)
    key, value = (meta(2, key_heads, length, width, dtype=dtype, requires_grad=True) for _ in range(2))
    given = query, key, value, None if mask is None else meta(2, 1, length, length, dtype=mask)
    ran = under_cuda(
        lambda: F.scaled_dot_product_attention(*given, **options), *given, backward=True, capability=capability
    )
    assert [t.grad is not None and t.grad.shape == t.shape for t in (query, key, value)] == [True] * 3
    return ran.deltas, [name for name in ran.operators if name.startswith("_scaled_dot_product")], ran.out


def pair(kernel: str) -> list[str]:
    return [f"_scaled_dot_product_{kernel}_attention", f"_scaled_dot_product_{kernel}_attention_backward"]


def heads(width: int, dtype: torch.dtype, length: int = 16) -> int:
    return 2 * 4 * length * width * dtype.itemsize


def biased(length: int, padded: int, dtype: torch.dtype = BF16) -> list[int]:
    """Return what a bool mask becomes: zero and least value, the bias, and with rows padded to 8 once more."""
    bias, wide = 2 * length * length * 2, 2 * length * padded * 2
    return [2, 2, bias, -2, -2, *([] if padded == length else [wide, -bias])]


OF_ROWS = 2 * 4 * 16 * 4  # a float32 for each row of each head


def masked(length: int) -> list[int]:
    """Return what the efficient kernel allocates with a mask: result, log-sum-exp of 32 rows, random state."""
    return [heads(32, BF16, length), 2 * OF_ROWS, 8, 8]


ATTENTION: list[tuple[tuple[int, int], torch.dtype, dict[str, Any], str, list[int]]] = [
    # result, log-sum-exp, random state
    ((8, 0), BF16, {}, "flash", [heads(32, BF16), OF_ROWS, 16, 8]),
    # query, key and value padded to a multiple of 8, and the result
    ((8, 0), BF16, {"width": 18, "is_causal": True}, "flash", [heads(24, BF16)] * 4 + [OF_ROWS, 16, 8]),
    # grouped heads are not repeated
    ((8, 0), BF16, {"key_heads": 2, "enable_gqa": True}, "flash", [heads(32, BF16), OF_ROWS, 16, 8]),
    # the log-sum-exp of 32 rows
    ((8, 0), FP32, {}, "efficient", [heads(32, FP32), 2 * OF_ROWS, 8, 8]),
    ((7, 5), FP16, {}, "efficient", [heads(32, FP16), 2 * OF_ROWS, 8, 8]),
    *(
        ((8, 0), BF16, {"length": length, "mask": torch.bool}, "efficient", [*biased(length, padded), *masked(length)])
        for length, padded in ((16, 16), (20, 24), (13, 16))
    ),
    # a bias that is given is padded, but not copied otherwise
    ((8, 0), BF16, {"mask": BF16}, "efficient", masked(16)),
    ((8, 0), BF16, {"mask": BF16, "length": 20}, "efficient", [2 * 20 * 24 * 2, *masked(20)]),
    ((9, 0), BF16, {"width": 64}, "cudnn", [heads(64, BF16), OF_ROWS, 8, 8]),
]


@pytest.mark.parametrize(("capability", "dtype", "options", "kernel", "expected"), ATTENTION)
def test_allocations_of_attention(
    capability: tuple[int, int], dtype: torch.dtype, options: dict[str, Any], kernel: str, expected: list[int]
) -> None:
    found, operators, out = attention(capability, dtype, **options)
    assert operators == pair(kernel)
    assert sorted(found) == sorted(expected)
    assert (out.shape, out.dtype) == ((2, 4, options.get("length", 16), options.get("width", 32)), dtype)


def test_attention_without_a_fused_kernel_computes_in_float32() -> None:
    """Turing has none for bfloat16; grouped heads with a mask have none before torch 2.14."""
    grouped = [((8, 0), {"mask": torch.bool, "key_heads": 2, "enable_gqa": True})] if VERSION < (2, 14) else []
    for capability, options in (((7, 5), {}), *grouped):
        found, operators, out = attention(capability, BF16, **options)
        assert operators == []
        assert {2 * 4 * 16 * 16 * 4, heads(32, FP32)} <= set(found)  # probabilities, query in float32
        assert out.dtype == BF16


def test_learned_bias_is_not_for_cudnn() -> None:
    """T5 without dropout on a Hopper GPU: cuDNN takes no mask that requires a gradient."""
    query = meta(2, 4, 16, 64, dtype=BF16, requires_grad=True)
    bias = meta(1, 4, 16, 16, dtype=BF16, requires_grad=True)
    for mask, kernel in ((bias.detach(), "cudnn"), (bias, "efficient")):
        ran = under_cuda(
            lambda m=mask: F.scaled_dot_product_attention(query, query, query, attn_mask=m),
            backward=True,
            capability=(9, 0),
        )
        assert [name for name in ran.operators if name.startswith("_scaled")] == pair(kernel)
    assert bias.grad is not None
    assert bias.grad.shape == bias.shape


@pytest.mark.parametrize("accelerator", [None, torch.device("cuda")], ids=["build for the CPU", "build for CUDA"])
def test_offloaded_activations_are_on_the_host_and_come_back_in_the_backward_pass(
    accelerator: torch.device | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a build for CUDA names its accelerator on a machine without a GPU too, where save_on_cpu pins no memory
    monkeypatch.setattr("transformers.modeling_utils.get_current_accelerator", lambda: accelerator, raising=False)
    batch = {name: meta(2, 12, dtype=torch.int64) for name in ("input_ids", "attention_mask")}
    batch["labels"], steps = meta(2, dtype=torch.int64), {}
    for offload in (False, True):
        settings = StepSettings(precision="fp32", checkpointing={"offload": True} if offload else True)
        with torch.device("meta"):
            model = tiny.bert()
        if not hasattr(model, "activation_checkpointing_enable") and offload:
            pytest.skip("this version of transformers has no offload")
        steps[offload] = record(prepared(model, settings), batch, settings, "cuda")
    hidden = 2 * 12 * 32 * 4
    assert steps[False].host_bytes == 0
    assert steps[True].host_bytes >= 2 * hidden  # the input of each of 2 layers
    events = {offload: step.tracker.events for offload, step in steps.items()}
    border = {offload: step.micro_batches[0].forward_end for offload, step in steps.items()}
    alive = [sum((delta == hidden) - (delta == -hidden) for _, delta in events[o][: border[o]]) for o in (False, True)]
    assert alive[0] - alive[1] == 2
    copied = [sum(delta == hidden for _, delta in events[offload][border[offload] :]) for offload in (False, True)]
    assert copied[1] == copied[0] + 2  # back to the GPU
    assert all(step.tracker.ignored == set() for step in steps.values())  # nothing of the host is left
