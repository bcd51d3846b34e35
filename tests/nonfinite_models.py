"""Tiny models that spoil a step when a batch holds the token ``BAD``, in the place and the way that is asked for."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from transformers import Trainer

import tiny

BAD = 99
PLACE = "model.layers.1.mlp.down_proj"


class NonfiniteLinear(nn.Linear):
    """A linear layer that spoils the rows in ``rows``: its output, or only the gradient through it."""

    rows: torch.Tensor
    kind: str

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Overflow (``forward``), or give the square root of zero, whose gradient is infinite (``gradient``)."""
        outputs = super().forward(inputs)
        if not self.rows.any():
            return outputs
        spoiled = torch.inf * outputs[self.rows] if self.kind == "forward" else (0 * outputs[self.rows]).sqrt()
        return outputs.masked_scatter(self.rows.view(-1, 1, 1).expand_as(outputs), spoiled)


def make_nonfinite(model: nn.Module, kind: str, place: str = PLACE) -> Any:
    """Put a ``NonfiniteLinear`` layer with the same weights into a Llama; return the model."""
    parent = model.get_submodule(place.rpartition(".")[0])
    linear = model.get_submodule(place)
    spoiled = NonfiniteLinear(linear.in_features, linear.out_features, bias=False)
    spoiled.kind, spoiled.weight = kind, linear.weight
    setattr(parent, place.rpartition(".")[2], spoiled)

    def mark(module: nn.Module, args: tuple[torch.Tensor], outputs: torch.Tensor) -> None:
        spoiled.rows = (args[0] == BAD).any(-1)

    model.get_input_embeddings().register_forward_hook(mark)
    return model


def rows(count: int = 16, bad: Collection[int] = (), length: int = 8) -> list[dict[str, Any]]:
    """Return causal language modelling examples; those with an index in ``bad`` begin with the token ``BAD``."""
    examples = []
    for index, row in enumerate(tiny.rows(count, length)):
        ids = [min(token, BAD - 1) for token in row["input_ids"]]
        ids[0] = BAD if index in bad else ids[0]
        examples.append({"input_ids": ids, "attention_mask": row["attention_mask"], "labels": ids})
    return examples


def make_trainer(model: nn.Module, dataset: Any, output_dir: Any, *callbacks: Any, **settings: Any) -> Trainer:
    """Return a stock Trainer of batches of 4 in the order of the dataset."""
    quiet = {"per_device_train_batch_size": 4, "train_sampling_strategy": "sequential", "optim": "adamw_torch"}
    args = tiny.arguments(output_dir, **{**quiet, "learning_rate": 1e-3, **settings})
    return Trainer(model=model, args=args, train_dataset=dataset, callbacks=list(callbacks))
