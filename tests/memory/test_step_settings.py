"""``StepSettings``: defaults of ``TrainingArguments``, what may be; why the gradient scaler is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import tiny
from hf_memopt import NotEstimableError, StepSettings
from hf_memopt.training.binding import checkpointing_of
from hf_memopt.training.binding import versions as compat

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


def test_what_may_be() -> None:
    released = {"gradient_release": True, "max_grad_norm": 0.0}
    for precision in ("auto", "bf16", "fp32", "tf32"):
        assert StepSettings(precision=precision, **released).gradient_release
    assert StepSettings(max_grad_norm=-1.0, gradient_release=True).max_grad_norm == -1.0  # as in the Trainer
    counts = ("micro_batch_size", "eval_batch_size", "eval_accumulation_steps", "torch_empty_cache_steps")
    assert StepSettings(**dict.fromkeys(counts)) == StepSettings()
    assert StepSettings(optim="lomo", precision="fp16", max_grad_norm=0).optim == "lomo"
    assert issubclass(NotEstimableError, ValueError)


def test_the_scaler_stops_at_the_stand_in_of_optimizers_by_layer() -> None:
    from transformers.trainer_pt_utils import LayerWiseDummyOptimizer

    scaler = torch.amp.GradScaler("cpu")
    model = torch.nn.Linear(2, 2)
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    with pytest.raises(AssertionError, match="No inf checks were recorded for this optimizer"):
        scaler.step(LayerWiseDummyOptimizer(optimizer_dict={}))


def test_the_scaler_stops_lomo_where_gradients_are_clipped_and_only_there() -> None:
    lomo_optim = pytest.importorskip("lomo_optim")
    model = torch.nn.Linear(2, 2)
    optimizer, scaler = lomo_optim.Lomo(model), torch.amp.GradScaler("cpu")
    for step in range(2):  # what accelerate does with it: backward and unscale to clip, never a step of the scaler
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        if step == 0:
            scaler.unscale_(optimizer)
            continue
        with pytest.raises(RuntimeError, match=r"unscale_\(\) has already been called on this optimizer"):
            scaler.unscale_(optimizer)
