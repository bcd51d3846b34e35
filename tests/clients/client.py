"""Clients: other people's trainings, which must come out the same with this package. The set-ups they are tried in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import LlamaForCausalLM, TrainerCallback, TrainingArguments

import tiny
from hf_memopt import EvaluationGuardCallback, MemoryReportCallback, MicrobatchCallback, OverflowCallback

BATCH = 4
STEPS = 4
CUT = "micro-batches of 2"  # the only set-up in which a batch is cut
VIEW = ("bucketed view", "all")
PASSED = "passed"  # to the constructor of the Trainer, without attach
WHOLE = ("micro-batching", "all", PASSED)  # micro-batching as long as memory suffices
ALL: tuple[Callable[[], TrainerCallback], ...] = (
    MemoryReportCallback,
    MicrobatchCallback,
    OverflowCallback,
    lambda: EvaluationGuardCallback(reduce=None),
)

SETUPS: Mapping[str, tuple[Callable[[], TrainerCallback], ...]] = {
    "attach": (),
    "memory report": (MemoryReportCallback,),
    "micro-batching": (MicrobatchCallback,),
    CUT: (lambda: MicrobatchCallback(max_examples=2),),
    "overflow": (OverflowCallback,),
    "evaluation guard": (lambda: EvaluationGuardCallback(reduce=None),),
    "bucketed view": (),
    "all": ALL,
    PASSED: ALL,
}
"""The callbacks that ``attach`` gets; the set-ups of ``VIEW`` read a bucketed view too."""

Arrange = Callable[[Any], Any]  # puts a train dataset into the order of the set-up: as it is, by hand, as a view


@dataclass(frozen=True, eq=False)
class Client:
    """A training.

    Args:
        build: returns the trainer, given a folder for its output and what arranges its train dataset.
        drive: trains and returns what else is compared, metrics by name.
        lengths: of the examples of a train dataset, for views; by the column ``input_ids`` unless given.
        refuses: the whole message of each set-up that is refused; floating-point figures in it stand as ``#``.
            ``passed`` is refused as its callbacks are one by one, unless it is named; "" where it is not.
        cannot_cut: the whole message where batches cannot be cut. Where nothing is cut, the same refusal and a
            training like stock's are both right.
        no_view: why the training cannot read a view; ``all`` runs without it then.
        differs: why a set-up differs from stock by design.
        correct: does to a stock trainer by hand what ``attach`` is to do, so that nothing differs any more.
        ranks: processes.
    """

    build: Callable[[Path, Arrange], Any]
    drive: Callable[[Any], Mapping[str, Any]] | None = None
    lengths: Callable[[Any], list[int]] | None = None
    refuses: Mapping[str, str] = field(default_factory=dict)
    cannot_cut: str = ""
    no_view: str = ""
    differs: Mapping[str, str] = field(default_factory=dict)
    correct: Callable[[Any], None] | None = None
    ranks: int = 1


def train_and_evaluate(trainer: Any) -> Mapping[str, Any]:
    """Train, then evaluate where there is something to evaluate."""
    trainer.train()
    return trainer.evaluate() if trainer.eval_dataset is not None else {}


def arguments(folder: Path, kind: type[Any] = TrainingArguments, **settings: Any) -> Any:
    """Return training arguments of any kind: 4 steps of 4 examples, SGD, everything logged."""
    chosen = {
        "output_dir": str(folder),
        "per_device_train_batch_size": BATCH,
        "per_device_eval_batch_size": BATCH,
        "max_steps": STEPS,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,  # TRL's default is True
        "optim": "sgd",  # Adam's first steps turn a rounding of a gradient near zero into a step of another sign
        "learning_rate": 0.05,
        "seed": 3,
        "dataloader_pin_memory": False,
    }
    return kind(**{**chosen, **settings})


def texts(count: int, *, shortest: int = 3, longest: int = 20, seed: int = 0) -> list[str]:
    """Return texts of the words w0 to w94, of mixed lengths."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, size: int) -> list[int]:
        return torch.randint(low, high, (size,), generator=generator).tolist()

    return [" ".join(f"w{i}" for i in draw(0, 95, length)) for length in draw(shortest, longest + 1, count)]


def labelled(count: int = 16, *, seed: int = 0, **columns: list[Any]) -> Dataset:
    """Return tokenised texts of three classes, and more columns."""
    encoded = tiny.tokenizer()(texts(count, seed=seed))
    return Dataset.from_dict({**encoded, "labels": [i % 3 for i in range(count)], **columns})


def llama(kind: type[Any] = LlamaForCausalLM, **settings: Any) -> Any:
    """Return a tiny Llama of any head that a TRL trainer can take."""
    torch.manual_seed(0)
    return kind(tiny.llama_config(hidden_size=16, num_hidden_layers=1, max_position_embeddings=128, **settings))


def words(column: str) -> Callable[[Any], list[int]]:
    """Return what counts the words of a column of texts."""
    return lambda dataset: [len(text.split()) for text in dataset[column]]


def not_splittable(model: str, names: str, reason: str, part: str = "") -> str:
    """Return the message of ``NotSplittableError`` at the first step, with a batch of these names."""
    named = f"Name a part whose rows are independent: MicrobatchCallback(backbone={part!r}), or take "
    return (
        f"model={model} cannot be trained in micro-batches at step 1 (a batch of {names}): {reason}; expected rows "
        f"that do not depend on each other. {named if part else 'Take '}MicrobatchCallback out of callbacks= and lower "
        "per_device_train_batch_size."
    )


def out_of_order(*positions: int) -> str:
    """Return the message of a view whose positions are read in another order."""
    return (
        f"positions={list(positions)} ... read a bucketed view out of order; expected one after the other, or the "
        'buckets are lost. Pass TrainingArguments(..., train_sampling_strategy="sequential"), or shuffle=False to a '
        "DataLoader"
    )
