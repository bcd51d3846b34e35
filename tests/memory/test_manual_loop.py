"""A hand-written loop: its outputs, its cache and its gradients, against torch's own CPU allocations of such a loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from recorded import allocator_peak, record, replayed_peak
from slow_cases import slow_except
from transformers import GPT2Config, GPT2LMHeadModel

import tiny
from hf_memopt.types import StepSettings

# torch 2.13 says so whenever the state of oneDNN is read
pytestmark = pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN:UserWarning")

BATCH, SEQ, STEPS, VOCABULARY = 4, 24, 3, 1000


def build(family: str, device: str, settings: StepSettings) -> Any:
    with torch.device(device):
        if family == "llama":
            model: Any = tiny.llama(vocab_size=VOCABULARY)
        else:
            dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
            model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=2, **dropout))
    model.set_attn_implementation("eager")
    model.config.use_cache = settings.loop != "trainer"
    return model.train()


def batch(device: str) -> dict[str, torch.Tensor]:
    ids = torch.zeros(BATCH, SEQ, dtype=torch.int64, device=device)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def real_peak(family: str, settings: StepSettings) -> int:
    """Return the peak of torch's CPU allocator in a plain loop over one batch."""
    model, inputs = build(family, "cpu", settings), batch("cpu")

    def train_step() -> None:
        outputs = model(**inputs)
        (outputs.loss / settings.gradient_accumulation_steps).backward()

    with allocator_peak(model, inputs) as peak:
        for _ in range(STEPS):
            for _ in range(settings.gradient_accumulation_steps):
                if settings.loop == "function":
                    train_step()
                    continue
                outputs = model(**inputs)
                loss = outputs.loss / settings.gradient_accumulation_steps
                if settings.loop == "trainer":
                    del outputs
                loss.backward()
            model.zero_grad(set_to_none=settings.zero_grad_to_none)  # SGD without momentum would need nothing
        outputs = loss = None
    return peak[0]


@pytest.mark.parametrize("batches", slow_except((3,), (1, 3)))
@pytest.mark.parametrize("to_none", slow_except([True], [True, False]), ids=["freed", "kept"])
@pytest.mark.parametrize("loop", ["manual", "trainer", "function"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_loop_has_the_peak_of_the_cpu_allocator(family: str, loop: str, to_none: bool, batches: int) -> None:
    """Left are scalars of 8 bytes inside operators; the Trainer's loop holds the batches of all accumulation steps."""
    settings = StepSettings(precision="fp32", loop=loop, zero_grad_to_none=to_none, gradient_accumulation_steps=batches)
    held = 0 if loop != "trainer" else (batches - 1) * sum(tensor.nbytes for tensor in batch("meta").values())
    replayed = replayed_peak(record(build(family, "meta", settings), batch("meta"), settings), settings)
    assert abs(real_peak(family, settings) - (replayed - held)) <= 256
