"""``StepSettings``: defaults of ``TrainingArguments``, refused values and contradictions with whole messages."""

from __future__ import annotations

import dataclasses
from typing import Any

import peft
import pytest
import torch

import tiny
from hf_memopt import NotEstimableError, StepSettings
from hf_memopt.binding import checkpointing_of
from hf_memopt.binding import versions as compat

NAMES = [item.name for item in dataclasses.fields(StepSettings)]


def test_defaults_are_those_of_training_arguments(tmp_path: Any) -> None:
    defaults = tiny.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    chosen = StepSettings()
    shared = compat.training_argument_names() & set(NAMES)
    assert shared >= {"optim", "optim_args", "weight_decay", "max_grad_norm", "gradient_accumulation_steps"}
    assert shared >= {"label_smoothing_factor", "eval_accumulation_steps", "prediction_loss_only"}
    for name in shared - {"optim"}:
        assert getattr(chosen, name) == getattr(defaults, name), name
    assert chosen.optim == defaults.optim.value
    assert chosen.checkpointing == checkpointing_of(defaults)[0]


def test_settings_are_frozen_and_hashable() -> None:
    one, same, other = StepSettings(), StepSettings(), StepSettings(checkpointing={"every_n_layers": 2})
    assert one == same != other
    assert hash(one) == hash(same)
    assert isinstance(hash(other), int)  # a mapping would not be
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.optim = "sgd"  # type: ignore[misc]


def test_frozen_parameters_are_a_tuple_of_patterns() -> None:
    assert StepSettings(freeze="base").freeze == StepSettings(freeze=["base"]).freeze == ("base",)  # type: ignore[arg-type]
    assert StepSettings(lora=4, lora_targets=["q_proj"]).lora_targets == ("q_proj",)  # type: ignore[arg-type]


def test_a_configuration_of_adapters_is_copied() -> None:
    config = peft.LoraConfig(r=4, target_modules=["query"])
    settings = StepSettings(lora=config)
    assert hash(settings) == hash(StepSettings())  # a LoraConfig has no hash
    assert settings == StepSettings(lora=peft.LoraConfig(r=4, target_modules=["query"])) != StepSettings(lora=4)
    config.r = 8
    assert settings.lora.r == 4  # type: ignore[union-attr]
    assert StepSettings(lora=config, load_in="nf4", freeze="layers:0").replace(lora=None, load_in=None).lora is None


def test_replace() -> None:
    old = StepSettings(optim="sgd")
    new = old.replace(weight_decay=0.1, checkpointing=True)
    assert (old.weight_decay, old.checkpointing) == (0.0, False)
    assert new == StepSettings(optim="sgd", weight_decay=0.1, checkpointing=True)
    assert old.replace() == old
    with pytest.raises(ValueError) as error:
        old.replace(eval_batches=0)
    assert str(error.value) == "eval_batches=0 is invalid; expected an integer of 1 or more. Pass eval_batches=1"
    with pytest.raises(TypeError) as unknown:
        old.replace(gradient_accumulation=2)
    assert str(unknown.value) == (
        f"gradient_accumulation=2 is not a setting of a step; expected one of {', '.join(NAMES)}. "
        "Did you mean 'gradient_accumulation_steps'? See help(hf_memopt.StepSettings)"
    )


def test_what_may_be() -> None:
    released = {"gradient_release": True, "max_grad_norm": 0.0}
    for precision in ("auto", "bf16", "fp32", "tf32"):
        assert StepSettings(precision=precision, **released).gradient_release
    assert StepSettings(max_grad_norm=-1.0, gradient_release=True).max_grad_norm == -1.0  # as in the Trainer
    assert StepSettings(**dict.fromkeys(COUNTS_OR_NONE)) == StepSettings()
    assert StepSettings(optim="lomo", precision="fp16", max_grad_norm=0).optim == "lomo"
    assert issubclass(NotEstimableError, ValueError)


# ---- Refused values -------------------------------------------------------------------------------------------------

