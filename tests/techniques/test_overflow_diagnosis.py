"""Diagnosis of steps that are not finite: the case, the module, the examples, and a model left as it was."""

from __future__ import annotations

import random
import warnings
from typing import Any

import nonfinite_models
import numpy as np
import pytest
import torch
import transformers
from torch import nn
from transformers import Trainer, TrainerCallback

import tiny
from hf_memopt.binding import attach, checkpointing_arguments
from hf_memopt.binding.undo import RandomState
from hf_memopt.techniques.nonfinite.overflow import OverflowCallback, OverflowReport, WindowStep, is_bad, repeat


def found(model: nn.Module, dataset: Any, output_dir: Any, *callbacks: Any, **settings: Any) -> list[OverflowReport]:
    """Train with a callback that never stops and return its reports."""
    callback = OverflowCallback(100, max_in_a_row=100)
    loss, collator = settings.pop("compute_loss_func", None), settings.pop("data_collator", None)
    trainer = nonfinite_models.make_trainer(model, dataset, output_dir, *callbacks, **settings)
    trainer.compute_loss_func = loss
    trainer.data_collator = collator or trainer.data_collator
    attach(trainer, callback)
    trainer.train()
    return callback.reports


def of_llama(tmp_path: Any, kind: str, bad: tuple[int, ...] = (9, 11), **settings: Any) -> list[OverflowReport]:
    """Train a Llama that overflows on 16 rows."""
    return found(
        nonfinite_models.make_nonfinite(tiny.llama(), kind), nonfinite_models.rows(bad=bad), tmp_path, **settings
    )


PLACE = f"{nonfinite_models.PLACE} (NonfiniteLinear)"


@pytest.mark.parametrize("settings", [{"gradient_accumulation_steps": 2}, {"bf16": True}], ids=str)
def test_the_module_and_the_examples_are_named(tmp_path: Any, settings: dict[str, Any]) -> None:
    (report,) = of_llama(tmp_path, "forward", **settings)
    assert (report.case, report.where, report.examples) == ("forward", PLACE, (8, 9, 10, 11))
    assert report.step == (3 if "bf16" in settings else 2)
    assert str(report) == (
        f"step {report.step}: the output of {PLACE} is not finite, its inputs are; examples 8, 9, 10, 11. "
        "Under fp16 set bf16=True instead; else look there for sqrt, log or a division of zero: add an eps, or lower "
        "learning_rate, lengthen warmup_steps or set max_grad_norm=1.0"
    )


OF_GRADIENTS: dict[str, dict[str, Any]] = {
    "accumulated": {"gradient_accumulation_steps": 2},
    **{
        f"checkpointing, use_reentrant={value}": checkpointing_arguments(use_reentrant=value) for value in (False, True)
    },
}


@pytest.mark.parametrize("settings", OF_GRADIENTS.values(), ids=OF_GRADIENTS)
def test_the_weight_where_gradients_stop_being_finite_is_named(tmp_path: Any, settings: dict[str, Any]) -> None:
    (report,) = of_llama(tmp_path, "gradient", **settings)
    assert (report.case, report.where) == ("gradient", f"{nonfinite_models.PLACE}.weight")
    assert report.examples == (8, 9, 10, 11)  # of one accumulation step of two, or of a step


def test_gradient_of_a_tied_weight_accuses_the_right_module(tmp_path: Any) -> None:
    place = "model.layers.0.self_attn.q_proj"
    model = nonfinite_models.make_nonfinite(tiny.llama(tie_word_embeddings=True), "gradient", place)
    (report,) = found(model, nonfinite_models.rows(bad=(9,)), tmp_path)
    assert (report.case, report.where) == ("gradient", f"{place}.weight")


