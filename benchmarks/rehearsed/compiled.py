"""A compiled classifier in the Trainer; torch's own compiler makes the kernels."""

from made_up import labelled
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
)

name = "google-bert/bert-base-uncased"
tokenizer = AutoTokenizer.from_pretrained(name)
trainer = Trainer(
    AutoModelForSequenceClassification.from_pretrained(name),
    TrainingArguments("out", bf16=True, per_device_train_batch_size=16, torch_compile=True),
    train_dataset=labelled(tokenizer),
    data_collator=DataCollatorWithPadding(tokenizer, pad_to_multiple_of=512),
)
trainer.train()
