"""All weights of a language model of 1 B parameters, by the Trainer, with an evaluation."""

import torch
from made_up import tokens
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

name = "meta-llama/Llama-3.2-1B"
tokenizer = AutoTokenizer.from_pretrained(name)
tokenizer.pad_token = tokenizer.eos_token
trainer = Trainer(
    AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16),
    TrainingArguments(
        "out", bf16=True, per_device_train_batch_size=4, gradient_accumulation_steps=2, eval_strategy="epoch"
    ),
    train_dataset=tokens(tokenizer),
    eval_dataset=tokens(tokenizer),
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
)
trainer.train()
