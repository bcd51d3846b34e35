"""The trainings that ``test_kills`` ends and resumes, each in a process of its own."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import peft
import torch
from torch import nn
from transformers import Trainer, TrainerCallback

import hf_memopt as m
import tiny
from hf_memopt.training.binding.checkpoint_manifest import why_not_whole

FINAL = "final.pt"
STEPS = 64


def example(i: int) -> dict[str, Any]:
    """Return an example of 1 to 23 tokens."""
    length = (7 * i) % 23 + 1
    return {"input_ids": [5 + (3 * i + 11 * j) % 95 for j in range(length)], "labels": i % 3}


ROWS = [example(i) for i in range(44)]


def _bert() -> nn.Module:
    return tiny.bert(hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)


def _lora() -> nn.Module:
    model = tiny.llama()
    options = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
    return peft.get_peft_model(model, options)


class SetUp(NamedTuple):
    """One training. All draw random numbers in each step, and change the learning rate."""

    data: Callable[[], Any]
    settings: dict[str, Any]
    callbacks: Callable[[], list[TrainerCallback]]
    model: Callable[[], nn.Module] = _bert


SETUPS = {
    "examples, accumulated, in micro-batches": SetUp(
        lambda: m.bucketed(ROWS, batch_size=4, n_buckets=3),
        {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
        lambda: [m.MicrobatchCallback(max_tokens=48), m.ShardedCheckpointCallback("40KB")],
    ),
    "batches, two workers, reports": SetUp(
        lambda: m.bucketed(ROWS, max_tokens=72, n_buckets=3),
        {"per_device_train_batch_size": 1, "dataloader_num_workers": 2},
        lambda: [m.MemoryReportCallback(), m.OverflowCallback(), m.ShardedCheckpointCallback()],
    ),
    "8-bit state": SetUp(
        lambda: m.bucketed(ROWS, max_tokens=72),
        {"per_device_train_batch_size": 1, "optim": "adamw_bnb_8bit"},
        lambda: [m.EmbeddingBitsCallback(), m.ShardedCheckpointCallback("20KB")],
    ),
    "adapters": SetUp(
        lambda: m.bucketed([{"input_ids": row["input_ids"]} for row in ROWS], batch_size=4),
        {"per_device_train_batch_size": 4},
        lambda: [m.MicrobatchCallback(), m.ShardedCheckpointCallback()],
        _lora,
    ),
}


PAIR = "two processes"
SETUPS_OF_TWO = {
    PAIR: SetUp(
        lambda: m.bucketed(ROWS, batch_size=2),
        {
            "per_device_train_batch_size": 2,
            **tiny.DDP,
            "save_total_limit": 1,  # so that the newest whole checkpoint is the only one
        },
        lambda: [m.MicrobatchCallback(max_examples=1), m.ShardedCheckpointCallback("40KB")],
    )
}
"""Of two processes that share their gradients."""


class Progress(TrainerCallback):
    """Send what a run does, so that it can be ended there."""

    def __init__(self, writer: Any) -> None:
        self.writer = writer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.writer.send("saving" if control.should_save else "step")

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.writer.send("saved")


def train(name: str, folder: Path, writer: Any, rank: int = 0, port: int = 0, seed: int = 0) -> None:
    """Train from the newest whole checkpoint on, if there is one, and keep what the run ends with."""
    set_up = {**SETUPS, **SETUPS_OF_TWO}[name]
    if name in SETUPS_OF_TWO:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), ACCELERATE_USE_CPU="true")
    torch.manual_seed(seed)  # a resumed run has other random numbers than the first, until it reads those saved
    model = set_up.model()
    asked = {"max_steps": STEPS, "save_strategy": "steps", "save_steps": 2, "save_total_limit": 2}
    asked |= {"logging_strategy": "steps", "logging_steps": 1, "optim": "adamw_torch", "learning_rate": 1e-2}
    args = tiny.arguments(folder, **{**asked, "lr_scheduler_type": "cosine", "max_grad_norm": 1.0, **set_up.settings})
    collator = m.BucketedCollator(tiny.tokenizer(), causal_lm=name == "adapters")
    trainer = Trainer(model, args, train_dataset=set_up.data(), data_collator=collator)
    m.attach(trainer, *set_up.callbacks())
    trainer.add_callback(Progress(writer))
    writer.send("built")
    trainer.train(resume_from_checkpoint=any(why_not_whole(each) is None for each in folder.glob("checkpoint-*")))
    keys, logs = ("step", "loss", "grad_norm", "learning_rate"), trainer.state.log_history
    logs = [{key: log[key] for key in keys} for log in logs if "loss" in log]
    state = trainer.optimizer.optimizer.state_dict()
    final = {"weights": model.state_dict(), "optimizer": state, "logs": logs if rank == 0 else None}
    torch.save(final, folder / f"{rank}-{FINAL}")
