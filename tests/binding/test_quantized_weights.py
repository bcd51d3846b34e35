"""``prepare_quantized`` on real 4-bit and 8-bit models: what it freezes and casts, and training as after PEFT's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from bitsandbytes.nn import Linear4bit
from slow_cases import slow_except
from tables import refuses, whole
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import tiny
from hf_memopt import prepare_quantized
from hf_memopt.training.binding import checkpointing_arguments

pytestmark = [
    # peft 0.21 still asks transformers 5.23 under the names of 5.17
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning"),
]
SIZES = {"hidden_size": 64, "intermediate_size": 128}  # bitsandbytes quantises blocks of 64
CONFIGS = {
    "4bit": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16},
    "8bit": {"load_in_8bit": True},
}
ADAPTERS = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder of a tiny Llama, saved in bfloat16."""
    tiny.llama(**SIZES).to(torch.bfloat16).save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def load(folder: Path, bits: str = "4bit", dtype: torch.dtype = torch.bfloat16) -> Any:
    config = BitsAndBytesConfig(**CONFIGS[bits])
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=dtype)


def state_of(model: nn.Module) -> list[tuple[str, torch.dtype, bool]]:
    return [(name, parameter.dtype, parameter.requires_grad) for name, parameter in model.named_parameters()]


def dtypes(model: nn.Module, *words: str) -> set[torch.dtype]:
    return {parameter.dtype for name, parameter in model.named_parameters() if any(word in name for word in words)}


@pytest.mark.parametrize("bits", CONFIGS)
def test_a_plain_model_is_frozen_and_keeps_its_dtypes(folder: Path, bits: str) -> None:
    model = load(folder, bits)
    before = state_of(model)
    handle = prepare_quantized(model)
    assert [(name, dtype) for name, dtype, _ in state_of(model)] == [(name, dtype) for name, dtype, _ in before]
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert any(required for _, _, required in before)
    assert prepare_quantized(model).is_removed  # a second call finds nothing to do
    handle.remove()
    assert state_of(model) == before


@pytest.mark.parametrize("bits", CONFIGS)
@pytest.mark.parametrize("wrapped", [False, True])
def test_float32_copies_of_peft_are_taken_back(folder: Path, bits: str, wrapped: bool) -> None:
    model = peft.prepare_model_for_kbit_training(load(folder, bits), use_gradient_checkpointing=False)
    weights = model.lm_head.weight.detach().clone()
    if wrapped:
        model = peft.get_peft_model(model, peft.LoraConfig(**ADAPTERS))
    before = state_of(model)
    assert dtypes(model, "embed_tokens", "lm_head", "norm") == {torch.float32}
    handle = prepare_quantized(model)
    assert dtypes(model, "embed_tokens", "lm_head", "norm") == {torch.bfloat16}
    assert torch.equal(model.get_output_embeddings().weight.float(), weights)
    if wrapped:  # adapters are trained in float32
        assert dtypes(model, "lora_") == {torch.float32}
    assert [name for name, _, required in state_of(model) if required] == [
        name for name, _, required in before if required
    ]
    handle.remove()
    assert state_of(model) == before
    assert torch.equal(model.get_output_embeddings().weight, weights)


def with_a_value_beside(model: Any) -> Any:
    model.lm_head.weight.data[5, 7] += 1e-6  # which 16 bits do not hold
    return model


def with_norms_kept(model: Any) -> Any:
    model._keep_in_fp32_modules_strict = {"norm"}
    return model


def with_another_adapter(model: Any) -> Any:
    model = peft.get_peft_model(model, peft.LoraConfig(**ADAPTERS))
    model.add_adapter("other", peft.LoraConfig(**ADAPTERS))  # lora_B is 0, which 16 bits hold
    return model


