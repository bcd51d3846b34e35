"""The limits of micro-batching in a checkpoint: written whole or not at all, read strictly, never the end of a run."""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import Trainer

import tiny
from hf_memopt.binding.attach import attach
from hf_memopt.binding.checkpoint_manifest import MANIFEST
from hf_memopt.techniques.microbatching.limits import LIMITS_FILE, Limit, read_limits, write_limits
from hf_memopt.techniques.microbatching.microbatch import MicrobatchCallback

SAVING: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2, "per_device_train_batch_size": 2}


def trainer(folder: Path, *callbacks: Any) -> Trainer:
    built = Trainer(model=tiny.bert(), args=tiny.arguments(folder, **SAVING), train_dataset=tiny.rows())
    return attach(built, *callbacks) if callbacks else built


def full(*args: Any) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("{", "it is not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        ("[1]", "it is not an object but [1]"),
        ("[" * 100_000, "it is nested too deeply"),
        (
            '{"max_tokens": {"limit": -36}}',
            "max_tokens.limit=-36 is invalid; expected an integer of 1 or more, or None. Pass limit=None",
        ),
        (
            '{"max_tokens": {"maximum": 8, "limit": 9}}',
            "max_tokens.limit=9 is invalid; expected at most max_tokens.maximum=8",
        ),
        ('{"max_rows": {}}', "max_rows={} is not a limit; expected an object under max_tokens or max_examples"),
    ],
    ids=range(6),
)
def test_limits_that_cannot_be_read_are_warned_about(tmp_path, text, found) -> None:
    trainer(tmp_path, MicrobatchCallback()).train()
    path = tmp_path / "checkpoint-1" / LIMITS_FILE
    path.write_text(text)
    path.with_name(MANIFEST).unlink()  # which would refuse it
    callback = MicrobatchCallback()
    resumed = trainer(tmp_path, callback)
    with pytest.warns(UserWarning, match=LIMITS_FILE) as caught:
        resumed.train(resume_from_checkpoint=str(path.parent))
    assert [str(warning.message) for warning in caught] == [
        f"{path} could not be read (ValueError: {found}), so the resumed run begins with the limits of a new one. If a "
        "limit is known to fit, set it: MicrobatchCallback(max_tokens=4096)"
    ]
    assert callback.limits["max_tokens"].limit is None


def test_a_checkpoint_of_stock_is_resumed_without_a_word(tmp_path) -> None:
    trainer(tmp_path).train()
    resumed = trainer(tmp_path, MicrobatchCallback())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


def test_limits_that_cannot_be_written_do_not_end_training(tmp_path, monkeypatch) -> None:
    """A disk that is full for a moment; stock survives it."""
    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(UserWarning, match=LIMITS_FILE) as caught:
        trainer(tmp_path, MicrobatchCallback()).train()
    assert [str(warning.message) for warning in caught] == [
        f"{tmp_path / 'checkpoint-1' / LIMITS_FILE} could not be written (No space left on device), so a run that "
        "resumes here begins with the limits of a new one. Training goes on; make room for it or let its folder be "
        "written to"
    ]
    names = {path.name for path in tmp_path.glob("checkpoint-2/*")}
    assert "trainer_state.json" in names
    assert {name for name in names if "memopt" in name} == {MANIFEST}


def test_limits_are_written_whole_or_not_at_all(tmp_path, monkeypatch) -> None:
    limits = {"max_tokens": Limit(limit=12), "max_examples": Limit(maximum=3)}
    write_limits(tmp_path, limits)
    assert read_limits(tmp_path) == limits
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"^\[Errno 28\] No space left on device: .*memopt_microbatch.json'$"):
        write_limits(tmp_path, {"max_tokens": Limit()})
    assert read_limits(tmp_path) == limits
    assert [path.name for path in tmp_path.iterdir()] == [LIMITS_FILE]


@pytest.mark.parametrize("field", [item.name for item in fields(Limit)])
@given(value=st.none() | st.booleans() | st.integers() | st.text() | st.lists(st.integers()))
def test_any_value_round_trips_or_is_refused_by_name(field, value) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / LIMITS_FILE).write_text(json.dumps({"max_examples": {**asdict(Limit()), field: value}}))
        try:
            limits = read_limits(folder)
        except ValueError as error:
            assert str(error).startswith(f"max_examples.{field}=")  # noqa: PT017  # either is fine
        else:
            assert getattr(limits["max_examples"], field) == value
            write_limits(folder, limits)
            assert read_limits(folder) == limits
