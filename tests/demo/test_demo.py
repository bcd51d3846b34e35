"""The demo: one real run end to end on a small library, and everything that can go wrong before, during and after."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from rich.console import Console
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Trainer, TrainingArguments

from hf_memopt.demo import output as demo_output
from hf_memopt.demo import run as demo
from hf_memopt.demo import setups as demo_arms
from hf_memopt.demo.docstring_task import docstring_task, read_docstrings, source_files
from hf_memopt.demo.output import DemoError, check_disk, check_json_file, check_output, publish, work_folder
from hf_memopt.demo.run import figures_table, ratios, run_child, run_demo

TINY = {"num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 128}
KEYS = {
    "seconds",
    "optimizer_seconds",
    "examples_per_second",
    "real_tokens_per_second",
    "padding_efficiency",
    "optimizer_state_bytes",
    "peak_bytes",
    "accuracy",
}
EXTRA_KEYS = {"examples", "optimizer_state_bytes_by_dtype", "peak_reserved_bytes", "test_texts"}
ANOTHER = "Call: hf-memopt demo --output another-folder"
FINISHED = f"expected a new folder or one that an earlier demo finished. {ANOTHER}"


def make_library(folder: Path) -> Path:
    """Write 21 modules with 15 docstrings each that say which module they are from, of 5 to 60 words."""
    folder.mkdir()
    for name in sorted(name for name in sys.stdlib_module_names if not name.startswith("_"))[:21]:
        texts = [f"Return {name} number {i} " + f"of the {name} " * (1 + i * i % 20) for i in range(15)]
        (folder / f"{name}.py").write_text("".join(f"def f{i}():\n    '{text}'\n" for i, text in enumerate(texts)))
    return folder


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A small library in the place of the standard one, for this process and those that get it told."""
    folder = make_library(tmp_path_factory.mktemp("python") / "library")
    original = sysconfig.get_path
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sysconfig, "get_path", lambda name: str(folder) if name == "stdlib" else original(name))
        yield folder


@pytest.fixture
def no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("a child was started")

    monkeypatch.setattr(demo, "run_child", fail)


def finished_demo(output: Path, **marker: Any) -> Path:
    """Write a folder as an earlier demo left it."""
    output.mkdir()
    for name in ("config.json", "model.safetensors"):
        (output / name).write_text("earlier")
    files = ["config.json", "model.safetensors"]
    (output / "demo.json").write_text(json.dumps({"made_by": "hf-memopt demo", "files": files, **marker}))
    return output


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


# ---- The whole run --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(library: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """One run over an earlier demo; the folder it ran in, and what it printed."""
    folder = tmp_path_factory.mktemp("run")
    finished_demo(folder / "out")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = run_demo(folder / "out", json_file=folder / "figures.json", max_train=96, model=TINY)
    assert code == 0
    return folder, printed.getvalue()


def test_the_figures_are_complete_and_agree_with_each_other(run: tuple[Path, str]) -> None:
    figures = json.loads((run[0] / "figures.json").read_text())
    assert list(figures) == ["baseline", "stock_best", "memopt", "versions"]
    assert {"python", "torch", "transformers", "bitsandbytes", "hf-memopt", "device"} <= figures.pop("versions").keys()
    for arm in figures.values():
        assert arm.keys() == KEYS | EXTRA_KEYS
        assert arm["examples"] == 96
        assert arm["examples_per_second"] == pytest.approx(96 / arm["seconds"])
        assert 0 < arm["optimizer_seconds"] < arm["seconds"]
        assert arm["peak_bytes"] > 0
        assert arm["optimizer_state_bytes"] == sum(arm["optimizer_state_bytes_by_dtype"].values())
    tokens = [arm["real_tokens_per_second"] * arm["seconds"] for arm in figures.values()]
    assert tokens == pytest.approx([tokens[0]] * 3)  # all three saw the same texts


