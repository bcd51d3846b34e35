"""Recipes with adapters, quantised weights and 16-bit weights: what they become, and what is refused before a run."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from datasets import Dataset

import tiny
from hf_memopt import OverflowCallback, Recipe, StepSettings, estimate, find_gpu, recipe
from hf_memopt.binding import versions
from hf_memopt.devices.precision_support import Precision
from hf_memopt.recipes.model_setup import prepared_model

# peft 0.21 asks transformers 5.23 under the names of 5.17; recipes call it without this warning
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
PLAIN = Recipe("plain", "a test")
SIZES = {"hidden_size": 64, "intermediate_size": 128}  # bitsandbytes quantises blocks of 64
NEW_FIELDS = (
    *("lora", "lora_alpha", "lora_targets", "load_in", "weights_dtype", "rounding", "offload"),
    *("fused_cross_entropy", "sparse_tied_embedding", "gradient_release"),
)
T4 = Precision("fp16", "a T4 (compute capability 7.5) only emulates bfloat16", emulates_bf16=True)


@pytest.fixture
def on_t4(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answer as a GPU without bfloat16 does."""
    for module in ("hf_memopt.devices", "hf_memopt.devices.precision_support"):
        monkeypatch.setattr(f"{module}.choose_precision", lambda *, use_cpu=False: T4)
        monkeypatch.setattr(f"{module}.accelerator_type", lambda: "cuda")
    monkeypatch.setattr("hf_memopt.recipes.wired_trainer.choose_precision", lambda *, use_cpu=False: T4)


def message_of(function: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(ValueError) as error:
        function(*args, **kwargs)
    return str(error.value)


# ---- Fields ---------------------------------------------------------------------------------------------------------


def test_a_recipe_of_an_earlier_version_is_read() -> None:
    old = {name: value for name, value in json.loads(PLAIN.to_json()).items() if name not in NEW_FIELDS}
    assert Recipe.from_json(json.dumps(old)) == PLAIN


def test_a_recipe_with_adapters_is_data() -> None:
    chosen = PLAIN.replace(
        lora=8, lora_alpha=32, lora_targets=["q_proj", "v_proj"], load_in="nf4", offload=True, checkpointing=True
    )
    assert Recipe.from_json(chosen.to_json()) == chosen
    assert hash(chosen) == hash(Recipe.from_json(chosen.to_json()))
    assert chosen.lora_targets == ("q_proj", "v_proj")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lora": 0}, "lora=0 is invalid; expected an integer of 1 or more, or None. Pass lora=None"),
        (
            {"lora": 8, "lora_targets": "q_proj"},
            "lora_targets='q_proj' is invalid; expected 'auto', or a tuple or list of strings. "
            "Pass lora_targets='auto'",
        ),
        (
            {"lora": 8, "lora_targets": ()},
            "lora_targets=() names no layer; expected 'auto', or names of layers. Pass lora_targets='auto'",
        ),
        ({"lora_alpha": 32}, "lora_alpha=32, lora=None add no adapters; expected their rank. Pass lora=16"),
        (
            {"load_in": "nf4"},
            "load_in='nf4', lora=None leave nothing to train: quantised weights have no gradient, and the Trainer "
            "refuses such a model; expected adapters. Pass lora=16",
        ),
        (
            {"load_in": "4bit", "lora": 8},
            "load_in='4bit' is invalid; expected 'nf4' or 'int8', or None. Pass load_in=None",
        ),
        (
            {"weights_dtype": "float16"},
            "weights_dtype='float16', lora=None train float16 weights, whose gradients torch's scaler refuses; "
            "expected bfloat16 or float32 for weights that are trained. Pass weights_dtype='float32', or lora=16",
        ),
        (
            {"rounding": "kahan"},
            "rounding='kahan' is for 16-bit weights, and this recipe trains float32 weights; expected 'nearest'. "
            "Pass rounding='nearest', or weights_dtype='bfloat16', lora=None",
        ),
        (
            {"rounding": "stochastic", "weights_dtype": "bfloat16", "lora": 8},
            "rounding='stochastic' is for 16-bit weights, and this recipe trains adapters, which are float32; expected "
            "'nearest'. Pass rounding='nearest', or weights_dtype='bfloat16', lora=None",
        ),
        (
            {"offload": True},
            "offload=True, checkpointing=False offload nothing: what goes to the host are the inputs of checkpointed "
            "layers; expected checkpointing. Pass checkpointing=True",
        ),
        (
            {"gradient_release": True, "precision": "fp16"},
            "gradient_release=True, precision='fp16' are incompatible: the gradient scaler looks at all gradients at "
            "once; expected another precision. Pass precision='auto'",
        ),
    ],
)
def test_fields_that_contradict_each_other_are_refused(given: dict[str, Any], message: str) -> None:
    assert message_of(PLAIN.replace, **given) == message


