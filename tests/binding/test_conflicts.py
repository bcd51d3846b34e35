"""What is read off a Trainer and its arguments: which settings and techniques are in use. The pairs themselves are
tried in ``test_techniques.py``.
"""

from __future__ import annotations

import csv
from importlib import resources
from typing import Any

import bitsandbytes
import pytest
import torch
from transformers import Trainer

import tiny
from hf_memopt.batching.views import bucketed
from hf_memopt.binding import checkpointing_arguments
from hf_memopt.binding.compatibility import check_compatibility, refusal_of, refusals_of, techniques_in_use
from hf_memopt.binding.compatibility.conflicts import SETTINGS, settings_in_use
from hf_memopt.technique_list import ENGINES, TECHNIQUES, VARIANTS
from hf_memopt.techniques.freezing import FreezeCallback
from hf_memopt.techniques.microbatching import MicrobatchCallback
from hf_memopt.techniques.nonfinite.overflow import OverflowCallback
from hf_memopt.techniques.optimizers.gradient_release import gradient_release

SHARED = {"ddp_broadcast_buffers": False, "ddp_find_unused_parameters": False}
ASKED: dict[str, list[dict[str, Any]]] = {
    "bf16": [{"bf16": True}],
    "fp16": [{"fp16": True}],
    "accumulation": [{"gradient_accumulation_steps": 2}],
    "norm clipping": [{"max_grad_norm": 1.0}],
    "NEFTune": [{"neftune_noise_alpha": 5.0}],
    "reentrant checkpointing": [checkpointing_arguments(use_reentrant=True)],
    "layer-wise optimizer": [
        {"optim": name} for name in ("lomo", "adalomo", "galore_adamw_layerwise", "apollo_adamw_layerwise")
    ],
    "auto_find_batch_size": [{"auto_find_batch_size": True}],
    "torch.compile": [{"torch_compile": True}],
    "Liger kernel": [{"use_liger_kernel": True}],
}
NOT_ASKED = [
    {},
    {"max_grad_norm": None},
    checkpointing_arguments(use_reentrant=False),
    {f"{next(iter(checkpointing_arguments()))}_kwargs": {"use_reentrant": True}},
    {"optim": "galore_adamw"},
    SHARED,
]


def make_trainer(folder: Any, *callbacks: Any, dataset: Any = None, **given: Any) -> Trainer:
    arguments = tiny.arguments(folder, **given.pop("arguments", {}))
    data = tiny.rows(4) if dataset is None else dataset
    return Trainer(model=tiny.bert(), args=arguments, train_dataset=data, callbacks=list(callbacks), **given)


def test_what_is_refused_is_of_known_techniques() -> None:
    """A row of the table with a misspelt technique would refuse nothing."""
    rows = csv.DictReader(resources.files("hf_memopt").joinpath("refusals.csv").read_text("utf-8").splitlines())
    assert {row["technique"] for row in rows} <= {*TECHNIQUES, *VARIANTS}


# ---- Settings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "asked"),
    [(name, asked) for name, ways in ASKED.items() for asked in ways],
    ids=[f"{name}-{next(iter(asked.values()))}" for name, ways in ASKED.items() for asked in ways],
)
def test_each_setting_is_seen_alone(tmp_path: Any, name: str, asked: dict[str, Any]) -> None:
    assert settings_in_use(tiny.arguments(tmp_path, **asked)) == (name,)


@pytest.mark.parametrize("asked", NOT_ASKED, ids=range(len(NOT_ASKED)))
def test_what_is_none_of_them_is_not_seen(tmp_path: Any, asked: dict[str, Any]) -> None:
    assert settings_in_use(tiny.arguments(tmp_path, **asked)) == ()


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        (SHARED, "DDP"),
        ({}, "DDP, default flags"),
        ({"ddp_broadcast_buffers": False}, "DDP, default flags"),
        ({"ddp_find_unused_parameters": False}, "DDP, default flags"),
        ({**SHARED, "ddp_find_unused_parameters": True}, "DDP, default flags"),
    ],
    ids=["both", "none", "buffers", "unused", "one-true"],
)
def test_several_processes_by_their_flags(tmp_path: Any, flags: dict[str, Any], name: str) -> None:
    assert settings_in_use(tiny.arguments(tmp_path, **flags), world_size=2) == (name,)


def test_stocks_default_clips_the_norm(tmp_path: Any) -> None:
    arguments = tiny.arguments(tmp_path)
    defaults = type(arguments)(output_dir=str(tmp_path), use_cpu=True)
    assert settings_in_use(defaults) == ("norm clipping",)


@pytest.mark.parametrize(("engine", "flag"), [("other sharding", "fsdp"), ("DeepSpeed", "deepspeed")])
def test_an_engine_stands_in_for_ddp(tmp_path: Any, monkeypatch: pytest.MonkeyPatch, engine: str, flag: str) -> None:
    """DDP's flags would not help: the message names what really wraps the model."""
    trainer = make_trainer(tmp_path, MicrobatchCallback(max_tokens=64))
    monkeypatch.setattr(type(trainer.args), "world_size", 2)
    assert refusals_of(trainer) == [refusal_of("micro-batching", "DDP, default flags")]
    setattr(trainer, f"is_{flag}_enabled", True)
    assert refusals_of(trainer) == [refusal_of("micro-batching", engine)]


