"""The three set-ups that the demo compares, and the meters they share. Each runs in a child process of ``run``.

Same initial weights, examples, batch size, learning rate and seed; only what the set-up is about differs. Timed is
``trainer.train()`` and nothing else: data loading, collation, forward, backward, optimizer and the Trainer's own work.
Not timed: imports, tokenisation, building model and Trainer, and the evaluation, which is the same code for all three.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from transformers import DataCollatorWithPadding, Trainer, TrainerCallback, TrainingArguments

from hf_memopt.demo.docstring_task import MAX_LENGTH_TOKENS, DocstringTask
from hf_memopt.devices.memory_reading import read_process
from hf_memopt.devices.precision_support import accelerator_type, choose_precision
from hf_memopt.memory.report import MemoryReportCallback
from hf_memopt.techniques.optimizers.state_bytes import optimizer_state_bytes

__all__ = ["SETUPS", "Ingredients", "build_model", "measure", "model_config", "predict_labels", "run_setup"]

BATCH_SIZE = 32
PAD_TO_MULTIPLE_OF = 8

HYPERPARAMETERS = {"learning_rate": 1e-3, "warmup_steps": 0.1, "lr_scheduler_type": "linear"}

CPU_MODEL = {"num_hidden_layers": 3, "hidden_size": 192, "num_attention_heads": 6, "intermediate_size": 512}
GPU_MODEL = {"num_hidden_layers": 6, "hidden_size": 512, "num_attention_heads": 8, "intermediate_size": 2048}


def model_config(vocabulary_tokens: int, labels: Sequence[str], sizes: Mapping[str, int]) -> transformers.BertConfig:
    """Return the configuration of the demo's BERT; ``sizes`` replace those that suit the machine."""
    suitable = CPU_MODEL if accelerator_type() == "cpu" else GPU_MODEL
    fields: dict[str, Any] = {**suitable, **sizes}
    return transformers.BertConfig(
        vocab_size=vocabulary_tokens,
        max_position_embeddings=MAX_LENGTH_TOKENS,
        type_vocab_size=1,
        initializer_range=0.7 / fields["hidden_size"] ** 0.5,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        pad_token_id=0,
        id2label=dict(enumerate(labels)),
        label2id={label: number for number, label in enumerate(labels)},
        **fields,
    )


def build_model(config: transformers.BertConfig, seed: int) -> transformers.BertForSequenceClassification:
    """Return the model with weights drawn from ``seed``, the same for every set-up.

    BERT's own 0.02 for all weights suits a width of 768. In a narrow model it leaves linear layers so weak, and
    positions so loud beside the words, that an epoch of 125 steps learns next to nothing. So linear layers get their
    width's share (``initializer_range``), words 0.02 and positions zero.
    """
    torch.manual_seed(seed)
    model = transformers.BertForSequenceClassification(config)
    torch.nn.init.normal_(model.bert.embeddings.word_embeddings.weight, std=0.02)
    torch.nn.init.zeros_(model.bert.embeddings.position_embeddings.weight)
    torch.nn.init.zeros_(model.bert.embeddings.token_type_embeddings.weight)
    return model


# ---- The three set-ups ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ingredients:
    """What every set-up trains with."""

    model: Any
    tokenizer: Any
    texts: list[str]
    labels: list[int]
    arguments: dict[str, Any]
    callbacks: list[TrainerCallback]


def naive_trainer(given: Ingredients) -> Trainer:
    """Return what many scripts do: every text padded to the maximum, 32-bit floats, the Trainer's defaults."""
    encoded = given.tokenizer(given.texts, padding="max_length", truncation=True)
    return Trainer(
        model=given.model,
        args=TrainingArguments(**given.arguments, per_device_train_batch_size=BATCH_SIZE),
        train_dataset=Dataset.from_dict({**encoded, "labels": given.labels}),
        callbacks=given.callbacks,
    )


