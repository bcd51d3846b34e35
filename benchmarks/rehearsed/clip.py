"""Pictures and their captions, by CLIP."""

from typing import Any

import torch
from made_up import Pictures
from transformers import AutoModel, Trainer, TrainingArguments, default_data_collator


def collate(rows: list[Any]) -> dict[str, Any]:
    """Return a batch for which CLIP computes its loss."""
    return {**default_data_collator(rows), "return_loss": True}


trainer = Trainer(
    AutoModel.from_pretrained("openai/clip-vit-base-patch32"),
    TrainingArguments("out", bf16=True, per_device_train_batch_size=64),
    data_collator=collate,
    train_dataset=Pictures(224, input_ids=torch.ones(77, dtype=torch.long)),
)
trainer.train()
