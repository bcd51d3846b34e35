"""The demo: one run on a small library with the set-ups in this process, one child, bad input and interruption."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
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
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
)

from hf_memopt import recipe
from hf_memopt.demo import run as demo
from hf_memopt.demo import run_demo, training
from hf_memopt.demo.docstring_task import docstring_task, read_docstrings, source_files
from hf_memopt.demo.run import TITLES, conclusions, figures_table, prepare, print_results, run_child, setups_text

TINY = {"num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 128}
KEYS = {
    "seconds",
    "examples_per_second",
    "padding_efficiency",
    "optimizer_state_bytes",
    "predicted_peak_bytes",
    "measured_peak_bytes",
    "accuracy",
}
EXTRA_KEYS = {
    "settings",
    "examples",
    "real_tokens_per_second",
    "optimizer_state_bytes_by_dtype",
    "predicted_reserved_bytes",
    "measured_reserved_bytes",
    "test_texts",
}


def make_library(folder: Path) -> Path:
    """Write 21 modules with 15 docstrings each that say which module they are from, of 5 to 60 words."""
    folder.mkdir()
    for name in sorted(name for name in sys.stdlib_module_names if not name.startswith("_"))[:21]:
        texts = [f"Return {name} number {i} " + f"of the {name} " * (1 + i * i % 20) for i in range(15)]
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


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


# ---- The whole run --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(library: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """One run over an earlier demo, the set-ups in this process; the folder it ran in, and what it printed."""
    folder = tmp_path_factory.mktemp("run")
    (earlier_demo(folder / "out") / "notes.txt").write_text("mine")
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(demo, "run_child", training.run_setup)
        run_demo(folder / "out", json_file=folder / "figures.json", max_train=96, sizes=TINY)
    return folder, printed.getvalue()


def test_the_figures_are_complete_and_agree_with_each_other(run: tuple[Path, str]) -> None:
    figures = json.loads((run[0] / "figures.json").read_text())
    assert list(figures) == ["baseline", "stock_best", "memopt", "memory_saver", "versions"]
    assert {"python", "torch", "transformers", "bitsandbytes", "hf-memopt", "device"} <= figures.pop("versions").keys()
    for setup in figures.values():
        assert setup.keys() == KEYS | EXTRA_KEYS
        assert setup["examples"] == 96
        assert setup["examples_per_second"] == pytest.approx(96 / setup["seconds"])
        assert setup["optimizer_state_bytes"] == sum(setup["optimizer_state_bytes_by_dtype"].values())
    tokens = [setup["real_tokens_per_second"] * setup["seconds"] for setup in figures.values()]
    assert tokens == pytest.approx([tokens[0]] * 4)  # all four saw the same texts


def test_the_figures_are_those_of_the_texts_and_the_model(run: tuple[Path, str]) -> None:
    figures = json.loads((run[0] / "figures.json").read_text())
    task = docstring_task(read_docstrings(source_files()))
    tokenizer = AutoTokenizer.from_pretrained(run[0] / "out")
    model = AutoModelForSequenceClassification.from_pretrained(run[0] / "out")
    lengths = [len(ids) for ids in tokenizer(list(task.train_texts[:96]), truncation=True)["input_ids"]]
    assert figures["baseline"]["padding_efficiency"] == pytest.approx(sum(lengths) / (96 * 256))
    for setup in ("stock_best", "memopt", "memory_saver"):
        assert figures["baseline"]["padding_efficiency"] < figures[setup]["padding_efficiency"] <= 1
    parameters = list(model.parameters())
    moments_and_steps = sum(8 * p.numel() + 4 for p in parameters)  # two in float32, and a count per parameter
    for setup in ("baseline", "stock_best", "memopt"):
        assert figures[setup]["optimizer_state_bytes_by_dtype"] == {"float32": moments_and_steps}
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    in_8_bit = sum(p.numel() for p in parameters if p.numel() >= 4096 and id(p) not in embeddings)
    assert figures["memory_saver"]["optimizer_state_bytes_by_dtype"]["uint8"] == 2 * in_8_bit


def test_the_predicted_peak_is_near_the_measured_one(run: tuple[Path, str]) -> None:
    figures = json.loads((run[0] / "figures.json").read_text())
    for setup in TITLES:
        predicted, measured = figures[setup]["predicted_peak_bytes"], figures[setup]["measured_peak_bytes"]
        # the prediction has the buffers of a GPU's reductions, and the host's kernels other temporaries
        assert predicted == pytest.approx(measured, rel=0.1), setup
        assert figures[setup]["predicted_reserved_bytes"] is figures[setup]["measured_reserved_bytes"] is None
    assert figures["memory_saver"]["measured_peak_bytes"] < 0.5 * figures["stock_best"]["measured_peak_bytes"]


def test_the_saved_model_is_the_one_that_was_measured(run: tuple[Path, str]) -> None:
    output = run[0] / "out"
    marker = json.loads((output / "demo.json").read_text())
    assert marker["figures"] == json.loads((run[0] / "figures.json").read_text())
    task = docstring_task(read_docstrings(source_files()))
    assert marker["labels"] == list(task.labels)
    model = AutoModelForSequenceClassification.from_pretrained(output)
    assert [model.config.id2label[i] for i in range(20)] == list(task.labels)
    tokenizer = AutoTokenizer.from_pretrained(output)
    with torch.no_grad():
        singly = [model(**tokenizer(text, return_tensors="pt")).logits.argmax().item() for text in task.test_texts]
    assert training.predict_labels(model, tokenizer, task.test_texts, batch_size=7) == singly
    hits = sum(one == other for one, other in zip(singly, task.test_labels, strict=True))
    assert marker["figures"]["memopt"]["accuracy"] == hits / len(singly)


def test_the_run_replaces_the_earlier_demo_and_leaves_nothing_beside_it(run: tuple[Path, str]) -> None:
    assert sorted(entry.name for entry in run[0].iterdir()) == ["figures.json", "out"]
    assert (run[0] / "out" / "config.json").read_text() != "earlier"
    assert (run[0] / "out" / "notes.txt").read_text() == "mine"
    demo.check_output(run[0] / "out")  # the next demo may replace it in turn


def test_the_run_prints_its_figures(run: tuple[Path, str]) -> None:
    figures = json.loads((run[0] / "figures.json").read_text())
    lines = run[1].splitlines()
    accuracies = next(line for line in lines if line.startswith("accuracy"))
    assert accuracies.split()[1:] == [f"{figures[setup]['accuracy']:.3f}" for setup in TITLES]
    assert f'(c) hf_memopt: recipe("auto"), bucketed; {figures["memopt"]["settings"]}' in " ".join(lines[:10])


# ---- Results --------------------------------------------------------------------------------------------------------


def invented(settings: str, seconds: float, peak: int, reserved: int | None, uint8: int = 0) -> dict[str, Any]:
    state = {"float32": 2**21, "uint8": uint8} if uint8 else {"float32": 2**22}
    return {
        "settings": settings,
        "seconds": seconds,
        "examples": 1000,
        "examples_per_second": 1000 / seconds,
        "real_tokens_per_second": 40_000 / seconds,
        "padding_efficiency": 0.5,
        "optimizer_state_bytes": sum(state.values()),
        "optimizer_state_bytes_by_dtype": state,
        "predicted_peak_bytes": peak + 2**20,
        "predicted_reserved_bytes": None if reserved is None else reserved + 2**20,
        "measured_peak_bytes": peak,
        "measured_reserved_bytes": reserved,
        "accuracy": 0.75,
        "test_texts": 200,
    }


def invented_figures(reserved: int | None) -> dict[str, dict[str, Any]]:
    return {
        "baseline": invented("fp32, adamw_torch_fused", 100.0, 300 * 2**20, reserved),
        "stock_best": {**invented("bf16, adamw_torch_fused", 25.0, 200 * 2**20, reserved), "accuracy": 0.7},
        "memopt": invented("bf16, adamw_torch_fused", 20.0, 200 * 2**20, reserved),
        "memory_saver": invented("bf16, adamw_8bit, checkpointing", 50.0, 50 * 2**20, reserved, 2**18),
    }


def printed(figures: dict[str, dict[str, Any]], width: int) -> list[str]:
    console = Console(width=width, file=io.StringIO(), highlight=False)
    print_results(figures, console)
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def table_rows(figures: dict[str, dict[str, Any]]) -> list[list[str]]:
    console = Console(width=60, file=io.StringIO())
    console.print(figures_table(figures))
    assert isinstance(console.file, io.StringIO)
    return [re.split(r"  +", line.strip()) for line in console.file.getvalue().splitlines() if line.strip()]


def test_the_table_on_a_cpu() -> None:
    assert table_rows(invented_figures(None)) == [
        ["(a)", "(b)", "(c)", "(d)"],
        ["naive", "stock", "memopt", "saver"],
        ["─" * 49],
        ["training, seconds", "100.0", "25.0", "20.0", "50.0"],
        ["examples/s", "10.0", "40.0", "50.0", "20.0"],
        ["real tokens/s", "400", "1,600", "2,000", "800"],
        ["padding efficiency", "0.500", "0.500", "0.500", "0.500"],
        ["optimizer state, MiB", "4.0", "4.0", "4.0", "2.2"],
        ["float32", "4.0", "4.0", "4.0", "2.0"],
        ["uint8", "0.0", "0.0", "0.0", "0.2"],
        ["peak predicted, MiB", "301.0", "201.0", "201.0", "51.0"],
        ["peak measured, MiB", "300.0", "200.0", "200.0", "50.0"],
        ["accuracy", "0.750", "0.700", "0.750", "0.750"],
    ]


def test_the_table_on_a_gpu() -> None:
    figures = invented_figures(5 * 2**30)
    for one in figures.values():
        one |= {"examples_per_second": 12_345.6, "real_tokens_per_second": 123_456.0}
    rows = table_rows(figures)
    assert rows[-3:-1] == [["reserved predicted, MiB"] + ["5,121"] * 4, ["reserved measured, MiB"] + ["5,120"] * 4]
    assert rows[4:6] == [["examples/s"] + ["12,346"] * 4, ["real tokens/s"] + ["123,456"] * 4]


def test_the_conclusions_compare_with_stock_at_its_best_first() -> None:
    lines = conclusions(invented_figures(None))
    assert lines[:3] == [
        "(c) against (b), stock at its best: 1.25x the examples per second, 1.00x the peak memory, accuracy 0.750 "
        "against 0.700.",
        "(c) against (a), naive: 5.00x the examples per second, 0.67x the peak memory, accuracy 0.750 against 0.750.",
        "(d) against (b): 0.50x the examples per second, 0.25x the peak memory, accuracy 0.750 against 0.700. Its "
        "optimizer state is 0.56x that of (b).",
    ]
    assert lines[3].startswith("The price of group_by_length in (b): ")
    assert "accuracy 0.700. (c) and (d)" in lines[3]
    assert "accuracy 0.750 and 0.750. The standard error of an accuracy is 0.031 (200 unseen texts)" in lines[3]
    assert [line.split()[0] for line in lines[4:]] == ["Peaks:", "On"]
    assert len(conclusions(invented_figures(2**30))) == 4  # on a GPU nothing needs these two notes


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("reserved", [None, 2**30])
def test_the_results_fit_into_the_terminal(width: int, reserved: int | None) -> None:
    figures = invented_figures(reserved)
    lines = printed(figures, width)
    assert max(map(len, lines)) <= width
    (accuracies,) = [line for line in lines if line.startswith("accuracy  ")]
    assert accuracies.split() == ["accuracy", "0.750", "0.700", "0.750", "0.750"]
    text = " ".join(lines)
    assert all(line in text for line in (*setups_text(figures).splitlines(), *conclusions(figures)))


# ---- The set-ups ----------------------------------------------------------------------------------------------------


def trainer(
    setup: str, tokenizer: PreTrainedTokenizerBase, texts: list[str], model: Any = None, **arguments: Any
) -> Trainer:
    model = built(tokenizer) if model is None else model
    arguments = {"output_dir": "unused", "report_to": "none", **arguments}
    return training.trainer_of(setup, model, tokenizer, texts, [0] * len(texts), arguments)


def built(tokenizer: PreTrainedTokenizerBase) -> Any:
    return training.build_model(training.model_config(len(tokenizer), [str(i) for i in range(20)], TINY), seed=3)


def test_every_set_up_starts_from_the_same_weights_and_arguments(run: tuple[Path, str]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(run[0] / "out")
    texts = ["one text", "a longer text than the other"] * 32
    models = {name: built(tokenizer) for name in TITLES}
    weights = [list(model.parameters()) for model in models.values()]
    assert all(torch.equal(*pair) for other in weights[1:] for pair in zip(weights[0], other, strict=True))
    options = {"seed": 3, **training.HYPERPARAMETERS}
    trainers = {name: trainer(name, tokenizer, texts, model, **options) for name, model in models.items()}
    assert {type(one) for one in trainers.values()} == {Trainer}
    args = {name: one.args for name, one in trainers.items()}
    same = ("learning_rate", "warmup_steps", "lr_scheduler_type", "seed", "weight_decay", "max_grad_norm", "adam_beta1")
    for name in (*same, "adam_beta2", "adam_epsilon"):
        assert len({getattr(of_one, name) for of_one in args.values()}) == 1, name
    divided = [(of_one.gradient_accumulation_steps, of_one.per_device_train_batch_size) for of_one in args.values()]
    assert divided == [(1, 32), (1, 32), (1, 32), (4, 8)]
    # stock at its best has every setting that stock offers of what the recipe chose
    best, ours, chosen = args["stock_best"], args["memopt"], recipe("auto")
    assert (best.bf16, best.fp16, best.optim) == (ours.bf16, ours.fp16, ours.optim)
    assert ours.optim == chosen.optim
    assert best.train_sampling_strategy == "group_by_length"
    assert args["baseline"].optim == TrainingArguments(output_dir="unused").optim
    saver = args["memory_saver"]
    assert (saver.optim, saver.gradient_checkpointing) == ("adamw_8bit", recipe("4gb-gpu").checkpointing)
    assert training.settings_text(args["baseline"]) == "fp32, adamw_torch_fused"
    precision = "bf16" if saver.bf16 else "fp32"
    assert training.settings_text(saver) == f"{precision}, adamw_8bit, 4 accumulation steps of 8, checkpointing"


def test_the_sampler_of_stock_at_its_best_reads_no_lazy_column(run: tuple[Path, str]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(run[0] / "out")
    stock = trainer("stock_best", tokenizer, ["some words here"] * 4000)
    sampler = stock._get_train_sampler()  # pins the name; seen in 5.8.1 to 5.23.0
    assert type(sampler).__name__ == "LengthGroupedSampler"
    assert type(sampler.lengths) is list
    assert sorted(sampler) == list(range(4000))


# ---- A child --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_child_trains_the_same_and_prints_nothing(
    run: tuple[Path, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    prepare(tmp_path, max_train=96, console=Console(stderr=True))
    figures = run_child(tmp_path, "stock_best", seed=0, epochs=1, sizes=TINY)
    assert capfd.readouterr().out == ""  # standard output is for the results
    here = json.loads((run[0] / "figures.json").read_text())["stock_best"]
    assert figures.keys() == here.keys()
    for name in ("examples", "padding_efficiency", "optimizer_state_bytes_by_dtype", "predicted_peak_bytes"):
        assert figures[name] == here[name]
    assert figures["measured_peak_bytes"] == pytest.approx(here["measured_peak_bytes"], rel=0.01)


@pytest.fixture
def nothing_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    task = SimpleNamespace(train_texts=[], test_texts=[], labels=[])
    monkeypatch.setattr(demo, "prepare", lambda *_, **__: task)


def test_a_failed_child_ends_the_demo_and_the_output_stays(
    nothing_prepared: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = earlier_demo(tmp_path / "out")
    before = contents(tmp_path)
    monkeypatch.setattr(demo.sys, "executable", shutil.which("false"))
    with pytest.raises(ChildProcessError) as error:
        run_demo(output)
    assert str(error.value) == "(a) naive failed with exit code 1; its error is printed above"
    assert contents(tmp_path) == before
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
    before = contents(tmp_path)
    command = [sys.executable, "-c", START, str(output)]
    # A session of its own: Ctrl-C in a terminal reaches the demo and its child, and must not reach the tests.
    # A shell's background job ignores Ctrl-C, and so do its children unless they are told otherwise.
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    parent = psutil.Process(process.pid)
    (child,) = wait_for(lambda: [each for each in parent.children() if "hf_memopt.demo.run" in each.cmdline()])
    os.killpg(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, b"")
    assert contents(tmp_path) == before
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
    before = contents(tmp_path)
    assert refusal(output) == f"output='{output}' holds what no demo wrote; {rule}"
    assert contents(tmp_path) == before


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
