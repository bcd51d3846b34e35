"""Read how an optimizer step went in one host sync, and decide whether it is to be dropped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["MOST_SKIPS", "SMALLEST_SCALE", "StepReading", "is_poisoned", "read_step"]

MOST_SKIPS = 10
"""So many steps skipped in a row are no search for a loss scale any more: from its start, 65,536, it has come to 64."""

SMALLEST_SCALE = 1.0
"""Below it a loss is made smaller, not larger, and torch too says that something is likely wrong (``GradScaler``)."""


@dataclass(frozen=True, slots=True)
class StepReading:
    """What the one host sync of an optimizer step brings; the same in all processes but for ``is_loss_bad``.

    Args:
        is_loss_bad: for each micro-batch of this process, whether its loss was not finite.
        is_any_loss_bad: the same for all micro-batches of all processes.
        is_norm_bad: whether the gradient norm was not finite.
        loss_scale: fp16's, with which the step was computed; None without a gradient scaler.
    """

    is_loss_bad: tuple[bool, ...]
    is_any_loss_bad: bool
    is_norm_bad: bool
    loss_scale: float | None

    @property
    def is_skipped(self) -> bool:
        """Whether the gradient scaler skips this step by itself."""
        return self.loss_scale is not None and self.is_norm_bad


def read_step(is_loss_bad: Sequence[torch.Tensor], norm: Any, accelerator: Any) -> StepReading:
    """Read the flags of a step, the gradient norm and the loss scale in one transfer from the device.

    Args:
        is_loss_bad: one 0-dimensional bool tensor per micro-batch, on the device.
        norm: what ``accelerator.clip_grad_norm_`` returned; None where it was not called.
        accelerator: shares the flags with the other processes, on the device, and has the gradient scaler.
    """
    here = torch.stack(list(is_loss_bad)).float()
    is_norm_bad = ~torch.isfinite(torch.as_tensor(0.0 if norm is None else norm, device=here.device))
    shared = torch.stack([here.sum(), is_norm_bad.float()])
    if accelerator.num_processes > 1:
        shared = accelerator.reduce(shared, reduction="sum")
    # the scale itself is not public, and get_scale() would be a second sync
    scale = None if accelerator.scaler is None else accelerator.scaler.scale(torch.ones(1, device=here.device))
    values = torch.cat([shared, here] if scale is None else [shared, here, scale]).tolist()
    flags = values[2 : 2 + len(is_loss_bad)]
    return StepReading(
        tuple(flag > 0 for flag in flags), values[0] > 0, values[1] > 0, None if scale is None else values[-1]
    )


def is_poisoned(reading: StepReading, skips_in_a_row: int) -> bool:
    """Tell whether a step is to be dropped and looked into.

    Every step whose losses or gradients are not finite is; but not one that a gradient scaler skips while it looks for
    its scale, i.e. not before ``MOST_SKIPS`` in a row (this one included) or a scale below ``SMALLEST_SCALE``.

    Example:
        >>> search = StepReading((False,), False, True, 65536.0)
        >>> is_poisoned(search, skips_in_a_row=1), is_poisoned(search, skips_in_a_row=10)
        (False, True)
    """
    if reading.is_any_loss_bad or reading.loss_scale is None:
        return reading.is_any_loss_bad or reading.is_norm_bad
    return reading.is_norm_bad and (skips_in_a_row >= MOST_SKIPS or reading.loss_scale < SMALLEST_SCALE)
