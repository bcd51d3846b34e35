"""Streamed layers whose weights bitsandbytes has quantised: its autograd functions keep them where nobody looks."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from bitsandbytes.nn import Int8Params, Params4bit
from slow_cases import slow_except
from test_streaming import IDS, LAYERS, backward, gradients, llama, rows
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import tiny
from hf_memopt import prepare_quantized, stream_layers
from hf_memopt.training.binding import enable_checkpointing
from technique_table import same

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:MatMul8bitLt"),
]
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16}
CONFIGS = {"nf4": NF4, "nf4, twice": {**NF4, "bnb_4bit_use_double_quant": True}, "int8": {"load_in_8bit": True}}


@pytest.fixture(params=slow_except(("nf4, twice", "int8"), CONFIGS))
def model(request: Any, tmp_path: Path) -> Any:
    """A quantised Llama with adapters."""
    llama(hidden_size=64, intermediate_size=128).bfloat16().save_pretrained(tmp_path / "model")
    config = BitsAndBytesConfig(**CONFIGS[request.param])
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", quantization_config=config, dtype=torch.bfloat16)
    prepare_quantized(loaded)
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, lora_dropout=0.1)
    return peft.get_peft_model(loaded, config).train()


def stock(model: Any) -> Any:
    copied = copy.deepcopy(model)
    enable_checkpointing(copied.get_base_model(), {"use_reentrant": False})
    copied.enable_input_require_grads()
    return copied


def packed(model: Any) -> list[torch.Tensor]:
    return [parameter for parameter in model.parameters() if isinstance(parameter, Int8Params | Params4bit)]


def test_gradients_are_those_of_stock_and_weights_go_away(model: Any) -> None:
    """A view of a packed weight on ctx keeps no memory: its storage is emptied, and filled for the recomputation."""
    plain = stock(model)
    before = [parameter.detach().clone() for parameter in packed(model)]
    ring = stream_layers(model).ring
    for seed in range(2):
        assert backward(model, seed) == backward(plain, seed)
    assert same(gradients(model), gradients(plain))
    assert ring.fetches == 2 * (2 * LAYERS - 2)
    of_layer = sum(tensor.nbytes for tensor in ring.layers[0].host_tensors())
    assert (ring.live_bytes, ring.peak_bytes) == (0, 2 * of_layer)
    assert same(packed(model), before)
    shells = [tensor for tensors in ring._shells.values() for tensor in tensors]
    assert shells
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in shells)


def test_evaluation_and_errors_in_between_change_nothing(model: Any) -> None:
    plain = stock(model)
    handle = stream_layers(model)
    for one in (model, plain):
        backward(one)
        with torch.inference_mode():
            one.eval()(IDS)
        backward(one.train())
    assert handle.ring.live_bytes == 0
    handle_of_hook = model.get_base_model().lm_head.register_forward_hook(lambda *_: {}["broken"])
    with pytest.raises(KeyError, match="broken"):
        backward(model)
    handle_of_hook.remove()
    assert backward(model) == backward(plain)
    assert same(gradients(model), gradients(plain))
    handle.remove()
    assert backward(model, 1) == backward(plain, 1)


def test_the_trainer_trains_it(model: Any, tmp_path: Path) -> None:
    plain = copy.deepcopy(model)
    stream_layers(model)
    for one in (model, plain):
        tiny.train(one, rows(), tmp_path, optim="adamw_torch", learning_rate=1e-2)
    assert tiny.largest_difference(model, plain) == 0.0
