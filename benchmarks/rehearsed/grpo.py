"""A policy that learns from what it generates, which a reward model scores, by TRL."""

from made_up import prompts
from trl import GRPOConfig, GRPOTrainer

trainer = GRPOTrainer(
    "Qwen/Qwen2.5-0.5B",
    reward_funcs="HuggingFaceTB/SmolLM2-135M",
    args=GRPOConfig("out", bf16=True, per_device_train_batch_size=8, max_completion_length=32, beta=0.04),
    train_dataset=prompts(),
)
trainer.train()
