"""Which modules are not tiled and why; bytes of a step with experts in 4 bits."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
from test_quantized_experts import EIGHT, IDS, mixture
from test_tiled_layers import Carrying, Choosing, Counting, Mixing, llama
from torch import nn

from hf_memopt.prediction.memory.tracking import StorageTracker
from hf_memopt.techniques import quantize_experts
from hf_memopt.training.binding.model_changes import add_adapters
from hf_memopt.training.techniques.tiling.position_wise import find_places


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Mixing, "mixes positions"),
        (Carrying, "mixes positions"),
        (Counting, "changes its buffers"),
        (Choosing, "contains a router"),
    ],
)
def test_why_a_module_is_not_tiled(kind: type[nn.Module], reason: str) -> None:
    model = llama()
    model.model.layers[1].mlp = kind()
    assert find_places(model)[1]["model.layers.1.mlp"] == reason


def test_one_expert_at_a_time_is_dequantised() -> None:
    """Forward and backward, beside activations; autograd keeps packed bytes alone. By the operations of CUDA."""
    with torch.device("meta"):
        model = mixture(hidden_size=256, intermediate_size=512, num_hidden_layers=1, **EIGHT)
        hidden = torch.randn(16, 256, requires_grad=True)
        index, weights = torch.zeros(16, 2, dtype=torch.int64), torch.rand(16, 2)
    quantize_experts(model)
    experts, expert_bytes, activation_bytes = model.model.layers[0].mlp.experts, 3 * 512 * 256 * 4, 32 * 1024 * 4
    tracker = StorageTracker(device_type="meta")
    for stack in experts.buffers():
        tracker.add(stack)
    with tracker:
        out = experts(hidden, index, weights).sum()
        kept = sum(size for _, size in tracker.events)
        out.backward()
    stack_bytes = sum(one.nbytes for one in experts.buffers())
    assert stack_bytes < kept < stack_bytes + 5 * activation_bytes
    assert max(accumulate(size for _, size in tracker.events)) < stack_bytes + 2 * expert_bytes


def test_adapters_leave_stacks_of_experts_out() -> None:
    model = mixture("qwen3_moe")
    quantize_experts(model)
    adapted: Any = add_adapters(model, 4)
    assert not {"gate_up_proj", "down_proj"} & {*(adapted.peft_config["default"].target_parameters or ())}
    adapted(IDS)
