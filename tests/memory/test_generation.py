"""Generation in evaluation on the meta device, against real tensors, the CPU allocator and generation step by step."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import transformers
from slow_cases import slow_except
from torch.profiler import ProfilerActivity, profile
from transformers import BertConfig, Seq2SeqTrainingArguments, T5Config, WhisperConfig

from hf_memopt import Estimate, NotEstimableError, StepSettings, estimate, estimate_from_arguments
from hf_memopt.binding.model_changes import add_adapters
from hf_memopt.memory.recording import RecordedPass, StepTrace, generation
from hf_memopt.memory.recording.sessions import Session
from hf_memopt.memory.recording.step import record_step
from hf_memopt.memory.tracking import StorageTracker

# torch 2.13 says so whenever the state of oneDNN is read
pytestmark = pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN:UserWarning")

BATCH, SEQ, LABELS, LENGTH = 4, 24, 7, 30
T5 = {"vocab_size": 100, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
WHISPER = {
    **{f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in (("layers", 2), ("ffn_dim", 64))},
    **{"d_model": 32, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "vocab_size": 120},
    **{"max_source_positions": 50, "max_target_positions": 60, "bos_token_id": 1, "pad_token_id": 0},
    **{"decoder_start_token_id": 3, "suppress_tokens": None, "begin_suppress_tokens": None, "eos_token_id": 2},
}
GPT2 = {"vocab_size": 100, "n_embd": 32, "n_layer": 2, "n_head": 2, "bos_token_id": None, "eos_token_id": None}
CONFIGS = {
    "t5": lambda: T5Config(**T5, decoder_start_token_id=0),
    "whisper": lambda: WhisperConfig(**WHISPER),
    "gpt2": lambda: transformers.GPT2Config(**GPT2, pad_token_id=0),
}
CONFIGS["t5 with adapters"] = CONFIGS["t5"]


def build(family: str, device: str) -> Any:
    """Return a tiny model on a device, without a token that ends a row."""
    config = CONFIGS[family]()
    config._attn_implementation = "eager"
    heads = {
        "t5": "T5ForConditionalGeneration",
        "t5 with adapters": "T5ForConditionalGeneration",
        "whisper": "WhisperForConditionalGeneration",
        "gpt2": "GPT2LMHeadModel",
    }
    torch.manual_seed(0)
    with torch.device(device):
        model = getattr(transformers, heads[family])(config)
    model.generation_config.eos_token_id = None
    if "adapters" in family:  # they generate outside of accelerate's autocast
        with torch.device(device):
            return add_adapters(model, 4, targets=("q", "wo"))
    return model


def batch(family: str, device: str) -> dict[str, torch.Tensor]:
    tokens = torch.arange(BATCH * SEQ, device=device).view(BATCH, SEQ) % 90 + 5
    if family == "whisper":
        inputs = {"input_features": torch.ones(BATCH, 80, 100, device=device)}
    else:
        mask = torch.ones(BATCH, SEQ, dtype=torch.int64, device=device)
        if device == "cpu":
            mask[1, SEQ - 4 :] = 0
        inputs = {"input_ids": tokens, "attention_mask": mask}
    return {**inputs, "labels": tokens.clone() if family == "gpt2" else tokens[:, :LABELS].clone()}


def settings(beams: int, precision: str = "fp32") -> StepSettings:
    return StepSettings(
        precision=precision,
        eval_batch_size=BATCH,
        predict_with_generate=True,
        generation_max_length=LENGTH,
        generation_num_beams=beams,
    )


def record(family: str, device: str, step: StepSettings) -> StepTrace:
    inputs = batch(family, device)
    tracker = StorageTracker(device_type=device)
    return record_step(build(family, device), inputs, step, tracker=tracker, evaluation_batch=inputs)


def evaluation(trace: StepTrace) -> RecordedPass:
    assert trace.evaluation is not None
    return trace.evaluation


def deltas(trace: StepTrace) -> list[int]:
    """Return the sizes of the evaluation's events, less scalars and an index of four rows that only real ones have."""
    part = evaluation(trace)
    return [delta for _, delta in trace.tracker.events[part.start : part.end] if abs(delta) > 16]


def peak_bytes(trace: StepTrace) -> int:
    """Return the most that the evaluation holds beside what was there."""
    part = evaluation(trace)
    alive = peak = 0
    for _, delta in trace.tracker.events[part.start : part.end]:
        alive += delta
        peak = max(peak, alive)
    return peak


@pytest.mark.parametrize("beams", slow_except((3,), (1, 3)))
@pytest.mark.parametrize(
    ("family", "precision"),
    [("t5", "fp32"), ("t5", "bf16"), ("t5 with adapters", "bf16"), ("whisper", "fp32"), ("gpt2", "bf16")],
)
def test_generation_on_meta_is_the_real_one(family: str, precision: str, beams: int) -> None:
    """Every event, though on meta most of the decoding steps are computed, not run."""
    step = settings(beams, precision)
    real, meta = (record(family, device, step) for device in ("cpu", "meta"))
    assert deltas(meta) == deltas(real)
    gathered = [[trace.tracker.sizes[number] for number in evaluation(trace).outputs] for trace in (meta, real)]
    assert gathered[0] == gathered[1] == [8 * BATCH * LENGTH * beams, 8 * BATCH * LENGTH]


