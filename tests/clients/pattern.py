"""Patterns: trainings as people write them with the Trainer, and the set-ups in which they are tried."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import DataCollatorWithPadding, Trainer, TrainerCallback, TrainingArguments

import tiny
from client import arguments, labelled, train_and_evaluate
from hf_memopt import EvaluationGuardCallback, FusedCrossEntropyCallback, MicrobatchCallback
from starvation import Place

Callbacks = Callable[[], Sequence[TrainerCallback]]
OF_TEXT = ("fused cross-entropy",)
OF_EVALUATION = ("evaluation, out of memory",)


@dataclass(frozen=True)
class Setup:
    """What ``attach`` gets, and where memory runs out meanwhile."""

    callbacks: Callbacks = tuple
    starves: Place | None = None
    cuts: bool = False  # whether the last batch is to be cut


SETUPS: Mapping[str, Setup] = {
    "attach": Setup(),
    "micro-batches of 2": Setup(lambda: (MicrobatchCallback(max_examples=2),), cuts=True),
    "out of memory, forward": Setup(lambda: (MicrobatchCallback(),), "forward", cuts=True),
    "out of memory, backward": Setup(lambda: (MicrobatchCallback(),), "backward", cuts=True),
    "evaluation, out of memory": Setup(lambda: (EvaluationGuardCallback(reduce=None),), "evaluation"),
    "fused cross-entropy": Setup(lambda: (FusedCrossEntropyCallback(),)),
}


STARVED = ("out of memory, forward", "out of memory, backward")
"""Left out where a batch has one row, or the model gets one at a time: too many rows are what memory runs out of."""


@dataclass(frozen=True)
class Remedy:
    """What a refusal's message says to do.

    Args:
        callbacks: what ``attach`` gets instead.
        change: is done to the trainer first, and to the one of stock with which it is compared.
    """

    callbacks: Callbacks
    change: Callable[[Trainer], object] = lambda trainer: None


@dataclass(frozen=True, eq=False)
class Pattern:
    """A training.

    Args:
        build: returns the trainer, given a folder for its output.
        drive: trains and returns what else is compared, by name.
        trains: whether it is tried in the set-ups that train in micro-batches.
        evaluates: whether it is tried in an evaluation that runs out of memory.
        is_text: whether it is tried with a fused cross-entropy, as language models are.
        fits: rows of the model that fit into memory, half of those of a batch.
        left_out: other set-ups in which it is not tried.
        is_narrow: whether it computes in bfloat16, so that "equal" is wider.
        refuses: what each refusal's message has to contain, a regular expression by set-up. Without an entry a
            refusal is right as well, as long as its remedy works.
        remedies: what is done about the refusal in a set-up, where ``REMEDIES`` does not know its message.
    """

    build: Callable[[Path], Trainer]
    drive: Callable[[Trainer], Mapping[str, Any]] = train_and_evaluate
    trains: bool = True
    evaluates: bool = False
    is_text: bool = False
    is_narrow: bool = False
    fits: int = 2
    left_out: Sequence[str] = ()
    refuses: Mapping[str, str] = field(default_factory=dict)
    remedies: Mapping[str, Remedy] = field(default_factory=dict)

    @property
    def setups(self) -> list[str]:
        """The names of the set-ups in which it is tried."""
        left_out = {*self.left_out, *(() if self.is_text else OF_TEXT), *(() if self.evaluates else OF_EVALUATION)}
        if not self.trains:
            left_out |= {name for name in SETUPS if name not in ("attach", *OF_EVALUATION)}
        return [name for name in SETUPS if name not in left_out]


def halve_batches(trainer: Trainer) -> None:
    """Take half as many rows to a batch."""
    trainer.args.per_device_train_batch_size //= 2
    trainer._train_batch_size = trainer.args.train_batch_size


def halve_evaluated_batches(trainer: Trainer) -> None:
    """Evaluate half as many rows at a time."""
    trainer.args.per_device_eval_batch_size //= 2


REMEDIES: Mapping[str, Remedy] = {
    r"Pass MicrobatchCallback\(max_examples=\d+\)": Remedy(lambda: (MicrobatchCallback(max_examples=2),)),
    r"Start with smaller ones: MicrobatchCallback\(max_tokens=\d+\)": Remedy(
        lambda: (MicrobatchCallback(max_tokens=20),)
    ),
    "[Tt]ake MicrobatchCallback out of callbacks= and lower per_device_train_batch_size": Remedy(tuple, halve_batches),
    r"Lower it: TrainingArguments\(\.\.\., per_device_eval_batch_size=": Remedy(
        SETUPS["evaluation, out of memory"].callbacks, halve_evaluated_batches
    ),
    "Leave fuse_cross_entropy out": Remedy(tuple),
}
"""The remedy of every message that matches a regular expression."""


# ---- Building -------------------------------------------------------------------------------------------------------


def bert(**settings: Any) -> Any:
    """Return a tiny BERT classifier whose rows differ by more than a new model's do."""
    return tiny.bert(**{"initializer_range": 0.2, **settings})


