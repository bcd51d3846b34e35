"""benchmarks/gpu.py: the order of its cases, what it repeats, its figures and its table, the processes that fail, and a
tiny run of the whole on the CPU. What needs a GPU is tested against torch's counters played by hand.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpu
import gpu_case
import gpu_figures as figures
import gpu_meters as meters
import gpu_setups as setups
import pytest
import results_file
import torch
from hypothesis import given
from hypothesis import strategies as st
from slow_cases import slow_except
from tables import tables

import tiny

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
    from hf_memopt.memory.settings import StepSettings

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


@pytest.mark.parametrize("build", [tiny.bert, tiny.llama])
def test_a_frozen_body_leaves_the_last_layer_and_the_head(build) -> None:
    model = build()
    setups.freeze_body(model)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained
    assert not any("embed" in name or ".0." in name for name in trained)
    assert any(".1." in name for name in trained)


# ---- What is left to do ---------------------------------------------------------------------------------------------


def test_what_is_done_is_left_out_until_commit_versions_or_gpu_change() -> None:
    cases = setups.ordered_cases()[:3]
    rows = [row_of(cases[0].name), row_of(cases[1].name, status="oom"), row_of(cases[2].name, status="skipped")]
    assert gpu.undone(cases, rows, COMMON) == [cases[2]]
    for changed in ({"gpu": "GPU B"}, {"commit": "abd"}, {"versions": {"torch": "2.14.0", "cuda": "12.8"}}):
        assert gpu.undone(cases, rows, {**COMMON, **changed}) == cases


# ---- Figures --------------------------------------------------------------------------------------------------------


def test_errors_are_signed_percents_of_what_was_measured() -> None:
    """What the device lacks is not held against it."""
    predicted = {"allocated_bytes": 98, "reserved_bytes": 110, "components": {"weights": 50, "gradients": 10}}
    measured = {"allocated_bytes": 100, "reserved_bytes": 100, "context_bytes": 40, "device_bytes": 200}
    measured["components"] = {"weights": 50, "gradients": 0}
    errors = {"allocated": -2.0, "reserved": 10.0, "total": -25.0, "weights": 0.0}
    assert figures.errors_of(predicted, measured) == errors
    assert "total" not in figures.errors_of(predicted, {**measured, "context_bytes": None})
    predicted = {"allocated_bytes": 150, "components_at_peak": {"workspace": 50, "weights": 100}}
    measured = {"allocated_bytes": 100, "without": ["workspace"]}
    assert figures.errors_of(predicted, measured) == {"allocated": 0.0}


@given(st.lists(st.floats(-50, 50), min_size=1, max_size=60))
def test_spread_equals_a_count_by_hand(errors) -> None:
    found = figures.spread_of(errors)
    sizes = [abs(error) for error in errors]
    assert found.cases == len(errors)
    assert found.median == pytest.approx(statistics.median(sizes))
    assert found.worst == max(sizes)
    assert found.worst_under == min([0.0, *errors])
    within = [size for size in sizes if size <= found.p95]
    assert found.p95 in sizes
    assert len(within) >= 0.95 * len(sizes)
    smaller = [size for size in sizes if size < found.p95]
    assert len(smaller) < math.ceil(0.95 * len(sizes))
    assert figures.spread_of([]) is None


def test_the_latest_row_of_a_case_on_a_gpu_counts() -> None:
    rows = [row_of(date="2026-01-02"), row_of(status="oom"), row_of(gpu="GPU B", status="oom")]
    assert sorted(row["figures"]["status"] for row in figures.latest(rows)) == ["measured", "oom"]


def test_rows_of_other_benchmarks_and_missing_files_are_passed_over(tmp_path) -> None:
    file = tmp_path / "GPU.jsonl"
    file.write_text(f'{{"case": "accuracy"}}\n\n{json.dumps(row_of())}\n', encoding="utf-8")
    assert figures.read_rows([file, tmp_path / "none.jsonl"]) == [row_of()]


# ---- Tables ---------------------------------------------------------------------------------------------------------


def test_without_a_gpu_the_table_says_so(monkeypatch, tmp_path) -> None:
    (tmp_path / "cpu.jsonl").write_text(json.dumps(row_of(device="cpu", gpu="cpu")), encoding="utf-8")
    monkeypatch.setattr(results_file, "RESULTS", tmp_path)
    assert figures.estimate_errors() == (
        "The figures of a GPU are still to come: no CUDA GPU was available when this was written. "
        "`make bench-gpu` measures them on yours."
    )


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


@pytest.mark.parametrize(("changed", "line"), TABLES["lines"])
def test_the_line_of_a_case_has_its_errors_or_its_reason(changed: dict[str, Any], line: str) -> None:
    assert gpu.line_of(figures_of(**changed)) == line


# ---- Processes that fail --------------------------------------------------------------------------------------------

WRITES = "import json, sys, os, time; out = sys.argv[sys.argv.index('--out') + 1]; "
PREDICTED = "open(out, 'w').write(json.dumps({'status': 'crash', 'predicted': {'reserved_bytes': 5}})); "


@pytest.fixture
def child(monkeypatch, tmp_path) -> Any:
    """Run a case whose process is a given script."""

    def run(script: str, timeout: float = 60) -> dict[str, Any]:
        file = tmp_path / "child.py"
        file.write_text(script, encoding="utf-8")
        monkeypatch.setattr(gpu, "CASE_FILE", file)
        options = argparse.Namespace(device="cpu", timeout=timeout)
        return gpu.run_case(setups.Case("BERT-large", "fp32"), COMMON, options)

    return run


STDERR = f"{PREDICTED}print(*range(9), sep='\\n', file=sys.stderr); sys.exit(3)"


@pytest.mark.parametrize(
    ("script", "timeout", "status", "reason", "predicted"),
    [
        (STDERR, 60, "crash", "exit code 3\n3\n4\n5\n6\n7\n8", {"reserved_bytes": 5}),
        ("os.kill(os.getpid(), 9)", 60, "crash", "exit code -9\n", None),
        ("time.sleep(60)", 0.5, "timeout", "not done after 0 s", None),
    ],
)
def test_a_process_that_fails_is_a_row(child, script, timeout, status, reason, predicted) -> None:
    """With the end of its stderr and its prediction; one that hangs is ended."""
    row = child(WRITES + script, timeout)
    assert (row["status"], row["reason"], row["predicted"]) == (status, reason, predicted)
    assert row["measured"] is None
    assert row["wall_seconds"] < 30


def test_what_a_process_wrote_is_the_row(child) -> None:
    row = child(WRITES + "open(out, 'w').write(json.dumps({'status': 'oom', 'reason': 'CUDA out of memory'}))")
    assert (row["status"], row["reason"]) == ("oom", "CUDA out of memory")
    assert (row["name"], row["batch_size"], row["seq_len"]) == ("BERT-large, fp32", 32, 128)
    assert row["settings"] == vars(setups.SETUPS["fp32"])


def test_a_failed_case_does_not_end_the_run(monkeypatch, tmp_path, capsys) -> None:
    statuses, out = iter(["oom", "crash", "measured"]), tmp_path / "out.jsonl"
    monkeypatch.setattr(
        gpu, "run_case", lambda case, common, options: figures_of(case.name, status=next(statuses), reason="no")
    )
    gpu.run_all(setups.ordered_cases()[:3], COMMON, argparse.Namespace(), out)
    rows = [json.loads(line)["figures"] for line in out.read_text("utf-8").splitlines()]
    assert [row["status"] for row in rows] == ["oom", "crash", "measured"]
    assert capsys.readouterr().out.splitlines()[:2] == [
        "[ 1/3] BERT-large, fp32: oom: no; predicted 2.00 GiB reserved; 30 s",
        "[ 2/3] RoBERTa-base, bf16: crash: no; predicted 2.00 GiB reserved; 30 s",
    ]


# ---- The program ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--device", "cpu"], 2, "--device cpu runs tiny shapes only. Call with --device cpu --tiny."),
        (["--only", "nothing"], 1, "only='nothing' matches no case; expected a pattern such as '*bf16*' for one of "),
        pytest.param(
            [],
            1,
            "device='cuda' cannot be used here; expected a CUDA GPU, or --device cpu --tiny.\nAssertionError: Torch",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU"),
        ),
    ],
)
def test_what_cannot_be_run_is_said(monkeypatch, capsys, words: list[str], code: int, says: str) -> None:
    answer = (None, "AssertionError: Torch not compiled with CUDA enabled", "exit code 1")
    monkeypatch.setattr(gpu, "run_child", lambda *_: answer)
    monkeypatch.setattr(sys, "argv", ["gpu.py", *words])
    with pytest.raises(SystemExit) as stop:
        sys.exit(gpu.main())
    assert stop.value.code == code
    assert says in "".join(capsys.readouterr())


# ---- Meters ---------------------------------------------------------------------------------------------------------


class PlayedGpu:
    """torch's counters and the driver's figure, played by hand."""

    def __init__(self, monkeypatch: Any, meters: Any) -> None:
        self.used, self.allocated, self.reserved, self.peak, self.peak_reserved = 300, 0, 0, 0, 0
        played = {
            "max_memory_allocated": lambda: self.peak,
            "max_memory_reserved": lambda: self.peak_reserved,
            "memory_reserved": lambda: self.reserved,
            "reset_peak_memory_stats": self.reset,
            "empty_cache": lambda: None,
            "synchronize": lambda: None,
        }
        for name, function in played.items():
            monkeypatch.setattr(torch.cuda, name, function)
        monkeypatch.setattr(meters, "device_used_bytes", lambda _: self.used)
        monkeypatch.setattr(torch, "zeros", lambda *_, **__: torch.ones(1))

    def reset(self) -> None:
        self.peak, self.peak_reserved = self.allocated, self.reserved

    def hold(self, allocated: int, reserved: int, peak: int, peak_reserved: int) -> None:
        self.used += reserved - self.reserved
        self.allocated, self.reserved, self.peak, self.peak_reserved = allocated, reserved, peak, peak_reserved


def test_the_gpu_meter_reads_the_peaks_and_what_the_device_holds(monkeypatch) -> None:
    played = PlayedGpu(monkeypatch, meters)
    meter = meters.GpuMeter("uuid")
    played.used += 90  # the context comes with the first kernel
    played.hold(1, 2, 1, 2)
    assert meter.make_context() == 90
    meter.begin(None)
    played.hold(50, 64, 100, 128)  # 64 of the 128 are given back
    played.used += 7  # kernels that were loaded later
    told = {"allocated_bytes": 100, "reserved_bytes": 128, "device_bytes": 90 + 7 + 128, "context_end_bytes": 97}
    assert meter.end() == told
    monkeypatch.setattr(meters, "device_used_bytes", lambda _: None)
    meter = meters.GpuMeter(None)  # without a driver that tells there is no total
    assert meter.make_context() is None
    assert {**meter.end(), "device_bytes": None, "context_end_bytes": None} == meter.end()


@pytest.mark.parametrize(("answer", "used_bytes"), [("1024\n", 2**30), ("[N/A]\n", None)])
def test_the_driver_is_asked_by_its_program(monkeypatch, answer: str, used_bytes: int | None) -> None:
    asked: list[list[str]] = []
    told = lambda command, **_: asked.append(command) or SimpleNamespace(stdout=answer)  # noqa: E731
    monkeypatch.setattr(meters.subprocess, "run", told)
    assert meters.device_used_bytes("abc") == used_bytes
    assert asked == [["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", "GPU-abc"]]


def test_the_host_meter_counts_every_byte_of_torchs_allocator() -> None:
    model = torch.nn.Linear(256, 256, bias=False)
    meter = meters.HostMeter()
    meter.begin(model)
    held = torch.empty(4096)
    torch.empty(1024, 1024).sum()
    found = meter.end()
    assert found["allocated_bytes"] == 4 * (256 * 256 + 4096 + 1024 * 1024 + 1)  # the sum's own element
    assert found["without"] == ["workspace"]
    assert held.numel() == 4096


def test_shared_storages_count_once_other_devices_not_and_state_however_deep() -> None:
    base = torch.zeros(100)
    tensors = [base, base[10:], torch.zeros(7), torch.empty(50, device="meta")]
    assert meters.storage_bytes(tensors, "cpu") == 4 * 107
    one, two, three = torch.zeros(1), torch.zeros(2), torch.zeros(3)
    assert meters.state_tensors({"a": {"step": one, "exp": [two, (three, 5)]}, "b": None}) == [one, two, three]


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


# ---- A case ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_case(monkeypatch) -> Any:
    """A case whose model is the suite's tiny BERT, and whose rows are its rows."""

    def build(case: Any, device: str) -> Any:
        with torch.device(device):
            return tiny.bert()

    monkeypatch.setattr(gpu_case, "build_model", build)
    monkeypatch.setattr(gpu_case, "make_rows", lambda case, count: tiny.rows(count))
    return setups.Case("BERT-large", "bf16", tiny=True)


