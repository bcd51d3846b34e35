"""A reward model of pairs of answers, by TRL."""

from made_up import preferences
from trl import RewardConfig, RewardTrainer

trainer = RewardTrainer(
    "Qwen/Qwen2.5-0.5B",
    args=RewardConfig("out", bf16=True, per_device_train_batch_size=4, max_length=512),
    train_dataset=preferences(),
)
trainer.train()
