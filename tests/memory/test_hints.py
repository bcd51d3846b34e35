"""Hints: each is simulated, the least change comes first, and the search ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

import pytest

import tiny
from hand_made import MIB, SMALL, Hint, hand_made
from hf_memopt import Estimate, Gpu, MissingExtraError, estimate
from hf_memopt.memory import with_hints

SEARCH = "hf_memopt.memory.estimation.estimate_of_step"


def on_gpu(usable_bytes: int, **changed: Any) -> Estimate:
    return hand_made(gpu=replace(SMALL, usable_bytes=usable_bytes), context_bytes=0, **changed)


TOTAL = on_gpu(1).total_bytes
Changes = Mapping[str, Any]


class Searches:
    """Looks for hints where the bytes of a set-up are those of ``found`` times a factor for each change."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        self.trials: list[dict[str, Any]] = []
        self.told: list[str] = []

    def __call__(self, found: Estimate, simulated: Changes | Callable[[Changes], Estimate]) -> tuple[Hint, ...]:
        def simulate(model: Any, shape: Any, settings: Any, gpu: Any, **_: Any) -> Estimate:
            changes = {
                item.name: getattr(settings, item.name)
                for item in fields(settings)
                if getattr(settings, item.name) != getattr(found.settings, item.name)
            }
            for size in ("batch_size", "seq_len"):
                if getattr(shape, size) != getattr(found, size):
                    changes[size] = getattr(shape, size)
            self.trials.append(changes)
            return simulated(changes) if callable(simulated) else _times(found, changes, simulated)

        self.monkeypatch.setattr(SEARCH, simulate)
        hints = with_hints("", found, announce=self.told.append).hints
        assert hints is not None
        return hints


def _times(found: Estimate, changes: Changes, factors: Changes) -> Estimate:
    left = 1.0
    for name, value in changes.items():
        if name == "batch_size":
            share = value / found.batch_size
            left *= factors.get("batch_size", 1.0) * (1 - share) + share
        elif name != "gradient_accumulation_steps":
            left *= factors.get(name, 1.0)
    return replace(found, peak_reserved_bytes=int(found.peak_reserved_bytes * left), context_bytes=0)


@pytest.fixture
def search(monkeypatch: pytest.MonkeyPatch) -> Searches:
    return Searches(monkeypatch)


def test_the_first_two_single_changes_that_fit_end_the_search(search: Searches) -> None:
    hints = search(on_gpu(TOTAL // 2), {"checkpointing": 0.4, "batch_size": 0.2, "lora": 0.1})
    assert [dict(hint.changes) for hint in hints] == [
        {"checkpointing": True},
        {"batch_size": 8, "gradient_accumulation_steps": 4},
    ]
    assert [hint.fits for hint in hints] == [True, True]
    assert search.trials == [
        {"checkpointing": True},
        {"batch_size": 1, "gradient_accumulation_steps": 32},
        {"batch_size": 8, "gradient_accumulation_steps": 4},
        {"batch_size": 16, "gradient_accumulation_steps": 2},  # which does not fit
    ]
    assert search.told[:2] == ["trying checkpointing=True", "trying batch_size=1, gradient_accumulation_steps=32"]


HALF, A_FIFTH, AN_EIGHTH = TOTAL // 2, TOTAL * 22 // 100, TOTAL // 8
BOTH = {"checkpointing": True, "optim": "adamw_8bit"}
OUTCOMES: dict[str, tuple[Estimate, dict[str, float], list[tuple[dict[str, Any], bool, bool]]]] = {
    # what is found: changes, whether it fits, whether with the margin
    "the largest batch that fits; 6 leave no margin": (
        on_gpu(HALF, batch_size=12),
        {"batch_size": 0.0},
        [({"batch_size": 4, "gradient_accumulation_steps": 3}, True, True)],
    ),
    "less than 5 % are tight, and more is tried": (
        on_gpu(HALF),
        {"checkpointing": 0.49, "optim": 0.5},
        [({"checkpointing": True}, True, False), (BOTH, True, True)],
    ),
    "a pair follows the best single change that is not enough": (
        on_gpu(A_FIFTH),
        {"checkpointing": 0.4, "optim": 0.5, "seq_len": 0.9},
        [({"checkpointing": True}, False, False), (BOTH, True, True)],
    ),
    "three, where no pair is enough, and the batch stays large": (
        on_gpu(AN_EIGHTH),
        {"checkpointing": 0.4, "optim": 0.45, "batch_size": 0.5},
        [
            ({"checkpointing": True}, False, False),
            ({**BOTH, "batch_size": 8, "gradient_accumulation_steps": 4}, True, True),
        ],
    ),
    "fragmentation first, where what tensors hold would fit": (
        on_gpu(TOTAL - 1),
        {"expandable_segments": 0.9},
        [({"expandable_segments": True}, True, True)],
    ),
}


@pytest.mark.parametrize(("found", "factors", "expected"), OUTCOMES.values(), ids=OUTCOMES)
def test_what_is_found(search: Searches, found: Estimate, factors: dict[str, float], expected: Any) -> None:
    hints = search(found, factors)
    assert [(dict(hint.changes), hint.fits, hint.is_enough) for hint in hints] == expected
    assert [": tight, " in str(hint) for hint in hints] == [fits and not enough for _, fits, enough in expected]


def test_where_nothing_fits_the_best_is_told_with_what_is_missing(search: Searches) -> None:
    hints = search(
        on_gpu(TOTAL // 100), dict.fromkeys(("checkpointing", "optim", "batch_size", "lora", "seq_len"), 0.9)
    )
    assert not any(hint.fits for hint in hints)
    assert len(hints[1].changes) > len(hints[0].changes)
    assert len(search.trials) <= 20


def test_trials_that_need_more_or_are_refused_are_no_hints(search: Searches) -> None:
    found = on_gpu(HALF)

    def refuse(changes: Changes) -> Estimate:
        if "lora" in changes:
            raise MissingExtraError("peft", extra="peft", purpose="lora=16")
        if "checkpointing" in changes:
            raise ValueError("not this model")
        return replace(found, peak_reserved_bytes=2 * found.peak_reserved_bytes)

    assert search(found, refuse) == ()


def test_the_search_ends_after_its_time(search: Searches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_memopt.memory.hints.MOST_SECONDS", -1.0)
    assert search(on_gpu(HALF), {"checkpointing": 0.1}) == ()
    assert search.trials == []


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"phase": "evaluation", "settings": {"eval_batch_size": 8}}, {"eval_batch_size": 1}),
        ({"phase": "evaluation", "settings": {"eval_batch_size": 8}}, {"prediction_loss_only": True}),
        (
            {"phase": "evaluation", "settings": {"eval_batch_size": 8, "eval_batches": 4}},
            {"eval_accumulation_steps": 1},
        ),
        ({"settings": {"checkpointing": True, "micro_batch_size": 4}}, {"micro_batch_size": 1}),
        ({"settings": {"optim": "adamw_torch"}, "phase": "optimizer"}, {"optim": "adamw_torch_fused"}),
        ({"settings": {"optim": "adamw_8bit"}}, {"optim": "paged_adamw_8bit"}),
        ({"settings": {"precision": "bf16"}}, {"autocast_cache": False}),
        ({}, {"weights_dtype": "bfloat16"}),
        ({}, {"lora": 16, "weights_dtype": "bfloat16", "precision": "bf16", "load_in": "nf4"}),
        ({}, {"seq_len": 64}),
    ],
)
def test_what_is_tried(search: Searches, changed: dict[str, Any], expected: dict[str, Any]) -> None:
    search(on_gpu(HALF, **changed), {})
    assert expected in search.trials


