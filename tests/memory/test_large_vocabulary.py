"""The estimate of tied embeddings whose gradient is rows, and of a loss without logits: the real step's, to the byte.

The batches have every token once: on the meta device, which has no values, all tokens count as distinct and all
positions as labelled.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from host_semantics import HostSemantics
from torch.profiler import ProfilerActivity, profile

from hf_memopt import estimate
from hf_memopt.memory.recording import StepTrace
from hf_memopt.memory.recording.passes import autocast_dtype
from hf_memopt.memory.recording.sessions import _prepared
from hf_memopt.memory.recording.step import record_step
from hf_memopt.memory.settings import StepSettings
from hf_memopt.memory.tracking import StorageTracker

# torch 2.13 says so whenever the state of oneDNN is read
pytestmark = pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN:UserWarning")

VOCABULARY, TOKENS = 400, 24
SMALL = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
LLAMA = {**SMALL, "num_key_value_heads": 1, "intermediate_size": 48, "attention_dropout": 0.1}
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA, tie_word_embeddings=True)),
    "t5": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=VOCABULARY, d_model=32, d_kv=16, d_ff=48, num_layers=2, num_heads=2, decoder_start_token_id=0
        )
    ),
    "bert": lambda: transformers.BertForMaskedLM(
        transformers.BertConfig(**SMALL, intermediate_size=48, max_position_embeddings=32, pad_token_id=None)
    ),
}
BOTH = {"sparse_tied_embedding": True, "fused_cross_entropy": True}
RELEASED = {"gradient_release": True, "max_grad_norm": 0}
STEPS: dict[str, dict[str, Any]] = {
    "rows": {"precision": "fp32", "sparse_tied_embedding": True},
    "rows, released": {"precision": "fp32", "sparse_tied_embedding": True, **RELEASED},
    "rows, accumulated, checkpointing": {
        "precision": "bf16",
        "sparse_tied_embedding": True,
        "gradient_accumulation_steps": 2,
        "checkpointing": True,
    },
    "no logits": {"precision": "fp32", "fused_cross_entropy": True},
    "both": {"precision": "fp32", **BOTH},
    "both, released, checkpointing": {"precision": "fp32", "checkpointing": True, **BOTH, **RELEASED},
    "both, accumulated": {"precision": "fp32", "gradient_accumulation_steps": 2, **BOTH},
}
QUICK = {"llama": ("rows, released", "both, accumulated"), "t5": ("rows, released",)}
QUICK |= {"bert": ("both, released, checkpointing",)}
CASES = [
    pytest.param(name, step, marks=[] if step in QUICK[name] else pytest.mark.slow) for name in MODELS for step in STEPS
]


def prepared(name: str, device: str, settings: StepSettings) -> Any:
    torch.manual_seed(0)
    with torch.device(device):
        model = MODELS[name]().train()
    model.config._attn_implementation = "eager"
    return _prepared(model, settings)


def batch(name: str, device: str) -> dict[str, torch.Tensor]:
    rows = torch.arange(5, 5 + TOKENS).view(1, -1)
    mask = torch.ones_like(rows)
    mask[:, -2:] = 0
    tensors = {"input_ids": rows.to(device), "attention_mask": mask.to(device), "labels": rows.clone().to(device)}
    if name == "llama":  # which else ignores the last label of a row
        tensors["shift_labels"] = rows.clone().to(device)
    return tensors


def record(name: str, device: str, settings: StepSettings) -> StepTrace:
    tracker = StorageTracker(device_type=device)
    semantics = HostSemantics(
        autocast=autocast_dtype(settings.precision), cache=settings.autocast_cache, tracker=tracker
    )
    return record_step(
        prepared(name, device, settings),
        batch(name, device),
        settings,
        tracker=tracker,
        semantics=semantics,
    )


def peak_bytes(tracker: StorageTracker) -> int:
    alive = peak = 0
    for _, delta in tracker.events:
        alive += delta
        peak = max(peak, alive)
    return peak


def sizes(tracker: StorageTracker) -> list[int]:
    """Deltas in order, less those of scalars and of tensors without elements."""
    return [delta for _, delta in tracker.events if abs(delta) > 8]


@pytest.mark.parametrize(("name", "step"), CASES)
def test_meta_step_is_the_real_step_to_the_byte(name: str, step: str) -> None:
    settings = StepSettings(**STEPS[step])
    real, meta = (record(name, device, settings) for device in ("cpu", "meta"))
    assert peak_bytes(meta.tracker) == peak_bytes(real.tracker)
    if not settings.fused_cross_entropy:  # whose labelled rows are looked up where there are values
        assert sizes(meta.tracker) == sizes(real.tracker)
    matrix = VOCABULARY * 32 * 4
    released = [meta.tracker.sizes[number] for _, _, number in meta.micro_batches[0].releases]
    held = [meta.tracker.sizes[number] for number in meta.gradient_of.values()]
    assert (released if settings.gradient_release else held).count(matrix) == 1


def allocator_peak(name: str, settings: StepSettings) -> int:
    """Return the peak of torch's CPU allocator in a plain step, without any of our modes."""
    model, inputs = prepared(name, "cpu", settings), batch(name, "cpu")
    for parameter in model.parameters() if settings.gradient_release else ():
        parameter.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    before = {t.untyped_storage().data_ptr(): t for t in (*model.parameters(), *model.buffers(), *inputs.values())}
    gc.collect()
    gc.disable()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            loss = model(**inputs).loss
            loss.backward()
            del loss
    finally:
        gc.enable()
    alive = peak = sum(tensor.untyped_storage().nbytes() for tensor in before.values())
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return peak


