"""Inputs of layers in host memory, copied beside computing: gradients to the bit, races, bytes, what is undone."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
import transformers
from late_lanes import LateLanes
from peft import LoraConfig, get_peft_model
from slow_cases import slow_except

import tiny
from hf_memopt import checkpoint_layers, estimate, tile_layers
from hf_memopt.techniques.checkpointing.overlapped import overlap_offload
from hf_memopt.techniques.streaming import Lanes
from language_models import gradients
from technique_table import same

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")
IDS = torch.randint(5, 60, (2, 24), generator=torch.Generator().manual_seed(0))
LAYERS = 5


def model() -> Any:
    found = tiny.llama(num_hidden_layers=LAYERS, intermediate_size=128).train()
    checkpoint_layers(found)
    return found


def trained(model: Any, passes: int = 1) -> Any:
    for _ in range(passes):
        loss = model(input_ids=IDS, labels=IDS).loss
        found = gradients(loss, model)
    return loss.detach(), found


def in_last_layer(model: Any) -> Any:
    named = [*model.named_parameters()]
    return next(one for name, one in named if f"layers.{LAYERS - 1}." in name and one.requires_grad)


@pytest.mark.parametrize("seed", slow_except(range(5), range(200)))
@pytest.mark.parametrize("kind", ["full", "LoRA", "tiles"])
def test_late_copies_change_no_bit(kind: str, seed: int) -> None:
    """Each copy runs as late as its event lets it, and its source and target are watched."""
    plain = model()
    if kind == "LoRA":
        plain = get_peft_model(plain, LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
        plain.enable_input_require_grads()
    ours, lanes = copy.deepcopy(plain), LateLanes(seed)
    if kind == "tiles":
        for one in (plain, ours):
            tile_layers(one, 8)
    overlap_offload(ours, lanes)
    last = in_last_layer(ours)
    for _ in range(3):
        assert same(trained(ours), trained(plain))
        ours(input_ids=IDS, labels=IDS)  # a graph that is dropped, and one whose backward pass ends in the last layer
        torch.autograd.grad(ours(input_ids=IDS, labels=IDS).loss, last)
    assert lanes.late > 0
    assert {"Inputs._fetch", "Inputs.unpack", "Inputs._let_go"} <= lanes.asked


@pytest.mark.parametrize("without", ["Inputs._fetch", "Inputs.unpack", "Inputs._let_go"])
def test_each_wait_is_needed(without: str) -> None:
    """A race is found where it is left out."""
    plain = model()
    for seed in range(20):
        ours = copy.deepcopy(plain)
        overlap_offload(ours, LateLanes(seed, without))
        try:
            assert same(trained(ours), trained(plain))
            torch.autograd.grad(ours(input_ids=IDS, labels=IDS).loss, in_last_layer(ours))
            gc.collect()
            assert same(trained(ours), trained(plain))
        except AssertionError:
            return
    pytest.fail("no race was found")


class Counting(Lanes):
    """Counts its buffers."""

    made = 0

    def host_like(self, tensors: Any) -> Any:
        self.made += len(tensors)
        return super().host_like(tensors)


def test_buffers_are_used_again_and_graphs_may_be_dropped_or_used_twice() -> None:
    plain = model()
    ours, lanes = copy.deepcopy(plain), Counting("cpu")
    handle = overlap_offload(ours, lanes)
    ours(input_ids=IDS, labels=IDS)  # dropped
    gc.collect()
    assert same(trained(ours, 3), trained(plain))
    assert lanes.made == LAYERS
    loss = ours(input_ids=IDS, labels=IDS).loss
    weights = [one for one in ours.parameters() if one.requires_grad]
    first, second = (torch.autograd.grad(loss, weights, retain_graph=again) for again in (True, False))
    assert all(map(torch.equal, first, second))
    handle.remove()
    assert same(trained(ours), trained(plain))
    assert lanes.made == LAYERS


@pytest.mark.skipif(tiny.IS_BEFORE_5_17, reason="transformers before 5.17 does not offload")
def test_two_inputs_are_on_the_device_in_the_estimate() -> None:
    """One more than of stock's offload; the seconds of the copies are hidden."""
    step: dict[str, Any] = {"batch_size": 2, "seq_len": 512, "gpu": "RTX 4090", "precision": "bf16"}
    step |= {"fused_cross_entropy": True, "lora": 16, "weights_dtype": "bfloat16", "autocast_cache": False}
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 4, "num_key_value_heads": 8}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=32)
    kept, stocks, ours = (
        estimate(config, checkpointing=one, **step) for one in (True, {"offload": True}, {"offload": "overlapped"})
    )
    hidden_bytes = 2 * 512 * 2048 * 2
    assert 0 <= ours.phases["backward"].allocated_bytes - stocks.phases["backward"].allocated_bytes <= hidden_bytes
    assert ours.phases["forward"].allocated_bytes < kept.phases["forward"].allocated_bytes
    assert ours.host_bytes == 4 * hidden_bytes  # position embeddings stay
    assert kept.step_time.seconds <= ours.step_time.seconds < stocks.step_time.seconds


def test_buffers_of_other_lengths_are_let_go() -> None:
    model = tiny.llama(num_hidden_layers=5).train()
    checkpoint_layers(model)
    overlap_offload(model, Lanes("cpu"))
    for length in range(8, 24):
        ids = torch.ones(2, length, dtype=torch.long)
        model(input_ids=ids, labels=ids).loss.backward()
        gc.collect()
    inputs = model.model.layers[0]._gradient_checkpointing_func.func.__self__
    assert {shape[1] for shape, _ in inputs._free} <= {22, 23}
