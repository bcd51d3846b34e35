"""Two Trainers that train in two threads at the same time, each built before: neither disturbs the other.

What is promised: the weights of a training that runs alone, for every technique beside every other. What is not, since
it is one for the whole process, whoever uses it:

- torch's, numpy's and Python's random numbers: with dropout two threads draw from the same generator in turns;
- accelerate's ``GradientState``: with ``gradient_accumulation_steps`` above 1 one thread's accumulation step tells the
  other's optimizer not to step (accelerate 1.1 to 1.15; pinned below);
- ``warnings.catch_warnings`` before Python 3.14, which stock uses while it saves.

Autocast, the recording of gradients and their hooks belong to a thread in torch.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator
from accelerate.state import GradientState
from transformers import Trainer, TrainerCallback

import tiny
from hf_memopt.technique_list import TECHNIQUES
from technique_table import TABLE, make_trainer

STEPS = 16


@pytest.fixture(autouse=True)
def _quick_switches() -> Iterator[None]:
    """Let Python change between threads a hundred times as often."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-5)
    yield
    sys.setswitchinterval(before)


class InStep(TrainerCallback):
    """Let two trainings begin each step together."""

    def __init__(self, barrier: threading.Barrier) -> None:
        self.barrier = barrier

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.barrier.wait(60)


def build(name: str, folder: Path, **settings: Any) -> Trainer:
    return make_trainer([name], folder, max_steps=STEPS, **settings)


def train_together(*trainers: Trainer) -> None:
    """Train each in a thread of its own."""
    barrier, errors = threading.Barrier(len(trainers)), []

    def train(trainer: Trainer) -> None:
        try:
            trainer.train()
        except BaseException as error:
            barrier.abort()
            errors.append(error)

    for trainer in trainers:
        trainer.add_callback(InStep(barrier))
    threads = [threading.Thread(target=train, args=(trainer,)) for trainer in trainers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


def assert_each_ends_as_alone(folder: Path, *runs: tuple[str, dict[str, Any]]) -> None:
    """Train techniques with their settings one after the other, then in a thread each; compare the weights."""
    alone = [build(name, folder / f"{place}", **settings) for place, (name, settings) in enumerate(runs)]
    for trainer in alone:
        trainer.train()
    together = [build(name, folder / f"{place}", **settings) for place, (name, settings) in enumerate(runs)]
    train_together(*together)
    for one, other in zip(alone, together, strict=True):
        assert other.state.global_step == STEPS
        assert tiny.largest_difference(one.model, other.model) == 0.0, runs


NAMES = [*TECHNIQUES]
PAIRS = list(zip(NAMES, [*NAMES[7:], *NAMES[:7]], strict=True))


@pytest.mark.parametrize("names", PAIRS, ids=" beside ".join)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_two_trainings_in_two_threads_end_as_each_alone(names: tuple[str, str], precision: str, tmp_path: Path) -> None:
    """Each technique stands once in the first thread and once in the second."""
    settings = {"bf16": True} if precision == "bf16" and "16-bit weights" not in names else {}
    assert_each_ends_as_alone(tmp_path, *((name, settings) for name in names))


def test_the_same_technique_in_both_threads(tmp_path: Path) -> None:
    for name in ("micro-batching", "non-finite detection", "memory report", "fused cross-entropy"):
        assert_each_ends_as_alone(tmp_path, (name, {}), (name, {}))


def test_autocast_belongs_to_a_thread(tmp_path: Path) -> None:
    """One trains in bf16, the other in float32."""
    assert_each_ends_as_alone(tmp_path, ("micro-batching", {"bf16": True}), ("memory report", {}))


def test_accumulation_is_one_for_the_process_in_accelerate() -> None:
    """Why it is left out above: every accelerator has the same state."""
    one, other = Accelerator(cpu=True), Accelerator(cpu=True)
    assert vars(one.gradient_state) is vars(other.gradient_state)
    one.gradient_state._set_sync_gradients(False)
    assert other.sync_gradients is False
    GradientState._reset_state()


def test_every_technique_is_tried() -> None:
    assert {name for pair in PAIRS for name in pair} == set(TABLE)
