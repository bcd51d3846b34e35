"""Streamed layers over architectures and settings: bit for bit what the same code trains with whole weights."""

from __future__ import annotations

import copy
from itertools import product
from pathlib import Path
from typing import Any

import auto_heads
import peft
import pytest
import torch
from slow_cases import slow_except
from test_streaming import rows
from transformers import Trainer

import tiny
from hf_memopt import StreamedLayersCallback, attach, gradient_release, stream_layers
from hf_memopt.binding import checkpointing_arguments, enable_checkpointing

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
    assert [torch.equal(one, other) for one, other in zip(found, expected, strict=True)] == [True] * len(expected)
    largest = max(sum(t.nbytes for t in layer.host_tensors()) for layer in ring.layers)
    assert 0 < ring.peak_bytes <= 2 * largest


def test_thirty_architectures_are_compared() -> None:
    assert len({*FAST, *SLOW}) == len((*FAST, *SLOW)) >= 30


SIX = ("llama", "gpt2", "opt", "bert", "qwen3_moe", "gemma2")
WAYS = ("parked", "clipped", "accumulated", "8-bit", "bf16", "released", "released, 8-bit", "LoRA")


def settings_of(way: str) -> dict[str, Any]:
    settings: dict[str, Any] = {"optim": "adamw_torch", "learning_rate": 1e-2, "max_grad_norm": 0.0}
    if way in ("clipped", "LoRA"):
        settings["max_grad_norm"] = 0.1
    if way == "accumulated":
        settings |= {"max_grad_norm": 0.1, "gradient_accumulation_steps": 2}
    if way == "8-bit":
        settings["optim"] = "adamw_bnb_8bit"
    return settings


def run(model: Any, way: str, folder: Path, callbacks: list[Any]) -> Trainer:
    released = {}
    if way.startswith("released"):
        import bitsandbytes

        kind, options = torch.optim.AdamW, {}
        if way.endswith("8-bit"):
            kind, options = bitsandbytes.optim.AdamW, {"optim_bits": 8, "min_8bit_size": 512}
        released = {"optimizer_cls_and_kwargs": (gradient_release(kind), {"lr": 1e-2, **options})}
    plain = {} if callbacks else checkpointing_arguments()
    args = tiny.arguments(folder, bf16=way == "bf16", **settings_of(way), **plain)
    trainer = Trainer(model, args, train_dataset=rows(8), callbacks=callbacks, **released)
    attach(trainer).train()
    return trainer


@pytest.mark.parametrize(
    ("kind", "way"), slow_except([("llama", "clipped"), ("opt", "released, 8-bit")], product(SIX, WAYS))
)
def test_the_trainer_trains_the_same_in_every_combination(
    kind: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = head(kind, monkeypatch)
    model = model.float()
    model.config.tie_word_embeddings = False
    model = adapted(model) if way == "LoRA" else model
    whole = run(copy.deepcopy(model), way, tmp_path / "whole", [])
    for prefetch, embeddings in product((0, 1, 4), (False, True)):
        if embeddings and (way == "LoRA" or len({*model.get_input_embeddings().parameters()} & set(tied(model)))):
            continue
        callback = StreamedLayersCallback(prefetch, embeddings_on_host=embeddings)
        ours = run(copy.deepcopy(model), way, tmp_path / f"{prefetch} {embeddings}", [callback])
        assert [row.get("loss") for row in ours.state.log_history] == [
            row.get("loss") for row in whole.state.log_history
        ]
        assert tiny.largest_difference(ours.model, whole.model) == 0.0, (prefetch, embeddings)


def tied(model: Any) -> list[Any]:
    head = model.get_output_embeddings()
    return [] if head is None else [*head.parameters()]
