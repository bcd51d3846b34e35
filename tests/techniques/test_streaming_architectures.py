"""Streamed layers over architectures and settings: bit for bit what the same code trains with whole weights."""

from __future__ import annotations

import copy
from typing import Any

import auto_heads
import peft
import pytest
import torch
from architectures import cases, head

import tiny
from hf_memopt import stream_layers
from hf_memopt.training.binding import enable_checkpointing
from technique_table import same

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*(fan_in_fan_out|(rank|alpha)_pattern)"),
]
SIZES = {name: 4 for name, size in auto_heads.SIZES.items() if "layer" in name and size == 2} | {"vocab_size": 128}

RESIDENT = 0.0, 0.5, 1.0  # shares of the layers that stay, one at least


def adapted(model: Any) -> Any:
    """Return it with adapters that are not zero; PEFT has no dropout for those of fused experts."""
    torch.manual_seed(0)
    dropout = 0.0 if any("experts" in name for name, _ in model.named_modules()) else 0.1
    config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, lora_dropout=dropout)
    return peft.get_peft_model(model, config).train()


def trained(model: Any, batch: dict[str, Any]) -> list[torch.Tensor]:
    """Return the losses of two steps of AdamW, each of two batches, and all weights after them."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    found = []
    for seed in range(4):
        torch.manual_seed(seed)
        loss = model(**batch).loss
        loss.backward()
        found.append(loss.detach())
        if seed % 2:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return [*found, *(p.detach() for p in model.parameters())]


@pytest.mark.parametrize("way", ["full", "LoRA"])
@pytest.mark.parametrize("kind", cases("streamed"))
def test_an_architecture_is_trained_as_with_whole_weights(
    kind: str, way: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    model, batch = head(kind, SIZES, monkeypatch)
    model = (adapted(model) if way == "LoRA" else model).to(tiny.DEVICE)
    batch = {name: value.to(tiny.DEVICE) if torch.is_tensor(value) else value for name, value in batch.items()}
    whole = copy.deepcopy(model)
    if whole.supports_gradient_checkpointing:
        enable_checkpointing(whole, {"use_reentrant": False})
    is_slow = request.node.get_closest_marker("slow") is not None
    shares = [share for share in RESIDENT if is_slow or (share == 0.5) == (way == "LoRA")]
    some = [copy.deepcopy(whole) for _ in shares]
    ring = stream_layers(model).ring
    expected, found = trained(whole, batch), trained(model, batch)
    assert same(found, expected)
    largest, count = max(sum(t.nbytes for t in layer.host_tensors()) for layer in ring.layers), len(ring.layers)
    assert 0 < ring.peak_bytes <= 2 * largest
    for share, mostly in zip(shares, some, strict=True):
        ring = stream_layers(mostly, resident=max(1, int(share * count))).ring
        assert same(trained(mostly, batch), expected), share
        assert (ring.peak_bytes > 0) == (share < 1)
        assert ring.peak_bytes <= min(2, len(ring.layers)) * largest