def test_a_run_that_is_out_of_memory_keeps_its_prediction_and_its_peaks(small_case, monkeypatch, tmp_path) -> None:
    def out_of_memory(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore")

    monkeypatch.setattr(gpu_case, "predict", lambda case: {"reserved_bytes": 5})
    monkeypatch.setattr("transformers.Trainer.train", out_of_memory)
    found = found_by(small_case, tmp_path)
    assert (found["status"], found["reason"]) == ("oom", "CUDA out of memory. Tried to allocate 2 GiB.")
    assert found["predicted"] == {"reserved_bytes": 5}
    assert found["measured"]["allocated_bytes"] > 0

    monkeypatch.setattr(gpu_case, "build_model", out_of_memory)
    assert found_by(small_case, tmp_path)["status"] == "oom"


def test_a_prediction_that_fails_is_named_and_the_case_measured(small_case, monkeypatch, tmp_path) -> None:
    def fails(case: Any) -> None:
        raise ValueError("not estimable: no")

    monkeypatch.setattr(gpu_case, "predict", fails)
    found = found_by(small_case, tmp_path)
    assert (found["status"], found["reason"]) == ("measured", "not predicted: ValueError: not estimable: no")
    assert found["errors"] == {}


def test_what_cannot_run_here_is_skipped_with_the_reason(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(setups, "find_spec", lambda name: None)
    found = found_by(setups.Case("BERT-large", "8-bit Adam"), tmp_path, "cuda", capability=[9, 0])
    assert found["reason"] == "bitsandbytes is not installed"
    found = found_by(setups.Case("BERT-large", "bf16"), tmp_path, "cuda", capability=[7, 5])
    assert (found["status"], found["reason"]) == ("skipped", "this GPU does not compute bfloat16 natively")