COUNTS = ("gradient_accumulation_steps", "eval_batches")
COUNTS_OR_NONE = ("micro_batch_size", "eval_batch_size", "eval_accumulation_steps", "torch_empty_cache_steps")
PRECISIONS = "expected 'auto', 'fp32', 'tf32', 'bf16' or 'fp16'"
A_RANK = "expected a rank of 1 or more, a peft.LoraConfig, or None. Pass lora=16"
A_PATTERN = "expected a pattern of hf_memopt.freeze, or a tuple of them. Pass freeze=('embeddings',)"
ADAPTED = {"lora": 8}
INVALID: list[tuple[dict[str, Any], str]] = [  # what is wrong, beside what is said of it: NAME=VALUE is invalid; ...
    ({"precision": "bf-16"}, f"{PRECISIONS}. Did you mean 'bf16'? Pass precision='auto'"),
    ({"precision": None}, f"{PRECISIONS}. Pass precision='auto'"),
    ({"weights_dtype": "int8"}, "expected 'float32', 'bfloat16' or 'float16'. Pass weights_dtype='float32'"),
    ({"embedding_bits": 16}, "expected 8 or 32. Pass embedding_bits=32"),
    (
        {"strategy": "zero1"},
        "expected 'auto', 'ddp', 'fsdp2', 'zero2' or 'zero3'. Did you mean 'zero2'? Pass strategy='auto'",
    ),
    *(({"lora": value}, A_RANK) for value in (0, True, "IA3Config")),
    *(
        ({"load_in": value, **ADAPTED}, "expected 'nf4' or 'int8', or None. Pass load_in=None")
        for value in ("4bit", "fp8")
    ),
    *(({"freeze": value}, A_PATTERN) for value in (("embeddings", 3), "")),
    *(
        ({name: value}, f"expected an integer of 1 or more. Pass {name}=1")
        for name in COUNTS
        for value in (0, 1.5, True, "2", None)
    ),
    *(
        ({name: value}, f"expected an integer of 1 or more, or None. Pass {name}=None")
        for name in COUNTS_OR_NONE
        for value in (0, -1, True, "2")
    ),
    *(
        ({"label_smoothing_factor": value}, "expected a number from 0 to below 1. Pass label_smoothing_factor=0.1")
        for value in (-0.1, 1, 5, None, "0.1", True, float("nan"))
    ),
    (
        {"prepare": ("freeze",)},
        "expected a tuple of functions that change the model. Pass prepare=(function,)",
    ),
]


@pytest.mark.parametrize(("changed", "rest"), INVALID, ids=lambda value: str(value)[:50])
def test_an_invalid_value_is_refused(changed: dict[str, Any], rest: str) -> None:
    with pytest.raises(ValueError) as error:
        StepSettings(**changed)
    name, value = next(iter(changed.items()))
    assert str(error.value) == f"{name}={value!r} is invalid; {rest}"


# ---- Contradictions -------------------------------------------------------------------------------------------------

ONE = "expected only one of them. Pass"
NO_NORM = "the global norm is known only when the first gradients are gone"
BY_STEPS = "weights step within the backward pass, so an interrupted step cannot be repeated"
SCALER = "each parameter steps within the backward pass, and the gradient scaler then stops the run"
REFUSED: list[tuple[dict[str, Any], str]] = [
    *(
        (
            {"max_grad_norm": value},
            f"max_grad_norm={value!r} is not a number; expected one, 0 for no clipping. Pass max_grad_norm=0",
        )
        for value in (None, "1", True, float("nan"))
    ),
    (
        {"gradient_release": True},
        f"gradient_release=True, max_grad_norm=1.0 are incompatible: {NO_NORM}; {ONE} max_grad_norm=0, or "
        "gradient_release=False",
    ),
    (
        {"load_in": "int8"},
        "load_in='int8', lora=None leave nothing to train: quantised weights have no gradient, and the Trainer "
        "refuses such a model; expected adapters. Pass lora=16",
    ),
    (
        {"lora_targets": ("query",)},
        "lora_targets=('query',), lora=None do not fit each other; expected a rank as lora. Pass lora=16, or "
        "LoraConfig(target_modules=...) alone",
    ),
    (
        {"optim": "adalomo", "micro_batch_size": 4},
        f"micro_batch_size=4, optim='adalomo' are incompatible: {BY_STEPS}; {ONE} optim='adamw_torch_fused', or "
        "micro_batch_size=None",
    ),
    (
        {"rounding": "kahan", "weights_dtype": "float16"},
        "rounding='kahan', weights_dtype='float16' are incompatible: float16 gradients need a scaler, which needs "
        "float32 weights; expected bfloat16. Pass weights_dtype='bfloat16'",
    ),
    (
        {"rounding": "stochastic", "precision": "fp16"},
        "rounding='stochastic', precision='fp16' are incompatible: the gradient scaler needs float32 weights; "
        f"{ONE} precision='bf16', or rounding='nearest'",
    ),
    (
        {"optim": "galore_adamw_layerwise", "gradient_accumulation_steps": 2},
        "optim='galore_adamw_layerwise', gradient_accumulation_steps=2 are incompatible: each layer steps within "
        "the backward pass, and stock Trainer refuses it; expected gradient_accumulation_steps=1. Pass "
        "gradient_accumulation_steps=1",
    ),
    *(
        (
            {"optim": optim, "precision": "fp16"},
            f"optim={optim!r}, precision='fp16' are incompatible: {SCALER}; expected bf16 or fp32. Pass "
            "precision='bf16', or another optimizer",
        )
        for optim in ("lomo", "adalomo", "galore_adamw_layerwise", "apollo_adamw_layerwise")
    ),
    (
        {"embeddings_on_host": True},
        "embeddings_on_host=True, streamed=False do not fit each other: embeddings wait on the host beside streamed "
        "layers; expected both. Pass streamed=True",
    ),
    (
        {"tile_tokens": 64},
        "tile_tokens=64, tiled=False do not fit each other: nothing runs in tiles; expected both. Pass tiled=True",
    ),
    (
        {"quantize_experts": True},
        "quantize_experts=True, load_in=None do not fit each other: experts are put into 4 bits where linear layers "
        "are; expected both. Pass load_in='nf4', lora=16",
    ),
    (
        {"quantize_experts": True, "load_in": "nf4", "lora": 8, "world_size": 2, "strategy": "fsdp2"},
        "quantize_experts=True, strategy='fsdp2' are incompatible: it cuts parameters, and would leave all experts in "
        "each process; expected one process, or DDP. Pass strategy='ddp'",
    ),
    (
        {"offload_params": True},
        "offload_params=True, world_size=1, strategy='auto' do not fit each other: what goes to the host are shards; "
        "expected several processes that shard. Pass world_size=2, strategy='fsdp2'",
    ),
]


