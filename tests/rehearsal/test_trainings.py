"""Trainings on the stand-in: the CPU's losses, phases, events; values disturb no allocation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import trained
from torch.nn.modules import module
from torch.optim import optimizer
from transformers import Trainer

import language_models
import tiny
from hf_memopt.prediction.rehearsal import blocks_at_peak, failed_values, peaks_by_phase, recorded_events
from hf_memopt.training.binding.trials import untraced

pytestmark = pytest.mark.stand_in
FAMILIES = ("bert", "llama-tied", "gpt2", "t5", "mixtral", "vit")
CASES: list[tuple[str, dict[str, Any], float]] = [
    *((family, {}, 1e-6) for family in FAMILIES),
    ("llama-tied", {"gradient_checkpointing": True}, 1e-6),
    ("t5", {"gradient_accumulation_steps": 2}, 1e-6),
    # other operators are cast for a GPU than for the CPU
    *((family, {"bf16": True}, 2e-2) for family in FAMILIES),
    *((family, {"fp16": True}, 5e-3) for family in ("bert", "llama-tied", "gpt2")),
]


def _build(family: str) -> Any:
    return trained.vit() if family == "vit" else language_models.build(family)


def _rows(family: str) -> list[dict[str, torch.Tensor]]:
    return trained.images() if family == "vit" else trained.texts()


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize(("family", "settings", "tolerance"), CASES)
def test_a_tiny_model_trains_to_the_losses_and_norms_of_the_cpu(
    family: str, settings: dict[str, Any], tolerance: float, tmp_path: Path
) -> None:
    on_cpu = {**settings, "fp16": False}  # the Trainer has no scaled losses on the CPU: float32 there
    expected = trained.train(lambda: _build(family), _rows(family), tmp_path, use_cpu=True, **on_cpu)
    trainer = trained.train(lambda: _build(family), _rows(family), tmp_path, **settings)

    assert trainer.model.device.type == "cuda"
    assert len(trained.losses(trainer)) == 10
    assert trained.losses(trainer) == pytest.approx(trained.losses(expected), rel=tolerance)
    assert failed_values == {}


def test_phases_have_their_peaks_and_leave_nothing_behind(tmp_path: Path) -> None:
    before = torch.autograd.backward, Trainer.evaluation_loop
    torch.cuda.reset_peak_memory_stats()
    with peaks_by_phase() as peaks:
        trained.train(lambda: _build("bert"), _rows("bert"), tmp_path)

    assert list(peaks) == ["load", "forward", "backward", "optimizer", "evaluation"]
    assert all(0 < peak.allocated_bytes <= peak.reserved_bytes for peak in peaks.values())
    assert peaks["backward"].allocated_bytes > peaks["forward"].allocated_bytes > peaks["optimizer"].allocated_bytes
    assert before == (torch.autograd.backward, Trainer.evaluation_loop)
    assert not module._global_forward_pre_hooks  # private, as the next; seen in torch 2.14
    assert not optimizer._global_optimizer_pre_hooks
    assert not optimizer._global_optimizer_post_hooks


def test_a_forward_pass_after_an_error_in_a_step_is_a_phase_again() -> None:
    weight = torch.nn.Linear(4, 4, device="cuda")
    stepping = torch.optim.SGD(weight.parameters())
    stepping.step = optimizer.Optimizer.profile_hook_step(lambda self: torch.empty(1 << 60, device="cuda"))
    with peaks_by_phase() as peaks:
        weight(torch.ones(2, 4, device="cuda")).sum().backward()
        with pytest.raises(torch.OutOfMemoryError):
            stepping.step(stepping)
        weight(torch.ones(2, 4, device="cuda"))
    assert list(peaks) == ["load", "forward", "backward", "optimizer"]


def test_passes_without_gradients_are_scoring_before_the_forward_pass_of_a_batch_and_a_part_of_it_after() -> None:
    policy, reference = (torch.nn.Linear(4, size, device="cuda") for size in (4, 2**20))
    inputs = torch.ones(2, 4, device="cuda")
    with peaks_by_phase() as peaks:
        for _ in range(2):
            with torch.no_grad():
                policy(inputs)
            loss = policy(inputs).sum()
            with torch.no_grad():
                reference(inputs)
            loss.backward()
    assert list(peaks) == ["load", "scoring", "forward", "backward"]
    assert peaks["forward"].allocated_bytes - peaks["scoring"].allocated_bytes > 2**22  # its results: 8 MiB


def test_events_tell_the_peak_by_phase_operator_and_place(tmp_path: Path) -> None:
    torch.cuda.empty_cache()
    alive = torch.cuda.memory_allocated()
    with recorded_events() as found, peaks_by_phase() as peaks:
        trained.train(lambda: _build("bert"), _rows("bert"), tmp_path)
    at_peak = blocks_at_peak(found)

    peak = max(peak.allocated_bytes for peak in peaks.values())
    assert sum(-(-event.requested_bytes // 512) * 512 for event in at_peak) + alive == peak
    assert {event.kind for event in found} >= {"allocate", "free", "segment"}
    assert {event.phase for event in found} == {*peaks, ""} - {""}
    assert len({event.number for event in found if event.kind == "allocate"}) > 100
    sums = next(event for event in found if event.operator.startswith("_scaled_dot_product"))
    assert "sdpa_attention.py" in sums.place
    assert any(event.phase == "backward" and event.operator == "native_layer_norm_backward" for event in found)
    assert blocks_at_peak([]) == []


def test_a_block_older_than_the_record_is_freed_without_a_number() -> None:
    old = torch.empty(1024, device="cuda")
    with recorded_events() as found:
        new = torch.empty(3, device="cuda")
        del new
        del old
    assert [(event.kind, event.requested_bytes, event.number) for event in found] == [
        ("allocate", 12, 0), ("free", 12, 0), ("free", 4096, -1)
    ]  # fmt: skip


def _allocations(with_values: bool) -> dict[str, Any]:
    environment = {**os.environ, "HF_MEMOPT_GPU_VALUES": str(1 << 20 if with_values else 0)}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))  # with the hook, and pytest's folders
    script = Path(__file__).with_name("allocations.py")
    done = subprocess.run([sys.executable, "-W", "ignore", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_values_change_no_allocation() -> None:
    """Values decide branches, as whether attention makes a mask: only the last set-up leaves them to."""
    on, off = _allocations(True), _allocations(False)
    masked_on, masked_off = on.pop("mask of ones"), off.pop("mask of ones")
    assert on.keys() == off.keys()
    assert len(on) == 8
    for name in on:
        assert on[name] == off[name]
    # without values a mask of ones seems to mask everything, so attention makes one that a GPU leaves out
    assert masked_on["peaks"]["backward"] < masked_off["peaks"]["backward"]


def test_a_trial_of_a_loss_leaves_no_blocks(tmp_path: Path) -> None:
    trainer = Trainer(tiny.bert(), tiny.arguments(tmp_path, use_cpu=False), train_dataset=tiny.rows())
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    with untraced(trainer, trainer.model):
        square = torch.ones(2**11, 2**11, device="cuda")
        assert (square @ square).shape == square.shape
        del square
        assert torch.cuda.memory_reserved() > before
    assert torch.cuda.memory_reserved() <= before  # less, where another test has left cuBLAS's workspace
