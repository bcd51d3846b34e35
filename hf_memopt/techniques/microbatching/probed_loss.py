"""Read the loss of a few rows, and a part of its gradient, without a trace in the trainer or the model."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from accelerate.utils import send_to_device
from torch import nn

from hf_memopt.binding.probing import undisturbed
from hf_memopt.devices.out_of_memory import is_out_of_memory
from hf_memopt.techniques.microbatching.splitting import row_count, row_lengths, take_rows

if TYPE_CHECKING:
    from transformers import Trainer

__all__ = ["Items", "NotSplittableError", "ProbedLoss", "Reading"]

logger = logging.getLogger(__name__)

GRADIENT_ELEMENTS = 2**18  # those of the smallest weights, which are the biases and norms of all layers: 1 MiB

Items = torch.Tensor | int | None
"""``num_items_in_batch``, as ``training_step`` gets it."""


class NotSplittableError(ValueError):
    """The batches of a model cannot be trained in micro-batches, for this reason."""

    def __init__(self, model: nn.Module, reason: str) -> None:
        super().__init__(
            f"model={type(model).__name__} cannot be trained in micro-batches: {reason}; expected rows that do not "
            "depend on each other. Take MicrobatchCallback out of callbacks= and lower per_device_train_batch_size."
        )
        self.reason = reason


class Reading(NamedTuple):
    """A loss and a part of its gradient, shape (elements,); empty if the loss has no gradient."""

    loss: torch.Tensor
    gradient: torch.Tensor


class ProbedLoss:
    """The ``compute_loss`` of a trainer, for rows of one batch.

    Args:
        trainer: it, its model and all random numbers stay as they are.
        model: as ``training_step`` gets it.
        items: ``num_items_in_batch``, as ``training_step`` gets it.
    """

    def __init__(self, trainer: Trainer, model: nn.Module, items: Items) -> None:
        self.trainer: Any = trainer
        self.model = model
        self.items = items

    def at_once_and_alone(self, probe: Mapping[str, Any], *, with_gradient: bool) -> list[Reading] | None:
        """Return the readings of all rows of a probe and of each alone; None if they do not fit into memory."""
        rows = row_count(probe)
        readings: list[Reading] = []
        try:
            with undisturbed(self.trainer, self.model), self.trainer.accelerator.no_sync(self.model):
                for batch in [probe, *(take_rows(probe, [row]) for row in range(rows))]:
                    readings.append(self._read(batch, self.items, with_gradient=with_gradient))
        except Exception as error:
            if is_out_of_memory(error):
                return None
            which = "one row alone" if readings else f"{rows} rows alone"
            failure = f"the loss of {which} fails ({type(error).__name__}: {error})"
            reason = f"its rows belong together, as pairs do: {failure}"
            raise NotSplittableError(self.trainer.model, reason) from error
        return readings

    def twice(self, probe: Mapping[str, Any]) -> list[Reading] | None:
        """Return two readings of the same rows, without gradients; None if they do not fit into memory."""
        return self._losses(probe, (self.items, self.items))

    def two_rows(self, inputs: Mapping[str, Any]) -> list[torch.Tensor]:
        """Return the losses of two rows at once and of each alone, without gradients.

        Every batch takes three forward passes, a single row too, since under FSDP2 all processes run them together.
        """
        lengths = row_lengths(inputs) or [1] * row_count(inputs)
        rows = sorted(range(len(lengths)), key=lambda row: lengths[row])[:2]
        probes = [take_rows(inputs, chosen) for chosen in (rows, rows[:1], rows[-1:])]
        with undisturbed(self.trainer, self.model):
            return [self._read(probe, self.items, with_gradient=False).loss for probe in probes]

    def halves(self, inputs: Mapping[str, Any]) -> bool:
        """Return whether the loss of the shortest row halves if ``num_items_in_batch`` is doubled; True, as stock
        assumes, if not even that row fits into memory.
        """
        lengths = row_lengths(inputs) or [1]
        row = take_rows(inputs, [lengths.index(min(lengths))])
        readings = self._losses(row, [torch.tensor(items, device=self.trainer.args.device) for items in (8, 16)])
        return readings is None or abs(float(readings[0].loss)) > 1.5 * abs(float(readings[1].loss))

    def _losses(self, batch: Mapping[str, Any], counts: Iterable[Items]) -> list[Reading] | None:
        try:
            with undisturbed(self.trainer, self.model), self.trainer.accelerator.no_sync(self.model):
                return [self._read(batch, items, with_gradient=False) for items in counts]
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return None

    def _read(self, batch: Mapping[str, Any], items: Items, *, with_gradient: bool) -> Reading:
        trainer = self.trainer
        on_device = send_to_device(dict(batch), trainer.args.device)
        with torch.set_grad_enabled(with_gradient), trainer.compute_loss_context_manager():
            loss: torch.Tensor = trainer.compute_loss(self.model, on_device, num_items_in_batch=items)
        gradient = torch.empty(0, device=loss.device)
        if loss.requires_grad:
            weights = _small_weights(self.model)
            try:
                found = torch.autograd.grad(loss, weights, allow_unused=True)
            except RuntimeError as error:
                if is_out_of_memory(error):
                    raise
                logger.debug("no gradient in evaluation mode: %s", error)  # cuDNN's recurrent layers have none
            else:
                pairs = zip(weights, found, strict=True)
                flat = [(torch.zeros_like(weight) if part is None else part).flatten() for weight, part in pairs]
                gradient = torch.cat([part[:GRADIENT_ELEMENTS].float() for part in flat]) if flat else gradient
        return Reading(loss.detach(), gradient)


def _small_weights(model: nn.Module) -> list[nn.Parameter]:
    """Return the smallest trainable weights, up to ``GRADIENT_ELEMENTS`` together, or the smallest one."""
    trainable = [weight for weight in model.parameters() if weight.requires_grad and weight.is_floating_point()]
    trainable.sort(key=lambda weight: weight.numel())
    sizes = np.cumsum([weight.numel() for weight in trainable])
    return trainable[: max(1, int((sizes <= GRADIENT_ELEMENTS).sum()))]
