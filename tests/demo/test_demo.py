"""The demo: one run on a small library with the set-ups in this process, one child, bad input and interruption."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from rich.console import Console
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import tiny
from hf_memopt.demo import run as demo
from hf_memopt.demo import run_demo, training
from hf_memopt.demo.docstring_task import docstring_task, read_docstrings, source_files
from hf_memopt.demo.pretended_gpu import PretendedGpu
from hf_memopt.demo.run import TITLES, prepare, print_results, run_child, sentence

TINY = {"num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 256}
LARGE = {"num_hidden_layers": 11, "hidden_size": 320, "num_attention_heads": 5, "intermediate_size": 1280}
SMALL: dict[str, Any] = {"limit_bytes": 48 * 2**20, "sizes": (TINY, LARGE)}
KEYS = {
    *("steps", "planned_steps", "times_out_of_memory", "peak_bytes", "predicted_peak_bytes"),
    *("examples_per_second", "accuracy", "settings", "losses"),
}


def make_library(folder: Path) -> Path:
    """Write 21 modules with 15 docstrings each that say which module they are from, of 5 to 240 words."""
    folder.mkdir()
    for name in sorted(name for name in sys.stdlib_module_names if not name.startswith("_"))[:21]:
        texts = [f"Return {name} number {i} " + f"of the {name} " * (1 + 4 * (i * i % 20)) for i in range(15)]
        (folder / f"{name}.py").write_text("".join(f"def f{i}():\n    '{text}'\n" for i, text in enumerate(texts)))
    return folder


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A small library in the place of the standard one, for this process."""
    folder = make_library(tmp_path_factory.mktemp("python") / "library")
    original = sysconfig.get_path
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sysconfig, "get_path", lambda name: str(folder) if name == "stdlib" else original(name))
        yield folder


def earlier_demo(output: Path) -> Path:
    """Write a folder as an earlier demo left it."""
    output.mkdir()
    (output / "config.json").write_text("earlier")
    (output / "demo.json").write_text("{}")
    return output


# ---- The whole run --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(library: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """One run over an earlier demo, the set-ups in this process; the folder it ran in, and what it printed."""
    folder = tmp_path_factory.mktemp("run")
    (earlier_demo(folder / "out") / "notes.txt").write_text("mine")
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(demo, "run_child", training.run_setup)
        patch.setattr(training, "LARGE_STEPS", 3)
        run_demo(folder / "out", json_file=folder / "figures.json", max_train=96, **SMALL)
    return folder, printed.getvalue()


@pytest.fixture
def figures(run: tuple[Path, str]) -> Any:
    return json.loads((run[0] / "figures.json").read_text())


def test_the_figures_have_every_set_up(figures: Any) -> None:
    keys = ["unlimited", "stock", "auto_find_batch_size", "memopt", "planned", "streamed", "versions"]
    assert list(figures) == keys
    assert {"python", "torch", "transformers", "bitsandbytes", "hf-memopt", "device"} <= figures.pop("versions").keys()
    for name, one in figures.items():
        assert one.keys() >= KEYS
        assert name == "unlimited" or one["peak_bytes"] <= one["limit_bytes"] == SMALL["limit_bytes"]


def test_stock_runs_out_of_memory_and_says_what_cuda_says(figures: Any) -> None:
    stock = figures["stock"]
    assert (stock["steps"], stock["times_out_of_memory"], stock["accuracy"]) == (0, 1, None)
    assert stock["message"].startswith("CUDA out of memory. Tried to allocate ")
    assert stock["predicted_peak_bytes"] > stock["limit_bytes"]  # it was known before


def test_stock_that_finds_a_batch_size_trains_something_else(figures: Any) -> None:
    found, whole = figures["auto_find_batch_size"], figures["unlimited"]
    assert found["batch_size"] < whole["batch_size"]
    assert found["steps"] == found["planned_steps"] > whole["steps"]
    assert found["times_out_of_memory"] >= 1


