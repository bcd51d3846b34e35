"""A label for each token, a span, or a sequence from a sequence: losses along the tokens of each row."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from datasets import Dataset
from torch import nn
from transformers import DataCollatorForSeq2Seq, DataCollatorForTokenClassification, DataCollatorWithPadding, Trainer

import tiny
from client import texts
from contrastive_patterns import encoder
from pattern import OfInputs, OfLabels, Pattern, built

LENGTHS = {"num_layers": 1, "num_heads": 2, "d_model": 16, "d_kv": 8, "d_ff": 32}


def tagged(count: int, *, seed: int = 0) -> Dataset:
    """A class for each token; the last third of each text is ignored."""
    rows = tiny.tokenizer()(texts(count, seed=seed))
    labels = [[i % 3 if i <= 2 * len(ids) // 3 else -100 for i in range(len(ids))] for ids in rows["input_ids"]]
    return Dataset.from_dict({**rows, "labels": labels})


def translated(count: int, *, seed: int = 0) -> Dataset:
    """A text for each text."""
    both = tiny.tokenizer()(texts(count, seed=seed), text_target=texts(count, seed=seed + 5, longest=10))
    return Dataset.from_dict({name: both[name] for name in ("input_ids", "attention_mask", "labels")})


def answered(count: int, *, seed: int = 0) -> Dataset:
    """Where in each text its answer begins and ends."""
    rows = tiny.tokenizer()(texts(count, seed=seed))
    lengths = [len(ids) for ids in rows["input_ids"]]
    starts, ends = [length // 3 for length in lengths], [length // 2 for length in lengths]
    return Dataset.from_dict({**rows, "start_positions": starts, "end_positions": ends})


def tagger() -> Any:
    """Return a tiny BERT with three classes for each token."""
    torch.manual_seed(0)
    return transformers.BertForTokenClassification(tiny.bert_config(initializer_range=0.2))


def reader() -> Any:
    """Return a tiny BERT that marks a span."""
    torch.manual_seed(0)
    return transformers.BertForQuestionAnswering(tiny.bert_config(initializer_range=0.2, num_labels=2))


def t5() -> Any:
    """Return a tiny T5."""
    torch.manual_seed(0)
    special = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 3}
    config = transformers.T5Config(vocab_size=100, dropout_rate=0.0, tie_word_embeddings=True, **LENGTHS, **special)
    return transformers.T5ForConditionalGeneration(config)


def bart() -> Any:
    """Return a tiny BART."""
    torch.manual_seed(0)
    halves = {
        f"{half}_{name}": value
        for half in ("encoder", "decoder")
        for name, value in {"layers": 1, "attention_heads": 2, "ffn_dim": 32}.items()
    }
    special = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "decoder_start_token_id": 3}
    config = transformers.BartConfig(
        vocab_size=100,
        d_model=16,
        max_position_embeddings=64,
        dropout=0.0,
        init_std=0.2,
        **halves,
        **special,
        attn_implementation="eager",
    )
    return transformers.BartForConditionalGeneration(config)


# ---- Tokens ---------------------------------------------------------------------------------------------------------


class TokenFocal(OfLabels):
    """A focal loss over the tokens of the batch that have a label."""

    def loss_of(self, outputs: Any, labels: Any) -> Any:
        counted = labels != -100
        entropy = F.cross_entropy(outputs.logits[counted], labels[counted], reduction="none")
        return ((1 - torch.exp(-entropy)) ** 2 * entropy).mean()


class TokenDice(OfLabels):
    """Dice over all tokens of the batch."""

    def loss_of(self, outputs: Any, labels: Any) -> Any:
        mask = (labels != -100)[..., None]
        found = outputs.logits.softmax(-1) * mask
        asked = F.one_hot(labels.clamp(min=0), 3) * mask
        return 1 - ((2 * (found * asked).sum((0, 1)) + 1) / (found.sum((0, 1)) + asked.sum((0, 1)) + 1)).mean()


class Transitions(nn.Module):
    """A CRF: the score of the labelled path against that of all paths, row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = encoder()
        self.emissions = nn.Linear(32, 3)
        self.transitions = nn.Parameter(torch.randn(3, 3) * 0.1)

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None) -> Any:
        scores = self.emissions(self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state)
        mask, path = (labels != -100).to(scores.dtype), labels.clamp(min=0)
        alpha = scores[:, 0]
        gold = scores[:, 0].gather(1, path[:, :1]).squeeze(1)
        for i in range(1, scores.shape[1]):
            on = mask[:, i, None]
            step = (alpha[:, :, None] + self.transitions + scores[:, i, None]).logsumexp(1)
            alpha = on * step + (1 - on) * alpha
            moved = self.transitions[path[:, i - 1], path[:, i]] + scores[:, i].gather(1, path[:, i : i + 1]).squeeze(1)
            gold = gold + on.squeeze(1) * moved
        return {"loss": (alpha.logsumexp(-1) - gold).mean() / 10, "logits": scores}


