"""Streamed layers over architectures and settings: bit for bit what the same code trains with whole weights."""

from __future__ import annotations

import copy
from typing import Any

import auto_heads
import peft
import pytest
import torch
from slow_cases import slow_except

from hf_memopt import stream_layers
from hf_memopt.binding import enable_checkpointing
from technique_table import same

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*(fan_in_fan_out|(rank|alpha)_pattern)"),
]
CAUSAL, MASKED, SEQ2SEQ = "causal language model", "masked language model", "sequence to sequence"
TASKS = dict.fromkeys(("bert", "distilbert", "modernbert"), MASKED) | dict.fromkeys(("t5", "bart"), SEQ2SEQ)
FAST = ("llama", "gpt2", "t5", "bert", "qwen3_moe")
SLOW = (
    *("apertus", "arcee", "bloom", "cohere2", "cwm", "ernie4_5", "exaone4", "falcon", "gemma2", "gemma3_text"),
    *("glm4", "gpt_neox", "gpt_oss", "granite", "helium", "lfm2", "mistral", "mixtral", "mpt", "olmo2", "olmoe"),
    *("opt", "phi", "phi3", "qwen2_moe", "qwen3", "stablelm", "starcoder2", "distilbert"),
    *("modernbert", "bart"),
)


def head(kind: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, dict[str, Any]]:
    """Return a tiny model of four layers in float64, and a batch."""
    for name in [name for name in auto_heads.SIZES if "layer" in name and auto_heads.SIZES[name] == 2]:
        monkeypatch.setitem(auto_heads.SIZES, name, 4)
    monkeypatch.setitem(auto_heads.SIZES, "vocab_size", 128)
    task = TASKS.get(kind, CAUSAL)
    model = auto_heads.build(task, kind, dict(auto_heads.heads(task))[kind])
    return model, auto_heads.batch(task, model)


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
@pytest.mark.parametrize("kind", slow_except(FAST, (*FAST, *SLOW)))
def test_an_architecture_is_trained_as_with_whole_weights(kind: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = head(kind, monkeypatch)
    model = adapted(model) if way == "LoRA" else model
    whole = copy.deepcopy(model)
    if whole.supports_gradient_checkpointing:
        enable_checkpointing(whole, {"use_reentrant": False})
    ring = stream_layers(model).ring
    expected, found = trained(whole, batch), trained(model, batch)
    assert same(found, expected)
    largest = max(sum(t.nbytes for t in layer.host_tensors()) for layer in ring.layers)
    assert 0 < ring.peak_bytes <= 2 * largest


def test_thirty_architectures_are_compared() -> None:
    assert len({*FAST, *SLOW}) == len((*FAST, *SLOW)) >= 30
