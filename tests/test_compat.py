"""Each difference between the supported versions of transformers that ``compat`` knows, pinned on the installed one."""

from __future__ import annotations

from dataclasses import fields

import pytest
import transformers
from transformers import TrainingArguments

import tiny
from hf_memopt import compat

VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])


def test_the_installed_version_is_a_supported_one() -> None:
    assert (5, 8) <= VERSION < (6, 0)


def test_names_of_training_arguments() -> None:
    names = compat.training_argument_names()
    assert names == {field.name for field in fields(TrainingArguments) if field.init}
    assert {"train_sampling_strategy", "optim", "per_device_train_batch_size"} <= names


def test_no_renamed_argument_is_still_a_field_apart_from_those_that_warn() -> None:
    still_there = set(compat.RENAMED_ARGUMENTS) & compat.training_argument_names()
    # 5.8.1 still takes these two, with a deprecation warning
    assert still_there == ({"warmup_ratio", "logging_dir"} if VERSION < (5, 17) else set())


def test_replacements_that_are_fields_exist() -> None:
    names = compat.training_argument_names()
    for old, new in compat.RENAMED_ARGUMENTS.items():
        first_word = new.split("=")[0].split(" ")[0].rstrip(",:")
        if first_word.isidentifier() and first_word not in ("nothing", "the", "processing_class"):
            assert first_word in names, (old, new)


def test_checkpointing_arguments_switch_it_on(tmp_path) -> None:
    chosen = compat.checkpointing_arguments()
    prefix = "activation" if VERSION >= (5, 18) else "gradient"
    assert chosen == {f"{prefix}_checkpointing": True, f"{prefix}_checkpointing_kwargs": {"use_reentrant": False}}
    model = tiny.bert()
    assert not compat.is_checkpointing(model)
    tiny.train(model, tiny.rows(8), tmp_path, **chosen)
    assert compat.is_checkpointing(model)


def test_checkpointing_arguments_keep_other_options() -> None:
    chosen = compat.checkpointing_arguments(use_reentrant=True, preserve_rng_state=False)
    options = next(value for name, value in chosen.items() if name.endswith("_kwargs"))
    assert options == {"use_reentrant": True, "preserve_rng_state": False}


@pytest.mark.skipif(VERSION < (5, 18), reason="the new names came after 5.17")
def test_the_old_names_are_deprecated_aliases() -> None:
    assert hasattr(transformers.PreTrainedModel, "activation_checkpointing_enable")
    assert {"gradient_checkpointing", "activation_checkpointing"} <= compat.training_argument_names()
