"""Losses known by a table: what is known, how rows weigh, and that parts give loss and gradients of the whole."""

from __future__ import annotations

import functools
import gc
import inspect
import logging
import warnings
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import auto_heads
import pytest
import torch
import transformers as T
from tables import table, whole
from torch import nn
from transformers import Trainer
from transformers.trainer_pt_utils import LabelSmoother

import tiny
from hf_memopt.training.binding.losses import (
    CLASSES,
    HookChangesError,
    KnownLoss,
    known_loss,
    observed_hooks,
)
from hf_memopt.training.binding.losses.known_losses import head_counts_items
from hf_memopt.training.binding.losses.row_weights import POSITIONS
from hf_memopt.training.techniques.microbatching import splittable_reason

PARTS = ([0, 1], [2, 3], [4])
LOSS, GRADIENT = 1e-5, 2e-5  # relative: stock computes most losses in float32, whatever the model's dtype
ITEMS = torch.tensor(17)


def gradients(loss: torch.Tensor, model: nn.Module) -> torch.Tensor:
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    found = torch.autograd.grad(loss, weights, allow_unused=True)
    zeros = (torch.zeros_like(weight) for weight in weights)
    return torch.cat([(zero if part is None else part).flatten() for part, zero in zip(found, zeros, strict=True)])


