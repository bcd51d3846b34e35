"""Micro-batches in two processes: each recovers by itself; as many passes as in the other one, which is made up."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback

import scarcity
import tiny
from hf_memopt import MicrobatchCallback, attach
from hf_memopt.techniques.microbatching.accumulation_step import AccumulationStep
from hf_memopt.techniques.microbatching.padding_check import Padding
from hf_memopt.techniques.microbatching.whole_micro_batches import groups_in_lockstep
from two_ranks import run_pair


def trainer_beside(most: int) -> Any:
    """Return a Trainer whose other process has this number."""
    gather = lambda own: torch.tensor([int(own), most])  # noqa: E731
    return SimpleNamespace(accelerator=SimpleNamespace(gather=gather), args=SimpleNamespace(device="cpu"))


@pytest.mark.parametrize(
    ("groups", "most", "sizes", "repeats"),
    [
        ([[0, 1, 2, 3]], 1, [4], 0),
        ([[0, 1, 2, 3]], 3, [1, 1, 2], 0),
        ([[0], [1, 2, 3]], 3, [1, 1, 2], 0),
        ([[0, 1]], 5, [1, 1], 3),
        ([[0], [1]], 1, [1, 1], 0),  # this process is the one with the most
    ],
)
def test_every_row_runs_once_in_as_many_passes_as_in_the_other_process(
    groups: list[list[int]], most: int, sizes: list[int], repeats: int
) -> None:
    found, more = groups_in_lockstep(trainer_beside(most), groups)
    assert sorted(row for group in found for row in group) == sorted(row for group in groups for row in group)
    assert (sorted(map(len, found)), more) == (sizes, repeats)
    assert len(found) + more == max(most, len(groups))


class Sharded(TrainerCallback):
    """Lets techniques believe, from the first step on, that FSDP2 trains."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.trainer.is_fsdp_enabled = True


def causal_lm(folder: Path) -> Any:
    settings = {"per_device_train_batch_size": 3, "max_steps": 3, "train_sampling_strategy": "sequential"}
    data = {"train_dataset": scarcity.causal_rows(12), "data_collator": scarcity.Pad()}
    return Trainer(model=tiny.llama(), args=tiny.arguments(folder, **settings), **data)


@pytest.mark.parametrize("most", [1, 5])
def test_passes_that_a_process_only_joins_change_nothing(
    most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three rows, and another process that needs five passes: two run a row again, with weight 0."""
    whole, split = causal_lm(tmp_path), causal_lm(tmp_path)
    attach(split, MicrobatchCallback(max_tokens=36), Sharded(split))
    passes = []
    split.model.register_forward_pre_hook(lambda *_: passes.append(split.model.training))

    def beside(_: Any, groups: list[list[int]]) -> tuple[list[list[int]], int]:
        return groups_in_lockstep(trainer_beside(most), groups)

    monkeypatch.setattr("hf_memopt.techniques.microbatching.whole_micro_batches.groups_in_lockstep", beside)
    whole.train()
    split.train()
    assert sum(passes) == 3 * most
    assert tiny.largest_difference(split.model, whole.model) <= 1e-7


def test_processes_compare_padding_once_all_of_them_have_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # whether any process has no text: first one, then none; whether padding matters
    asked, answers = [], iter([1, 0, 0])

    def beside(_: Any, own: int) -> int:
        asked.append(own)
        return next(answers)

    monkeypatch.setattr("hf_memopt.techniques.microbatching.padding_check.largest_of_all", beside)
    split = causal_lm(tmp_path)
    attach(split, MicrobatchCallback(max_examples=3), Sharded(split))
    split.train()
    assert asked == [0, 0, 0]  # once in the first step, twice in the second


def test_a_process_without_text_says_so() -> None:
    asked = []

    def gather(own: torch.Tensor) -> torch.Tensor:
        asked.append(int(own))
        return own

    accelerator, args = SimpleNamespace(gather=gather), SimpleNamespace(device="cpu")
    trainer = SimpleNamespace(accelerator=accelerator, args=args, is_fsdp_enabled=True)
    step = AccumulationStep(pytest.fail, torch.nn.Linear(1, 1), {"pixel_values": torch.rand(2, 3)}, None, 1, True)
    Padding().check(trainer, step, scarcity)
    assert asked == [1]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    return run_pair(folder, scarcity.__file__, str(folder), timeout_seconds=120)


@pytest.mark.parametrize(("name", "way"), [(name, way) for name, ways in scarcity.TRIED.items() for way in ways])
def test_each_process_recovers_by_itself(name: str, way: str, ranks: list[dict[str, Any]]) -> None:
    of_ranks = [found[f"{name}: {way}"] for found in ranks]
    assert all(difference <= 2**-23 for difference, _, _ in of_ranks)  # one bit of a norm's weight
    has_failed = [errors > 0 for _, errors, _ in of_ranks]
    assert has_failed == [way.startswith("both"), True]
    assert [limit is not None for _, _, limit in of_ranks] == has_failed


def test_out_of_memory_while_gradients_are_shared_says_what_to_set(ranks: list[dict[str, Any]]) -> None:
    assert [found["shared"] for found in ranks] == [
        "memory ran out in the backward pass in which the processes share their gradients (CUDA out of memory. Tried "
        "to allocate 2.00 GiB.); expected micro-batches that fit there. Start with smaller ones: "
        "MicrobatchCallback(max_tokens=36)"
    ] * 2


def test_default_flags_are_refused(ranks: list[dict[str, Any]]) -> None:
    assert [found["flags"] for found in ranks] == [
        "micro-batching and DDP, default flags are incompatible: a forward pass that is run again would wait for "
        "the buffers of processes that do not run it; expected only one of them. Set ddp_broadcast_buffers=False, "
        "ddp_find_unused_parameters=False"
    ] * 2
