"""Recipes with adapters, quantised weights and 16-bit weights: what they become, and what is refused before a run."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from slow_cases import slow_except

import tiny
from hf_memopt import OverflowCallback, Recipe, add_adapters, estimate, plan
from hf_memopt.training.binding import versions
from hf_memopt.training.devices import choose_precision

# peft 0.21 asks transformers 5.23 under the names of 5.17; recipes call it without this warning
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
PLAIN = Recipe("plain", "a test")
SIZES = {"hidden_size": 64, "intermediate_size": 128}  # bitsandbytes quantises blocks of 64
T4 = replace(
    choose_precision(), name="fp16", reason="a T4 (compute capability 7.5) only emulates bfloat16", emulates_bf16=True
)


def answer_as(precision: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this machine have a GPU that computes with a precision."""
    monkeypatch.setattr("hf_memopt.prediction.recipes.own_parts.choose_precision", lambda *, use_cpu=False: precision)
    for module in ("hf_memopt.training.devices", "hf_memopt.training.devices.precision_support"):
        monkeypatch.setattr(f"{module}.choose_precision", lambda *, use_cpu=False: precision)
        monkeypatch.setattr(f"{module}.accelerator_type", lambda: "cuda")


@pytest.fixture
def on_t4(monkeypatch: pytest.MonkeyPatch) -> None:
    answer_as(T4, monkeypatch)


def message_of(function: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(ValueError) as error:
        function(*args, **kwargs)
    return str(error.value)


def precision_of(chosen: Recipe) -> Any:
    return next(change.new for change in chosen.changes() if change.name == "precision")


# ---- Estimates ------------------------------------------------------------------------------------------------------


CHANGED: list[dict[str, Any]] = [{}, {"gradient_release": True}, {"lora": 4, "weights_dtype": "float16"}]


@pytest.mark.parametrize("changed", slow_except(CHANGED[2:], CHANGED))
def test_the_precision_of_an_estimate_is_that_of_the_run(changed: dict[str, Any], on_t4: None) -> None:
    chosen = PLAIN.replace(**changed)
    found = estimate(tiny.llama_config(), batch_size=2, seq_len=8, recipe=chosen, gpu="T4")
    assert found.settings.precision == precision_of(chosen)


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
    assert (eight.load_in_8bit, eight.llm_int8_skip_modules[:2]) == (True, ["classifier", "score"])


def test_the_recipe_decides_alpha_and_targets() -> None:
    one = PLAIN.replace(lora=4).prepare_model(tiny.llama()).peft_config["default"]
    assert (one.r, one.lora_alpha, len(one.target_modules)) == (4, 8, 2 * 7)
    other = PLAIN.replace(lora=4, lora_alpha=4, lora_targets=("q_proj",)).prepare_model(tiny.llama())
    assert (other.peft_config["default"].lora_alpha, other.peft_config["default"].target_modules) == (4, {"q_proj"})


def test_a_model_with_adapters_of_its_own_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    own = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    model: Any = peft.get_peft_model(tiny.llama(), own)
    assert PLAIN.prepare_model(model) is model
    with caplog.at_level("INFO"):
        assert PLAIN.replace(lora=8).prepare_model(model) is model
    assert 'lora: 8 -> "the model\'s own" (PeftModelForCausalLM has adapters already)' in caplog.text


def test_targets_that_cannot_be_adapted_are_refused_by_the_estimate_too() -> None:
    for targets in (("v_proj", "q_prj"), ("input_layernorm",)):
        chosen = PLAIN.replace(lora=4, lora_targets=targets)
        message = message_of(chosen.prepare_model, tiny.llama())
        assert message_of(estimate, tiny.llama_config(), batch_size=2, seq_len=8, recipe=chosen) == message
    assert message.startswith("lora_targets=('input_layernorm',) cannot be added to LlamaForCausalLM (Target module ")
    assert message.endswith("; expected names that name linear layers of the model. Pass lora_targets='auto'")
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1])
    model = transformers.ResNetForImageClassification(config)
    message = message_of(add_adapters, model, 2)
    assert message.startswith("lora=2 cannot be added to ResNetForImageClassification (No modules were targeted for ")
    assert message.endswith(
        "; expected linear layers of the model beside its head, by names that no other layer has. Pass "
        "LoraConfig(target_modules=[...]) with the names of others, or train all weights without lora"
    )
    add_adapters(model, peft.LoraConfig(target_modules=["convolution"]))