class SmoothAlong(OfInputs):
    """Neighbouring tokens are to be alike: a penalty along the row beside stock's loss."""

    def loss_of(self, outputs: Any, inputs: Any) -> Any:
        pairs = inputs["attention_mask"][:, 1:] * inputs["attention_mask"][:, :-1]
        steps = (outputs.logits[:, 1:] - outputs.logits[:, :-1]).pow(2).mean(-1)
        return outputs.loss + 0.1 * (steps * pairs).sum() / pairs.sum()


class SpansAndAnswerable(OfInputs):
    """Begin, end, and how sure the span is."""

    def loss_of(self, outputs: Any, inputs: Any) -> Any:
        sure = outputs.start_logits.amax(-1) + outputs.end_logits.amax(-1)
        return outputs.loss + 0.1 * F.softplus(-sure).mean()


# ---- Sequences from sequences ---------------------------------------------------------------------------------------


class OwnSequenceLoss(Trainer):
    """Smoothed cross-entropy over the labels, as a mean over the words of the batch."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        labels = inputs["labels"]
        outputs = model(**inputs)
        loss = nn.CrossEntropyLoss(ignore_index=-100, label_smoothing=0.1)(
            outputs.logits.view(-1, outputs.logits.size(-1)), labels.view(-1)
        )
        return (loss, {"loss": loss}) if return_outputs else loss


class Ranked(Trainer):
    """BRIO-like: a row's mean log-probability is to be higher for longer labels, over the pairs of the batch."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        labels = inputs["labels"]
        outputs = model(**inputs)
        mask = (labels != -100).float()
        found = outputs.logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)
        scores, lengths = (found * mask).sum(-1) / mask.sum(-1), mask.sum(-1)
        worse = (lengths[:, None] > lengths[None]).float()
        loss = outputs.loss + (F.relu(0.1 - (scores[:, None] - scores[None])) * worse).mean()
        return (loss, {"loss": loss}) if return_outputs else loss


class Coverage(Trainer):
    """The attention that each word of the source has had already is not to be given again."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(**inputs, output_attentions=True)
        attention = outputs.cross_attentions[-1].mean(1)
        before = attention.cumsum(1) - attention
        again = torch.minimum(attention, before).sum(-1)
        mask = (inputs["labels"] != -100).float()
        loss = outputs.loss + (again * mask).sum() / mask.sum()
        return (loss, {"loss": loss}) if return_outputs else loss


class AlikeSources(Trainer):
    """In-batch negatives between the encoder's and the decoder's means, beside stock's loss."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(**inputs, output_hidden_states=True)
        one = F.normalize(outputs.encoder_last_hidden_state.mean(1), dim=-1)
        other = F.normalize(outputs.decoder_hidden_states[-1].mean(1), dim=-1)
        loss = outputs.loss + 0.3 * F.cross_entropy(one @ other.T / 0.5, torch.arange(len(one)))
        return (loss, {"loss": loss}) if return_outputs else loss


def sequences(kind: type[Trainer] = Trainer, *, model: Callable[[], Any]) -> Pattern:
    """Return the pattern of an encoder-decoder."""
    tokenizer = tiny.tokenizer()
    collate = functools.partial(DataCollatorForSeq2Seq, tokenizer, padding=True)

    def with_model(**given: Any) -> Trainer:
        given["data_collator"].model = given["model"]  # which makes decoder_input_ids
        return kind(**given)

    return Pattern(built(with_model, model=model, data=translated, collate=collate))


def tags(kind: type[Trainer] = Trainer, *, model: Callable[[], Any] = tagger) -> Pattern:
    """Return the pattern of a class for each token."""
    return Pattern(
        built(kind, model=model, data=tagged, collate=lambda: DataCollatorForTokenClassification(tiny.tokenizer()))
    )


PATTERNS = {
    "tags, focal": tags(TokenFocal),
    "tags, dice over the batch": tags(TokenDice),
    "tags, CRF": tags(model=Transitions),
    "tags, smooth along the row": tags(SmoothAlong),
    "spans, and how sure": Pattern(
        built(
            SpansAndAnswerable, model=reader, data=answered, collate=lambda: DataCollatorWithPadding(tiny.tokenizer())
        )
    ),
    "T5, own loss": sequences(OwnSequenceLoss, model=t5),
    "T5, rows ranked": sequences(Ranked, model=t5),
    "T5, sources and targets alike": sequences(AlikeSources, model=t5),
    "BART, own loss": sequences(OwnSequenceLoss, model=bart),
    "BART, coverage": sequences(Coverage, model=bart),
}