def comparable(trace: StepTrace) -> dict[str, Any]:
    """Return all that a replay reads of a recording with an evaluation."""
    tracker = trace.tracker
    return {
        "events": tracker.events,
        "sizes": tracker.sizes,
        "allocated_at": tracker.allocated_at,
        "modules": [tracker.module_of(number) for number in range(len(tracker.sizes))],
        "evaluation": (evaluation(trace).outputs, evaluation(trace).logits, evaluation(trace).logits_event),
        "borders": (evaluation(trace).generation_end, evaluation(trace).forward_end, evaluation(trace).end),
    }


@pytest.mark.parametrize("beams", slow_except((2,), (1, 2)))
@pytest.mark.parametrize("family", slow_except(("t5",), ("t5", "whisper", "gpt2")))
def test_computed_steps_are_those_that_run(family: str, beams: int, monkeypatch: pytest.MonkeyPatch) -> None:
    computed = record(family, "meta", settings(beams))
    monkeypatch.setattr(generation, "RUN_STEPS", None)
    run = record(family, "meta", settings(beams))
    assert comparable(computed) == comparable(run)


@pytest.mark.parametrize("segments", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_replay_of_computed_steps_reserves_what_that_of_all_does(
    segments: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With caches beyond the allocator's small sizes; the replay leaves out small temporaries of computed steps."""
    shape = T5Config(
        d_model=256, d_kv=32, d_ff=512, num_layers=1, num_heads=8, vocab_size=512, decoder_start_token_id=0
    )
    sizes = {"batch_size": 1, "seq_len": 16, "eval_batch_size": 32, "generation_max_length": 64}

    def found() -> Estimate:
        Session.traces.clear()
        return estimate(shape, **sizes, predict_with_generate=True, expandable_segments=segments)

    computed = found()
    monkeypatch.setattr(generation, "RUN_STEPS", None)
    run = found()
    assert len(computed.timeline.reserved) < len(run.timeline.reserved) / 2
    assert (computed.peak_reserved_bytes, computed.phase) == (run.peak_reserved_bytes, run.phase)
    assert computed.phases["generation"] == run.phases["generation"]


def test_steps_that_do_not_repeat_are_all_run(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = comparable(record("t5", "meta", settings(2)))
    monkeypatch.setattr(generation, "add_missing_steps", lambda tracker, steps: None)
    trace = record("t5", "meta", settings(2))
    part = evaluation(trace)
    assert len(trace.tracker.events) > len(expected["events"])  # the attempt is in the list, before the pass
    sizes = [delta for _, delta in trace.tracker.events[part.start : part.end]]
    assert sizes == [delta for _, delta in expected["events"]][-len(sizes) :]


def allocator_peak(family: str, beams: int) -> int:
    """Return the most that torch's CPU allocator holds in a plain evaluation step, the Trainer's calls in its order."""
    model, inputs = build(family, "cpu").eval(), batch(family, "cpu")
    gc.collect()
    gc.disable()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            tokens = model.generate(**inputs, max_length=LENGTH, num_beams=beams)
            labels = torch.ones((BATCH, LENGTH), dtype=torch.int64)
            with torch.no_grad():
                outputs = model(**inputs)
                loss = outputs["loss"].detach().mean()
            del outputs, loss, tokens, labels
    finally:
        gc.enable()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    alive = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    assert len(events) > 1000
    return peak


@pytest.mark.parametrize("beams", slow_except((3,), (1, 3)))
@pytest.mark.parametrize(("family", "own_bytes"), [("t5", 128), ("gpt2", 128), ("whisper", 8192)])
def test_peak_is_that_of_the_cpu_allocator(family: str, own_bytes: int, beams: int) -> None:
    """Left are scalars, and of Whisper what its own ``generate``, which runs whole here, does around the decoding."""
    with torch.backends.mkldnn.flags(enabled=False):
        allocated = allocator_peak(family, beams)
    tracked = peak_bytes(record(family, "meta", settings(beams)))
    assert 0 <= allocated - tracked <= own_bytes


def test_generation_is_a_phase_of_an_estimate() -> None:
    asked: dict[str, Any] = {"batch_size": 2, "seq_len": 64, "labels_length": 8, "optim": "sgd", "eval_batch_size": 64}
    without = estimate(T5Config(**T5, decoder_start_token_id=0), **asked)
    config = T5Config(**T5, decoder_start_token_id=0)
    found = estimate(config, **asked, predict_with_generate=True, generation_max_length=200, generation_num_beams=8)
    assert found.phase == "generation"
    assert found.peak_allocated_bytes > without.peak_allocated_bytes
    assert "generation" in [name for _, name in found.timeline.phases]
    assert "generation" not in [name for _, name in without.timeline.phases]


def test_arguments_of_seq2seq_trainer_are_read(tmp_path: Any) -> None:
    args = Seq2SeqTrainingArguments(
        str(tmp_path),
        eval_strategy="epoch",
        predict_with_generate=True,
        generation_max_length=40,
        generation_num_beams=3,
        use_cpu=True,
    )
    config = T5Config(**T5, decoder_start_token_id=0)
    found = estimate_from_arguments(config, args, [10, 12]).settings
    assert (found.predict_with_generate, found.generation_max_length, found.generation_num_beams) == (True, 40, 3)
    args.generation_config = "folder"  # type: ignore[assignment]
    with pytest.raises(NotEstimableError, match="generation_config='folder' is not read"):
        estimate_from_arguments(config, args, 12)


def test_a_classifier_does_not_generate() -> None:
    config = BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, vocab_size=90)
    with pytest.raises(ValueError, match="needs a model that generates, which BertForSequenceClassification does not"):
        estimate(
            config,
            batch_size=2,
            seq_len=8,
            eval_batch_size=2,
            predict_with_generate=True,
            task="sequence-classification",
        )
