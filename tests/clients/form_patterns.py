"""Forms of data: nested, ragged, by name, with strings, positions and masks of their own."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from datasets import Dataset
from torch import nn
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForMultipleChoice,
    Trainer,
)

import tiny
from client import texts
from collator_patterns import Collate, Rows, padding
from contrastive_patterns import Embedder, encoder
from language_patterns import OwnShift, causal, llama
from loss_patterns import Focal
from model_patterns import Headed
from pattern import STARVED, OfLabels, Pattern, built

# ---- Forms ----------------------------------------------------------------------------------------------------------


def twice() -> Collate:
    """Return a collator that gives every text two rows, one below the other."""
    pad = padding()
    return lambda rows: pad([row for row in rows for _ in range(2)])


class TwoRowsEach(Trainer):
    """SimCSE on such rows, which noise of the position makes different."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        ids = inputs["input_ids"].clone()
        ids[1::2] = ids[1::2].masked_fill((ids[1::2] + torch.arange(ids.shape[1])) % 5 == 0, 4)
        vectors = model(ids, inputs["attention_mask"])
        one, other = vectors[::2], vectors[1::2]
        loss = F.cross_entropy(one @ other.T / 0.3, torch.arange(len(one)))
        return (loss, {"vectors": vectors}) if return_outputs else loss


def longest_first() -> Collate:
    """Return a collator that sorts its rows."""
    pad = padding()
    return lambda rows: pad(sorted(rows, key=lambda row: -len(row["input_ids"])))


def with_strings() -> Collate:
    """Return a collator that leaves texts and sources as lists beside the tensors."""
    pad = padding()

    def collate(rows: Rows) -> dict[str, Any]:
        names = [f"source {len(row['input_ids']) % 2}" for row in rows]
        return {**pad(rows), "sources": names, "lengths": [len(row["input_ids"]) for row in rows]}

    return collate


class BySource(Trainer):
    """The rows of one source count twice."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        sources, lengths = inputs.pop("sources"), inputs.pop("lengths")
        outputs = model(**inputs)
        losses = F.cross_entropy(outputs.logits, inputs["labels"], reduction="none")
        weights = torch.tensor([2.0 if name == "source 1" else 1.0 for name in sources])
        loss = (losses * weights * torch.tensor(lengths)).sum() / 40
        return (loss, outputs) if return_outputs else loss


def ragged() -> Collate:
    """Return a collator that pads nothing: a list of rows of any length."""

    def collate(rows: Rows) -> dict[str, Any]:
        return {
            "texts": [torch.tensor(row["input_ids"]) for row in rows],
            "labels": torch.tensor([row["labels"] for row in rows]),
        }

    return collate


class Ragged(nn.Module):
    """Runs each row by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = encoder()
        self.head = nn.Linear(32, 3)

    def forward(self, texts: Any, labels: Any = None) -> Any:
        first = torch.cat([self.encoder(input_ids=text[None]).last_hidden_state[:, 0] for text in texts])
        logits = self.head(first)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def two_labels() -> Collate:
    """Return a collator whose labels are a dictionary."""
    pad = padding()

    def collate(rows: Rows) -> dict[str, Any]:
        batch = dict(pad(rows))
        long = (batch["attention_mask"].sum(-1) > 10).float()
        return {**batch, "labels": {"kind": batch["labels"], "is_long": long}}

    return collate


class LabelsByName(Headed):
    """Reads labels by name."""

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None) -> Any:
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state[:, 0]
        logits = self.head(hidden)
        long = F.binary_cross_entropy_with_logits(hidden.mean(-1), labels["is_long"])
        return {"loss": F.cross_entropy(logits, labels["kind"]) + long, "logits": logits}


def paired(count: int, *, seed: int = 0) -> Dataset:
    """Two texts in one row, told by their type."""
    rows = tiny.tokenizer()(texts(count, seed=seed), texts(count, seed=seed + 3, longest=10))
    return Dataset.from_dict({**rows, "labels": [i % 3 for i in range(count)]})


