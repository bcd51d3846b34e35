"""Gradual unfreezing: which parameters are trained at which step, and that resuming is exact at every stage."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import bitsandbytes
import pytest
import torch
from torch import nn
from transformers import Trainer, TrainerCallback

import tiny
from hf_memopt import Change, FreezeCallback, GradualUnfreezeCallback
from hf_memopt.binding import checkpointing_arguments

SCHEDULE = {0: "classifier", 1: ["layers:1", "bert.pooler"], 3: "base"}
HEAD = ("classifier.",)
UPPER = (*HEAD, "bert.encoder.layer.1.", "bert.pooler.")
ALL = ("",)
REST = ("bert.embeddings.", "bert.pooler.", "classifier.")


def trainable(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def under(model: nn.Module, prefixes: tuple[str, ...]) -> set[str]:
    return {name for name, _ in model.named_parameters() if name.startswith(prefixes)}


class Watch(TrainerCallback):
    """Note after each optimizer step what moved, what has a state, and what a gradient."""

    def __init__(self) -> None:
        self.steps: list[tuple[set[str], set[str], set[str]]] = []
        self._before: dict[str, torch.Tensor] = {}

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def on_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        named = dict(model.named_parameters())
        moved = {name for name, parameter in named.items() if not torch.equal(parameter, self._before[name])}
        with_state = {name for name, parameter in named.items() if optimizer.state.get(parameter)}
        with_gradient = {name for name, parameter in named.items() if parameter.grad is not None}
        self.steps.append((moved, with_state, with_gradient))


def make_trainer(model: Any, folder: Path, *callbacks: TrainerCallback, **settings: Any) -> Trainer:
    of_trainer = {key[8:]: settings.pop(key) for key in [*settings] if key.startswith("trainer_")}
    defaults = {"per_device_train_batch_size": 4, "max_steps": 4, "optim": "adamw_torch", "learning_rate": 1e-2}
    arguments = tiny.arguments(folder, **{**defaults, **settings})
    return Trainer(model, arguments, train_dataset=tiny.rows(16), callbacks=list(callbacks), **of_trainer)


@pytest.mark.filterwarnings("ignore:gradient_accumulation_steps=2 multiplies the gradients")
@pytest.mark.parametrize("kind", [torch.optim.AdamW, bitsandbytes.optim.AdamW8bit])
@pytest.mark.parametrize(
    ("schedule", "settings", "stages"),
    [
        (SCHEDULE, {}, [HEAD, UPPER, UPPER, ALL]),
        (SCHEDULE, {"trainer_model_init": lambda: tiny.bert()}, [HEAD, UPPER, UPPER, ALL]),
        (SCHEDULE, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}, [HEAD, UPPER, UPPER, ALL]),
        # fractions of the whole run, rounded up
        (
            {0: "classifier", 0.25: ["layers:1", "bert.pooler"], 0.5: "base"},
            {"max_steps": 7},
            [HEAD] * 2 + [UPPER] * 2 + [ALL] * 3,
        ),
        ({0.0: "classifier*", 0.5: "base"}, {}, [HEAD, HEAD, ALL, ALL]),
        # what is not named stays as it is
        ({2: "layers:0-1"}, {"max_steps": 3}, [REST, REST, ALL]),
    ],
)
def test_each_step_moves_its_stage_alone(
    schedule: Any, settings: dict[str, Any], stages: list[tuple[str, ...]], kind: Any, tmp_path: Path
) -> None:
    """A second train() begins anew."""
    watch, given = Watch(), {"trainer_optimizer_cls_and_kwargs": (kind, {"lr": 1e-2}), **settings}
    model = None if "trainer_model_init" in settings else tiny.bert()
    trainer = make_trainer(model, tmp_path, GradualUnfreezeCallback(schedule), watch, **given)
    trainer.train()
    expected = [under(trainer.model, stage) for stage in stages]
    held = [parameter for group in trainer.optimizer.param_groups for parameter in group["params"]]
    assert len(held) == len(under(trainer.model, ALL))
    for stage, (moved, with_state, with_gradient) in zip(expected, watch.steps, strict=True):
        assert with_state == with_gradient == stage
        assert moved <= stage
        assert len(stage - moved) <= sum("key.bias" in name for name in stage)  # a softmax ignores it
    trainer.train()
    assert [with_gradient for _, _, with_gradient in watch.steps] == expected * 2


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_bnb_8bit"])
@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_resumed_run_equals_a_straight_one(tmp_path: Path, optim: str, step: int) -> None:
    """Step 1 and 3 lie on the border of two stages, and the state of the later one is not in the checkpoint yet."""

    def run(folder: str, resume: str | None = None) -> nn.Module:
        # 100 x 64 embeddings: their state is in 8 bits, or in 32 by stock's registry
        settings = {"optim": optim, "save_strategy": "steps", "save_steps": 1}
        trainer = make_trainer(
            tiny.bert(hidden_size=64), tmp_path / folder, GradualUnfreezeCallback(SCHEDULE), **settings
        )
        trainer.train(resume_from_checkpoint=resume)
        return trainer.model

    straight = run("straight")
    resumed = run("resumed", str(tmp_path / "straight" / f"checkpoint-{step}"))
    assert tiny.largest_difference(straight, resumed) == 0.0
    assert trainable(resumed) == trainable(straight)


def test_freezing_something_else_goes_together(tmp_path: Path) -> None:
    model = tiny.bert()
    callbacks = [FreezeCallback("embeddings"), GradualUnfreezeCallback({0: "classifier", 2: "layers:0-1"})]
    make_trainer(model, tmp_path, *callbacks).train()
    assert trainable(model) == under(model, ("classifier.", "bert.encoder.", "bert.pooler."))


def test_changes_and_log_lines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, callback = tiny.bert(), GradualUnfreezeCallback(SCHEDULE)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    head, upper, total = (sum(sizes[name] for name in under(model, stage)) for stage in (HEAD, UPPER, ALL))
    with caplog.at_level(logging.INFO, logger="hf_memopt"):
        make_trainer(model, tmp_path, callback).train()
    assert callback.changes == [
        Change("trainable_parameters", total, head, "from step 0: classifier"),
        Change("trainable_parameters", head, upper, "from step 1: classifier, layers:1, bert.pooler"),
        Change("trainable_parameters", upper, total, "from step 3: classifier, layers:1, bert.pooler, base"),
    ]
    assert [message for message in caplog.messages if message.startswith("GradualUnfreeze")] == [
        f"GradualUnfreezeCallback trains {change.new:,} of {total:,} parameters {change.reason}"
        for change in callback.changes
    ]


def test_checkpointing_keeps_what_a_frozen_prefix_saves(tmp_path: Path) -> None:
    callback = GradualUnfreezeCallback(SCHEDULE)
    model, plain = tiny.bert(), tiny.bert()
    make_trainer(model, tmp_path, callback, **checkpointing_arguments()).train()
    make_trainer(plain, tmp_path, GradualUnfreezeCallback(SCHEDULE)).train()
    assert tiny.largest_difference(model, plain) == 0.0
    assert len(model.get_input_embeddings()._forward_hooks) == 0
    assert callback.changes[0].name == "input_require_grads"
    assert callback.handle is not None
    callback.handle.remove()
    assert len(model.get_input_embeddings()._forward_hooks) == 1


def test_the_handle_undoes_all_stages(tmp_path: Path) -> None:
    model = tiny.bert()
    model.bert.pooler.requires_grad_(False)
    before = trainable(model)
    callback = GradualUnfreezeCallback({0: "classifier", 2: "layers:1", 50: ["layers:0", "embeddings"]})
    trainer = make_trainer(model, tmp_path, callback)
    for _ in range(2):
        trainer.train()
        assert trainable(model) == under(model, ("classifier.", "bert.encoder.layer.1."))
        assert callback.handle is not None
        callback.handle.remove()
        assert trainable(model) == before


def test_several_processes_are_refused_without_attach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(tiny.bert(), tmp_path, GradualUnfreezeCallback(SCHEDULE))
    monkeypatch.setattr(type(trainer.args), "world_size", 2)
    with pytest.raises(ValueError, match=r"^gradual unfreezing and DDP, default flags are incompatible: "):
        trainer.callback_handler.on_train_begin(trainer.args, trainer.state, trainer.control)