def test_the_figures_are_those_of_the_texts_and_the_model(run: tuple[Path, str]) -> None:
    figures = json.loads((run[0] / "figures.json").read_text())
    task = docstring_task(read_docstrings(source_files()))
    tokenizer = AutoTokenizer.from_pretrained(run[0] / "out")
    model = AutoModelForSequenceClassification.from_pretrained(run[0] / "out")
    lengths = [len(ids) for ids in tokenizer(list(task.train_texts[:96]), truncation=True)["input_ids"]]
    assert figures["baseline"]["padding_efficiency"] == pytest.approx(sum(lengths) / (96 * 256))
    for arm in ("stock_best", "memopt"):
        assert figures["baseline"]["padding_efficiency"] < figures[arm]["padding_efficiency"] <= 1
    parameters = list(model.parameters())
    moments_and_steps = sum(8 * p.numel() + 4 for p in parameters)  # two in float32, and a count per parameter
    assert figures["baseline"]["optimizer_state_bytes_by_dtype"] == {"float32": moments_and_steps}
    assert figures["stock_best"]["optimizer_state_bytes"] == moments_and_steps
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    in_8_bit = sum(p.numel() for p in parameters if p.numel() >= 4096 and id(p) not in embeddings)
    assert figures["memopt"]["optimizer_state_bytes_by_dtype"]["uint8"] == 2 * in_8_bit


def test_the_saved_model_is_the_one_that_was_measured(run: tuple[Path, str]) -> None:
    output = run[0] / "out"
    marker = json.loads((output / "demo.json").read_text())
    assert marker["figures"] == json.loads((run[0] / "figures.json").read_text())
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(marker["files"])
    assert sorted(marker["files"]) == sorted({entry.name for entry in output.iterdir()} - {"demo.json"})
    task = docstring_task(read_docstrings(source_files()))
    assert marker["labels"] == list(task.labels)
    model = AutoModelForSequenceClassification.from_pretrained(output)
    assert [model.config.id2label[i] for i in range(20)] == list(task.labels)
    tokenizer = AutoTokenizer.from_pretrained(output)
    with torch.no_grad():
        singly = [model(**tokenizer(text, return_tensors="pt")).logits.argmax().item() for text in task.test_texts]
    assert demo_arms.predict_labels(model, tokenizer, task.test_texts, batch_size=7) == singly
    hits = sum(one == other for one, other in zip(singly, task.test_labels, strict=True))
    assert marker["figures"]["memopt"]["accuracy"] == hits / len(singly)


def test_the_run_replaces_the_earlier_demo_and_leaves_nothing_beside_it(run: tuple[Path, str]) -> None:
    assert sorted(entry.name for entry in run[0].iterdir()) == ["figures.json", "out"]
    assert (run[0] / "out" / "config.json").read_text() != "earlier"
    check_output(run[0] / "out")  # and a next demo may replace it in turn


def test_the_run_prints_its_table_and_three_answers(run: tuple[Path, str]) -> None:
    figures = json.loads((run[0] / "figures.json").read_text())
    lines = run[1].splitlines()
    assert max(len(line) for line in lines if line[:1] in "┏┡│└") <= 80
    accuracies = next(line for line in lines if "accuracy" in line)
    assert [cell.strip() for cell in accuracies.split("│")[2:5]] == [
        f"{figures[arm]['accuracy']:.3f}" for arm in ("baseline", "stock_best", "memopt")
    ]
    assert sum("(true: " in line for line in lines) == 3


# ---- The table ------------------------------------------------------------------------------------------------------


def invented(seconds: float, optimizer_seconds: float, uint8: int, reserved: int | None) -> dict[str, Any]:
    state = {"float32": 2**21, "uint8": uint8} if uint8 else {"float32": 2**22}
    return {
        "seconds": seconds,
        "optimizer_seconds": optimizer_seconds,
        "examples": 1000,
        "examples_per_second": 1000 / seconds,
        "real_tokens_per_second": 40_000 / seconds,
        "padding_efficiency": 0.5,
        "optimizer_state_bytes": sum(state.values()),
        "optimizer_state_bytes_by_dtype": state,
        "peak_bytes": 3 * 2**20,
        "peak_reserved_bytes": reserved,
        "accuracy": 0.75,
        "test_texts": 200,
    }


def table_text(reserved: int | None) -> tuple[str, str]:
    figures = {
        "baseline": invented(100.0, 1.0, 0, reserved),
        "stock_best": invented(25.0, 1.0, 0, reserved),
        "memopt": invented(20.0, 5.0, 2**18, reserved),
    }
    console = Console(width=80, file=io.StringIO(), highlight=False)
    console.print(figures_table(figures))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue(), ratios(figures)


