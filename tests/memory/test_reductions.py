"""Reductions on CUDA: the staging buffers, worked out by hand from the source."""

from __future__ import annotations

import pytest
import torch
from blocks import A100, BF16, FP32, RTX_3090, T4, Blocks, empty, header, hidden_bytes

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("shape", "dims", "capability", "multiprocessors", "blocks"),
    [
        # the gradient of a bias: blocks of 32 x 4 threads, 4 outputs a thread
        ((4096, 1024), [0], A100, 108, (4 * 1024 * 64 * 128, 4 * 8)),  # 64 shares of 16 values a thread
        ((4096, 4096), [0], A100, 108, (4 * 4096 * 54 * 128, 4 * 32)),  # 54 = 1728 blocks over 32
        ((32, 128, 4096), [0, 1], A100, 108, (4 * 4096 * 54 * 128, 4 * 32)),
        ((4096, 4096), [0], RTX_3090, 20, (4 * 4096 * 8 * 128, 4 * 32)),  # 8 = 240 blocks over 32
        ((4096, 4096), [0], T4, 40, (4 * 4096 * 10 * 128, 4 * 32)),  # 1024 threads on a multiprocessor
        ((512, 4096), [0], A100, 108, ()),  # 128 values a thread
        ((1 << 20,), [0], A100, 108, (4 * 128, 4)),  # one output: 512 threads, 128 shares
        ((1024, 1024), [], A100, 108, (4 * 128, 4)),
        ((32, 128, 1024), [-1], A100, 108, ()),
        ((1, 1024), [0], A100, 108, ()),
    ],
)
def test_sum(
    shape: tuple[int, ...],
    dims: list[int],
    capability: tuple[int, int],
    multiprocessors: int,
    blocks: tuple[int, ...],
) -> None:
    source = empty(*shape)
    out = torch.sum(source, dims)
    func = aten.sum.dim_IntList
    assert hidden_bytes(func, (source, dims), {}, out, capability, multiprocessors=multiprocessors) == blocks


def test_sum_of_a_scalar_takes_nothing() -> None:
    scalar = torch.empty((), device="meta")
    assert hidden_bytes(aten.sum.dim_IntList, (scalar, [0]), {}, scalar, A100) == ()


def test_sum_of_other_types_copies_first() -> None:
    mask = empty(32, 128, dtype=torch.bool)
    assert hidden_bytes(aten.sum.default, (mask,), {}, mask.sum(), A100) == (4096 * 8,)
    logits = empty(16, 100, dtype=BF16)
    out = logits.sum(-1, dtype=FP32)
    assert hidden_bytes(aten.sum.dim_IntList, (logits, [-1]), {"dtype": FP32}, out, A100) == ()


def test_gpu_without_a_count_is_the_largest_of_its_capability() -> None:
    args = (empty(4096, 4096), [0])
    known = hidden_bytes(aten.sum.dim_IntList, args, {}, empty(4096), A100, multiprocessors=108)
    assert hidden_bytes(aten.sum.dim_IntList, args, {}, empty(4096), A100) == known


def test_bias_gradient_is_the_sum_that_a_linear_layer_runs() -> None:
    layer = torch.nn.Linear(1024, 4096, device="meta")
    with Blocks(A100) as blocks:
        layer(empty(32, 128, 1024)).backward(empty(32, 128, 4096))
    assert blocks.seen["aten.sum.dim_IntList"] == [(4 * 4096 * 54 * 128, 4 * 32)]


def test_reduction_constants_are_those_of_torchs_header() -> None:
    text = header("ATen", "native", "cuda", "Reduce.cuh")
    for line in (
        "static constexpr int MAX_NUM_THREADS = 512;",
        "constexpr int max_values_per_thread = 256;",
        "constexpr int min_values_per_thread = 16;",
        "auto size = (int64_t)element_size_bytes * num_outputs * ctas_per_output;",
        "size *= block().x * output_vec_size;",
        "return sizeof(int) * grid().x;",
    ):
        assert line in text
