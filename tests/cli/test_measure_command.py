"""``hf-memopt measure``: the script runs up to its training, which is measured; exit codes; what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer
from typer.testing import CliRunner

from hf_memopt.cli.app import app

BEGIN = """
import os, sys
os.environ["SCRIPT_RAN"] = "before its imports"
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

print("arguments:", sys.argv[1:], os.path.basename(sys.argv[0]), __name__)
config = BertConfig(
    hidden_size=16, intermediate_size=16, num_attention_heads=2, num_hidden_layers=1, vocab_size=100
)
rows = [{"input_ids": [i % 90] * 16, "labels": i % 2} for i in range(64)]
args = TrainingArguments(sys.argv[1], use_cpu=True, report_to="none", per_device_train_batch_size=4)
"""
TRAIN = "Trainer(BertForSequenceClassification(config), args, train_dataset=rows).train()\n"


def script_of(folder: Path, text: str) -> str:
    path = folder / "train.py"
    path.write_text(text, encoding="utf-8")
    return str(path)


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["measure", *arguments])


@pytest.fixture(autouse=True)
def unchanged(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("SCRIPT_RAN", "")
    before = Trainer.train, list(sys.argv), list(sys.path), list(sys.meta_path)
    yield
    assert (Trainer.train, sys.argv, sys.path, sys.meta_path) == before


def test_a_script_runs_with_its_arguments_up_to_its_training(tmp_path: Path) -> None:
    script = script_of(tmp_path, BEGIN + "try:\n    " + TRAIN + "except Exception:\n    pass\nprint('NEVER')\n")
    output = tmp_path / "run.json"
    found = run(script, "--steps", "2", "--output", str(output), "--", str(tmp_path / "out"), "--lr", "0.5")
    assert found.exit_code == 0, found.output
    assert f"arguments: ['{tmp_path / 'out'}', '--lr', '0.5'] train.py __main__" in found.output
    assert "NEVER" not in found.output
    assert "It fits: " in found.output
    told = json.loads(output.read_text())
    assert (told["steps"], len(told["step_seconds"]), told["device"]) == (5, 2, "cpu")
    again = run(script, "--output", str(output))
    assert (again.exit_code, "arguments" in again.output) == (2, False)  # the script does not run
    assert f"--output {output} exists already; expected a new file. Pass --force, or another path" in again.output


def test_a_script_that_attaches_is_measured(tmp_path: Path) -> None:
    own = TRAIN.replace("Trainer(", "attach(Trainer(").replace("=rows)", "=rows), MicrobatchCallback())")
    script = script_of(tmp_path, f"{BEGIN}from hf_memopt import MicrobatchCallback, attach\n{own}")
    found = run(script, "--steps", "1", "--json", "--", str(tmp_path / "out"))
    assert found.exit_code == 0, found.output
    assert len(json.loads(found.stdout)["step_seconds"]) == 1


def test_json_is_alone_on_standard_output(tmp_path: Path) -> None:
    found = run(script_of(tmp_path, BEGIN + TRAIN), "--steps", "1", "--json", "--", str(tmp_path / "out"))
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout)["batch_size"] == 4


def test_out_of_memory_is_exit_code_1(tmp_path: Path) -> None:
    fails = (
        "from transformers import TrainerCallback\nimport torch\nclass Full(TrainerCallback):\n"
        "    def on_step_begin(self, *args, **kwargs):\n        raise torch.OutOfMemoryError('CUDA out of memory')\n"
        "Trainer(BertForSequenceClassification(config), args, train_dataset=rows, callbacks=[Full()]).train()\n"
    )
    found = run(script_of(tmp_path, BEGIN + fails), "--", str(tmp_path / "out"))
    assert found.exit_code == 1, found.output
    assert "Out of memory in the forward phase, after 0 whole steps." in found.output


WRONG = [
    ("x = 1\n", "never called Trainer.train() (it finished); expected a script that trains with the stock Trainer."),
    ("import sys\nsys.exit(3)\n", "never called Trainer.train() (it ended with exit code 3); expected a script"),
    ("x = 1\nraise KeyError('data')\n", "never called Trainer.train() (KeyError: 'data', line 2); expected a script"),
    ("def f(:\n", "never called Trainer.train() (SyntaxError: "),
    (BEGIN + TRAIN.replace("rows", "[{}] * 64"), "fails in its first steps ("),
    (BEGIN + "args._n_gpu = 2\n" + TRAIN, "n_gpu=2 GPUs are visible to this one process"),
]


@pytest.mark.parametrize(("text", "message"), WRONG)
def test_a_script_that_cannot_be_measured_is_exit_code_2(text: str, message: str, tmp_path: Path) -> None:
    found = run(script_of(tmp_path, text), "--", str(tmp_path / "out"))
    assert found.exit_code == 2, found.output
    assert message in found.output
    assert "Traceback" not in found.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("none.py",), "'none.py' is not a file; expected a Python script that trains with the stock Trainer."),
        (("x" * 5000,), "cannot be a path (File name too long); expected text or a pathlib.Path."),
        (("{script}", "--steps", "0"), "Invalid value for '-n' / '--steps'"),
        (
            ("{script}", "--output", "no/folder/run.json"),
            "--output no/folder/run.json is in a folder that does not exist",
        ),
    ],
)
def test_bad_options_are_refused_before_the_script_runs(
    arguments: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    script = script_of(tmp_path, "print('RAN')\n")
    found = run(*(one.format(script=script) for one in arguments))
    assert found.exit_code == 2
    assert message in found.output
    assert "RAN" not in found.output


def test_options_are_checked_without_torch() -> None:
    code = "import sys, hf_memopt.cli.measure_command, hf_memopt.cli.plan_command; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


@pytest.mark.slow
def test_a_script_sets_its_environment_before_anything_heavy_is_imported(tmp_path: Path) -> None:
    first = "import sys\nassert not {'torch', 'transformers'} & set(sys.modules), 'imported'\n"
    script = script_of(tmp_path, first + BEGIN + TRAIN)
    command = [sys.executable, "-m", "hf_memopt", "measure", script, "--steps", "1", "--", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "It fits: " in done.stdout
