"""A classifier of pictures, by the Trainer."""

from made_up import Pictures
from transformers import AutoModelForImageClassification, Trainer, TrainingArguments

trainer = Trainer(
    AutoModelForImageClassification.from_pretrained("google/vit-base-patch16-224"),
    TrainingArguments("out", fp16=True, per_device_train_batch_size=64),
    train_dataset=Pictures(224, labels=0),
)
trainer.train()
