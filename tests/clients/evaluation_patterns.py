"""Evaluations as people write them: own prediction steps, losses of the whole batch, metrics that remember."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from transformers import DataCollatorForSeq2Seq, Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer

import tiny
from batch_patterns import EntropyOfTheMean, HardHalf, PairwiseRanking
from client import labelled, texts
from contrastive_patterns import InBatchNegatives, WithContrast, of_pairs
from language_patterns import llama, sentences, with_words
from model_patterns import GroupAttention, grouped, headed
from pattern import Pattern, bert, built, correct
from sequence_patterns import t5, translated


def evaluate(trainer: Trainer) -> Mapping[str, Any]:
    """Evaluate without training."""
    found: Mapping[str, Any] = trainer.evaluate()
    return found


def predict(trainer: Trainer) -> Mapping[str, Any]:
    """Predict, and return the predictions too."""
    found = trainer.predict(trainer.eval_dataset)
    arrays = found.predictions if isinstance(found.predictions, tuple) else (found.predictions,)
    return {**found.metrics, **{f"predictions {i}": torch.as_tensor(array) for i, array in enumerate(arrays)}}


def evaluated(kind: Any = Trainer, *, drive: Any = evaluate, is_narrow: bool = False, **more: Any) -> Pattern:
    """Return the pattern of an evaluation of ten examples, four at a time."""
    return Pattern(built(kind, evaluated=10, **more), drive, trains=False, evaluates=True, is_narrow=is_narrow)


# ---- Own prediction steps -------------------------------------------------------------------------------------------


class LabelsTakenOut(Trainer):
    """Takes the labels out of the prepared inputs before the model is called."""

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        inputs = self._prepare_inputs(inputs)
        labels = inputs.pop("labels")
        with torch.no_grad():
            logits = model(**inputs).logits
        return F.cross_entropy(logits, labels), logits, labels


class LabelsTakenOutOfTheBatch(Trainer):
    """The same with the inputs as they come."""

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        labels = inputs.pop("labels")
        with torch.no_grad():
            logits = model(**inputs).logits
        return F.cross_entropy(logits, labels).detach(), logits.softmax(-1), labels


class PromptsOnly(Seq2SeqTrainer):
    """As LLaMA-Factory: the labels are not shown to the generation, and returned beside it."""

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None, **settings: Any
    ) -> Any:
        labels = inputs.pop("labels", None) if self.args.predict_with_generate else inputs.get("labels")
        loss, generated, _ = super().prediction_step(
            model, inputs, prediction_loss_only=prediction_loss_only, ignore_keys=ignore_keys, **settings
        )
        return loss, generated, labels


class OwnLoss(Seq2SeqTrainer):
    """The model's loss and a penalty on its logits, beside a generation."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(**inputs)
        loss = outputs.loss + 1e-3 * outputs.logits.logsumexp(-1).pow(2).mean()
        return (loss, outputs) if return_outputs else loss


class Counted(Trainer):
    """Counts the examples that it has seen, and keeps their predictions."""

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        found = super().prediction_step(model, inputs, *args, **kwargs)
        self.seen += len(inputs["labels"])
        self.kept.append(found[1].float().mean().item() * len(inputs["labels"]))
        return found

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        self.seen, self.kept = 0, []
        metrics: dict[str, float] = super().evaluate(*args, **kwargs)
        return {**metrics, "eval_seen": float(self.seen), "eval_mean": sum(self.kept) / self.seen}


class RecallInBatch(Trainer):
    """A metric of the rows of a batch among themselves, in place of logits."""

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad():
            query, passage = model(**inputs["query"]), model(**inputs["passage"])
        scores = query @ passage.T
        asked = torch.arange(len(scores))
        hits = (scores.argmax(-1) == asked).float()
        return F.cross_entropy(5 * scores, asked), hits, hits


class LossOfEachRow(Trainer):
    """A loss without a mean."""

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad():
            logits = model(**inputs).logits
            losses = F.cross_entropy(logits, inputs["labels"], reduction="none")
        return losses, logits, inputs["labels"]


class MeanOfBatches(Trainer):
    """A loop that averages over batches, the last of which is smaller."""

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        found = super().evaluation_loop(dataloader, *args, **kwargs)
        losses = [self.prediction_step(self.model, batch, True)[0].item() for batch in dataloader]
        found.metrics["eval_mean_of_batches"] = sum(losses) / len(losses)
        return found


