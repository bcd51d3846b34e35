"""Hints: each is simulated, the least change comes first, and the search ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

import tiny
from hand_made import MIB, SMALL, hand_made
from hf_memopt import estimate
from hf_memopt.devices import Gpu
from hf_memopt.errors import MissingExtraError
from hf_memopt.memory import Estimate, with_hints
from hf_memopt.memory import hints as module
from hf_memopt.memory.hints import Hint, find_hints


class Simulation:
    """Stands in for ``estimate``: the bytes of a set-up are ``needs`` times a factor for each change."""

    def __init__(self, found: Estimate, factors: Mapping[str, float]) -> None:
        self.found, self.factors = found, factors
        self.trials: list[dict[str, Any]] = []

    def __call__(self, changes: Mapping[str, Any]) -> Estimate:
        self.trials.append(dict(changes))
        left = 1.0
        for name, value in changes.items():
            if name == "gradient_accumulation_steps":
                continue
            if name == "batch_size":
                share = value / self.found.batch_size
                left *= self.factors.get("batch_size", 1.0) * (1 - share) + share
                continue
            left *= self.factors.get(name, 1.0)
        return replace(self.found, peak_reserved_bytes=int(self.found.peak_reserved_bytes * left), context_bytes=0)


def _hints(found: Estimate, simulate: Any, **options: Any) -> tuple[Hint, ...]:
    return find_hints(found, simulate, "bf16", "bfloat16", **options)


def on_gpu(usable_bytes: int, **changed: Any) -> Estimate:
    return hand_made(gpu=replace(SMALL, usable_bytes=usable_bytes), context_bytes=0, **changed)


TOTAL = on_gpu(1).total_bytes


def test_the_first_two_single_changes_that_fit_end_the_search() -> None:
    found = on_gpu(TOTAL // 2)
    simulation = Simulation(found, {"checkpointing": 0.4, "batch_size": 0.2, "lora": 0.1})
    hints = _hints(found, simulation)
    assert [dict(hint.changes) for hint in hints] == [
        {"checkpointing": True},
        {"batch_size": 8, "gradient_accumulation_steps": 4},
    ]
    assert [hint.fits for hint in hints] == [True, True]
    assert simulation.trials == [
        {"checkpointing": True},
        {"batch_size": 1, "gradient_accumulation_steps": 32},
        {"batch_size": 8, "gradient_accumulation_steps": 4},
        {"batch_size": 16, "gradient_accumulation_steps": 2},  # which does not fit
    ]


def test_the_batch_is_the_largest_that_fits() -> None:
    found = on_gpu(TOTAL // 2, batch_size=12)
    hints = _hints(found, Simulation(found, {"batch_size": 0.0}))
    assert dict(hints[0].changes) == {"batch_size": 4, "gradient_accumulation_steps": 3}  # 6 leave no margin
    assert hints[0].total_bytes <= TOTAL // 2 * 95 // 100


def test_what_leaves_less_than_five_percent_is_tight_and_more_is_tried() -> None:
    found = on_gpu(TOTAL // 2)
    hints = _hints(found, Simulation(found, {"checkpointing": 0.49, "optim": 0.5}))
    assert [dict(hint.changes) for hint in hints] == [
        {"checkpointing": True},
        {"checkpointing": True, "optim": "adamw_8bit"},
    ]
    assert [(hint.fits, hint.is_enough) for hint in hints] == [(True, False), (True, True)]
    assert ": tight, " in str(hints[0])


def test_a_set_up_that_is_too_close_to_tell_has_hints(monkeypatch: pytest.MonkeyPatch) -> None:
    hint = Hint({"checkpointing": True}, 0, TOTAL)
    monkeypatch.setattr("hf_memopt.memory.estimation.find_hints", lambda *args, **settings: (hint,))
    close, fitting = on_gpu(TOTAL), on_gpu(2 * TOTAL)
    assert (close.fits, close.verdict, fitting.verdict) == (True, "tight", "fits")
    assert with_hints("", close).hints == (hint,)
    assert with_hints("", fitting).hints is None


def test_a_pair_follows_the_best_single_change_that_is_not_enough() -> None:
    found = on_gpu(TOTAL * 22 // 100)
    hints = _hints(found, Simulation(found, {"checkpointing": 0.4, "optim": 0.5, "seq_len": 0.9}))
    assert [(dict(hint.changes), hint.fits) for hint in hints] == [
        ({"checkpointing": True}, False),
        ({"checkpointing": True, "optim": "adamw_8bit"}, True),
    ]


def test_three_changes_where_no_pair_is_enough_and_the_batch_stays_large() -> None:
    found = on_gpu(TOTAL // 8)
    factors = {"checkpointing": 0.4, "optim": 0.45, "batch_size": 0.5}
    hints = _hints(found, Simulation(found, factors))
    best, combination = hints
    assert (dict(best.changes), best.fits) == ({"checkpointing": True}, False)
    assert set(combination.changes) == {"checkpointing", "optim", "batch_size", "gradient_accumulation_steps"}
    assert combination.fits
    assert combination.changes["batch_size"] > 1


def test_where_nothing_fits_the_best_is_told_with_what_is_missing() -> None:
    found = on_gpu(TOTAL // 100)
    factors = dict.fromkeys(("checkpointing", "optim", "batch_size", "lora", "seq_len"), 0.9)
    hints = _hints(found, simulation := Simulation(found, factors))
    assert not any(hint.fits for hint in hints)
    assert len(hints[1].changes) > len(hints[0].changes)
    assert len(simulation.trials) <= 20


def test_trials_that_need_more_or_are_refused_are_no_hints() -> None:
    found = on_gpu(TOTAL // 2)

    def refuse(changes: Mapping[str, Any]) -> Estimate:
        if "lora" in changes:
            raise MissingExtraError("peft", extra="peft", purpose="lora=16")
        if "checkpointing" in changes:
            raise ValueError("not this model")
        return replace(found, peak_reserved_bytes=2 * found.peak_reserved_bytes)

    assert _hints(found, refuse) == ()


def test_the_search_ends_after_its_time(monkeypatch) -> None:
    monkeypatch.setattr(module, "MOST_SECONDS", -1.0)
    found = on_gpu(TOTAL // 2)
    simulation = Simulation(found, {"checkpointing": 0.1})
    assert _hints(found, simulation) == ()
    assert simulation.trials == []


def test_every_trial_is_announced() -> None:
    found = on_gpu(TOTAL // 2)
    told: list[str] = []
    _hints(found, Simulation(found, {"checkpointing": 0.4, "batch_size": 0.2}), announce=told.append)
    assert told[:2] == ["trying checkpointing=True", "trying batch_size=1, gradient_accumulation_steps=32"]


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
def test_what_is_tried(changed: dict[str, Any], expected: dict[str, Any]) -> None:
    found = on_gpu(TOTAL // 2, **changed)
    _hints(found, simulation := Simulation(found, {}))
    assert expected in simulation.trials


def test_fragmentation_is_tried_first_where_what_tensors_hold_would_fit() -> None:
    found = on_gpu(TOTAL - 1)
    hints = _hints(found, Simulation(found, {"expandable_segments": 0.9}))
    assert dict(hints[0].changes) == {"expandable_segments": True}


# ---- With the simulation


def gpu_of(usable_bytes: int) -> Gpu:
    return replace(SMALL, usable_bytes=usable_bytes, context_bytes=0)


def test_a_hint_is_what_a_new_estimate_says() -> None:
    config = tiny.bert_config(hidden_size=64, intermediate_size=256)
    given = {"batch_size": 16, "seq_len": 64}
    alone = estimate(config, **given, gpu=gpu_of(2**40), precision="bf16")
    gpu = gpu_of(alone.total_bytes * 2 // 3)
    found = estimate(config, **given, gpu=gpu, precision="bf16", hints=True)
    assert found.hints
    for hint in found.hints:
        changed = estimate(config, **{**given, "gpu": gpu, "precision": "bf16", **hint.changes})
        assert (hint.total_bytes, hint.fits) == (changed.total_bytes, changed.fits)
        assert hint.spare_bytes == gpu.usable_bytes - changed.total_bytes


def test_without_being_asked_nothing_is_simulated(monkeypatch) -> None:
    monkeypatch.setattr(module, "find_hints", None)
    found = estimate(tiny.bert_config(), batch_size=2, seq_len=8, gpu=gpu_of(MIB))
    assert (found.fits, found.hints) == (False, None)
    assert "hints=True" in str(found)


def test_what_fits_needs_no_hints() -> None:
    found = estimate(tiny.bert_config(), batch_size=2, seq_len=8, gpu=gpu_of(2**40), hints=True)
    assert found.hints is None
    assert with_hints(tiny.bert_config(), found) is found


def test_a_hint_as_text() -> None:
    assert (
        str(Hint({"checkpointing": True}, 5 * MIB, MIB)) == "checkpointing=True needs 5.0 MiB: fits, 1.0 MiB to spare"
    )
    assert str(Hint({"lora": 16, "load_in": "nf4"}, 5 * MIB, -MIB)) == (
        "lora=16, load_in='nf4' needs 5.0 MiB: still 1.0 MiB over"
    )
