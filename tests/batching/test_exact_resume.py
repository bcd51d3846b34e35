"""Bucketed views in the stock Trainer are exact: every example once an epoch, a resumed run equals the straight one.

The grid is processes (two of them with gloo) x kind of view x gradient accumulation x workers x attached or not x where
the run is resumed, all without dropout. The default run takes cases that cover every pair of choices but those with
persistent workers; the whole grid is marked slow. One pair of processes goes through all of its cases.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from datasets import Dataset
from noted_batches import make_trainer
from transformers import Trainer, TrainerCallback

import tiny
from hf_memopt import attach, bucketed
from two_ranks import run_pair

COUNT, EPOCHS = 28, 2
LENGTHS = [(7 * i) % 23 + 1 for i in range(COUNT)]
VIEWS: dict[str, dict[str, Any]] = {
    "examples": {"batch_size": 4, "n_buckets": 3},
    "batches": {"max_tokens": 72, "n_buckets": 3},
    "bounded": {"max_tokens": 72, "n_buckets": 3, "boundaries": "auto"},
}
WORKERS: dict[str, dict[str, Any]] = {
    "0": {},
    "2": {"dataloader_num_workers": 2},
    "2 persistent": {"dataloader_num_workers": 2, "dataloader_persistent_workers": True},
}
RESUME = ("middle of epoch 0", "end of epoch 0", "middle of epoch 1")


class Case(NamedTuple):
    """One cell of the grid."""

    processes: int
    kind: str
    accumulation: int
    workers: str
    attached: bool
    resume: str


GRID = [Case(*cell) for cell in itertools.product((1, 2), VIEWS, (1, 3), WORKERS, (True, False), RESUME)]
DEFAULT = [
    *(Case(1, *cell) for cell in (("examples", 3, "2", True, RESUME[2]), ("bounded", 1, "0", False, RESUME[1]))),
    *(Case(2, *cell) for cell in (("batches", 3, "0", False, RESUME[0]), ("examples", 1, "2", True, RESUME[2]))),
]


def resume_steps(batches: int, accumulation: int) -> dict[str, int]:
    """Return the optimizer step of each place to resume at, for so many batches of this process in an epoch."""
    steps = -(-batches // accumulation)
    return dict(zip(RESUME, (steps // 2, steps, steps + steps // 2), strict=True))


class SaveWhereCasesResume(TrainerCallback):
    """Write the checkpoints that the cases resume from."""

    def __init__(self, accumulation: int) -> None:
        self.accumulation = accumulation

    def on_step_end(self, args: Any, state: Any, control: Any, *, train_dataloader: Any, **kwargs: Any) -> None:
        control.should_save = state.global_step in resume_steps(len(train_dataloader), self.accumulation).values()


def train(case: Case, folder: str, checkpoint: str | None = None) -> tuple[Trainer, list[list[int]]]:
    """Train a tiny BERT and return the trainer and the examples of every batch; the first token, 5 + index, tells."""
    ids = [[5 + i] + [50] * (length - 1) for i, length in enumerate(LENGTHS)]
    rows = Dataset.from_list([{"input_ids": row, "text": f"row {i}", "labels": i % 3} for i, row in enumerate(ids)])
    view = bucketed(rows if case.attached else rows.remove_columns("text"), **VIEWS[case.kind])
    trainer, seen = make_trainer(
        folder,
        view,
        view.buckets.batch_size,
        learning_rate=1e-2,
        num_train_epochs=EPOCHS,
        # Two processes cannot load optimizer state on a CPU in 5.8.1 and 5.17.0 (map_location "cpu:0"); SGD has none.
        optim="sgd" if "WORLD_SIZE" in os.environ else "adamw_torch",
        train_sampling_strategy="sequential",
        gradient_accumulation_steps=case.accumulation,
        save_strategy="no",
        **WORKERS[case.workers],
        **({"ddp_backend": "gloo"} if "WORLD_SIZE" in os.environ else {}),
    )
    trainer.add_callback(SaveWhereCasesResume(case.accumulation))
    if case.attached:
        attach(trainer)
    trainer.train(resume_from_checkpoint=checkpoint)
    return trainer, seen


def run(cases: list[Case], folder: Path) -> list[dict[str, Any]]:
    """Run cases, each straight and resumed, and return what this process saw; straight runs are shared."""
    found = []
    for _, group in itertools.groupby(sorted(cases), key=lambda case: case[:-1]):
        group = list(group)
        with tempfile.TemporaryDirectory(dir=folder) as name:
            if "WORLD_SIZE" in os.environ:  # both processes write one checkpoint
                name = str(folder / "-".join(map(str, group[0][:-1])))
            straight, seen = train(group[0], name)
            per_epoch = len(seen) // EPOCHS
            at = resume_steps(per_epoch, group[0].accumulation)
            steps = at["end of epoch 0"]
            view = straight.train_dataset
            world, rank = straight.args.world_size, straight.args.process_index
            for case in group:
                checkpoint = f"{name}/checkpoint-{at[case.resume]}"
                resumed, rest = train(case, name, checkpoint)
                epoch, within = divmod(at[case.resume], steps)
                found.append(
                    {
                        "case": list(case),
                        "seen": [seen[i * per_epoch : (i + 1) * per_epoch] for i in range(EPOCHS)],
                        "planned": [plan_of_rank(view.buckets.plan(i), rank, world) for i in range(EPOCHS)],
                        "rest_expected": seen[epoch * per_epoch + within * case.accumulation :],
                        "rest": rest,
                        "difference": tiny.largest_difference(straight.model, resumed.model),
                    }
                )
    return found


def plan_of_rank(plan: Any, rank: int, world: int) -> list[list[int]]:
    return [plan.batch(i).tolist() for i in range(rank, len(plan), world)]


def check(ranks: list[list[dict[str, Any]]]) -> None:
    """Check what all processes of a run saw, case by case."""
    for of_ranks in zip(*ranks, strict=True):
        case = Case(*of_ranks[0]["case"])
        for one in of_ranks:
            assert one["rest"] == one["rest_expected"], case
            assert one["difference"] == 0.0, case
            for seen, planned in zip(one["seen"], one["planned"], strict=True):
                whole = len(planned) - (case.kind == "examples")
                assert seen[:whole] == planned[:whole], case  # the last step is filled up by accelerate
        for epoch in range(EPOCHS):
            together = [i for one in of_ranks for batch in one["seen"][epoch] for i in batch]
            assert set(together) == set(range(COUNT)), case
            twice = len(together) - COUNT
            assert twice == (4 if case.kind == "examples" and len(ranks) == 2 else 0), case  # 28 examples by 2 x 4
        assert of_ranks[0]["seen"][0] != of_ranks[0]["seen"][1], case


CASES = {"default": DEFAULT, "all": GRID}


def picked(cases: str, processes: int) -> list[Case]:
    return [case for case in CASES[cases] if case.processes == processes]


SETS = ["default", pytest.param("all", marks=pytest.mark.slow)]


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # on a machine with one core
@pytest.mark.parametrize("cases", SETS)
def test_one_process(cases, tmp_path):
    check([run(picked(cases, 1), tmp_path)])


@pytest.mark.slow
@pytest.mark.parametrize("cases", SETS)
def test_two_processes(cases, tmp_path):
    check(run_pair(tmp_path, __file__, str(tmp_path), cases, timeout_seconds=1200))


if __name__ == "__main__":  # one of two processes
    folder = Path(sys.argv[1])
    (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(run(picked(sys.argv[2], 2), folder)))