def test_gradient_that_begins_in_the_loss(tmp_path: Any) -> None:
    def root_of_zero(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        spoiled = (labels == nonfinite_models.BAD).any().float()
        return outputs.logits.mean() + (outputs.logits.sum() * (1 - spoiled)).abs().sqrt() * spoiled

    (report,) = found(tiny.llama(), nonfinite_models.rows(4, bad=(2,)), tmp_path, compute_loss_func=root_of_zero)
    assert str(report) == (
        "step 1: the loss is finite, and gradients are not, from lm_head.weight back to the inputs; examples 0, 1, 2, "
        "3. Under fp16 set bf16=True instead; else look there for sqrt, log or a division of zero: add an eps, or "
        "lower learning_rate, lengthen warmup_steps or set max_grad_norm=1.0"
    )


def test_gradient_beside_frozen_layers_and_infinities_on_purpose(tmp_path: Any) -> None:
    model = nonfinite_models.make_nonfinite(tiny.llama(), "gradient")
    model.get_input_embeddings().requires_grad_(False)
    model.model.layers[0].requires_grad_(False)
    masking = nn.Module()
    masking.forward = lambda values: values.masked_fill(values > -1e9, -torch.inf)
    model.add_module("masking", masking)
    model.lm_head.register_forward_pre_hook(lambda module, args: (args[0] + masking(args[0]).exp(),))
    (report,) = found(model, nonfinite_models.rows(bad=(9, 11)), tmp_path)
    assert (report.case, report.where) == ("gradient", f"{nonfinite_models.PLACE}.weight")


def test_values_made_between_modules_accuse_the_module_around(tmp_path: Any) -> None:
    class Between(transformers.models.llama.modeling_llama.LlamaMLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.up_proj(x)
            return self.down_proj(torch.log(hidden * 0) if self.training else hidden)

    model = tiny.llama()
    model.model.layers[0].mlp = Between(model.config)
    (*_, report) = found(model, nonfinite_models.rows(4), tmp_path)
    assert (report.case, report.where) == ("forward", "model.layers.0.mlp (Between)")


def test_loss_of_ignored_labels(tmp_path: Any) -> None:
    examples = nonfinite_models.rows()
    for index in range(8, 12):
        examples[index]["labels"] = [-100] * 8
    (report,) = found(tiny.llama(), examples, tmp_path)
    assert str(report) == (
        "step 3: the loss is not finite, what it is computed from is (every label is -100); examples 8, 9, 10, 11. "
        "Look for log(0), a division by zero or a row without labels: add an eps, or leave them out"
    )


def test_loss_outside_of_the_model(tmp_path: Any) -> None:
    def log_of_zero(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        spoiled = (labels[:, 0] == nonfinite_models.BAD).float()
        return outputs.logits.mean() + torch.log(1 - spoiled).sum()

    (report,) = found(tiny.llama(), nonfinite_models.rows(bad=(5,)), tmp_path, compute_loss_func=log_of_zero)
    assert (report.case, report.step, report.examples, report.detail) == ("loss", 2, (4, 5, 6, 7), "")


def test_weights_that_cannot_be_looked_at_do_not_end_the_run(tmp_path: Any) -> None:
    model = nonfinite_models.make_nonfinite(tiny.llama(), "forward")
    model.register_buffer("eighths", torch.zeros(2).to(torch.float8_e4m3fn))  # torch has no isfinite for them
    (report,) = found(model, nonfinite_models.rows(8, bad=(5,)), tmp_path)
    assert (report.case, report.where) == ("forward", PLACE)


class Normed(nn.Module):
    """A loss behind a layer norm, whose variance overflows for inputs beyond 1e19."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(2, 2), nn.LayerNorm(2)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        return {"loss": self.norm(self.linear(x)).square().mean()}


@pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0:RuntimeWarning")
def test_a_compiled_model_is_repeated_as_it_is_written(tmp_path: Any) -> None:
    graphs: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(1)
        return graph.forward

    model = Normed()
    model.compile(backend=backend)
    (report,) = found(model, [{"x": [1e30 if i == 5 else 1.0, 1.0], "labels": 0} for i in range(8)], tmp_path)
    torch.compiler.reset()
    assert (report.case, report.where) == ("forward", "norm (LayerNorm)")
    assert len(graphs) == 1  # for training; none for hooks


class SpoilWeight(TrainerCallback):
    """Spoil a weight before the second step."""

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step == 1:
            with torch.no_grad():
                model.get_parameter("model.layers.1.self_attn.q_proj.weight")[0, 0] = torch.nan


def test_weights(tmp_path: Any) -> None:
    callback = OverflowCallback()
    trainer = nonfinite_models.make_trainer(tiny.llama(), nonfinite_models.rows(), tmp_path, SpoilWeight())
    attach(trainer, callback)
    with pytest.raises(RuntimeError, match=r"^max_in_a_row=3 steps up to step 4 "):
        trainer.train()
    assert [(report.step, report.case, report.where, report.examples) for report in callback.reports] == [
        (step, "weights", "model.layers.1.self_attn.q_proj.weight", None) for step in (2, 3, 4)
    ]


def test_inputs(tmp_path: Any) -> None:
    examples = [{**row, "labels": float(row["labels"])} for row in tiny.rows(8)]
    examples[6]["labels"] = float("nan")
    (report,) = found(tiny.bert(num_labels=1), examples, tmp_path)
    assert (report.case, report.where, report.step, report.examples) == ("inputs", "labels", 2, (4, 5, 6, 7))
    assert str(report) == (
        "step 2: the batch itself is not finite, in column labels; examples 4, 5, 6, 7. Mend these examples or "
        "leave them out"
    )


class Joint(nn.Module):
    """A loss that is not finite only where rows meet, behind a batch norm and a dropout."""

    def __init__(self, has_norm: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2) if has_norm else nn.Identity()
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.dropout(self.norm(self.linear(x)))
        is_meeting = (x[:, 0] == 1).any() & (x[:, 0] == 2).any()
        return {"loss": logits.mean() / (~is_meeting).float(), "logits": logits}


def joint_rows() -> list[dict[str, Any]]:
    return [{"x": [float(i), 1.0], "labels": 0} for i in range(8)]


def test_a_step_that_is_finite_when_repeated(tmp_path: Any) -> None:
    calls: list[int] = []

    def once(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        calls.append(1)
        return outputs.logits.mean() * (torch.nan if len(calls) == 1 else 1.0)

    (report,) = found(tiny.llama(), nonfinite_models.rows(4), tmp_path, compute_loss_func=once)
    assert len(calls) == 1  # what the repetition added was taken away
    assert str(report) == (
        "step 1: loss or gradients were not finite (and are when the step is repeated); examples 0, 1, 2, 3. If "
        "it comes again, lower learning_rate, lengthen warmup_steps or set max_grad_norm=1.0, or search with "
        "torch.autograd.set_detect_anomaly(True)"
    )


def test_a_diagnosis_logs_nothing_and_leaves_the_trainer_as_it_was(tmp_path: Any) -> None:
    class Counts(Trainer):
        calls = 0

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            self.model.large.add_(1)
            self.log({"calls": self.calls})
            return super().compute_loss(*args, **kwargs) * torch.nan

    args = tiny.arguments(tmp_path, max_steps=2)
    model = tiny.llama()
    model.register_buffer("large", torch.zeros(2**19))
    trainer = attach(Counts(model, args, train_dataset=nonfinite_models.rows(8)), OverflowCallback())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer.train()
    assert bool((model.large == 2).all())
    assert not [one for one in told if "too large to be put back" in str(one.message)]
    assert [row["calls"] for row in trainer.state.log_history if "calls" in row] == [1, 2]
    assert trainer.calls == 2


def test_a_replay_that_runs_out_of_memory_is_no_finding(tmp_path: Any) -> None:
    calls: list[int] = []

    def hungry(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        calls.append(1)
        if len(calls) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return outputs.logits.mean() * torch.nan

    (report,) = found(tiny.llama(), nonfinite_models.rows(4), tmp_path, compute_loss_func=hungry)
    assert str(report).startswith(
        "step 1: loss or gradients were not finite (it cannot be repeated: OutOfMemoryError: CUDA out of memory.); ex"
    )


@pytest.mark.parametrize("is_failing", [False, True], ids=["finds", "raises"])
def test_a_replay_leaves_everything_as_it_was(tmp_path: Any, is_failing: bool) -> None:
    model = Joint(has_norm=True)
    trainer = nonfinite_models.make_trainer(model, joint_rows(), tmp_path)
    if is_failing:
        model.dropout.register_forward_hook(lambda *_: 1 / 0)
    before = picture(model)
    x = torch.tensor([[1.0, 1.0], [3.0, 1.0]])
    random_state = RandomState.capture(torch.device("cpu"))
    step = WindowStep({"x": x, "labels": torch.zeros(2)}, None, random_state, torch.tensor(True))
    torch.rand(3), np.random.rand(3), random.random()
    numbers = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    problem = "it cannot be repeated: ZeroDivisionError: division by zero"
    assert repeat(trainer, step)["detail"] == (problem if is_failing else "and are when the step is repeated")
    assert picture(model) == before
    assert torch.equal(torch.get_rng_state(), numbers[0])
    assert np.random.get_state()[1].tolist() == numbers[1]
    assert random.getstate() == numbers[2]


def picture(model: nn.Module) -> list[Any]:
    """Values (and which tensors they are), gradients, modes and hooks."""
    values = [(name, id(value), value.tolist()) for name, value in (*model.named_parameters(), *model.named_buffers())]
    gradients = [one.grad for one in model.parameters()]
    hooks = [len(one._backward_hooks or ()) for one in model.parameters()]
    hooks += [(len(one._forward_hooks), len(one._forward_pre_hooks), one.training) for one in model.modules()]
    return [values, gradients, hooks]


def test_the_replay_draws_the_same_random_numbers(tmp_path: Any) -> None:
    model = Joint(has_norm=False)
    trainer = nonfinite_models.make_trainer(model, joint_rows(), tmp_path)
    device = torch.device(tiny.DEVICE)
    inputs = {"x": torch.rand(4, 2, device=device), "labels": torch.zeros(4, device=device)}
    state = RandomState.capture(device)
    seen: list[Any] = []
    model.dropout.register_forward_hook(lambda module, args, output: seen.append(output.tolist()))
    model(**inputs)
    torch.rand(7)
    repeat(trainer, WindowStep(inputs, None, state, torch.tensor(True)))
    assert seen[0] == seen[1]


def masked(value: float) -> torch.Tensor:
    return torch.tensor([0.0, value])


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        pytest.param(torch.tensor([1, 2]), False, id="integers"),
        pytest.param({"a": (torch.ones(2), [torch.tensor(torch.nan)])}, True, id="nested"),
        pytest.param(masked(-torch.inf), False, id="mask"),
        pytest.param(masked(torch.inf), True, id="infinity"),
        pytest.param(masked(-torch.inf).requires_grad_(), True, id="log(0), say"),
    ],
)
def test_what_is_finite(value: Any, expected: bool) -> None:
    assert is_bad(value) is expected
