"""Cut an effective batch over processes, accumulation steps and devices without changing it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from hf_memopt.changes import Change
from hf_memopt.plain_data import Count, check_value

BATCH_NAMES = ("per_device_train_batch_size", "gradient_accumulation_steps")


def cut_effective_batch(
    effective: int, preferred: tuple[int, int], overrides: Mapping[str, Any], *, processes: int | None = None
) -> tuple[dict[str, int], Change | None]:
    """Return ``per_device_train_batch_size`` and ``gradient_accumulation_steps`` for an effective batch.

    What ``overrides`` give of the two stays, and the other follows; without either, the largest batch per device that
    divides this process's share and is not above the preferred one.

    Raises:
        ValueError: a size that is not an integer of 1 or more, or sizes that do not divide the effective batch.
    """
    counted_by = "WORLD_SIZE" if processes is None else "world_size"
    processes = process_count() if processes is None else processes
    per_device, steps = given = tuple(overrides.get(name) for name in BATCH_NAMES)
    check_value("effective_batch_size", effective, Count, 32)
    for name, value in zip(BATCH_NAMES, given, strict=True):
        if value is not None:
            check_value(name, value, Count, 8)
    if per_device is not None and steps is not None:
        if per_device * steps * processes != effective:
            raise ValueError(
                f"per_device_train_batch_size={per_device}, gradient_accumulation_steps={steps} make "
                f"{per_device * steps * processes} examples per step on {_named(processes)}; expected the "
                f"effective batch of {effective}. Give one of the two, or effective_batch_size="
                f"{per_device * steps * processes}"
            )
    elif per_device is not None:
        steps = _share(effective, per_device * processes, "per_device_train_batch_size", per_device, processes)
    elif steps is not None:
        per_device = _share(effective, steps * processes, "gradient_accumulation_steps", steps, processes)
    else:
        share = _share(effective, processes, counted_by, processes, processes)
        per_device = largest_divisor(share, preferred[0])
        steps = share // per_device
    batch = dict(zip(BATCH_NAMES, (per_device, steps), strict=True))
    if (per_device, steps) == preferred:
        return batch, None
    reason = f"keeps {effective} examples per optimizer step on {_named(processes)}"
    return batch, Change(" x ".join(BATCH_NAMES), preferred, (per_device, steps), reason)


def process_count() -> int:
    """Return the number of processes of this run, as torchrun gives it in ``WORLD_SIZE``."""
    text = os.environ.get("WORLD_SIZE", "1")
    value = int(text) if text.isascii() and text.isdigit() else text
    check_value("WORLD_SIZE", value, Count, 1)
    return int(value)


def largest_divisor(number: int, most: int) -> int:
    """Return the largest divisor of ``number`` that is not above ``most``."""
    return max(part for part in range(1, min(number, most) + 1) if number % part == 0)


def _share(effective: int, divisor: int, name: str, value: int, processes: int) -> int:
    if effective % divisor != 0:
        fitting = f"effective_batch_size={divisor * max(1, round(effective / divisor))}"
        action = f"Call recipe.replace({fitting}).distributed(...)" if name == "world_size" else f"Pass {fitting}"
        raise ValueError(
            f"{name}={value} on {_named(processes)} does not divide the effective batch of {effective}; expected a "
            f"divisor. {action}"
        )
    return effective // divisor


def _named(processes: int) -> str:
    return "1 process" if processes == 1 else f"{processes} processes"
