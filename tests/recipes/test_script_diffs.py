"""The diff that ``hf-memopt run`` shows, applied by ``patch``, and what is said of it."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer

import tiny
from hf_memopt.prediction.recipes.running.assistant import assisted, diff_of

OPTIONS: dict[str, Any] = {"gpu": None, "apply": None, "allow": (), "repair": None, "is_module": True}
IDS = [5, 6, 7, 8]


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ("import x\ndef f():\n\tt = Trainer()\n\tt.train()\n", "\tattach(t, A())\n\tt.train()\n"),
        ('#!/bin/python\n"""Text."""\nt = Trainer()\nt.train()\n', '"""Text."""\nfrom hf_memopt import A, attach\n'),
        ("#!/bin/python\nt = Trainer()\nt.train()\n", "#!/bin/python\nfrom hf_memopt import A, attach\n"),
        ("t = Trainer()\nif t: t.train()\n", None),
    ],
)
def test_a_diff_keeps_what_the_lines_of_a_script_begin_with(text: str, changed: str | None, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(text)
    found = diff_of("train.py", ["A"], str(tmp_path))
    assert (found is None) is (changed is None)
    if changed is not None:
        (tmp_path / "a.patch").write_text(found or "")
        subprocess.run(["patch", "-p1", "-i", "a.patch"], cwd=tmp_path, check=True, capture_output=True)
        assert changed in (tmp_path / "train.py").read_text()


@pytest.mark.parametrize("is_repaired", [False, True])
@pytest.mark.parametrize(("model", "labels", "steps"), [(tiny.bert, 1, 2), (tiny.bert, 1, 1), (tiny.llama, IDS, 2)])
def test_a_scale_that_attach_would_repair_is_said(
    model: Any, labels: Any, steps: int, is_repaired: bool, tmp_path: Path
) -> None:
    said: list[str] = []
    args = tiny.arguments(tmp_path, max_steps=1, per_device_train_batch_size=1, gradient_accumulation_steps=steps)
    trainer = Trainer(model(), args, train_dataset=[{"input_ids": IDS, "labels": labels}] * 2)
    options = {**OPTIONS, "repair": "gradient-scale" if is_repaired else None}
    with assisted(trainer, "train.py", options, lambda text, begins="": said.append(text)):
        trainer.train()
    ignores = model is tiny.bert and steps == 2
    assert any("attach also repairs the gradient scale" in one for one in said) is (ignores and not is_repaired)


@pytest.mark.parametrize("words", [("release_clipping", "bf16_weights"), ("bf16_weights", "release_clipping")])
def test_two_words_make_one_optimizer(words: tuple[str, ...], tmp_path: Path) -> None:
    said: list[str] = []
    args = tiny.arguments(tmp_path, max_steps=1, optim="adamw_torch", max_grad_norm=1.0)
    trainer: Any = Trainer(tiny.llama(), args, train_dataset=[{"input_ids": IDS, "labels": IDS}] * 2)
    options = {**OPTIONS, "gpu": "160MiB", "allow": words}
    with assisted(trainer, "train.py", options, lambda text, begins="": said.append(text)):
        trainer.train()
    optimizer = trainer.optimizer.optimizer
    assert (type(optimizer).__name__, optimizer.rounding) == ("ReleasedSixteenBitAdamW", "stochastic")
    assert (trainer.args.max_grad_norm, trainer.model.dtype) == (0, torch.bfloat16)
    assert "model.to(torch.bfloat16), max_grad_norm=0, optimizer_cls_and_kwargs=low_memory_optimizer(" in said[-1]
