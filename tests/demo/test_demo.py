"""The demo: one run on a small library, what it prints, and the pretended GPU."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import outcomes
import pytest
import set_ups
import torch
from outcomes import TITLES, print_results, run_demo, sentence
from pretended_gpu import PretendedGpu
from rich.console import Console

TINY = {"num_hidden_layers": 3, "hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 512}
LARGE = {"num_hidden_layers": 10, "hidden_size": 288, "num_attention_heads": 2, "intermediate_size": 1152}
LIMIT_BYTES = 34 * 2**20
KEYS = {
    *("steps", "planned_steps", "times_out_of_memory", "peak_bytes", "predicted_peak_bytes"),
    *("examples_per_second", "accuracy", "losses"),
}
DEMO = Path(outcomes.__file__).parent


def make_library(folder: Path) -> Path:
    """Write 21 modules with 15 docstrings each that say which module they are from, of 5 to 240 words."""
    folder.mkdir()
    for name in sorted(name for name in sys.stdlib_module_names if not name.startswith("_"))[:21]:
        texts = [f"Return {name} number {i} " + f"of the {name} " * (1 + 4 * (i * i % 20)) for i in range(15)]
        (folder / f"{name}.py").write_text("".join(f"def f{i}():\n    '{text}'\n" for i, text in enumerate(texts)))
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, str]:
    """One run on a small library in the place of the standard one; its figures, and what it printed."""
    library = make_library(tmp_path_factory.mktemp("python") / "library")
    original, printed = sysconfig.get_path, io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sysconfig, "get_path", lambda name: str(library) if name == "stdlib" else original(name))
        patch.setattr(sys, "stdout", printed)
        for name, value in (("MODEL", TINY), ("LARGE_MODEL", LARGE), ("CUT_STEPS", 2)):
            patch.setattr(set_ups, name, value)
        figures = run_demo(str(tmp_path_factory.mktemp("run")), texts=96, limit_bytes=LIMIT_BYTES)
    return figures, printed.getvalue()


@pytest.fixture
def figures(run: tuple[Any, str]) -> Any:
    return run[0]


@pytest.mark.slow
def test_the_figures_have_every_set_up(figures: Any) -> None:
    assert list(figures) == ["unlimited", "stock", "auto_find_batch_size", "memopt", "planned", "streamed"]
    for name, one in figures.items():
        assert one.keys() >= KEYS
        assert name == "unlimited" or one["peak_bytes"] <= one["limit_bytes"] == LIMIT_BYTES


@pytest.mark.slow
def test_stock_runs_out_of_memory_and_says_what_cuda_says(figures: Any) -> None:
    stock = figures["stock"]
    assert (stock["steps"], stock["times_out_of_memory"], stock["accuracy"]) == (0, 1, None)
    assert stock["message"].startswith("CUDA out of memory. Tried to allocate ")
    assert stock["predicted_peak_bytes"] > stock["limit_bytes"]  # it was known before


@pytest.mark.slow
def test_stock_that_finds_a_batch_size_begins_another_training_and_is_cut_off(figures: Any) -> None:
    found, whole = figures["auto_find_batch_size"], figures["unlimited"]
    assert found["batch_size"] < whole["batch_size"]
    assert found["planned_steps"] > whole["planned_steps"]
    assert (found["steps"], found["accuracy"]) == (2, None)
    assert found["times_out_of_memory"] >= 1


@pytest.mark.slow
def test_micro_batches_train_what_the_run_without_a_limit_trains(figures: Any) -> None:
    ours, whole = figures["memopt"], figures["unlimited"]
    assert ours["steps"] == whole["steps"] == 3
    assert ours["times_out_of_memory"] >= 1
    assert ours["losses"] == pytest.approx(whole["losses"], rel=1e-4)
    assert max(ours["loss_difference"], ours["weight_difference"]) <= 1e-4
    assert ours["accuracy"] == whole["accuracy"]


@pytest.mark.slow
def test_what_plan_chooses_never_runs_out(figures: Any) -> None:
    planned = figures["planned"]
    assert planned["times_out_of_memory"] == 0
    assert planned["steps"] == planned["planned_steps"] == 3


@pytest.mark.slow
def test_a_model_larger_than_the_gpu_trains_as_the_whole_one(figures: Any) -> None:
    streamed = figures["streamed"]
    assert streamed["layer_bytes"] > streamed["limit_bytes"]
    assert (streamed["steps"], streamed["times_out_of_memory"]) == (3, 0)
    assert streamed["is_equal_to_whole"]


@pytest.mark.slow
@pytest.mark.parametrize("setup", ["unlimited", "planned", "streamed"])
def test_the_predicted_peak_is_near_the_measured_one(setup: str, figures: Any) -> None:
    # the prediction has the buffers of a GPU's reductions, up to 12 MiB, and the host's kernels other temporaries
    one = figures[setup]
    assert 0.9 * one["peak_bytes"] <= one["predicted_peak_bytes"] <= 1.1 * one["peak_bytes"] + 12 * 2**20


@pytest.mark.slow
@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_results_fit_into_the_terminal(width: int, run: tuple[Any, str]) -> None:
    figures, printed = run
    console = Console(width=width, file=io.StringIO(), highlight=False)
    print_results(figures, console)
    assert isinstance(console.file, io.StringIO)
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    assert max(map(len, lines)) <= width
    table = {name: next(line.split() for line in lines if line.startswith(title)) for name, title in TITLES.items()}
    for name, one in figures.items():
        assert f"{one['steps']}/{one['planned_steps']}" in table[name]
        assert f"{one['predicted_peak_bytes'] / 2**20:,.0f}" in table[name]
    text = " ".join(" ".join(lines).split())
    assert all(sentence(name, figures) in text for name in TITLES)
    assert "pretended by a limit on what torch allocates" in " ".join(printed.split())


def test_the_program_says_what_it_does() -> None:
    shown = subprocess.run([sys.executable, str(DEMO), "--help"], capture_output=True, text=True, check=True).stdout
    assert shown.startswith("usage: python examples/demo [-h]")
    assert "a CPU that pretends to be a GPU too small" in re.sub(r"\s+", " ", shown)


def test_a_pretended_gpu_counts_what_is_alive() -> None:
    gpu, before = PretendedGpu(3 * 4096), torch.empty(1024)
    with gpu:
        gpu.hold([before])
        one = torch.ones(1024)
        view = one[:512].view(2, 256)
        assert gpu.allocated_bytes == 2 * 4096
        with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 0\.01 MiB") as error:
            torch.zeros(2048)
        assert "GPU 0 has a total capacity of 0.01 MiB of which 0.00 MiB is free." in str(error.value)
        two = one + 1
        assert gpu.allocated_bytes == gpu.peak_bytes == 3 * 4096
        with gpu.on("host"):
            away = torch.ones(4096)
        assert (away * 2).sum() == 8192  # what is on the host stays there, and is not counted
        del one, view, two
        assert gpu.allocated_bytes == 4096
    assert gpu.times_out_of_memory == 1