def errors(trainer: Any, known: KnownLoss, batch: dict[str, Any], items: torch.Tensor | None) -> tuple[float, float]:
    """Return the relative errors of the loss and the gradient of parts against those of the whole batch."""

    def read(rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        part = {name: value[rows] for name, value in batch.items()}
        loss = trainer.compute_loss(trainer.model, part, num_items_in_batch=items)
        return loss.detach().double(), gradients(loss, trainer.model)

    weights = known.row_weights(batch)
    whole_loss, whole = read(list(range(auto_heads.ROWS)))
    loss, gradient = torch.zeros_like(whole_loss), torch.zeros_like(whole)
    for rows in PARTS:
        weight = 1.0 if weights is None else sum(weights[row] for row in rows)
        part_loss, part = read(rows)
        loss, gradient = loss + weight * part_loss, gradient + weight * part
    of_loss = (loss - whole_loss).abs() / whole_loss.abs().clamp(min=1e-3)
    return float(of_loss), float((gradient - whole).norm() / whole.norm().clamp(min=1e-12))


def outcome(task: str, kind: str, name: str, folder: Path) -> str:
    """Return what came of a head: "known", why it is not, or what is wrong."""
    try:
        model = auto_heads.build(task, kind, name)
        batch = auto_heads.batch(task, model)
        trainer = Trainer(model, tiny.arguments(folder))
        whole = [trainer.compute_loss(model, {key: part.clone() for key, part in batch.items()}) for _ in range(2)]
        is_finite = bool(gradients(whole[0], model).isfinite().all())
    except Exception as error:  # a config with other names for its sizes, a batch that the head does not take
        return f"not built: {type(error).__name__}: {error}".partition("\n")[0]
    if whole[0] != whole[1] or not is_finite:
        return f"not built: its {'loss is random' if is_finite else 'gradient is NaN'}"
    known = known_loss(trainer, None)
    if isinstance(known, str):
        return f"unknown: {known}"
    if (reason := splittable_reason(model)) is not None:
        return f"rows depend on each other: {reason}"
    for items in (None, ITEMS):
        trainer.model_accepts_loss_kwargs = items is not None
        known = known_loss(trainer, items)
        assert isinstance(known, KnownLoss)
        if (reason := known.reason_against(batch)) is not None:
            return f"WRONG: {reason}"
        of_loss, of_gradient = errors(trainer, known, dict(batch), items)
        if not (of_loss <= LOSS and of_gradient <= GRADIENT):
            return f"WRONG: {known.over}, items {items}: loss {of_loss:.1e}, gradient {of_gradient:.1e}"
        if items is not None and (counts := head_counts_items(model)) is not None:
            loss = trainer.compute_loss(model, dict(batch), num_items_in_batch=items)
            half = trainer.compute_loss(model, dict(batch), num_items_in_batch=2 * items)
            if counts != torch.isclose(loss, 2 * half, rtol=1e-4):
                return f"WRONG: head_counts_items is {counts}"
    return "known"


QUICK = table("binding/tables/commonest_heads")


@pytest.mark.parametrize(("task", "kind", "name"), QUICK, ids=[f"{name}, {task}" for task, _, name in QUICK])
def test_the_commonest_heads_are_known(task: str, kind: str, name: str, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert outcome(task, kind, name, tmp_path) == "known"


@pytest.mark.slow
@pytest.mark.parametrize("task", auto_heads.TASKS)
def test_every_known_head_is_what_the_table_says(task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found: dict[str, list[str]] = defaultdict(list)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of models made with sizes that nobody uses
        logging.disable(logging.WARNING)
        gc.freeze()  # or each collection would look at all that was imported
        try:
            for kind, name in auto_heads.heads(task):
                result = outcome(task, kind, name, tmp_path)
                found[result.partition(":")[0]].append(f"{name} {result.partition(':')[2]}")
                gc.collect()  # a Trainer and its model refer to each other
        finally:
            logging.disable(logging.NOTSET)
    with capsys.disabled():
        print(f"\n{task}: " + ", ".join(f"{len(names)} {result}" for result, names in sorted(found.items())))
        for result in sorted(set(found) - {"known"}):
            print(*(f"    {result}: {name}" for name in found[result]), sep="\n")
    assert not found["WRONG"]
    assert found["known"]


def trainer_of(
    folder: Path, model: Any = None, kind: type[Trainer] = Trainer, loss: Any = None, **settings: Any
) -> Any:
    return kind(model or tiny.bert(), tiny.arguments(folder, **settings), compute_loss_func=loss)


def over(trainer: Any, items: Any = None) -> str:
    known = known_loss(trainer, items)
    return known.over if isinstance(known, KnownLoss) else known


def test_a_head_that_counts_adds_up_only_if_it_gets_the_count(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, tiny.llama())
    assert (over(trainer), over(trainer, ITEMS)) == ("shifted labels", "sum")
    trainer.model_accepts_loss_kwargs = False
    assert over(trainer, ITEMS) == "shifted labels"
    trainer = trainer_of(tmp_path, T.BertForMaskedLM(tiny.bert_config()))
    assert over(trainer, ITEMS) == "labels"
    known = known_loss(trainer, ITEMS)
    assert isinstance(known, KnownLoss)
    assert known.source == whole("transformers/models/bert/modeling_bert.py,")


@pytest.mark.parametrize(("model", "mean"), [(tiny.llama, "shifted labels"), (tiny.bert, "labels")])
def test_smoothed_labels_are_known(model: Any, mean: str, tmp_path: Path) -> None:
    smoothed = trainer_of(tmp_path, model(), label_smoothing_factor=0.1)
    divides = "num_items_in_batch" in inspect.signature(LabelSmoother.__call__).parameters
    assert (over(smoothed), over(smoothed, ITEMS)) == (mean, "sum" if divides else mean)


class OwnStep(Trainer):
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return super().training_step(*args, **kwargs)


class OwnLoss(Trainer):
    @functools.wraps(Trainer.compute_loss)
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs)


class OwnInputs(Trainer):
    def _prepare_inputs(self, inputs: Any) -> Any:
        return super()._prepare_inputs(inputs)


class OwnBert(T.BertForMaskedLM):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)


class OwnLinear(nn.Linear):
    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        return super().__call__(input) - super().__call__(input).mean(0)


def own_layer() -> nn.Module:
    model = tiny.bert()
    model.classifier = OwnLinear(*reversed(model.classifier.weight.shape))
    return model


def own_forward() -> nn.Module:
    model = tiny.bert()
    before = model.bert.pooler.forward
    model.bert.pooler.forward = lambda *args: before(*args)
    return model


def own_hook() -> nn.Module:
    model = tiny.bert()
    model.classifier.weight.register_hook(lambda gradient: gradient.clamp(-1, 1))
    return model


def own_loss_function() -> nn.Module:
    model = tiny.llama()
    model.loss_function = lambda **kwargs: kwargs["logits"].sum()
    return model


def routed(**settings: Any) -> nn.Module:
    sizes = {"vocab_size": 99, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 2}
    return T.MixtralForCausalLM(T.MixtralConfig(**sizes, **heads, **settings))


HERE = __name__
UNKNOWN: dict[str, tuple[Callable[[], Any], type[Trainer], str]] = {
    "step": (tiny.bert, OwnStep, f"training_step is {HERE}.OwnStep.training_step"),
    "loss": (tiny.bert, OwnLoss, f"compute_loss is {HERE}.Trainer.compute_loss"),
    "inputs": (tiny.bert, OwnInputs, f"_prepare_inputs is {HERE}.OwnInputs._prepare_inputs"),
    "class": (lambda: OwnBert(tiny.bert_config()), Trainer, f"OwnBert is from {HERE}"),
    "layer": (own_layer, Trainer, f"OwnLinear classifier is from {HERE}"),
    "forward": (own_forward, Trainer, f"the forward of BertPooler bert.pooler is {HERE}.own_forward.<locals>.<lambda>"),
    "gradient": (
        own_hook,
        Trainer,
        f"the hook {HERE}.own_hook.<locals>.<lambda> is on the gradient of classifier.weight",
    ),
    "loss function": (own_loss_function, Trainer, f"its loss_function is {HERE}.<lambda>"),
    "router": (lambda: routed(output_router_logits=True), Trainer, "its output_router_logits may add to the loss"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_from_a_listed_package_is_not_known(name: str, tmp_path: Path) -> None:
    build, kind, reason = UNKNOWN[name]
    assert known_loss(trainer_of(tmp_path, build(), kind), ITEMS) == reason


@pytest.mark.parametrize(
    ("change", "is_refused"),
    [
        (lambda gradient: None, False),
        (lambda gradient: gradient / gradient.norm(), True),
        (lambda gradient: gradient.mul_(0.5).sum() and None, True),
    ],
)
def test_a_hook_that_sets_one_on_a_gradient_is_refused_if_that_one_changes_it(change: Any, is_refused: bool) -> None:
    def hook(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        output.register_hook(change)

    model = nn.Linear(2, 2)
    model.register_forward_hook(hook)
    with observed_hooks(model), pytest.raises(HookChangesError) if is_refused else nullcontext():
        model(torch.ones(1, 2)).square().sum().backward()


def test_a_loss_of_ones_own_is_not_known(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, loss=len)
    assert known_loss(trainer, ITEMS) == "compute_loss_func is <built-in function len>"
    trainer = trainer_of(tmp_path, label_smoothing_factor=0.1)
    trainer.label_smoother = lambda *args, **kwargs: None
    assert "label_smoother is a" in over(trainer)


def test_a_router_whose_loss_is_off_is_known_for_batches_that_leave_it_off(tmp_path: Path) -> None:
    known = known_loss(trainer_of(tmp_path, routed()), ITEMS)
    assert isinstance(known, KnownLoss)
    labels = torch.ones(2, 3)
    assert known.reason_against({"labels": labels}) is None
    assert known.reason_against({"labels": labels, "output_router_logits": True}) == (
        "its output_router_logits changes the loss"
    )


LABELS = torch.tensor([[1, 2, 3, 4], [5, -100, 6, -100], [7, -100, -100, -100]])
PICTURE_CONFIG = T.BertConfig(num_labels=3)


@pytest.mark.parametrize(
    ("known", "inputs", "weights"),
    [
        (KnownLoss("sum", ""), {"labels": LABELS}, None),
        (KnownLoss("rows", ""), {"labels": LABELS}, [1 / 3, 1 / 3, 1 / 3]),
        (KnownLoss("labels", ""), {"labels": LABELS}, [4 / 7, 2 / 7, 1 / 7]),
        (KnownLoss("shifted labels", ""), {"labels": LABELS}, [3 / 4, 1 / 4, 0]),
        (KnownLoss("shifted labels", ""), {"labels": LABELS, "shift_labels": LABELS}, [4 / 7, 2 / 7, 1 / 7]),
        (KnownLoss("labels", ""), {"labels": torch.full((2, 3), -100)}, [1 / 2, 1 / 2]),
        (KnownLoss(CLASSES, "", False, PICTURE_CONFIG), {"labels": torch.tensor([1, -100])}, [1, 0]),
        (KnownLoss(CLASSES, "", True, PICTURE_CONFIG), {"labels": torch.tensor([1, -100])}, None),
        (KnownLoss(CLASSES, "", True, PICTURE_CONFIG), {"labels": torch.rand(2, 3)}, [1 / 2, 1 / 2]),
    ],
)
def test_rows_weigh_what_counts_in_them(known: KnownLoss, inputs: Any, weights: list[float] | None) -> None:
    assert known.reason_against(inputs) is None
    assert known.row_weights(inputs) == (weights if weights is None else pytest.approx(weights))


@pytest.mark.parametrize(
    ("known", "inputs", "reason"),
    [
        (KnownLoss("labels", ""), {"input_ids": LABELS}, "it has no tensor of labels"),
        (KnownLoss(CLASSES, "", False, PICTURE_CONFIG), {"labels": torch.tensor([-1])}, "it has labels below 0"),
        (
            KnownLoss(CLASSES, "", False, PICTURE_CONFIG),
            {"labels": torch.rand(3)},
            "its labels of shape (3,) are not 3 for each of 3 rows",
        ),
        (
            KnownLoss(POSITIONS, ""),
            {"input_ids": LABELS, "start_positions": torch.tensor([0, 1, 4]), "end_positions": torch.tensor([1, 2, 3])},
            "answers lie beyond its texts, and do not count",
        ),
        (KnownLoss(POSITIONS, ""), {"input_ids": LABELS}, "it has no text with positions of answers"),
    ],
)
def test_a_batch_that_does_not_follow_the_rule_says_so(known: KnownLoss, inputs: Any, reason: str) -> None:
    assert known.reason_against(inputs) == reason
