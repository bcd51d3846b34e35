"""A policy measured against its other completions of a prompt, which a function rewards, by TRL."""

from made_up import prompts
from trl import RLOOConfig, RLOOTrainer

trainer = RLOOTrainer(
    "Qwen/Qwen2.5-0.5B",
    reward_funcs=lambda completions, **_: [float(len(text)) for text in completions],
    args=RLOOConfig("out", bf16=True, per_device_train_batch_size=8, num_generations=4, max_completion_length=16),
    train_dataset=prompts(),
)
trainer.train()
