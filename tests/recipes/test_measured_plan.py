"""``plan(measured=...)``: what a measurement corrects, by how much, and what it is refused for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

import tiny
from hf_memopt import Gpu, Measurement, Plan, Recipe, estimate, find_gpu, measure, plan, recipe
from hf_memopt.devices import gpus
from hf_memopt.recipes.measuring.recorder import StepMeter
from hf_memopt.recipes.planning.measured import Corrections
from hf_memopt.reports import Figures

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

GPU = find_gpu("RTX 3060 12GB")
OPTIONS: dict[str, Any] = {"seq_len": 64, "effective_batch_size": 4, "method": "full"}
CONTEXT_BYTES = 300 * 2**20


def config() -> transformers.LlamaConfig:
    return tiny.llama_config(hidden_size=128, intermediate_size=256, vocab_size=2000)


@pytest.fixture(scope="module")
def computed() -> Plan:
    return plan(config(), gpu=GPU, **OPTIONS)


@pytest.fixture(scope="module")
def predicted() -> Figures:
    """The prediction for four rows at once in bf16, as ``measure`` would write it."""
    found = estimate(config(), batch_size=4, seq_len=64, precision="bf16", gpu=GPU)
    assert found.step_time is not None
    time = found.step_time
    sizes = found.peak_allocated_bytes, found.peak_reserved_bytes, found.context_bytes
    return Figures(*sizes, {}, {}, time.seconds, time.low, time.high)


def measurement(predicted: Figures, seconds: float = 1.5, reserved: float = 1.25, **changed: Any) -> Measurement:
    """Return a measurement that differs from its prediction by these factors."""
    size = round((predicted.reserved_bytes or 0) * reserved)
    of_step = seconds * (predicted.seconds or 0)
    measured = Figures(0, size, CONTEXT_BYTES, {}, {}, of_step, of_step, of_step)
    told: dict[str, Any] = {
        "model": "LlamaForCausalLM",
        "parameters": sum(one.numel() for one in transformers.LlamaForCausalLM(config()).parameters()),
        "trainable_parameters": 1,
        **{"device": "cuda:0", "gpu": GPU.name, "host_peak_bytes": None, "out_of_memory": ""},
        "versions": dict.fromkeys(("hf-memopt", "torch", "transformers"), "0"),
        **{"method": "full", "precision": "bf16", "optim": "adamw_torch_fused", "checkpointing": False},
        **{"accumulation_steps": 1, "batch_size": 4, "seq_len": 64, "examples": 4.0, "tokens": 256.0},
        **{"steps": 13, "step_seconds": (of_step,), "measured": measured, "predicted": predicted},
    }
    return Measurement(**{**told, **changed})


def pairs(one: Plan, other: Plan) -> list[tuple[Any, Any]]:
    """Return the candidates that both have."""
    found = {(each.name, each.rows): each for each in other.candidates}
    return [(each, found[each.name, each.rows]) for each in one.candidates if (each.name, each.rows) in found]


def test_seconds_context_and_reserved_bytes_are_corrected(computed: Plan, predicted: Figures, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    taken = measurement(predicted)
    taken.write(path)
    found = plan(config(), measured=path, **OPTIONS)  # the GPU is that of the file
    assert found.gpu.name == GPU.name
    factor = taken.measured.reserved_bytes / predicted.reserved_bytes  # type: ignore[operator]
    compared = pairs(found, computed)
    assert len(compared) >= 4
    for one, plain in compared:
        assert one.corrected == ("context", "reserved", "seconds")
        assert one.context_bytes == CONTEXT_BYTES
        assert one.reserved_bytes == pytest.approx(factor * plain.reserved_bytes, abs=1)
        assert one.seconds == pytest.approx(1.5 * plain.seconds)
        is_kind = one.recipe.precision == "bf16" and one.recipe.optim == "adamw_torch_fused"
        error = 0.04 if is_kind else 0.11
        assert one.high == pytest.approx((1 + error) * one.seconds)
        assert one.low <= (1 - error) * one.seconds * (1 + 1e-9)
    assert str(path) in found.measured
    notes = "\n".join(found.notes)
    assert f"{path}: CUDA's context is 300.0 MiB, as measured" in notes
    assert f"{path}: reserved bytes x {factor:.3f}, as so much more was measured than predicted" in notes
    assert f"{path}: seconds x 1.500, as measured with LlamaForCausalLM (full, bf16, adamw_torch_fused)" in notes
    assert f"{path} was measured with torch 0, and " in notes
    table = found.table(100)
    assert "corrected by real steps on this GPU" in table
    assert "+ " in table.splitlines()[4]
    told = json.loads(found.to_json())
    assert told["measured"] == str(path)
    assert told["candidates"][0]["corrected"] == ["context", "reserved", "seconds"]
    assert found.recipe.purpose.endswith("computed, and corrected by a measurement")


def recipe_of(precision: str = "bf16", optim: str = "adamw_torch_fused", rows: int = 4) -> Recipe:
    sizes = {"effective_batch_size": rows, "per_device_train_batch_size": rows, "per_device_eval_batch_size": 1}
    return recipe("auto").replace(precision=precision, optim=optim, checkpointing=False, **sizes)


def corrected(taken: Measurement, gpu: Gpu = GPU, **of_recipe: Any) -> tuple[Any, Any, tuple[str, ...], str]:
    """Return an estimate, the same corrected, what of it was, and the notes."""
    corrections = Corrections.of(taken, "run.json", gpu)
    chosen = recipe_of(**of_recipe)
    found = estimate(config(), batch_size=4, seq_len=64, recipe=chosen, eval_batch_size=None, gpu=corrections.gpu)
    words = corrections.words(found, chosen)
    notes = "; ".join(corrections.notes([SimpleNamespace(corrected=words)]))  # type: ignore[list-item]
    return found, corrections.applied(found, chosen), words, notes


def test_the_set_up_that_was_measured_needs_what_was_measured(predicted: Figures) -> None:
    taken = measurement(predicted)
    found, after, words, _ = corrected(taken)
    assert words == ("context", "reserved", "seconds")
    assert found.peak_reserved_bytes == predicted.reserved_bytes
    assert after.peak_reserved_bytes == taken.measured.reserved_bytes
    assert after.total_bytes == taken.total_bytes
    assert after.step_time.seconds == pytest.approx(taken.measured.seconds)


A100 = find_gpu("A100 80GB")
OTHER = {"parameters": 10**9}
LESS = "reserved bytes stay as predicted: 25.0 % less was measured"
BOTH = ("context", "reserved", "seconds")
CORRECTED = [  # what the measurement differs in, the recipe, what is corrected, the error that is left, what is said
    ({"reserved": 0.75}, {}, ("context", "seconds"), 0.04, LESS),
    (OTHER, {}, ("context", "seconds"), 0.17, "reserved bytes stay as predicted: another model"),
    ({**OTHER, "gpu": A100.name}, {}, ("context",), None, "seconds stay as predicted"),
    ({"predicted": None}, {}, ("context",), None, "has no prediction, so neither seconds nor reserved bytes are"),
    ({}, {}, BOTH, 0.04, "seconds x 1.500"),
    ({}, {"optim": "adamw_8bit"}, BOTH, 0.11, "reserved bytes x 1.25"),
    ({}, {"precision": "fp32"}, BOTH, 0.11, "CUDA's context is 300.0 MiB, as measured"),
    ({"reserved": 1.0, "out_of_memory": "backward"}, {}, BOTH, 0.04, "as memory ran out there"),
]


@pytest.mark.parametrize(("changed", "of_recipe", "expected", "error", "says"), CORRECTED)
def test_what_a_measurement_corrects(
    changed: Any, of_recipe: Any, expected: Any, error: float | None, says: str, predicted: Figures
) -> None:
    factors = {name: changed[name] for name in ("reserved",) if name in changed}
    others = {name: value for name, value in changed.items() if name not in factors}
    gpu = find_gpu(changed.get("gpu", GPU.name))
    found, after, words, notes = corrected(replace(measurement(predicted, **factors), **others), gpu, **of_recipe)
    assert words == expected
    assert f"run.json: {says}" in notes or says in notes
    assert (after.peak_reserved_bytes > found.peak_reserved_bytes) is ("reserved" in expected)
    assert after.fits is not ("out_of_memory" in changed)
    if error is None:
        assert after.step_time == found.step_time
    else:
        assert after.step_time.high == pytest.approx((1 + error) * after.step_time.seconds)


OF_A_CPU = "is of a CPU, whose seconds and bytes say nothing of a GPU; expected a run on the"
OF_ANOTHER = "is of RTX 4060, and gpu='RTX 3060 12GB' is planned for; expected a measurement on that"
TOO_LARGE = "has 1024.00 GiB on RTX 3060 12GB, which has 12.00 GiB; expected"
UNFIT: list[tuple[dict[str, Any], str]] = [
    ({"gpu": "", "device": "cpu"}, OF_A_CPU),
    ({"gpu": "RTX 4060"}, OF_ANOTHER),
    ({"measured": Figures(0, 2**40, None, {}, {})}, TOO_LARGE),
]


@pytest.mark.parametrize(("changed", "message"), UNFIT)
def test_a_measurement_of_something_else_is_refused(predicted: Figures, changed: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^measured='the measurement' .*{message}"):
        plan(config(), gpu=GPU, measured=measurement(predicted, **changed), **OPTIONS)


def test_without_a_name_this_machines_gpu_counts(predicted: Figures, monkeypatch: Any) -> None:
    """And not that of the file, where they differ."""
    for module in ("request", "planner"):
        monkeypatch.setattr(f"hf_memopt.recipes.planning.{module}.current_gpu", lambda: gpus.GPUS["RTX 4060"])
    with pytest.raises(ValueError, match="is of RTX 3060 12GB, and gpu='RTX 4060' is planned for"):
        plan(config(), measured=measurement(predicted), **OPTIONS)


class Counters(StepMeter):
    """The meter of a GPU with the same counts at all times."""

    def read(self) -> dict[str, int]:
        return {"peak_allocated_bytes": 150 * 2**20, "peak_reserved_bytes": 200 * 2**20}

    def skip(self) -> None:
        pass

    def allocated_bytes(self) -> int:
        return 100 * 2**20

    def synchronize(self) -> None:
        pass


def test_the_whole_way_from_the_counters_of_a_gpu_to_a_plan(tmp_path: Path, monkeypatch: Any) -> None:
    """Only the counters are made up: steps, prediction, file and plan are real."""
    for module in ("memory.training_arguments", "recipes.measuring.child_process"):
        monkeypatch.setattr(f"hf_memopt.{module}.current_gpu", lambda: GPU)
    monkeypatch.setattr(
        "hf_memopt.recipes.measuring.recorder.meter_of", lambda device: Counters(torch.device("cuda:0"))
    )
    monkeypatch.setattr("hf_memopt.recipes.measuring.recorder.read_context", lambda device: CONTEXT_BYTES)
    rows = [{name: [5] * 32 for name in ("input_ids", "labels")}] * 16
    args = tiny.arguments(tmp_path / "out", per_device_train_batch_size=2, optim="adamw_torch_fused")
    trainer = transformers.Trainer(transformers.LlamaForCausalLM(config()), args, train_dataset=rows)
    found = measure(trainer, steps=2, path=tmp_path / "run.json")
    assert (found.gpu, found.device, found.total_bytes) == (GPU.name, "cuda:0", 500 * 2**20)
    assert found.predicted.context_bytes == GPU.context_bytes
    assert found.predicted.low < found.predicted.seconds < found.predicted.high  # type: ignore[operator]
    assert "peak reserved" in found.table()
    corrections = Corrections.of(found, "run.json", GPU)
    planned = plan(config(), gpu=GPU, measured=tmp_path / "run.json", **{**OPTIONS, "effective_batch_size": 1})
    assert {one.corrected for one in planned.candidates} == {("context", "reserved", "seconds")}
    expected = (
        f"seconds x {corrections.seconds_factor:.3f}, as measured with LlamaForCausalLM (full, fp32, adamw_torch_fused)"
    )
    assert expected in "; ".join(planned.notes)
