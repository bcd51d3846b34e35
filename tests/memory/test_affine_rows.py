"""Traces of any number of rows, derived from three recordings, are those that a recording gives."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from hf_memopt.memory.cuda.chip import Chip
from hf_memopt.memory.models.loading import load_model
from hf_memopt.memory.recording import trace_cache
from hf_memopt.memory.recording.affine_rows import AffineTrace, NotAffineError
from hf_memopt.memory.recording.kept_models import keeping_models, load_or_reuse
from hf_memopt.memory.recording.trace_cache import RecordedStep, Shape, forget_traces, record_or_reuse, record_rows
from hf_memopt.memory.settings import NotEstimableError, StepSettings
from tests.memory.test_repeated_layers import CONFIGS, facts_of

pytestmark = [
    # the deprecated name of activation checkpointing, asked for by peft; seen in peft 0.18 with transformers 5.23
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

CHIP = Chip.of((8, 6), 28)
MOST = 48
slow = partial(pytest.param, marks=pytest.mark.slow)


@pytest.fixture(autouse=True)
def _nothing_recorded() -> None:
    forget_traces()


def steps(model: Any, settings: StepSettings, length: int | None, rows: tuple[int, ...]) -> list[RecordedStep]:
    loaded = load_or_reuse(model, weights_dtype=settings.weights_dtype, load_in=settings.load_in)
    return [record_or_reuse(loaded, settings, Shape(count, length), CHIP) for count in rows]


def assert_derived(model: Any, settings: StepSettings, length: int | None, rows: tuple[int, ...]) -> None:
    with keeping_models():
        loaded = load_or_reuse(model, weights_dtype=settings.weights_dtype, load_in=settings.load_in)
        assert record_rows(loaded, settings, Shape(MOST, length), CHIP)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(trace_cache, "record_step", None)  # nothing is recorded any more
            derived = steps(model, settings, length, rows)
        forget_traces()
        expected = steps(model, settings, length, rows)
    for count, one, other in zip(rows, derived, expected, strict=True):
        found, wanted = facts_of(one.trace), facts_of(other.trace)
        assert {name for name in wanted if found[name] != wanted[name]} == set(), count
        assert (one.trainable, one.parameters, one.notes) == (other.trainable, other.parameters, other.notes)


SETTINGS: dict[str, dict[str, Any]] = {
    "bf16": {"precision": "bf16"},
    "accumulation and checkpointing": {"precision": "fp32", "gradient_accumulation_steps": 2, "checkpointing": True},
    "gradient release": {"precision": "bf16", "gradient_release": True, "max_grad_norm": 0.0},
    "evaluation": {"precision": "fp16", "eval_batch_size": 3},
    "hand-written loop": {"loop": "manual", "precision": "bf16"},
    "label smoothing": {"label_smoothing_factor": 0.1, "precision": "bf16", "attn_implementation": "eager"},
}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("bert", "accumulation and checkpointing"),
        ("llama", "gradient release"),
        *(slow(name, settings) for name in ("bert", "llama", "t5", "gpt2") for settings in SETTINGS),
    ],
)
def test_derived_traces_are_those_of_recordings(name: str, settings: str) -> None:
    assert_derived(CONFIGS[name](), StepSettings(**SETTINGS[settings]), 24, (2, 5, 24, 47, MOST))


def test_buffers_of_kernels_are_computed_for_each_number_of_rows() -> None:
    """Of BERT-base, the sums over 16, 32 and 33 rows have other buffers, whose sizes are on no line."""
    assert_derived("bert-base-uncased", StepSettings(precision="fp32"), 100, (12, 16, 24, 32, 33))


KNOWN: list[tuple[str, int | None, dict[str, Any]]] = [
    ("bert-large-uncased", 128, {"precision": "bf16", "checkpointing": True}),
    ("bert-base-uncased", 77, {"precision": "bf16", "weights_dtype": "bfloat16", "lora": 8, "load_in": "int8"}),
    ("Llama-3.2-1B", 512, {"precision": "bf16", "weights_dtype": "bfloat16"}),
    ("Llama-3.2-1B", 300, {"precision": "bf16", "weights_dtype": "bfloat16", "lora": 16, "load_in": "nf4"}),
    ("t5-base", 256, {"precision": "bf16"}),
    ("gpt2", 512, {"precision": "fp16"}),
    ("whisper-small", 64, {"precision": "bf16"}),
    ("vit-base-patch16-224", None, {"precision": "bf16"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "length", "settings"), KNOWN)
def test_derived_traces_of_known_models(name: str, length: int | None, settings: dict[str, Any]) -> None:
    if "lora" in settings:
        pytest.importorskip("peft")
    if "load_in" in settings:
        pytest.importorskip("bitsandbytes")
    assert_derived(name, StepSettings(**settings), length, (2, 3, 5, 8, 12, 16, 24, 33, 40, MOST))


# ---- What is no line ------------------------------------------------------------------------------------------------


def test_rows_that_are_cut_within_the_step_are_recorded_each() -> None:
    """2 and 3 rows are one micro-batch of 4, 48 rows are twelve: other events."""
    settings = StepSettings(precision="fp32", micro_batch_size=4)
    loaded = load_model(CONFIGS["bert"]())
    assert not record_rows(loaded, settings, Shape(MOST, 24), CHIP)
    assert not trace_cache._by_rows


def test_single_rows_and_more_than_recorded_are_recorded() -> None:
    settings, config = StepSettings(precision="fp32"), CONFIGS["bert"]()
    assert record_rows(load_model(config), settings, Shape(6, 24), CHIP)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace_cache, "record_step", None)
        for rows in (1, 7):
            with pytest.raises((TypeError, NotEstimableError)):
                record_or_reuse(load_model(config), settings, Shape(rows, 24), CHIP)


def test_modules_and_few_rows_are_not_derived() -> None:
    settings, config = StepSettings(precision="fp32"), CONFIGS["bert"]()
    assert not record_rows(load_model(load_model(config).model), settings, Shape(6, 24), CHIP)
    assert not record_rows(load_model(config), settings, Shape(3, 24), CHIP)


@pytest.mark.parametrize("changed", ["sizes", "flops", "order"])
def test_a_third_recording_that_is_off_the_line_is_noticed(changed: str) -> None:
    settings = StepSettings(precision="fp32")

    def record(rows: int, hidden: Any) -> Any:
        prepared = trace_cache._prepare(load_model(CONFIGS["gpt2"]()), settings)
        trace = trace_cache._record(prepared, settings, Shape(rows, 24), CHIP, hidden)
        events = trace.tracker.events
        if rows == MOST and changed == "sizes":
            trace.tracker.sizes[-1] += 4
        elif rows == MOST and changed == "flops":
            trace.flops[0] += 1
        elif rows == MOST:
            place = next(at for at in range(len(events) - 1) if events[at][0] != events[at + 1][0])
            events[place], events[place + 1] = events[place + 1], events[place]
        return trace

    with pytest.raises(NotAffineError):
        AffineTrace(record, MOST)
