"""Trainings by what people set or override: optimizers, callbacks, datasets, samplers, losses of their own."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback

import tiny
from client import BATCH, CUT, Arrange, Client, labelled, out_of_order, texts
from plain_clients import causal, classifier

CUTS = ("micro-batching", CUT, "all")
VIEWS = ("bucketed view", "all")


def incompatible(one: str, other: str, reason: str, fix: str) -> str:
    """Return the message of a row of ``refusals``."""
    return f"{one} and {other} are incompatible: {reason}; expected only one of them. {fix}"


# ---- Optimizers -----------------------------------------------------------------------------------------------------


def optimized(folder: Path, arrange: Arrange, *, optim: str, **settings: Any) -> Trainer:
    """A causal language model by another optimizer; its gradients are far from 0, where Adam would take their sign."""
    return causal(folder, arrange, optim=optim, **{"learning_rate": 1e-3, **settings})


def muon(folder: Path, arrange: Arrange) -> Trainer:
    """Muon of torch, which takes matrices alone; everything else is frozen."""
    trainer = causal(folder, arrange)
    matrices = [parameter for parameter in trainer.model.model.layers.parameters() if parameter.dim() == 2]
    trainer.model.requires_grad_(False)
    for parameter in matrices:
        parameter.requires_grad_(True)
    trainer.optimizer = torch.optim.Muon(matrices, lr=0.01)
    return trainer


class DecayingRates(Trainer):
    """A smaller learning rate for earlier layers."""

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        groups = [
            {"params": list(self.model.bert.encoder.parameters()), "lr": self.args.learning_rate / 10},
            {"params": list(self.model.classifier.parameters())},
        ]
        self.optimizer = torch.optim.SGD(groups, lr=self.args.learning_rate)
        return self.optimizer


# ---- Callbacks and evaluation ---------------------------------------------------------------------------------------


def stopping(folder: Path, arrange: Arrange) -> Trainer:
    """The best model at the end, which is not the last: the loss rises and training stops early."""
    trainer = classifier(
        folder,
        arrange,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        learning_rate=3.0,
        max_steps=8,
    )
    trainer.add_callback(EarlyStoppingCallback(early_stopping_patience=2))
    return trainer


class EverySecondStep(TrainerCallback):
    """Evaluate after each second step, log what is in sight."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_evaluate = state.global_step % 2 == 0

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        state.log_history.append({"seen": sorted(name for name, value in kwargs.items() if value is not None)})


def watched(folder: Path, arrange: Arrange) -> Trainer:
    """A callback of one's own."""
    trainer = classifier(folder, arrange)
    trainer.add_callback(EverySecondStep())
    return trainer


