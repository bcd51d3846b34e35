"""``StepSettings``: defaults of ``TrainingArguments``, refused values and contradictions with whole messages."""

from __future__ import annotations

import dataclasses
from typing import Any

import peft
import pytest
import torch
import transformers

import tiny
from hf_memopt.binding import versions as compat
from hf_memopt.binding.compatibility import refusal_of
from hf_memopt.memory.recording.passes import autocast_dtype
from hf_memopt.memory.settings import NotEstimableError, StepSettings

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
    assert chosen.checkpointing == compat.checkpointing_of(defaults)[0]


def test_settings_are_frozen_and_hashable() -> None:
    one, same, other = StepSettings(), StepSettings(), StepSettings(checkpointing={"every_n_layers": 2})
    assert one == same != other
    assert hash(one) == hash(same)
    assert isinstance(hash(other), int)  # a mapping would not be
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.optim = "sgd"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"precision": "bf-16"},
            "precision='bf-16' is invalid; expected 'auto', 'fp32', 'tf32', 'bf16' or 'fp16'. "
            "Did you mean 'bf16'? Pass precision='auto'",
        ),
        (
            {"precision": None},
            "precision=None is invalid; expected 'auto', 'fp32', 'tf32', 'bf16' or 'fp16'. Pass precision='auto'",
        ),
        (
            {"weights_dtype": "int8"},
            "weights_dtype='int8' is invalid; expected 'float32', 'bfloat16' or 'float16'. "
            "Pass weights_dtype='float32'",
        ),
        (
            {"embedding_bits": 16},
            "embedding_bits=16 is invalid; expected 8 or 32. Pass embedding_bits=32",
        ),
    ],
    ids=lambda value: next(iter(value.values())) if isinstance(value, dict) else None,
)
def test_unknown_choices(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        StepSettings(**changed)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"lora": 0},
            "lora=0 is invalid; expected a rank of 1 or more, a peft.LoraConfig, or None. Pass lora=16",
        ),
        (
            {"lora": True},
            "lora=True is invalid; expected a rank of 1 or more, a peft.LoraConfig, or None. Pass lora=16",
        ),
        (
            {"lora": peft.IA3Config.__name__},
            "lora='IA3Config' is invalid; expected a rank of 1 or more, a peft.LoraConfig, or None. Pass lora=16",
        ),
        (
            {"load_in": "4bit", "lora": 8},
            "load_in='4bit' is invalid; expected 'nf4' or 'int8', or None. Pass load_in=None",
        ),
        (
            {"load_in": "fp8", "lora": 8},
            "load_in='fp8' is invalid; expected 'nf4' or 'int8', or None. Pass load_in=None",
        ),
        (
            {"load_in": "int8"},
            "load_in='int8', lora=None leave nothing to train: quantised weights have no gradient, and the Trainer "
            "refuses such a model; expected adapters. Pass lora=16",
        ),
        (
            {"freeze": ("embeddings", 3)},
            "freeze=('embeddings', 3) is invalid; expected a pattern of hf_memopt.freeze, or a tuple of them. "
            "Pass freeze=('embeddings',)",
        ),
        (
            {"freeze": ""},
            "freeze='' is invalid; expected a pattern of hf_memopt.freeze, or a tuple of them. "
            "Pass freeze=('embeddings',)",
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_adapters_quantised_weights_and_frozen_parameters_are_checked(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        StepSettings(**changed)
    assert str(error.value) == message


def test_frozen_parameters_are_a_tuple_of_patterns() -> None:
    assert StepSettings(freeze="base").freeze == StepSettings(freeze=["base"]).freeze == ("base",)  # type: ignore[arg-type]


def test_a_configuration_of_adapters_is_copied() -> None:
    config = peft.LoraConfig(r=4, target_modules=["query"])
    settings = StepSettings(lora=config)
    assert hash(settings) == hash(StepSettings())  # a LoraConfig has no hash
    assert settings == StepSettings(lora=peft.LoraConfig(r=4, target_modules=["query"])) != StepSettings(lora=4)
    config.r = 8
    assert settings.lora.r == 4  # type: ignore[union-attr]
    assert StepSettings(lora=config, load_in="nf4", freeze="layers:0").replace(lora=None, load_in=None).lora is None


def test_a_quantization_config_is_hinted_at() -> None:
    with pytest.raises(TypeError) as error:
        StepSettings().replace(quantization_config=transformers.BitsAndBytesConfig(load_in_4bit=True))
    assert str(error.value) == (
        "quantization_config=<BitsAndBytesConfig> is not a setting of a step; expected load_in, or a configuration "
        "that has it. Pass load_in='nf4', lora=16; or set config.quantization_config and pass model=config"
    )


COUNTS = ("gradient_accumulation_steps", "eval_batches")
COUNTS_OR_NONE = ("micro_batch_size", "eval_batch_size", "eval_accumulation_steps", "torch_empty_cache_steps")


@pytest.mark.parametrize("name", COUNTS + COUNTS_OR_NONE)
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "2"])
def test_what_is_no_count(name: str, value: Any) -> None:
    with pytest.raises(ValueError) as error:
        StepSettings(**{name: value})
    rule, fix = ("an integer of 1 or more", 1) if name in COUNTS else ("an integer of 1 or more, or None", None)
    assert str(error.value) == f"{name}={value!r} is invalid; expected {rule}. Pass {name}={fix}"


