"""Generation in evaluation on the meta device, against real tensors, the CPU allocator and generation step by step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from recorded import allocator_peak, peak_bytes, prepared, record
from slow_cases import slow_except
from transformers import GenerationConfig, Seq2SeqTrainingArguments, T5Config, WhisperConfig

from hf_memopt import estimate, estimate_from_arguments
from hf_memopt.types import StepSettings

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


HEADS = {**{kind.lower(): f"{kind}ForConditionalGeneration" for kind in ("T5", "Whisper")}, "gpt2": "GPT2LMHeadModel"}


def build(family: str, device: str) -> Any:
    """Return a tiny model on a device, without a token that ends a row."""
    config = CONFIGS[family.split()[0]]()
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    with torch.device(device):
        model = getattr(transformers, HEADS[family.split()[0]])(config)
        model.generation_config.eos_token_id = None
    if "adapters" in family:  # they generate outside of accelerate's autocast
        model = prepared(model, StepSettings(lora=4, lora_targets=("q", "wo")))
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
    generated = {"predict_with_generate": True, "generation_max_length": LENGTH, "generation_num_beams": beams}
    return StepSettings(precision=precision, eval_batch_size=BATCH, **generated)


def recorded(family: str, device: str, step: StepSettings) -> Any:
    return record(build(family, device), batch(family, device), step, "cuda", evaluate=True)


def deltas(trace: Any) -> list[int]:
    """Return the sizes of the evaluation's events, less scalars and an index of four rows that only real ones have."""
    part = trace.evaluation
    return [delta for _, delta in trace.tracker.events[part.start : part.end] if abs(delta) > 16]


@pytest.mark.parametrize("beams", slow_except((3,), (1, 3)))
@pytest.mark.parametrize(
    ("family", "precision"),
    slow_except(
        (("t5", "bf16"), ("whisper", "fp32"), ("gpt2", "bf16")),
        [("t5", "fp32"), ("t5", "bf16"), ("t5 with adapters", "bf16"), ("whisper", "fp32"), ("gpt2", "bf16")],
    ),
)
def test_generation_on_meta_is_the_real_one(family: str, precision: str, beams: int) -> None:
    """Every event, though on meta most of the decoding steps are computed, not run."""
    step = settings(beams, precision)
    real, meta = (recorded(family, device, step) for device in ("cpu", "meta"))
    assert deltas(meta) == deltas(real)
    gathered = [[trace.tracker.sizes[number] for number in trace.evaluation.outputs] for trace in (meta, real)]
    assert gathered[0] == gathered[1] == [8 * BATCH * LENGTH * beams, 8 * BATCH * LENGTH]


@pytest.mark.parametrize("beams", slow_except((2,), (1, 2)))
@pytest.mark.parametrize("family", slow_except(("t5",), ("t5", "whisper", "gpt2")))
def test_computed_steps_are_those_that_run(family: str, beams: int, monkeypatch: pytest.MonkeyPatch) -> None:
    computed = recorded(family, "meta", settings(beams))
    monkeypatch.setattr("hf_memopt.prediction.memory.recording.generation.RUN_STEPS", None)
    run = recorded(family, "meta", settings(beams))
    for name in ("events", "sizes", "allocated_at"):
        assert getattr(computed.tracker, name) == getattr(run.tracker, name)
    modules = [[each.tracker.module_of(n) for n in range(len(each.tracker.sizes))] for each in (computed, run)]
    assert modules[0] == modules[1]
    for name in ("outputs", "logits", "logits_event", "generation_end", "forward_end", "end"):
        assert getattr(computed.evaluation, name) == getattr(run.evaluation, name)


def real_peak(family: str, beams: int) -> int:
    """Return the most that torch's CPU allocator holds in a plain evaluation step, the Trainer's calls in its order."""
    model, inputs = build(family, "cpu").eval(), batch(family, "cpu")
    with allocator_peak() as peak:
        tokens = model.generate(**inputs, max_length=LENGTH, num_beams=beams)
        labels = torch.ones((BATCH, LENGTH), dtype=torch.int64)
        with torch.no_grad():
            outputs = model(**inputs)
            loss = outputs["loss"].detach().mean()
        del outputs, loss, tokens, labels
    return peak[0]


@pytest.mark.parametrize("beams", slow_except((3,), (1, 3)))
@pytest.mark.parametrize(("family", "own_bytes"), [("t5", 128), ("gpt2", 128), ("whisper", 8192)])
def test_peak_is_that_of_the_cpu_allocator(family: str, own_bytes: int, beams: int) -> None:
    """Left are scalars, and of Whisper what its own ``generate``, which runs whole here, does around the decoding."""
    trace = recorded(family, "meta", settings(beams))
    assert 0 <= real_peak(family, beams) - peak_bytes(trace, trace.evaluation) <= own_bytes


def test_generation_is_a_phase_of_an_estimate() -> None:
    asked: dict[str, Any] = {"batch_size": 2, "seq_len": 64, "labels_length": 8, "optim": "sgd", "eval_batch_size": 64}
    without = estimate(T5Config(**T5, decoder_start_token_id=0), **asked)
    config = T5Config(**T5, decoder_start_token_id=0)
    found = estimate(config, **asked, predict_with_generate=True, generation_max_length=200, generation_num_beams=8)
    assert found.phase == "generation"
    assert found.peak_allocated_bytes > without.peak_allocated_bytes
    assert "generation" in [name for _, name in found.timeline.phases]
    assert "generation" not in [name for _, name in without.timeline.phases]


def test_what_a_folder_says_of_generation_is_read(tmp_path: Any) -> None:
    config = T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)
    config.save_pretrained(tmp_path)
    options = {"batch_size": 1, "seq_len": 8, "precision": "fp32", "eval_batch_size": 64, "predict_with_generate": True}
    made = {}
    for beams in (1, 4):
        own = {"num_beams": beams, "max_length": 60, "decoder_start_token_id": 0, "pad_token_id": 0}
        GenerationConfig(**own).save_pretrained(tmp_path)
        made[beams] = estimate(tmp_path, **options)
    expected = estimate(tmp_path, **options, generation_num_beams=4, generation_max_length=60)
    plain, found = made[1], made[4]
    assert found.peak_allocated_bytes == expected.peak_allocated_bytes > plain.peak_allocated_bytes


def test_arguments_of_seq2seq_trainer_are_read(tmp_path: Any) -> None:
    generated = {"predict_with_generate": True, "generation_max_length": 40, "generation_num_beams": 3}
    args = Seq2SeqTrainingArguments(str(tmp_path), eval_strategy="epoch", use_cpu=True, **generated)
    config = T5Config(**T5, decoder_start_token_id=0)
    found = estimate_from_arguments(config, args, [10, 12]).settings
    assert (found.predict_with_generate, found.generation_max_length, found.generation_num_beams) == (True, 40, 3)
    args.generation_config = GenerationConfig(max_new_tokens=30)
    found = estimate_from_arguments(config, args, [10, 12]).settings
    assert found.generation_max_length == 31  # as stock: it wins, and the decoder's first token is beside it
