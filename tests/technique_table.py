"""Every technique as one row: how to use it, and the slow obvious way to the same weights with stock alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from bitsandbytes.optim import AdamW
from transformers import DataCollatorWithPadding, Trainer, TrainerCallback

import hf_memopt as m
import tiny
from hf_memopt import attach
from hf_memopt.technique_list import TECHNIQUES

LENGTHS = (12, 5, 9, 3, 7, 12, 4, 6)
STEPS = 4
EIGHT_BIT = {"optim": "adamw_bnb_8bit"}


class Technique(NamedTuple):
    """How a technique is used, and what stock has to be told to come to the same weights without it."""

    callback: Callable[[], TrainerCallback] | None = None
    reference: Callable[[], TrainerCallback] | None = None
    settings: Mapping[str, Any] = MappingProxyType({})
    tolerance: float = 0.0  # largest difference of a weight after the run
    model: Callable[[], torch.nn.Module] | None = None  # where another than ``classifier`` is needed


class FrozenByHand(TrainerCallback):
    """Stock's way to freeze."""

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        model.bert.embeddings.requires_grad_(False)


TABLE = {
    "length buckets": Technique(),
    "freezing": Technique(lambda: m.FreezeCallback("embeddings"), FrozenByHand),
    "32-bit embeddings": Technique(m.EmbeddingBitsCallback, settings=EIGHT_BIT),
    "gradient release": Technique(),
    "sparse tied embedding": Technique(
        m.TiedEmbeddingCallback, model=lambda: tiny.tied_bert(vocab_size=200, num_hidden_layers=3)
    ),
    # the softmax's gradient by other instructions: one rounding of float32 per step
    "fused cross-entropy": Technique(m.FusedCrossEntropyCallback, tolerance=1e-7),
    "16-bit weights": Technique(),  # the reference is MastersByHand
    "checkpointing policy": Technique(lambda: m.CheckpointingCallback("selective")),
    # sums in another order: one rounding of float32 per tile
    "tiled layers": Technique(lambda: m.TiledLayersCallback(16), tolerance=1e-7),
    "streamed layers": Technique(m.StreamedLayersCallback, model=lambda: classifier(num_hidden_layers=3)),
    "optimizer state on the host": Technique(lambda: m.OptimizerStateOnHostCallback("16KiB")),
    # sums in another order: one rounding of float32 per micro-batch
    "micro-batching": Technique(lambda: m.MicrobatchCallback(max_tokens=16), tolerance=1e-7),
    "non-finite detection": Technique(m.OverflowCallback),
    "precision": Technique(m.PrecisionCallback),
    "evaluation guard": Technique(lambda: m.EvaluationGuardCallback(reduce="argmax")),
    "memory report": Technique(m.MemoryReportCallback),
    "sharded checkpoints": Technique(m.ShardedCheckpointCallback),
}
assert tuple(TABLE) == tuple(TECHNIQUES)


WITHOUT_STREAMS = set(TECHNIQUES) - {"streamed layers"}
GROUPS = {
    "with micro-batches": WITHOUT_STREAMS - {"gradient release", "32-bit embeddings", "16-bit weights"},
    "with 8-bit state": WITHOUT_STREAMS - {"gradient release", "micro-batching", "fused cross-entropy", "tiled layers"},
    "with released gradients": WITHOUT_STREAMS
    - {"optimizer state on the host", "micro-batching", "non-finite detection", "fused cross-entropy", "tiled layers"},
    "with released gradients and fused loss": WITHOUT_STREAMS
    - {"optimizer state on the host", "micro-batching", "non-finite detection", "32-bit embeddings", "16-bit weights"},
    "with micro-batches and 8-bit state": {"micro-batching", "32-bit embeddings", "16-bit weights"},
    "with fused loss, tiles and 8-bit state": {"fused cross-entropy", "tiled layers", "32-bit embeddings"},
    "with fused loss, tiles and 16-bit weights": {"fused cross-entropy", "tiled layers", "16-bit weights"},
    "with streamed layers": set(TECHNIQUES)
    - {
        *("micro-batching", "checkpointing policy", "tiled layers", "optimizer state on the host"),
        *("gradient release", "32-bit embeddings", "16-bit weights"),
    },
    "with streamed layers and released gradients": {
        *("streamed layers", "gradient release", "32-bit embeddings", "16-bit weights")
    },
}
"""Sets in which every pair that is not refused stands."""


