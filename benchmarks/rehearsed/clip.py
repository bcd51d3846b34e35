"""Pictures and their captions, by CLIP."""

import torch
from made_up import Pictures
from transformers import AutoModel, Trainer, TrainingArguments

trainer = Trainer(
    AutoModel.from_pretrained("openai/clip-vit-base-patch32"),
    TrainingArguments("out", bf16=True, per_device_train_batch_size=64, label_names=["return_loss"]),
    train_dataset=Pictures(224, input_ids=torch.ones(77, dtype=torch.long), return_loss=True),
)
trainer.train()
