"""Patterns: trainings as people write them with the Trainer, and the set-ups in which they are tried."""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import DataCollatorWithPadding, Trainer, TrainerCallback, TrainingArguments

import tiny
from client import arguments, labelled, train_and_evaluate
from comparison import ABSOLUTE, NARROW, RELATIVE, Outcome, Run, compared, outcome_of_error, run
from hf_memopt import EvaluationGuardCallback, FusedCrossEntropyCallback, MicrobatchCallback, attach
from starvation import Place, Starvation

Callbacks = Callable[[], Sequence[TrainerCallback]]
OF_TEXT = ("fused cross-entropy",)
OF_EVALUATION = ("evaluation, out of memory",)


@dataclass(frozen=True)
class Setup:
    """What ``attach`` gets, and where memory runs out meanwhile."""

    callbacks: Callbacks = tuple
    starves: Place | None = None


SETUPS: Mapping[str, Setup] = {
    "attach": Setup(),
    "micro-batches of 2": Setup(lambda: (MicrobatchCallback(max_examples=2),)),
    "out of memory, forward": Setup(lambda: (MicrobatchCallback(),), "forward"),
    "out of memory, backward": Setup(lambda: (MicrobatchCallback(),), "backward"),
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
    "Take MicrobatchCallback out of callbacks= and lower per_device_train_batch_size": Remedy(tuple, halve_batches),
    r"Lower it: TrainingArguments\(\.\.\., per_device_eval_batch_size=": Remedy(
        SETUPS["evaluation, out of memory"].callbacks, halve_evaluated_batches
    ),
    "Leave fuse_cross_entropy out": Remedy(tuple),
}
"""The remedy of every message that matches a regular expression."""


# ---- Outcomes -------------------------------------------------------------------------------------------------------


def outcomes_of(pattern: Pattern, setup: str) -> tuple[Outcome, Outcome | None]:
    """Train a pattern in a set-up; return what came of it, and of the remedy where it was refused."""
    found = _outcome(pattern, SETUPS[setup])
    if found.verdict != "refused":
        return found, None
    known = (remedy for text, remedy in REMEDIES.items() if re.search(text, found.detail))
    remedy = pattern.remedies.get(setup, next(known, None))
    if remedy is None:
        return found, None
    return found, _outcome(pattern, Setup(remedy.callbacks, SETUPS[setup].starves), remedy)


def is_right(pattern: Pattern, setup: str, found: Outcome, remedied: Outcome | None) -> bool:
    """Return whether an outcome is as stock's, or a refusal, as expected, with a remedy that makes it so."""
    if setup in pattern.refuses and not re.search(pattern.refuses[setup], found.detail):
        return False
    last = found if found.verdict != "refused" or remedied is None else remedied
    return last.verdict in (("same",) if setup == "attach" else ("same", "equal"))


def _outcome(pattern: Pattern, setup: Setup, remedy: Remedy | None = None) -> Outcome:
    """Train in a set-up and compare with stock; memory has to run out at least once, unless a remedy prevents it."""
    stock = stock_run(pattern) if remedy is None else run(_changed(pattern, remedy), pattern.drive)
    raised = 0

    def drive(trainer: Trainer) -> Mapping[str, Any]:
        nonlocal raised
        attach(trainer, *setup.callbacks())
        starved = (
            contextlib.nullcontext() if setup.starves is None else Starvation(trainer, pattern.fits, setup.starves)
        )
        with starved:
            try:
                return pattern.drive(trainer)
            finally:
                raised = getattr(starved, "raised", 0)

    try:
        ours = run(pattern.build if remedy is None else _changed(pattern, remedy), drive)
    except Exception as error:  # whatever the pattern, or what stands over it, raises
        return outcome_of_error(error)
    if setup.starves is not None and raised == 0 and remedy is None:
        return Outcome("error", "memory did not run out")
    is_exact = setup.starves is None and not setup.callbacks()
    new = tuple(dict.fromkeys(text for text in ours.warnings if text not in stock.warnings))
    tolerance = NARROW if pattern.is_narrow else (RELATIVE, ABSOLUTE)
    found = compared(ours.values, stock.values, is_cut=not is_exact, compares_all=True, tolerance=tolerance)
    return found._replace(warnings=new)


@functools.lru_cache(maxsize=4)
def stock_run(pattern: Pattern) -> Run:
    """Train with stock."""
    return run(pattern.build, pattern.drive)


def repeated(pattern: Pattern) -> Outcome:
    """Train with stock twice and compare; what is not finite, or is not trained at all, is an error."""
    one, other = stock_run(pattern), run(pattern.build, pattern.drive)
    for name, value in one.values.items():
        numbers = value if torch.is_tensor(value) else torch.tensor(value if isinstance(value, (int, float)) else 0.0)
        if numbers.is_floating_point() and not math.isfinite(numbers.double().abs().sum().item()):
            return Outcome("error", f"{name} is not finite")
    if pattern.trains and not any(value for name, value in one.values.items() if name.startswith("grad_norm")):
        return Outcome("error", "no gradient")
    return compared(other.values, one.values)


def _changed(pattern: Pattern, remedy: Remedy) -> Callable[[Path], Trainer]:
    def build(folder: Path) -> Trainer:
        trainer = pattern.build(folder)
        remedy.change(trainer)
        return trainer

    return build


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
