"""The model of the demo and the four set-ups of the stock ``Trainer`` that it compares.

All four start from the same weights and share examples, examples per optimizer step, learning rate schedule, epochs
and seed. ``measurement`` trains them and reads their figures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    PreTrainedTokenizerBase,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from hf_memopt.demo.docstring_task import MAX_LENGTH_TOKENS
from hf_memopt.devices.precision_support import accelerator_type, choose_precision
from hf_memopt.recipes.presets import recipe
from hf_memopt.recipes.recipe import Recipe

__all__ = ["SETUPS", "Ingredients", "build_model", "model_config"]

BATCH_SIZE = 32
PAD_TO_MULTIPLE_OF = 8

HYPERPARAMETERS = {"learning_rate": 1e-3, "warmup_steps": 0.1, "lr_scheduler_type": "linear"}

CPU_MODEL = {"num_hidden_layers": 3, "hidden_size": 192, "num_attention_heads": 6, "intermediate_size": 512}
GPU_MODEL = {"num_hidden_layers": 6, "hidden_size": 512, "num_attention_heads": 8, "intermediate_size": 2048}


def model_config(vocabulary_tokens: int, labels: Sequence[str], sizes: Mapping[str, int]) -> BertConfig:
    """Return the configuration of the demo's BERT; ``sizes`` replace those chosen for the machine."""
    suitable = CPU_MODEL if accelerator_type() == "cpu" else GPU_MODEL
    fields: dict[str, Any] = {**suitable, **sizes}
    return BertConfig(
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


def build_model(config: BertConfig, seed: int) -> BertForSequenceClassification:
    """Return the model with weights drawn from ``seed``, the same for every set-up.

    BERT's standard deviation of 0.02 for all weights suits a width of 768. In a narrow model it makes the outputs of
    linear layers very small, and the position embeddings as large as those of the words, so that an epoch of 125 steps
    learns next to nothing. Here linear layers get a deviation that fits their width (``initializer_range``), word
    embeddings 0.02, position and token type embeddings 0.
    """
    torch.manual_seed(seed)
    model = BertForSequenceClassification(config)
    torch.nn.init.normal_(model.bert.embeddings.word_embeddings.weight, std=0.02)
    torch.nn.init.zeros_(model.bert.embeddings.position_embeddings.weight)
    torch.nn.init.zeros_(model.bert.embeddings.token_type_embeddings.weight)
    return model


# ---- The four set-ups -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ingredients:
    """What every set-up trains with."""

    model: BertForSequenceClassification
    tokenizer: PreTrainedTokenizerBase
    texts: list[str]
    labels: list[int]
    arguments: dict[str, Any]
    callbacks: list[TrainerCallback]


def _tokenised(given: Ingredients, *, padding: str | bool = False) -> Dataset:
    return Dataset.from_dict({**given.tokenizer(given.texts, truncation=True, padding=padding), "labels": given.labels})


def naive_trainer(given: Ingredients) -> Trainer:
    """Return what many scripts do: every text padded to the maximum, 32-bit floats, the Trainer's defaults."""
    return Trainer(
        model=given.model,
        args=TrainingArguments(**given.arguments, per_device_train_batch_size=BATCH_SIZE),
        train_dataset=_tokenised(given, padding="max_length"),
        callbacks=given.callbacks,
    )


def stock_best_trainer(given: Ingredients) -> Trainer:
    """Return the fastest stock set-up: grouped by length, padded to the longest row, native precision, fused AdamW.

    The rows are plain dicts in a list: with a ``datasets.Dataset`` the Trainer passes its lazy ``length`` column to the
    sampler, which then reads it example by example (170 times slower at 100,000 examples).
    """
    precision = choose_precision()
    arguments = TrainingArguments(
        **given.arguments,
        per_device_train_batch_size=BATCH_SIZE,
        train_sampling_strategy="group_by_length",
        optim="adamw_torch_fused",
        bf16=precision.bf16,
        fp16=precision.fp16,
        use_cpu=precision.bf16 and accelerator_type() == "cpu",  # stock requires it for bf16 on a CPU
    )
    return Trainer(
        model=given.model,
        args=arguments,
        train_dataset=_tokenised(given).to_list(),
        processing_class=given.tokenizer,
        data_collator=DataCollatorWithPadding(given.tokenizer, pad_to_multiple_of=PAD_TO_MULTIPLE_OF),
        callbacks=given.callbacks,
    )


def memopt_trainer(given: Ingredients) -> Trainer:
    """Return what ``recipe("auto")`` chooses for this machine."""
    return _recipe_trainer(recipe("auto"), given)


def memory_saver_trainer(given: Ingredients) -> Trainer:
    """Return the preset for the smallest GPUs: accumulation steps of 8 texts, checkpointing, 8-bit optimizer state."""
    chosen = recipe("4gb-gpu")
    if accelerator_type() == "cpu":
        chosen = chosen.replace(optim="adamw_8bit")  # a paged optimizer moves state from a GPU to the host
    return _recipe_trainer(chosen, given)


def _recipe_trainer(chosen: Recipe, given: Ingredients) -> Trainer:
    return chosen.trainer(
        model=given.model,
        train_dataset=_tokenised(given),
        processing_class=given.tokenizer,
        training_arguments={**given.arguments, "effective_batch_size": BATCH_SIZE},
        callbacks=given.callbacks,
    )


SETUPS: dict[str, Callable[[Ingredients], Trainer]] = {
    "baseline": naive_trainer,
    "stock_best": stock_best_trainer,
    "memopt": memopt_trainer,
    "memory_saver": memory_saver_trainer,
}
