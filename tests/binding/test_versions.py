"""Each difference between the supported versions of transformers that ``compat`` knows, pinned on the installed one."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import fields
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from transformers import TrainingArguments

import tiny
from hf_memopt.binding import versions

VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])
EVERY_N_LAYERS_SINCE = OFFLOAD_SINCE = (5, 17)
# peft 0.21 asks a transformers 5.23 model for is_gradient_checkpointing, which that version renamed.
peft_reads_old_name = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def test_the_installed_version_is_a_supported_one() -> None:
    assert (5, 8) <= VERSION < (6, 0)


def test_names_of_training_arguments() -> None:
    names = versions.training_argument_names()
    assert names == {field.name for field in fields(TrainingArguments) if field.init}
    assert {"train_sampling_strategy", "optim", "per_device_train_batch_size"} <= names


def test_no_renamed_argument_is_still_a_field_apart_from_those_that_warn() -> None:
    still_there = set(versions.RENAMED_ARGUMENTS) & versions.training_argument_names()
    # 5.8.1 still takes these two, with a deprecation warning
    assert still_there == ({"warmup_ratio", "logging_dir"} if VERSION < (5, 17) else set())


def test_replacements_that_are_fields_exist() -> None:
    names = versions.training_argument_names()
    for old, new in versions.RENAMED_ARGUMENTS.items():
        first_word = new.split("=")[0].split(" ")[0].rstrip(",:")
        if first_word.isidentifier() and first_word not in ("nothing", "the", "processing_class"):
            assert first_word in names, (old, new)


def test_checkpointing_arguments_switch_it_on(tmp_path) -> None:
    chosen = versions.checkpointing_arguments()
    prefix = "activation" if VERSION >= (5, 18) else "gradient"
    assert chosen == {f"{prefix}_checkpointing": True, f"{prefix}_checkpointing_kwargs": {"use_reentrant": False}}
    model = tiny.bert()
    assert not versions.is_checkpointing(model)
    tiny.train(model, tiny.rows(8), tmp_path, **chosen)
    assert versions.is_checkpointing(model)


def test_checkpointing_arguments_keep_other_options() -> None:
    chosen = versions.checkpointing_arguments(use_reentrant=True, preserve_rng_state=False)
    options = next(value for name, value in chosen.items() if name.endswith("_kwargs"))
    assert options == {"use_reentrant": True, "preserve_rng_state": False}


@pytest.mark.skipif(VERSION < (5, 18), reason="the new names came after 5.17")
def test_the_old_names_are_deprecated_aliases() -> None:
    assert hasattr(transformers.PreTrainedModel, "activation_checkpointing_enable")
    assert {"gradient_checkpointing", "activation_checkpointing"} <= versions.training_argument_names()


@pytest.mark.parametrize(
    ("release", "name"),
    [
        ("2.6.0+cu124", "PYTORCH_CUDA_ALLOC_CONF"),
        ("2.10.0", "PYTORCH_CUDA_ALLOC_CONF"),
        ("2.11.0", "PYTORCH_ALLOC_CONF"),
        ("2.13.0+cpu", "PYTORCH_ALLOC_CONF"),
    ],
)
def test_the_allocators_variable_follows_torch(monkeypatch, release, name) -> None:
    monkeypatch.setattr(versions, "version", {"torch": release}.__getitem__)
    assert versions.allocator_variable() == name


def _checkpointing(tmp_path: Any, **options: Any) -> TrainingArguments:
    prefix = next(iter(versions.checkpointing_arguments()))
    return TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", **{prefix: True}, **options)


def test_checkpointing_of_arguments(tmp_path) -> None:
    off = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    assert versions.checkpointing_of(off) == (False, {})
    assert versions.checkpointing_of(_checkpointing(tmp_path)) == (True, {})
    chosen = versions.checkpointing_arguments(preserve_rng_state=False)
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", **chosen)
    assert versions.checkpointing_of(args) == (True, {"use_reentrant": False, "preserve_rng_state": False})


def test_checkpointing_of_arguments_gives_a_copy(tmp_path) -> None:
    args = TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to="none", **versions.checkpointing_arguments()
    )
    versions.checkpointing_of(args)[1]["use_reentrant"] = True
    assert versions.checkpointing_of(args)[1] == {"use_reentrant": False}


@pytest.mark.skipif(VERSION < (5, 18), reason="the new names came after 5.17")
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")  # of 5.23, for the old name
def test_checkpointing_of_arguments_under_the_old_name(tmp_path) -> None:
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", gradient_checkpointing=True)
    assert versions.checkpointing_of(args)[0] is True


def _checkpointed_layers(model: Any) -> list[bool]:
    return [bool(getattr(layer, "gradient_checkpointing", False)) for layer in model.bert.encoder.layer]


def test_enabled_checkpointing_recomputes_layers(monkeypatch) -> None:
    model = tiny.bert(num_hidden_layers=4)
    versions.enable_checkpointing(model, {"use_reentrant": False})
    assert versions.is_checkpointing(model)
    assert _calls_of_layers(monkeypatch, model) == [2, 2, 2, 2]


@pytest.mark.parametrize("options", [{"every_n_layers": 2}, {"every_n_layers": 2, "use_reentrant": False}])
def test_every_n_layers_where_the_version_has_it(monkeypatch, options) -> None:
    model = tiny.bert(num_hidden_layers=4)
    versions.enable_checkpointing(model, {"use_reentrant": False, **options})
    calls = _calls_of_layers(monkeypatch, model)
    assert sorted(calls) == ([2, 2, 2, 2] if VERSION < EVERY_N_LAYERS_SINCE else [1, 1, 2, 2])


def test_offload_where_the_version_has_it(monkeypatch) -> None:
    moved = []

    def save_on_cpu(**options: Any) -> Any:
        moved.append(options)
        return nullcontext()

    # what stock imports from torch, in 5.17.0 and 5.23.0; the real one needs an accelerator
    monkeypatch.setattr("transformers.modeling_utils.save_on_cpu", save_on_cpu, raising=False)
    model = tiny.bert(num_hidden_layers=3)
    versions.enable_checkpointing(model, {"use_reentrant": False, "offload": True})
    model(input_ids=torch.full((2, 8), 7), labels=torch.tensor([0, 1])).loss.backward()
    assert versions.can_offload_checkpoints() is (VERSION >= OFFLOAD_SINCE)
    assert len(moved) == (3 if VERSION >= OFFLOAD_SINCE else 0)


@peft_reads_old_name
def test_enabled_checkpointing_reaches_a_model_within_peft(monkeypatch) -> None:
    model = get_peft_model(tiny.bert(), LoraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS"))
    versions.enable_checkpointing(model, {"use_reentrant": False})
    assert _calls_of_layers(monkeypatch, model.get_base_model()) == [2, 2]


def test_enable_checkpointing_does_not_change_its_options() -> None:
    options = {"use_reentrant": False, "every_n_layers": 2, "offload": False}
    versions.enable_checkpointing(tiny.bert(), options)
    assert options == {"use_reentrant": False, "every_n_layers": 2, "offload": False}


def test_it_is_what_the_trainer_does(monkeypatch, tmp_path) -> None:
    by_trainer, by_hand = tiny.bert(), tiny.bert()
    tiny.train(by_trainer, tiny.rows(8), tmp_path, **versions.checkpointing_arguments())
    versions.enable_checkpointing(by_hand, {"use_reentrant": False})
    assert _checkpointed_layers(by_trainer) == _checkpointed_layers(by_hand)
    assert _calls_of_layers(monkeypatch, by_trainer) == _calls_of_layers(monkeypatch, by_hand) == [2, 2]


def _calls_of_layers(monkeypatch: pytest.MonkeyPatch, model: Any) -> list[int]:
    """Return how often each layer's feed-forward part ran in a training pass."""
    layers = model.bert.encoder.layer
    calls = [0] * len(layers)
    for index, layer in enumerate(layers):

        def counted(*args: Any, _index: int = index, _inner: Any = layer.intermediate.forward, **kwargs: Any) -> Any:
            calls[_index] += 1
            return _inner(*args, **kwargs)

        monkeypatch.setattr(layer.intermediate, "forward", counted)
    model.train()
    batch = {"input_ids": torch.full((2, 8), 7), "labels": torch.tensor([0, 1])}
    model(**batch).loss.backward()
    return calls
