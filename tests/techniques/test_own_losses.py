"""Losses and steps of users under the Trainer: cut below the loss, exact; or raised, with what to do instead."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import Trainer

import tiny
from hf_memopt.training.binding import attach
from hf_memopt.training.techniques.microbatching import MicrobatchCallback
from hf_memopt.training.techniques.microbatching.not_splittable import NotSplittableError
from scarcity import Pad, Scarcity, mixed_rows

FLOAT32 = 2**-22  # gradients of rows added in another order, over steps of 0.1
BATCHES, ROWS = 3, 4
OUT = "CUDA out of memory. Tried to allocate 2.00 GiB."


def each(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits, labels, reduction="none")


class OwnLoss(Trainer):
    """A trainer whose loss is ``loss(logits, inputs)``, which takes columns that the model does not."""

    loss: Callable[[torch.Tensor, dict[str, Any]], torch.Tensor]

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        loss = type(self).loss(outputs["logits"], inputs)
        return (loss, outputs) if return_outputs else loss


def weighted_mean(logits: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor:
    return (each(logits, inputs["labels"]) * inputs["weight"]).sum() / inputs["weight"].sum()


def masked_tokens(logits: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor:
    """A mean over the tokens of a mask that is not the labels'."""
    mask = inputs["loss_mask"]
    return (logits.square().mean(1) * mask.sum(1) / mask.sum()).sum()