# ---- Estimates ------------------------------------------------------------------------------------------------------


def test_step_settings_have_every_field_that_they_share_with_a_recipe() -> None:
    shared = {item.name for item in fields(Recipe)} & {item.name for item in fields(StepSettings)}
    chosen = PLAIN.replace(lora=8, lora_targets=("q_proj",), load_in="nf4", weights_dtype="bfloat16", precision="bf16")
    settings = chosen.step_settings()
    assert all(getattr(settings, name) == getattr(chosen, name) for name in shared - {"checkpointing"})
    assert PLAIN.replace(checkpointing=True, offload=True).step_settings().checkpointing == {"offload": True}
    released = PLAIN.replace(gradient_release=True, per_device_train_batch_size=8).step_settings()
    assert (released.max_grad_norm, released.gradient_accumulation_steps) == (0, 1)


def test_the_precision_of_an_estimate_is_that_of_the_run(on_t4: None, tmp_path: Path) -> None:
    t4 = find_gpu("T4")
    for chosen in (PLAIN, PLAIN.replace(gradient_release=True), PLAIN.replace(lora=4, weights_dtype="float16")):
        arguments = {"output_dir": str(tmp_path), "use_cpu": False}
        from hf_memopt.recipes.resolved_arguments import resolve_arguments

        real, _ = resolve_arguments(chosen, None, {"output_dir": str(tmp_path)})
        name = "fp16" if real["fp16"] else "bf16" if real["bf16"] else "fp32"
        found = estimate(tiny.llama_config(), batch_size=2, seq_len=8, recipe=chosen, gpu=t4)
        assert found.settings.precision == name, arguments


def test_trained_parameters_are_those_of_the_estimate() -> None:
    chosen = PLAIN.replace(lora=4, weights_dtype="bfloat16", lora_targets=("q_proj", "down_proj"))
    for config, make in ((tiny.llama_config(), tiny.llama), (tiny.bert_config(), tiny.bert)):
        given = chosen if make is tiny.llama else chosen.replace(lora_targets="auto")
        model = given.prepare_model(make().to(torch.bfloat16))
        trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        found = estimate(config, batch_size=2, seq_len=8, recipe=given)
        assert found.trainable_parameters == trained
        assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
        frozen = {p.dtype for p in model.parameters() if not p.requires_grad}
        assert frozen == {torch.bfloat16}


# ---- The model ------------------------------------------------------------------------------------------------------


def test_model_kwargs_have_the_quantisation() -> None:
    chosen = PLAIN.replace(lora=8, load_in="nf4")
    keywords = chosen.model_kwargs()
    config = keywords["quantization_config"]
    assert (config.load_in_4bit, config.bnb_4bit_quant_type, config.bnb_4bit_use_double_quant) == (True, "nf4", True)
    assert keywords["dtype"] == config.bnb_4bit_compute_dtype == torch.bfloat16
    assert config.llm_int8_skip_modules is None  # transformers leaves the head of a language model out
    eight = chosen.replace(load_in="int8").model_kwargs(task="token-classification")["quantization_config"]
    assert (eight.load_in_8bit, eight.llm_int8_skip_modules) == (True, ["classifier", "score"])
    assert message_of(chosen.model_kwargs, task="classification").startswith("task='classification' is unknown; ")


def test_the_recipe_decides_alpha_and_targets() -> None:
    one = PLAIN.replace(lora=4).prepare_model(tiny.llama()).peft_config["default"]
    assert (one.r, one.lora_alpha, len(one.target_modules)) == (4, 8, 2 * 7)
    other = PLAIN.replace(lora=4, lora_alpha=4, lora_targets=("q_proj",)).prepare_model(tiny.llama())
    assert (other.peft_config["default"].lora_alpha, other.peft_config["default"].target_modules) == (4, {"q_proj"})


