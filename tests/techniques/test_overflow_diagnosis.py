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
from hf_memopt.training.binding import attach, checkpointing_arguments
from hf_memopt.training.binding.undo import RandomState
from hf_memopt.training.techniques.nonfinite.overflow import (
    OverflowCallback,
    OverflowReport,
    WindowStep,
    repeat,
)


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


def spoiled(kind: str, place: str = nonfinite_models.PLACE, **config: Any) -> nn.Module:
    """Return a Llama that overflows."""
    return nonfinite_models.make_nonfinite(tiny.llama(**config), kind, place)


def frozen_with_infinities_on_purpose() -> nn.Module:
    model = spoiled("gradient")
    model.get_input_embeddings().requires_grad_(False)
    model.model.layers[0].requires_grad_(False)
    masking = nn.Module()
    masking.forward = lambda values: values.masked_fill(values > -1e9, -torch.inf)
    model.add_module("masking", masking)
    model.lm_head.register_forward_pre_hook(lambda module, args: (args[0] + masking(args[0]).exp(),))
    return model


class Between(transformers.models.llama.modeling_llama.LlamaMLP):
    """Makes bad values between two of its modules."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up_proj(x)
        return self.down_proj(torch.log(hidden * 0) if self.training else hidden)


def between() -> nn.Module:
    model = tiny.llama()
    model.model.layers[0].mlp = Between(model.config)
    return model


def with_eight_bits() -> nn.Module:
    model = spoiled("forward")
    model.register_buffer("eighths", torch.zeros(2).to(torch.float8_e4m3fn))  # torch has no isfinite for them
    return model


def root_of_zero(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    is_spoiled = (labels == nonfinite_models.BAD).any().float()
    return outputs.logits.mean() + (outputs.logits.sum() * (1 - is_spoiled)).abs().sqrt() * is_spoiled


def log_of_zero(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    is_spoiled = (labels[:, 0] == nonfinite_models.BAD).float()
    return outputs.logits.mean() + torch.log(1 - is_spoiled).sum()


class Once:
    """A loss that is bad when it is first computed, and fails or is fine later."""

    def __init__(self, fails: bool) -> None:
        self.calls, self.fails = 0, fails

    def __call__(self, outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        self.calls += 1
        if self.fails and self.calls > 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return outputs.logits.mean() * (torch.nan if self.calls == 1 else 1.0)


def without_labels() -> list[dict[str, Any]]:
    rows = nonfinite_models.rows()
    return [{**row, "labels": [-100] * 8} if 8 <= index < 12 else row for index, row in enumerate(rows)]


def with_nan() -> list[dict[str, Any]]:
    rows = [{**row, "labels": float(row["labels"])} for row in tiny.rows(8)]
    rows[6]["labels"] = float("nan")
    return rows


BAD = nonfinite_models.rows(bad=(9, 11))
ONE_BAD = nonfinite_models.rows(8, bad=(5,))
FOUR = nonfinite_models.rows(4, bad=(2,))
CALMER = "lower learning_rate, lengthen warmup_steps or set max_grad_norm=1.0"
ZERO = f"Under fp16 set bf16=True instead; else look there for sqrt, log or a division of zero: add an eps, or {CALMER}"
AGAIN = f"If it comes again, {CALMER}, or search with torch.autograd.set_detect_anomaly(True)"
EPS = "Look for log(0), a division by zero or a row without labels: add an eps, or leave them out"
PLACE = nonfinite_models.PLACE
OUTPUT = f"the output of {PLACE} (NonfiniteLinear) is not finite, its inputs are"
GRADIENT = "the loss is finite, and gradients are not, from {} back to the inputs"
LOSS = "the loss is not finite, what it is computed from is"
UNKNOWN = "loss or gradients were not finite"
THIRD, FIRST, SECOND = "examples 8, 9, 10, 11", "examples 0, 1, 2, 3", "examples 4, 5, 6, 7"
Q_PROJ = "model.layers.0.self_attn.q_proj"
FOUND: dict[str, tuple[Any, list[Any], dict[str, Any], str]] = {
    "forward, accumulated": (
        *(lambda: spoiled("forward"), BAD, {"gradient_accumulation_steps": 2}),
        f"step 2: {OUTPUT}; {THIRD}. {ZERO}",
    ),
    "forward in bf16": (lambda: spoiled("forward"), BAD, {"bf16": True}, f"step 3: {OUTPUT}; {THIRD}. {ZERO}"),
    "beside 8 bits": (with_eight_bits, ONE_BAD, {}, f"step 2: {OUTPUT}; {SECOND}. {ZERO}"),
    "between modules": (
        *(between, FOUR, {}),
        f"step 1: the output of model.layers.0.mlp (Between) is not finite, its inputs are; {FIRST}. {ZERO}",
    ),
    "gradient, accumulated": (
        *(lambda: spoiled("gradient"), BAD, {"gradient_accumulation_steps": 2}),
        f"step 2: {GRADIENT.format(f'{PLACE}.weight')}; {THIRD}. {ZERO}",
    ),
    **{
        f"gradient, use_reentrant={value}": (
            *(lambda: spoiled("gradient"), BAD, checkpointing_arguments(use_reentrant=value)),
            f"step 3: {GRADIENT.format(f'{PLACE}.weight')}; {THIRD}. {ZERO}",
        )
        for value in (False, True)
    },
    "gradient beside tied weights": (
        *(lambda: spoiled("gradient", Q_PROJ, tie_word_embeddings=True), BAD, {}),
        f"step 3: {GRADIENT.format(f'{Q_PROJ}.weight')}; {THIRD}. {ZERO}",
    ),
    "gradient beside frozen weights": (
        *(frozen_with_infinities_on_purpose, BAD, {}),
        f"step 3: {GRADIENT.format(f'{PLACE}.weight')}; {THIRD}. {ZERO}",
    ),
    "gradient of the loss": (
        *(tiny.llama, FOUR, {"compute_loss_func": root_of_zero}),
        f"step 1: {GRADIENT.format('lm_head.weight')}; {FIRST}. {ZERO}",
    ),
    "loss without labels": (
        *(tiny.llama, without_labels(), {}),
        f"step 3: {LOSS} (every label is -100); {THIRD}. {EPS}",
    ),
    "loss outside of the model": (
        *(tiny.llama, ONE_BAD, {"compute_loss_func": log_of_zero}),
        f"step 2: {LOSS}; {SECOND}. {EPS}",
    ),
    "batch": (
        *(lambda: tiny.bert(num_labels=1), with_nan(), {}),
        f"step 2: the batch itself is not finite, in column labels; {SECOND}. Mend these examples or leave them out",
    ),
    "finite when repeated": (
        *(tiny.llama, FOUR, {"compute_loss_func": Once(fails=False)}),
        f"step 1: {UNKNOWN} (and are when the step is repeated); {FIRST}. {AGAIN}",
    ),
    "out of memory when repeated": (
        *(tiny.llama, FOUR, {"compute_loss_func": Once(fails=True)}),
        f"step 1: {UNKNOWN} (it cannot be repeated: OutOfMemoryError: CUDA out of memory.); {FIRST}. {AGAIN}",
    ),
}


@pytest.mark.parametrize("case", FOUND)
def test_what_is_found(case: str, tmp_path: Any) -> None:
    build, dataset, settings, expected = FOUND[case]
    assert [str(report) for report in found(build(), dataset, tmp_path, **settings)] == [expected]
    if isinstance(once := settings.get("compute_loss_func"), Once):
        assert once.calls == 1  # what the repetition added was taken away


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


class Joint(nn.Module):
    """A batch norm and a dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.dropout(self.norm(self.linear(x)))
        return {"loss": logits.mean(), "logits": logits}


def joint_rows() -> list[dict[str, Any]]:
    return [{"x": [float(i), 1.0], "labels": 0} for i in range(8)]


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


@pytest.mark.parametrize("is_failing", [False, True], ids=["finds", "raises"])
def test_a_replay_leaves_everything_as_it_was(tmp_path: Any, is_failing: bool) -> None:
    model = Joint()
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
    model = Joint()
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