def test_the_table_on_a_cpu() -> None:
    table, text = table_text(None)
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in table.splitlines() if line.startswith("│")]
    assert rows == [
        ["training, seconds", "100.0", "25.0", "20.0"],
        ["of it the optimizer step", "1.0", "1.0", "5.0"],
        ["examples/s", "10.0", "40.0", "50.0"],
        ["real tokens/s", "400", "1,600", "2,000"],
        ["padding efficiency", "0.500", "0.500", "0.500"],
        ["optimizer state", "4.0 MiB", "4.0 MiB", "2.2 MiB"],
        ["in float32", "4.0 MiB", "4.0 MiB", "2.0 MiB"],
        ["in uint8", "0 B", "0 B", "256.0 KiB"],
        ["process peak above imports", "3.0 MiB", "3.0 MiB", "3.0 MiB"],
        ["accuracy, 200 unseen texts", "0.750", "0.750", "0.750"],
    ]
    assert text == (
        "(c) is 5.0x as fast per example as (a), and 1.60x as fast as (b) without the optimizer step; its optimizer "
        "state is 0.56x that of (a).\n"
        "On a CPU the 8-bit step of bitsandbytes costs far more than the fused one: it is written for cards."
    )


def test_the_table_on_a_card() -> None:
    table, text = table_text(5 * 2**20)
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in table.splitlines() if line.startswith("│")]
    assert rows[-3:-1] == [["peak allocated"] + ["3.0 MiB"] * 3, ["peak reserved"] + ["5.0 MiB"] * 3]
    assert "On a CPU" not in text


# ---- The arms -------------------------------------------------------------------------------------------------------


