"""Trainings with TRL: SFT, preferences, rewards, and a policy that generates its own batches."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from datasets import Dataset
from peft import LoraConfig
from trl import (
    DistillationConfig,
    DistillationTrainer,
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)

import tiny
from client import Arrange, Client, arguments, llama, out_of_order, texts, words


def tokenizer() -> Any:
    """Return a tokenizer without special tokens around a text."""
    found = tiny.tokenizer(eos_token="[SEP]", bos_token="[CLS]")
    found.backend_tokenizer.post_processor = None
    return found


def plain(count: int = 16) -> Dataset:
    """Texts."""
    return Dataset.from_dict({"text": texts(count)})


def completions(count: int = 16) -> Dataset:
    """Prompts and completions; the loss is over completions only."""
    answers = [f" {text}" for text in texts(count, seed=2)]
    return Dataset.from_dict({"prompt": texts(count, longest=10, seed=1), "completion": answers})


def preferences(count: int = 16) -> Dataset:
    """Prompts, chosen and rejected completions."""
    chosen, rejected = ([f" {text}" for text in texts(count, seed=seed)] for seed in (2, 3))
    return Dataset.from_dict({"prompt": texts(count, longest=10, seed=1), "chosen": chosen, "rejected": rejected})


def judged(count: int = 16) -> Dataset:
    """Completions that were liked or not."""
    return completions(count).add_column("label", [i % 2 == 0 for i in range(count)])


def arranged(trainer: Any, arrange: Arrange) -> Any:
    """Arrange a train dataset that the trainer has tokenised itself."""
    trainer.train_dataset = arrange(trainer.train_dataset)
    return trainer


def sft(folder: Path, arrange: Arrange, *, data: Any = plain, count: int = 16, **settings: Any) -> Any:
    """Supervised fine-tuning."""
    trainer = SFTTrainer(
        model=llama(),
        args=arguments(folder, SFTConfig, **{"max_length": 64, **settings}),
        train_dataset=data(count),
        eval_dataset=data(8),
        processing_class=tokenizer(),
    )
    return arranged(trainer, arrange)


def dpo(folder: Path, arrange: Arrange) -> Any:
    """Preferences, chosen and rejected in one batch, one after the other."""
    trainer = DPOTrainer(
        model=llama(),
        ref_model=llama(),
        args=arguments(folder, DPOConfig, max_length=64),
        train_dataset=preferences(),
        eval_dataset=preferences(8),
        processing_class=tokenizer(),
    )
    return arranged(trainer, arrange)


def kto(folder: Path, arrange: Arrange) -> Any:
    """Single judgements, against completions of other prompts of the batch."""
    trainer = KTOTrainer(
        model=llama(),
        ref_model=llama(),
        args=arguments(folder, KTOConfig, max_length=64, beta=1.0, learning_rate=0.5),
        train_dataset=judged(),
        eval_dataset=judged(8),
        processing_class=tokenizer(),
    )
    return arranged(trainer, arrange)


def reward(folder: Path, arrange: Arrange) -> Any:
    """A reward model, of pairs."""
    trainer = RewardTrainer(
        model=llama(transformers.LlamaForSequenceClassification, num_labels=1),
        args=arguments(folder, RewardConfig, max_length=64),
        train_dataset=preferences().remove_columns("prompt"),
        eval_dataset=preferences(8).remove_columns("prompt"),
        processing_class=tokenizer(),
    )
    return arranged(trainer, arrange)


def grpo(folder: Path, arrange: Arrange) -> Any:
    """A policy that generates the completions it learns from."""
    trainer = GRPOTrainer(
        model=llama(),
        reward_funcs=lambda completions, **kwargs: [float(len(text) % 7) for text in completions],
        args=arguments(folder, GRPOConfig, num_generations=2, max_completion_length=8, max_steps=2),
        train_dataset=Dataset.from_dict({"prompt": texts(16, longest=6)}),
        processing_class=tokenizer(),
    )
    return arranged(trainer, arrange)


def rloo(folder: Path, arrange: Arrange) -> Any:
    """A policy measured against its other completions of a prompt."""
    trainer = RLOOTrainer(
        model=llama(),
        reward_funcs=lambda completions, **kwargs: [float(len(text) % 7) for text in completions],
        args=arguments(folder, RLOOConfig, beta=0.0, num_generations=2, max_completion_length=8, max_steps=2),
        train_dataset=Dataset.from_dict({"prompt": texts(16, longest=6)}),
        processing_class=tokenizer(),
    )
    return arranged(trainer, arrange)


def distillation(folder: Path, arrange: Arrange) -> Any:
    """A policy that learns from a teacher's opinion of its own completions."""
    trainer = DistillationTrainer(
        model=llama(),
        teacher_model=llama(num_attention_heads=4),
        args=arguments(folder, DistillationConfig, max_completion_length=8, max_steps=2),
        train_dataset=Dataset.from_dict({"prompt": texts(16, longest=6)}),
        processing_class=tokenizer(),
    )
    return arranged(trainer, arrange)


def sft_lora(folder: Path, arrange: Arrange) -> Any:
    """Supervised fine-tuning of an adapter that TRL makes."""
    trainer = SFTTrainer(
        model=llama(),
        args=arguments(folder, SFTConfig, max_length=64),
        train_dataset=plain(),
        eval_dataset=plain(8),
        processing_class=tokenizer(),
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False),
    )
    return arranged(trainer, arrange)


def train_only(trainer: Any) -> Mapping[str, Any]:
    """Train."""
    trainer.train()
    return {}


def tokens(column: str) -> Any:
    """Return what counts the tokens of a column."""
    return lambda dataset: [len(ids) for ids in dataset[column]]


def read_in_order(*positions: int) -> dict[str, str]:
    """Return what is refused where a trainer reads its prompts in an order of its own."""
    return dict.fromkeys(("bucketed view", "all"), out_of_order(*positions))


CLIENTS = {
    "TRL SFT": Client(sft),
    "TRL SFT, packing": Client(functools.partial(sft, count=64, packing=True)),
    "TRL SFT, prompt and completion": Client(functools.partial(sft, data=completions)),
    "TRL SFT, padding-free": Client(functools.partial(sft, padding_free=True, max_length=None)),
    "TRL SFT, LoRA": Client(sft_lora),
    "TRL SFT, dft loss": Client(functools.partial(sft, loss_type="dft")),
    "TRL DPO": Client(dpo, lengths=tokens("chosen_ids")),
    # measured against a mean over the batch, which is 0 as long as the policy is its reference
    "TRL KTO": Client(kto, lengths=tokens("completion_ids")),
    "TRL Reward": Client(
        reward,
        lengths=tokens("chosen_ids"),
    ),
    "TRL GRPO": Client(
        grpo,
        drive=train_only,
        lengths=words("prompt"),
        refuses=read_in_order(10, 10, 9, 9),
    ),
    "TRL RLOO": Client(
        rloo,
        drive=train_only,
        lengths=words("prompt"),
        refuses=read_in_order(10, 10, 9, 9),
    ),
    "TRL Distillation": Client(
        distillation,
        drive=train_only,
        lengths=words("prompt"),
        refuses=read_in_order(10, 9, 5, 6),
    ),
}
