"""Which layers stay on the device, and how many of them a GPU has room for beside a training that was measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hf_memopt.components import MARGIN_SHARE
from hf_memopt.plain_data import shown
from hf_memopt.training.binding import versions
from hf_memopt.training.devices.readings import MemoryReading, read_memory

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from hf_memopt.training.techniques.streaming.layer import StreamedLayer
    from hf_memopt.training.techniques.streaming.ring import Ring

MEASURED_STEPS = 2  # the first makes the optimizer's state
_MOVABLE = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)


def layers_that_wait(layers: Sequence[Any], resident: int) -> list[Any]:
    """Return the layers that wait, spread evenly over those that stay.

    The next one is fetched while one computes, and so do all between them: a copy has as much compute to hide behind
    as there is. With the last layers resident, the others would wait for copies.

    Examples:
        >>> layers_that_wait("abcdefgh", 5)
        ['c', 'f', 'h']
    """
    every, count = len(layers), len(layers) - resident
    return [layer for i, layer in enumerate(layers) if (i + 1) * count // every > i * count // every]


def check_resident(resident: int | str, layers: Sequence[Any], device: torch.device) -> None:
    """Refuse more layers than there are, and a measurement without a GPU."""
    if resident == "auto":
        if device.type == "meta" or read_memory(device).peak_reserved_bytes is None:
            raise ValueError(
                f"resident='auto' measures what is free on a GPU, and this model computes on {device}; expected a GPU, "
                "or a number of layers. Pass resident=0"
            )
    elif int(resident) > len(layers):
        raise ValueError(
            f"resident={shown(resident)} is more than the model has, {len(layers)} layers; expected 0 to "
            f"{len(layers)}. Pass resident={len(layers)}"
        )


def check_measurable(ring: Ring, args: TrainingArguments, optimizer: Any) -> None:
    """Refuse a run of which two steps do not say what a layer needs that stays."""
    problem, fix = "", "Pass resident=1, and more while it fits"
    is_recomputed, options = versions.checkpointing_of(args)
    if not is_recomputed or options.get("every_n_layers", 1) > 1:
        problem = "layers that stay would keep their activations, and those that are streamed are recomputed"
        fix = f"Set {next(iter(versions.checkpointing_arguments()))}=True, or pass resident=1"
    elif any(layer.carriers for layer in ring.layers):
        problem = "quantised weights would have to move in the middle of a run"
    elif getattr(optimizer, "is_paged", False) or not isinstance(optimizer, _MOVABLE):
        problem = f"the state of <{type(optimizer).__name__}> would have to move in the middle of a run"
    if problem:
        raise ValueError(
            f"resident='auto' cannot be used here: {problem}; expected a number of layers, or a run in which two steps "
            f"say what a layer needs that stays. {fix}"
        )


def most_resident(ring: Ring, args: TrainingArguments, optimizer: Any) -> tuple[int, int]:
    """Return how many layers fit, all of which are streamed now, and the bytes that are free beside the peak so far."""
    free_bytes = _free_bytes(read_memory(ring.lanes.device))
    needs = {layer: _bytes_of(layer, args, optimizer, is_released=ring.steps is not None) for layer in ring.layers}
    for resident in range(len(needs), 0, -1):
        away = {*layers_that_wait(ring.layers, resident)}
        spared = ring.prefetch + 1 - len(away)  # layers of which no copies are on the device any more
        least = min(sum(parameter.nbytes for parameter in layer.parameters) for layer in ring.layers)
        if sum(size for layer, size in needs.items() if layer not in away) - max(spared, 0) * least <= free_bytes:
            return resident, free_bytes
    return 0, free_bytes


def move_state(optimizer: Any, model: nn.Module) -> None:
    """Move the optimizer's state to where its parameters are; counters stay where stock keeps them."""
    for group in optimizer.param_groups:
        is_counted_there = bool(group.get("fused") or group.get("capturable"))
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            for name, value in state.items():
                if torch.is_tensor(value) and (value.dim() or is_counted_there):
                    state[name] = value.to(parameter.device)


def _free_bytes(reading: MemoryReading) -> int:
    """Return what is free on the GPU less what the peak needs beyond now, and less the margin."""
    total_bytes, reserved_bytes = reading.device_total_bytes or 0, reading.reserved_bytes or 0
    used_bytes = reading.device_used_bytes or total_bytes
    return (
        total_bytes - used_bytes - ((reading.peak_reserved_bytes or 0) - reserved_bytes) - total_bytes // MARGIN_SHARE
    )


def _bytes_of(layer: StreamedLayer, args: TrainingArguments, optimizer: Any, *, is_released: bool) -> int:
    """Return what a layer takes that stays: weights, gradients, state, and what stock keeps beside them."""
    is_cast = versions.mixed_precision(args) != "no"
    size_bytes = 0
    for parameter in layer.parameters:
        size_bytes += parameter.nbytes
        if parameter.requires_grad:
            state = optimizer.state.get(parameter, {}).values()
            size_bytes += sum(value.nbytes for value in state if torch.is_tensor(value))
            size_bytes += 0 if is_released else 2 * parameter.nbytes  # the gradient, and a temporary of the step
            # autocast keeps a copy of each for the forward pass
            size_bytes += 2 * parameter.numel() if is_cast and parameter.itemsize > 2 else 0
    return size_bytes
