"""What ``attach`` reads off a Trainer and its arguments: which settings, engines and techniques are in use. The pairs
themselves are tried in ``tests/techniques/test_techniques.py``.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Callable
from importlib import resources
from typing import Any

import bitsandbytes
import pytest
import torch
from tables import table
from transformers import Trainer

import tiny
from hf_memopt import FusedCrossEntropyCallback, MicrobatchCallback, attach, low_memory_optimizer
from hf_memopt.technique_list import TECHNIQUES, VARIANTS
from hf_memopt.training.binding import checkpointing_arguments

RELEASED = low_memory_optimizer(torch.optim.SGD, release=True), {"lr": 0.1}


def make_trainer(folder: Any, *callbacks: Any, world_size: int = 1, **given: Any) -> Trainer:
    arguments = tiny.arguments(folder, **given.pop("arguments", {}))
    trainer = Trainer(tiny.bert(), arguments, train_dataset=tiny.rows(4), callbacks=list(callbacks), **given)
    type(trainer.args).world_size = property(lambda args: world_size)  # type: ignore[method-assign,assignment]
    return trainer


@pytest.fixture(autouse=True)
def _world_size_of_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type(tiny.arguments("unused"))
    monkeypatch.setattr(kind, "world_size", kind.world_size)


def refused(trainer: Trainer) -> str:
    """Return which two things ``attach`` refuses together; "" for none."""
    try:
        attach(trainer).memopt_handle.remove()
    except ValueError as error:
        return str(error).partition(" are incompatible")[0]
    return ""


def test_what_is_refused_is_of_known_techniques() -> None:
    """A row of the table with a misspelt technique would refuse nothing."""
    rows = csv.DictReader(resources.files("hf_memopt").joinpath("refusals.csv").read_text("utf-8").splitlines())
    assert {row["technique"] for row in rows} <= {*TECHNIQUES, *VARIANTS}


OF_CHECKPOINTING = [
    (checkpointing_arguments(use_reentrant=True), "gradient release and reentrant checkpointing"),
    (checkpointing_arguments(use_reentrant=False), ""),
    ({list(checkpointing_arguments())[1]: {"use_reentrant": True}}, ""),  # not switched on
]
SETTINGS = [*table("binding/tables/settings_and_techniques"), *(("release", 1, *row) for row in OF_CHECKPOINTING)]


@pytest.mark.parametrize(("technique", "world_size", "arguments", "pair"), SETTINGS, ids=str)
def test_settings_that_a_technique_cannot_have(tmp_path, technique, world_size, arguments, pair) -> None:
    callbacks, optimizer = ([], RELEASED) if technique == "release" else ([MicrobatchCallback()], None)
    given = {"arguments": arguments, "optimizer_cls_and_kwargs": optimizer, "world_size": world_size}
    assert refused(make_trainer(tmp_path, *callbacks, **given)) == pair


@pytest.mark.parametrize(
    ("variables", "callback", "pair"),
    [
        ({"ACCELERATE_DYNAMO_BACKEND": "EAGER"}, FusedCrossEntropyCallback, "fused cross-entropy and torch.compile"),
        ({"ACCELERATE_DYNAMO_BACKEND": "NO"}, FusedCrossEntropyCallback, ""),
        ({"ACCELERATE_MIXED_PRECISION": "fp16"}, None, "gradient release and fp16"),
    ],
)
def test_what_accelerate_launch_asks_for_is_seen(tmp_path, monkeypatch, variables, callback, pair) -> None:
    monkeypatch.setattr(os, "environ", {**os.environ, **variables})
    if callback is None:
        trainer = make_trainer(tmp_path, optimizer_cls_and_kwargs=RELEASED)
    else:
        args = tiny.arguments(tmp_path)
        trainer = Trainer(tiny.llama(), args, train_dataset=tiny.rows(4), callbacks=[callback()])
    assert refused(trainer) == pair


def fully_sharded(trainer: Any, monkeypatch: pytest.MonkeyPatch, is_new: bool = True) -> Any:
    monkeypatch.setattr(type(trainer.accelerator), "is_fsdp2", is_new)
    trainer.is_fsdp_enabled = True
    return trainer


@pytest.mark.parametrize(("engine", "flag"), [("other sharding", "fsdp"), ("DeepSpeed", "deepspeed")])
def test_an_engine_stands_in_for_ddp(tmp_path: Any, engine: str, flag: str) -> None:
    """DDP's flags would not help: the message names what really wraps the model."""
    trainer = make_trainer(tmp_path, MicrobatchCallback(max_tokens=64), world_size=2)
    assert refused(trainer) == "micro-batching and DDP, default flags"
    setattr(trainer, f"is_{flag}_enabled", True)
    assert refused(trainer) == f"micro-batching and {engine}"


def test_fsdp2_is_told_from_other_sharding(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(tmp_path, MicrobatchCallback(max_tokens=64))
    assert refused(fully_sharded(trainer, monkeypatch)) == "micro-batching and FSDP2"
    assert refused(fully_sharded(trainer, monkeypatch, False)) == "micro-batching and other sharding"


def test_weights_that_are_sharded_when_they_are_loaded_are_seen(tmp_path: Any) -> None:
    trainer = make_trainer(tmp_path, MicrobatchCallback())
    next(trainer.model.parameters()).device_mesh = "a mesh"  # as a DTensor has
    assert refused(trainer) == "micro-batching and other sharding"


def built(trainer: Trainer) -> Trainer:
    trainer.train()  # accelerate wraps what is built
    assert trainer.optimizer.optimizer is not trainer.optimizer
    trainer.optimizer_cls_and_kwargs = None
    return trainer


def passed(kind: Any, folder: Any) -> Trainer:
    model = tiny.bert()
    given = (kind(model.parameters(), lr=0.1), None)
    return Trainer(model=model, args=tiny.arguments(folder), train_dataset=tiny.rows(4), optimizers=given)


OPTIMIZERS: dict[str, tuple[bool, Callable[[Any], Trainer]]] = {
    "class": (True, lambda folder: make_trainer(folder, optimizer_cls_and_kwargs=RELEASED)),
    "built": (True, lambda folder: built(make_trainer(folder, optimizer_cls_and_kwargs=RELEASED))),
    "passed": (True, lambda folder: passed(low_memory_optimizer(torch.optim.AdamW, release=True), folder)),
    "passed, 8 bits": (
        True,
        lambda folder: passed(low_memory_optimizer(bitsandbytes.optim.AdamW8bit, release=True), folder),
    ),
    "plain": (False, lambda folder: passed(torch.optim.AdamW, folder)),
    "plain, 8 bits": (False, lambda folder: passed(bitsandbytes.optim.AdamW8bit, folder)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_counts_before_it_is_built_and_after(name: str, tmp_path: Any) -> None:
    is_released, make = OPTIMIZERS[name]
    trainer = make(tmp_path)
    trainer.add_callback(MicrobatchCallback())
    assert refused(trainer) == ("gradient release and micro-batching" if is_released else "")
