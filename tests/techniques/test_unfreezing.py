"""Gradual unfreezing: which parameters are trained at which step, and that resuming is exact at every stage."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import weakref
from pathlib import Path
from typing import Any

import bitsandbytes
import pytest
import torch
from torch import nn
from transformers import Trainer, TrainerCallback

import tiny
from hf_memopt.binding import checkpointing_arguments
from hf_memopt.changes import Change
from hf_memopt.techniques.freezing import FreezeCallback
from hf_memopt.techniques.freezing.freezing import trainable_parameters
from hf_memopt.techniques.freezing.unfreezing import GradualUnfreezeCallback, unfreeze_by_schedule

SCHEDULE = {0: "classifier", 1: ["layers:1", "bert.pooler"], 3: "base"}
EXAMPLE = "schedule={0: 'classifier', 100: 'layers:10-11', 200: ['layers:0-9', 'embeddings']}"
HEAD, UPPER = ["classifier."], ["classifier.", "bert.encoder.layer.1.", "bert.pooler."]


def trainable(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def under(model: nn.Module, prefixes: list[str]) -> set[str]:
    return {name for name, _ in model.named_parameters() if name.startswith(tuple(prefixes))}


class Watch(TrainerCallback):
    """Note after each optimizer step what moved, what is trainable, and what has a state and a gradient."""

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
    given = {"model_init": model} if not isinstance(model, nn.Module) else {"model": model}
    of_trainer = {key: settings.pop(key) for key in ("optimizer_cls_and_kwargs", "optimizers") if key in settings}
    defaults = {"per_device_train_batch_size": 4, "max_steps": 4, "optim": "adamw_torch", "learning_rate": 1e-2}
    arguments = tiny.arguments(folder, **{**defaults, **settings})
    return Trainer(**given, args=arguments, train_dataset=tiny.rows(16), callbacks=list(callbacks), **of_trainer)


# ---- The function ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "prefixes"), [(0, HEAD), (1, UPPER), (2, UPPER), (3, ["bert.", "classifier."]), (99, ["bert.", "cl"])]
)
def test_a_stage_is_a_function_of_the_step(step: int, prefixes: list[str]) -> None:
    for before in (None, 0, 2, 3):
        model = tiny.bert()
        if before is not None:
            unfreeze_by_schedule(model, SCHEDULE, before)
        unfreeze_by_schedule(model, SCHEDULE, step)
        assert trainable(model) == under(model, prefixes)


def test_what_is_not_named_stays_as_it_is() -> None:
    model = tiny.bert()
    model.bert.pooler.requires_grad_(False)
    unfreeze_by_schedule(model, {5: "layers:0-1"}, 0)
    assert trainable(model) == under(model, ["bert.embeddings.", "classifier."])


def test_fractions_are_of_the_whole_run() -> None:
    model = tiny.bert()
    for step, stages in ((0, HEAD), (2, HEAD), (3, UPPER), (5, UPPER)):
        unfreeze_by_schedule(
            model, {0: "classifier", 0.25: ["layers:1", "bert.pooler"], 0.5: "base"}, step, total_steps=11
        )
        assert trainable(model) == under(model, stages)


def test_gradients_of_what_is_frozen_are_dropped_and_the_handle_undoes_the_flags() -> None:
    model = tiny.bert()
    model.bert.embeddings.requires_grad_(False)
    before = trainable(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    handle = unfreeze_by_schedule(model, {0: ["classifier", "embeddings"], 1: "base"}, 0)
    assert trainable(model) == under(model, ["classifier.", "bert.embeddings."])
    assert {name for name, parameter in model.named_parameters() if parameter.grad is not None} == trainable(model)
    handle.remove()
    assert trainable(model) == before


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ({}, f"schedule={{}} names no stage; expected patterns by step. Write {EXAMPLE}"),
        ("base", f"schedule='base' names no stage; expected patterns by step. Write {EXAMPLE}"),
        *(
            (
                {step: "base"},
                f"schedule={{{step!r}: 'base'}} has the key {step!r}, which is not a step; expected an integer of 0 or "
                f"more, or a fraction of the run below 1.0. Write {EXAMPLE}",
            )
            for step in (-1, 1.0, float("nan"), True, "0")
        ),
        (
            {0: []},
            "patterns=[] is empty; expected one pattern or several. Write, for example, "
            "patterns=['embeddings', 'layers:0-3'].",
        ),
    ],
    ids=["empty", "text", "negative", "one", "nan", "bool", "key-text", "no-patterns"],
)
def test_malformed_schedules(schedule: Any, message: str) -> None:
    with pytest.raises(ValueError) as error:
        GradualUnfreezeCallback(schedule)
    assert str(error.value) == message


def test_a_fraction_of_an_unknown_run() -> None:
    with pytest.raises(ValueError) as error:
        unfreeze_by_schedule(tiny.bert(), {0.5: "base"}, 0)
    assert str(error.value) == (
        "total_steps=None leaves the fraction 0.5 of the schedule open; expected the steps of the run. "
        "Pass total_steps=1000, or give whole steps"
    )


def test_nothing_to_train_is_refused() -> None:
    model = tiny.bert()
    with pytest.raises(ValueError) as error:
        unfreeze_by_schedule(model, {2: ["base", "classifier"]}, 1)
    assert str(error.value) == (
        "schedule={2: ['base', 'classifier']} leaves BertForSequenceClassification nothing to train at step 1; "
        f"expected at least one trainable parameter. Name the head for step 0, for example: {EXAMPLE}"
    )
    assert trainable_parameters(model) == sum(parameter.numel() for parameter in model.parameters())


# ---- The callback ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, bitsandbytes.optim.AdamW8bit])
@pytest.mark.parametrize("rebuilt", [False, True], ids=["model", "model_init"])
def test_each_step_moves_its_stage_alone(tmp_path: Path, optimizer_class: Any, rebuilt: bool) -> None:
    watch = Watch()
    trainer = make_trainer(
        (lambda: tiny.bert()) if rebuilt else tiny.bert(),
        tmp_path,
        GradualUnfreezeCallback(SCHEDULE),
        watch,
        optimizer_cls_and_kwargs=(optimizer_class, {"lr": 1e-2}),
    )
    trainer.train()
    everything = {name for name, _ in trainer.model.named_parameters()}
    stages = [under(trainer.model, HEAD), *2 * [under(trainer.model, UPPER)], everything]
    held = [parameter for group in trainer.optimizer.param_groups for parameter in group["params"]]
    assert len(held) == len(everything)
    for stage, (moved, with_state, with_gradient) in zip(stages, watch.steps, strict=True):
        assert with_state == with_gradient == stage
        assert moved <= stage
        assert len(stage - moved) <= sum("key.bias" in name for name in stage)  # a softmax ignores it


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_bnb_8bit"])
@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_resumed_run_equals_a_straight_one(tmp_path: Path, optim: str, step: int) -> None:
    """Step 1 and 3 lie on the border of two stages, and the state of the later one is not in the checkpoint yet."""

    def run(folder: str, resume: str | None = None) -> nn.Module:
        # 100 x 64 embeddings: their state is in 8 bits, or in 32 by stock's registry
        model = tiny.bert(hidden_size=64)
        settings = {"optim": optim, "save_strategy": "steps", "save_steps": 1}
        trainer = make_trainer(model, tmp_path / folder, GradualUnfreezeCallback(SCHEDULE), **settings)
        trainer.train(resume_from_checkpoint=resume)
        return trainer.model

    straight = run("straight")
    resumed = run("resumed", str(tmp_path / "straight" / f"checkpoint-{step}"))
    assert tiny.largest_difference(straight, resumed) == 0.0
    assert trainable(resumed) == trainable(straight)


def test_a_second_train_begins_anew(tmp_path: Path) -> None:
    watch = Watch()
    trainer = make_trainer(tiny.bert(), tmp_path, GradualUnfreezeCallback({0: HEAD[0] + "*", 0.5: "base"}), watch)
    trainer.train()
    trainer.train()
    sizes = [len(with_gradient) for _, _, with_gradient in watch.steps]
    assert sizes == [2, 2, 41, 41] * 2


def test_accumulated_micro_batches_belong_to_one_stage(tmp_path: Path) -> None:
    watch = Watch()
    settings = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    make_trainer(tiny.bert(), tmp_path, GradualUnfreezeCallback(SCHEDULE), watch, **settings).train()
    assert [len(with_gradient) for _, _, with_gradient in watch.steps] == [2, 20, 20, 41]


def test_checkpointing_keeps_what_a_frozen_prefix_saves(tmp_path: Path) -> None:
    callback = GradualUnfreezeCallback(SCHEDULE)
    model = tiny.bert()
    make_trainer(model, tmp_path, callback, **checkpointing_arguments()).train()
    assert len(model.get_input_embeddings()._forward_hooks) == 0
    assert callback.changes[0].name == "input_require_grads"
    plain = tiny.bert()
    make_trainer(plain, tmp_path, GradualUnfreezeCallback(SCHEDULE)).train()
    assert tiny.largest_difference(model, plain) == 0.0
    assert callback.handle is not None
    callback.handle.remove()
    assert len(model.get_input_embeddings()._forward_hooks) == 1


def test_changes_and_log_lines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny.bert()
    total = trainable_parameters(model)
    head = trainable_parameters(model.classifier)
    upper = head + trainable_parameters(model.bert.encoder.layer[1]) + trainable_parameters(model.bert.pooler)
    callback = GradualUnfreezeCallback(SCHEDULE)
    with caplog.at_level(logging.INFO, logger="hf_memopt"):
        make_trainer(model, tmp_path, callback).train()
    assert callback.changes == [
        Change("trainable_parameters", total, head, "from step 0: classifier"),
        Change("trainable_parameters", head, upper, "from step 1: classifier, layers:1, bert.pooler"),
        Change("trainable_parameters", upper, total, "from step 3: classifier, layers:1, bert.pooler, base"),
    ]
    assert [record.getMessage() for record in caplog.records if record.name.endswith("unfreezing")] == [
        f"GradualUnfreezeCallback trains {change.new:,} of {total:,} parameters {change.reason}"
        for change in callback.changes
    ]


def test_the_handle_undoes_all_stages(tmp_path: Path) -> None:
    model = tiny.bert()
    model.bert.pooler.requires_grad_(False)
    before = trainable(model)
    callback = GradualUnfreezeCallback({0: "classifier", 2: "layers:1", 50: ["layers:0", "embeddings"]})
    trainer = make_trainer(model, tmp_path, callback)
    for _ in range(2):
        trainer.train()
        assert trainable(model) == under(model, ["classifier.", "bert.encoder.layer.1."])
        assert callback.handle is not None
        callback.handle.remove()
        assert trainable(model) == before


@pytest.mark.parametrize("frozen_by", ["hand", "callback"])
def test_what_the_optimizer_does_not_hold_is_refused(tmp_path: Path, frozen_by: str) -> None:
    model = tiny.bert()
    callbacks: list[TrainerCallback] = [GradualUnfreezeCallback({0: "classifier", 2: "bert.pooler"})]
    if frozen_by == "hand":
        model.bert.pooler.requires_grad_(False)
    else:
        callbacks.append(FreezeCallback("bert.pooler"))
    with pytest.raises(ValueError) as error:
        make_trainer(model, tmp_path, *callbacks).train()
    assert str(error.value) == (
        "schedule={0: ('classifier',), 2: ('bert.pooler',)} names 2 parameters that the optimizer does not hold, "
        "beginning with bert.pooler.dense.weight; expected parameters that were trainable when it was built. Freeze "
        "them by the schedule alone, without FreezeCallback, and begin with: model.requires_grad_(True)"
    )


def test_freezing_something_else_goes_together(tmp_path: Path) -> None:
    model = tiny.bert()
    callbacks = [FreezeCallback("embeddings"), GradualUnfreezeCallback({0: "classifier", 2: "layers:0-1"})]
    make_trainer(model, tmp_path, *callbacks).train()
    assert trainable(model) == under(model, ["classifier.", "bert.encoder.", "bert.pooler."])


def test_a_pattern_that_matches_nothing_stops_the_construction(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="patterns='layers:0-11' exceeds the layers of BertForSequenceClassification"):
        make_trainer(tiny.bert(), tmp_path, GradualUnfreezeCallback({0.5: "layers:0-11"}))


def test_several_processes_are_refused_without_attach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(tiny.bert(), tmp_path, GradualUnfreezeCallback(SCHEDULE))
    monkeypatch.setattr(type(trainer.args), "world_size", 2)
    with pytest.raises(ValueError) as error:
        trainer.callback_handler.on_train_begin(trainer.args, trainer.state, trainer.control)
    assert str(error.value) == (
        "gradual unfreezing and DDP, default flags are incompatible: which parameters have gradients is settled "
        "when the model is wrapped; expected only one of them. Take GradualUnfreezeCallback out of callbacks=, or "
        "train in one process"
    )


def test_one_callback_serves_two_trainers(tmp_path: Path) -> None:
    alone = make_trainer(tiny.bert(), tmp_path, GradualUnfreezeCallback(SCHEDULE))
    alone.train()
    callback = GradualUnfreezeCallback(SCHEDULE)
    trainers = [make_trainer(tiny.bert(), tmp_path, callback) for _ in range(2)]
    for trainer in trainers:
        trainer.train()
        assert tiny.largest_difference(trainer.model, alone.model) == 0.0


def test_a_run_within_a_run_shares_the_callback(tmp_path: Path) -> None:
    callback = GradualUnfreezeCallback(SCHEDULE)
    inner, watch = make_trainer(tiny.bert(), tmp_path, callback), Watch()

    class Nested(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3:
                inner.train()

    make_trainer(tiny.bert(), tmp_path, callback, watch, Nested()).train()
    assert [len(with_gradient) for _, _, with_gradient in watch.steps] == [2, 20, 20, 41]


def test_a_callback_is_copied_and_pickled_unused(tmp_path: Path) -> None:
    callback = GradualUnfreezeCallback(SCHEDULE)
    make_trainer(tiny.bert(), tmp_path, callback, max_steps=1).train()
    for copied in (pickle.loads(pickle.dumps(callback)), copy.deepcopy(callback)):
        assert (copied.schedule, copied.changes, copied.handle) == (callback.schedule, [], None)


def test_a_callback_keeps_no_model_alive(tmp_path: Path) -> None:
    callback = GradualUnfreezeCallback(SCHEDULE)
    trainer = make_trainer(tiny.bert(), tmp_path, callback, max_steps=1)
    trainer.train()
    reference = weakref.ref(trainer.model)
    del trainer
    gc.collect()
    assert reference() is None
