"""What ``TrainingArguments`` say of a step, and their names as arguments of ``estimate``."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import Trainer

import tiny
from hf_memopt import estimate, estimate_from_arguments
from hf_memopt.gpus import find_gpu
from hf_memopt.prediction.memory import estimate_of
from hf_memopt.prediction.memory.settings import BatchShape, NotEstimableError
from hf_memopt.training.binding import checkpointing_arguments
from hf_memopt.types import StepSettings


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Estimate without a GPU also where there is one."""
    for module in ("estimation", "training_arguments"):
        monkeypatch.setattr(f"hf_memopt.prediction.memory.{module}.current_gpu", lambda: None)


READ: list[tuple[dict[str, Any], dict[str, Any]]] = [  # arguments, and settings; the rest as without
    ({}, {"precision": "fp32", "optim": "sgd", "max_grad_norm": 0.0, "eval_batch_size": None}),
    ({"bf16": True}, {"precision": "bf16"}),
    ({"optim": "adamw_bnb_8bit"}, {"optim": "adamw_bnb_8bit"}),
    ({"optim": "adafactor", "weight_decay": 0.1}, {"optim": "adafactor", "weight_decay": 0.1}),
    *((given, given) for given in ({"max_grad_norm": 0.5}, {"gradient_accumulation_steps": 3})),
    ({"accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 3}}}, {"gradient_accumulation_steps": 3}),
    *((given, given) for given in ({"label_smoothing_factor": 0.1}, {"torch_empty_cache_steps": 4})),
    (
        {"eval_strategy": "epoch", "per_device_eval_batch_size": 3, "eval_accumulation_steps": 2},
        {"eval_batch_size": 3, "eval_accumulation_steps": 2, "prediction_loss_only": False},
    ),
    ({"eval_on_start": True, "per_device_eval_batch_size": 5}, {"eval_batch_size": 5}),
    (
        {"eval_strategy": "epoch", "batch_eval_metrics": True, "eval_do_concat_batches": False},
        {"eval_batch_size": 8, "batch_eval_metrics": True, "eval_do_concat_batches": False},
    ),
    ({"eval_strategy": "steps", "prediction_loss_only": True}, {"eval_batch_size": 8, "prediction_loss_only": True}),
    (checkpointing_arguments(), {"checkpointing": {"use_reentrant": False}}),
    ({next(iter(checkpointing_arguments())): True}, {"checkpointing": True}),
]


@pytest.mark.parametrize(("arguments", "expected"), READ, ids=lambda value: next(iter(value), "none"))
def test_arguments_are_read(tmp_path: Any, arguments: dict[str, Any], expected: dict[str, Any]) -> None:
    args = tiny.arguments(tmp_path, **arguments)
    before = args.to_dict()
    found = estimate_from_arguments(tiny.bert_config(), args, 8)
    plain = {"optim": "sgd", "max_grad_norm": 0.0, "precision": "fp32"}
    by_hand = estimate(tiny.bert_config(), batch_size=8, seq_len=8, **{**plain, **expected})
    assert found.settings == by_hand.settings == StepSettings(**{**plain, **expected})
    for name in ("peak_allocated_bytes", "peak_reserved_bytes", "notes", "flops"):
        assert getattr(found, name) == getattr(by_hand, name)
    assert args.to_dict() == before


@pytest.mark.parametrize("precision", ["fp16", "tf32"])
def test_precision_that_only_a_gpu_accepts(tmp_path: Any, precision: str) -> None:
    args = tiny.arguments(tmp_path)
    setattr(args, precision, True)
    assert estimate_from_arguments(tiny.bert_config(), args, 8).settings.precision == precision


@pytest.mark.parametrize("lengths", [12, [3, 12, 5], np.array([12, 1], np.int32), (12,), np.int64(12)])
def test_the_longest_row_counts(tmp_path: Any, lengths: Any) -> None:
    args = tiny.arguments(tmp_path, per_device_train_batch_size=3)
    found = estimate_from_arguments(tiny.bert_config(), args, lengths, gpu="T4")
    assert (found.seq_len, found.batch_size, found.gpu) == (12, 3, find_gpu("T4"))


def test_overrides_beat_the_arguments(tmp_path: Any) -> None:
    args = tiny.arguments(tmp_path, optim="sgd", eval_strategy="epoch")
    overrides = {"optim": "adafactor", "eval_batches": 4, "micro_batch_size": 2}
    found = estimate_from_arguments(tiny.bert_config(), args, 8, task="masked-lm", **overrides)
    assert {name: getattr(found.settings, name) for name in overrides} == overrides
    assert found.model == "BertForMaskedLM"


def test_processes_share_the_batches_that_are_split(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    args = tiny.arguments(
        tmp_path, eval_strategy="epoch", per_device_eval_batch_size=4, accelerator_config={"split_batches": True}
    )
    trainer = Trainer(tiny.bert(), args, eval_dataset=[{}])
    assert estimate_from_arguments(tiny.bert_config(), args, 8).batch_size == 8
    monkeypatch.setattr(transformers.TrainingArguments, "world_size", 2)
    found = estimate_from_arguments(tiny.bert_config(), args, 8)
    assert (args.per_device_train_batch_size, found.batch_size, found.settings.eval_batch_size) == (8, 4, 2)
    assert estimate_of(trainer, BatchShape(4, 8, None, None)).batch_size == 4


@pytest.mark.parametrize(
    ("variable", "value", "precision"),
    [("ACCELERATE_MIXED_PRECISION", "bf16", "bf16"), ("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR", None)],
)
def test_what_accelerate_launch_asks_for_is_counted(variable, value, precision, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(os, "environ", {**os.environ, variable: value})
    args = tiny.arguments(tmp_path)
    if precision is None:
        with pytest.raises(NotEstimableError, match=r"^not estimable: torch_compile=True: "):
            estimate_from_arguments(tiny.bert_config(), args, 8)
    else:
        assert estimate_from_arguments(tiny.bert_config(), args, 8).settings.precision == precision


SGD, ADAM, ADAMW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW
OWN: list[tuple[Any, dict[str, Any], Any]] = [  # optimizers of a Trainer, and what is read of them
    (SGD, {"momentum": 0.9, "weight_decay": 0.1}, ("sgd", "momentum=0.9", 0.1)),
    (ADAMW, {"fused": True}, ("adamw_torch_fused", None, 0.01)),
    (ADAMW, {"amsgrad": True}, "amsgrad=True"),
    (ADAM, {"weight_decay": 0.1}, "weight_decay=0.1, for which it copies all gradients"),
]


@pytest.mark.parametrize(("kind", "options", "expected"), OWN, ids=str)
def test_an_optimizer_of_the_trainers_own_is_read_or_refused(kind, options, expected, tmp_path) -> None:
    model = tiny.bert()
    trainer = Trainer(model, tiny.arguments(tmp_path), optimizers=(kind(model.parameters(), lr=0.1, **options), None))
    shape = BatchShape(2, 8, None, None)
    if isinstance(expected, str):
        with pytest.raises(NotEstimableError, match=f"optimizer=<{kind.__name__}> with {expected} is not counted"):
            estimate_of(trainer, shape)
    else:
        found = estimate_of(trainer, shape).settings
        assert (found.optim, found.optim_args, found.weight_decay) == expected


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing:FutureWarning")  # transformers 5.23.0 has a new name
@pytest.mark.parametrize(
    "given",
    [
        *({"bf16": True}, {"bf16": False}, {"fp16": True}, {"fp16": True, "bf16": False}),
        *({"gradient_checkpointing": True}, {"gradient_checkpointing": False}),
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
        {"per_device_eval_batch_size": 3},
        {"optim": "adafactor", "gradient_accumulation_steps": 2, "label_smoothing_factor": 0.1},
    ],
    ids=str,
)
def test_a_spelling_means_what_training_arguments_mean_by_it(given: dict[str, Any], tmp_path: Any) -> None:
    evaluates = {"eval_strategy": "epoch"} if "per_device_eval_batch_size" in given else {}
    arguments = transformers.TrainingArguments(str(tmp_path), use_cpu=True, **given, **evaluates)
    expected = estimate_from_arguments(tiny.bert_config(), arguments, 8).settings
    assert StepSettings(precision="fp32", optim=expected.optim).replace(**given) == expected


def test_estimate_takes_the_batch_by_either_name_and_8_by_default() -> None:
    given: tuple[dict[str, Any], ...] = ({}, {"batch_size": 2}, {"per_device_train_batch_size": 2})
    assert [estimate(tiny.bert_config(), seq_len=8, **one).batch_size for one in given] == [8, 2, 2]
