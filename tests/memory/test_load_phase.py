"""What loading a quantised model allocates and frees: transformers, bitsandbytes and PEFT themselves load one here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from test_quantized import Tracker, cuda_kernels

import tiny
from hf_memopt import estimate
from hf_memopt.gpus import custom_gpu
from hf_memopt.prediction.memory.models import load_model
from hf_memopt.prediction.memory.quantized import load_events, quantize
from hf_memopt.prediction.memory.recording.step import _weights
from hf_memopt.prediction.memory.tracking import StorageTracker
from hf_memopt.units import format_bytes
from tiny import llama_config

pytestmark = [pytest.mark.filterwarnings("ignore:inner dimension:UserWarning")]

KINDS: dict[str, dict[str, Any]] = {
    "4 bits": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "4 bits twice": {"load_in_4bit": True, "bnb_4bit_use_double_quant": True},
    "8 bits": {"load_in_8bit": True},
}


class HostTracker(Tracker):
    """Leaves out the tensors without memory that a model is first built of."""

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage.device.type == "cpu":
            super()._add(storage)


CONFIG = llama_config(num_hidden_layers=2, hidden_size=192, intermediate_size=320, vocab_size=700)


def really_loaded(folder: Path, options: dict[str, Any], *, prepares: bool) -> list[int]:
    """Return the bytes of tensors above 1 KiB; the file has 64 bits a number, a size that nothing else has."""
    transformers.LlamaForCausalLM(CONFIG).double().save_pretrained(folder)
    with HostTracker([], cuda_kernels()) as tracker:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float16,
            device_map={"": "cpu"},
            quantization_config=transformers.BitsAndBytesConfig(**options),
        )
        if prepares:
            model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
        events = list(tracker.events)
    in_file = {weight.numel() * 8 for weight in transformers.LlamaForCausalLM(CONFIG).parameters()}
    return [delta for delta in events if abs(delta) > 1024 and abs(delta) not in in_file]


def computed(options: dict[str, Any], *, prepares: bool) -> tuple[tuple[tuple[Any, int], ...], ...]:
    model: Any = load_model(CONFIG, weights_dtype="float16").model
    quantize(model, options)
    if prepares:
        model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    tracker = StorageTracker()
    _weights(model, tracker)
    return load_events(model, tracker.number)


@pytest.mark.skipif(tiny.IS_BEFORE_5_17, reason="5.8 holds blocks of weights longer")
@pytest.mark.parametrize("prepares", [False, True], ids=["as loaded", "prepared"])
@pytest.mark.parametrize("kind", KINDS)
def test_loading_allocates_what_transformers_does(tmp_path: Path, kind: str, prepares: bool) -> None:
    """On the GPU 8 bits need one copy more: the weight goes through the host and comes back."""
    block, freed, *events = (event for part in computed(KINDS[kind], prepares=prepares) for event in part)
    found = [delta for key, delta in events if abs(delta) > 1024 and key != ("load", "float16")]
    assert found == really_loaded(tmp_path, KINDS[kind], prepares=prepares)
    assert block[1] == -freed[1]


def test_loading_that_does_not_fit_is_said() -> None:
    settings: dict[str, Any] = {"batch_size": 1, "seq_len": 8, "lora": 4, "load_in": "nf4", "precision": "fp16"}
    config = transformers.MistralConfig(num_hidden_layers=4)
    small, large = (estimate(config, **settings, gpu=gpu) for gpu in (custom_gpu("1GiB", "8.6"), "T4"))
    needed = format_bytes(small.phases["load"].reserved_bytes + (small.context_bytes or 0))
    note = f"loading the model alone needs {needed}: the run ends before a step"
    assert note in small.notes
    assert not any("loading the model alone" in text for text in large.notes)
