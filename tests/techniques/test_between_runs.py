"""What callbacks and optimizers leave alone between two runs of a Trainer, and what ``memopt_handle`` takes back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Trainer

import tiny
from hf_memopt import CheckpointingCallback, FreezeCallback, TiledLayersCallback, attach, low_memory_optimizer


def released(folder: Any, model: Any, *, is_attached: bool = True) -> Trainer:
    args = tiny.arguments(folder, max_grad_norm=0.0, max_steps=2, lr_scheduler_type="constant", learning_rate=1e-2)
    optimizer = {"optimizer_cls_and_kwargs": low_memory_optimizer(args, model, release=True)}
    trainer = Trainer(model=model, args=args, train_dataset=tiny.rows(16), **optimizer)
    return attach(trainer) if is_attached else trainer


def weights_of(model: Any) -> list[torch.Tensor]:
    return [one.detach().clone() for one in model.parameters()]


@pytest.mark.parametrize("is_attached", [True, False])
def test_a_backward_pass_after_a_run_steps_nothing(is_attached: bool, tmp_path: Any) -> None:
    """Nor does the next Trainer of the model get steps of the first one's optimizer."""
    model = tiny.bert()
    trainer = released(tmp_path, model, is_attached=is_attached)
    trainer.train()
    before = weights_of(model)
    batch = {name: torch.tensor([row[name] for row in tiny.rows(2)], device=model.device) for name in tiny.rows(1)[0]}
    model.eval()(**batch).loss.backward()
    assert all(map(torch.equal, before, weights_of(model)))
    assert all(one.grad is not None for one in model.parameters())
    model.zero_grad()
    Trainer(
        model=model,
        args=tiny.arguments(tmp_path, max_steps=2, optim="sgd", learning_rate=0.0),
        train_dataset=tiny.rows(16),
    ).train()
    assert all(map(torch.equal, before, weights_of(model)))
    trainer.train()  # it steps again in its own runs
    assert not any(map(torch.equal, before, weights_of(model)))


@pytest.mark.parametrize("is_attached", [True, False])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_runs_after_one_that_was_interrupted(where: str, is_attached: bool, tmp_path: Any) -> None:
    """The next Trainer of the model gets no step of the first one's optimizer, which steps again in its own runs."""
    model = tiny.bert()
    trainer = released(tmp_path, model, is_attached=is_attached)

    def stop(*given: Any) -> None:
        raise KeyboardInterrupt

    weight = model.bert.embeddings.word_embeddings.weight
    handle = weight.register_hook(stop) if where == "backward" else model.register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    handle.remove()
    before = weights_of(model)
    args = tiny.arguments(tmp_path, max_steps=2, optim="sgd", learning_rate=0.0)
    Trainer(model=model, args=args, train_dataset=tiny.rows(16)).train()
    assert all(map(torch.equal, before, weights_of(model)))
    trainer.train()
    assert trainer.state.global_step == 2
    assert not any(map(torch.equal, before, weights_of(model)))


CALLBACKS: dict[str, Any] = {
    "freezing": lambda: FreezeCallback("embeddings"),
    "checkpointing": lambda: CheckpointingCallback("full"),
}


@pytest.mark.parametrize("is_given", [False, True], ids=["attached", "given to the Trainer"])
@pytest.mark.parametrize("name", CALLBACKS)
def test_what_callbacks_change_is_listed_and_taken_back(name: str, is_given: bool, tmp_path: Any) -> None:
    model = tiny.llama(num_hidden_layers=2)

    def states() -> list[bool]:
        flags = [one.requires_grad for one in model.parameters()]
        return flags + [bool(getattr(one, "gradient_checkpointing", False)) for one in model.modules()]

    before, callback = states(), CALLBACKS[name]()
    rows = [{**row, "labels": row["input_ids"]} for row in tiny.rows(8)]
    args, given = tiny.arguments(tmp_path, max_steps=1), {"callbacks": [callback]} if is_given else {}
    trainer = attach(Trainer(model=model, args=args, train_dataset=rows, **given), *([] if is_given else [callback]))
    trainer.train()
    assert states() != before
    assert {change.name for change in callback.changes} <= {change.name for change in trainer.memopt_changes}
    assert callback.changes
    trainer.memopt_handle.remove()
    assert states() == before


@pytest.mark.parametrize("is_given", [False, True], ids=["attached", "given to the Trainer"])
@pytest.mark.parametrize("name", [*CALLBACKS, "tiling"])
def test_what_callbacks_change_in_a_model_that_training_makes_is_taken_back(
    name: str, is_given: bool, tmp_path: Any
) -> None:
    callback = TiledLayersCallback(4) if name == "tiling" else CALLBACKS[name]()
    rows = [{**row, "labels": row["input_ids"]} for row in tiny.rows(8)]
    args, given = tiny.arguments(tmp_path, max_steps=1), {"callbacks": [callback]} if is_given else {}
    trainer = Trainer(model_init=lambda: tiny.llama(num_hidden_layers=2), args=args, train_dataset=rows, **given)
    first = attach(trainer, *([] if is_given else [callback])).model
    trainer.train()
    assert trainer.model is not first
    trainer.memopt_handle.remove()
    assert all(one.requires_grad for one in trainer.model.parameters())
    assert not any(getattr(one, "gradient_checkpointing", False) for one in trainer.model.modules())
    assert not any("forward" in vars(one) for one in trainer.model.modules())
