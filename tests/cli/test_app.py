"""The command line through typer's runner, and once as a real process."""

from __future__ import annotations

import importlib.metadata
import io
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bitsandbytes
import pytest
import torch
from printed_errors import in_one_line, stopped
from rich.console import Console
from tables import tables
from transformers import TrainingArguments
from typer.testing import CliRunner

from hf_memopt import PRESETS, Recipe, __version__
from hf_memopt.cli import doctor
from hf_memopt.cli.app import app
from hf_memopt.cli.command import spinner
from hf_memopt.cli.presets_command import STOCK
from hf_memopt.errors import MissingExtraError
from hf_memopt.prediction.rehearsal import RehearsalError
from hf_memopt.training.batching import file_lengths, padding_report
from tiny import tokenizer

TABLES = tables(__file__)

runner = CliRunner()
GIB = 2**30


def test_one_preset_is_explained_by_what_differs_from_the_trainers_defaults(tmp_path: Path) -> None:
    result = runner.invoke(app, ["presets", "4gb-gpu"])
    preset, stock = PRESETS["4gb-gpu"], TrainingArguments(tmp_path)
    for name in ("per_device_train_batch_size", "per_device_eval_batch_size", "eval_accumulation_steps", "optim"):
        assert STOCK[name] == getattr(stock, name), name
    first, *lines, last = result.output.splitlines()
    assert (result.exit_code, first) == (0, f"4gb-gpu: {preset.purpose}")
    differs = {name: (value, why) for name, value, why in preset.choices() if value != STOCK[name]}
    assert [line.split()[0] for line in lines] == [*differs]
    assert all(f"{why} (default: {STOCK[name]!r})" in result.output for name, (_, why) in differs.items())
    assert {"precision", "optim", "checkpointing", "bucketing", "autocast_cache"} <= {*differs}
    assert last == "Everything else is as the Trainer has it."


def test_presets_as_json() -> None:
    every = json.loads(runner.invoke(app, ["presets", "--json"]).output)
    assert {name: Recipe.from_json(json.dumps(value)) for name, value in every.items()} == dict(PRESETS)
    one = runner.invoke(app, ["presets", "8gb-gpu", "--json"]).output
    assert Recipe.from_json(one) == PRESETS["8gb-gpu"]


ANSWERED_AT_ONCE = TABLES["answered at once"]


def test_tables_and_checks_of_options_need_nothing_heavy(tmp_path: Path) -> None:
    """One process runs them all; ``benchmarks/command_line.py`` has their times."""
    script = (
        "import contextlib, io, json, sys, hf_memopt.cli\n"
        "answers = []\n"
        "for arguments in json.loads(sys.argv[1]):\n"
        "    sys.argv = ['hf-memopt', *arguments.split()]\n"
        "    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as errors:\n"
        "        try: hf_memopt.cli.main()\n"
        "        except SystemExit as stop: code = stop.code\n"
        "    readers = set() if 'missing.jsonl' in arguments else {'numpy', 'pyarrow'}\n"
        "    heavy = {'torch', 'transformers', 'matplotlib', *readers} & set(sys.modules)\n"
        "    answers.append([arguments, code, errors.getvalue(), sorted(heavy)])\n"
        "print(json.dumps(answers))"
    )
    command = [sys.executable, "-c", script, json.dumps(list(ANSWERED_AT_ONCE))]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    for arguments, code, errors, heavy in json.loads(done.stdout):
        expected, start = ANSWERED_AT_ONCE[arguments]
        assert (code, in_one_line(errors)[: len(start)], heavy) == (expected, start, []), arguments
        assert errors.count("\n") == (2 if start else 0), errors


def test_a_spinner_shows_on_a_terminal_alone() -> None:
    def shown(**console: Any) -> str:
        drawn = Console(file=(stream := io.StringIO()), **console)
        with spinner("simulating gpt2", drawn, shown=True) as announce:
            announce("1 of 19")
        return stream.getvalue()

    assert "1 of 19" in shown(force_terminal=True)
    with spinner("simulating [/red]", Console(file=io.StringIO(), force_terminal=True), shown=True) as announce:
        announce("[/red]")  # a name, not markup
    assert shown() == ""
    stream = io.StringIO()
    with spinner("simulating gpt2", Console(file=stream, force_terminal=True), shown=False) as announce:
        announce("1 of 19")
    assert stream.getvalue() == ""


