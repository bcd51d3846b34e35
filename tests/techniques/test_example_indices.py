"""Which examples are trained on: what is told equals what the model really saw, and asking changes nothing.

Run as a program it is one of two processes: ``torchrun`` sets what they need, ``two_ranks.run_pair`` does so here.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, RandomSampler
from transformers import Trainer

import tiny
import two_ranks
from hf_memopt.training.batching.collation import BucketedCollator
from hf_memopt.training.batching.views import bucketed
from hf_memopt.training.binding.undo import override_method
from hf_memopt.training.techniques.nonfinite import example_indices
from hf_memopt.training.techniques.nonfinite.indices import COPIES_HAVE_THE_EPOCH

FIRST = 5  # the first token of example i is FIRST + i
EXAMPLES = 17
Pairs = list[tuple[list[int], list[int] | None]]


class Numbered(Dataset[Any]):
    """Examples whose first token tells their index; counts how often one is read."""

    def __init__(self) -> None:
        lengths = [2 + 5 * i % 7 for i in range(EXAMPLES)]
        self.rows = [{"input_ids": [FIRST + i, *[4] * length], "labels": i % 3} for i, length in enumerate(lengths)]
        self.reads = 0

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.reads += 1
        return self.rows[index]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(Numbered().rows)


def build(output_dir: Any, dataset: Any, kind: type[Trainer] = Trainer, **settings: Any) -> Trainer:
    of_collator = {"data_collator": settings.pop("collator", BucketedCollator(tiny.tokenizer()))}
    arguments = tiny.arguments(output_dir, **{"per_device_train_batch_size": 3, "num_train_epochs": 2, **settings})
    return kind(model=tiny.bert(), args=arguments, train_dataset=dataset, **of_collator)


def told_and_seen(trainer: Trainer, **train: Any) -> Pairs:
    """Train, and return for each micro-batch the examples that were in it and those that were told."""
    pairs: Pairs = []
    position = 0

    def training_step(before: Callable[..., Any], model: nn.Module, inputs: dict[str, Any], *args: Any) -> Any:
        nonlocal position
        told = example_indices(trainer, position)
        pairs.append(((inputs["input_ids"][:, 0] - FIRST).tolist(), None if told is None else list(told)))
        position = 0 if trainer.accelerator.sync_gradients else position + 1
        return before(model, inputs, *args)

    override_method(trainer, "training_step", training_step)
    trainer.train(**train)
    return pairs


def assert_all_told(pairs: Pairs, micro_batches: int) -> None:
    assert len(pairs) == micro_batches
    assert [told for _, told in pairs] == [seen for seen, _ in pairs]


@pytest.mark.parametrize(("strategy", "accumulation"), [("random", 4), ("sequential", 1)])
def test_what_is_told_is_what_was_trained_on(tmp_path: Path, strategy: str, accumulation: int) -> None:
    settings = {"train_sampling_strategy": strategy, "gradient_accumulation_steps": accumulation}
    trainer = build(tmp_path, Numbered(), **settings)
    pairs = told_and_seen(trainer)
    assert_all_told(pairs, 2 * 6)
    assert (pairs[0] != pairs[6]) == (strategy == "random")
    assert_all_told(told_and_seen(trainer), 2 * 6)  # a second train() starts over


def test_it_is_told_where_a_run_was_resumed(tmp_path: Path) -> None:
    settings = {"save_strategy": "steps", "save_steps": 4, "gradient_accumulation_steps": 2, "num_train_epochs": 3}
    straight = told_and_seen(build(tmp_path, Numbered(), **settings))
    resumed = told_and_seen(build(tmp_path, Numbered(), **settings), resume_from_checkpoint=f"{tmp_path}/checkpoint-4")
    if COPIES_HAVE_THE_EPOCH:
        assert_all_told(resumed, 18 - 8)
        assert resumed == straight[8:]
    else:  # accelerate before 1.15 goes on in the order of the first epoch, until the epoch ends
        assert [told for _, told in resumed[:4]] == [None] * 4
        assert_all_told(resumed[4:], 6)
        assert resumed[4:] == straight[12:]


@pytest.mark.parametrize(
    ("settings", "rows"), [({"batch_size": 6}, 3), ({"max_tokens": 32}, 1)], ids=["rows", "batches"]
)
def test_of_a_view_the_examples_under_it_are_told(settings: dict[str, Any], rows: int, tmp_path: Path) -> None:
    """Of one with an order of its own, and of one whose rows are whole batches."""
    dataset = Numbered()
    view = bucketed(dataset, **settings, lengths=[len(row["input_ids"]) for row in dataset.rows])
    given = {"train_sampling_strategy": "sequential", "per_device_train_batch_size": rows}
    pairs = told_and_seen(build(tmp_path, view, collator=BucketedCollator(tiny.tokenizer()), **given))
    count = -(-len(view) // rows)
    assert_all_told(pairs, 2 * count)
    assert sorted(index for seen, _ in pairs[:count] for index in seen) == list(range(EXAMPLES))
    assert pairs[0][0] != [0, 1, 2]


class OwnSampler(RandomSampler):
    pass


class OwnLoader(Trainer):
    def get_train_dataloader(self) -> Any:
        loader = super().get_train_dataloader()
        loader.batch_sampler.sampler = OwnSampler(self.train_dataset)
        return loader


UNKNOWN: dict[str, dict[str, Any]] = {
    "group_by_length": {"train_sampling_strategy": "group_by_length"},
    "global generator": {"accelerator_config": {"use_seedable_sampler": False}},
    "ignore_data_skip": {"ignore_data_skip": True},
    "own sampler": {"kind": OwnLoader},
    "stream": {"dataset": Stream(), "max_steps": 3},
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_nothing_is_told_where_nobody_can_know(tmp_path: Path, case: str) -> None:
    settings = {"dataset": Numbered(), "num_train_epochs": 1, **UNKNOWN[case]}
    pairs = told_and_seen(build(tmp_path, **settings))
    assert [told for _, told in pairs] == [None] * len(pairs)
    assert len(pairs) in (3, 6)


@pytest.mark.slow
def test_each_of_two_processes_is_told_its_own(tmp_path: Path) -> None:
    for rank, found in enumerate(two_ranks.run_pair(tmp_path, __file__, str(tmp_path))):
        assert_all_told(found["random"], 2 * 3), rank
        assert_all_told(found["view"], 2 * 3), rank
        assert [told for _, told in found["resumed"]] == [None], rank


def main(folder: Path) -> None:
    """Train as one of two processes and write what was told and seen."""
    dataset = Numbered()
    shared = {"gradient_accumulation_steps": 2, "ddp_backend": "gloo"}
    found = {"random": told_and_seen(build(folder, dataset, save_strategy="steps", save_steps=3, **shared))}
    view = bucketed(dataset, batch_size=3, lengths=[len(row["input_ids"]) for row in dataset.rows])
    found["view"] = told_and_seen(build(folder, view, train_sampling_strategy="sequential", **shared))
    resumed = build(folder, dataset, **shared)
    found["resumed"] = told_and_seen(resumed, resume_from_checkpoint=str(folder / "checkpoint-3"))
    (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