def batched_metrics(folder: Path, arrange: Arrange) -> Trainer:
    """Metrics batch by batch, of classes in place of logits."""
    seen: list[int] = []

    def count(prediction: Any, compute_result: bool = False) -> Mapping[str, float]:
        seen.append(int((prediction.predictions == prediction.label_ids).sum()))
        return {"right": float(sum(seen))} if compute_result else {}

    return classifier(
        folder,
        arrange,
        given={"compute_metrics": count, "preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1)},
        batch_eval_metrics=True,
        eval_accumulation_steps=1,
    )


def evaluated_by_name(folder: Path, arrange: Arrange) -> Trainer:
    """Two datasets to evaluate, by name."""
    trainer = classifier(folder, arrange)
    trainer.eval_dataset = {"first": trainer.eval_dataset, "second": labelled(6, seed=2)}
    return trainer


def predict(trainer: Trainer) -> Mapping[str, Any]:
    """Train and predict."""
    trainer.train()
    found = trainer.predict(labelled(10, seed=4))
    return {"logits": torch.as_tensor(found.predictions), **found.metrics}


# ---- Datasets and samplers ------------------------------------------------------------------------------------------


def streamed(folder: Path, arrange: Arrange) -> Trainer:
    """A stream of examples."""
    rows = list(labelled(16))

    def read() -> Iterator[dict[str, Any]]:
        yield from rows

    return classifier(folder, arrange, data=IterableDataset.from_generator(read))


def transformed(folder: Path, arrange: Arrange) -> Trainer:
    """Texts that are tokenised when they are read."""
    tokenizer = tiny.tokenizer()

    def tokenise(batch: dict[str, Any]) -> dict[str, Any]:
        return {**tokenizer(batch["text"]), "labels": batch["labels"]}

    plain = Dataset.from_dict({"text": texts(16), "labels": [i % 3 for i in range(16)]})
    return classifier(folder, arrange, data=plain.with_transform(tokenise), remove_unused_columns=False)


class OwnSampler(Trainer):
    """Examples drawn by weight."""

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        weights = [1.0, 5.0] * 8
        return torch.utils.data.WeightedRandomSampler(weights, 16, generator=torch.Generator().manual_seed(5))


class OwnDataLoader(Trainer):
    """Batches by a DataLoader of one's own."""

    def get_train_dataloader(self) -> Any:
        kept = [name for name in self.train_dataset[0] if name != "token_type_ids"]
        rows = [{name: row[name] for name in kept} for row in self.train_dataset]
        return self.accelerator.prepare(
            torch.utils.data.DataLoader(rows, batch_size=BATCH, collate_fn=self.data_collator)
        )


# ---- Losses ---------------------------------------------------------------------------------------------------------


class ClassWeights(Trainer):
    """Cross-entropy with a weight for each class."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = torch.nn.functional.cross_entropy(outputs.logits, labels, weight=torch.tensor([1.0, 2.0, 5.0]))
        return (loss, outputs) if return_outputs else loss


class Distilled(Trainer):
    """Half of the loss from a larger model's logits."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs)
        with torch.no_grad():
            asked = self.teacher(**inputs).logits.log_softmax(-1)
        found = outputs.logits.log_softmax(-1)
        divergence = torch.nn.functional.kl_div(found, asked, reduction="batchmean", log_target=True)
        loss = 0.5 * outputs.loss + 0.5 * divergence
        return (loss, outputs) if return_outputs else loss


def distilled(folder: Path, arrange: Arrange) -> Trainer:
    """A small model that learns from a larger one."""
    trainer = classifier(folder, arrange, kind=Distilled)
    trainer.teacher = tiny.bert(seed=1).eval()
    return trainer


def own_loss(folder: Path, arrange: Arrange) -> Trainer:
    """A function for the loss, which divides by the items of the batch itself."""

    def loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        total = torch.nn.functional.cross_entropy(outputs.logits, labels, reduction="sum")
        return total / (len(labels) if num_items_in_batch is None else num_items_in_batch)

    return classifier(folder, arrange, given={"compute_loss_func": loss})


IN_BACKWARD = "weights step within the backward pass, so an interrupted step cannot be repeated"
LAYERWISE = incompatible("micro-batching", "layer-wise optimizer", IN_BACKWARD, "Choose another optim")
DROPPED = incompatible(
    "non-finite detection",
    "layer-wise optimizer",
    "weights step within the backward pass, so a step that is not finite cannot be dropped",
    "Choose another optim",
)
BOTH_RECOVER = incompatible(
    "micro-batching",
    "auto_find_batch_size",
    "both recover from out of memory, and stock's restarts the run with a smaller batch",
    "Leave auto_find_batch_size out",
)
SHRUNK = incompatible(
    "length buckets",
    "auto_find_batch_size",
    "it would shrink the batches that the buckets are made for",
    "Leave auto_find_batch_size out",
)
TARGETS = {"optim_target_modules": ["q_proj", "k_proj"], "optim_args": "rank=4, update_proj_gap=2"}
NARROW = "Muon makes a gradient orthogonal in bfloat16, which rounds sums in another order to other values"
ROUNDED = "bf16 rounds the logits and the gradients of shorter rows otherwise"


def by_optimizer(optim: str, **settings: Any) -> Client:
    """Return a client of this optimizer."""
    return Client(functools.partial(optimized, optim=optim, **settings))


def in_backward(optim: str, **settings: Any) -> Client:
    """Return a client of an optimizer that steps within the backward pass."""
    refuses = {**dict.fromkeys(CUTS, LAYERWISE), "overflow": DROPPED}
    return Client(functools.partial(optimized, optim=optim, max_grad_norm=0.0, **settings), refuses=refuses)


CLIENTS = {
    "optimizer, AdamW": by_optimizer("adamw_torch"),
    "optimizer, fused AdamW": by_optimizer("adamw_torch_fused"),
    "optimizer, Adafactor": by_optimizer("adafactor"),
    "optimizer, 8-bit AdamW (bitsandbytes)": by_optimizer("adamw_8bit"),
    "optimizer, schedule-free AdamW": by_optimizer("schedule_free_adamw"),
    "optimizer, GrokAdamW": by_optimizer("grokadamw"),
    "optimizer, StableAdamW (optimi)": by_optimizer("stable_adamw"),
    "optimizer, GaLore": by_optimizer("galore_adamw", **TARGETS),
    "optimizer, GaLore layer by layer": in_backward("galore_adamw_layerwise", **TARGETS),
    "optimizer, APOLLO": by_optimizer("apollo_adamw", **TARGETS),
    "optimizer, LOMO": in_backward("lomo"),
    "optimizer, Muon of torch": Client(muon, differs={CUT: NARROW}),
    "create_optimizer overridden": Client(functools.partial(classifier, kind=DecayingRates)),
    "early stopping, best model at the end": Client(stopping),
    "callback of one's own": Client(watched),
    "metrics batch by batch": Client(batched_metrics),
    "evaluation of datasets by name": Client(evaluated_by_name),
    "prediction": Client(classifier, drive=predict),
    "auto_find_batch_size": Client(
        functools.partial(classifier, auto_find_batch_size=True),
        refuses={**dict.fromkeys(("micro-batching", CUT), BOTH_RECOVER), **dict.fromkeys(VIEWS, SHRUNK)},
    ),
    "torch_compile": Client(functools.partial(causal, torch_compile=True, torch_compile_backend="eager")),
    "gradient checkpointing": Client(functools.partial(causal, activation_checkpointing=True)),
    "bf16": Client(functools.partial(causal, bf16=True), differs={CUT: ROUNDED}),
    "causal language model, accumulation": Client(
        functools.partial(causal, gradient_accumulation_steps=2, max_steps=2)
    ),
    "stream, IterableDataset": Client(streamed, no_view="a view needs rows by number"),
    "with_transform, texts tokenised when read": Client(
        transformed, lengths=lambda dataset: [len(row["input_ids"]) for row in dataset]
    ),
    "group_by_length": Client(functools.partial(classifier, train_sampling_strategy="group_by_length")),
    "DataLoader workers": Client(functools.partial(classifier, dataloader_num_workers=1, dataloader_drop_last=True)),
    "sampler overridden": Client(
        functools.partial(classifier, kind=OwnSampler), refuses=dict.fromkeys(VIEWS, out_of_order(10, 4, 5, 5))
    ),
    "get_train_dataloader overridden": Client(functools.partial(classifier, kind=OwnDataLoader)),
    "label smoothing, classification": Client(functools.partial(classifier, label_smoothing_factor=0.1)),
    "label smoothing, causal language model": Client(functools.partial(causal, label_smoothing_factor=0.1)),
    "class weights in compute_loss": Client(
        functools.partial(classifier, kind=ClassWeights),
    ),
    "distillation in compute_loss": Client(distilled),
    "compute_loss_func": Client(own_loss),
}
