"""A driver that is missing, or is lost while a training runs, costs figures of memory and nothing else.

There is no GPU here: torch's counters are stood in for, NVML is the real library (which finds no driver) or raises its
own errors.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch
from transformers import Trainer
from typer.testing import CliRunner

import tiny
from hf_memopt import MemoryReportCallback, MicrobatchCallback, attach
from hf_memopt.cli.app import app
from hf_memopt.training.devices.readings import memory_reading

GIB = 2**30
CUDA = torch.device("cuda", 0)
STEPS = 12


@pytest.fixture(autouse=True)
def _no_remembered_handles() -> Iterator[None]:
    memory_reading._nvml_handle.cache_clear()
    yield
    memory_reading._nvml_handle.cache_clear()


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Let the memory of a GPU be read where a training runs on the host, and return what its driver answers."""
    driver = SimpleNamespace(is_lost=False, free_bytes=10 * GIB)
    stats = {name: {"all": {"current": GIB, "peak": 2 * GIB}} for name in ("allocated_bytes", "reserved_bytes")}

    def mem_get_info(device: Any) -> tuple[int, int]:
        if driver.is_lost:
            raise RuntimeError("CUDA error: unspecified launch failure")
        return driver.free_bytes, 16 * GIB

    answers: dict[str, Callable[..., Any]] = {
        "is_initialized": lambda: False,  # stock's own collection of garbage asks
        "current_device": lambda: 0,
        "get_device_properties": lambda device: SimpleNamespace(name="Fake 16", total_memory=16 * GIB, uuid="12-ab"),
        "memory_stats_as_nested_dict": lambda device: stats,
        "reset_peak_memory_stats": lambda device: None,
        "mem_get_info": mem_get_info,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr(memory_reading, "_device_count", lambda kind: int(kind == "cuda"))
    for module in (f"hf_memopt.prediction.memory.run.{name}" for name in ("callback", "run_record", "run_report")):
        monkeypatch.setattr(f"{module}.measured_device", lambda device: CUDA)
    return driver


def nvml(monkeypatch: pytest.MonkeyPatch, fails: Callable[[], BaseException | None]) -> None:
    """Let NVML know the GPU, and raise where ``fails`` returns an error."""

    def answering(answer: Any) -> Callable[..., Any]:
        def call(*_: Any) -> Any:
            if (error := fails()) is not None:
                raise error
            return answer

        return call

    answers = {
        "nvmlInit": None,
        "nvmlDeviceGetHandleByUUID": "handle",
        "nvmlDeviceGetMigMode": [0, 0],
        "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=5 * GIB, free=11 * GIB, total=16 * GIB),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, answering(answer))


def train(folder: Path, *callbacks: Any) -> Trainer:
    settings = {"max_steps": STEPS, "logging_strategy": "steps", "logging_steps": 1, "per_device_train_batch_size": 4}
    args = tiny.arguments(folder, **settings, save_strategy="steps", save_steps=5)
    trainer = attach(Trainer(tiny.bert(), args, train_dataset=tiny.rows()), *callbacks)
    trainer.train()
    return trainer


def used(trainer: Trainer) -> list[float | None]:
    """Return what was logged of the whole GPU, step by step."""
    return [log.get("memory_device_used_gib") for log in trainer.state.log_history if "loss" in log]


def assert_same_training(trainer: Trainer, tmp_path: Path) -> None:
    assert tiny.largest_difference(trainer.model, train(tmp_path / "plain").model) == 0.0
    content = json.loads((tmp_path / "memopt_run.json").read_bytes())
    assert (content["state"], content["last_step"]) == ("finished", STEPS)


ERRORS: dict[str, Callable[[], BaseException]] = {
    "GPU is lost": lambda: pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST),
    "driver not loaded": lambda: pynvml.NVMLError(pynvml.NVML_ERROR_DRIVER_NOT_LOADED),
    "versions differ": lambda: pynvml.NVMLError(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH),
    "not initialised": lambda: pynvml.NVMLError(pynvml.NVML_ERROR_UNINITIALIZED),
    "of the system": lambda: OSError(5, "Input/output error"),
    "of ctypes": lambda: AttributeError("function not found"),
}


@pytest.mark.parametrize("error", ERRORS)
def test_nvml_that_is_lost_midway_leaves_the_figures_to_the_driver(error, driver, tmp_path, monkeypatch) -> None:
    calls = itertools.count()
    nvml(monkeypatch, lambda: ERRORS[error]() if next(calls) >= 9 else None)
    trainer = train(tmp_path, MemoryReportCallback(), MicrobatchCallback())
    found = used(trainer)
    assert found == sorted(found)
    assert set(found) == {5.0, 6.0}  # NVML's, then the driver's
    assert_same_training(trainer, tmp_path)


def test_a_driver_that_is_lost_too_leaves_the_figure_out(driver, tmp_path, monkeypatch) -> None:
    calls = itertools.count()

    def fails() -> BaseException | None:
        driver.is_lost = next(calls) >= 9
        return ERRORS["GPU is lost"]() if driver.is_lost else None

    nvml(monkeypatch, fails)
    trainer = train(tmp_path, MemoryReportCallback())
    assert set(used(trainer)) == {5.0, None}
    assert_same_training(trainer, tmp_path)


@pytest.mark.parametrize("kind", ["without the package", "without a driver"])
def test_without_nvml_everything_works(kind, driver, tmp_path, monkeypatch) -> None:
    if kind == "without the package":
        monkeypatch.setitem(sys.modules, "pynvml", None)
    elif not torch.cuda.is_available():  # the real library, on a machine without a GPU
        with pytest.raises(pynvml.NVMLError):
            pynvml.nvmlInit()
    else:
        nvml(monkeypatch, ERRORS["driver not loaded"])
    trainer = train(tmp_path, MemoryReportCallback())
    assert set(used(trainer)) == {6.0}
    assert_same_training(trainer, tmp_path)


def test_nvidia_smi_is_never_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor any other program: commands and a training work with an empty PATH, where no process can be started."""
    monkeypatch.setenv("PATH", "")
    started: list[Any] = []

    def refuse(program: Any, *_: Any, **__: Any) -> Any:
        started.append(program)
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(subprocess.Popen, "__init__", lambda self, program, *_, **__: refuse(program))
    model = tmp_path / "model"
    tiny.llama_config(num_hidden_layers=1, max_position_embeddings=64).save_pretrained(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        for words in (
            ["doctor", "--json"],
            ["estimate", str(model), "--gpu", "RTX 3060 12GB", "--seq-len", "16"],
            ["plan", str(model), "--gpu", "RTX 3060 12GB", "--effective-batch", "2", "--seq-len", "16"],
        ):
            found = CliRunner().invoke(app, words)
            assert found.exit_code == 0, found.output
    trainer = train(tmp_path / "out", MemoryReportCallback())
    assert trainer.state.global_step == STEPS
    assert "nvidia" not in str(started)
