"""One accumulation step, and its loss computed beside the training: what the checks of losses and of padding compare.

Nothing of such a loss stays in the Trainer, its model or the generators.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from accelerate.utils import send_to_device
from torch import nn

from hf_memopt.training.binding.trials import copied_batch

LARGEST_ERROR_16_BITS = 5e-2
SMALLEST = 1e-2  # of the unit of a loss: a smaller loss is a difference of larger numbers

Items = torch.Tensor | int | None
"""``num_items_in_batch``, as ``training_step`` gets it."""


class AccumulationStep(NamedTuple):
    """One call of ``training_step``: what it runs, its arguments, and what stock divided its loss by at that time and
    said of whether gradients are complete with it.
    """

    run: Callable[..., torch.Tensor]
    model: nn.Module
    inputs: Any
    num_items_in_batch: Items
    accumulation_steps: int
    syncs: bool

    def call(self, trainer: Any, rows: Any) -> torch.Tensor:
        """Train on these rows of the batch."""
        # An epoch that ended early leaves accumulation steps, and their gradients, to the next epoch's first step.
        trainer.current_gradient_accumulation_steps = self.accumulation_steps
        accelerator, now = trainer.accelerator, trainer.accelerator.sync_gradients
        accelerator.sync_gradients = self.syncs
        try:
            return self.run(self.model, copied_batch(rows), self.num_items_in_batch)  # a subclass may pop columns of it
        finally:
            accelerator.sync_gradients = now


def loss_of(trainer: Any, step: AccumulationStep, rows: Mapping[str, Any]) -> torch.Tensor:
    """Return the loss of these rows as the Trainer computes it."""
    with trainer.compute_loss_context_manager():
        given = send_to_device(copied_batch(dict(rows)), trainer.args.device)
        loss: torch.Tensor = trainer.compute_loss(step.model, given, num_items_in_batch=step.num_items_in_batch)
    return loss
