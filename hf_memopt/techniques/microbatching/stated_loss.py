"""Verify once, before a batch is cut, that a loss is what its user has stated.

The gradient of each parameter for a few rows is compared with that of the rows taken alone, weighted as stated: in
training mode, without dropout. The Trainer, its model and all generators are left as they were.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import nn

from hf_memopt.binding.losses import KnownLoss
from hf_memopt.binding.undo import override_method
from hf_memopt.devices.readings import free_failed_step, is_out_of_memory
from hf_memopt.techniques.microbatching.not_splittable import NotSplittableError
from hf_memopt.techniques.microbatching.row_check import without_dropout
from hf_memopt.techniques.microbatching.splitting import row_count, row_lengths, take_rows
from hf_memopt.techniques.microbatching.step_state import StepState

ROWS = 4
LARGEST_ERROR = 1e-3  # of the largest gradient of a parameter: rows are added in another order, over shorter ones
LARGEST_ERROR_16_BITS = 5e-2
SMALLEST = 1e-2  # of the largest of all: that of an attention's key bias is 0 but for rounding


def verify_stated_loss(
    trainer: Any, model: nn.Module, inputs: Mapping[str, Any], items: Any, loss: KnownLoss, most_rows: int = ROWS
) -> None:
    """Raise NotSplittableError unless a few rows of a batch have the gradients that the stated loss gives."""
    try:
        return _verify(trainer, model, inputs, items, loss, most_rows)
    except Exception as error:
        if not is_out_of_memory(error) or most_rows <= 2:  # fewer rows say nothing
            raise
    free_failed_step()
    verify_stated_loss(trainer, model, inputs, items, loss, most_rows // 2)


def _verify(trainer: Any, model: Any, inputs: Mapping[str, Any], items: Any, loss: KnownLoss, most_rows: int) -> None:
    lengths = row_lengths(inputs) or [1] * row_count(inputs)
    rows = sorted(range(len(lengths)), key=lambda row: lengths[row])[:most_rows]
    batch = take_rows(inputs, rows)
    parameters = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    state = StepState(trainer)

    def gradients(some: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
        with trainer.compute_loss_context_manager():
            given = send_to_device(dict(some), trainer.args.device)
            value = trainer.compute_loss(model, given, num_items_in_batch=items)
        return torch.autograd.grad(value, list(parameters.values()), materialize_grads=True)

    with ExitStack() as stack:
        stack.callback(state.restore)
        stack.enter_context(trainer.accelerator.no_sync(model))
        stack.enter_context(override_method(trainer, "log", lambda before, *args, **kwargs: None))
        stack.enter_context(without_dropout(model))
        whole = gradients(batch)
        summed = [torch.zeros_like(gradient) for gradient in whole]
        for row, weight in enumerate(loss.row_weights(batch) or [1.0] * len(rows)):
            if weight:
                for total, gradient in zip(summed, gradients(take_rows(batch, [row])), strict=True):
                    total.add_(gradient, alpha=weight)
    smallest = SMALLEST * max((float(gradient.abs().max()) for gradient in whole), default=0.0)
    is_narrow = trainer.args.bf16 or trainer.args.fp16
    for name, one, other in zip(parameters, whole, summed, strict=True):
        largest = max(float(one.abs().max()), float(other.abs().max()), smallest, 1e-12)
        error = float((one - other).abs().max()) / largest
        if error > (LARGEST_ERROR_16_BITS if is_narrow or one.element_size() < 4 else LARGEST_ERROR):
            raise NotSplittableError(
                trainer.model,
                f"its loss is not what is stated ({loss.source}): the gradient of {name} for {len(rows)} rows differs "
                f"by {error:.1e} from that of the rows alone",
                remedy="Leave loss= out: MicrobatchCallback() then cuts below the loss, whatever it is.",
            )
