"""The predicted time of a step as an estimate shows it: what changes its operations, ranges, published rows."""

from __future__ import annotations

import importlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers

import tiny
from hf_memopt import Estimate, estimate
from hf_memopt.gpus import GPUS, custom_gpu

A100 = "A100 80GB"
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def small(**settings: Any) -> Estimate:
    """Return the estimate of a tiny BERT."""
    given = {"batch_size": 4, "seq_len": 16, "gpu": A100, "precision": "fp32", **settings}
    return estimate(tiny.bert_config(), task="sequence-classification", **given)


def costs_of(**settings: Any) -> Any:
    return small(**settings).step_costs


def moved(operations: Counter[Any]) -> float:
    return sum(number * cost.moved_bytes for cost, number in operations.items())


GRADIENTS = 4 * sum(parameter.numel() for parameter in tiny.bert().parameters())


def test_operations_have_the_flops_of_the_estimate() -> None:
    plain, recomputing = small(), small(checkpointing=True)
    for found in (plain, recomputing):
        passes = found.step_costs.passes  # type: ignore[union-attr]
        assert sum(times * number * cost.flops for times, ops in passes for cost, number in ops.items()) == found.flops
    assert recomputing.flops > 1.2 * plain.flops
    [(_, once)], [(_, twice)] = (found.step_costs.passes for found in (plain, recomputing))  # type: ignore[union-attr]
    # what is recomputed is launched from Python: twice those of the layers, once those of the head
    products = [
        sum(n for cost, n in ops.items() if cost.kind == "product" and not cost.in_backward) for ops in (once, twice)
    ]
    assert products[1] > products[0]


@pytest.mark.parametrize("settings", [{"gradient_accumulation_steps": 4}, {"micro_batch_size": 1}])
def test_accumulation(settings: dict[str, int]) -> None:
    found = costs_of(**settings)
    (once, first), (others, later) = found.passes
    assert (once, others, found.micro_batches) == (1, 3, 4)
    assert found.examples == 4 * settings.get("gradient_accumulation_steps", 1)
    added = later - first
    assert moved(added) == 3 * GRADIENTS  # the gradient so far is read and written, the new one is read
    assert sum(added.values()) == len(list(tiny.bert().parameters()))


def test_more_work_takes_longer_and_a_faster_gpu_is_faster() -> None:
    sizes: dict[str, Any] = {"seq_len": 256, "gpu": A100, "precision": "fp32"}
    found: Any = [estimate("gpt2", batch_size=rows, **sizes).step_costs for rows in (8, 16)]
    costs, twice = found
    assert costs.on(A100).seconds < twice.on(A100).seconds
    gpu = GPUS[A100]
    peak = gpu.peak_flops_per_second
    for faster in (
        replace(gpu, bandwidth_bytes_per_second=2 * (gpu.bandwidth_bytes_per_second or 0)),
        replace(gpu, peak_flops_per_second=replace(peak, fp32=2 * (peak.fp32 or 0))),
    ):
        assert costs.on(faster).seconds < costs.on(gpu).seconds


def test_the_estimate_shows_the_time() -> None:
    found = small()
    time: Any = found.step_time
    assert f" tokens/s, {time.seconds:.3g} s (" in " ".join(found.table().split())
    assert json.loads(found.to_json())["step_time"]["seconds"] == time.seconds
    assert "step_costs" not in json.loads(found.to_json())


@pytest.mark.slow
def test_convolutional_networks_and_experts_are_ranked_and_not_predicted() -> None:
    images = {"batch_size": 2, "gpu": A100, "precision": "fp16"}
    attention: Any = estimate("vit-base-patch16-224", **images)
    assert attention.step_time is not None
    assert 0 < attention.step_costs.convolution_share < 1 / 50
    widths = {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 32, 64], "image_size": 32}
    for config in (transformers.ResNetConfig(embedding_size=8, **widths), transformers.ConvNextConfig(**widths)):
        found: Any = estimate(config, **images)
        assert found.step_time is None
        share = f"{100 * found.step_costs.convolution_share:.0f} %"
        assert found.time_unknown == f"convolutions move {share} of its bytes, and how fast cuDNN's are is not known"
        assert found.step_costs.ranking_rule == "convolutions as fast as other products"
        assert found.step_costs.on(A100).seconds > 0
    sizes = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    config = transformers.MixtralConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)
    found = estimate(config, batch_size=1, seq_len=16, gpu=A100)
    assert found.step_time is None
    assert found.time_unknown == "how many tokens each expert gets depends on the data"
    assert "s a step" not in found.table()
    assert found.step_costs.ranking_rule == "equally many for each"


def test_a_time_that_cannot_be_predicted_is_not_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    by_size = small(gpu=custom_gpu("8GB"))
    assert by_size.step_time is None
    assert by_size.step_costs is not None
    assert by_size.time_unknown == "custom 8.00 GiB has no known bandwidth and rate of products"
    assert "Speed    not predicted, custom 8.00 GiB has no known bandwidth" in by_size.table()
    assert small(optim="stable_adamw").time_unknown == "the step of optim='stable_adamw' is not counted"
    monkeypatch.setattr("hf_memopt.prediction.memory.estimation.current_gpu", lambda: None)
    found: Any = small(gpu=None)
    assert (found.step_time, found.time_unknown) == (None, "")
    assert "predicted" not in found.table()
    assert found.step_costs.on(GPUS[A100]).seconds > 0
    with pytest.raises(ValueError, match=r"expected a GPU of the table\. Pass gpu='RTX 3060 12GB'"):
        found.step_costs.on(custom_gpu("8GB"))


@pytest.fixture(scope="module")
def benchmark_rows() -> Iterator[Any]:
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