@pytest.mark.parametrize(("changed", "message"), REFUSED, ids=lambda value: str(value)[:50])
def test_a_contradiction_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        StepSettings(**changed)
    assert str(error.value) == message


RELEASED = {"gradient_release": True, "max_grad_norm": 0.0}
SHARED = {"world_size": 2, "strategy": "ddp"}
OF_THE_TABLE: list[tuple[dict[str, Any], str, str]] = [  # settings, what is named, what to pass instead
    ({**RELEASED, "gradient_accumulation_steps": 2}, "gradient_accumulation_steps=2", "gradient_accumulation_steps=1"),
    ({**RELEASED, "micro_batch_size": 4}, "micro_batch_size=4", "micro_batch_size=None"),
    ({**RELEASED, "precision": "fp16"}, "precision='fp16'", "precision='bf16'"),
    ({**RELEASED, "optim": "lomo"}, "optim='lomo'", "optim='adamw_torch_fused'"),
    ({**RELEASED, **SHARED}, "world_size=2", "world_size=1"),
    ({"world_size": 2, "strategy": "zero2", "micro_batch_size": 1}, "strategy='zero2'", "strategy='ddp'"),
]


@pytest.mark.parametrize(("changed", "named", "fix"), OF_THE_TABLE, ids=lambda value: str(value)[:60])
def test_what_attach_refuses_is_refused(changed: dict[str, Any], named: str, fix: str) -> None:
    """The reasons are rows of ``refusals.csv``, which the tests of ``attach`` compare."""
    with pytest.raises(ValueError) as error:
        StepSettings(**changed)
    first, off = ("gradient_release=True", False) if "gradient_release" in changed else ("micro_batch_size=1", None)
    head, _, rest = str(error.value).partition(" are incompatible: ")
    assert head == f"{first}, {named}"
    assert rest.endswith(f"; expected only one of them. Pass {fix}, or {first.partition('=')[0]}={off}")


# ---- Why the gradient scaler is refused -----------------------------------------------------------------------------


def test_the_scaler_stops_at_the_stand_in_of_optimizers_by_layer() -> None:
    from transformers.trainer_pt_utils import LayerWiseDummyOptimizer

    scaler = torch.amp.GradScaler("cpu")
    model = torch.nn.Linear(2, 2)
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    with pytest.raises(AssertionError, match="No inf checks were recorded for this optimizer"):
        scaler.step(LayerWiseDummyOptimizer(optimizer_dict={}))


def test_the_scaler_stops_lomo_where_gradients_are_clipped_and_only_there() -> None:
    lomo_optim = pytest.importorskip("lomo_optim")
    model = torch.nn.Linear(2, 2)
    optimizer, scaler = lomo_optim.Lomo(model), torch.amp.GradScaler("cpu")
    for step in range(2):  # what accelerate does with it: backward and unscale to clip, never a step of the scaler
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        if step == 0:
            scaler.unscale_(optimizer)
            continue
        with pytest.raises(RuntimeError, match=r"unscale_\(\) has already been called on this optimizer"):
            scaler.unscale_(optimizer)