# ---- Metrics --------------------------------------------------------------------------------------------------------


class Remembering:
    """Metrics with the best so far and the number of calls."""

    def __init__(self) -> None:
        self.calls, self.best = 0, 0.0

    def __call__(self, prediction: Any) -> dict[str, float]:
        found = correct(prediction)
        self.calls, self.best = self.calls + 1, max(self.best, found["accuracy"])
        return {**found, "calls": float(self.calls), "best": self.best}


class BatchByBatch:
    """Sums over batches, told when the last one has come."""

    def __init__(self) -> None:
        self.right, self.rows = 0.0, 0

    def __call__(self, prediction: Any, compute_result: bool = False) -> dict[str, float]:
        logits, labels = (torch.as_tensor(part) for part in (prediction.predictions, prediction.label_ids))
        self.right += float((logits.argmax(-1) == labels).sum())
        self.rows += len(labels)
        found = {"accuracy": self.right / self.rows, "rows": float(self.rows)}
        if compute_result:
            self.right, self.rows = 0.0, 0
        return found


def with_inputs_and_losses(prediction: Any) -> dict[str, float]:
    """Metrics of what was asked for beside the logits."""
    longest = float((prediction.inputs != 0).sum(-1).max())
    perplexity = float(np.exp(np.mean(prediction.losses)))
    return {"longest": longest, "perplexity": perplexity, "losses": float(len(prediction.losses))}


def of_generated(prediction: Any) -> dict[str, float]:
    """Sums of what was generated and of the labels, which stand for BLEU."""
    words, labels = (np.where(part < 0, 0, part) for part in (prediction.predictions, prediction.label_ids))
    return {"generated": float(words.sum()), "labels": float(labels.sum()), "rows": float(len(words))}


def of_tokens(prediction: Any) -> dict[str, float]:
    """How many words are guessed, by ids that were made of logits before."""
    mask = prediction.label_ids[:, 1:] != -100
    return {"accuracy": float((prediction.predictions[:, :-1] == prediction.label_ids[:, 1:])[mask].mean())}


# ---- Trainers -------------------------------------------------------------------------------------------------------


def by_name(**given: Any) -> Trainer:
    """Two datasets to evaluate, by name."""
    return Trainer(**{**given, "eval_dataset": {"ten": given["eval_dataset"], "six": labelled(6, seed=2)}})


def measured(make: Callable[[], Any], **given: Any) -> Trainer:
    """Metrics with a state of their own for each trainer."""
    return Trainer(**{**given, "compute_metrics": make()})


def generating(kind: type[Seq2SeqTrainer], **settings: Any) -> Pattern:
    """Return the pattern of an encoder-decoder that generates when it is evaluated."""
    tokenizer = tiny.tokenizer()
    return evaluated(
        kind,
        model=t5,
        data=translated,
        collate=lambda: DataCollatorForSeq2Seq(tokenizer),
        metrics=of_generated,
        settings=Seq2SeqTrainingArguments,
        given={"processing_class": tokenizer},
        predict_with_generate=True,
        generation_max_length=8,
        **settings,
    )


def whisper() -> Any:
    """Return a tiny Whisper that hears a difference, and whose texts end at any of several tokens."""
    torch.manual_seed(0)
    halves = ("encoder", "decoder")
    sizes = {f"{half}_{name}": size for half in halves for name, size in (("layers", 1), ("attention_heads", 2))}
    sizes |= {f"{half}_ffn_dim": 32 for half in halves} | {"max_source_positions": 25, "max_target_positions": 32}
    special = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "decoder_start_token_id": 2}
    quiet = {"suppress_tokens": None, "begin_suppress_tokens": None, "dropout": 0.0, "init_std": 0.2}
    words = len(tiny.VOCABULARY)
    config = transformers.WhisperConfig(vocab_size=words, d_model=16, num_mel_bins=8, **sizes, **special, **quiet)
    model = transformers.WhisperForConditionalGeneration(config)
    model.generation_config = transformers.GenerationConfig(**{**special, "eos_token_id": list(range(3, 30))})
    return model


def spoken(count: int, *, seed: int = 0) -> list[dict[str, Any]]:
    """Sounds with the text of each."""
    generator = torch.Generator().manual_seed(seed)
    ids = tiny.tokenizer()(texts(count, seed=seed, longest=12))["input_ids"]
    return [{"input_features": torch.randn(8, 50, generator=generator), "labels": torch.tensor(one)} for one in ids]


