"""Train two steps as rank 0 of several GPUs alone, and print what it holds as JSON: run by ``test_world``."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from typing import Any

import torch
import transformers
from transformers import Trainer, TrainingArguments

from hf_memopt.prediction.rehearsal import world

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_hidden_layers": 4}
SHARDED = {"fsdp": "full_shard auto_wrap", "fsdp_config": {"version": 2}}


def train(folder: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the bytes of weights and moments on this rank, the peak, and what was trained."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, vocab_size=512))
    weights = sum(weight.nbytes for weight in model.parameters())
    quiet = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1, "max_steps": 2}
    ids = torch.arange(5, 37)
    arguments = TrainingArguments(folder, **quiet, **settings)
    trainer = Trainer(model, arguments, train_dataset=[{"input_ids": ids, "labels": ids}] * 64)
    trainer.train()
    moments = [moment for state in trainer.optimizer.state.values() for moment in state.values() if moment.numel() > 1]
    held, moments = (sum(getattr(t, "_local_tensor", t).nbytes for t in ts) for ts in (model.parameters(), moments))
    return {
        "weights": weights,
        "held": held,
        "moments": moments,
        "peak": torch.cuda.max_memory_allocated(),
        "steps": trainer.state.global_step,
        "examples": trainer.state.global_step * arguments.train_batch_size * arguments.world_size,
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
    }


if __name__ == "__main__":
    if count := int(os.environ.get("WORLD_SIZE", 0)):
        world.install(count)
    with tempfile.TemporaryDirectory() as scratch:
        print(json.dumps(train(scratch, SHARDED if sys.argv[1] == "fsdp" else {})))