def over_boxes(logits: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor:
    """A mean over objects, of which each row has a list."""
    pairs = zip(logits, inputs["boxes"], strict=True)
    losses = [each(row.expand(len(boxes), -1), boxes).sum() for row, boxes in pairs]
    return torch.stack(losses).sum() / sum(map(len, inputs["boxes"]))


def in_batch_negatives(logits: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor:
    return functional.cross_entropy(logits @ logits.T, torch.arange(len(logits), device=logits.device))


def penalty(logits: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor:
    """A term over the whole batch."""
    return functional.cross_entropy(logits, inputs["labels"]) + logits.mean(0).square().sum()


def hard_examples(logits: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor:
    return each(logits, inputs["labels"]).topk(2).values.mean()


def random_mask(logits: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor:
    """A mask drawn anew at each pass: once per step, in parts or not."""
    return (each(logits, inputs["labels"]) * torch.rand(len(logits), device=logits.device)).mean()


LOSSES = (weighted_mean, masked_tokens, over_boxes, in_batch_negatives, penalty, hard_examples, random_mask)


def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Pad what has columns; keep lists of tensors as they are."""
    boxes = [row["boxes"] for row in rows]
    return {**Pad()([{name: value for name, value in row.items() if name != "boxes"} for row in rows]), "boxes": boxes}


def rows_of_all_columns() -> list[dict[str, Any]]:
    rows = mixed_rows(BATCHES * ROWS)
    for i, row in enumerate(rows):
        row |= {"weight": (1.0, 9.0, 0.1, 3.0)[i % 4]}
        row |= {"boxes": torch.arange((1, 5, 1, 4, 2, 6)[i % 6]) % 3, "loss_mask": [1.0, 0.0] * (1 + i % 3)}
    return rows


def make(
    kind: type[Trainer],
    folder: Path,
    *callbacks: Any,
    model: nn.Module | None = None,
    data: Any = None,
    **settings: Any,
) -> Trainer:
    """Return a trainer of 3 steps of 4 rows."""
    args = tiny.arguments(
        folder,
        per_device_eval_batch_size=ROWS,
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
        **{"per_device_train_batch_size": ROWS, **settings},
    )
    model = tiny.bert() if model is None else model
    vars(model)["accepts_loss_kwargs"] = False  # stock then counts no labels
    data = rows_of_all_columns() if data is None else data
    trainer = kind(model=model, args=args, train_dataset=data, eval_dataset=data, data_collator=collate)
    return attach(trainer, *callbacks)


def trained(kind: type[Trainer], folder: Path, *callbacks: Any, **settings: Any) -> Trainer:
    torch.manual_seed(0)
    trainer = make(kind, folder, *callbacks, **settings)
    torch.manual_seed(0)
    trainer.train()
    return trainer


def own(loss: Callable[..., torch.Tensor]) -> type[Trainer]:
    return type(loss.__name__, (OwnLoss,), {"loss": staticmethod(loss)})


def assert_same(kind: type[Trainer], folder: Path, callback: MicrobatchCallback, **settings: Any) -> Trainer:
    """Hold a run whose steps are all cut against stock's."""
    whole = trained(kind, folder, **{**settings, "model": copy.deepcopy(settings.get("model"))})
    parts = trained(kind, folder, callback, **settings)
    assert callback.tally.cut_steps == BATCHES
    assert 0.0 <= tiny.largest_difference(whole.model, parts.model) <= FLOAT32
    assert vars(parts.accelerator).keys() == vars(whole.accelerator).keys()
    assert all("forward" not in vars(module) for module in parts.model.modules())
    return parts


class MakesItsBatches(OwnLoss):
    """Gets a list of rows in its step, as trainers do that generate."""

    loss = staticmethod(in_batch_negatives)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        return super().training_step(model, collate(inputs), num_items_in_batch)


class Popping(Trainer):
    """Takes columns of its own out of the batch."""

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        for name in ("weight", "boxes", "loss_mask"):
            assert len(inputs.pop(name)) == ROWS
        return super().training_step(model, inputs, num_items_in_batch)


class NoComputeLoss(Trainer):
    """Computes its loss by itself, and calls backward by itself."""

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        model.train()
        loss = penalty(model(inputs["input_ids"], attention_mask=inputs["attention_mask"])["logits"], inputs)
        loss.backward()
        return loss.detach()


@pytest.mark.parametrize("limit", [None, 2])
@pytest.mark.parametrize("kind", [MakesItsBatches, Popping, NoComputeLoss])
def test_a_step_of_its_own_is_exact(kind: type[Trainer], limit: int | None, tmp_path: Path) -> None:
    """With a limit, and without one when memory runs out in the first step."""
    model, scarcity = tiny.bert(), Scarcity(limit=30)
    if limit is None:
        scarcity.watch(model)
    whole = make(kind, tmp_path)
    callback = MicrobatchCallback(max_examples=limit)
    parts = make(kind, tmp_path, callback, model=model)
    for trainer in (whole, parts):
        if kind is MakesItsBatches:
            trainer.data_collator = list
        trainer.train()
    assert (scarcity.errors > 0) == (limit is None)
    assert callback.tally.cut_steps > 0
    assert tiny.largest_difference(whole.model, parts.model) <= FLOAT32


class Attacks(OwnLoss):
    """FGM: the word embeddings are moved for a second backward pass."""

    loss = staticmethod(in_batch_negatives)
    changed = "model.bert.embeddings.word_embeddings.weight"

    def moved(self, model: nn.Module) -> list[nn.Parameter]:
        return [model.get_input_embeddings().weight]

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        loss = super().training_step(model, inputs, num_items_in_batch)
        kept = [weight.detach().clone() for weight in self.moved(model)]
        for weight in self.moved(model):
            weight.data.add_(0.5 * weight.grad / (weight.grad.norm() + 1e-9))
        super().training_step(model, inputs, num_items_in_batch)
        for weight, value in zip(self.moved(model), kept, strict=True):
            weight.data.copy_(value)
        return loss


class AttacksAll(Attacks):
    """AWP: all matrices are."""

    def moved(self, model: nn.Module) -> list[nn.Parameter]:
        return [p for name, p in model.named_parameters() if p.dim() == 2 and p.grad is not None]


class Teaches(OwnLoss):
    """A teacher that is a moving average of the model, made before the loss is."""

    loss = staticmethod(hard_examples)
    changed = "trainer.teacher.bert.embeddings.word_embeddings.weight"

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.teacher = copy.deepcopy(self.model).eval().requires_grad_(False)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        with torch.no_grad():
            for own, other in zip(self.teacher.parameters(), model.parameters(), strict=True):
                own.lerp_(other + 0.1, 0.5)
        return super().training_step(model, inputs, num_items_in_batch)

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
        with torch.no_grad():
            expected = self.teacher(inputs["input_ids"], attention_mask=inputs["attention_mask"])["logits"]
        loss = loss + functional.mse_loss(outputs["logits"], expected)
        return (loss, outputs) if return_outputs else loss


class TeachesByAnObject(Teaches):
    """The teacher is held by an object that is no module."""

    changed = Teaches.changed.replace("teacher", "average")

    @property
    def teacher(self) -> nn.Module:
        return self.average.module

    @teacher.setter
    def teacher(self, module: nn.Module) -> None:
        self.average = SimpleNamespace(module=module)


class KeepsAMean(OwnLoss):
    """A running mean of the logits, which a repeated step finds as it was."""

    loss = staticmethod(hard_examples)
    mean: Any = 0.0

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
        self.mean = 0.9 * self.mean + 0.1 * outputs["logits"].mean(0).detach()
        loss = loss + (outputs["logits"] - self.mean).square().mean()
        return (loss, outputs) if return_outputs else loss


class TwoTowers(nn.Module):
    """A model of a user, without any class of transformers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(100, 16)
        self.encoder = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
        self.head = nn.Linear(16, 3)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.encoder(self.words(input_ids))
        return {"logits": self.head((hidden * attention_mask[..., None]).mean(1))}


class Norms(TwoTowers):
    """The same, whose rows meet in every module that could be found."""

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = super().forward(input_ids, attention_mask)["logits"]
        return {"logits": logits - logits.mean(0)}


EXACT: dict[str, tuple[type[Trainer], dict[str, Any], Callable[[], nn.Module]]] = {
    **{loss.__name__: (own(loss), {}, tiny.bert) for loss in LOSSES},
    **{kind.__name__: (kind, {}, tiny.bert) for kind in (Attacks, AttacksAll, Teaches, KeepsAMean)},
    "a named module": (own(in_batch_negatives), {"backbone": "encoder"}, Norms),
    "rows that are independent": (own(in_batch_negatives), {}, TwoTowers),
    "children": (own(penalty), {}, Norms),
}


@pytest.mark.parametrize("name", EXACT)
def test_a_loss_over_the_batch_is_exact(name: str, tmp_path: Path) -> None:
    kind, settings, build = EXACT[name]
    assert_same(kind, tmp_path, MicrobatchCallback(max_examples=2, **settings), model=build())


@pytest.mark.parametrize(("kind", "call"), [(Attacks, 2), (Teaches, 1), (TeachesByAnObject, 1)])
def test_memory_that_runs_out_after_a_change_is_raised_and_the_remedy_helps(
    kind: Any, call: int, tmp_path: Path
) -> None:
    model = tiny.bert()
    Scarcity(calls=(call,)).watch(model)
    trainer = make(kind, tmp_path, MicrobatchCallback(), model=model)
    with pytest.raises(torch.OutOfMemoryError) as error:
        trainer.train()
    found = re.fullmatch(
        rf"memory ran out at step 1 \({re.escape(OUT)}\), and the step cannot be repeated, since "
        rf"{re.escape(kind.changed)} was changed within it; expected parts that fit from the beginning. Start with "
        r"smaller ones: (MicrobatchCallback\(max_tokens=\d+\))",
        str(error.value),
    )
    assert found is not None, error.value
    assert_same(kind, tmp_path, eval(found[1]))


class Swallows(OwnLoss):
    """Skips a batch that does not fit, as some loops do."""

    loss = staticmethod(in_batch_negatives)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        try:
            return super().training_step(model, inputs, num_items_in_batch)
        except torch.OutOfMemoryError:
            return torch.zeros(())


class CountsOutside(Trainer):
    """Weights its loss by counts, and a random number, that the Trainer does not hold itself."""

    seen = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs, compute_loss_func=self.loss)
        type(self).seen = 0
        OUTSIDE.bit_generator.state = np.random.default_rng(0).bit_generator.state

    def loss(self, outputs: Any, labels: torch.Tensor, **_: Any) -> torch.Tensor:
        return self.weigh() * functional.cross_entropy(outputs["logits"], labels)

    def weigh(self) -> float:
        places = (self.args, self.state, self.model, self.model.config)
        type(self).seen += 1
        for place in places:
            place.seen = getattr(place, "seen", 0) + 1  # type: ignore[union-attr]
        return float(1 + sum(place.seen for place in places) / 7 + type(self).seen / 11 + OUTSIDE.random())


OUTSIDE = np.random.default_rng(0)


class CountsInLoss(CountsOutside):
    """The same in ``compute_loss``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.compute_loss_func = None

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        weight = self.weigh()
        outputs = model(inputs["input_ids"], attention_mask=inputs["attention_mask"])
        loss = weight * functional.cross_entropy(outputs["logits"], inputs["labels"])
        return (loss, outputs) if return_outputs else loss


class AddsOncePerUpdate(OwnLoss):
    """Adds a term to the last of the losses that are accumulated."""

    loss = staticmethod(hard_examples)

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        loss = super().compute_loss(model, inputs, return_outputs, **kwargs)
        return loss + model.classifier.weight.square().sum() * self.accelerator.sync_gradients


class LearnsAScale(OwnLoss):
    """Trains a weight that is not the model's, and whose gradient it holds."""

    loss = staticmethod(hard_examples)

    def create_optimizer(self, *args: Any) -> Any:
        self.scale = nn.Parameter(torch.ones(()))
        self.scale.grad = torch.ones(())
        super().create_optimizer(*args).add_param_group({"params": [self.scale]})
        return self.optimizer

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        return super().compute_loss(model, inputs, return_outputs, **kwargs) * self.scale


def test_gradients_outside_of_the_model_are_those_of_one_attempt(tmp_path: Path) -> None:
    model, scarcity = tiny.bert(), Scarcity(calls=(3,), where="backward")
    scarcity.watch(model)
    whole = trained(LearnsAScale, tmp_path, gradient_accumulation_steps=3)
    parts = trained(LearnsAScale, tmp_path, MicrobatchCallback(), model=model, gradient_accumulation_steps=3)
    assert scarcity.errors == 1
    torch.testing.assert_close(parts.scale.grad, whole.scale.grad)  # type: ignore[attr-defined]


class Cycles(CountsInLoss):
    """Takes its weights from an iterator."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.weights = itertools.cycle([1.0, 2.0, 3.0])

    def weigh(self) -> float:
        return next(self.weights) * super().weigh()


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_step_that_reads_an_iterator_is_not_repeated(where: str, tmp_path: Path) -> None:
    model = tiny.bert()
    Scarcity(calls=(2,), where=where).watch(model)
    with pytest.raises(torch.OutOfMemoryError, match=r"since Cycles\.weights, an iterator, may have moved on"):
        make(Cycles, tmp_path, MicrobatchCallback(), model=model).train()


@pytest.mark.parametrize(
    ("kind", "call", "where", "steps"),
    [
        *((kind, 2, where, 1) for kind in (CountsOutside, CountsInLoss) for where in ("forward", "backward")),
        (KeepsAMean, 2, "backward", 1),
        (Swallows, 2, "forward", 1),
        (own(hard_examples), 3, "backward", 3),  # the last of the first window
        (AddsOncePerUpdate, 3, "backward", 3),
    ],
)
def test_a_step_that_runs_out_is_repeated_as_it_began(
    kind: type[Trainer], call: int, where: str, steps: int, tmp_path: Path
) -> None:
    settings = {"gradient_accumulation_steps": steps, "logging_strategy": "steps", "logging_steps": 1}
    model, scarcity = tiny.bert(), Scarcity(calls=(call,), where=where)
    scarcity.watch(model)
    whole = trained(kind, tmp_path, **settings)
    parts = trained(kind, tmp_path, MicrobatchCallback(), model=model, **settings)
    assert scarcity.errors == 1
    assert tiny.largest_difference(whole.model, parts.model) <= FLOAT32
    assert parts.state.log_history[0]["loss"] == pytest.approx(whole.state.log_history[0]["loss"], abs=1e-6)


def test_an_unknown_name_lists_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ValueError) as error:
        make(own(penalty), tmp_path, MicrobatchCallback(max_examples=2, backbone="encodr"), model=TwoTowers())
    assert str(error.value) == (
        "backbone='encodr' is no module of TwoTowers; expected the name of one, or its end. Did you mean 'encoder'? "
        "Print them: [name for name, _ in model.named_modules()]"
    )


def _with(change: Callable[[Any], object]) -> nn.Module:
    model = tiny.bert()
    change(model)
    return model


HOOK = "the hook test_own_losses.<lambda>.<locals>.<lambda> on "
SEES_PARTS = " would see parts of a batch, without a graph"
NAMED = "ame a part whose rows are independent: MicrobatchCallback(backbone='bert.encoder'), or take "
REFUSED_BACKBONES: dict[str, tuple[Callable[[Any], object], str, str]] = {
    "hook beside the encoder": (
        lambda model: model.bert.embeddings.register_forward_hook(lambda *given: None),
        f"BertForSequenceClassification: {HOOK}bert.embeddings{SEES_PARTS}; bert: {HOOK}embeddings{SEES_PARTS}",
        f"Take the hook off, or n{NAMED}",
    ),
    "hook in the encoder": (
        lambda model: model.bert.encoder.layer[0].register_forward_hook(lambda *given: None),
        f"BertForSequenceClassification: {HOOK}bert.encoder.layer.0{SEES_PARTS}; "
        f"bert: {HOOK}encoder.layer.0{SEES_PARTS}",
        "Take the hook off, or take ",
    ),
    "batch norm beside the encoder": (
        lambda model: setattr(model.bert.embeddings, "LayerNorm", Normed()),
        "BertForSequenceClassification: rows depend on each other: parts of its output 0 of shape (4, 3) differ from "
        "the whole by #; bert: rows depend on each other: parts of its output 0 of shape (4, 12, 32) differ from the "
        "whole by #",
        f"N{NAMED}",
    ),
    "spectral norm in the encoder": (
        lambda model: nn.utils.parametrizations.spectral_norm(model.bert.encoder.layer[0].intermediate.dense),
        "BertForSequenceClassification: its forward pass changes bert.encoder.layer.0.intermediate.dense."
        "parametrizations.weight.0._u, which parts would change several times; bert: its forward pass changes "
        "encoder.layer.0.intermediate.dense.parametrizations.weight.0._u, which parts would change several times",
        "Take ",
    ),
}


class Normed(nn.BatchNorm1d):
    """A batch norm over the tokens, of (batch, seq, hidden)."""

    def __init__(self) -> None:
        super().__init__(32)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden.transpose(1, 2)).transpose(1, 2)


@pytest.mark.parametrize("name", REFUSED_BACKBONES)
def test_a_refusal_names_the_part_that_can_be_cut(name: str, tmp_path: Path) -> None:
    change, reason, remedy = REFUSED_BACKBONES[name]
    kind, model = own(penalty), _with(change)
    with pytest.raises(NotSplittableError) as error:
        trained(kind, tmp_path, MicrobatchCallback(max_examples=2), model=copy.deepcopy(model))
    assert re.sub(r"by [\d.e+-]+(?=;)", "by #", str(error.value)) == (
        "model=BertForSequenceClassification cannot be trained in micro-batches at step 1 (a batch of input_ids, "
        f"attention_mask, labels, weight, loss_mask, boxes): {reason}; expected rows that do not depend on each other. "
        f"{remedy}MicrobatchCallback out of callbacks= and lower per_device_train_batch_size."
    )
    if "backbone=" in remedy:
        assert_same(kind, tmp_path, MicrobatchCallback(max_examples=2, backbone="bert.encoder"), model=model)


class PopsLabels(OwnLoss):
    """Predicts with the labels taken out of the batch."""

    loss = staticmethod(hard_examples)

    def prediction_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        labels = inputs.pop("labels")
        with torch.no_grad():
            logits = model(inputs["input_ids"], attention_mask=inputs["attention_mask"])["logits"]
        return hard_examples(logits, {"labels": labels}), logits, labels


class Full(Scarcity):
    """Run out of memory above a number of rows, in evaluation too."""

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if module is self._first():
            self.count += 1
            if len(args[0]) > self.limit:
                self.fail()


@pytest.mark.parametrize("kind", [own(in_batch_negatives), own(hard_examples), PopsLabels, CountsInLoss])
def test_an_evaluation_that_runs_out_of_memory_gives_what_stock_gives(kind: type[Trainer], tmp_path: Path) -> None:
    def figures(predictions: Any) -> dict[str, float]:
        assert predictions.label_ids.shape == (BATCHES * ROWS,)
        return {"accuracy": float((predictions.predictions.argmax(1) == predictions.label_ids).mean())}

    found = []
    for callbacks in ((), (MicrobatchCallback(),)):
        trainer = make(kind, tmp_path, *callbacks, label_names=["labels"])
        trainer.compute_metrics = figures
        scarcity = Full(limit=3 if callbacks else 100)
        scarcity.watch(trainer.model)
        predictions = trainer.predict(trainer.eval_dataset)
        found.append((predictions.metrics["test_loss"], predictions.metrics["test_accuracy"], predictions.label_ids))
        assert (scarcity.errors > 0) == bool(callbacks)
    (loss, accuracy, labels), (loss_of_parts, accuracy_of_parts, labels_of_parts) = found
    assert loss_of_parts == pytest.approx(loss, abs=1e-6)
    assert accuracy_of_parts == accuracy
    assert labels_of_parts.tolist() == labels.tolist()


def test_an_evaluation_of_which_only_one_row_fits_says_why_it_cannot_be_compared(tmp_path: Path) -> None:
    trainer = make(own(hard_examples), tmp_path, MicrobatchCallback())
    Full(limit=1).watch(trainer.model)
    with pytest.raises(torch.OutOfMemoryError) as error:
        trainer.evaluate()
    assert str(error.value) == (
        "batch 0 of this evaluation, of 4 rows, does not fit into memory and cannot be split: "
        f"BertForSequenceClassification: not even two rows fit, without gradients, so that none can be compared "
        f"({OUT}); expected a batch that fits. Lower it: "
        "TrainingArguments(..., per_device_eval_batch_size=2)"
    )
