"""Sharded steps: the prediction for one of two processes against torch's allocator in two processes of gloo."""

from __future__ import annotations

import json
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import pytest
from host_semantics import HostSemantics
from sharded_ranks import batch, build

from hf_memopt.memory.allocator.replay import ReplayPlan, replay
from hf_memopt.memory.distributed.shares import shard_facts, sharded_step
from hf_memopt.memory.optimizers.optimizer_memory import optimizer_memory, parameter_facts
from hf_memopt.memory.recording.step import autocast_dtype, record_step
from hf_memopt.memory.settings import StepSettings
from hf_memopt.memory.storage_tracker import StorageTracker
from two_ranks import run_pair

LLAMA = {
    "model": "LlamaForCausalLM",
    "config": "LlamaConfig",
    "size": {
        "vocab_size": 1999,  # odd: a shard is padded
        "hidden_size": 128,
        "intermediate_size": 352,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "batch": (2, 48),
    "precision": "fp32",
}
BERT = {
    "model": "BertForSequenceClassification",
    "config": "BertConfig",
    "size": {
        "vocab_size": 1999,
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    },
    "batch": (4, 64),
    "precision": "fp32",
    "layers": ["BertLayer"],
}
CASES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama, bf16": {**LLAMA, "precision": "bf16"},
    "llama, checkpointing": {**LLAMA, "checkpointing": True, "batch": (4, 96)},
    "llama, tied": {**LLAMA, "size": {**LLAMA["size"], "tie_word_embeddings": True}},
    "llama, accumulation": {**LLAMA, "accumulation": 3},
    "bert": BERT,
    "bert, bf16": {**BERT, "precision": "bf16"},
    "gpt2": {"model": "GPT2LMHeadModel", "config": "GPT2Config", "precision": "fp32", "batch": (2,48), "size": {"vocab_size": 1999, "n_embd": 128, "n_layer": 3, "n_head": 4}},
    "llama, frozen embeddings": {**LLAMA, "frozen": "embed_tokens"},
}


class ExactAllocator:
    """Counts bytes as they are, without blocks."""

    def __init__(self) -> None:
        self.sizes: dict[Hashable, int] = {}
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = self.retries = 0

    def malloc(self, key: Hashable, size_bytes: int) -> None:
        self.sizes[key] = size_bytes
        self.allocated += size_bytes
        self.peak_allocated = max(self.peak_allocated, self.allocated)

    def free(self, key: Hashable) -> None:
        self.allocated -= self.sizes.pop(key)


def predicted(case: dict[str, Any]) -> int:
    """Return the peak of a step with optimizer states, as the estimate's own parts find it, for kernels of the CPU."""
    settings = StepSettings(
        precision=case["precision"],
        world_size=2,
        strategy="fsdp2",
        gradient_accumulation_steps=case.get("accumulation", 1),
        optim="adamw_torch",
        max_grad_norm=0,
    )
    model = build(case, "meta")
    facts = shard_facts(parameter_facts(model), settings)
    tracker = StorageTracker(padding=False)
    semantics = HostSemantics(tracker=tracker, autocast=autocast_dtype(settings.precision))
    sharded = sharded_step(model, settings)
    assert sharded is not None
    with sharded.sharding():
        inputs = batch(case, "meta")
        trace = record_step(model, inputs, settings, tracker=tracker, semantics=semantics, sharded=sharded)
    optimizer = optimizer_memory(facts, "sgd")
    state = tuple(fact.size_bytes for fact in facts for _ in range(2))
    allocator: Any = ExactAllocator()
    from dataclasses import replace

    plan = ReplayPlan(replace(optimizer, state=state), (), settings.gradient_accumulation_steps, 1, ())
    replay(trace, plan, allocator)
    return int(allocator.peak_allocated)


def test_it(tmp_path: Path) -> None:
    (tmp_path / "cases.json").write_text(json.dumps(CASES))
    program = str(Path(__file__).with_name("sharded_ranks.py"))
    found = run_pair(tmp_path, program, str(tmp_path), str(tmp_path / "cases.json"), timeout_seconds=120)
    for name, case in CASES.items():
        p = predicted(case)
        print(name, found[0][name], found[1][name], p, f"{100 * (p / found[0][name][1] - 1):+.3f} %")
    print((tmp_path/"rank0.log").read_text())
    assert 0