def test_a_model_with_adapters_of_its_own_is_left_alone() -> None:
    model = peft.get_peft_model(tiny.llama(), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    found, (change,) = prepared_model(PLAIN.replace(lora=8), model)
    assert found is model
    assert str(change) == 'lora: 8 -> "the model\'s own" (PeftModel has adapters already)'
    assert PLAIN.prepare_model(model) is model


def test_targets_that_name_no_layer_are_refused_with_the_nearest() -> None:
    chosen = PLAIN.replace(lora=4, lora_targets=("v_proj", "q_prj"))
    expected = (
        "lora_targets=('v_proj', 'q_prj') names no layer of LlamaForCausalLM with 'q_prj'; expected last parts of the "
        "names of its linear layers: q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj, lm_head. "
        "Did you mean 'q_proj'? Pass lora_targets=('q_proj',)"
    )
    assert message_of(chosen.prepare_model, tiny.llama()) == expected
    assert message_of(estimate, tiny.llama_config(), batch_size=2, seq_len=8, recipe=chosen) == expected
    unlike = message_of(chosen.replace(lora_targets=("xyz",)).prepare_model, tiny.llama())
    assert unlike.endswith("lm_head. Pass lora_targets='auto'")
    wrong = message_of(chosen.replace(lora_targets=("input_layernorm",)).prepare_model, tiny.llama())
    assert wrong.startswith("lora_targets=('input_layernorm',) cannot be added to LlamaForCausalLM (Target module ")
    assert wrong.endswith("; expected names that name linear layers of the model. Pass lora_targets='auto'")


def test_adapters_and_weights_that_do_not_fit_the_recipe_are_refused(tmp_path: Path) -> None:
    qlora, bert = PLAIN.replace(lora=4, load_in="nf4"), tiny.bert(**SIZES)
    assert message_of(qlora.prepare_model, tiny.llama()) == (
        "model=<LlamaForCausalLM> has no quantised weights, and load_in='nf4'; expected a model loaded so. Load it "
        "with from_pretrained(name, **recipe.model_kwargs()), or pass recipe.replace(load_in=None)"
    )
    assert message_of(PLAIN.replace(weights_dtype="bfloat16").prepare_model, tiny.llama()) == (
        "model=<LlamaForCausalLM> has float32 weights, and weights_dtype='bfloat16'; expected weights of that dtype. "
        "Load with **recipe.model_kwargs(), or call: model.to(torch.bfloat16)"
    )
    bert.save_pretrained(tmp_path)
    load = transformers.AutoModelForSequenceClassification.from_pretrained
    new_head = load(tmp_path, **qlora.model_kwargs(task="sequence-classification"))
    assert message_of(PLAIN.prepare_model, new_head) == (
        "model=<BertForSequenceClassification> has quantised weights, which have no gradient, and lora=None; expected "
        "adapters. Call: recipe.replace(lora=16).trainer(...)"
    )
    adapted = qlora.prepare_model(new_head)
    assert {
        name.rpartition(".")[2] for name, p in adapted.named_parameters() if p.requires_grad and "lora" not in name
    } == {"weight", "bias"}
    config = qlora.model_kwargs()["quantization_config"]
    config.llm_int8_skip_modules = ["pooler"]
    assert message_of(qlora.prepare_model, load(tmp_path, quantization_config=config)) == (
        "model=<BertForSequenceClassification> has a quantised head (classifier), which cannot be trained; expected it "
        "in 16 bits. Load the model with **recipe.model_kwargs(task='sequence-classification')"
    )


# ---- GPUs without bfloat16 ------------------------------------------------------------------------------------------


def test_fp16_keeps_adapters_in_float32(on_t4: None) -> None:
    """Stock stops at the first step otherwise: "Attempting to unscale FP16 gradients"."""
    chosen = PLAIN.replace(lora=4, load_in="nf4")
    assert chosen.model_kwargs()["dtype"] == chosen.model_kwargs()["quantization_config"].bnb_4bit_compute_dtype
    assert chosen.model_kwargs()["dtype"] == torch.float16
    plain = PLAIN.replace(lora=4, weights_dtype="float16")
    model = plain.prepare_model(tiny.bert().half())  # a head is trained whole beside the adapters
    for parameter in (trained := [p for p in model.parameters() if p.requires_grad]):
        parameter.grad = torch.ones_like(parameter)
    scaler, optimizer = torch.amp.GradScaler("cpu"), torch.optim.SGD(trained)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    kept = peft.get_peft_model(
        tiny.bert().half(), peft.LoraConfig(target_modules=["query"], modules_to_save=["classifier"])
    )
    halves = [p for p in kept.parameters() if p.requires_grad and p.dtype == torch.float16]
    halves[0].grad = torch.ones_like(halves[0])
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        scaler.unscale_(torch.optim.SGD(halves))


def test_fp16_is_watched_and_the_watch_is_not_doubled(on_t4: None) -> None:
    def watches(chosen: Recipe) -> int:
        return sum(isinstance(callback, OverflowCallback) for callback in chosen.callbacks())

    narrow = {
        "auto": PLAIN,
        "fp16": PLAIN.replace(precision="fp16"),
        "float16": PLAIN.replace(lora=4, weights_dtype="float16"),
    }
    assert {name: watches(one) for name, one in narrow.items()} == dict.fromkeys(narrow, 1)
    wide = [PLAIN.replace(precision="fp32"), PLAIN.replace(gradient_release=True, optim="adamw_torch")]
    assert [watches(one) for one in wide] == [0, 0]


def test_quantised_weights_compute_in_float32_where_nothing_is_narrow(on_t4: None) -> None:
    chosen = PLAIN.replace(lora=4, load_in="nf4", precision="fp32")
    keywords = chosen.model_kwargs()
    assert keywords["dtype"] == keywords["quantization_config"].bnb_4bit_compute_dtype == torch.float32
    found = estimate(tiny.llama_config(**SIZES), batch_size=1, seq_len=8, recipe=chosen, gpu="T4")
    narrow = estimate(
        tiny.llama_config(**SIZES), batch_size=1, seq_len=8, recipe=chosen.replace(precision="fp16"), gpu="T4"
    )
    assert (found.settings.weights_dtype, narrow.settings.weights_dtype) == ("float32", "float16")
    assert found.components["weights"] > narrow.components["weights"]


def test_16_bit_formats_that_the_gpu_lacks_are_refused_when_arguments_are_made(on_t4: None) -> None:
    for lora, other in ((None, "float32"), (4, "float16")):
        chosen = PLAIN.replace(lora=lora, weights_dtype="bfloat16")
        for function in (chosen.changes, chosen.model_kwargs):
            assert message_of(function) == (
                f"weights_dtype='bfloat16' is emulated here: {T4.reason}; expected {other} on this GPU. "
                f"Call: recipe.replace(weights_dtype={other!r})"
            )
    half = PLAIN.replace(lora=4, weights_dtype="float16")
    assert next(change.new for change in half.changes() if change.name == "precision") == "fp16"
    assert message_of(PLAIN.changes, bf16=True).startswith("bf16=True is emulated here: ")


def test_float16_needs_a_gradient_scaler_and_one_format() -> None:
    half = PLAIN.replace(lora=4, weights_dtype="float16")
    assert message_of(half.changes, use_cpu=True) == (
        "weights_dtype='float16' cannot be trained with on this machine, whose device is 'cpu'; expected a GPU with a "
        "gradient scaler. Call: recipe.replace(weights_dtype='bfloat16')"
    )


def test_weights_and_autocast_of_two_formats_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ampere = Precision("bf16", "an A10 computes bfloat16 natively")
    for module in ("hf_memopt.devices", "hf_memopt.devices.precision_support"):
        monkeypatch.setattr(f"{module}.choose_precision", lambda *, use_cpu=False: ampere)
        monkeypatch.setattr(f"{module}.accelerator_type", lambda: "cuda")
    half = PLAIN.replace(lora=4, weights_dtype="float16")
    assert next(change.new for change in half.changes() if change.name == "precision") == "fp16"
    assert message_of(half.changes, bf16=True) == (
        "weights_dtype='float16' and autocast in bfloat16 do not mix: torch has no operations with both 16-bit "
        "formats; expected one of them. Call: recipe.replace(weights_dtype='bfloat16'), and load it anew"
    )


# ---- Arguments ------------------------------------------------------------------------------------------------------


def test_gradient_release_takes_one_pass_and_clips_nothing() -> None:
    released = PLAIN.replace(gradient_release=True, per_device_train_batch_size=8)
    changes = [
        str(change) for change in released.changes(use_cpu=True) if "norm" in change.name or "effec" in change.name
    ]
    assert changes == [
        "max_grad_norm: 1.0 -> 0.0 (released gradients have no norm of all of them to clip)",
        "effective_batch_size: 32 -> 8 (released gradients are not accumulated, so a step has the examples of one "
        "pass)",
    ]
    args = released.training_arguments("out", use_cpu=True)
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps, args.max_grad_norm) == (8, 1, 0)
    args = released.training_arguments("out", use_cpu=True, effective_batch_size=12)
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (12, 1)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"gradient_accumulation_steps": 2}, "gradient release and accumulation are incompatible: "),
        ({"max_grad_norm": 1.0}, "gradient release and norm clipping are incompatible: "),
        ({"fp16": True, "use_cpu": False}, "gradient release and fp16 are incompatible: "),
    ],
)
def test_what_gradient_release_cannot_do_is_refused_when_asked_for(
    monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr("hf_memopt.devices.check_precision", lambda **_: None)
    released = PLAIN.replace(gradient_release=True, per_device_train_batch_size=1)
    assert message_of(released.changes, **{"use_cpu": True, **asked}).startswith(message)


def test_an_optimizer_of_the_callers_own_is_refused_beside_one_of_the_recipe(tmp_path: Path) -> None:
    data = Dataset.from_list([{"input_ids": [5, 6, 7]}] * 8)
    released = PLAIN.replace(gradient_release=True, per_device_train_batch_size=4)
    arguments = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": "none"}
    settings = {"train_dataset": data, "processing_class": tiny.tokenizer(), "training_arguments": arguments}
    own = (torch.optim.SGD, {"lr": 0.1})
    assert message_of(released.trainer, model=tiny.llama(), optimizer_cls_and_kwargs=own, **settings) == (
        "optimizer_cls_and_kwargs is given, and gradient_release=True makes an optimizer of its own; expected only one "
        "of them. Pass training_arguments={'optim': ...}, or recipe.replace(gradient_release=...)"
    )
    trainer = released.trainer(model=tiny.llama(), **settings)
    assert trainer.optimizer_cls_and_kwargs[0].__name__ == "ReleasedAdamW"


def test_offload_is_refused_where_it_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = PLAIN.replace(checkpointing=True, offload=True)
    if versions.can_offload_checkpoints() and not torch.accelerator.is_available():
        assert message_of(chosen.changes).startswith("offload=True moves activations from an accelerator to the host, ")
    monkeypatch.setattr("hf_memopt.techniques.checkpointing.policies.can_offload_checkpoints", lambda: False)
    assert message_of(chosen.changes).startswith("offload=True is not known to transformers ")


@pytest.mark.skipif(not versions.can_offload_checkpoints(), reason="transformers before 5.17")
def test_what_is_offloaded_is_estimated_on_the_host() -> None:
    config = tiny.llama_config(num_hidden_layers=3)
    chosen = PLAIN.replace(checkpointing=True, precision="fp32")
    sizes = {"batch_size": 4, "seq_len": 16}
    assert estimate(config, **sizes, recipe=chosen).host_bytes == 0
    found = estimate(config, **sizes, recipe=chosen.replace(offload=True))
    assert found.host_bytes == 3 * 4 * 16 * 32 * 4  # layers, rows, tokens, hidden size, bytes


def test_the_reasons_of_new_fields_are_printed() -> None:
    lines = {line.split()[0]: line for line in str(recipe("8gb-gpu")).splitlines()[1:]}
    assert lines["lora"].endswith("all weights are trained, no adapters")
    changed = replace(PLAIN, lora=16, reasons={"lora": "full training needs 20 GiB"})
    assert str(changed).count("full training needs 20 GiB") == 1
