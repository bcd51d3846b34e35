"""``hf-memopt measure`` runs nothing of a script after its ``train()``, and leaves every file as it was.

Each script runs in a real process, in a folder with a trained model (``final``) and a checkpoint (``out``).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from printed_errors import in_one_line

import tiny

HEAD = """
import os, sys
import torch, transformers
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments

rows = [{"input_ids": [1, 2, 3, 4], "labels": 0}] * 32
config = BertConfig(
    hidden_size=8, intermediate_size=8, num_attention_heads=1, num_hidden_layers=1, vocab_size=50
)
model = BertForSequenceClassification(config)
settings = dict(use_cpu=True, report_to="none", per_device_train_batch_size=2, disable_tqdm=True)
args = TrainingArguments("out", max_steps=8, save_strategy="steps", save_steps=1, logging_steps=1, **settings)

def wrote():
    open("AFTER", "w").write("x")

"""
MAKE = HEAD + "trainer = Trainer(model, args, train_dataset=rows)\n"
TRIES = MAKE + "try:\n    trainer.train()\n"
SUBCLASS = HEAD + "class Own(Trainer):\n    def train(self, *args, **kwargs):\n"
END = "Own(model, args, train_dataset=rows).train()\n"
NEVER = (
    "'train.py' never called Trainer.train() ({}); expected a script that trains with the stock Trainer. Run it by "
    "itself: python train.py"
)
FAILS = "'train.py' fails in its first steps ({}); expected steps that run. Run it by itself: python train.py"


@dataclass(frozen=True)
class Script:
    """A script, what its measurement exits with, and the last line of what it prints; "" for a table."""

    text: str
    code: int = 0
    message: str = ""
    arguments: tuple[str, ...] = ()


def of_callback(event: str, body: str) -> str:
    """Return a script with a callback that runs ``body`` at an event."""
    return (
        f"{HEAD}class Own(TrainerCallback):\n    def {event}(self, args, state, control, model=None, **_):\n"
        f"        {body}\n"
        "trainer = Trainer(model, args, train_dataset=rows, callbacks=[Own()])\ntrainer.train()\n"
    )


SCRIPTS = {
    "plain": Script(MAKE + "trainer.train()\nwrote()\n"),
    "finally": Script(TRIES + "finally:\n    trainer.save_model('final')\n    wrote()\n"),
    "bare except": Script(TRIES + "except:\n    pass\ntrainer.save_model('final')\nwrote()\n"),
    "retries": Script(
        MAKE + "for _ in range(3):\n    try:\n        trainer.train()\n        break\n"
        "    except BaseException as error:\n        print('again', error)\nwrote()\n"
    ),
    "atexit": Script(MAKE + "import atexit\natexit.register(wrote)\ntrainer.train()\n"),
    "with block": Script(
        MAKE + "import contextlib\n@contextlib.contextmanager\ndef saved():\n    try:\n        yield\n    finally:\n"
        "        wrote()\nwith saved():\n    trainer.train()\n"
    ),
    "subclass": Script(
        f"{SUBCLASS}        found = super().train(*args, **kwargs)\n        wrote()\n        return found\n{END}"
    ),
    "subclass with a loop of its own": Script(
        f"{SUBCLASS}        wrote()\n{END}",
        2,
        "'train.py' trains by Own.train(), which never calls Trainer.train(); expected a train() that does. Call: "
        "super().train()",
    ),
    "thread": Script(
        MAKE
        + "import threading\nthread = threading.Thread(target=trainer.train)\nthread.start()\nthread.join()\nwrote()\n"
    ),
    "two trainings": Script(
        HEAD + "for _ in range(2):\n    Trainer(model, args, train_dataset=rows).train()\nwrote()\n"
    ),
    "exit code": Script(MAKE + "trainer.train()\nsys.exit(3)\n"),
    "resumes": Script(MAKE + "trainer.train(resume_from_checkpoint=os.path.isdir('out'))\nwrote()\n"),
    "saves at the end of training": Script(of_callback("on_train_end", "model.save_pretrained('final'); wrote()")),
    "asks for checkpoints": Script(of_callback("on_step_end", "control.should_save = True")),
    "changes its folder": Script(MAKE + "os.chdir('final')\ntrainer.train()\n"),
    "arguments": Script(
        "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--lr', required=True)\n"
        "parser.parse_args()\n" + MAKE + "trainer.train()\n",
        arguments=("--", "--lr", "1"),
    ),
    "syntax": Script("def (:\n", 2, NEVER.format("it ended with exit code 1")),
    "import": Script("import no_such_module\n", 2, NEVER.format("it ended with exit code 1")),
    "exit before": Script("import sys\nsys.exit(0)\n", 2, NEVER.format("it ended with exit code 0")),
    "NUL": Script("a = 1\0\n", 2, NEVER.format("it ended with exit code 1")),
    "Latin-1": Script("# caf\xe9\nx = 1\n", 2, NEVER.format("it ended with exit code 0")),
    "process of its own": Script(
        MAKE
        + "import multiprocessing\nprocess = multiprocessing.Process(target=os._exit, args=(0,))\nprocess.start()\n"
        "process.join()\ntrainer.train()\nwrote()\n"
    ),
    "saves at the end of an epoch": Script(
        of_callback("on_epoch_end", "model.save_pretrained('final'); wrote()").replace("* 32", "* 4")
    ),
    "trains in a fork": Script(
        MAKE + "import multiprocessing\nprocess = multiprocessing.get_context('fork').Process(target=trainer.train)\n"
        "process.start()\nprocess.join()\ntrainer.save_model('final')\nwrote()\n",
        2,
        "'train.py' trains in a process that it forks; expected a call of train() in its own. Call: trainer.train()",
    ),
    "exits in a step": Script(of_callback("on_step_end", "sys.exit(5)"), 2, FAILS.format("SystemExit: 5")),
    "is killed in a step": Script(
        of_callback("on_step_end", "os.kill(os.getpid(), 9)"), 2, FAILS.format("it was killed by SIGKILL")
    ),
    "fails in a step, then saves": Script(
        MAKE.replace('"input_ids": [1, 2, 3, 4]', '"input_ids": [60]')
        + "try:\n    trainer.train()\nfinally:\n    trainer.save_model('final')\n    wrote()\n",
        2,
        FAILS.format("IndexError: index out of range in self"),
    ),
    "runs out of memory": Script(
        of_callback("on_step_begin", "raise torch.OutOfMemoryError('CUDA out of memory')"),
        1,
        "Out of memory in the forward phase, after 0 whole steps.",
    ),
    "hides and restores its output": Script(
        MAKE + "import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()):\n    trainer.train()\nwrote()\n"
    ),
    "calls the stock Trainer by its name": Script(f"{SUBCLASS}        Trainer.train(self)\n        wrote()\n{END}"),
}


def runs(process: int) -> bool:
    """Return whether a process is there, and not only its exit code, which nobody may ever ask for."""
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "hf_memopt", "measure", "train.py", "--steps", "1", *arguments]


def prepared(folder: Path, text: str) -> Path:
    (folder / "train.py").write_text(text, encoding="latin-1")
    for name in ("final", "out/checkpoint-1"):
        (folder / name).mkdir(parents=True)
        (folder / name / "model.safetensors").write_text("TRAINED")
    return folder


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_file_is_as_it_was(name: str, tmp_path: Path) -> None:
    script = SCRIPTS[name]
    before = tiny.files_of(prepared(tmp_path, script.text))
    done = subprocess.run(command(*script.arguments), cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert tiny.files_of(tmp_path) == before
    assert done.returncode == script.code, done.stderr
    if script.code == 2:
        assert in_one_line(done.stderr).splitlines()[-1] == script.message
        assert done.stdout == ""
    else:
        assert (script.message or "It fits: ") in done.stdout
        assert "Traceback" not in done.stderr


def test_a_failing_script_shows_its_own_traceback(tmp_path: Path) -> None:
    text = "def read():\n    return {}['rows']\n\nread()\n"
    done = subprocess.run(command(), cwd=prepared(tmp_path, text), capture_output=True, text=True)
    file = tmp_path / "train.py"
    assert in_one_line(done.stderr).splitlines() == [
        "Traceback (most recent call last):",
        f'  File "{file}", line 4, in <module>',
        "    read()",
        f'  File "{file}", line 2, in read',
        "    return {}['rows']",
        "           ~~^^^^^^^^",
        "KeyError: 'rows'",
        NEVER.format("it ended with exit code 1"),
    ]


def test_workers_end_with_the_script(tmp_path: Path) -> None:
    loading = "dataloader_num_workers=2, dataloader_persistent_workers=True, **settings"
    text = of_callback("on_step_end", "print(*(one.pid for one in multiprocessing.active_children()))")
    text = "import multiprocessing\n" + text.replace("**settings", loading)
    done = subprocess.run(command("--json"), cwd=prepared(tmp_path, text), capture_output=True, text=True, timeout=300)
    assert json.loads(done.stdout)["steps"] == 4, done.stderr
    workers = {int(word) for line in done.stderr.splitlines() for word in line.split() if word.isdigit()}
    assert len(workers) == 2
    end = time.monotonic() + 30  # they are killed, and gone when init has seen it
    while any(map(runs, workers)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(map(runs, workers))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, {1, 130}), (signal.SIGTERM, {143})])
def test_a_signal_ends_both(number: int, code: set[int], tmp_path: Path) -> None:
    text = of_callback("on_step_end", "open('PID', 'w').write(str(os.getpid())); import time; time.sleep(300)")
    text = text.replace("trainer.train()", "try:\n    trainer.train()\nfinally:\n    wrote()")
    process = subprocess.Popen(
        command(), cwd=prepared(tmp_path, text), stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    while not (tmp_path / "PID").exists() or not (tmp_path / "PID").read_text():
        assert process.poll() is None
        time.sleep(0.05)
    script = int((tmp_path / "PID").read_text())
    if number == signal.SIGINT:  # as a terminal does: to the whole group
        os.killpg(process.pid, number)
    else:
        process.terminate()
    process.communicate(timeout=30)
    assert process.returncode in code
    assert not runs(script)
    assert not (tmp_path / "AFTER").exists()