def test_every_arm_starts_from_the_same_weights_and_arguments(run: tuple[Path, str]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(run[0] / "out")
    config = demo_arms.model_config(len(tokenizer), [str(i) for i in range(20)], TINY)
    models = [demo_arms.build_model(config, seed=3) for _ in range(2)]
    pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    arguments = {**demo_arms.HYPERPARAMETERS, "output_dir": str(run[0] / "unused"), "seed": 3, "report_to": "none"}
    texts, labels = ["one text", "a longer text than the other"] * 32, [0, 1] * 32
    trainers = [
        make(demo_arms.Ingredients(models[0], tokenizer, texts, labels, arguments, []))
        for make in demo_arms.ARMS.values()
    ]
    assert [type(trainer) for trainer in trainers] == [Trainer] * 3
    same = ("learning_rate", "warmup_steps", "lr_scheduler_type", "seed", "weight_decay", "max_grad_norm", "adam_beta1")
    same += ("adam_beta2", "adam_epsilon", "per_device_train_batch_size", "gradient_accumulation_steps")
    for name in same:
        assert len({getattr(trainer.args, name) for trainer in trainers}) == 1, name
    assert trainers[0].args.per_device_train_batch_size == 32
    defaults = TrainingArguments(output_dir=str(run[0] / "unused"))
    assert trainers[0].args.optim == defaults.optim
    assert [trainer.args.optim for trainer in trainers[1:]] == ["adamw_torch_fused", "adamw_8bit"]


def test_the_sampler_of_stock_at_its_best_reads_no_lazy_column(run: tuple[Path, str]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(run[0] / "out")
    model = demo_arms.build_model(demo_arms.model_config(len(tokenizer), [str(i) for i in range(20)], TINY), 0)
    arguments = {"output_dir": str(run[0] / "unused"), "report_to": "none"}
    given = demo_arms.Ingredients(model, tokenizer, ["some words here"] * 4000, [0] * 4000, arguments, [])
    sampler = demo_arms.stock_best_trainer(given)._get_train_sampler()  # pins the name; seen in 5.8.1 to 5.23.0
    assert type(sampler).__name__ == "LengthGroupedSampler"
    assert type(sampler.lengths) is list
    assert sorted(sampler) == list(range(4000))


def test_a_memory_report_that_is_there_is_used(run: tuple[Path, str]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(run[0] / "out")
    model = demo_arms.build_model(demo_arms.model_config(len(tokenizer), [str(i) for i in range(20)], TINY), 0)
    arguments = {"output_dir": str(run[0] / "unused"), "report_to": "none"}
    given = demo_arms.Ingredients(model, tokenizer, ["a", "b"] * 32, [0, 1] * 32, arguments, [])
    for make, already in ((demo_arms.naive_trainer, 0), (demo_arms.memopt_trainer, 1)):
        trainer = make(given)
        kind = demo_arms.MemoryReportCallback
        there = [callback for callback in trainer.callback_handler.callbacks if isinstance(callback, kind)]
        assert len(there) == already
        report = demo_arms._memory_report(trainer)
        assert [c for c in trainer.callback_handler.callbacks if isinstance(c, kind)] == [report]


def test_a_child_writes_its_error_for_the_parent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = demo_arms.ArmSpec(arm="baseline", folder=str(tmp_path), seed=0, epochs=1, model={})
    (tmp_path / "spec.json").write_text(spec.to_json())
    assert demo_arms.main(str(tmp_path / "spec.json")) == 1
    missing = f"FileNotFoundError: [Errno 2] No such file or directory: '{tmp_path / 'task.json'}'"
    assert json.loads(spec.result_file.read_text()) == {"error": missing}
    assert capsys.readouterr().err.splitlines()[-1] == missing  # with the traceback above it
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["baseline.result.json", "spec.json"]


@pytest.fixture
def child_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Let a few lines of Python stand for the child; they find the name of the result file in ``result``."""

    def install(lines: str) -> None:
        script = tmp_path / "child"
        head = "import json, os, signal, sys; spec = json.load(open(sys.argv[3]))"
        where = "result = f\"{spec['folder']}/{spec['arm']}.result.json\""
        script.write_text(f"#!{sys.executable}\n{head}\n{where}\n{lines}\n")
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setattr(demo.sys, "executable", str(script))

    return install


NO_SPACE = "SafetensorError: Error while serializing: I/O error: No space left on device (os error 28)"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            "json.dump({'error': 'ValueError: boom'}, open(result, 'w')); sys.exit(1)",
            "(b) best stock failed: ValueError: boom",
        ),
        ("sys.exit(7)", "(b) best stock failed: its process ended with exit code 7"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "(b) best stock failed: its process ended with exit code -9"),
        (
            "json.dump({'a': 1}, open(result, 'w')); sys.exit(3)",
            "(b) best stock failed: its process ended with exit code 3",
        ),
    ],
)
def test_a_failed_child_is_an_error(
    lines: str, message: str, tmp_path: Path, child_script: Callable[[str], None]
) -> None:
    child_script(lines)
    with pytest.raises(DemoError) as error:
        run_child(tmp_path, "stock_best", seed=0, epochs=1, sizes={})
    assert str(error.value) == message


def test_a_child_gets_its_spec_and_returns_its_figures(tmp_path: Path, child_script: Callable[[str], None]) -> None:
    (tmp_path / "memopt.result.json").write_text('{"of": "an earlier run"}')
    child_script("assert not os.path.exists(result); json.dump(spec, open(result, 'w'))")
    expected = {"arm": "memopt", "folder": str(tmp_path), "seed": 4, "epochs": 2, "model": TINY}
    assert run_child(tmp_path, "memopt", seed=4, epochs=2, sizes=TINY) == expected


# ---- Bad input: found before anything is written --------------------------------------------------------------------


def refusal(capsys: pytest.CaptureFixture[str], *arguments: Any, **settings: Any) -> str:
    """Return the error text of a demo that must not start."""
    assert run_demo(*arguments, **settings) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def test_an_output_that_is_no_folder(tmp_path: Path, no_child: None, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out"
    output.write_text("mine")
    assert refusal(capsys, output) == f"Error: output='{output}' is not a folder; {FINISHED}\n"
    assert contents(tmp_path) == {"out": b"mine"}
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "nowhere")
    assert refusal(capsys, link) == f"Error: output='{link}' is not a folder; {FINISHED}\n"


@pytest.mark.parametrize("marker", [None, "", "{", "[]", "{}", '{"files": 3}', b"\xff\xfe"])
def test_a_folder_that_no_demo_finished(
    marker: str | bytes | None, tmp_path: Path, no_child: None, capsys: pytest.CaptureFixture[str]
) -> None:
    output = finished_demo(tmp_path / "out")
    (output / "demo.json").unlink()
    if marker is not None:
        (output / "demo.json").write_bytes(marker if isinstance(marker, bytes) else marker.encode())
    before = contents(tmp_path)
    assert refusal(capsys, output) == f"Error: output='{output}' has no readable demo.json; {FINISHED}\n"
    assert contents(tmp_path) == before


def test_a_folder_that_changed_since(tmp_path: Path, no_child: None, capsys: pytest.CaptureFixture[str]) -> None:
    output = finished_demo(tmp_path / "out")
    (output / "notes.txt").write_text("mine")
    text = f"Error: output='{output}' holds notes.txt, which no demo wrote; {FINISHED}\n"
    assert refusal(capsys, output) == text
    assert (output / "notes.txt").read_text() == "mine"
    (output / "model.safetensors").unlink()
    text = f"Error: output='{output}' has lost model.safetensors of an earlier demo; {FINISHED}\n"
    assert refusal(capsys, output) == text


def test_a_missing_or_unwritable_place(
    tmp_path: Path, no_child: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "missing" / "out"
    place = f"output='{output}' lies in a folder that does not exist; expected an existing one. {ANOTHER}"
    assert refusal(capsys, output) == f"Error: {place}\n"

    def refuse(**_: Any) -> str:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(demo_output.tempfile, "mkdtemp", refuse)  # root may write anywhere, and may run the tests
    output = tmp_path / "out"
    place = f"output='{output}' cannot be written (Permission denied); expected a writable place. {ANOTHER}"
    assert refusal(capsys, output) == f"Error: {place}\n"
    assert list(tmp_path.iterdir()) == []


def test_a_json_file_that_cannot_be(tmp_path: Path, no_child: None, capsys: pytest.CaptureFixture[str]) -> None:
    rule = "expected a file in an existing folder outside the output. Call: hf-memopt demo --json figures.json"
    for file in (tmp_path, tmp_path / "missing" / "figures.json"):
        text = f"Error: json_file='{file}' is a folder or lies in a missing one; {rule}\n"
        assert refusal(capsys, tmp_path / "out", json_file=file) == text
    file = tmp_path / "out" / "figures.json"
    text = f"Error: json_file='{file}' lies in the output, which is replaced as a whole; {rule}\n"
    assert refusal(capsys, tmp_path / "out", json_file=file) == text
    check_json_file(tmp_path / "outer.json", tmp_path / "out")


@pytest.mark.parametrize("name", ["epochs", "max_train"])
def test_nothing_to_train(name: str, tmp_path: Path, no_child: None, capsys: pytest.CaptureFixture[str]) -> None:
    text = refusal(capsys, tmp_path / "out", **{name: 0})
    assert text == f"Error: {name}=0 trains nothing; expected 1 or more. Call: hf-memopt demo\n"


def test_a_python_without_sources(
    tmp_path: Path, no_child: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "python311.zip"))
    text = refusal(capsys, tmp_path / "out")
    assert text.startswith(f"Error: standard_library='{tmp_path / 'python311.zip'}' holds no Python sources; expected ")
    assert list(tmp_path.iterdir()) == []


def test_too_little_disk(
    library: Path,
    tmp_path: Path,
    no_child: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=10 * 2**20)
    monkeypatch.setattr(demo_output.shutil, "disk_usage", lambda _: usage)
    monkeypatch.setattr(demo, "_weight_bytes", lambda *_: 4 * 2**20)
    lines = refusal(capsys, tmp_path / "out", model=TINY).splitlines()
    assert lines[-1] == (
        f"Error: output='{tmp_path / 'out'}' lies on a disk with 10.0 MiB free; expected at least 20.0 MiB. "
        "Call: hf-memopt demo --output folder-on-another-disk"
    )
    assert list(tmp_path.iterdir()) == []


def test_weight_bytes_are_those_of_the_saved_model(run: tuple[Path, str]) -> None:
    task = docstring_task(read_docstrings(source_files()))
    predicted = demo._weight_bytes(len(AutoTokenizer.from_pretrained(run[0] / "out")), task, TINY)
    saved = (run[0] / "out" / "model.safetensors").stat().st_size
    assert predicted <= saved <= predicted + 2**14  # the header with names and shapes
    others = sum(file.stat().st_size for file in (run[0] / "out").iterdir()) - saved
    assert others < demo.BESIDE_WEIGHTS_BYTES
    check_disk(run[0], predicted)


# ---- Trouble on the way: nothing half done is left ------------------------------------------------------------------


def full_disk(output: Path) -> str:
    return (
        f"output='{output}' lies on a disk that is full now; expected room for model and tokenizer. What was written "
        "is removed again. Call: hf-memopt demo --output folder-on-another-disk"
    )


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "No space left on device"), DemoError(f"(c) hf_memopt failed: {NO_SPACE}")],
    ids=["in this process", "in a child"],
)
def test_a_disk_that_gets_full(error: Exception, tmp_path: Path) -> None:
    def fail() -> None:
        with work_folder(tmp_path / "out") as work:
            (work / "part").write_text("half")
            raise error

    with pytest.raises(DemoError) as raised:
        fail()
    assert str(raised.value) == full_disk(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_child_without_disk_ends_the_demo(
    library: Path, tmp_path: Path, child_script: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()
    output = finished_demo(folder / "out")
    before = contents(folder)
    child_script(f"json.dump({{'error': {NO_SPACE!r}}}, open(result, 'w')); sys.exit(1)")
    assert refusal(capsys, output, model=TINY).splitlines()[-1] == f"Error: {full_disk(output)}"
    assert contents(folder) == before


def test_a_bug_is_not_hidden_and_cleans_up_all_the_same(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), work_folder(tmp_path / "out"):
        _ = 1 // 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [OSError(errno.EIO, "I/O error"), KeyboardInterrupt()])
def test_publishing_that_fails_puts_the_earlier_demo_back(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = finished_demo(tmp_path / "out")
    before = contents(tmp_path)
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if self.name == "model":
            raise error
        return rename(self, target)

    def fail() -> None:
        with work_folder(output) as work:
            (work / "model").mkdir()
            monkeypatch.setattr(Path, "rename", failing)
            publish(work / "model", output, {})

    with pytest.raises(type(error)):
        fail()
    assert contents(tmp_path) == before


def test_figures_that_cannot_be_written_name_the_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(demo_output.os, "replace", refuse)
    with pytest.raises(DemoError) as error:
        demo_output.write_figures(tmp_path / "figures.json", {})
    assert str(error.value) == (
        f"json_file='{tmp_path / 'figures.json'}' cannot be written (No space left on device); expected a writable "
        "place with room. The same figures stand in demo.json of the output. "
        "Call: hf-memopt demo --json another-file.json"
    )
    assert list(tmp_path.iterdir()) == []


# ---- Interruption ---------------------------------------------------------------------------------------------------

START = """
import sys, sysconfig
from pathlib import Path
original = sysconfig.get_path
sysconfig.get_path = lambda name: sys.argv[2] if name == "stdlib" else original(name)
from hf_memopt.demo.run import run_demo
sys.exit(run_demo(Path(sys.argv[1]), model={"hidden_size": 64, "num_attention_heads": 2}))
"""


def start_demo(output: Path, library: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", START, str(output), str(library)]
    # A session of its own, as a terminal's Ctrl-C or a batch system's signal would find it.
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


def wait_for(condition: Callable[[], Any], seconds: float = 60) -> Any:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = condition()
        if found:
            return found
        time.sleep(0.02)
    raise AssertionError(f"nothing after {seconds} s")


def alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(
    ("number", "to_group", "in_child"),
    [(signal.SIGINT, True, True), (signal.SIGTERM, False, False)],
    ids=["Ctrl-C while a child trains", "SIGTERM while the data is read"],
)
def test_an_interrupted_demo_leaves_only_what_was_there(
    number: signal.Signals, to_group: bool, in_child: bool, library: Path, tmp_path: Path
) -> None:
    output = finished_demo(tmp_path / "out")
    before = contents(tmp_path)
    process = start_demo(output, library)
    parent = psutil.Process(process.pid)
    wait_for(lambda: len(list(tmp_path.iterdir())) > 1)  # the hidden folder
    children = wait_for(parent.children) if in_child else []
    os.killpg(process.pid, number) if to_group else process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.splitlines()[-1] == "Interrupted; nothing unfinished was left behind."
    assert "Traceback" not in err
    assert out == ""
    assert contents(tmp_path) == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]
    wait_for(lambda: not any(alive(child) for child in children), seconds=10)


def test_a_killed_demo_takes_its_child_along(library: Path, tmp_path: Path) -> None:
    process = start_demo(tmp_path / "out", library)
    parent = psutil.Process(process.pid)
    children = wait_for(parent.children)
    process.kill()
    process.communicate(timeout=60)
    wait_for(lambda: not any(alive(child) for child in children), seconds=20)
    assert not (tmp_path / "out").exists()


def test_full_while_publishing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "out"

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def fail() -> None:
        with work_folder(output) as work:
            (work / "model").mkdir()
            monkeypatch.setattr(demo_output.os, "replace", full)
            publish(work / "model", output, {})

    with pytest.raises(DemoError) as error:
        fail()
    assert str(error.value) == (
        f"output='{output}' lies on a disk that is full now; expected room for model and tokenizer. What was written "
        "is removed again. Call: hf-memopt demo --output folder-on-another-disk"
    )
    assert list(tmp_path.iterdir()) == []
