"""Each difference between the supported versions of transformers that ``compat`` knows, pinned on the installed one."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model

import tiny
from hf_memopt.training.binding import versions

VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])
EVERY_N_LAYERS_SINCE = OFFLOAD_SINCE = (5, 17)
# peft 0.21 asks a transformers 5.23 model for is_gradient_checkpointing, which that version renamed.
peft_reads_old_name = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def test_checkpointing_arguments_switch_it_on(tmp_path) -> None:
    chosen = versions.checkpointing_arguments()
    prefix = "activation" if VERSION >= (5, 18) else "gradient"
    assert chosen == {f"{prefix}_checkpointing": True, f"{prefix}_checkpointing_kwargs": {"use_reentrant": False}}
    model = tiny.bert()
    assert not versions.is_checkpointing(model)
    tiny.train(model, tiny.rows(8), tmp_path, **chosen)
    assert versions.is_checkpointing(model)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")  # of 5.23, for the old name
def test_checkpointing_is_read_off_arguments_under_either_name(tmp_path) -> None:
    old, options = "gradient_checkpointing", {"use_reentrant": False, "preserve_rng_state": False}
    on = next(iter(versions.checkpointing_arguments()))
    for given, expected in (
        ({}, (False, {})),
        ({on: True}, (True, {})),
        (versions.checkpointing_arguments(preserve_rng_state=False), (True, options)),
        ({old: True}, (True, {})),
    ):
        args = tiny.arguments(tmp_path, **given)
        found = versions.checkpointing_of(args)
        assert (found[0], {} if given == {old: True} else found[1]) == expected
        found[1]["use_reentrant"] = "changed"
        assert versions.checkpointing_of(args)[1].get("use_reentrant") != "changed"


@peft_reads_old_name
@pytest.mark.parametrize("within_peft", [False, True])
@pytest.mark.parametrize("more", [{}, {"every_n_layers": 2}], ids=str)
def test_enabled_checkpointing_is_what_the_trainer_does(monkeypatch, tmp_path, more, within_peft) -> None:
    by_trainer, by_hand = tiny.bert(num_hidden_layers=4), tiny.bert(num_hidden_layers=4)
    known = more if VERSION >= EVERY_N_LAYERS_SINCE else {}
    tiny.train(by_trainer, tiny.rows(8), tmp_path, **versions.checkpointing_arguments(**known))
    options = {"use_reentrant": False, "offload": False, **more}
    adapters = LoraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS")
    model = get_peft_model(by_hand, adapters) if within_peft else by_hand
    versions.enable_checkpointing(model, options)
    assert options == {"use_reentrant": False, "offload": False, **more}
    assert versions.is_checkpointing(by_hand)
    calls = _calls_of_layers(monkeypatch, by_hand)
    assert calls == _calls_of_layers(monkeypatch, by_trainer)
    assert sorted(calls) == ([1, 1, 2, 2] if known else [2, 2, 2, 2])


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