def stock_best_trainer(given: Ingredients) -> Trainer:
    """Return stock at its best: grouped by length, padded to the longest of a batch, the card's precision, fused AdamW.

    The rows are plain dicts in a list: with a ``datasets.Dataset`` the Trainer hands its lazy ``length`` column to the
    sampler, which then reads it example by example (170 times slower at 100,000 examples).
    """
    precision = choose_precision()
    encoded = given.tokenizer(given.texts, truncation=True)
    arguments = TrainingArguments(
        **given.arguments,
        per_device_train_batch_size=BATCH_SIZE,
        train_sampling_strategy="group_by_length",
        optim="adamw_torch_fused",
        bf16=precision.bf16,
        fp16=precision.fp16,
        use_cpu=precision.bf16 and accelerator_type() == "cpu",  # stock asks for it where bf16 runs on a CPU
    )
    return Trainer(
        model=given.model,
        args=arguments,
        train_dataset=Dataset.from_dict({**encoded, "labels": given.labels}).to_list(),
        processing_class=given.tokenizer,
        data_collator=DataCollatorWithPadding(given.tokenizer, pad_to_multiple_of=PAD_TO_MULTIPLE_OF),
        callbacks=given.callbacks,
    )


def memopt_trainer(given: Ingredients) -> Trainer:
    """Return this package's set-up: bucketed data, 8-bit optimizer with 32-bit embeddings, the card's precision."""
    from hf_memopt.recipes.presets import recipe

    chosen = recipe("auto").replace(
        optim="adamw_8bit",
        embedding_bits=32,
        effective_batch_size=BATCH_SIZE,
        per_device_train_batch_size=BATCH_SIZE,
        checkpointing=False,  # the presets of small cards have it for models a hundred times this size
        pad_to_multiple_of=PAD_TO_MULTIPLE_OF,
    )
    encoded = given.tokenizer(given.texts, truncation=True)
    return chosen.trainer(
        model=given.model,
        train_dataset=Dataset.from_dict({**encoded, "labels": given.labels}),
        processing_class=given.tokenizer,
        training_arguments=given.arguments,
        callbacks=given.callbacks,
    )


SETUPS: dict[str, Callable[[Ingredients], Trainer]] = {
    "baseline": naive_trainer,
    "stock_best": stock_best_trainer,
    "memopt": memopt_trainer,
}


# ---- Meters ---------------------------------------------------------------------------------------------------------


class OptimizerClock(TrainerCallback):
    """Add up the seconds of ``optimizer.step()``; on an accelerator the queue is emptied before and after it."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.state_bytes: dict[str, int] = {}
        self._started = 0.0

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        _synchronize()
        self._started = time.perf_counter()

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        _synchronize()
        self.seconds += time.perf_counter() - self._started

    def on_train_end(self, *_: Any, optimizer: Any = None, **__: Any) -> None:
        self.state_bytes = optimizer_state_bytes(optimizer)


class TokenCounter:
    """Count the real and the padded tokens that a collator puts out."""

    def __init__(self, collator: Callable[[Any], Any]) -> None:
        self.collator = collator
        self.examples = self.real_tokens = self.padded_tokens = 0

    def __call__(self, features: Any) -> Any:
        batch = self.collator(features)
        mask = batch["attention_mask"]
        self.examples += mask.shape[0]
        self.real_tokens += int(mask.sum())
        self.padded_tokens += mask.numel()
        return batch


def measure(trainer: Trainer, clock: OptimizerClock, imported_bytes: int) -> dict[str, Any]:
    """Train and return the figures of the run, without its accuracy.

    Peak bytes are those of the allocator on an accelerator; without one, how far the peak of the process lies above
    ``imported_bytes``, its resident bytes when all was imported and nothing loaded.
    """
    memory = _memory_report(trainer)
    counter = TokenCounter(trainer.data_collator)
    trainer.data_collator = counter
    _synchronize()
    started = time.perf_counter()
    trainer.train()
    _synchronize()
    seconds = time.perf_counter() - started
    return {
        "seconds": seconds,
        "optimizer_seconds": clock.seconds,
        "examples": counter.examples,
        "examples_per_second": counter.examples / seconds,
        "real_tokens_per_second": counter.real_tokens / seconds,
        "padding_efficiency": counter.real_tokens / counter.padded_tokens,
        "optimizer_state_bytes": sum(clock.state_bytes.values()),
        "optimizer_state_bytes_by_dtype": clock.state_bytes,
        **_peaks(memory, imported_bytes),
    }


def _memory_report(trainer: Trainer) -> MemoryReportCallback:
    """Return the memory report that the trainer has, or a new one: two would reset each other's peaks."""
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, MemoryReportCallback):
            return callback
    memory = MemoryReportCallback()
    trainer.add_callback(memory)
    return memory


