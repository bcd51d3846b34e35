"""``hf-memopt measure``: the script runs up to its training, which is measured; exit codes; what is refused.

What scripts do around ``train()`` is in ``tests/hard/test_measured_scripts.py``.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from printed_errors import in_one_line
from tables import tables
from typer.testing import CliRunner

from hf_memopt.cli.app import app

TABLES = tables(__file__)

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
    """Run the command in this process; what the script prints goes to the real streams."""
    return CliRunner().invoke(app, ["measure", *arguments])


def test_a_script_runs_with_its_arguments_up_to_its_training(tmp_path: Path, capfd: Any) -> None:
    own = (
        "from transformers import TrainerCallback\nclass Saves(TrainerCallback):\n"
        "    def on_train_end(self, *_, model, **__):\n        model.save_pretrained(sys.argv[1])\n"
        "trainer = Trainer(BertForSequenceClassification(config), args, train_dataset=rows, callbacks=[Saves()])\n"
        "try:\n    trainer.train()\nfinally:\n    trainer.save_model()\n    print('NEVER')\n"
    )
    first = "import sys\nassert not {'torch', 'transformers'} & set(sys.modules), 'imported'\n"
    script = script_of(tmp_path, first + BEGIN + own)
    output, folder = tmp_path / "run.json", tmp_path / "out"
    folder.mkdir()
    (folder / "model.safetensors").write_text("TRAINED")
    handler = signal.getsignal(signal.SIGTERM)
    found = run(script, "--steps", "2", "--json", "--output", str(output), "--", str(folder), "--lr", "0.5")
    printed = capfd.readouterr()
    assert found.exit_code == 0, found.output + printed.err
    assert printed.out == ""  # what the script prints is not in the JSON
    assert f"arguments: ['{folder}', '--lr', '0.5'] train.py __main__" in printed.err
    assert "NEVER" not in printed.err
    assert [(file.name, file.read_text()) for file in folder.iterdir()] == [("model.safetensors", "TRAINED")]
    told = json.loads(output.read_text())
    assert json.loads(found.stdout) == told
    assert (told["steps"], len(told["step_seconds"]), told["device"], told["batch_size"]) == (5, 2, "cpu", 4)
    assert signal.getsignal(signal.SIGTERM) == handler
    again = run(script, "--output", str(output))
    assert (again.exit_code, capfd.readouterr().err) == (2, "")  # the script does not run
    assert in_one_line(again.stderr) == (
        f"--output {output} exists already; expected a new file. Pass another name, or --force to replace it\n"
    )


@pytest.mark.slow
def test_a_script_that_attaches_is_measured_as_its_trainer_in_hand(tmp_path: Path) -> None:
    own = TRAIN.replace("Trainer(", "trainer = attach(Trainer(").replace("=rows)", "=rows), MicrobatchCallback())")
    own = own.replace(
        ".train()",
        "\nif sys.argv[2:]:\n    print(measure(trainer, steps=1).to_json())\n    sys.exit()\ntrainer.train()",
    )
    script = script_of(tmp_path, f"{BEGIN}from hf_memopt import MicrobatchCallback, attach, measure\n{own}")
    command = [sys.executable, script, str(tmp_path / "out"), "in hand"]
    by_hand = subprocess.run(command, capture_output=True, text=True).stdout
    found = run(script, "--steps", "1", "--json", "--", str(tmp_path / "out"))
    assert found.exit_code == 0, found.output
    told, expected = json.loads(found.stdout), json.loads(by_hand[by_hand.index("{\n") :])
    for figures in ("measured", "predicted"):
        for name in ("allocated_bytes", "phases", "components"):
            assert told[figures][name] == expected[figures][name]


@pytest.mark.slow
def test_out_of_memory_is_exit_code_1(tmp_path: Path) -> None:
    fails = (
        "from transformers import TrainerCallback\nimport torch\nclass Full(TrainerCallback):\n"
        "    def on_step_begin(self, *args, **kwargs):\n        raise torch.OutOfMemoryError('CUDA out of memory')\n"
        "Trainer(BertForSequenceClassification(config), args, train_dataset=rows, callbacks=[Full()]).train()\n"
    )
    found = run(script_of(tmp_path, BEGIN + fails), "--", str(tmp_path / "out"))
    assert found.exit_code == 1, found.output
    assert "Out of memory in the forward phase, after 0 whole steps." in found.output


NEVER = (
    "{script!r} never called Trainer.train() ({ended}); expected a script that trains with the stock Trainer. "
    "Run it by itself: python {script}\n"
)
UNMEASURED = TABLES["unmeasured"]


@pytest.mark.parametrize(("text", "ended", "shown"), UNMEASURED)
def test_a_script_that_never_trains_is_exit_code_2(
    text: str, ended: str, shown: str, tmp_path: Path, capfd: Any
) -> None:
    script = script_of(tmp_path, text)
    found = run(script)
    assert found.exit_code == 2
    assert in_one_line(found.output) == NEVER.format(script=script, ended=ended)
    assert (capfd.readouterr().err.splitlines() or [""])[-1] == shown


FAILING = TABLES["failing"]


@pytest.mark.slow
@pytest.mark.parametrize(("text", "message"), FAILING)
def test_steps_that_cannot_be_measured_are_exit_code_2(text: str, message: str, tmp_path: Path, capfd: Any) -> None:
    script = script_of(tmp_path, BEGIN + text)
    found = run(script, "--", str(tmp_path / "out"))
    assert found.exit_code == 2, found.output
    assert in_one_line(found.output) == message.format(script=script)
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("none.py",), "'none.py' is not a file; expected a Python script that trains with the stock Trainer."),
        (("{notebook}",), "is a notebook; expected a Python script. Call: jupyter nbconvert --to script "),
        (("x" * 5000,), "cannot be a path (File name too long); expected text or a pathlib.Path."),
        (
            ("{script}", "--steps", "0"),
            "--steps 0 is invalid; expected a whole number from 1 to 10000.",
        ),
        (
            ("{script}", "--output", "no/folder/run.json"),
            "--output no/folder/run.json is a folder or is in a missing one",
        ),
    ],
)
def test_bad_options_are_refused_before_the_script_runs(
    arguments: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    script = script_of(tmp_path, "print('RAN')\n")
    (notebook := tmp_path / "a.ipynb").write_text('{"cells": []}')
    found = run(*(one.format(script=script, notebook=notebook) for one in arguments))
    assert found.exit_code == 2
    assert message in in_one_line(found.output)
    assert "RAN" not in found.output
