"""Adapters of PEFT on a 16-bit model, with gradient checkpointing."""

import torch
from made_up import tokens
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

name = "Qwen/Qwen2.5-0.5B"
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float16)
model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
trainer = Trainer(
    model,
    TrainingArguments("out", fp16=True, per_device_train_batch_size=4, gradient_checkpointing=True),
    train_dataset=tokens(tokenizer),
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
)
trainer.train()
