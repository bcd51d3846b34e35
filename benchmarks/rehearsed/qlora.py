"""QLoRA of a model of 1 B parameters, prepared by PEFT or by this package: qlora.py peft | ours."""

import sys

import torch
from made_up import tokens
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

from hf_memopt import prepare_quantized

name = "meta-llama/Llama-3.2-1B"
tokenizer = AutoTokenizer.from_pretrained(name)
tokenizer.pad_token = tokenizer.eos_token
nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16, quantization_config=nf4)
prepare_model_for_kbit_training(model) if sys.argv[1] == "peft" else prepare_quantized(model)
model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
trainer = Trainer(
    model,
    TrainingArguments(
        "out", bf16=True, per_device_train_batch_size=4, gradient_checkpointing=True, optim="paged_adamw_8bit"
    ),
    train_dataset=tokens(tokenizer),
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
)
trainer.train()