def test_adapters_and_weights_that_do_not_fit_the_recipe_are_refused(tmp_path: Path) -> None:
    qlora, bert = PLAIN.replace(lora=4, load_in="nf4"), tiny.bert(**SIZES)
    bert.save_pretrained(tmp_path)
    load = transformers.AutoModelForSequenceClassification.from_pretrained
    new_head = load(tmp_path, **qlora.model_kwargs(task="sequence-classification"))
    assert message_of(PLAIN.prepare_model, new_head) == (
        "model=<BertForSequenceClassification> has quantised weights, which have no gradient, and lora=None; expected "
        "adapters. Call: recipe.replace(lora=16).prepare_model(model)"
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


@pytest.mark.slow
def test_quantised_weights_compute_in_float32_where_nothing_is_narrow(on_t4: None) -> None:
    chosen = PLAIN.replace(lora=4, load_in="nf4", precision="fp32")
    keywords = chosen.model_kwargs()
    assert keywords["dtype"] == keywords["quantization_config"].bnb_4bit_compute_dtype == torch.float32
    wide, narrow = (
        estimate(tiny.llama_config(**SIZES), batch_size=1, seq_len=8, recipe=chosen.replace(precision=name), gpu="T4")
        for name in ("fp32", "fp16")
    )
    assert (wide.settings.weights_dtype, narrow.settings.weights_dtype) == ("float32", "float16")
    assert wide.components["weights"] > narrow.components["weights"]


def test_16_bit_formats_that_the_gpu_lacks_are_refused_when_arguments_are_made(on_t4: None) -> None:
    for lora, other in ((None, "float32"), (4, "float16")):
        chosen = PLAIN.replace(lora=lora, weights_dtype="bfloat16")
        for function in (chosen.changes, chosen.model_kwargs):
            assert message_of(function) == (
                f"weights_dtype='bfloat16' is emulated here: {T4.reason}; expected {other} on this GPU. "
                f"Call: recipe.replace(weights_dtype={other!r})"
            )
    half = PLAIN.replace(lora=4, weights_dtype="float16")
    assert precision_of(half) == "fp16"
    assert message_of(PLAIN.changes, bf16=True).startswith("bf16=True is emulated here: ")


def test_weights_and_autocast_of_two_formats_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ampere = replace(T4, name="bf16", reason="an A10 computes bfloat16 natively", emulates_bf16=False)
    answer_as(ampere, monkeypatch)
    half = PLAIN.replace(lora=4, weights_dtype="float16")
    assert precision_of(half) == "fp16"
    assert message_of(half.changes, bf16=True) == (
        "weights_dtype='float16' and autocast in bfloat16 do not mix: torch has no operations with both 16-bit "
        "formats; expected one of them. Call: recipe.replace(weights_dtype='bfloat16'), and load it anew"
    )


# ---- Arguments ------------------------------------------------------------------------------------------------------


def test_gradient_release_takes_one_pass_and_clips_nothing() -> None:
    released = PLAIN.replace(gradient_release=True, per_device_train_batch_size=8)
    changes = {change.name: (change.old, change.new, change.reason) for change in released.changes(use_cpu=True)}
    assert changes["max_grad_norm"] == (1.0, 0.0, "released gradients have no norm of all of them to clip")
    one_pass = "released gradients are not accumulated, so a step has the examples of one pass"
    assert changes["effective_batch_size"] == (32, 8, one_pass)
    for given, rows in (({}, 8), ({"effective_batch_size": 12}, 12)):
        args = released.training_arguments("out", use_cpu=True, **given)
        assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (rows, 1)
        assert args.max_grad_norm == 0


def test_offload_is_refused_where_it_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = PLAIN.replace(checkpointing=True, offload=True)
    if versions.can_offload_checkpoints() and not torch.accelerator.is_available():
        assert message_of(chosen.changes).startswith("offload=True moves activations from an accelerator to the host, ")
    monkeypatch.setattr("hf_memopt.training.binding.versions.can_offload_checkpoints", lambda: False)
    assert message_of(chosen.changes).startswith("offload=True is not known to transformers ")


BASE = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64, "max_position_embeddings": 64}
ENCODER = {"vocab_size": 64, "hidden_size": 64, **BASE, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
DISTIL = {"vocab_size": 64, "dim": 64, "hidden_dim": 64, "n_layers": 1, "n_heads": 2, "max_position_embeddings": 64}
LACKING: list[tuple[str, str, dict[str, Any], set[str]]] = [
    ("Bert", "MaskedLM", ENCODER, {"bert.pooler.dense", "classifier"}),
    ("Bert", "PreTraining", ENCODER, {"classifier"}),  # it holds a pooler, which is trained whole as well
    ("Roberta", "MaskedLM", ENCODER, {"classifier.dense", "classifier.out_proj"}),
    ("XLMRoberta", "MaskedLM", ENCODER, {"classifier.dense", "classifier.out_proj"}),
    ("Electra", "PreTraining", {**ENCODER, "embedding_size": 64}, {"classifier.dense", "classifier.out_proj"}),
    ("DistilBert", "MaskedLM", DISTIL, {"pre_classifier", "classifier"}),
    ("DebertaV2", "MaskedLM", ENCODER, {"pooler.dense", "classifier"}),
    ("EuroBert", "MaskedLM", {**ENCODER, "num_key_value_heads": 2, "mask_token_id": 4}, {"dense", "classifier"}),
    ("Llama", "CausalLM", ENCODER, {"score"}),
]


@pytest.mark.parametrize(("kind", "checkpoint", "sizes", "lacking"), slow_except(LACKING[::8], LACKING))
def test_what_a_checkpoint_lacks_is_trained_whole_and_not_quantised(
    kind: str, checkpoint: str, sizes: dict[str, Any], lacking: set[str], tmp_path: Path
) -> None:
    """Of the names for any model of the task, in the estimate, and of a script's names for this one."""
    task = "sequence-classification"
    config = getattr(transformers, f"{kind}Config")(**sizes)
    getattr(transformers, f"{kind}For{checkpoint}")(config).save_pretrained(tmp_path)
    qlora = PLAIN.replace(lora=4, load_in="nf4", attn_implementation="eager")
    keywords = qlora.model_kwargs(task)
    load = transformers.AutoModelForSequenceClassification.from_pretrained
    text = str(plan(tmp_path, gpu="T4", task=task, method="qlora", seq_len=8).script())
    named = [ast.literal_eval(found) for found in re.findall(r"(?:skip_modules|modules_to_save)=(\[.*?\])", text)]
    assert len(named) == 2
    assert named[0] == named[1]
    trained = []
    for skipped in (keywords["quantization_config"].llm_int8_skip_modules, named[0]):
        keywords["quantization_config"].llm_int8_skip_modules = skipped
        loaded, info = load(tmp_path, output_loading_info=True, **keywords)
        linears = {name for name, one in loaded.named_modules() if isinstance(one, torch.nn.Linear)}
        assert {key.rpartition(".")[0] for key in info["missing_keys"]} & linears == lacking
        adapted: Any = qlora.prepare_model(loaded)
        whole = {name for name, one in adapted.named_parameters() if one.requires_grad and "lora_" not in name}
        names = {name.removeprefix("base_model.model.").replace(".modules_to_save.default", "") for name in whole}
        assert {f"{name}.weight" for name in lacking} <= names
        trained.append(sum(one.numel() for one in adapted.parameters() if one.requires_grad))
    found = estimate(config, task=task, batch_size=2, seq_len=8, recipe=qlora)
    assert trained == [found.trainable_parameters] * 2


class _Own(transformers.BertPreTrainedModel):
    """A class of a user's, with a tower and an output embedding beside its base model."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.bert, self.tower = transformers.BertModel(config), transformers.BertModel(config)
        self.lm_head, self.classifier = torch.nn.Linear(config.hidden_size, 9), torch.nn.Linear(config.hidden_size, 3)
        self.post_init()

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.lm_head

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        raise NotImplementedError


MOBILE = {"hidden_sizes": [8, 8, 8], "neck_hidden_sizes": [8] * 7, "num_attention_heads": 2, "image_size": 32}
VIDEO = {"hidden_size": 64, **BASE, "image_size": 32, "patch_size": 8, "num_frames": 2}
SOUND = {"hidden_size": 16, **BASE, "conv_dim": (8,), "conv_kernel": (3,), "conv_stride": (2,)}
SOUND |= {"num_feat_extract_layers": 1, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}


@pytest.mark.parametrize(
    ("kind", "config", "expected"),
    [
        ("VideoMAEForVideoClassification", transformers.VideoMAEConfig(**VIDEO), ["fc_norm", "classifier"]),
        ("LayoutLMForQuestionAnswering", transformers.LayoutLMConfig(**ENCODER), ["qa_outputs"]),
        ("Wav2Vec2ForAudioFrameClassification", transformers.Wav2Vec2Config(**SOUND), ["classifier"]),
        ("MobileViTForSemanticSegmentation", transformers.MobileViTConfig(**MOBILE), ["segmentation_head"]),
        (_Own, transformers.BertConfig(**ENCODER), ["classifier"]),
        ("BertForPreTraining", transformers.BertConfig(**ENCODER), None),  # whose checkpoints have its head
    ],
)
def test_a_new_head_of_any_classifier_is_trained_and_saved_whole(
    kind: Any, config: Any, expected: Any, tmp_path: Path
) -> None:
    build = getattr(transformers, kind) if isinstance(kind, str) else kind
    adapted: Any = add_adapters(build(config), 2)
    assert adapted.peft_config["default"].modules_to_save == expected
    adapted.save_pretrained(tmp_path)
    saved = peft.utils.load_peft_weights(str(tmp_path), device="cpu")
    whole = {name.split(".")[2] for name in saved if "lora_" not in name}
    assert whole == {*(expected or ())}


def test_a_lacking_layer_of_the_base_model_is_no_head(tmp_path: Path) -> None:
    """As all layers of Llama are for questions, whose names are others than those for texts."""
    transformers.BertForMaskedLM(transformers.BertConfig(**ENCODER)).save_pretrained(tmp_path)
    qlora = PLAIN.replace(lora=4, load_in="nf4")
    keywords = {**qlora.model_kwargs("token-classification"), "num_hidden_layers": 2}
    loaded = transformers.AutoModelForTokenClassification.from_pretrained(tmp_path, **keywords)
    assert message_of(qlora.prepare_model, loaded) == (
        "model=<BertForTokenClassification> has a quantised layer of its base model "
        "(bert.encoder.layer.1.attention.self.query) that its checkpoint lacks, so that it is random; expected a "
        "checkpoint of all layers. Load one that a BertForTokenClassification has saved"
    )


def test_a_stored_quantisation_of_a_new_head_is_refused(tmp_path: Path) -> None:
    config = transformers.BertConfig(**ENCODER, architectures=["BertForMaskedLM"])
    config.quantization_config = transformers.BitsAndBytesConfig(load_in_4bit=True).to_dict()
    config.save_pretrained(tmp_path)
    task: dict[str, Any] = {"task": "sequence-classification", "seq_len": 8, "gpu": "T4"}
    message = (
        f"model={tmp_path.name!r} has a quantization_config by which new parts for task='sequence-classification' are "
        "quantised (bert.pooler, classifier), which cannot be trained; expected them in 16 bits. Pass its "
        "configuration with config.quantization_config['llm_int8_skip_modules'] = ['classifier', 'bert.pooler']"
    )
    assert message_of(plan, tmp_path, method="lora", **task) == message
    assert message_of(estimate, tmp_path, batch_size=1, lora=4, **task) == message
    config.quantization_config["llm_int8_skip_modules"] = ["classifier", "bert.pooler"]
    asked = estimate(transformers.BertConfig(**ENCODER), batch_size=1, lora=4, load_in="nf4", **task)
    assert estimate(config, batch_size=1, lora=4, **task).trainable_parameters == asked.trainable_parameters