def test_the_spinner_of_an_estimate_is_there_before_torch_is_imported() -> None:
    script = (
        "import sys, hf_memopt.cli\n"
        "from rich.console import Console\n"
        "from rich.progress import Progress\n"
        "def add_task(self, text, **_): sys.stdout.write(f'{text} {\"torch\" in sys.modules}\\n'); sys.exit(3)\n"
        "Console.is_terminal, Progress.add_task, Progress.start = True, add_task, lambda self: None\n"
        "sys.argv = ['hf-memopt', *sys.argv[1:]]\n"
        "hf_memopt.cli.main()"
    )
    for arguments, text in [("estimate gpt2 --seq-len 8", "simulating gpt2"), ("doctor", "looking at this machine")]:
        command = [sys.executable, "-c", script, *arguments.split()]
        done = subprocess.run(command, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (3, f"{text} False\n"), done.stderr


@pytest.fixture
def reviews(tmp_path: Path) -> Path:
    """A file of 200 texts of 1 to 40 words, one of them null."""
    path = tmp_path / "reviews.jsonl"
    texts = [" ".join(["w1"] * (1 + i * i % 40)) for i in range(199)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in [*texts, None]))
    return path


def test_lengths_prints_the_report_and_draws_it(reviews) -> None:
    pytest.importorskip("matplotlib")
    picture = reviews.with_name("lengths.png")
    result = runner.invoke(app, ["lengths", str(reviews), "--batch-size", "16", "--plot", str(picture)])
    assert (result.exit_code, result.stderr) == (0, "")
    found = file_lengths(reviews)
    report = padding_report(found.lengths, batch_size=16, unit="words")
    printed = "\n".join(line.rstrip() for line in result.stdout.splitlines())
    assert printed == f"{found.heading(reviews)}\n{report.table()}\nPicture: {picture}"
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_lengths_as_json_prints_nothing_else(reviews) -> None:
    tokenizer().save_pretrained(reviews.parent / "tokenizer")
    options = ["--max-tokens", "512", "--max-length", "24", "--tokenizer", str(reviews.parent / "tokenizer"), "--json"]
    result = runner.invoke(app, ["lengths", str(reviews), *options])
    found = json.loads(result.stdout)
    assert result.exit_code == 0
    told = {"path": str(reviews), "kind": "json", "files": 1, "column": "text", "unit": "tokens"}
    assert found.items() >= {**told, "null_rows": 1, "empty_rows": 0}.items()
    lengths = [3 + i * i % 40 for i in range(199)]  # with [CLS] and [SEP]
    report = padding_report(lengths, max_tokens=512, max_length=24)
    assert {name: found[name] for name in report.as_dict()} == json.loads(json.dumps(report.as_dict()))


@pytest.mark.parametrize(("options", "message"), TABLES["bad input of lengths"])
def test_bad_input_of_lengths_ends_with_2_an_error_and_a_hint(reviews, options, message) -> None:
    pytest.importorskip("matplotlib")
    picture = reviews.with_name("p.png")
    result = runner.invoke(app, ["lengths", str(reviews), "--plot", str(picture), *options])
    assert stopped(result) == message.format(path=str(reviews))
    assert list(reviews.parent.iterdir()) == [reviews]


def test_a_missing_and_a_broken_file_of_lengths(tmp_path) -> None:
    missing, broken = str(tmp_path / "none.parquet"), tmp_path / "broken.csv"
    said = stopped(runner.invoke(app, ["lengths", missing]))
    assert said == f"{missing!r} does not exist; expected a file or a folder. Check the path"
    broken.write_text("text,label\na,1\nb,2,3\n")
    result = runner.invoke(app, ["lengths", str(broken), "--json"])
    assert stopped(result).startswith(f"{str(broken)!r} cannot be read as csv (")
    assert result.stderr.count("\n") == 2


VERBS = {
    "presets": ("hf_memopt.cli.presets_command.preset_rows", []),
    "lengths": ("hf_memopt.cli.lengths_command.file_lengths", ["data.csv"]),
    "estimate": ("hf_memopt.prediction.memory.estimate", ["gpt2", "--seq-len", "8"]),
    "doctor": ("hf_memopt.cli.doctor.examine", []),
}
A_BUG = "hf-memopt failed ({}), which is a bug in hf-memopt; please report it. Set HF_MEMOPT_DEBUG=1 for the traceback"
OUT_OF_MEMORY = (
    "the memory of this computer ran out (MemoryError: malloc of size 9 failed); expected enough for data and model. "
    "Close other programs, or take a smaller file or model"
)
NO_PEFT = "LoRA needs peft, which is not installed. Call: pip install 'hf-memopt[peft]'"
ERRORS = [
    (ValueError("a=1 is wrong;\nexpected b."), "a=1 is wrong; expected b."),
    (PermissionError(13, "Permission denied", "x"), "PermissionError: [Errno 13] Permission denied: 'x'"),
    (MissingExtraError("peft", extra="peft", purpose="LoRA"), NO_PEFT),
    (MemoryError("malloc of size 9 failed"), OUT_OF_MEMORY),
    (RuntimeError(), A_BUG.format("RuntimeError")),
    (ValueError("a=\x1b[31m is wrong"), "a=\\u001b[31m is wrong"),
    (KeyError("x"), A_BUG.format("KeyError: 'x'")),
]


