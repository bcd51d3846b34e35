"""The predicted time of a step: operations counted by hand, what changes their number, prices, published rows."""

from __future__ import annotations

import importlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import tiny
from hf_memopt import GPUS, custom_gpu
from hf_memopt.memory import Estimate, estimate
from hf_memopt.memory.optimizers import ParameterFacts, optimizer_memory
from hf_memopt.memory.quantized import stand_ins
from hf_memopt.memory.recording.step import recording
from hf_memopt.memory.settings import StepSettings
from hf_memopt.memory.step_time import Operation, Prices, StepCosts, equally_fast, operation_of
from hf_memopt.memory.step_time import prices as module
from hf_memopt.memory.step_time.operations import _Counting, optimizer_operations
from hf_memopt.memory.step_time.prices import PARTS, step_time
from hf_memopt.memory.tracking import StorageTracker

A100 = "A100 80GB"
VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def meta(*size: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device="meta", requires_grad=grad)


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


def small(**settings: Any) -> Estimate:
    """Return the estimate of a tiny BERT."""
    given = {"batch_size": 4, "seq_len": 16, "gpu": A100, "precision": "fp32", **settings}
    return estimate(tiny.bert_config(), task="sequence-classification", **given)


def work_of(found: Estimate) -> float:
    """Return the floating-point operations of a step."""
    assert found.step_costs is not None
    costs = found.step_costs.passes
    return sum(times * number * cost.flops for times, ops in costs for cost, number in ops.items())


def moved(operations: Counter[Operation]) -> float:
    return sum(number * cost.moved_bytes for cost, number in operations.items())


# ---- Operations, by hand


def test_a_linear() -> None:
    x, weight, bias = meta(5, 8, grad=True), meta(4, 8, grad=True), meta(4, grad=True)
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


def test_a_layer_norm() -> None:
    x, weight, bias = meta(6, 8, grad=True), meta(8, grad=True), meta(8, grad=True)
    rows, statistics = 6 * 8, 2 * 6
    [forward] = counted(lambda: F.layer_norm(x, (8,), weight, bias))
    assert forward == Operation("memory", moved_bytes=4 * (2 * rows + 2 * 8 + statistics))
    [backward] = counted(lambda: F.layer_norm(x, (8,), weight, bias), backward=True)
    read, written = 2 * rows + statistics + 2 * 8, rows + 2 * 8
    assert backward == Operation("memory", in_backward=True, moved_bytes=4 * (read + written + 2 * rows))


def test_rows_of_a_table_are_read_and_not_the_table() -> None:
    table, ids = meta(1000, 8), torch.empty(3, dtype=torch.int64, device="meta")
    [kernel] = counted(lambda: F.embedding(ids, table))
    assert kernel.moved_bytes == 2 * 3 * 8 * 4 + 3 * 8


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
    ],
    ids=["in place", "zero", "copy", "new zeros", "one input twice", "expanded", "cast"],
)
def test_bytes_of_kernels(run: Callable[[torch.Tensor], torch.Tensor], bytes_: int) -> None:
    x = meta(4, 4)
    [kernel] = counted(lambda: run(x))
    assert kernel.moved_bytes == bytes_


def test_views_have_no_kernel() -> None:
    x = meta(4, 4)
    assert counted(lambda: x.t().reshape(2, 8)[:1].unsqueeze(0)) == counted(lambda: x.t().contiguous())
    assert not counted(lambda: x.view(16).expand(2, 16).transpose(0, 1))