def test_which_counts_may_be_none() -> None:
    assert StepSettings(**dict.fromkeys(COUNTS_OR_NONE)) == StepSettings()
    for name in COUNTS:
        with pytest.raises(ValueError) as error:
            StepSettings(**{name: None})
        assert str(error.value) == f"{name}=None is invalid; expected an integer of 1 or more. Pass {name}=1"


@pytest.mark.parametrize(
    ("setting", "changed", "shown", "fix"),
    [
        ("accumulation", {"gradient_accumulation_steps": 2}, "gradient_accumulation_steps=2", "=1"),
        ("micro-batching", {"micro_batch_size": 4}, "micro_batch_size=4", "=None"),
        ("norm clipping", {"max_grad_norm": 1.0}, "max_grad_norm=1.0", "=0"),
        ("fp16", {"precision": "fp16"}, "precision='fp16'", "='bf16'"),
        ("layer-wise optimizer", {"optim": "lomo"}, "optim='lomo'", "='adamw_torch_fused'"),
    ],
)
def test_gradient_release_is_refused_where_attach_refuses_it(
    setting: str, changed: dict[str, Any], shown: str, fix: str
) -> None:
    with pytest.raises(ValueError) as error:
        StepSettings(**{"gradient_release": True, "max_grad_norm": 0.0, **changed})
    refusal = refusal_of("gradient release", setting)
    assert refusal is not None
    assert str(error.value) == (
        f"gradient_release=True, {shown} are incompatible: {refusal.reason}; expected only one of them. "
        f"Pass {next(iter(changed))}{fix}, or gradient_release=False"
    )


def test_micro_batches_of_an_optimizer_by_layer_are_refused_where_attach_refuses_them() -> None:
    with pytest.raises(ValueError) as error:
        StepSettings(optim="adalomo", micro_batch_size=4)
    assert str(error.value) == (
        "micro_batch_size=4, optim='adalomo' are incompatible: weights step within the backward pass, so an "
        "interrupted step cannot be repeated; expected only one of them. Pass optim='adamw_torch_fused', or "
        "micro_batch_size=None"
    )


@pytest.mark.parametrize("precision", ["auto", "bf16", "fp32", "tf32"])
def test_gradient_release_alone_works(precision: str) -> None:
    assert StepSettings(gradient_release=True, max_grad_norm=0.0, precision=precision).gradient_release


def test_rounding_is_refused_where_it_cannot_train() -> None:
    with pytest.raises(ValueError) as error:
        StepSettings(rounding="kahan", weights_dtype="float16")
    assert str(error.value) == (
        "rounding='kahan', weights_dtype='float16' are incompatible: float16 gradients need a scaler, which needs "
        "float32 weights; expected bfloat16. Pass weights_dtype='bfloat16'"
    )
    with pytest.raises(ValueError) as error:
        StepSettings(rounding="stochastic", precision="fp16")
    assert str(error.value) == (
        "rounding='stochastic', precision='fp16' are incompatible: the gradient scaler needs float32 weights; expected "
        "only one of them. Pass precision='bf16', or rounding='nearest'"
    )


