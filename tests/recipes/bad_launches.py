"""What every rank is told of a job that cannot work: python bad_launches.py FOLDER, run by ``two_ranks.run_pair``."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from five_lines import trainer_of
from transformers import Trainer, TrainingArguments

import tiny
from hf_memopt import Recipe, attach, bucketed

RECIPE = Recipe("mine", "tests", optim="adamw_torch", micro_batching=False)
SEEN = {"use_cpu": True, "ddp_backend": "gloo", "report_to": "none"}


def on_two_gpus(folder: str) -> None:
    """Two visible GPUs and no LOCAL_RANK: stock counts both for each process."""
    with patch.object(TrainingArguments, "n_gpu", property(lambda args: 2)):
        RECIPE.training_arguments(folder, **SEEN)


def attach_with(folder: str, **settings: Any) -> None:
    args = tiny.arguments(folder, **{**SEEN, **settings})
    view = bucketed(tiny.rows(8), batch_size=args.per_device_train_batch_size, world_size=3)
    attach(Trainer(tiny.bert(), args, train_dataset=view))


def release(folder: str) -> None:
    recipe = RECIPE.replace(gradient_release=True)
    settings = {**SEEN, "output_dir": folder, "per_device_train_batch_size": 4}
    trainer_of(
        recipe,
        model=tiny.bert(),
        train_dataset=tiny.rows(8),
        processing_class=tiny.tokenizer(),
        training_arguments=settings,
    )


CASES: dict[str, Callable[[str], Any]] = {
    "effective batch": lambda folder: RECIPE.replace(effective_batch_size=33).training_arguments(folder, **SEEN),
    "batch of another number of processes": lambda folder: RECIPE.training_arguments(
        folder, per_device_train_batch_size=8, gradient_accumulation_steps=1, **SEEN
    ),
    "batch of a device": lambda folder: RECIPE.training_arguments(folder, per_device_train_batch_size=5, **SEEN),
    "missing deepspeed": lambda folder: RECIPE.training_arguments(folder, deepspeed={"fp16": "auto"}, **SEEN),
    "visible GPUs": on_two_gpus,
    "view of another number of processes": attach_with,
    "technique": release,
}


def main(folder: str) -> None:
    """Write the error of each case."""
    found = {}
    for name, attempt in CASES.items():
        with patch("hf_memopt.prediction.recipes.resolved_arguments.find_spec", lambda name: None):
            try:
                attempt(f"{folder}/out")
            except Exception as error:
                found[name] = f"{type(error).__name__}: {error}"
    Path(folder, f"rank{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