def test_dequantising_reads_the_packed_weight() -> None:
    packed, absmax = meta(64 * 32 // 2, 1, dtype=torch.uint8), meta(64 * 32 // 64, dtype=torch.uint8)
    [kernel] = counted(lambda: stand_ins._OPERATORS.dequantized(packed, absmax, (64, 32), torch.bfloat16))
    assert kernel.kind == "memory"
    assert kernel.moved_bytes == 64 * 32 // 2 + 64 * 32 // 64 + 2 * 64 * 32


# ---- Passes


def test_operations_have_the_flops_of_the_estimate() -> None:
    plain, recomputing = small(), small(checkpointing=True)
    assert work_of(plain) == plain.flops
    assert work_of(recomputing) == recomputing.flops > 1.2 * plain.flops
    assert plain.step_costs is not None
    assert recomputing.step_costs is not None
    forward = [cost for cost in plain.step_costs.passes[0][1] if cost.kind == "product" and not cost.in_backward]
    [(_, ops)] = recomputing.step_costs.passes
    # what is recomputed is launched from Python: twice those of the layers, once those of the head
    assert sum(number for cost, number in ops.items() if cost.kind == "product" and not cost.in_backward) > len(forward)


@pytest.mark.parametrize("settings", [{"gradient_accumulation_steps": 4}, {"micro_batch_size": 1}])
def test_accumulation(settings: dict[str, int]) -> None:
    found = small(**settings).step_costs
    assert found is not None
    (once, first), (others, later) = found.passes
    assert (once, others, found.micro_batches) == (1, 3, 4)
    assert found.examples == 4 * settings.get("gradient_accumulation_steps", 1)
    added = later - first
    parameters = small().trainable_parameters
    assert moved(added) == 3 * 4 * parameters  # the gradient so far is read and written, the new one is read
    assert sum(added.values()) == len(list(tiny.bert().parameters()))


def test_gradients_that_are_kept_are_added_to_and_zeroed() -> None:
    kept, dropped = small(zero_grad_to_none=False).step_costs, small().step_costs
    assert kept is not None
    assert dropped is not None
    gradients = 4 * small().trainable_parameters
    assert moved(kept.passes[0][1]) - moved(dropped.passes[0][1]) == 3 * gradients
    assert moved(kept.optimizer) - moved(dropped.optimizer) == gradients


def test_lengths_give_the_mean_step() -> None:
    mean = small(seq_len=None, lengths=[32, 16, 16]).step_costs
    long, short = small(seq_len=32).step_costs, small(seq_len=16).step_costs
    assert mean is not None
    assert long is not None
    assert short is not None
    prices = Prices.of(GPUS[A100])
    apart = [step_time(costs, prices).seconds for costs in (long, short, short)]
    assert step_time(mean, prices).seconds == pytest.approx(sum(apart) / 3)
    assert mean.tokens == 4 * (32 + 16 + 16) / 3


@pytest.mark.skipif(VERSION < (5, 17), reason="5.8 does not offload")
def test_offloaded_activations_cross_pcie_twice() -> None:
    found = small(checkpointing={"offload": True})
    assert found.step_costs is not None
    [(_, ops)] = found.step_costs.passes
    copies = Counter({cost: number for cost, number in ops.items() if cost.kind == "pcie"})
    assert moved(copies) == 2 * found.host_bytes > 0


def test_another_optimizer_has_the_same_passes() -> None:
    one, other = small().step_costs, small(optim="sgd").step_costs
    assert one is not None
    assert other is not None
    assert one.passes == other.passes
    assert moved(other.optimizer) < moved(one.optimizer)


# ---- The optimizer's step

FACTS = [
    ParameterFacts("layer.weight", (300, 400), 4, is_embedding=False),
    ParameterFacts("layer.bias", (300,), 4, is_embedding=False, decays=False),
    ParameterFacts("head.weight", (500, 300), 4, is_embedding=False),
]
ELEMENTS = sum(fact.elements for fact in FACTS)


def step_of(optim: str, facts: Sequence[ParameterFacts] = FACTS, **changed: Any) -> Counter[Operation]:
    settings = StepSettings(**{"optim": optim, "precision": "fp32", "max_grad_norm": 0, **changed})
    return optimizer_operations(facts, optimizer_memory(facts, settings), settings)


@pytest.mark.parametrize(
    ("optim", "settings", "accesses"),
    [
        ("adamw_torch_fused", {}, 7),
        ("adamw_torch_fused", {"max_grad_norm": 1.0}, 7 + 3),
        ("adamw_torch_fused", {"precision": "fp16"}, 7 + 2),
        ("adamw_torch", {}, 18),
        ("sgd", {}, 3),
        ("adamw_bnb_8bit", {}, 3 + 1),
        ("lion_8bit", {}, 3 + 0.5),
    ],
)
def test_accesses_of_an_element(optim: str, settings: dict[str, Any], accesses: float) -> None:
    assert moved(step_of(optim, **settings)) / (4 * ELEMENTS) == pytest.approx(accesses, rel=0.05)  # scales, counters


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


def test_released_gradients_step_one_by_one() -> None:
    for optim in ("adamw_torch_fused", "adamw_torch"):
        together, alone = step_of(optim), step_of(optim, gradient_release=True)
        assert moved(together) == pytest.approx(moved(alone), rel=1e-3)
        assert sum(cost.kernels for cost in alone) >= len(FACTS) > max(cost.kernels for cost in together)
    released = small(gradient_release=True, max_grad_norm=0.0).step_costs
    clipped = small().step_costs
    assert released is not None
    assert clipped is not None
    assert moved(clipped.optimizer) - moved(released.optimizer) == 3 * 4 * small().trainable_parameters


def test_a_paged_state_crosses_pcie_both_ways() -> None:
    state = sum(fact.elements for fact in FACTS if fact.elements > 100_000)
    [crossing] = [cost for cost in step_of("paged_adamw_8bit") if cost.kind == "pcie"]
    assert crossing.moved_bytes == pytest.approx(2 * 2 * state, rel=0.05)


# ---- Prices


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


def test_copies_over_pcie_have_its_generation() -> None:
    copy = Operation("pcie", moved_bytes=10**9)
    for name, bandwidth in (("V100 16GB", 16e9), (A100, 32e9), ("RTX 5090", 64e9)):
        seconds, part = Prices.of(GPUS[name]).seconds(copy)
        assert part == "PCIe"
        assert seconds == pytest.approx(1e9 / (bandwidth * module.MEMORY_FRACTION), rel=1e-3)


def test_a_format_that_the_gpu_lacks_runs_as_float32() -> None:
    v100 = GPUS["V100 16GB"]
    seconds = {
        dtype: Prices.of(v100).seconds(Operation("product", dtype, flops=1e12))[0] for dtype in ("fp32", "bf16", "fp16")
    }
    assert seconds["bf16"] == seconds["fp32"] > 5 * seconds["fp16"]


def test_more_work_takes_longer_and_a_faster_gpu_is_faster() -> None:
    seconds = [small(batch_size=rows).step_time.seconds for rows in (1, 4, 16)]  # type: ignore[union-attr]
    assert seconds == sorted(seconds)
    base = Prices.of(GPUS[A100])
    costs = small().step_costs
    assert costs is not None
    faster = (
        replace(base, bandwidth=2 * base.bandwidth),
        replace(base, rates={name: 2 * rate for name, rate in base.rates.items()}),
        replace(base, launch_seconds=1e-6),
    )
    for prices in faster:
        assert step_time(costs, prices).seconds <= step_time(costs, base).seconds


def test_the_range_is_wider_where_less_is_known() -> None:
    busy = costs_of(Operation("product", "bf16", flops=10**14))
    measured, unmeasured = busy.on(GPUS[A100]), busy.on(GPUS["RTX 3090"])
    assert (measured.low, measured.high) == pytest.approx((0.88 * measured.seconds, 1.12 * measured.seconds))
    assert (unmeasured.low, unmeasured.high) == pytest.approx((0.8 * unmeasured.seconds, 1.2 * unmeasured.seconds))
    assert not measured.is_launch_bound
    waiting = costs_of(*[Operation("memory", moved_bytes=1)] * 2000).on(GPUS[A100])
    assert waiting.is_launch_bound
    assert waiting.low < 0.5 * waiting.seconds


def test_the_range_of_a_gpu_holds_its_published_rows() -> None:
    busy = costs_of(Operation("product", "fp16", flops=10**14))
    widths = {"V100 32GB": 0.12, "T4": 0.25, "RTX 3090": 0.2, "RTX 4090": 0.2, "RTX 4060 Laptop": 0.5, "L4": 0.5}
    assert set(GPUS) >= {*module._RANGES, *module._AT_MOST_75_WATTS}
    for name, width in widths.items():
        found = busy.on(name)
        assert (found.low, found.high) == pytest.approx(((1 - width) * found.seconds, (1 + width) * found.seconds))


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


def test_convolutional_networks_are_ranked_and_not_predicted() -> None:
    images = {"batch_size": 2, "gpu": A100, "precision": "fp16"}
    attention = estimate("vit-base-patch16-224", **images)
    assert attention.step_time is not None
    assert attention.step_costs is not None
    assert 0 < attention.step_costs.convolution_share < 1 / 50
    widths = {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 32, 64], "image_size": 32}
    for config in (transformers.ResNetConfig(embedding_size=8, **widths), transformers.ConvNextConfig(**widths)):
        found = estimate(config, **images)
        assert found.step_time is None
        share = f"{100 * found.step_costs.convolution_share:.0f} %"
        assert found.time_unknown == f"convolutions move {share} of its bytes, and how fast cuDNN's are is not known"
        assert found.step_costs.ranking_rule == "convolutions as fast as other products"
        assert found.step_costs.on("A100 80GB").seconds > 0


