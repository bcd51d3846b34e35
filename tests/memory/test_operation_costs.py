"""Costs of operations, counted by hand, and their prices; what processes and hosts send each other in a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from blocks import empty as meta
from torch import nn

from hf_memopt.gpus import GPUS
from hf_memopt.prediction.memory.optimizers import ParameterFacts, optimizer_memory
from hf_memopt.prediction.memory.step_time import Operation, Prices, StepCosts
from hf_memopt.prediction.memory.step_time import prices as module
from hf_memopt.prediction.memory.step_time.operations import _Counting, optimizer_operations
from hf_memopt.prediction.memory.step_time.prices import step_time
from hf_memopt.prediction.memory.step_time.streaming import (
    HOST_BYTES_PER_SECOND,
    Streaming,
)
from hf_memopt.types import StepSettings

A100 = "A100 80GB"
aten = torch.ops.aten


def moved(operations: Counter[Operation]) -> float:
    return sum(number * cost.moved_bytes for cost, number in operations.items())


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