def gpu_of(usable_bytes: int) -> Gpu:
    return replace(SMALL, usable_bytes=usable_bytes, context_bytes=0)


@pytest.mark.parametrize(
    "lengths", [{"seq_len": 64}, {"lengths": [24, 40, 56, 64]}], ids=lambda given: next(iter(given))
)
def test_a_hint_is_what_a_new_estimate_says(lengths: dict[str, Any]) -> None:
    """Of several lengths those that keep them: a hint of another ``seq_len`` is of that alone."""
    config = tiny.bert_config(hidden_size=64, intermediate_size=256)
    given: dict[str, Any] = {"batch_size": 16, **lengths, "precision": "bf16"}
    gpu = gpu_of(estimate(config, **given, gpu=gpu_of(2**40)).total_bytes * 2 // 3)
    hints = estimate(config, **given, gpu=gpu, hints=True).hints or ()
    of_steps = [hint for hint in hints if "seq_len" in lengths or "seq_len" not in hint.changes]
    assert of_steps
    for hint in of_steps:
        changed = estimate(config, **{**given, "gpu": gpu, **hint.changes})
        assert (hint.total_bytes, hint.fits) == (changed.total_bytes, changed.fits)
        assert hint.spare_bytes == gpu.usable_bytes - changed.total_bytes


def test_a_set_up_that_is_too_close_to_tell_has_hints_and_one_that_fits_needs_none(search: Searches) -> None:
    close, fitting = on_gpu(TOTAL), on_gpu(2 * TOTAL)
    assert (close.fits, close.verdict, fitting.verdict) == (True, "tight", "fits")
    assert search(close, {"checkpointing": 0.5})
    assert with_hints("", fitting) is fitting


def test_without_being_asked_nothing_is_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    assert estimate(tiny.bert_config(), batch_size=2, seq_len=8, gpu=gpu_of(2**40), hints=True).hints is None
    monkeypatch.setattr("hf_memopt.memory.estimation.find_hints", None)
    found = estimate(tiny.bert_config(), batch_size=2, seq_len=8, gpu=gpu_of(MIB))
    assert (found.fits, found.hints) == (False, None)
    assert "hints=True" in str(found)


def test_a_hint_as_text() -> None:
    told = "checkpointing=True needs 5.0 MiB: fits, 1.0 MiB to spare"
    assert str(Hint({"checkpointing": True}, 5 * MIB, MIB)) == told
    assert str(Hint({"lora": 16, "load_in": "nf4"}, 5 * MIB, -MIB)) == (
        "lora=16, load_in='nf4' needs 5.0 MiB: still 1.0 MiB over"
    )