def _peaks(memory: MemoryReportCallback, imported_bytes: int) -> dict[str, int | None]:
    phases = memory.summary.values()
    if any("peak_allocated_bytes" in phase for phase in phases):
        return {
            "peak_bytes": max(phase["peak_allocated_bytes"] for phase in phases),
            "peak_reserved_bytes": max(phase["peak_reserved_bytes"] for phase in phases),
        }
    peak_bytes = read_process()[1]
    return {"peak_bytes": None if peak_bytes is None else peak_bytes - imported_bytes, "peak_reserved_bytes": None}


def _synchronize() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


@torch.no_grad()
def predict_labels(model: Any, tokenizer: Any, texts: Sequence[str], batch_size: int = 64) -> list[int]:
    """Return the number of the predicted label of each text, in the order of ``texts``."""
    encoded = tokenizer(list(texts), truncation=True)
    by_length = sorted(range(len(texts)), key=lambda i: len(encoded["input_ids"][i]))
    predicted = [0] * len(texts)
    model.eval()
    for start in range(0, len(texts), batch_size):
        rows = by_length[start : start + batch_size]
        batch = tokenizer.pad({key: [values[i] for i in rows] for key, values in encoded.items()}, return_tensors="pt")
        for i, label in zip(rows, model(**batch.to(model.device)).logits.argmax(-1).tolist(), strict=True):
            predicted[i] = label
    return predicted


# ---- One set-up -----------------------------------------------------------------------------------------------------


def run_setup(folder: Path, setup: str, *, seed: int, epochs: int, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Train one set-up and return its figures; ``memopt`` also saves model and tokenizer in ``folder/model``.

    Args:
        folder: holds ``task.json`` and ``tokenizer`` as ``prepare`` wrote them.
        setup: a key of ``SETUPS``.
        seed: of weights, order and dropout.
        epochs: passes over the training texts.
        sizes: fields of the configuration that replace the size that suits the machine.
    """
    import bitsandbytes  # noqa: F401  # every set-up imports the same before its memory is read
    from transformers import AutoTokenizer

    imported_bytes = read_process()[0]
    task = DocstringTask(**json.loads((folder / "task.json").read_text(encoding="utf-8")))
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    clock = OptimizerClock()
    arguments = {
        **HYPERPARAMETERS,
        "output_dir": str(folder / "trainer"),
        "num_train_epochs": epochs,
        "seed": seed,
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "dataloader_num_workers": 0,  # the tokens are counted in this process
        "dataloader_pin_memory": torch.accelerator.is_available(),
    }
    model = build_model(model_config(len(tokenizer), task.labels, sizes), seed)
    trainer = SETUPS[setup](
        Ingredients(
            model=model,
            tokenizer=tokenizer,
            texts=list(task.train_texts),
            labels=list(task.train_labels),
            arguments=arguments,
            callbacks=[clock],
        )
    )
    figures = measure(trainer, clock, imported_bytes)
    # without autocast, which accelerate leaves in forward: what is measured is what a reloaded model computes
    model = trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)
    predicted = predict_labels(model, tokenizer, task.test_texts)
    hits = sum(one == other for one, other in zip(predicted, task.test_labels, strict=True))
    if setup == "memopt":
        model.save_pretrained(folder / "model")
        tokenizer.save_pretrained(folder / "model")
    return {**figures, "accuracy": hits / len(predicted), "test_texts": len(predicted)}
