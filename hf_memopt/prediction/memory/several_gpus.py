"""What an estimate says where several GPUs train, as it is for one: DDP's gradient buckets, and what counts them all.

Formula:
    DDP copies the gradient of every trainable parameter into buckets that it holds from the start, beside the gradients
    (``gradient_as_bucket_view`` is False, as accelerate leaves it): as many bytes as all gradients.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from hf_memopt.notices import quoted
from hf_memopt.training.devices import GPUS
from hf_memopt.units import format_bytes

if TYPE_CHECKING:
    from hf_memopt.prediction.memory.result import Estimate

FOR_ONE_GPU = "for one GPU"  # how the note begins


def launched(*, counts_gpus: bool) -> tuple[int, str]:
    """Return the processes that ``torchrun`` or ``accelerate launch`` started, and what the latter's file switches on.

    That is "deepspeed", "fsdp", or "" for neither. In one process, if asked for, the GPUs that it sees are counted.
    """
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count <= 1:
        return (torch.cuda.device_count() if counts_gpus else 1), ""
    engines = (name for name in ("deepspeed", "fsdp") if os.environ.get(f"ACCELERATE_USE_{name.upper()}") == "true")
    return count, next(engines, "")


def notes_for_one_gpu(found: Estimate, processes: int, engine: str = "") -> tuple[str, ...]:
    """Return the note of an estimate for one of several processes, or for one GPU of an engine; nothing without."""
    if processes <= 1 and not engine:
        return ()
    count = max(processes, 2)
    name = found.gpu.name if found.gpu is not None and found.gpu.name in GPUS else "NAME"
    command = f"hf-memopt rehearse --gpus {count} --gpu {quoted(name)} train.py"
    if engine == "deepspeed":
        return (
            f"{FOR_ONE_GPU} without DeepSpeed's sharding: hf-memopt rehearse --gpus {count} counts DDP and FSDP2, not "
            "DeepSpeed, whose memory MemoryReportCallback reports of a real run",
        )
    if engine:
        return (f"{FOR_ONE_GPU} without FSDP's sharding, which is counted by: {command}",)
    buckets, whole = format_bytes(found.gradient_bytes), format_bytes(found.total_bytes + found.gradient_bytes)
    return (
        f"{FOR_ONE_GPU}; under DDP each of {count} holds gradient buckets of {buckets} besides, about {whole} in all. "
        f"To count everything: {command}",
    )
