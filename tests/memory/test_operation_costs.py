"""Costs of operations, counted by hand, and their prices; what processes and hosts send each other in a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from blocks import empty as meta
from torch import nn

from hf_memopt import GPUS, StepSettings
from hf_memopt.prediction.memory.optimizers import ParameterFacts, optimizer_memory
from hf_memopt.prediction.memory.quantized import stand_ins  # registers its operators with torch
from hf_memopt.prediction.memory.recording.step import recording
from hf_memopt.prediction.memory.step_time import Operation, Prices, StepCosts
from hf_memopt.prediction.memory.step_time import prices as module
from hf_memopt.prediction.memory.step_time.operations import _Counting, optimizer_operations
from hf_memopt.prediction.memory.step_time.prices import PARTS, step_time
from hf_memopt.prediction.memory.step_time.streaming import (
    HOST_BYTES_PER_SECOND,
    Streaming,
)
from hf_memopt.prediction.memory.tracking import StorageTracker

A100 = "A100 80GB"
aten = torch.ops.aten


def counted(run: Callable[[], torch.Tensor], *, backward: bool = False) -> list[Operation]:
    """Return the operations of ``run`` that have a kernel, or those of its backward pass."""
    tracker = StorageTracker()
    with recording(tracker):
        if not backward:
            with tracker.counting():
                run()
        else:
            out = run()
            gradient = torch.empty_like(out)
            with tracker.backward(), tracker.counting():
                torch.autograd.backward(out, gradient)
    tracker.close()
    return [cost for cost in tracker.operations[0].elements() if cost.kernels]


def moved(operations: Counter[Operation]) -> float:
    return sum(number * cost.moved_bytes for cost, number in operations.items())


def test_a_linear() -> None:
    x, weight, bias = meta(5, 8, requires_grad=True), meta(4, 8, requires_grad=True), meta(4, requires_grad=True)
    flops = 2 * 5 * 8 * 4
    [product] = counted(lambda: F.linear(x, weight, bias))
    assert product == Operation("product", flops=flops, moved_bytes=4 * (5 * 8 + 4 * 8 + 4 + 5 * 4))
    ran = Counter(counted(lambda: F.linear(x, weight, bias), backward=True))
    of_input = Operation("product", in_backward=True, flops=flops, moved_bytes=4 * (5 * 4 + 4 * 8 + 5 * 8))
    of_weight = of_input._replace(moved_bytes=4 * (5 * 4 + 5 * 8 + 4 * 8))
    of_bias = Operation("memory", in_backward=True, moved_bytes=4 * (5 * 4 + 4))
    assert ran == Counter([of_input, of_weight, of_bias])


@pytest.mark.parametrize("is_causal", [False, True])
def test_fused_attention(is_causal: bool) -> None:
    shape = (2, 3, 16, 8)
    query, key, value = (meta(*shape, dtype=torch.bfloat16) for _ in range(3))
    [kernel] = counted(
        lambda: torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal, False)[0]
    )
    whole = 2 * (2 * 2 * 3 * 16 * 16 * 8)  # scores, and their product with the values
    assert (kernel.kind, kernel.dtype) == ("attention", "bf16")
    assert kernel.flops == (whole / 2 if is_causal else whole)
    logsumexp = 4 * 2 * 3 * 16
    assert kernel.moved_bytes == pytest.approx(4 * 2 * query.numel() + logsumexp, abs=32)  # seed and offset


@pytest.mark.parametrize(
    ("run", "bytes_"),
    [
        (lambda x: x.add_(1), 2 * 64),
        (lambda x: x.zero_(), 64),
        (lambda x: x.copy_(torch.empty_like(x)), 2 * 64),
        (lambda x: x.new_zeros(4), 16),
        (lambda x: x + x, 2 * 64),
        (lambda x: x + x[:1].expand(4, 4), 64 + 16 + 64),
        (lambda x: x.to(torch.bfloat16), 64 + 32),
        # rows of a table are read and not the table
        (lambda x: F.embedding(torch.empty(3, dtype=torch.int64, device="meta"), x), 2 * 3 * 16 + 3 * 8),
        # dequantising reads the packed weight
        (
            lambda x: stand_ins._OPERATORS.dequantized(
                meta(64 * 32 // 2, 1, dtype=torch.uint8), meta(32, dtype=torch.uint8), (64, 32), torch.bfloat16
            ),
            64 * 32 // 2 + 32 + 2 * 64 * 32,
        ),
    ],
)
def test_bytes_of_kernels(run: Callable[[torch.Tensor], torch.Tensor], bytes_: int) -> None:
    x = meta(4, 4)
    [kernel] = counted(lambda: run(x))
    assert (kernel.kind, kernel.moved_bytes) == ("memory", bytes_)


FACTS = [
    ParameterFacts("layer.weight", (300, 400), 4, is_embedding=False),
    ParameterFacts("layer.bias", (300,), 4, is_embedding=False, decays=False),
    ParameterFacts("head.weight", (500, 300), 4, is_embedding=False),
]


def step_of(optim: str, facts: Sequence[ParameterFacts] = FACTS, **changed: Any) -> Counter[Operation]:
    settings = StepSettings(**{"optim": optim, "precision": "fp32", "max_grad_norm": 0, **changed})
    return optimizer_operations(facts, optimizer_memory(facts, settings), settings)


@pytest.mark.parametrize("optim", ["adamw_torch", "adafactor"])
def test_the_run_of_different_shapes_is_that_of_all_tensors(optim: str) -> None:
    facts = [*FACTS, *FACTS, *FACTS[:1]]
    parameters = [nn.Parameter(meta(*fact.shape)) for fact in facts]
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    optimizer: Any = (
        torch.optim.AdamW(parameters, foreach=True, weight_decay=0.0)
        if optim == "adamw_torch"
        else transformers.Adafactor(parameters, scale_parameter=False, relative_step=False, lr=1e-3)
    )
    optimizer.step()
    with _Counting() as counting:
        optimizer.step()
    found = step_of(optim, facts)
    assert moved(found) == moved(counting.found)
    if optim == "adafactor":
        assert found == counting.found


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused", "adamw_bnb_8bit"])
def test_state_on_the_host_crosses_the_bus_in_both_directions_at_once(optim: str) -> None:
    """Of chunks of 96, 64 and 128 MiB: first 96 come in; then 64 beside 96, 128 beside 64; and the last ones go."""
    sizes = (12, 8, 16)
    facts = [ParameterFacts(str(size), (size, 2**20), 4, is_embedding=True) for size in sizes]
    waiting, plain = step_of(optim, facts, optimizer_state_on_host=True), step_of(optim, facts)
    [copies] = (cost for cost in waiting if cost.kind == "bus")
    assert copies.moved_bytes == (96 + 96 + 128 + 128) * 2**20
    del waiting[copies]
    assert moved(waiting) == moved(plain)
    prices = Prices.of(GPUS["RTX 4060"])  # of 8 lanes
    assert prices.seconds(copies) == (copies.moved_bytes / prices.bus + 12 * module.KERNEL_SECONDS, "PCIe")


def costs_of(*operations: Operation, micro_batches: int = 1) -> StepCosts:
    return StepCosts(((1.0, Counter(operations)),), Counter(), micro_batches, examples=8, tokens=1024)


def test_prices_by_hand() -> None:
    prices = Prices.of(GPUS[A100])
    flops, bytes_ = 10**12, 10**9
    product = flops / (GPUS[A100].peak_flops_per_second.bf16 * module.HALF_FRACTION) + module.KERNEL_SECONDS
    memory = bytes_ / (GPUS[A100].bandwidth_bytes_per_second * module.MEMORY_FRACTION) + module.KERNEL_SECONDS
    launch = module.LAUNCH_SECONDS * module.BACKWARD_LAUNCH_FRACTION
    found = step_time(
        costs_of(
            Operation("product", "bf16", flops=flops, moved_bytes=bytes_),
            Operation("memory", moved_bytes=bytes_),
            Operation("memory", in_backward=True, moved_bytes=1000),
        ),
        prices,
    )
    launches = launch + module.MICRO_BATCH_SECONDS
    assert found.seconds == pytest.approx(product + memory + launches)
    assert found.shares["products"] * found.seconds == pytest.approx(product)
    assert found.shares["launches"] * found.seconds == pytest.approx(launches)
    assert sum(found.shares.values()) == pytest.approx(1)
    assert set(found.shares) == set(PARTS)
    assert found.tokens_per_second() == pytest.approx(1024 / found.seconds)
    assert found.tokens_per_second(real_fraction=0.5) == pytest.approx(512 / found.seconds)
    assert found.examples_per_second == pytest.approx(8 / found.seconds)


def test_the_range_of_a_gpu_holds_its_published_rows_and_is_wider_where_less_is_known() -> None:
    busy = costs_of(Operation("product", "fp16", flops=10**14))
    widths = {A100: 0.12, "V100 32GB": 0.12, "T4": 0.25, "RTX 3090": 0.2, "RTX 4090": 0.2}
    widths |= {"RTX 4060 Laptop": 0.5, "L4": 0.5}
    assert set(GPUS) >= {*module._RANGES, *module._AT_MOST_75_WATTS}
    for name, width in widths.items():
        found = busy.on(name)
        assert (found.low, found.high) == pytest.approx(((1 - width) * found.seconds, (1 + width) * found.seconds))
        assert not found.is_launch_bound
    waiting = costs_of(*[Operation("memory", moved_bytes=1)] * 2000).on(GPUS[A100])
    assert waiting.is_launch_bound
    assert waiting.low < 0.5 * waiting.seconds


def test_products_have_the_clock_that_the_power_limit_leaves_and_memory_its_own() -> None:
    gpu = GPUS["T4"]
    cold = replace(gpu, sustained_fraction=1.0)
    assert gpu.sustained_fraction == 760 / 1590
    for kind in ("product", "convolution", "attention"):
        cost = Operation(kind, "fp16", flops=10**14)
        slow, fast = costs_of(cost).on(gpu).seconds, costs_of(cost).on(cold).seconds
        assert slow / fast == pytest.approx(1590 / 760, rel=1e-2)
    copy = costs_of(Operation("memory", moved_bytes=10**10))
    assert copy.on("Tesla T4").seconds == copy.on(cold).seconds


@pytest.mark.parametrize(
    ("computing", "seconds"),
    [(10.0, 10 + 0.25 + 0.5), (3.0, 4 + 0.25 + 0.5)],  # compute hides the copies, or waits for those in
)
def test_the_longest_of_three_lanes_decides(computing: float, seconds: float) -> None:
    """12 bytes in and 6 out at 3 a second, the first layer, and the host's step."""
    gpu = replace(GPUS["RTX 4060"], bandwidth_bytes_per_second=10**9)
    prices = replace(Prices.of(gpu), bus=3.0, bandwidth=1.0)
    memory = Operation("memory", kernels=1, launches=0.0, moved_bytes=computing - 2e-6)
    copies = Streaming(in_bytes=12, out_bytes=6, first_bytes=0.75, host_bytes=HOST_BYTES_PER_SECOND / 2)  # type: ignore[arg-type]
    costs = StepCosts(((1.0, Counter([memory])),), Counter(), 0.0, 1, 100.0, streaming=copies)
    time = step_time(costs, prices)
    assert time.seconds == pytest.approx(seconds)
    assert time.high == pytest.approx((computing + 0.75 + 18 / 3) * (1 + prices.error))
