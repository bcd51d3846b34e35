"""Settings of a step under the names of ``TrainingArguments``, and names that are no setting."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import TrainingArguments

import tiny
from hf_memopt import estimate
from hf_memopt.memory.settings import StepSettings, in_own_names
from hf_memopt.memory.training_arguments import settings_of_arguments


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing:FutureWarning")  # transformers 5.23.0 has a new name
@pytest.mark.parametrize(
    "given",
    [
        {"bf16": True},
        {"bf16": False},
        {"fp16": True},
        {"fp16": True, "bf16": False},
        {"gradient_checkpointing": True},
        {"gradient_checkpointing": False},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
        {"eval_strategy": "no"},
        {"per_device_eval_batch_size": 3, "eval_strategy": "epoch"},
        {"optim": "adafactor", "gradient_accumulation_steps": 2, "label_smoothing_factor": 0.1},
    ],
    ids=str,
)
def test_a_spelling_means_what_training_arguments_mean_by_it(given: dict[str, Any], tmp_path) -> None:
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, **given)
    expected = settings_of_arguments(arguments)
    spelled = {name: value for name, value in given.items() if name != "eval_strategy"}
    start = StepSettings(precision="fp32", optim=expected.optim)
    assert start.replace(**spelled) == expected


def test_the_newer_name_of_checkpointing_works_with_any_version() -> None:
    options = {"use_reentrant": True}
    given = {"activation_checkpointing": True, "activation_checkpointing_kwargs": options}
    assert in_own_names(given) == {"checkpointing": options}
    assert in_own_names({"activation_checkpointing": False}) == {"checkpointing": False}


def test_shards_on_the_host_have_their_name_of_0_3_0_too() -> None:
    shared = {"world_size": 2, "strategy": "fsdp2"}
    assert StepSettings().replace(offload=True, **shared) == StepSettings(offload_params=True, **shared)


def test_tf32_is_what_autocast_leaves() -> None:
    assert in_own_names({"tf32": True}) == {"precision": "tf32"}
    assert in_own_names({"tf32": True, "bf16": True}) == {"precision": "bf16"}
    assert in_own_names({"bf16": None, "optim": "sgd"}) == {"optim": "sgd"}


def test_estimate_takes_the_batch_by_either_name_and_8_by_default() -> None:
    sizes = [
        estimate(tiny.bert_config(), seq_len=8, **given).batch_size
        for given in ({}, {"batch_size": 2}, {"per_device_train_batch_size": 2})
    ]
    assert sizes == [8, 2, 2]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"bf16": True, "fp16": True},
            "bf16=True, fp16=True are incompatible: autocast computes in one of them; expected only one. "
            "Pass precision='bf16'",
        ),
        (
            {"bf16": True, "precision": "fp16"},
            "bf16=True, precision='fp16' are the same setting with two values; expected one of them. "
            "Pass precision='fp16' alone",
        ),
        (
            {"batch_size": 2, "per_device_train_batch_size": 4},
            "per_device_train_batch_size=4, batch_size=2 are the same setting with two values; expected one of them. "
            "Pass batch_size=2 alone",
        ),
        (
            {"gradient_checkpointing_kwargs": {"use_reentrant": True}},
            "gradient_checkpointing_kwargs={'use_reentrant': True} has no effect without gradient_checkpointing=True; "
            "expected both. Pass gradient_checkpointing=True",
        ),
    ],
)
def test_a_setting_with_two_values(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        in_own_names(given)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("name", "value", "rest"),
    [
        (
            "learning_rate",
            0.1,
            ": this argument of TrainingArguments does not change the memory of a step; expected only those that do. "
            "Remove learning_rate",
        ),
        (
            "torch_compile",
            True,
            ": what the compiler fuses and saves is decided on the GPU; expected a set-up without it. "
            "Remove torch_compile",
        ),
        ("load_in_4bit", True, "; expected another name for it. Pass load_in='nf4'"),
        (
            "preset",
            "4gb-gpu",
            "; expected another name for it. Pass recipe=hf_memopt.recipe('4gb-gpu') to estimate()",
        ),
    ],
)
def test_a_name_from_elsewhere_is_explained(name: str, value: Any, rest: str) -> None:
    with pytest.raises(TypeError) as error:
        estimate(tiny.bert_config(), seq_len=8, **{name: value})
    assert str(error.value) == f"{name}={value!r} is not a setting of a step{rest}"


def test_a_long_value_is_not_repeated() -> None:
    with pytest.raises(TypeError) as error:
        StepSettings().replace(peft_config={"x" * 100: 1})
    assert str(error.value).startswith("peft_config=<dict> is not a setting of a step; expected another name")


# ---- The default length


@pytest.mark.parametrize(("positions", "length", "why"), [(600, 512, ""), (64, 64, ", all that the model takes")])
def test_the_default_length_is_said(positions: int, length: int, why: str) -> None:
    config = tiny.bert_config(max_position_embeddings=positions)
    found, given = estimate(config, batch_size=1), estimate(config, batch_size=1, seq_len=length)
    note = f"seq_len={length} by default{why}; pass the length of your longest rows"
    assert (found.seq_len, found.notes) == (length, (note, *given.notes))
    assert found.peak_reserved_bytes == given.peak_reserved_bytes
