"""A language model of 1 B parameters, sharded over several GPUs by FSDP2: torchrun --nproc-per-node 2 fsdp2.py."""

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
    AutoModelForCausalLM.from_pretrained(name),
    TrainingArguments(
        "out", bf16=True, per_device_train_batch_size=2, fsdp="full_shard auto_wrap", fsdp_config={"version": 2}
    ),
    train_dataset=tokens(tokenizer),
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
)
trainer.train()
