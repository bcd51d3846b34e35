"""Collators and datasets that draw random numbers or count."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from datasets import IterableDataset
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorWithPadding,
    Trainer,
)

import tiny
from client import labelled, texts
from contrastive_patterns import Embedder
from language_patterns import sentences
from loss_patterns import Focal
from pattern import Pattern, built

Rows = list[dict[str, Any]]
Collate = Callable[[Rows], dict[str, Any]]


def padding() -> DataCollatorWithPadding:
    """Return the collator that the others begin with."""
    return DataCollatorWithPadding(tiny.tokenizer())


def masked_model() -> Any:
    """Return a tiny BERT that guesses words."""
    torch.manual_seed(0)
    return transformers.BertForMaskedLM(tiny.bert_config(initializer_range=0.1))


# ---- Random and counting --------------------------------------------------------------------------------------------


def seeded_words() -> DataCollatorForLanguageModeling:
    """Return the collator of transformers with a generator of its own."""
    return DataCollatorForLanguageModeling(tiny.tokenizer(), mlm_probability=0.3, seed=42)


class OwnMaskedLoss(Trainer):
    """A mean over each row's masked words, and then over the rows."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        labels = inputs.pop("labels")
        logits = model(**inputs).logits
        losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        counts = (labels != -100).sum(-1)
        loss = (losses.sum(-1) / counts.clamp(min=1)).mean()
        return (loss, {"logits": logits}) if return_outputs else loss


class RandomCrop:
    """Keeps a random stretch of each text."""

    def __init__(self, length: int = 6) -> None:
        self.generator = torch.Generator().manual_seed(5)
        self.length = length
        self.pad = padding()

    def __call__(self, rows: Rows) -> dict[str, Any]:
        cropped = []
        for row in rows:
            room = max(1, len(row["input_ids"]) - self.length)
            first = int(torch.randint(0, room, (), generator=self.generator))
            kept = {name: row[name][first : first + self.length] for name in ("input_ids", "attention_mask")}
            cropped.append({**kept, "labels": row["labels"]})
        return self.pad(cropped)


class WordDropout:
    """Replaces words by the mask, by a generator of numpy."""

    def __init__(self) -> None:
        self.random = np.random.RandomState(3)
        self.pad = padding()

    def __call__(self, rows: Rows) -> dict[str, Any]:
        batch = self.pad(rows)
        dropped = torch.from_numpy(self.random.rand(*batch["input_ids"].shape) < 0.2)
        batch["input_ids"] = batch["input_ids"].masked_fill(dropped & (batch["input_ids"] > 4), 4)
        return batch


class Counter:
    """Tells each batch its number, as a tensor without dimensions."""

    def __init__(self) -> None:
        self.calls = 0
        self.pad = padding()

    def __call__(self, rows: Rows) -> dict[str, Any]:
        self.calls += 1
        return {**self.pad(rows), "temperature": torch.tensor(1.0 + 0.5 * self.calls)}


class Tempered(Trainer):
    """Logits over the temperature of the batch."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        temperature, labels = inputs.pop("temperature"), inputs.pop("labels")
        outputs = model(**inputs)
        loss = F.cross_entropy(outputs.logits / temperature, labels)
        return (loss, outputs) if return_outputs else loss


class MixedByCollator:
    """An order and a share for the hidden states of the batch."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(9)
        self.pad = padding()

    def __call__(self, rows: Rows) -> dict[str, Any]:
        order = torch.randperm(len(rows), generator=self.generator)
        share = 0.5 + 0.5 * torch.rand(1, generator=self.generator)
        return {**self.pad(rows), "order": order, "share": share}


class MixedByOrder(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        order, share, labels = inputs.pop("order"), inputs.pop("share"), inputs.pop("labels")
        pooled = self.model.bert(**inputs).pooler_output
        logits = self.model.classifier(share * pooled + (1 - share) * pooled[order])
        losses = share * F.cross_entropy(logits, labels) + (1 - share) * F.cross_entropy(logits, labels[order])
        return (losses.squeeze(), {"logits": logits}) if return_outputs else losses.squeeze()


class DrawnNegatives:
    """A few texts of the whole dataset for each batch, which all of its rows share."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(4)
        self.tokenizer = tiny.tokenizer()
        self.pool = texts(30, seed=8)

    def __call__(self, rows: Rows) -> dict[str, Any]:
        drawn = torch.randint(0, 30, (3,), generator=self.generator).tolist()
        columns = {name: [row[name] for row in rows] for name in ("query", "passage")}
        columns["negatives"] = [self.pool[i] for i in drawn]
        return {name: dict(self.tokenizer(some, padding=True, return_tensors="pt")) for name, some in columns.items()}


class AgainstDrawn(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        query, passage, negatives = (model(**inputs[name]) for name in ("query", "passage", "negatives"))
        scores = torch.cat([(query * passage).sum(-1, keepdim=True), query @ negatives.T], -1) / 0.2
        loss = F.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.long))
        return (loss, {"scores": scores}) if return_outputs else loss


def asked(count: int, *, seed: int = 0) -> Rows:
    """A query and its passage."""
    return [
        dict(zip(("query", "passage"), both, strict=True))
        for both in zip(texts(count, seed=seed), texts(count, seed=seed + 9), strict=True)
    ]


class Augmented(torch.utils.data.Dataset):
    """Texts of which a word is replaced each time that they are read."""

    def __init__(self, count: int, *, seed: int = 0) -> None:
        self.rows = list(labelled(count, seed=seed))
        self.random = np.random.default_rng(seed)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = dict(self.rows[index])
        ids = list(row["input_ids"])
        ids[int(self.random.integers(len(ids)))] = 4
        return {**row, "input_ids": ids}


def streamed(count: int, *, seed: int = 0) -> Any:
    """A stream of texts that are drawn when they are read."""

    def read() -> Iterator[dict[str, Any]]:
        generator = torch.Generator().manual_seed(seed)
        for i in range(count):
            length = int(torch.randint(4, 15, (), generator=generator))
            ids = torch.randint(5, 100, (length,), generator=generator).tolist()
            yield {"input_ids": ids, "attention_mask": [1] * length, "labels": i % 3}

    return IterableDataset.from_generator(read)


PATTERNS = {
    "collator, masked words with a seed": Pattern(
        built(OwnMaskedLoss, model=masked_model, data=sentences, collate=seeded_words)
    ),
    "collator, masked words with a seed, stock's loss": Pattern(
        built(model=masked_model, data=sentences, collate=seeded_words)
    ),
    "collator, random crop": Pattern(built(Focal, collate=RandomCrop)),
    "collator, words dropped by numpy": Pattern(built(Focal, collate=WordDropout)),
    "collator, counter and temperature": Pattern(built(Tempered, collate=Counter, remove_unused_columns=False)),
    "collator, order and share of a mixup": Pattern(
        built(MixedByOrder, collate=MixedByCollator, remove_unused_columns=False)
    ),
    "collator, negatives drawn for the batch": Pattern(
        built(AgainstDrawn, model=Embedder, data=asked, collate=DrawnNegatives, remove_unused_columns=False),
        fits=3,
    ),
    "dataset, augmented when read": Pattern(built(Focal, data=Augmented)),
    "dataset, a stream": Pattern(built(Focal, data=streamed)),
}