def same(one: Any, other: Any) -> bool:
    """Return whether two nested values have the same keys, dtypes and numbers, to the bit, on whatever device."""
    if torch.is_tensor(one):
        return torch.is_tensor(other) and one.dtype == other.dtype and torch.equal(one.cpu(), other.cpu())
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(value, other[name]) for name, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def fits(name: str, other: str) -> bool:
    """Return whether a technique is not refused beside another one, or with a setting."""
    return other not in TECHNIQUES[name].refused and (other not in TECHNIQUES or name not in TECHNIQUES[other].refused)


def tolerance(names: Iterable[str]) -> float:
    """Return the largest difference of a weight after a run with these techniques."""
    if {"fused cross-entropy", "16-bit weights"} <= set(names):
        return 2**-8  # the last bit of a bfloat16 weight of 1
    if {"fused cross-entropy", "32-bit embeddings"} <= set(names):
        return 5e-3  # a rounding of float32 moves an 8-bit state by one of its codes: 10 % of an update of 0.05
    return max(TABLE[name].tolerance for name in names)


class BertForSequenceClassification(transformers.BertForSequenceClassification):
    """A classifier whose head can be fused with its loss, as that of a language model."""

    def get_output_embeddings(self) -> torch.nn.Module:
        """Return the head, of three classes."""
        return self.classifier


def classifier(**settings: Any) -> BertForSequenceClassification:
    """Return the model of most rows; 6,400 elements of embeddings, large enough for an 8-bit state."""
    torch.manual_seed(0)
    return BertForSequenceClassification(tiny.bert_config(vocab_size=200, **settings))


class Run(NamedTuple):
    """A trained Trainer, its losses and its metrics."""

    trainer: Trainer
    losses: list[float]
    metrics: dict[str, float]


