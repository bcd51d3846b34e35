"""``hf-memopt run``: each script prints, trains and ends as under ``python``; what is said; the diff; bad input."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from invoked import invoked
from slow_cases import slow_except

HEAD = """
import os, sys
import torch, transformers
from transformers import Trainer, TrainerCallback, TrainingArguments

transformers.set_seed(0)
sizes = dict(hidden_size=16, intermediate_size=16, num_attention_heads=2, num_hidden_layers=1, vocab_size=100)
rows = [{"input_ids": [5 + (i + j) % 90 for j in range(8 + i % 5)], "labels": i % 2} for i in range(32)]
for row in rows:
    row["input_ids"] += [0] * (12 - len(row["input_ids"]))
settings = dict(use_cpu=True, report_to="none", per_device_train_batch_size=4, max_steps=4, logging_steps=1)
settings |= dict(save_strategy="no", disable_tqdm=True, seed=0)
model = transformers.BertForSequenceClassification(transformers.BertConfig(**sizes))
"""
ARGS = HEAD + "args = TrainingArguments('out', **settings)\n"
MAKE = ARGS + "trainer = Trainer(model, args, train_dataset=rows)\n"
END = "print([row['loss'] for row in trainer.state.log_history if 'loss' in row])\n"
TRAIN = "trainer.train()\n" + END
CAUSAL = HEAD + (
    "config = transformers.LlamaConfig(**sizes, num_key_value_heads=2)\n"
    "model = transformers.LlamaForCausalLM(config)\n"
    "rows = [{'input_ids': row['input_ids'], 'labels': row['input_ids']} for row in rows]\n"
    "args = TrainingArguments('out', **settings)\n"
)
# a step that an RTX 3050 has no room for; it is not taken, so its weights are not drawn
TOO_LARGE = CAUSAL.replace("hidden_size=16", "hidden_size=1024").replace("vocab_size=100", "vocab_size=150_000")
TOO_LARGE = TOO_LARGE.replace("train_batch_size=4", "train_batch_size=256").replace("32)]", "512)]")
TOO_LARGE = "import torch\ntorch.Tensor.normal_ = torch.Tensor.uniform_ = lambda self, *_, **__: self\n" + TOO_LARGE

ALLOWED = {
    "bf16_weights": "SixteenBitAdamW torch.bfloat16",
    "release_clipping": "ReleasedAdamW torch.float32",
    "freeze": "AdamW torch.float32",
}
"""The optimizer and the dtype of the weights by word of consent."""


@dataclass(frozen=True)
class Script:
    """A script; a part of what is said, and the words before its name."""

    text: str
    says: str = "no GPU here, so nothing is predicted"
    options: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    name: str = "train.py"


SCRIPTS = {
    "in main, elsewhere, with an error": Script(
        MAKE
        + "print(sys.argv, __file__, __name__)\nos.makedirs('in')\nos.chdir('in')\ndef main():\n    trainer.train()\n"
        + f"    {END}    raise KeyError('mine')\nif __name__ == '__main__':\n    main()\n",
        "+    attach(trainer, ",
        arguments=("--lr", "1e-4", "-m", "x"),
    ),
    "causal, as a module": Script(
        CAUSAL + "trainer = Trainer(model, args, train_dataset=rows)\nprint(__name__, __package__)\n" + TRAIN,
        "need",
        options=("-m", "--gpu", "RTX 3050 4GB", *(f"--allow={word}" for word in ALLOWED)),
        name="train",
    ),
    "exit with text": Script(MAKE + TRAIN + "sys.exit('over')\n"),
    "a syntax error": Script("x = = 1\n", "called no Trainer.train()"),
    "without a Trainer": Script(
        "print('hello')\nraise SystemExit(7)\n", "called no Trainer.train(), so nothing was attached to it"
    ),
    "twice": Script(MAKE + TRAIN + TRAIN),
    "own train": Script(
        ARGS
        + "class Own(Trainer):\n    def train(self, *a, **k):\n        print('mine')\n        return super().train()\n"
        + "trainer = Own(model, args, train_dataset=rows)\n"
        + TRAIN
    ),
    "evaluation": Script(
        HEAD
        + "args = TrainingArguments('out', **settings, eval_strategy='steps', eval_steps=2)\n"
        + "metrics = lambda found: {'mean': float(found.predictions.mean())}\n"
        + "trainer = Trainer(model, args, train_dataset=rows, eval_dataset=rows[:8], compute_metrics=metrics)\n"
        + TRAIN
        + "print([row['eval_mean'] for row in trainer.state.log_history if 'eval_mean' in row])\n"
    ),
    "imported late": Script(
        "def main():\n"
        + "".join(f"    {line}\n" for line in (MAKE + TRAIN).splitlines())
        + "main()\nfrom transformers.trainer import Trainer\n"
    ),
    "a package": Script(MAKE + TRAIN, options=("-m",), name="package"),
    "a module that is not there": Script("", "called no Trainer.train()", options=("-m",), name="nothing.there"),
    "spawned": Script(
        "import multiprocessing\ndef work(n):\n    return n + 1\nif __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n        print(pool.map(work, [1, 2]))\n",
        "called no Trainer.train()",
    ),
    "workers": Script(
        MAKE.replace("**settings)", "**settings, dataloader_num_workers=1)")
        + "if __name__ == '__main__':\n    trainer.train()\n    "
        + END
    ),
    "resumed": Script(
        MAKE.replace("**settings)", "**{**settings, 'save_strategy': 'steps', 'save_steps': 2})")
        + "trainer.train()\ntrainer.train(resume_from_checkpoint='out/checkpoint-2')\n"
        + END
    ),
    "stock's own recovery": Script(
        HEAD
        + "args = TrainingArguments('out', **settings, auto_find_batch_size=True)\n"
        + "trainer = Trainer(model, args, train_dataset=rows)\n"
        + TRAIN,
        "without MicrobatchCallback: ",
    ),
    "attached already": Script(
        MAKE + "from hf_memopt import MicrobatchCallback, attach\nattach(trainer, MicrobatchCallback())\n" + TRAIN
    ),
    "rows that draw": Script(
        ARGS
        + "class Rows(torch.utils.data.Dataset):\n    def __len__(self):\n        return 32\n"
        + "    def __getitem__(self, i):\n        return {**rows[i], 'labels': int(torch.randint(2, ()))}\n"
        + "trainer = Trainer(model, args, train_dataset=Rows())\n"
        + TRAIN,
        "need",
        options=("--gpu", "RTX 4060"),
    ),
    "in latin-1": Script("# -*- coding: latin-1 -*-\nname = 'é'\n" + MAKE + TRAIN, "+attach(trainer, "),
    "removes itself": Script(MAKE + "os.remove(__file__)\n" + TRAIN, "to have the same without hf-memopt run:"),
    "its folder": Script(
        MAKE + "print(sorted(os.listdir()), os.path.dirname(os.path.abspath(__file__)) == os.getcwd())\n" + TRAIN
    ),
}


def started(folder: Path, script: Script, *, is_run: bool) -> subprocess.CompletedProcess[str]:
    folder.mkdir()
    (folder / "package").mkdir()
    for file in ("train.py", "package/__main__.py"):
        (folder / file).write_text(script.text, encoding="latin-1" if "latin-1" in script.text else "utf-8")
    (folder / "package" / "__init__.py").touch()
    words = ["-m", "hf_memopt", "run", *script.options] if is_run else ["-m"] * ("-m" in script.options)
    words += [script.name, *script.arguments]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2]), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True)


def told(found: subprocess.CompletedProcess[str], folder: Path) -> list[str]:
    """Return the lines of standard output without times and folders."""
    lines = found.stdout.replace(str(folder), "").splitlines()
    return [re.sub(r"'\w+_(runtime|per_second)': '[^']*'", "", line) for line in lines]


QUICK = ("in main, elsewhere, with an error", "without a Trainer")


@pytest.mark.parametrize("name", slow_except(QUICK, SCRIPTS))
def test_a_script_runs_as_under_python(name: str, tmp_path: Path) -> None:
    script = SCRIPTS[name]
    plain = started(tmp_path / "plain", script, is_run=False)
    ours = started(tmp_path / "ours", script, is_run=True)
    assert ours.returncode == plain.returncode
    assert told(ours, tmp_path / "ours") == told(plain, tmp_path / "plain")
    assert script.says in ours.stderr
    assert "hf_memopt/prediction/recipes" not in ours.stderr
    assert "--allow" not in ours.stderr  # where a step fits nothing is changed
    if "Traceback" in plain.stderr:
        first, last = plain.stderr.index("Traceback"), plain.stderr.splitlines()[-1]
        shown = plain.stderr[first:].replace(str(tmp_path / "plain"), "")
        assert shown in ours.stderr.replace(str(tmp_path / "ours"), "")
        assert last in ours.stderr


@pytest.mark.slow
def test_a_script_that_the_diff_changed_runs_the_same(tmp_path: Path) -> None:
    script = SCRIPTS[QUICK[0]]
    ours = started(tmp_path / "ours", script, is_run=True)
    patch = ours.stderr[ours.stderr.index("--- a/train.py") : ours.stderr.index("Traceback")]
    (tmp_path / "ours" / "change.patch").write_text(patch)
    subprocess.run(["patch", "-p1", "-i", "change.patch"], cwd=tmp_path / "ours", check=True, capture_output=True)
    changed = (tmp_path / "ours" / "train.py").read_text()
    assert "from hf_memopt import EvaluationGuardCallback, MicrobatchCallback, attach\n" in changed
    assert "    attach(trainer, MicrobatchCallback(), EvaluationGuardCallback())\n    trainer.train()\n" in changed
    again = started(tmp_path / "changed", replace(script, text=changed), is_run=False)
    assert told(again, tmp_path / "changed") == told(ours, tmp_path / "ours")


@pytest.mark.slow
@pytest.mark.parametrize("word", ALLOWED)
def test_where_a_step_does_not_fit(word: str, tmp_path: Path) -> None:
    """The estimate comes first, then ``--apply exact``, then a word of consent; a nameless Trainer gets no diff."""
    stops = (
        "class Stops(TrainerCallback):\n    def on_step_begin(self, *_, model, optimizer, **__):\n"
        "        print(type(optimizer.optimizer).__name__, model.lm_head.weight.dtype)\n"
        "        print(model.get_input_embeddings().weight.requires_grad)\n        sys.exit(0)\n"
    )
    text = f"{TOO_LARGE}{stops}Trainer(model, args, train_dataset=rows, callbacks=[Stops()]).train()\n"
    options = ("--gpu", "RTX 3050 4GB", "--apply", "exact", "--allow", word)
    found = started(tmp_path / "ours", Script(text, options=options), is_run=True)
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines() == [ALLOWED[word], str(word != "freeze")]
    said = found.stderr
    needs = r"\[memopt\] 256 examples of 12 tokens need [\d.]+ GiB of 3\.\d+ GiB on RTX 3050 4GB: steps"
    assert re.search(needs, said)
    micro = "" if word == "release_clipping" else "MicrobatchCallback(), "  # which do not go together
    order = [
        "with fused cross-entropy and checkpointing policy the same batch and loss need ",
        f"--allow {word}, which changes the training:",
        "to have the same without hf-memopt run:",
        f"attach(trainer, {micro}EvaluationGuardCallback(), FusedCrossEntropyCallback(), ",
        f"and for {word}, where the Trainer is made:",
    ]
    places = [said.index(words) for words in order]
    assert places == sorted(places)
    assert "--- a/train.py" not in said


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_an_interrupt_ends_it_as_under_python(tmp_path: Path) -> None:
    heard = "signal.signal(signal.SIGINT, signal.default_int_handler)"  # where the tests run in the background too
    script = Script(f"import os, signal\n{heard}\nos.kill(os.getpid(), signal.SIGINT)\nprint('never')\n")
    plain, ours = (started(tmp_path / name, script, is_run=name == "ours") for name in ("plain", "ours"))
    assert ours.returncode == plain.returncode == -signal.SIGINT
    assert ours.stdout == plain.stdout == ""


@pytest.mark.slow
def test_two_processes_of_torchrun(tmp_path: Path) -> None:
    """Default flags of DDP leave micro-batching out, and one process speaks."""
    (tmp_path / "train.py").write_text(MAKE.replace("**settings)", "**settings, ddp_backend='gloo')") + TRAIN)
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "hf_memopt", "run", "train.py"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2]), "OMP_NUM_THREADS": "1"}
    found = subprocess.run([sys.executable, *words], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr[-2000:]
    assert found.stderr.count("nothing is predicted") == 1


NO_SCRIPT = (
    "error: 'nothing.py' is not a file; expected a Python script that trains with the stock Trainer, or --module and a "
    "module's name hint: Call: hf-memopt run train.py"
)
WORDS = {
    ("--apply", "all"): "'exact'",
    ("--repair", "all"): "'gradient-scale'",
    ("--allow", "shorter"): "'release_clipping', 'bf16_weights', 'freeze'",
}
"""Options with a word that is unknown, and the words that are expected."""


@pytest.mark.skipif(os.name != "posix", reason="execv")
@pytest.mark.parametrize("words", [["--lr", "1"], ["--", "--lr", "1"]])
def test_arguments_may_stand_after_two_dashes_as_those_of_measure(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    started_with: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda _, given: started_with.append(given))
    monkeypatch.setattr(subprocess, "call", lambda given: 0)
    assert invoked("run", __file__, *words).exit_code == 0
    assert started_with[0][-3:] == [__file__, "--lr", "1"]


def test_bad_input_is_refused(tmp_path: Path) -> None:
    (notebook := tmp_path / "a.ipynb").write_text('{"cells": []}')
    of_notebook = (
        f"error: '{notebook}' is a notebook; expected a Python script, or --module and a module's name hint: Call: "
        f"jupyter nbconvert --to script {notebook}, or in the notebook: attach(trainer, MicrobatchCallback())"
    )
    told = {("nothing.py",): NO_SCRIPT, (str(notebook),): of_notebook, ("--gpu", "RTX 1", __file__): "RTX 1"}
    for (option, word), known in WORDS.items():
        first = known.split("'")[1]
        message = f"error: {option} {word} is unknown; expected one of {known} hint: Pass {option} {first}"
        told[option, word, __file__] = message
    for words, message in told.items():
        found = invoked("run", *words)
        assert found.exit_code == 2
        assert message in " ".join(found.output.split())