def test_micro_batches_train_what_the_run_without_a_limit_trains(figures: Any) -> None:
    ours, whole = figures["memopt"], figures["unlimited"]
    assert ours["steps"] == whole["steps"] == 3
    assert ours["times_out_of_memory"] >= 1
    assert ours["losses"] == pytest.approx(whole["losses"], rel=1e-4)
    assert max(ours["loss_difference"], ours["weight_difference"]) <= 1e-4
    assert ours["accuracy"] == whole["accuracy"]


def test_what_plan_chooses_never_runs_out(figures: Any) -> None:
    planned = figures["planned"]
    assert planned["times_out_of_memory"] == 0
    assert planned["steps"] == planned["planned_steps"] == 3


def test_a_model_larger_than_the_gpu_trains_as_the_whole_one(figures: Any) -> None:
    streamed = figures["streamed"]
    assert streamed["layer_bytes"] > streamed["limit_bytes"]
    assert (streamed["steps"], streamed["times_out_of_memory"]) == (3, 0)
    assert streamed["is_equal_to_whole"]


@pytest.mark.parametrize("setup", ["unlimited", "planned", "streamed"])
def test_the_predicted_peak_is_near_the_measured_one(setup: str, figures: Any) -> None:
    # the prediction has the buffers of a GPU's reductions, up to 12 MiB, and the host's kernels other temporaries
    one = figures[setup]
    assert 0.9 * one["peak_bytes"] <= one["predicted_peak_bytes"] <= 1.1 * one["peak_bytes"] + 12 * 2**20


def test_the_saved_model_is_the_one_that_was_measured(run: tuple[Path, str], figures: Any) -> None:
    output = run[0] / "out"
    marker = json.loads((output / "demo.json").read_text())
    assert marker["figures"] == figures
    task = docstring_task(read_docstrings(source_files()))
    assert marker["labels"] == list(task.labels)
    model = AutoModelForSequenceClassification.from_pretrained(output)
    assert [model.config.id2label[i] for i in range(20)] == list(task.labels)
    tokenizer = AutoTokenizer.from_pretrained(output)
    with torch.no_grad():
        singly = [model(**tokenizer(text, return_tensors="pt")).logits.argmax().item() for text in task.test_texts]
    assert training.predict_labels(model, tokenizer, task.test_texts, batch_size=7) == singly
    hits = sum(one == other for one, other in zip(singly, task.test_labels, strict=True))
    assert figures["memopt"]["accuracy"] == hits / len(singly)


def test_the_run_replaces_the_earlier_demo_and_leaves_nothing_beside_it(run: tuple[Path, str]) -> None:
    assert sorted(entry.name for entry in run[0].iterdir()) == ["figures.json", "out"]
    assert (run[0] / "out" / "config.json").read_text() != "earlier"
    assert (run[0] / "out" / "notes.txt").read_text() == "mine"
    demo.check_output(run[0] / "out")  # the next demo may replace it in turn


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_results_fit_into_the_terminal(width: int, run: tuple[Path, str], figures: Any) -> None:
    console = Console(width=width, file=io.StringIO(), highlight=False)
    print_results(figures, console)
    assert isinstance(console.file, io.StringIO)
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    assert max(map(len, lines)) <= width
    table = {name: next(line.split() for line in lines if line.startswith(title)) for name, title in TITLES.items()}
    for name, one in figures.items():
        if name != "versions":
            assert f"{one['steps']}/{one['planned_steps']}" in table[name]
            assert f"{one['predicted_peak_bytes'] / 2**20:,.0f}" in table[name]
    text = " ".join(" ".join(lines).split())
    assert all(sentence(name, figures) in text for name in TITLES)
    assert "pretended by a limit on what torch allocates" in " ".join(run[1].split())


# ---- The pretended GPU ----------------------------------------------------------------------------------------------


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


