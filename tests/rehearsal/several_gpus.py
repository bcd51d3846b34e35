"""Train two steps as rank 0 of several GPUs alone, and print what the first GPU holds: run by ``test_world``."""

from __future__ import annotations

import json
import os
import sys
import tempfile

import torch
import transformers
from transformers import Trainer, TrainingArguments

from hf_memopt.rehearsal import world

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_hidden_layers": 4}
SHARDED = {"fsdp": "full_shard auto_wrap", "fsdp_config": {"version": 2}}


def train(kind: str, folder: str) -> dict[str, float]:
    """Return the bytes of weights, of the largest moment beside them, and the steps made."""
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, vocab_size=2000, tie_word_embeddings=False))
    settings = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1, "max_steps": 2}
    arguments = TrainingArguments(folder, **settings, **(SHARDED if kind == "fsdp" else {}))
    ids = torch.arange(5, 37)
    trainer = Trainer(model, arguments, train_dataset=[{"input_ids": ids, "labels": ids}] * 64)
    trainer.train()
    size = sum(weight.numel() * 4 for weight in model.parameters())
    held = [weight.to_local() if hasattr(weight, "to_local") else weight for weight in trainer.model.parameters()]
    moments = [moment for state in trainer.optimizer.state.values() for moment in state.values() if moment.numel() > 1]
    local = [moment.to_local() if hasattr(moment, "to_local") else moment for moment in moments]
    return {
        "weights": size,
        "held": sum(weight.nbytes for weight in held),
        "moments": sum(moment.nbytes for moment in local),
        "peak": torch.cuda.max_memory_allocated(),
        "steps": trainer.state.global_step,
        "examples": trainer.state.global_step * arguments.train_batch_size * arguments.world_size,
        "loss": trainer.state.log_history[0]["loss"],
    }


if __name__ == "__main__":
    if count := int(os.environ.get("WORLD_SIZE", 0)):
        world.install(count)
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(train(sys.argv[1], folder)))
