"""Hundreds of Trainers and estimates in one process, and a long stream: memory, tensors, files and threads stay."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextvars import copy_context
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import torch
from torch import nn
from transformers import Trainer, TrainerCallback

import tiny
from hf_memopt import BucketedCollator, attach, estimate
from hf_memopt.prediction.memory.tracking import meta_outputs
from technique_table import TABLE, make_trainer

MIB = 2**20


class Held(NamedTuple):
    """What the process holds."""

    rss_bytes: int
    tensors: int
    objects: int
    descriptors: int
    threads: int
    context_variables: int  # of this thread: the objects of their tree come and go


def held() -> Held:
    """Return what the process holds once garbage is collected and malloc has returned what it can."""
    meta_outputs._remembered.clear()  # shapes of operations, of which 2**15 are kept at most
    for _ in range(3):
        gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    everything = gc.get_objects()
    return Held(
        rss_bytes=psutil.Process().memory_info().rss,
        tensors=sum(isinstance(one, torch.Tensor) for one in everything),
        objects=len(everything),
        descriptors=len(os.listdir("/proc/self/fd")),
        threads=threading.active_count(),
        context_variables=len(copy_context()),
    )


def assert_flat(repeat: Callable[[int], object], *, warm_up: int, times: int, most_bytes_each: int) -> None:
    """Assert that what is held after ``times`` calls is what was held after ``warm_up`` of them."""
    for number in range(warm_up):
        repeat(number)
    before = held()
    for number in range(warm_up, times):
        repeat(number)
    after = held()
    grown = Held(*(new - old for new, old in zip(after, before, strict=True)))
    assert grown.tensors <= 0, grown
    assert grown.descriptors <= 0, grown
    assert grown.threads <= 0, grown
    assert grown.context_variables <= 0, grown
    assert grown.objects < times - warm_up, grown  # less than one for each
    assert grown.rss_bytes < most_bytes_each * (times - warm_up), grown


LISTS = [
    [name for name in TABLE if name in names]
    for names in (
        {"length buckets", "freezing", "micro-batching", "memory report", "sharded checkpoints", "precision"},
        {"32-bit embeddings", "evaluation guard", "checkpointing policy", "memory report"},
        {"gradient release", "evaluation guard"},
        {"16-bit weights", "non-finite detection", "memory report"},
        {"sparse tied embedding", "micro-batching"},
        {"fused cross-entropy", "memory report", "precision"},
    )
]


def test_200_trainers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of six sets of techniques in turn; each trains a step, evaluates and is deleted."""
    caplog.set_level(logging.CRITICAL, logger="hf_memopt")  # pytest holds what is logged

    def one(number: int) -> None:
        names = LISTS[number % len(LISTS)]
        clips = {"max_grad_norm": 0.0}
        trainer = make_trainer(names, tmp_path / f"{number}", max_steps=1, **clips)
        trainer.train()
        trainer.evaluate()

    assert_flat(one, warm_up=36, times=200, most_bytes_each=64 * 1024)


def test_200_estimates() -> None:
    """Each of another size, so that each is recorded anew."""

    def one(number: int) -> None:
        config = tiny.llama_config(vocab_size=60 + number, hidden_size=16, num_hidden_layers=1, intermediate_size=16)
        str(estimate(config, batch_size=1 + number % 3, seq_len=8, gpu="RTX 3060 12GB", optim="adamw_bnb_8bit"))

    assert_flat(one, warm_up=40, times=200, most_bytes_each=64 * 1024)


# ---- A long stream --------------------------------------------------------------------------------------------------


class Rows(torch.utils.data.IterableDataset[Any]):
    """Rows of mixed lengths without an end, made as they are read."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        number = 0
        while True:
            number += 1
            yield {"input_ids": [5 + number % 90] * (3 + (7 * number) % 23), "labels": number % 3}


class Bag(nn.Module):
    """The smallest model that the Trainer trains: a mean of embeddings and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(100, 4), nn.Linear(4, 3)

    def forward(self, input_ids: Any, labels: Any, attention_mask: Any = None) -> dict[str, torch.Tensor]:
        logits = self.head(self.embedding(input_ids).mean(1))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Watch(TrainerCallback):
    """Notes what the process holds every 1,000 steps."""

    def __init__(self) -> None:
        self.held: list[Held] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % 1000 == 0:
            self.held.append(held())


def test_10_000_steps_of_a_stream(tmp_path: Path) -> None:
    watch = Watch()
    args = tiny.arguments(tmp_path, max_steps=10_000, per_device_train_batch_size=4, remove_unused_columns=False)
    collator = BucketedCollator(tiny.tokenizer())
    attach(Trainer(Bag(), args, train_dataset=Rows(), data_collator=collator, callbacks=[watch])).train()
    assert len(watch.held) == 10
    first, last = watch.held[1], watch.held[-1]
    assert last.rss_bytes - first.rss_bytes < 4 * MIB, watch.held
    assert last.tensors <= first.tensors + 2, watch.held
    assert (last.descriptors, last.threads) == (first.descriptors, first.threads), watch.held