def examples(count: int = 16) -> list[dict[str, Any]]:
    """Classification examples of mixed lengths."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for i in range(count):
        ids = torch.randint(5, 100, (LENGTHS[i % len(LENGTHS)],), generator=generator).tolist()
        rows.append({"input_ids": ids, "attention_mask": [1] * len(ids), "labels": i % 3})
    return rows


def accuracy(prediction: Any) -> dict[str, float]:
    """Of logits, or of what is left of them after argmax."""
    found = prediction.predictions
    found = found.argmax(-1) if found.ndim == 2 else found
    return {"accuracy": float(np.mean(found == prediction.label_ids))}


def model_of(names: Iterable[str]) -> torch.nn.Module:
    """Return a model with which all of these techniques work."""
    return next((build for name in names if (build := TABLE[name].model) is not None), classifier)()


def make_trainer(
    names: Iterable[str],
    folder: Path,
    *,
    use: bool = True,
    model: Callable[[], torch.nn.Module] | None = None,
    model_init: Callable[[], torch.nn.Module] | None = None,
    train_dataset: Any = None,
    attaches: bool = True,
    **settings: Any,
) -> Trainer:
    """Return a Trainer on a tiny BERT with the named techniques, attached; or, not ``use``, stock's way to the same.

    Not ``attaches``: the callbacks are passed, and that is all.
    """
    names = tuple(names)
    asked = {"learning_rate": 0.05, "per_device_train_batch_size": 4, "max_steps": STEPS, "logging_strategy": "steps"}
    asked |= {"logging_steps": 1, "train_sampling_strategy": "sequential"}
    for name in names:
        asked |= TABLE[name].settings
    asked |= settings
    chosen = [TABLE[name].callback if use else TABLE[name].reference for name in names]
    if use and {"micro-batching", "32-bit embeddings"} <= set(names):
        # whole, since an 8-bit state turns a rounding of float32 into a step of its scale
        chosen[names.index("micro-batching")] = m.MicrobatchCallback
    rows = examples() if train_dataset is None else train_dataset
    data = {"train_dataset": rows, "data_collator": DataCollatorWithPadding(tiny.tokenizer())}
    if "length buckets" in names:
        data = {"train_dataset": m.bucketed(rows, batch_size=4), "data_collator": m.BucketedCollator(tiny.tokenizer())}
    built = model_of(names) if model is None else model()
    trainer = Trainer(
        model=None if model_init else built.bfloat16() if "16-bit weights" in names else built,
        model_init=model_init,
        args=tiny.arguments(folder, **asked),
        callbacks=[build() for build in chosen if build is not None],
        compute_metrics=accuracy,
        eval_dataset=examples(8),
        optimizer_cls_and_kwargs=_optimizer(names, asked, use=use),
        **data,
    )
    return attach(trainer) if attaches else trainer


def _optimizer(names: tuple[str, ...], settings: dict[str, Any], *, use: bool) -> tuple[Any, dict[str, Any]] | None:
    """Return the class that the Trainer would choose by itself with what the techniques make of it, or in their place
    masters by hand; None to leave the Trainer the choice.
    """
    is_released, is_rounded = use and "gradient release" in names, "16-bit weights" in names
    if not (is_released or is_rounded):
        return None
    is_8bit = settings.get("optim") == EIGHT_BIT["optim"]
    kind: Any = AdamW if is_8bit else torch.optim.SGD
    options = {"optim_bits": 8, "betas": (0.9, 0.999), "eps": 1e-8} if is_8bit else {}
    if is_rounded:
        kind = m.low_memory_optimizer(kind, rounding="kahan") if use else masters_by_hand(kind)
    return m.low_memory_optimizer(kind, release=True) if is_released else kind, {
        "lr": settings["learning_rate"],
        **options,
    }


def masters_by_hand(kind: Any) -> Any:
    """Return a class that steps float32 copies of all weights, and rounds them to 16 bits after each step."""

    class MastersByHand(kind):
        __module__ = kind.__module__  # where stock reads "bitsandbytes"

        def step(self, closure: Any = None) -> Any:
            if hasattr(self, "check_overrides"):
                self.check_overrides()  # by position from now on: bitsandbytes does not know the copies
            masters, groups = vars(self).setdefault("masters", {}), self.param_groups
            for parameter in (parameter for group in groups for parameter in group["params"]):
                master = masters.setdefault(parameter, torch.nn.Parameter(parameter.detach().float()))
                master.grad = None if parameter.grad is None else parameter.grad.float()
            self.param_groups = [{**group, "params": [masters[p] for p in group["params"]]} for group in groups]
            loss = super().step(closure)
            self.param_groups = groups
            for parameter, master in masters.items():
                parameter.detach().copy_(to_nearest(master.detach()))
            return loss

    return MastersByHand


def to_nearest(weight: torch.Tensor) -> torch.Tensor:
    """Round float32 to bfloat16, halves away from zero."""
    bits = weight.view(torch.int32) + 2**15
    return ((bits >> 16) << 16).view(torch.float32).bfloat16()


def run(names: Iterable[str], folder: Path, *, use: bool = True, resume: Any = None, **settings: Any) -> Run:
    """Train and evaluate."""
    trainer = make_trainer(names, folder, use=use, **settings)
    trainer.train(resume_from_checkpoint=resume)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    metrics = trainer.evaluate()
    return Run(trainer, losses, {name: metrics[name] for name in ("eval_loss", "eval_accuracy")})