def failing(error: BaseException) -> Any:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    return fail


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(("error", "line"), ERRORS)
def test_every_error_of_every_command_ends_with_2_and_its_message(monkeypatch, verb, error, line) -> None:
    where, options = VERBS[verb]
    monkeypatch.setattr(where, failing(error))
    assert stopped(runner.invoke(app, [verb, *options])) == line
    result = runner.invoke(app, [verb, *options], env={"HF_MEMOPT_DEBUG": "1"})
    assert result.exception is error


def test_an_interrupt_ends_with_130_and_without_a_traceback(monkeypatch) -> None:
    monkeypatch.setattr(doctor, "examine", failing(KeyboardInterrupt()))
    result = runner.invoke(app, ["doctor"])
    assert (result.exit_code, result.output) == (130, "")


def test_doctor_is_content_with_a_healthy_machine() -> None:
    result = runner.invoke(app, ["doctor", "--json"])
    found = json.loads(result.output)
    assert result.exit_code == int(any(finding["level"] == "error" for finding in found))
    if not torch.accelerator.is_available():
        assert result.exit_code == 0, found
    subjects = {finding["subject"] for finding in found}
    assert {"python", "torch", "transformers", "bitsandbytes", "precision", "8-bit optimizer", "rehearse"} <= subjects


def test_doctor_table_shows_every_finding() -> None:
    result = runner.invoke(app, ["doctor"], env={"COLUMNS": "200"})
    assert all(finding.subject in result.output for finding in doctor.examine())


VERSION, NOT_FOUND = importlib.metadata.version, failing(importlib.metadata.PackageNotFoundError())
CPU_BUILD = f"this machine has an NVIDIA GPU, but torch {torch.__version__} is a CPU build"
NO_KERNEL = failing(RuntimeError("no kernel\nand more"))
TWO_GPUS = "2 are visible to one process, which attach refuses"
ON_CUDA: list[tuple[Any, str, Any]] = [
    (doctor, "accelerator_type", lambda: "cuda"),
    (doctor, "read_memory", lambda: SimpleNamespace(device_name="X", device_total_bytes=GIB, device_used_bytes=None)),
]


def of_transformers(version: str) -> tuple[Any, str, Any]:
    return importlib.metadata, "version", lambda name: version if name == "transformers" else VERSION(name)


BAD_MACHINES: list[tuple[str, list[tuple[Any, str, Any]], tuple[str, ...]]] = [
    (
        "several GPUs",
        [*ON_CUDA, (torch.cuda, "device_count", lambda: 2)],
        ("error", TWO_GPUS, "torchrun --nproc_per_node=2 train.py"),
    ),
    ("8-bit optimizer", [(bitsandbytes.optim.AdamW8bit, "step", NO_KERNEL)], ("error", "RuntimeError: no kernel")),
    ("kernels", [(torch, "ones", NO_KERNEL)], ("error", "RuntimeError: no kernel")),
    (
        "torch build",
        [
            (doctor, "accelerator_type", lambda: "cpu"),
            (torch.version, "cuda", None),
            (doctor, "_has_nvidia_gpu", lambda: True),
        ],
        ("error", CPU_BUILD),
    ),
    ("Windows", [*ON_CUDA, (doctor, "current_os", lambda: "wsl")], ("warning",)),
    (
        "rehearse",
        [(doctor, "installed_torch", failing(RehearsalError("torch=1 is none; expected one for CUDA. Call: pip")))],
        ("warning", "torch=1 is none; expected one for CUDA", "Call: pip"),
    ),
    *[
        ("transformers", [of_transformers(version)], ("error", version, "pip install 'transformers<6,>=5.8'"))
        for version in ("4.57.6", "5.7.1", "6.0.0")
    ],
]


