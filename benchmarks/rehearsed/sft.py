"""Supervised fine-tuning on conversations, by TRL."""

from datasets import Dataset
from made_up import texts
from trl import SFTConfig, SFTTrainer

pairs = zip(texts(longest=100), texts(seed=1), strict=True)
talks = [[{"role": "user", "content": asked}, {"role": "assistant", "content": said}] for asked, said in pairs]
trainer = SFTTrainer(
    "Qwen/Qwen3-0.6B",
    SFTConfig("out", bf16=True, per_device_train_batch_size=4, max_length=512, assistant_only_loss=True),
    train_dataset=Dataset.from_dict({"messages": talks}),
)
trainer.train()
