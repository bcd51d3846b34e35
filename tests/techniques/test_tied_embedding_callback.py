"""``TiedEmbeddingCallback`` in the stock Trainer: alone, and with the fused loss, released gradients, checkpointing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import Trainer

import tiny
from hf_memopt import FusedCrossEntropyCallback, MicrobatchCallback, TiedEmbeddingCallback, attach, low_memory_optimizer
from hf_memopt.techniques import fuse_cross_entropy, sparse_tied_embedding
from hf_memopt.training.binding import checkpointing_arguments
from hf_memopt.types import Change

SIZES = {"vocab_size": 500, "tie_word_embeddings": True}
CHANGE = Change("gradient of the tied embeddings", "dense", "rows", "2 x 125.0 KiB less in the backward pass")


def build(dtype: torch.dtype = torch.float64, **changed: Any) -> Any:
    return tiny.llama(**{**SIZES, **changed}).to(dtype)


def rows() -> list[dict[str, Any]]:
    tokens = [row["input_ids"] for row in tiny.rows(8)]
    return [{"input_ids": row, "labels": [-100, *row[1:]]} for row in tokens]


def trainer(folder: Any, *callbacks: Any, released: bool = False, model: Any = None, **settings: Any) -> Trainer:
    kind = low_memory_optimizer(torch.optim.SGD, release=True) if released else torch.optim.SGD
    return Trainer(
        model=build() if model is None else model,
        args=tiny.arguments(folder, per_device_train_batch_size=2, **settings),
        train_dataset=rows(),
        callbacks=list(callbacks),
        optimizer_cls_and_kwargs=(kind, {"lr": 0.1}),
    )


class Weighted(Trainer):
    """A loss that is not known, so that the rows of the backbone are cut."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs)
        return (3 * outputs.loss, outputs) if return_outputs else 3 * outputs.loss


def test_micro_batches_of_a_loss_that_is_not_known_train_as_stock(tmp_path: Any) -> None:
    models = []
    for callbacks in ([TiedEmbeddingCallback(), MicrobatchCallback(max_examples=1)], []):
        plain = trainer(tmp_path)
        one = Weighted(
            plain.model, plain.args, train_dataset=rows(), optimizer_cls_and_kwargs=(torch.optim.SGD, {"lr": 0.1})
        )
        attach(one, *callbacks).train()
        models.append(one.model)
    assert tiny.largest_difference(*models) < 1e-12


@pytest.mark.parametrize(
    ("fused", "released", "checkpointing"), [(False, False, True), (False, True, False), (True, True, True)]
)
def test_weights_are_those_of_stock(fused: bool, released: bool, checkpointing: bool, tmp_path: Any) -> None:
    """Bit for bit, but for the fused loss, whose logits stock rounds to float32."""
    settings = checkpointing_arguments(use_reentrant=False) if checkpointing else {}
    callbacks = [TiedEmbeddingCallback(), *([FusedCrossEntropyCallback()] if fused else [])]
    ours = attach(trainer(tmp_path / "ours", *callbacks, released=released, **settings))
    stock = trainer(tmp_path / "stock")
    ours.train()
    stock.train()
    assert tiny.largest_difference(ours.model, stock.model) <= (1e-7 if fused else 0.0)
    assert CHANGE in ours.memopt_changes
    assert sparse_tied_embedding(ours.model).is_removed  # it is changed already
    callbacks[0].handle.remove()
    assert not sparse_tied_embedding(ours.model).is_removed


@pytest.mark.parametrize(
    "order", [(fuse_cross_entropy, sparse_tied_embedding), (sparse_tied_embedding, fuse_cross_entropy)]
)
def test_with_the_fused_loss_one_matrix_is_made(order: Any) -> None:
    """The gradient that the fused loss made is the one that the rows are added into, and the only one."""
    model = build(torch.float32, vocab_size=3000).train()
    for function in order:
        function(model)
    weight = model.get_input_embeddings().weight
    steps: list[torch.Size] = []
    weight.register_post_accumulate_grad_hook(lambda parameter: steps.append(parameter.grad.shape))
    ids = torch.randint(5, 3000, (2, 12))
    model(input_ids=ids, labels=ids).loss.backward()
    loss = model(input_ids=ids, labels=ids).loss
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        loss.backward()
    large = [event.name for event in found.events() if (event.self_cpu_memory_usage or 0) >= weight.nbytes]
    assert large == []
    assert steps == [weight.shape] * 2
