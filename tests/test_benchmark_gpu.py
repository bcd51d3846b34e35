"""benchmarks/gpu.py: its cases, what it repeats, its figures and its table, and a tiny run of the whole on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gpu
import gpu_case
import gpu_figures as figures
import gpu_setups as setups
import pytest
import results_file
import torch
from slow_cases import slow_except
from tables import tables

TABLES = tables(__file__)

ROOT = Path(__file__).resolve().parent.parent
COMMON = {"gpu": "GPU A", "device": "cuda", "commit": "abc", "versions": {"torch": "2.13.0", "cuda": "12.8"}}


def figures_of(name: str = "BERT-large, fp32", **changed: Any) -> dict[str, Any]:
    """Return the figures of a measured case."""
    row = {
        **COMMON,
        "name": name,
        "status": "measured",
        "predicted": {"allocated_bytes": 2**30, "reserved_bytes": 2**31, "fits": True},
        "measured": {"allocated_bytes": 2**30, "reserved_bytes": 2**31, "device_bytes": None, "step_seconds": 0.5},
        "errors": {"allocated": 0.0, "reserved": 0.0},
        "wall_seconds": 30.0,
    }
    return {**row, **changed}


def row_of(name: str = "BERT-large, fp32", date: str = "2026-01-01", **changed: Any) -> dict[str, Any]:
    return {"case": "estimate_errors", "figures": figures_of(name, **changed), "versions": {}, "date": date}


# ---- Cases ----------------------------------------------------------------------------------------------------------


def test_every_model_meets_every_setup_once() -> None:
    """And every prefix of the cases is spread over both."""
    cases = setups.ordered_cases()
    assert len({(case.model, case.setup) for case in cases}) == len(cases) == 8 * 7
    asked = {"fp32", "bf16", "bf16 + checkpointing", "8-bit Adam", "frozen body", "LoRA"}
    assert asked <= set(setups.SETUPS)
    for length in range(1, len(cases) + 1):
        models = [sum(case.model == model for case in cases[:length]) for model in setups.MODELS]
        assert max(models) - min(models) <= 1
        counts = [sum(case.setup == setup for case in cases[:length]) for setup in setups.SETUPS]
        assert max(counts) - min(counts) <= 2


def test_estimate_and_trainer_are_told_the_same(tmp_path) -> None:
    from hf_memopt.prediction.memory.settings import StepSettings

    own = [setups.Case("BERT-large", setup, tiny=True) for setup in setups.SETUPS]
    for case in own:
        settings = StepSettings(**setups.estimate_settings(case))
        args = setups.training_arguments(case, str(tmp_path), steps=4, use_cpu=True)
        assert args.bf16 is (settings.precision == "bf16")
        assert args.optim == settings.optim
        assert args.gradient_accumulation_steps == settings.gradient_accumulation_steps
        assert args.max_grad_norm == settings.max_grad_norm
        assert args.label_smoothing_factor == settings.label_smoothing_factor
        checkpointing = getattr(args, "activation_checkpointing", args.gradient_checkpointing)
        assert bool(checkpointing) is bool(settings.checkpointing)
        assert args.per_device_train_batch_size == case.batch_size


# ---- What is left to do ---------------------------------------------------------------------------------------------


def test_what_is_done_is_left_out_until_commit_versions_or_gpu_change() -> None:
    cases = setups.ordered_cases()[:3]
    rows = [row_of(cases[0].name), row_of(cases[1].name, status="oom"), row_of(cases[2].name, status="skipped")]
    assert gpu.undone(cases, rows, COMMON) == [cases[2]]
    for changed in ({"gpu": "GPU B"}, {"commit": "abd"}, {"versions": {"torch": "2.14.0", "cuda": "12.8"}}):
        assert gpu.undone(cases, rows, {**COMMON, **changed}) == cases


# ---- Tables ---------------------------------------------------------------------------------------------------------


def test_each_gpu_is_a_line_of_the_table(monkeypatch, tmp_path) -> None:
    rows = [
        row_of("a", errors={"allocated": -1.0, "reserved": 2.0, "total": 3.0}),
        row_of("b", errors={"allocated": 0.5, "reserved": 4.0, "total": -6.0}),
        row_of("c", status="oom"),
        row_of("d", status="skipped"),
        row_of("e", status="skipped"),
        row_of("a", gpu="GPU B", errors={"allocated": 0.25}),
        row_of("a", gpu="cpu", device="cpu"),
    ]
    (tmp_path / "GPUs.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    monkeypatch.setattr(results_file, "RESULTS", tmp_path)
    assert figures.estimate_errors().splitlines() == TABLES["table of GPUs"]


# ---- Tiny runs ------------------------------------------------------------------------------------------------------


def found_by(case: Any, folder: Path, device: str = "cpu", **facts: Any) -> Any:
    """Run a case in this process; return what it writes."""
    gpu_case.run(case, device, facts, folder / "out.json")
    return json.loads((folder / "out.json").read_text("utf-8"))


@pytest.mark.parametrize("index", slow_except((0,), range(8)))
def test_every_model_and_every_setup_runs_tiny_on_the_host(tmp_path, index) -> None:
    found = found_by(setups.ordered_cases(tiny=True)[index], tmp_path)
    assert found["status"] == "measured", found
    assert found["predicted"] is not None, found["reason"]
    errors = found["errors"]
    assert set(errors) == {"allocated", "weights", "gradients", "optimizer state"}
    # The GPU's allocator rounds every tensor up to 512 bytes: 1 to 5 % of tensors this small. The host's kernels keep
    # dropout masks in floats and other temporaries, and its attention is another.
    assert all(0 <= errors[name] <= 6 for name in ("weights", "gradients", "optimizer state")), errors
    assert abs(errors["allocated"]) <= 10, errors


@pytest.mark.slow
def test_the_whole_program_runs_resumes_and_repeats(tmp_path) -> None:
    out = tmp_path / "rows.jsonl"
    arguments = ["--device", "cpu", "--tiny", "--only", "vit-large, fp32*", "--out", str(out)]
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), *arguments]
    first, second = (subprocess.run(command, capture_output=True, text=True, timeout=300) for _ in range(2))
    assert first.returncode == 0, first.stdout + first.stderr
    assert first.stdout.splitlines()[0] == "cpu: 1 cases, 0 of them done, 1 to run"
    row = json.loads(out.read_text("utf-8"))  # one line
    assert row["case"] == "estimate_errors"
    assert (row["figures"]["name"], row["figures"]["status"]) == ("ViT-large, fp32 (tiny)", "measured")
    assert row["figures"]["versions"]["torch"] == torch.__version__
    assert second.returncode == 0
    assert second.stdout.splitlines()[0] == "cpu: 1 cases, 1 of them done, 0 to run"
    assert "| cpu | 1 | " in second.stdout