def correct(prediction: Any) -> dict[str, float]:
    """Return how many predictions are right, and their mean, which moves with every one of them."""
    logits = prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
    right = logits.argmax(-1) == prediction.label_ids
    return {"accuracy": float(right.mean()), "mean": float(logits.mean())}


def built(
    kind: Callable[..., Any] = Trainer,
    *,
    model: Callable[[], Any] = bert,
    data: Callable[..., Any] = labelled,
    collate: Callable[[], Any] = lambda: DataCollatorWithPadding(tiny.tokenizer()),
    metrics: Callable[[Any], dict[str, float]] | None = None,
    settings: type[Any] = TrainingArguments,
    given: Mapping[str, Any] | None = None,
    callbacks: Sequence[Callable[[], TrainerCallback]] = (),
    evaluated: int = 8,
    **more: Any,
) -> Callable[[Path], Trainer]:
    """Return what builds a trainer of this kind.

    Args:
        kind: the class of the trainer, or a function in its place.
        model: makes the model.
        data: makes a dataset, given how many examples and ``seed``.
        collate: makes the collator.
        metrics: ``compute_metrics``.
        settings: the class of the training arguments.
        given: other arguments of the trainer.
        callbacks: make the trainer's own callbacks.
        evaluated: how many examples it has to evaluate.
        **more: training arguments.
    """

    def build(folder: Path) -> Trainer:
        torch.manual_seed(0)
        return kind(
            model=model(),
            args=arguments(folder, settings, **more),
            train_dataset=data(16),
            eval_dataset=data(evaluated, seed=1) if evaluated else None,
            data_collator=collate(),
            compute_metrics=metrics,
            callbacks=[make() for make in callbacks],
            **(given or {}),
        )

    return build


def telling(*names: str) -> Callable[[Trainer], Mapping[str, Any]]:
    """Return what trains, evaluates and returns these attributes of the trainer, too."""

    def drive(trainer: Trainer) -> Mapping[str, Any]:
        metrics = train_and_evaluate(trainer)
        kept = {name: getattr(trainer, name) for name in names}
        lists = {name: torch.tensor(value) for name, value in kept.items() if isinstance(value, list)}
        return {**metrics, **kept, **lists}

    return drive


# ---- Losses of one's own --------------------------------------------------------------------------------------------


class OfLabels(Trainer):
    """A subclass as most people write it: the model does not get the labels; ``loss_of`` takes its outputs and them."""

    def loss_of(self, outputs: Any, labels: Any) -> Any:
        raise NotImplementedError

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = self.loss_of(outputs, labels)
        return (loss, outputs) if return_outputs else loss


class OfInputs(Trainer):
    """The same of a model that gets the whole batch; ``loss_of`` takes its outputs and the batch."""

    def loss_of(self, outputs: Any, inputs: Any) -> Any:
        raise NotImplementedError

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(**inputs)
        loss = self.loss_of(outputs, inputs)
        return (loss, outputs) if return_outputs else loss