# ---- A child --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_child_trains_the_same_and_prints_nothing(
    run: tuple[Path, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    prepare(tmp_path, max_train=96, console=Console(stderr=True))
    figures = run_child(tmp_path, "stock", seed=0, epochs=1, **SMALL)
    assert capfd.readouterr().out == ""  # standard output is for the results
    here = json.loads((run[0] / "figures.json").read_text())["stock"]
    assert figures.keys() == here.keys()
    for name in ("message", "steps", "peak_bytes", "predicted_peak_bytes"):
        assert figures[name] == here[name]


def test_a_failed_child_ends_the_demo_and_the_output_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = SimpleNamespace(train_texts=[], test_texts=[], labels=[])
    monkeypatch.setattr(demo, "prepare", lambda *_, **__: nothing)
    output = earlier_demo(tmp_path / "out")
    before = tiny.files_of(tmp_path)
    monkeypatch.setattr(demo.sys, "executable", shutil.which("false"))
    with pytest.raises(ChildProcessError) as error:
        run_demo(output)
    assert str(error.value) == "no limit failed with exit code 1; its error is printed above"
    assert tiny.files_of(tmp_path) == before
    assert list(tmp_path.iterdir()) == [output]


START = """
import sys
from types import SimpleNamespace
from hf_memopt.cli.app import main
from hf_memopt.demo import run
run.prepare = lambda *_, **__: SimpleNamespace(train_texts=[], test_texts=[], labels=[])
sys.argv[1:] = ["demo", "--output", sys.argv[1]]
main()
"""


def wait_for(condition: Callable[[], Any], seconds: float = 60) -> Any:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.02)
    raise AssertionError(f"nothing after {seconds} s")


@pytest.mark.slow
def test_ctrl_c_leaves_only_what_was_there(tmp_path: Path) -> None:
    output = earlier_demo(tmp_path / "out")
    before = tiny.files_of(tmp_path)
    # A session of its own: Ctrl-C in a terminal reaches the demo and its child, and must not reach the tests.
    # A shell's background job ignores Ctrl-C, and so do its children unless they are told otherwise.
    process = subprocess.Popen(
        [sys.executable, "-c", START, str(output)],
        **{"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "start_new_session": True},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    parent = psutil.Process(process.pid)
    (child,) = wait_for(lambda: [each for each in parent.children() if "hf_memopt.demo.run" in each.cmdline()])
    os.killpg(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, b"")
    assert tiny.files_of(tmp_path) == before
    assert list(tmp_path.iterdir()) == [output]
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE  # a container may have nobody to reap it


# ---- Bad input: found before anything is written --------------------------------------------------------------------


def refusal(output: Path, **settings: Any) -> str:
    """Return the error text of a demo that must not start."""
    with pytest.raises(ValueError) as error:
        run_demo(output, **settings)
    return str(error.value)


def test_an_output_that_no_demo_wrote_is_refused(tmp_path: Path) -> None:
    rule = "expected a new folder or that of an earlier demo. Call: hf-memopt demo --output another-folder"
    missing = tmp_path / "missing" / "out"
    assert refusal(missing) == f"output='{missing}' lies in a folder that does not exist; {rule}"
    file = tmp_path / "file"
    file.write_text("mine")
    assert refusal(file) == f"output='{file}' is not a folder; {rule}"
    output = tmp_path / "out"
    output.mkdir()
    (output / "notes.txt").write_text("mine")
    before = tiny.files_of(tmp_path)
    assert refusal(output) == f"output='{output}' holds what no demo wrote; {rule}"
    assert tiny.files_of(tmp_path) == before


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    demo.check_output(tmp_path)


def test_a_json_file_that_cannot_be(tmp_path: Path) -> None:
    rule = "is a folder or is in a missing one; expected a file in an existing folder. Pass"
    for file in (tmp_path, tmp_path / "missing" / "figures.json"):
        assert refusal(tmp_path / "out", json_file=file) == f"json_file='{file}' {rule} {file.name} to write it here"


def test_names_that_are_too_long(tmp_path: Path) -> None:
    rule = "cannot be a path (File name too long); expected text or a pathlib.Path. Pass another path"
    assert refusal(tmp_path / ("x" * 300)).endswith(rule)
    assert refusal(tmp_path / "out", json_file=tmp_path / ("x" * 300)).endswith(rule)


def test_a_python_without_sources_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "python311.zip"))
    with pytest.raises(ValueError, match="holds no Python sources"):
        run_demo(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