@pytest.mark.parametrize(("subject", "patches", "told"), BAD_MACHINES)
def test_doctor_names_what_is_wrong_with_a_machine(monkeypatch, subject, patches, told) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for patch in patches:
        monkeypatch.setattr(*patch)
    [found] = [one for one in doctor.examine() if one.subject == subject and one.level != "ok"]
    assert (found.level, found.found, found.advice)[: len(told)] == told
    assert runner.invoke(app, ["doctor"]).exit_code == 1 or told[0] == "warning"


def test_doctor_gives_the_command_for_what_is_missing(monkeypatch) -> None:
    def version(name: str) -> str:
        return NOT_FOUND(name) if name in ("datasets", "peft", "matplotlib") else VERSION(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = {finding.subject: (finding.level, finding.found, finding.advice) for finding in doctor.examine()}
    assert found["datasets"][:2] == ("error", "not installed")
    assert found["datasets"][2].startswith("pip install 'datasets")
    assert found["peft"][:2] == ("warning", "not installed, needed for LoRA only")
    assert found["matplotlib"][:2] == ("warning", "not installed, needed for pictures only")


def test_doctor_names_a_checkout_that_is_not_installed(monkeypatch) -> None:
    for name in ("requires", "version"):
        monkeypatch.setattr(importlib.metadata, name, NOT_FOUND)
    expected = doctor.Finding("hf-memopt", "error", "not installed", "pip install 'hf-memopt'")
    assert list(doctor._versions())[1:] == [expected]


GPU = doctor.Finding("GPU", "ok", "RTX 3060, 12.00 GiB (11.00 GiB free), torch 2.13.0")
BROKEN = doctor.Finding("datasets", "error", "not installed", "pip install datasets")


REHEARSES = doctor.Finding("rehearse", "ok", "works here, without a GPU too")
NO_REHEARSAL = doctor.Finding("rehearse", "warning", "torch='2.13.0+cpu' is a build for the CPU", "pip install torch")
CPU_ONLY, FAILS = "CPU only: installed correctly, no GPU found.", "Training would fail here: datasets: not installed"


def test_doctor_says_one_sentence_and_the_next_command() -> None:
    assert doctor.verdict([GPU, NO_REHEARSAL]) == (f"Ready to train: {GPU.found}.", "hf-memopt run train.py")
    assert doctor.verdict([REHEARSES]) == (CPU_ONLY, "hf-memopt rehearse --gpu T4 train.py")
    assert doctor.verdict([NO_REHEARSAL]) == (CPU_ONLY, "hf-memopt plan MODEL --gpu T4")
    assert doctor.verdict([GPU, BROKEN]) == (f"{FAILS}.", "pip install datasets")
    assert doctor.verdict([BROKEN, BROKEN]) == (f"{FAILS} (and 1 more below).", "pip install datasets")


def test_doctor_finds_a_gpu_and_what_is_free_of_it(monkeypatch) -> None:
    reading = SimpleNamespace(device_name="RTX 3060", device_total_bytes=12 * GIB, device_used_bytes=GIB)
    monkeypatch.setattr(doctor, "accelerator_type", lambda: "cuda")
    monkeypatch.setattr(doctor, "read_memory", lambda: reading)
    found = f"RTX 3060, 12.00 GiB (11.00 GiB free), torch {torch.__version__}"
    assert list(doctor._device()) == [doctor.Finding("GPU", "ok", found)]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_doctor_fits_the_terminal_and_colours_only_a_terminal(width, monkeypatch) -> None:
    def printed(**settings: Any) -> str:
        console = Console(file=io.StringIO(), width=width, **settings)
        doctor.print_findings([GPU, NO_REHEARSAL, BROKEN], console)
        return console.file.getvalue()

    monkeypatch.delenv("NO_COLOR", raising=False)
    text = printed()
    assert text.startswith(FAILS)
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width
    assert text.splitlines()[-1].strip() == "Next: pip install datasets"
    assert "\x1b[" not in text
    assert "\x1b[" in printed(force_terminal=True, color_system="truecolor")
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[31" not in printed(force_terminal=True, color_system="truecolor")


def test_python_dash_m_is_the_same_command_and_answers_without_torch() -> None:
    code = (
        "import sys, runpy; sys.argv = ['hf-memopt', '--version']\n"
        "try:\n    runpy.run_module('hf_memopt', run_name='__main__')\n"
        "except SystemExit as stop:\n    assert not stop.code\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"hf-memopt {__version__}\n"
