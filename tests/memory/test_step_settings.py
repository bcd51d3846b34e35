"""``StepSettings``: its defaults are those of ``TrainingArguments``."""

from __future__ import annotations

import dataclasses
from typing import Any

import tiny
from hf_memopt.training.binding import checkpointing_of
from hf_memopt.training.binding import versions as compat
from hf_memopt.types import StepSettings

NAMES = [item.name for item in dataclasses.fields(StepSettings)]


def test_defaults_are_those_of_training_arguments(tmp_path: Any) -> None:
    defaults = tiny.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    chosen = StepSettings()
    shared = compat.training_argument_names() & set(NAMES)
    assert shared >= {"optim", "optim_args", "weight_decay", "max_grad_norm", "gradient_accumulation_steps"}
    assert shared >= {"label_smoothing_factor", "eval_accumulation_steps", "prediction_loss_only"}
    for name in shared - {"optim"}:
        assert getattr(chosen, name) == getattr(defaults, name), name
    assert chosen.optim == defaults.optim.value
    assert chosen.checkpointing == checkpointing_of(defaults)[0]
