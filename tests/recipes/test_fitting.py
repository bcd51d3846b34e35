"""``recipe(name, model=...)`` returns a preset that holds the model, else what ``plan`` chooses, and says why."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
import transformers
from tiny_plans import config, gpu_of
from torch import nn

from hf_memopt import GPUS, PRESETS, Recipe, estimate, recipe
from hf_memopt.devices import against_float16
from hf_memopt.recipes.presets import fitting_recipe
from hf_memopt.units import format_bytes

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

CONFIG = config(layers=4)
PRESET = Recipe("tiny-gpu", "a test", effective_batch_size=16, per_device_train_batch_size=16, precision="bf16")


def fitting(memory: str, model: Any = None, seq_len: int = 64) -> Recipe:
    return fitting_recipe(PRESET, CONFIG if model is None else model, seq_len=seq_len, gpu=gpu_of(memory))


LADDER = [  # memory of torch's allocator, and what is chosen for it
    ("600MiB", None, None),
    pytest.param("140MiB", None, None, marks=pytest.mark.slow),
    pytest.param("80MiB", 16, None, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("memory", "lora", "load_in"), LADDER)
def test_what_is_chosen_fits_and_has_its_reasons(memory: str, lora: int | None, load_in: str | None) -> None:
    found = fitting(memory)
    assert (found.lora, found.load_in) == (lora, load_in)
    rows = found.per_device_train_batch_size
    assert found.effective_batch_size == PRESET.effective_batch_size
    assert found.effective_batch_size % rows == 0
    gpu = gpu_of(memory)
    assert estimate(CONFIG, batch_size=rows, seq_len=64, recipe=found, gpu=gpu).fits
    assert found.purpose.endswith(", computed and not measured")
    names = ("lora", "load_in", "weights_dtype", "checkpointing", "optim", "fused_cross_entropy")
    assert all(found.reasons[name] for name in names if getattr(found, name) != getattr(PRESET, name))
    assert Recipe.from_json(found.to_json()) == found


def test_a_preset_computes_in_float32_what_overflows_in_float16() -> None:
    t5 = transformers.T5Config(
        vocab_size=4000, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    preset = PRESET.replace(precision="auto")
    for model, gpu, precision in ((t5, "T4", "fp32"), (t5, "RTX 4080", "auto"), (CONFIG, "T4", "auto")):
        found = fitting_recipe(preset, model, seq_len=64, gpu=GPUS[gpu])
        assert (found.lora, found.precision) == (None, precision)
        why = against_float16(config=t5) if precision == "fp32" else preset.reason_of("precision")
        assert found.reason_of("precision") == why


@pytest.mark.slow
def test_what_cannot_fit_is_refused() -> None:
    with pytest.raises(ValueError) as error:
        fitting("20MiB")
    message = str(error.value)
    assert message.startswith("model=<LlamaForCausalLM> does not fit a GPU with 20MiB at seq_len=64: QLoRA r16, nf4, ")
    assert message.endswith(
        "; expected a smaller model, shorter texts or a larger GPU. See what would fit: "
        "print(hf_memopt.plan(model, gpu=...))"
    )


def test_a_module_is_fitted_as_its_configuration_and_keeps_its_weights() -> None:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(CONFIG)
    before = [parameter.data_ptr() for parameter in model.parameters()]
    assert fitting("600MiB", model) == fitting("600MiB")
    assert [parameter.data_ptr() for parameter in model.parameters()] == before


@pytest.mark.slow
def test_a_model_with_adapters_keeps_them() -> None:
    adapted = Recipe("one", "a test", lora=16).prepare_model(transformers.LlamaForCausalLM(CONFIG))
    assert isinstance(adapted, peft.PeftModel)
    found = fitting("150MiB", adapted)
    assert (found.lora, found.load_in, found.weights_dtype) == (None, None, "float32")


def test_a_preset_without_a_model_stays_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert recipe("8gb-gpu") is PRESETS["8gb-gpu"]
    assert recipe("cpu", model=nn.Linear(2, 2)) is PRESETS["cpu"]  # what a CPU can hold is not estimated
    monkeypatch.setattr("hf_memopt.devices.current_gpu", lambda: None)
    assert recipe("auto", model="bert-base-uncased").name == recipe("auto").name == "cpu"


def test_the_gpu_of_a_preset_is_the_smallest_of_its_size() -> None:
    least = min(gpu.usable_bytes for gpu in GPUS.values() if gpu.memory_bytes == 16 * 2**30)
    purpose = recipe("16gb-gpu", CONFIG, seq_len=64).purpose
    assert " on 16gb-gpu: " in purpose
    assert f" of {format_bytes(least)}, computed" in purpose


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "model", "lora", "load_in"),
    [
        ("4gb-gpu", "bert-large-uncased", None, None),
        ("8gb-gpu", "Llama-3.2-1B", 16, None),
        ("8gb-gpu", "Llama-3.1-8B", 16, "nf4"),
        ("24gb-gpu", "Llama-3.1-8B", 16, None),
    ],
)
def test_well_known_models_get_what_people_use(name: str, model: str, lora: int | None, load_in: str | None) -> None:
    found = recipe(name, model=model, seq_len=512)
    assert (found.lora, found.load_in) == (lora, load_in)