def test_fsdp2_is_told_from_other_sharding(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under FSDP2 micro-batching works with a limit, since nothing recovers from out of memory there."""
    limited = make_trainer(tmp_path, MicrobatchCallback(max_tokens=64))
    unlimited = make_trainer(tmp_path, MicrobatchCallback())
    monkeypatch.setattr(type(limited.accelerator), "is_fsdp2", True)
    limited.is_fsdp_enabled = unlimited.is_fsdp_enabled = True
    assert refusals_of(limited) == []
    assert refusals_of(unlimited) == [refusal_of("micro-batching without a limit", "FSDP2")]


def test_weights_that_are_sharded_when_they_are_loaded_are_seen(tmp_path: Any) -> None:
    trainer = make_trainer(tmp_path, MicrobatchCallback())
    next(trainer.model.parameters()).device_mesh = "a mesh"  # as a DTensor has
    assert refusals_of(trainer) == [refusal_of("micro-batching", "other sharding")]


@pytest.mark.parametrize(
    ("optim", "is_one"),
    [
        ("adamw_bnb_8bit", True),
        ("paged_lion_32bit", True),
        ("lion_32bit", True),
        ("adamw_torch", False),
        ("sgd", False),
    ],
)
def test_optimizers_of_bitsandbytes_are_seen(
    optim: str, is_one: bool, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(tmp_path, arguments={"optim": optim})
    assert refusals_of(trainer) == []
    monkeypatch.setattr(type(trainer.accelerator), "is_fsdp2", True)
    trainer.is_fsdp_enabled = True
    assert refusals_of(trainer) == ([refusal_of("bitsandbytes optimizer", "FSDP2")] if is_one else [])


def test_every_setting_is_tried() -> None:
    assert {*ASKED, "TRL", "ZeRO-3", *ENGINES} == set(SETTINGS)


# ---- Techniques -----------------------------------------------------------------------------------------------------


def test_stock_alone_uses_none(tmp_path: Any) -> None:
    assert techniques_in_use(make_trainer(tmp_path)) == ()


def test_callbacks_and_data_are_named_once_in_the_tables_order(tmp_path: Any) -> None:
    callbacks = [OverflowCallback(), FreezeCallback("embeddings")]
    trainer = make_trainer(tmp_path, *callbacks, dataset=bucketed(tiny.rows(8), batch_size=4))
    expected = ("length buckets", "freezing", "micro-batching", "non-finite detection")
    assert techniques_in_use(trainer, MicrobatchCallback(), FreezeCallback("base")) == expected
    assert expected == tuple(name for name in TECHNIQUES if name in expected)


def test_a_trainer_that_has_no_model_yet_is_checked(tmp_path: Any) -> None:
    """As in the trials of a hyperparameter search, before each makes its model."""
    trainer = make_trainer(tmp_path)
    trainer.model = None
    assert refusals_of(trainer, MicrobatchCallback()) == []


def test_an_optimizer_class_counts_before_it_is_built_and_after(tmp_path: Any) -> None:
    released = gradient_release(torch.optim.SGD), {"lr": 0.1}
    trainer = make_trainer(tmp_path, optimizer_cls_and_kwargs=released)
    assert techniques_in_use(trainer) == ("gradient release",)
    trainer.train()  # accelerate wraps what is built
    assert trainer.optimizer.optimizer is not trainer.optimizer
    trainer.optimizer_cls_and_kwargs = None
    assert techniques_in_use(trainer) == ("gradient release",)


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, bitsandbytes.optim.AdamW8bit])
@pytest.mark.parametrize("is_released", [False, True], ids=["plain", "released"])
def test_an_optimizer_that_is_passed_counts(tmp_path: Any, optimizer_class: Any, is_released: bool) -> None:
    model = tiny.bert()
    chosen = gradient_release(optimizer_class) if is_released else optimizer_class
    optimizer = chosen(model.parameters(), lr=0.1)
    arguments = tiny.arguments(tmp_path)
    trainer = Trainer(model=model, args=arguments, train_dataset=tiny.rows(4), optimizers=(optimizer, None))
    assert techniques_in_use(trainer) == (("gradient release",) if is_released else ())


# ---- Refusals -------------------------------------------------------------------------------------------------------


def test_a_refusal_is_found_from_either_side_and_nothing_is_refused_with_itself() -> None:
    found = refusal_of("gradient release", "micro-batching")
    assert found is not None
    assert refusal_of("micro-batching", "gradient release") == found
    assert refusal_of("freezing", "bf16") is None
    assert all(refusal_of(name, name) is None for name in TECHNIQUES)


def test_a_callback_to_come_is_checked_with_what_is_there(tmp_path: Any) -> None:
    trainer = make_trainer(tmp_path, optimizer_cls_and_kwargs=(gradient_release(torch.optim.SGD), {"lr": 0.1}))
    check_compatibility(trainer)
    with pytest.raises(ValueError) as error:
        check_compatibility(trainer, MicrobatchCallback())
    assert str(error.value) == (
        "gradient release and micro-batching are incompatible: gradients have to stay until the last micro-batch, "
        "and a weight that has stepped cannot be taken back; expected only one of them. Take MicrobatchCallback out of "
        "callbacks="
    )


def test_every_refusal_in_use_is_told_once(tmp_path: Any) -> None:
    settings = {"gradient_accumulation_steps": 2, "max_grad_norm": 1.0}
    released = gradient_release(torch.optim.SGD), {"lr": 0.1}
    trainer = make_trainer(tmp_path, MicrobatchCallback(), arguments=settings, optimizer_cls_and_kwargs=released)
    others = ["micro-batching", "accumulation", "norm clipping"]
    assert refusals_of(trainer) == [refusal_of("gradient release", other) for other in others]