def chosen(count: int, *, seed: int = 0) -> Dataset:
    """Two endings for each text."""
    tokenizer, endings = tiny.tokenizer(), [texts(count, seed=seed + i, longest=8) for i in (1, 2)]
    pairs = [tokenizer([text] * 2, list(both)) for text, *both in zip(texts(count, seed=seed), *endings, strict=True)]
    columns = {name: [pair[name] for pair in pairs] for name in ("input_ids", "attention_mask")}
    return Dataset.from_dict({**columns, "labels": [i % 2 for i in range(count)]})


def choosing() -> Any:
    """Return a tiny BERT that chooses."""
    torch.manual_seed(0)
    return transformers.BertForMultipleChoice(tiny.bert_config(initializer_range=0.2))


class ChoiceMargin(OfLabels):
    """The right ending above the best wrong one."""

    def loss_of(self, outputs: Any, labels: Any) -> Any:
        right = outputs.logits.gather(1, labels[:, None]).squeeze(1)
        wrong = outputs.logits.gather(1, 1 - labels[:, None]).squeeze(1)
        return F.relu(1 - right + wrong).mean()


# ---- Positions and masks of language models -------------------------------------------------------------------------


def with_positions() -> Collate:
    """Return a collator that pads on the left and counts the positions of what is no padding."""
    words = DataCollatorForLanguageModeling(tiny.tokenizer("left"), mlm=False)

    def collate(rows: Rows) -> dict[str, Any]:
        batch = dict(words(rows))
        return {**batch, "position_ids": (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0)}

    return collate


def with_square_masks() -> Collate:
    """Return a collator that writes out who sees whom: ``(batch, 1, seq, seq)``; a row's first three see each other."""
    words = DataCollatorForLanguageModeling(tiny.tokenizer(), mlm=False)

    def collate(rows: Rows) -> dict[str, Any]:
        batch = dict(words(rows))
        length = batch["input_ids"].shape[1]
        sees = torch.ones(length, length).tril().bool()
        sees[:3, :3] = True
        visible = sees & batch.pop("attention_mask")[:, None, None].bool()
        return {**batch, "attention_mask": torch.where(visible, 0.0, torch.finfo(torch.float32).min)}

    return collate


def one_long_row() -> Collate:
    """Return a collator that joins the texts of a batch into one row, told apart by their positions."""

    def collate(rows: Rows) -> dict[str, Any]:
        ids = torch.cat([torch.tensor(row["input_ids"]) for row in rows])
        positions = torch.cat([torch.arange(len(row["input_ids"])) for row in rows])
        return {"input_ids": ids[None], "position_ids": positions[None], "labels": ids.where(positions > 0, -100)[None]}

    return collate


PATTERNS = {
    "collator, two rows for each text": Pattern(built(TwoRowsEach, model=Embedder, collate=twice), fits=4),
    "collator, sorted by length": Pattern(built(Focal, collate=longest_first)),
    "collator, strings and lists": Pattern(
        built(BySource, collate=with_strings, remove_unused_columns=False, learning_rate=0.01)
    ),
    "collator, a list of rows": Pattern(
        built(model=Ragged, collate=ragged, remove_unused_columns=False), left_out=STARVED
    ),
    "collator, labels by name": Pattern(built(model=LabelsByName, collate=two_labels)),
    "text pairs": Pattern(built(Focal, data=paired)),
    "choices": Pattern(
        built(
            ChoiceMargin, model=choosing, data=chosen, collate=lambda: DataCollatorForMultipleChoice(tiny.tokenizer())
        ),
        fits=4,
    ),
    "positions, padding on the left": causal(OwnShift, collate=with_positions),
    "masks of four dimensions": causal(
        OwnShift, model=functools.partial(llama, attn_implementation="eager"), collate=with_square_masks
    ),
    "one long row of all texts": replace(
        causal(
            OwnShift,
            model=functools.partial(llama, max_position_embeddings=128),
            collate=one_long_row,
        ),
        left_out=STARVED,
    ),
}
