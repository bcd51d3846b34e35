"""Trainings of tiny models by the stock Trainer, on the CPU or on the stand-in of a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from transformers import Trainer, TrainingArguments

import language_models

VIT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def vit() -> transformers.ViTForImageClassification:
    torch.manual_seed(0)
    config = transformers.ViTConfig(**VIT, **NO_DROPOUT, image_size=16, patch_size=4)
    return transformers.ViTForImageClassification(config)


def lora() -> Any:
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(language_models.build("llama"), config)


def texts(count: int = 32, padded: bool = True) -> list[dict[str, torch.Tensor]]:
    """Return rows of 16 tokens, the last of them padding in most rows."""
    draw = torch.Generator().manual_seed(1)
    found = []
    for _ in range(count):
        ids = torch.randint(5, 100, (16,), generator=draw)
        mask = torch.arange(16) < (int(torch.randint(4, 17, (1,), generator=draw)) if padded else 16)
        row = {"input_ids": ids.where(mask, 0), "labels": ids.where(mask, -100)}
        found.append({**row, "attention_mask": mask.long()} if padded else row)
    return found


def images(count: int = 32) -> list[dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [
        {"pixel_values": torch.randn(3, 16, 16, generator=draw), "labels": torch.tensor(i % 2)} for i in range(count)
    ]


def train(build: Callable[[], Any], rows: Any, folder: Path, **settings: Any) -> Trainer:
    """Train 4 steps, evaluate twice, and return the Trainer."""
    quiet = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1, "max_steps": 4}
    sizes = {"per_device_train_batch_size": 4, "learning_rate": 1e-3, "eval_strategy": "steps", "eval_steps": 2}
    arguments = TrainingArguments(str(folder), **{**quiet, **sizes, "dataloader_pin_memory": False, **settings})
    trainer = Trainer(build(), arguments, train_dataset=rows, eval_dataset=rows[:8])
    trainer.train()
    return trainer


def losses(trainer: Trainer) -> list[float]:
    """Return losses, evaluation losses and norms of gradients in the order of the log."""
    names = ("loss", "eval_loss", "grad_norm")
    return [float(entry[name]) for entry in trainer.state.log_history for name in names if name in entry]
