"""Whether one optimizer step was finite: its flags, read from the device in one transfer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["StepReading", "is_nonfinite", "read_step"]

MOST_SKIPS = 10
"""So many skipped steps in a row are not the usual search for a loss scale, which goes from 65,536 to 64 in them."""

SMALLEST_SCALE = 1.0
"""A smaller loss scale makes the loss smaller, not larger; ``GradScaler`` too says that something is likely wrong."""


@dataclass(frozen=True, slots=True)
class StepReading:
    """The flags of an optimizer step; the same in all processes except for ``is_loss_bad``.

    Args:
        is_loss_bad: for each accumulation step of this process, whether its loss was not finite.
        is_any_loss_bad: whether any loss of any process was not finite.
        is_norm_bad: whether the gradient norm was not finite.
        loss_scale: of fp16, with which the step was computed; None without a gradient scaler.
    """

    is_loss_bad: tuple[bool, ...]
    is_any_loss_bad: bool
    is_norm_bad: bool
    loss_scale: float | None

    @property
    def is_skipped(self) -> bool:
        """Whether the gradient scaler skips this step by itself."""
        return self.loss_scale is not None and self.is_norm_bad


def read_step(is_loss_bad: Sequence[torch.Tensor], norm: torch.Tensor | float | None, accelerator: Any) -> StepReading:
    """Read the flags of a step, the gradient norm and the loss scale in one transfer from the device.

    Args:
        is_loss_bad: one 0-dimensional bool tensor for each accumulation step, on the device.
        norm: what ``accelerator.clip_grad_norm_`` returned; None if it was not called.
        accelerator: shares the flags with the other processes, on the device, and has the gradient scaler.
    """
    here = torch.stack(list(is_loss_bad)).float()  # (accumulation steps,)
    if norm is not None and hasattr(norm, "full_tensor"):  # under FSDP2 each process has a part of it
        norm = norm.full_tensor()
    is_norm_bad = ~torch.isfinite(torch.as_tensor(0.0 if norm is None else norm, device=here.device))
    shared = torch.stack([here.sum(), is_norm_bad.float()])  # (2,)
    if accelerator.num_processes > 1:
        shared = accelerator.reduce(shared, reduction="sum")
    # the scale itself is not public, and get_scale() would be a second wait for the device
    scale = None if accelerator.scaler is None else accelerator.scaler.scale(torch.ones(1, device=here.device))
    values = torch.cat([shared, here] if scale is None else [shared, here, scale]).tolist()
    flags = values[2 : 2 + len(is_loss_bad)]
    return StepReading(
        tuple(flag > 0 for flag in flags), values[0] > 0, values[1] > 0, None if scale is None else values[-1]
    )


def is_nonfinite(reading: StepReading, skips_in_a_row: int) -> bool:
    """Return whether a step has to be dropped and examined.

    That is every step whose losses or gradients are not finite, except for one that a gradient scaler skips while it
    searches for its scale: up to ``MOST_SKIPS`` - 1 in a row, as long as the scale is not below ``SMALLEST_SCALE``.

    Examples:
        >>> search = StepReading((False,), False, True, 65536.0)
        >>> is_nonfinite(search, skips_in_a_row=1), is_nonfinite(search, skips_in_a_row=10)
        (False, True)
    """
    if reading.is_any_loss_bad or reading.loss_scale is None:
        return reading.is_any_loss_bad or reading.is_norm_bad
    return reading.is_norm_bad and (skips_in_a_row >= MOST_SKIPS or reading.loss_scale < SMALLEST_SCALE)
