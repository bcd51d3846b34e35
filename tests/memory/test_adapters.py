"""Adapters, quantised weights and frozen parameters as settings of an estimate, against functions that do the same."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import transformers
from peft import LoraConfig, get_peft_model
from slow_cases import slow_except
from transformers import BitsAndBytesConfig

import tiny
from hf_memopt import Estimate, estimate, estimate_from_arguments
from hf_memopt.techniques import freeze

# peft 0.21 asks a transformers 5.23 model for is_gradient_checkpointing, which that version renamed.
peft_reads_old_name = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Estimate without a GPU also where there is one."""
    monkeypatch.setattr("hf_memopt.prediction.memory.estimation.current_gpu", lambda: None)


def bert_estimate(**changed: Any) -> Estimate:
    return estimate(tiny.bert_config(), batch_size=4, seq_len=16, **changed)


def llama_config() -> transformers.LlamaConfig:
    return tiny.llama_config(vocab_size=500, hidden_size=256, intermediate_size=512, num_hidden_layers=3)


def llama_lora(model: Any) -> Any:
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))


def figures(found: Estimate) -> tuple[Any, ...]:
    names = ("peak_allocated_bytes", "peak_reserved_bytes", "parameters", "trainable_parameters", "flops", "components")
    return tuple(getattr(found, name) for name in names)


@peft_reads_old_name
@pytest.mark.parametrize("checkpointing", slow_except([True], [False, True, {"use_reentrant": True}]))
@pytest.mark.parametrize("load_in", [None, "nf4", "int8"])
def test_settings_of_adapters_are_what_functions_of_prepare_did(load_in: str | None, checkpointing: Any) -> None:
    config = llama_config()
    options = {
        "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
        "int8": {"load_in_8bit": True},
    }
    sizes = {"batch_size": 2, "seq_len": 16, "weights_dtype": "bfloat16", "precision": "bf16"}
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    by_settings = estimate(config, **sizes, checkpointing=checkpointing, lora=lora, load_in=load_in)
    if load_in is not None:
        config.quantization_config = BitsAndBytesConfig(**options[load_in], bnb_4bit_compute_dtype="bfloat16")
    by_functions = estimate(config, **sizes, checkpointing=checkpointing, prepare=(llama_lora,))
    assert figures(by_settings) == figures(by_functions)
    assert lora.target_modules == {"q_proj", "v_proj"}  # peft resolves names in a copy


POOLER = 32 * 32 + 32  # of BERT, which checkpoints of masked LMs lack


@pytest.mark.parametrize(
    ("config", "task", "trained"),
    [
        (tiny.bert_config(), "sequence-classification", 32 * 3 + 3 + POOLER),
        (tiny.bert_config(), "token-classification", 32 * 3 + 3),
        (tiny.bert_config(num_labels=2), "question-answering", 32 * 2 + 2),
        (tiny.bert_config(num_labels=3), "question-answering", 32 * 2 + 2),  # of a model for inference
        (tiny.bert_config(), "multiple-choice", 32 + 1 + POOLER),
        (tiny.bert_config(), "masked-lm", 0),
        (tiny.llama_config(), "causal-lm", 0),
    ],
)
def test_a_rank_adapts_every_linear_but_the_head(config: Any, task: str, trained: int) -> None:
    whole = estimate(config, batch_size=2, seq_len=8, task=task)
    adapted = estimate(config, batch_size=2, seq_len=8, task=task, lora=2)
    attention, feed_forward = 4 * 2 * (32 + 32), (2 if task != "causal-lm" else 3) * 2 * (32 + 64)
    layers = 2 * (attention + feed_forward)
    inner_head = {"masked-lm": 2 * (32 + 32)}  # cls.predictions.transform.dense
    adapters = layers + inner_head.get(task, 0)
    assert adapted.trainable_parameters == adapters + trained
    assert adapted.parameters == whole.parameters + adapters + trained


def without_input_gradients(model: Any) -> None:
    """Take off what stock hangs on the embeddings of a checkpointed model, which undoes what a frozen prefix saves."""
    model.disable_input_require_grads()


def test_frozen_parameters_of_the_settings_are_what_the_callback_does() -> None:
    for checkpointing in (False, True):
        functions = (partial(freeze, patterns=("*embeddings*",)), *[without_input_gradients] * checkpointing)
        by_settings = bert_estimate(freeze=("*embeddings*",), checkpointing=checkpointing)
        assert figures(by_settings) == figures(bert_estimate(prepare=functions, checkpointing=checkpointing))


def test_what_is_not_quantised_has_16_bits_unless_asked_otherwise() -> None:
    sizes: dict[str, Any] = {"batch_size": 2, "seq_len": 16, "lora": 4, "load_in": "nf4"}
    plain = estimate(llama_config(), **sizes)
    assert plain.settings.weights_dtype == "bfloat16"
    assert "weights that are not quantised are bfloat16: give weights_dtype for another" in plain.notes
    older = estimate(llama_config(), **sizes, gpu="T4")  # without bfloat16
    assert (older.settings.weights_dtype, older.settings.precision) == ("float16", "fp16")
    wide = estimate(llama_config(), **sizes, weights_dtype="float32")
    assert wide.settings.weights_dtype == "float32"
    outside = 2 * 500 * 256 + (2 * 3 + 1) * 256  # embeddings, head, norms
    assert wide.components["weights"] - plain.components["weights"] == pytest.approx(2 * outside, abs=4096)


def test_the_arguments_of_a_trainer_take_adapters_too(tmp_path: Path) -> None:
    args = tiny.arguments(tmp_path, bf16=True, per_device_train_batch_size=2, optim="adamw_torch")
    found = estimate_from_arguments(llama_config(), args, 16, lora=4, load_in="nf4")
    sizes = {"batch_size": 2, "seq_len": 16, "lora": 4, "load_in": "nf4"}
    same = estimate(llama_config(), **sizes, precision="bf16", optim="adamw_torch", max_grad_norm=0.0)
    assert figures(found) == figures(same)


def test_adapters_on_fused_experts_where_peft_switches_autocast_off() -> None:
    """Float32 weights under bf16 autocast train; the products of PEFT's parametrization stay in float32."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 100}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4}
    config = transformers.MixtralConfig(**sizes, **heads, max_position_embeddings=32)
    options: dict[str, Any] = {"batch_size": 1, "seq_len": 16, "lora": 4, "gpu": "A100 80GB"}
    plain, autocast = (estimate(config, precision=precision, **options) for precision in ("fp32", "bf16"))
    assert autocast.trainable_parameters == plain.trainable_parameters
    assert estimate(config, precision="bf16", checkpointing=True, **options).total_bytes > 0
