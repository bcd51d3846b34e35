"""A hand-written loop: its outputs, its cache and its gradients, against torch's own CPU allocations of such a loop."""

from __future__ import annotations

import gc
from collections.abc import Hashable
from typing import Any

import pytest
import torch
from host_semantics import HostSemantics
from slow_cases import slow_except
from torch.profiler import ProfilerActivity, profile
from transformers import GPT2Config, GPT2LMHeadModel

import tiny
from hf_memopt import estimate
from hf_memopt.memory.allocator import ReplayPlan
from hf_memopt.memory.allocator.replay import replay
from hf_memopt.memory.models import load_model
from hf_memopt.memory.optimizers import OptimizerMemory
from hf_memopt.memory.recording.step import record_step
from hf_memopt.memory.settings import StepSettings
from hf_memopt.memory.tracking import StorageTracker

# torch 2.13 says so whenever the state of oneDNN is read
pytestmark = pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN:UserWarning")

BATCH, SEQ, STEPS, VOCABULARY = 4, 24, 3, 1000


class ExactAllocator:
    """Bytes as requested, without blocks: what a CPU allocator counts."""

    def __init__(self) -> None:
        self.allocated = self.peak_allocated = self.reserved = self.peak_reserved = self.retries = 0
        self._sizes: dict[Hashable, int] = {}

    def state(self) -> object:
        return object()  # unlike every other: each pass is replayed

    def malloc(self, key: Hashable, size_bytes: int) -> int:
        self._sizes[key] = size_bytes
        self.allocated += size_bytes
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return size_bytes

    def free(self, key: Hashable) -> int:
        size_bytes = self._sizes.pop(key)
        self.allocated -= size_bytes
        return size_bytes

    def rename(self, key: Hashable, new_key: Hashable) -> None:
        self._sizes[new_key] = self._sizes.pop(key)


def build(family: str, device: str) -> Any:
    with torch.device(device):
        if family == "llama":
            model: Any = tiny.llama(vocab_size=VOCABULARY)
        else:
            dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
            model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=2, **dropout))
    model.set_attn_implementation("eager")
    return model.train()


def batch(device: str) -> dict[str, torch.Tensor]:
    ids = torch.zeros(BATCH, SEQ, dtype=torch.int64, device=device)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def real_peak(family: str, settings: StepSettings) -> int:
    """Return the peak of torch's CPU allocator in a plain loop over one batch."""
    model, inputs = build(family, "cpu"), batch("cpu")
    kept = {t.untyped_storage().data_ptr(): t for t in (*model.parameters(), *model.buffers(), *inputs.values())}
    model.config.use_cache = settings.loop != "trainer"
    gc.collect()
    gc.disable()
    try:
        with (
            torch.backends.mkldnn.flags(enabled=False),
            profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler,
        ):
            for _ in range(STEPS):
                for _ in range(settings.gradient_accumulation_steps):
                    if settings.loop == "function":
                        train_step(model, inputs, settings)
                        continue
                    outputs = model(**inputs)
                    loss = outputs.loss / settings.gradient_accumulation_steps
                    if settings.loop == "trainer":
                        del outputs
                    loss.backward()
                model.zero_grad(set_to_none=settings.zero_grad_to_none)  # SGD without momentum would need nothing
    finally:
        gc.enable()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    alive = peak = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return peak


def train_step(model: Any, inputs: dict[str, torch.Tensor], settings: StepSettings) -> None:
    outputs = model(**inputs)
    (outputs.loss / settings.gradient_accumulation_steps).backward()


def replayed_peak(family: str, settings: StepSettings) -> int:
    model = build(family, "meta")
    model.config.use_cache = settings.loop != "trainer"
    tracker = StorageTracker()
    trace = record_step(model, batch("meta"), settings, tracker=tracker, semantics=HostSemantics(tracker=tracker))
    plan = ReplayPlan(settings, OptimizerMemory((), 0, (), ()), clipping=(), micro_batches=1, workspaces=())
    return replay(trace, plan, ExactAllocator()).peak_allocated  # type: ignore[arg-type]


@pytest.mark.parametrize("batches", slow_except((3,), (1, 3)))
@pytest.mark.parametrize("to_none", [True, False], ids=["freed", "kept"])
@pytest.mark.parametrize("loop", ["manual", "trainer", "function"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_loop_has_the_peak_of_the_cpu_allocator(family: str, loop: str, to_none: bool, batches: int) -> None:
    """Left are scalars of 8 bytes inside operators; the Trainer's loop holds the batches of all accumulation steps."""
    settings = StepSettings(precision="fp32", loop=loop, zero_grad_to_none=to_none, gradient_accumulation_steps=batches)
    held = 0 if loop != "trainer" else (batches - 1) * sum(tensor.nbytes for tensor in batch("meta").values())
    assert abs(real_peak(family, settings) - (replayed_peak(family, settings) - held)) <= 256


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_outputs_that_stay_cost_logits_and_cache(family: str) -> None:
    trainer, manual = (
        replayed_peak(family, StepSettings(precision="fp32", loop=loop)) for loop in ("trainer", "manual")
    )
    assert manual - trainer >= BATCH * SEQ * VOCABULARY * 4  # the logits of the pass before, at least


def test_estimate_of_a_hand_written_loop_is_named_and_recorded_apart() -> None:
    settings: dict[str, Any] = {"batch_size": 2, "seq_len": 32, "precision": "fp32"}
    trainer = estimate("gpt2", **settings)
    manual = estimate("gpt2", **settings, loop="manual")
    assert manual.peak_allocated_bytes > trainer.peak_allocated_bytes
    assert "hand-written loop" in str(manual)
    in_function = estimate("gpt2", **settings, loop="function")
    assert in_function.phases["forward"].allocated_bytes < manual.phases["forward"].allocated_bytes
    assert in_function.phases["optimizer"].allocated_bytes == manual.phases["optimizer"].allocated_bytes
    assert "hand-written step function" in str(in_function)
    assert estimate("gpt2", **settings).peak_allocated_bytes == trainer.peak_allocated_bytes


def test_a_model_keeps_its_cache_only_where_asked() -> None:
    kept = [load_model("gpt2", keep_cache=keep).model.config.use_cache for keep in (False, True)]  # type: ignore[union-attr]
    assert kept == [False, True]


def test_own_optimizer_replaces_optim() -> None:
    def one_average(parameters: Any) -> OptimizerMemory:
        return OptimizerMemory(tuple(fact.size_bytes for fact in parameters), 0, (), ())

    settings: dict[str, Any] = {"batch_size": 1, "seq_len": 8, "precision": "fp32", "max_grad_norm": 0}
    own = estimate("gpt2", **settings, optimizer_memory=one_average)
    released = estimate("gpt2", **settings, optimizer_memory=one_average, gradient_release=True)
    parameters = sum(own.components[name] for name in ("weights",))
    assert own.components["optimizer state"] == pytest.approx(parameters, rel=0.02)
    assert released.peak_allocated_bytes < own.peak_allocated_bytes
    assert "one_average" in str(own)


def test_own_workspace() -> None:
    settings: dict[str, Any] = {"batch_size": 1, "seq_len": 8, "precision": "fp32"}
    usual, none = (estimate("gpt2", **settings, **extra) for extra in ({}, {"cublas_workspace_bytes": 0}))
    assert usual.components["workspace"] > none.components["workspace"] == 0
