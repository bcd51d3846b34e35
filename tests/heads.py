"""Tiny heads with examples whose micro-batches weigh the same, and the gradient norm that the stock Trainer gets.

Run under ``torch.distributed.run`` it prints one JSON line of norms by head, as ``test_attach.py`` compares them.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import Trainer, TrainerCallback, default_data_collator

import tiny
from hf_memopt.training.binding import attach

LENGTH = 12
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
TINY = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
LABEL = {"num_labels": 3}
PLACES = {"max_position_embeddings": 64}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}


class Head(NamedTuple):
    """A model, its examples, and whether stock multiplies its gradients by the accumulation steps."""

    build: Callable[[], torch.nn.Module]
    examples: Callable[[int], list[dict[str, Any]]]
    is_wrong_in_stock: bool
    loss: Callable[..., torch.Tensor] | None = None


def token_examples(count: int) -> list[dict[str, Any]]:
    """One label per token."""
    return [{**row, "labels": [token % 3 for token in row["input_ids"]]} for row in tiny.rows(count, LENGTH)]


def masked_examples(count: int) -> list[dict[str, Any]]:
    """Three labels per row."""
    ignored = [-100] * (LENGTH - 3)
    return [{**row, "labels": row["input_ids"][:3] + ignored} for row in tiny.rows(count, LENGTH)]


def causal_examples(count: int) -> list[dict[str, Any]]:
    """Every token predicted from those before it."""
    return [{**row, "labels": row["input_ids"]} for row in tiny.rows(count, LENGTH)]


def seq2seq_examples(count: int) -> list[dict[str, Any]]:
    """The inputs reversed; label smoothing needs decoder_input_ids."""
    examples = []
    for row in tiny.rows(count, LENGTH):
        labels = row["input_ids"][::-1]
        examples.append({**row, "labels": labels, "decoder_input_ids": [0, *labels[:-1]]})
    return examples


def span_examples(count: int) -> list[dict[str, Any]]:
    """A start and an end; no column called labels."""
    return [
        {"input_ids": row["input_ids"], "start_positions": i % 5, "end_positions": 5 + i % 5}
        for i, row in enumerate(tiny.rows(count, LENGTH))
    ]


def image_examples(count: int) -> list[dict[str, Any]]:
    """Images of 8 x 8."""
    images = torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    return [{"pixel_values": image, "labels": i % 3} for i, image in enumerate(images)]


def _head(kind: str, config: str, **settings: Any) -> Callable[[], torch.nn.Module]:
    return lambda: getattr(transformers, kind)(getattr(transformers, config)(**settings))


class NamedTargets(torch.nn.Module):
    """A token classifier whose labels are called targets."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(100, 3)

    def forward(self, input_ids: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.embedding(input_ids)
        return {"loss": torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()), "logits": logits}


class OwnLoss(torch.nn.Module):
    """A classifier of one's own, whose loss is a mean or counts what stock counts."""

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.embedding, self.counts = torch.nn.Embedding(100, 3), counts

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> dict[str, torch.Tensor]:
        logits = self.embedding(input_ids).mean(1)
        reduction = "sum" if self.counts and "num_items_in_batch" in kwargs else "mean"
        loss = torch.nn.functional.cross_entropy(logits, labels, reduction=reduction)
        if reduction == "sum":
            loss = loss / kwargs["num_items_in_batch"].to(loss.device)
        return {"loss": loss, "logits": logits}


def _sentences(count: int) -> list[dict[str, Any]]:
    return tiny.rows(count, LENGTH)


def mean_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """Return a mean over the rows of a batch, whatever the count."""
    return torch.nn.functional.cross_entropy(outputs.logits, labels)


