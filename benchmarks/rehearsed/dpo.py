"""Preferences by TRL, against a copy of the model, the model without its adapter, or answers of before the training:
dpo.py copy | adapter | precomputed.
"""

import sys

from made_up import preferences
from peft import LoraConfig
from trl import DPOConfig, DPOTrainer

reference = sys.argv[1]
trainer = DPOTrainer(
    "Qwen/Qwen2.5-0.5B",
    args=DPOConfig(
        "out",
        bf16=True,
        per_device_train_batch_size=2,
        max_length=512,
        precompute_ref_log_probs=reference == "precomputed",
    ),
    train_dataset=preferences(),
    peft_config=LoraConfig(r=16, target_modules="all-linear") if reference == "adapter" else None,
)
trainer.train()
