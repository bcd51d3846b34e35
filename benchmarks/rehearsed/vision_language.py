"""Adapters of a model that reads a picture and text."""

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForImageTextToText, Trainer, TrainingArguments

name = "Qwen/Qwen3-VL-2B-Instruct"
model = AutoModelForImageTextToText.from_pretrained(name, dtype=torch.bfloat16)
ids = torch.full((512,), 100)
ids[8:204] = model.config.image_token_id  # 28 x 28 patches, four of them a token
row = {
    "input_ids": ids,
    "labels": ids,
    "attention_mask": torch.ones_like(ids),
    "mm_token_type_ids": (ids == model.config.image_token_id).long(),
    "pixel_values": torch.zeros(28 * 28, 3 * 2 * 16 * 16),
    "image_grid_thw": torch.tensor([1, 28, 28]),
}
model = get_peft_model(model, LoraConfig(r=16, target_modules=["q_proj", "v_proj"]))
trainer = Trainer(
    model,
    TrainingArguments("out", bf16=True, per_device_train_batch_size=2),
    train_dataset=[row] * 64,
)
trainer.train()