def with_sounds(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Put sounds of one length together, and pad their texts."""
    labels = [row["labels"] for row in rows]
    return {
        "input_features": torch.stack([row["input_features"] for row in rows]),
        "labels": torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100),
    }


def speaking(kind: type[Seq2SeqTrainer], **settings: Any) -> Pattern:
    """Return the pattern of a Whisper that generates when it is evaluated."""
    return evaluated(
        kind,
        model=whisper,
        data=spoken,
        collate=lambda: with_sounds,
        metrics=of_generated,
        settings=Seq2SeqTrainingArguments,
        predict_with_generate=True,
        generation_max_length=10,
        **settings,
    )


def with_dictionary() -> Any:
    """Return a model whose output has more than logits."""

    class More(transformers.BertForSequenceClassification):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            outputs = super().forward(*args, **kwargs)
            chosen = outputs.logits.argmax(-1)
            return {"loss": outputs.loss, "logits": outputs.logits, "chosen": chosen, "scale": torch.tensor([2.0])}

    torch.manual_seed(0)
    return More(tiny.bert_config(initializer_range=0.2))


hidden = functools.partial(bert, output_hidden_states=True)

PATTERNS = {
    "prediction_step, labels taken out": evaluated(LabelsTakenOut, metrics=correct),
    "prediction_step, labels taken out of the batch": evaluated(LabelsTakenOutOfTheBatch, metrics=correct),
    "prediction_step, loss of each row": evaluated(LossOfEachRow, metrics=correct),
    "prediction_step, counts and keeps": evaluated(Counted, metrics=correct),
    "prediction_step, recall in the batch": Pattern(
        of_pairs(RecallInBatch, "query", "passage", metrics=lambda found: {"recall": float(found.predictions.mean())}),
        drive=evaluate,
        trains=False,
        evaluates=True,
    ),
    "evaluation_loop, mean of batches": evaluated(MeanOfBatches, metrics=correct),
    "generation, labels not shown": generating(PromptsOnly),
    "generation, two beams": generating(Seq2SeqTrainer, generation_num_beams=2),
    "generation, own loss": generating(OwnLoss),
    "generation, Whisper": speaking(Seq2SeqTrainer),
    "generation, Whisper and two beams": speaking(Seq2SeqTrainer, generation_num_beams=2),
    "generation, Whisper and own loss": speaking(OwnLoss),
    "evaluation, SupCon": evaluated(WithContrast, metrics=correct),
    "evaluation, hard examples": evaluated(HardHalf, metrics=correct),
    "evaluation, entropy of the mean": evaluated(EntropyOfTheMean),
    "evaluation, pairs of the batch": evaluated(PairwiseRanking),
    "evaluation, in-batch negatives": Pattern(
        of_pairs(InBatchNegatives, "query", "passage"), drive=evaluate, trains=False, evaluates=True
    ),
    "evaluation, attention within groups": evaluated(model=GroupAttention, data=grouped, metrics=correct),
    "evaluation, batch norm": evaluated(
        model=headed(functools.partial(torch.nn.BatchNorm1d, 32), functools.partial(torch.nn.Linear, 32, 3))
    ),
    "evaluation, causal language model": evaluated(
        model=llama,
        data=sentences,
        collate=with_words,
        metrics=of_tokens,
        given={"preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1)},
    ),
    "evaluation, label smoothing": evaluated(label_smoothing_factor=0.1, metrics=correct),
    "evaluation, bf16": evaluated(bf16_full_eval=True, metrics=correct, is_narrow=True),
    "metrics that remember": evaluated(functools.partial(measured, Remembering)),
    "metrics batch by batch": evaluated(functools.partial(measured, BatchByBatch), batch_eval_metrics=True),
    "metrics of inputs and losses": evaluated(metrics=with_inputs_and_losses, include_for_metrics=["inputs", "loss"]),
    "two datasets by name": evaluated(by_name, metrics=correct),
    "while training, every step": Pattern(
        built(evaluated=10, metrics=correct, eval_strategy="steps", eval_steps=1), trains=False, evaluates=True
    ),
    "predictions, hidden states": evaluated(model=hidden, drive=predict, eval_accumulation_steps=1),
    "predictions, a dictionary": evaluated(model=with_dictionary, drive=predict, remove_unused_columns=False),
}
