"""Verify once, before a batch is cut, that a loss is what its user has stated.

The gradient of each parameter for a few rows is compared with that of the rows taken alone, weighted as stated: in
training mode, without dropout. The Trainer, its model and all generators are left as they were.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import nn

from hf_memopt.binding.handles import override_method, set_attribute
from hf_memopt.binding.known_losses import KnownLoss
from hf_memopt.devices.out_of_memory import free_failed_step, is_out_of_memory
from hf_memopt.devices.random_state import RandomState
from hf_memopt.techniques.microbatching.row_check import DROPOUTS
from hf_memopt.techniques.microbatching.splitting import NotSplittableError, row_count, row_lengths, take_rows
from hf_memopt.techniques.microbatching.step_state import StepState

__all__ = ["verify_stated_loss"]

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
    weights = loss.row_weights(batch) or [1.0] * len(rows)
    with _undisturbed(trainer, model):
        whole = _gradients(trainer, model, batch, items)
        summed: list[torch.Tensor | None] = [None] * len(whole)
        for row, weight in enumerate(weights):
            if weight:
                alone = _gradients(trainer, model, take_rows(batch, [row]), items)
                summed = [_add(one, other, weight) for one, other in zip(summed, alone, strict=True)]
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    smallest = SMALLEST * max((float(one.abs().max()) for one in whole if one is not None), default=0.0)
    for name, one, other in zip(names, whole, summed, strict=True):
        most = LARGEST_ERROR_16_BITS if _is_narrow(trainer, one) else LARGEST_ERROR
        if (error := _error(one, other, smallest)) > most:
            raise NotSplittableError(
                trainer.model,
                f"its loss is not what is stated ({loss.source}): the gradient of {name} for {len(rows)} rows differs "
                f"by {error:.1e} from that of the rows alone",
                remedy="Leave loss= out: MicrobatchCallback() then cuts below the loss, whatever it is.",
            )


@contextmanager
def _undisturbed(trainer: Any, model: nn.Module) -> Iterator[None]:
    state, generators = StepState(trainer), RandomState.capture(trainer.args.device)
    with ExitStack() as stack:
        stack.callback(generators.restore)
        stack.callback(state.restore)
        stack.enter_context(trainer.accelerator.no_sync(model))
        stack.enter_context(override_method(trainer, "log", lambda before: lambda *args, **kwargs: None))
        for module in model.modules():
            for name in DROPOUTS:
                if isinstance(getattr(module, name, None), float):
                    stack.callback(set_attribute(module, name, 0.0).remove)
        yield


def _gradients(trainer: Any, model: nn.Module, batch: Mapping[str, Any], items: Any) -> list[torch.Tensor | None]:
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with trainer.compute_loss_context_manager():
        loss = trainer.compute_loss(model, send_to_device(dict(batch), trainer.args.device), num_items_in_batch=items)
    return list(torch.autograd.grad(loss, weights, allow_unused=True))


def _add(one: torch.Tensor | None, other: torch.Tensor | None, weight: float) -> torch.Tensor | None:
    if other is None:
        return one
    return other * weight if one is None else one.add_(other, alpha=weight)


def _is_narrow(trainer: Any, gradient: torch.Tensor | None) -> bool:
    return bool(trainer.args.bf16 or trainer.args.fp16 or (gradient is not None and gradient.element_size() < 4))


def _error(one: torch.Tensor | None, other: torch.Tensor | None, smallest: float) -> float:
    """Return the largest difference of two gradients in parts of the largest value, or of ``smallest``."""
    if one is None and other is None:
        return 0.0
    zero = torch.zeros_like(one if one is not None else other)  # type: ignore[arg-type]
    first, second = (zero if value is None else value for value in (one, other))
    largest = torch.maximum(first.abs().max(), second.abs().max())
    return float((first - second).abs().max() / largest.clamp(min=max(smallest, 1e-12)))