@pytest.mark.parametrize(
    ("change", "dtype", "float32", "bfloat16"),
    [
        (with_a_value_beside, torch.float32, ("lm_head",), ("embed_tokens", "norm")),
        (with_norms_kept, torch.float32, ("model.norm",), ("input_layernorm", "lm_head")),
        (with_another_adapter, torch.bfloat16, (".other.",), ("embed_tokens",)),
        (
            lambda model: peft.get_peft_model(model, peft.LoraConfig(**ADAPTERS, modules_to_save=["lm_head"])),
            torch.bfloat16,
            ("modules_to_save",),
            ("original_module",),
        ),
    ],
)
def test_what_stays_or_becomes_float32(
    folder: Path, change: Any, dtype: torch.dtype, float32: Any, bfloat16: Any
) -> None:
    model = change(load(folder, dtype=dtype))
    before = state_of(model)
    handle = prepare_quantized(model)
    assert dtypes(model, *float32) == {torch.float32}
    assert dtypes(model, *bfloat16) == {torch.bfloat16}
    if "modules_to_save" in float32:  # casts what it is given, without autocast
        model(input_ids=torch.tensor([[5, 6, 7]]))
    assert prepare_quantized(model).is_removed
    handle.remove()
    assert state_of(model) == before
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_transformers_still_names_what_it_keeps_in_float32() -> None:
    """The private names that are read, seen in transformers 5.8.1, 5.17.0 and 5.23.0."""
    assert "wo" in transformers.T5ForConditionalGeneration._keep_in_fp32_modules
    assert hasattr(transformers.PreTrainedModel, "_keep_in_fp32_modules_strict")


def gradients(model: Any) -> list[torch.Tensor]:
    model.train()(input_ids=torch.arange(5, 17)[None], labels=torch.arange(5, 17)[None]).loss.backward()
    found = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    return found


def test_an_evaluation_leaves_the_gradients_as_they_are(folder: Path) -> None:
    """On a CPU with AVX-512 BF16 bitsandbytes 0.50 repacks weights for inference, and loses gradients from then on."""
    model = peft.get_peft_model(load(folder), peft.LoraConfig(**ADAPTERS))
    layers = [module for module in model.modules() if isinstance(module, Linear4bit)]
    had = [module.support_avx512bf16_for_cpu for module in layers]
    handle = prepare_quantized(model)
    before = gradients(model)
    with torch.inference_mode():
        model.eval()(input_ids=torch.arange(5, 17)[None])
    assert all(map(torch.equal, gradients(model), before))
    handle.remove()
    assert [module.support_avx512bf16_for_cpu for module in layers] == had


def test_a_model_without_quantised_weights_is_refused() -> None:
    refuses(ValueError, whole("model=<LlamaForCausalLM> has no"), prepare_quantized, tiny.llama())
    with pytest.raises(TypeError) as refused:
        prepare_quantized("Llama-3.1-8B")  # type: ignore[arg-type]
    assert str(refused.value) == whole("model='Llama-3.1-8B'")


def train(model: Any, folder: Path, **settings: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train adapters with the stock Trainer; return the losses, and how far each adapter moved."""
    torch.manual_seed(0)
    model = peft.get_peft_model(model, peft.LoraConfig(**ADAPTERS))
    before = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    rows = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in tiny.rows(32)]
    trainer = tiny.train(
        model, rows, folder, bf16=True, optim="adamw_torch", learning_rate=1e-2, num_train_epochs=4,
        logging_strategy="steps", logging_steps=1, **settings,
    )  # fmt: skip
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    after = dict(model.named_parameters())
    return losses, {name: (after[name].detach() - value).abs().max() for name, value in before.items()}


@pytest.mark.parametrize("bits", slow_except(("4bit",), CONFIGS))
def test_the_loss_curve_is_that_of_pefts_preparation(folder: Path, tmp_path: Path, bits: str) -> None:
    theirs = peft.prepare_model_for_kbit_training(load(folder, bits), use_gradient_checkpointing=False)
    ours = load(folder, bits)
    prepare_quantized(ours)
    curves = [train(model, tmp_path / "run")[0] for model in (theirs, ours)]
    assert curves[0][-1] < curves[0][0] - 0.1  # it learns
    # bfloat16 has 8 bits: an activation that is rounded once more differs by 2^-9 of itself
    assert curves[1] == pytest.approx(curves[0], rel=5e-3)


@pytest.mark.parametrize("reentrant", [False, True])
def test_every_adapter_is_trained_under_checkpointing(folder: Path, tmp_path: Path, reentrant: bool) -> None:
    model = load(folder)
    prepare_quantized(model)
    _, moved = train(model, tmp_path / "run", **checkpointing_arguments(use_reentrant=reentrant))
    assert len(moved) == 2 * 2 * 7
    assert all(distance > 0 for distance in moved.values())
