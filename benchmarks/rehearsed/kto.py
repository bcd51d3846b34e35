"""Answers that were liked or not, by TRL."""

from made_up import prompts, texts
from trl import KTOConfig, KTOTrainer

trainer = KTOTrainer(
    "Qwen/Qwen2.5-0.5B",
    args=KTOConfig("out", bf16=True, per_device_train_batch_size=4, max_length=512),
    train_dataset=prompts(completion=texts(longest=300, seed=1), label=[place % 2 == 0 for place in range(64)]),
)
trainer.train()
