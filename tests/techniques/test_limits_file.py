"""The limits of micro-batching in a checkpoint: of another version are never the end of a run."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer

import tiny
from hf_memopt.training.binding import attach
from hf_memopt.training.binding.checkpoint_manifest import MANIFEST
from hf_memopt.training.techniques.microbatching import MicrobatchCallback
from hf_memopt.training.techniques.microbatching.microbatch import SAVED

SAVING: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2, "per_device_train_batch_size": 2}


def trainer(folder: Path, *callbacks: Any, **settings: Any) -> Trainer:
    args = tiny.arguments(folder, **SAVING, **settings)
    built = Trainer(model=tiny.bert(), args=args, train_dataset=tiny.rows())
    return attach(built, *callbacks) if callbacks else built


def resumed(checkpoint: Path, **settings: Any) -> MicrobatchCallback:
    callback = MicrobatchCallback()
    trainer(checkpoint.parent, callback, **settings).train(resume_from_checkpoint=str(checkpoint))
    return callback


def change(checkpoint: Path, limits: Any) -> None:
    """Write other limits into a checkpoint."""
    path = checkpoint / "trainer_state.json"
    state = json.loads(path.read_text())
    state["stateful_callbacks"][SAVED] = limits
    path.write_text(json.dumps(state))
    (checkpoint / MANIFEST).unlink()  # which would refuse it


@pytest.mark.parametrize(
    ("limits", "found"),
    [
        ([1], "'list' object has no attribute 'get'"),
        (
            {"max_tokens": {"largest": 36}},
            "Limit.__init__() got an unexpected keyword argument 'largest'",
        ),
    ],
    ids=range(2),
)
def test_limits_that_cannot_be_read_are_warned_about(tmp_path: Path, limits: Any, found: str) -> None:
    trainer(tmp_path, MicrobatchCallback()).train()
    change(tmp_path / "checkpoint-1", limits)
    with pytest.warns(UserWarning, match="limits of micro-batches") as caught:
        callback = resumed(tmp_path / "checkpoint-1")
    assert [str(warning.message) for warning in caught] == [
        f"the limits of micro-batches in the checkpoint could not be read ({found}), so the resumed run begins with "
        "the limits of a new one. If a limit is known to fit, set it: MicrobatchCallback(max_tokens=4096)"
    ]
    assert callback.limits["max_tokens"].limit is None


def test_a_checkpoint_of_stock_is_resumed_without_a_word(tmp_path: Path) -> None:
    trainer(tmp_path).train()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resumed(tmp_path / "checkpoint-1")


def test_stock_resumes_a_checkpoint_with_limits(tmp_path: Path) -> None:
    trainer(tmp_path, MicrobatchCallback()).train()
    trainer(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
