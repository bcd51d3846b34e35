"""Liger's kernels in the Trainer: logits are never whole."""

import torch
from made_up import tokens
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

name = "Qwen/Qwen2.5-0.5B"
tokenizer = AutoTokenizer.from_pretrained(name)
trainer = Trainer(
    AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16),
    TrainingArguments("out", bf16=True, per_device_train_batch_size=8, use_liger_kernel=True),
    train_dataset=tokens(tokenizer),
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
)
trainer.train()
