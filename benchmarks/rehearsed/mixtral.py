"""A small mixture of experts, by the Trainer."""

import torch
from transformers import MixtralConfig, MixtralForCausalLM, Trainer, TrainingArguments

config = MixtralConfig(hidden_size=1024, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=16)
row = torch.arange(5, 517)
trainer = Trainer(
    MixtralForCausalLM(config),
    TrainingArguments("out", bf16=True, per_device_train_batch_size=4, optim="adafactor"),
    train_dataset=[{"input_ids": row, "labels": row}] * 64,
)
trainer.train()
