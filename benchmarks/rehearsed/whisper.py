"""Speech to text by Whisper."""

import torch
from transformers import AutoModelForSpeechSeq2Seq, Seq2SeqTrainer, Seq2SeqTrainingArguments

sound = {"input_features": torch.zeros(80, 3000), "labels": torch.ones(100, dtype=torch.long)}  # of 30 s
trainer = Seq2SeqTrainer(
    AutoModelForSpeechSeq2Seq.from_pretrained("openai/whisper-small"),
    Seq2SeqTrainingArguments("out", fp16=True, per_device_train_batch_size=8, gradient_checkpointing=True),
    train_dataset=[sound] * 64,
)
trainer.train()