def test_replace() -> None:
    old = StepSettings(optim="sgd")
    new = old.replace(weight_decay=0.1, checkpointing=True)
    assert (old.weight_decay, old.checkpointing) == (0.0, False)
    assert new == StepSettings(optim="sgd", weight_decay=0.1, checkpointing=True)
    assert old.replace() == old


def test_replace_checks_again() -> None:
    with pytest.raises(ValueError) as error:
        StepSettings().replace(eval_batches=0)
    assert str(error.value) == "eval_batches=0 is invalid; expected an integer of 1 or more. Pass eval_batches=1"


def test_replace_names_the_nearest_setting() -> None:
    with pytest.raises(TypeError) as error:
        StepSettings().replace(gradient_accumulation=2)
    assert str(error.value) == (
        f"gradient_accumulation=2 is not a setting of a step; expected one of {', '.join(NAMES)}. "
        "Did you mean 'gradient_accumulation_steps'? See help(hf_memopt.StepSettings)"
    )


def test_not_estimable_is_a_value_error() -> None:
    assert issubclass(NotEstimableError, ValueError)


def test_every_precision_has_its_autocast() -> None:
    dtypes = {name: str(autocast_dtype(name)) for name in ("fp32", "tf32", "bf16", "fp16")}
    assert dtypes == {"fp32": "None", "tf32": "None", "bf16": "torch.bfloat16", "fp16": "torch.float16"}


def test_optimizers_by_layer_do_not_accumulate() -> None:
    with pytest.raises(ValueError) as error:
        StepSettings(optim="galore_adamw_layerwise", gradient_accumulation_steps=2)
    assert str(error.value) == (
        "optim='galore_adamw_layerwise', gradient_accumulation_steps=2 are incompatible: each layer steps within "
        "the backward pass, and stock Trainer refuses it; expected gradient_accumulation_steps=1. Pass "
        "gradient_accumulation_steps=1"
    )


@pytest.mark.parametrize("value", [None, "1", True, float("nan")])
def test_clipping_by_what_is_no_number(value: Any) -> None:
    with pytest.raises(ValueError) as error:
        StepSettings(max_grad_norm=value)
    assert str(error.value) == (
        f"max_grad_norm={value!r} is not a number; expected one, 0 for no clipping. Pass max_grad_norm=0"
    )


def test_no_clipping_below_0_as_in_the_trainer() -> None:
    assert StepSettings(max_grad_norm=-1.0).max_grad_norm == -1.0
    assert StepSettings(max_grad_norm=-1.0, gradient_release=True).gradient_release


@pytest.mark.parametrize("value", [-0.1, 1, 1.0, 5, None, "0.1", True, float("nan")])
def test_label_smoothing_is_a_share(value: Any) -> None:
    with pytest.raises(ValueError) as error:
        StepSettings(label_smoothing_factor=value)
    assert str(error.value) == (
        f"label_smoothing_factor={value!r} is invalid; expected a number from 0 to below 1. "
        "Pass label_smoothing_factor=0.1"
    )


@pytest.mark.parametrize("optim", ["lomo", "adalomo", "galore_adamw_layerwise", "apollo_adamw_layerwise"])
def test_optimizers_within_the_backward_pass_and_the_gradient_scaler(optim: str) -> None:
    with pytest.raises(ValueError) as error:
        StepSettings(optim=optim, precision="fp16")
    assert str(error.value) == (
        f"optim={optim!r}, precision='fp16' are incompatible: each parameter steps within the backward pass, and "
        "the gradient scaler then stops the run; expected bf16 or fp32. Pass precision='bf16', or another optimizer"
    )
    assert StepSettings(optim=optim, precision="bf16").optim == optim


def test_the_scaler_stops_at_the_stand_in_of_optimizers_by_layer() -> None:
    from transformers.trainer_pt_utils import LayerWiseDummyOptimizer

    scaler = torch.amp.GradScaler("cpu")
    model = torch.nn.Linear(2, 2)
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    with pytest.raises(AssertionError, match="No inf checks were recorded for this optimizer"):
        scaler.step(LayerWiseDummyOptimizer(optimizer_dict={}))


def test_the_scaler_stops_lomo_where_gradients_are_clipped_and_only_there() -> None:
    assert StepSettings(optim="lomo", precision="fp16", max_grad_norm=0).optim == "lomo"
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
