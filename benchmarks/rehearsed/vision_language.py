"""Adapters of a model that reads pictures and text."""

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForImageTextToText, Trainer, TrainingArguments

name = "Qwen/Qwen3-VL-2B-Instruct"
model = AutoModelForImageTextToText.from_pretrained(name, dtype=torch.bfloat16)
vision = model.config.vision_config
patches = 2 * vision.spatial_merge_size**2 * 64