def test_times_within_five_percent_are_equal() -> None:
    assert equally_fast(1.0, 1.04)
    assert equally_fast(1.04, 1.0)
    assert not equally_fast(1.0, 1.06)


# ---- What an estimate says


def test_the_estimate_shows_the_time() -> None:
    found = small()
    time = found.step_time
    assert time is not None
    assert f"Time of a step, predicted: {time.seconds:.3g} s" in found.table()
    assert json.loads(found.to_json())["step_time"]["seconds"] == time.seconds
    assert "step_costs" not in json.loads(found.to_json())


def test_a_time_that_cannot_be_predicted_is_not_guessed() -> None:
    by_size = small(gpu=custom_gpu("8GB"))
    assert by_size.step_time is None
    assert by_size.step_costs is not None
    assert by_size.time_unknown == "custom 8.00 GiB has no known bandwidth and rate of products"
    assert "Time of a step: not predicted, custom 8.00 GiB has no known bandwidth" in by_size.table()
    assert small(optim="stable_adamw").time_unknown == "the step of optim='stable_adamw' is not counted"
    experts = estimate(
        transformers.MixtralConfig(
            vocab_size=100,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
        ),
        batch_size=1,
        seq_len=16,
        gpu=A100,
    )
    assert experts.step_time is None
    assert experts.time_unknown == "how many tokens each expert gets depends on the data"
    assert "s a step" not in experts.table()
    assert experts.step_costs is not None
    assert experts.step_costs.routes_tokens  # they rank set-ups