CLASSES = {**NO_DROPOUT, **LABEL}
DISTIL = {"vocab_size": 100, "dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 2, "max_position_embeddings": 64}
DISTIL |= {"dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0, **LABEL}
GPT = {"vocab_size": 100, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, **LABEL, **SPECIAL}
GPT |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
T5 = {"vocab_size": 100, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
T5 |= {"pad_token_id": 0, "eos_token_id": 3, "decoder_start_token_id": 0}
BART = {"vocab_size": 100, "d_model": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "dropout": 0.0, **SPECIAL}
BART |= {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
BART |= {"decoder_start_token_id": 0, "forced_eos_token_id": None, "max_position_embeddings": 64}
VIT = {**{key: value for key, value in TINY.items() if key != "vocab_size"}, "image_size": 8, "patch_size": 4}
BUILT = {
    "roberta": _head("RobertaForSequenceClassification", "RobertaConfig", **TINY, **CLASSES, **SPECIAL, **PLACES),
    "distilbert": _head("DistilBertForSequenceClassification", "DistilBertConfig", **DISTIL),
    "deberta-v2": _head("DebertaV2ForSequenceClassification", "DebertaV2Config", **TINY, **CLASSES, **PLACES),
    "bert-tokens": lambda: transformers.BertForTokenClassification(tiny.bert_config()),
    "bert-mlm": lambda: transformers.BertForMaskedLM(tiny.bert_config()),
    "gpt2": _head("GPT2ForSequenceClassification", "GPT2Config", **GPT),
    "llama": lambda: transformers.LlamaForSequenceClassification(tiny.llama_config(num_labels=3)),
    "t5": _head("T5ForConditionalGeneration", "T5Config", **T5),
    "bart": _head("BartForConditionalGeneration", "BartConfig", **BART),
    "vit": _head("ViTForImageClassification", "ViTConfig", **VIT, **CLASSES),
    "bert-qa": lambda: transformers.BertForQuestionAnswering(tiny.bert_config(num_labels=2)),
}
OF_TOKENS = {
    "bert-tokens": token_examples,
    "bert-mlm": masked_examples,
    "t5": seq2seq_examples,
    "bart": seq2seq_examples,
}
EXACT = {"vit": image_examples, "bert-qa": span_examples}
HEADS = {
    "bert": Head(tiny.bert, _sentences, True),
    **{
        name: Head(build, {**OF_TOKENS, **EXACT}.get(name, _sentences), name not in EXACT)
        for name, build in BUILT.items()
    },
    "llama-causal-lm": Head(tiny.llama, causal_examples, False),
    "own mean": Head(lambda: OwnLoss(counts=False), _sentences, True),
    "own function": Head(tiny.bert, _sentences, True, mean_loss),
    "own sum": Head(lambda: OwnLoss(counts=True), _sentences, False),
}


class GradientNorm(TrainerCallback):
    """Note the norm of all gradients before each optimizer step."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Append the norm of this step."""
        squares = [p.grad.double().square().sum() for p in model.parameters() if p.grad is not None]
        self.norms.append(float(torch.stack(squares).sum().sqrt()))


def make_trainer(head: Head, output_dir: Any, per_device: int, accumulation: int, **settings: Any) -> Trainer:
    """Return a stock Trainer of 2 optimizer steps of 8 examples on one process, and a ``GradientNorm`` in front."""
    torch.manual_seed(0)
    args = tiny.arguments(
        output_dir,
        per_device_train_batch_size=per_device,
        gradient_accumulation_steps=accumulation,
        train_sampling_strategy="sequential",
        max_steps=2,
        **settings,
    )
    return Trainer(
        model=head.build(),
        args=args,
        train_dataset=head.examples(16),
        data_collator=default_data_collator,
        callbacks=[GradientNorm()],
        compute_loss_func=head.loss,
    )


def gradient_norms(trainer: Trainer) -> list[float]:
    """Train and return the norm of each step."""
    trainer.train()
    (recorder,) = (one for one in trainer.callback_handler.callbacks if isinstance(one, GradientNorm))
    return recorder.norms


def main(output_dir: str) -> None:
    """Write the norms of every head on this many processes, attached and not, and how far the processes agree."""
    gc.freeze()  # the Trainer collects garbage at the start of each run, 0.5 s with all that was imported
    norms: dict[str, dict[str, Any]] = {}
    for name, head in HEADS.items():
        norms[name] = {}
        for way in ("stock", "attached"):
            trainer = make_trainer(head, output_dir, 4, 1, ddp_backend="gloo")
            if way == "attached":
                attach(trainer)
            norms[name][way] = gradient_norms(trainer)
        norms[name]["weights"] = float(sum(p.detach().double().sum() for p in trainer.model.parameters()))
    Path(output_dir, f"rank{trainer.args.process_index}.json").write_text(json.dumps(norms), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