ALLOCATED = [pytest.param("rows", marks=pytest.mark.slow), "rows, released", "both, released, checkpointing"]


@pytest.mark.parametrize("step", ALLOCATED)
@pytest.mark.parametrize("name", ["llama", pytest.param("t5", marks=pytest.mark.slow)])
def test_tracker_has_the_peak_of_the_cpu_allocator(name: str, step: str) -> None:
    """Left are scalars and lists of indices that operators make inside themselves, below the size of one row each."""
    changed = {"checkpointing": {"preserve_rng_state": False}} if "checkpointing" in STEPS[step] else {}
    settings = StepSettings(**{**STEPS[step], **changed})
    with torch.backends.mkldnn.flags(enabled=False):
        allocated = allocator_peak(name, settings)
    tracked = peak_bytes(record(name, "meta", settings).tracker)
    assert 0 <= allocated - tracked <= TOKENS * 8 + 128


# ---- Whole estimates ------------------------------------------------------------------------------------------------


def config(layers: int = 8, **changed: Any) -> transformers.LlamaConfig:
    sizes_of = {**LLAMA, "num_hidden_layers": layers, "vocab_size": 4000, "tie_word_embeddings": True}
    return transformers.LlamaConfig(**{**sizes_of, "max_position_embeddings": 64, **changed})


def found(**settings: Any) -> Any:
    return estimate(config(), batch_size=2, seq_len=32, gpu="RTX 3060 12GB", precision="fp32", **settings)


def test_each_setting_has_a_trace_of_its_own() -> None:
    released = {**RELEASED, "checkpointing": True}
    settings = [{}, {"sparse_tied_embedding": True}, {"fused_cross_entropy": True}, BOTH, {}]
    stock, tied, fused, both, again = (found(**released, **one).peak_allocated_bytes for one in settings)
    assert stock == again
    assert len({stock, tied, fused, both}) == 4
    assert both <= stock - 4000 * 32 * 4


def test_the_loss_without_logits_is_counted_as_logits_and_loss() -> None:
    """A chunk of 64 MiB holds all of them here: one tensor is logits, softmax and gradient in turn."""
    stock, fused = (found(fused_cross_entropy=on, sparse_tied_embedding=True) for on in (False, True))
    most = [int(one.timeline.components[:, 4].max()) for one in (stock, fused)]
    logits = 2 * 32 * 4000 * 4
    assert logits <= most[1] <= most[0] / 2


def test_an_evaluation_of_the_loss_alone_makes_no_logits() -> None:
    settings = {"fused_cross_entropy": True, "eval_batch_size": 400}
    alone, kept = (found(**settings, prediction_loss_only=only).phases["evaluation"] for only in (True, False))
    assert kept.components["logits and loss"] >= 2 * 400 * 32 * 4000 * 4
    assert alone.components["logits and loss"] <= 3 * 64 * 2**20  # of a chunk: logits and their softmax, not kept


@pytest.mark.slow
def test_evaluation_makes_real_logits() -> None:
    fused, stock = (found(fused_cross_entropy=on, eval_batch_size=16) for on in (True, False))
    logits = 16 * 32 * 4000 * 4
    for one in (fused, stock):
        assert one.phase == "evaluation"
        assert one.components["logits and loss"] >= 2 * logits
    assert fused.components == stock.components


@pytest.mark.parametrize("setting", BOTH)
def test_settings_are_checked(setting: str) -> None:
    with pytest.raises(ValueError) as error:
        StepSettings(**{setting: 1})
    assert str(error.value) == f"{setting}=1 is invalid; expected True or False. Pass {setting}=False"
    untied = config(tie_word_embeddings=False)
    if setting == "sparse_tied_embedding":
        with pytest.raises(ValueError) as refused:
            estimate(untied, batch_size=1, seq_len=8, gpu="RTX 3060 12GB", sparse_tied_embedding=True)
        assert str(refused.value) == (
            "model=<LlamaForCausalLM> has no head that shares the weight of its input embeddings; expected tied "
            "weights. Leave sparse_tied_embedding out"
        )