def test_without_a_gpu_there_is_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_memopt.memory.estimation.current_gpu", lambda: None)
    found = small(gpu=None)
    assert found.step_time is None
    assert found.time_unknown == ""
    assert "Time of a step" not in found.table()
    assert found.step_costs is not None
    assert found.step_costs.on(GPUS[A100]).seconds > 0
    with pytest.raises(ValueError, match=r"expected a GPU of the table\. Pass gpu='RTX 3060 12GB'"):
        found.step_costs.on(custom_gpu("8GB"))


def test_private_names_of_torch() -> None:
    """``_overloadpacket``, ``_schema`` of an operator and ``_cdata`` of a storage: seen in torch 2.6 to 2.13."""
    x = meta(4)
    host = {x.untyped_storage()._cdata}
    cost = operation_of(torch.ops.aten.clone.default, (x,), {}, meta(4), on_host=host)
    assert cost == Operation("pcie", moved_bytes=16)


# ---- Published rows


@pytest.fixture(scope="module")
def benchmark_rows() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module("step_time")


def published_cases(module: Any, source: str) -> list[Any]:
    cases = module.read_cases(BENCHMARKS / "published" / f"{source}.json")
    known = [case for case in cases if case.tokens_per_second and case.gpus == 1]
    return [case for case in known if "Mixtral" not in case.model and case.quantization != "gptq"]


CHEAP = ("vanilla bs4", "fp16 bs4")


def test_published_rows_are_ranked(benchmark_rows: Any) -> None:
    cases = published_cases(benchmark_rows, "measurements")
    rows = [benchmark_rows.compare(case) for case in cases if case.id.partition("/")[2] in CHEAP]
    assert len(rows) == len(CHEAP)
    figures = benchmark_rows.summary(rows)
    assert sorted(rows, key=lambda row: row.measured) == sorted(rows, key=lambda row: row.predicted.seconds)
    assert figures["worst"] <= 0.10


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize(("source", "rows"), [("measurements", 9), ("a100_throughput", 13)])
def test_all_published_rows_are_ranked(source: str, rows: int, benchmark_rows: Any) -> None:
    found = [benchmark_rows.compare(case) for case in published_cases(benchmark_rows, source)]
    figures = benchmark_rows.summary(found)
    assert figures["rows"] == rows
    assert figures["spearman"] >= 0.95
    assert figures["median"] <= 0.10
