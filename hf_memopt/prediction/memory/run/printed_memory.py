"""Print what is in use now in one line, and time and memory of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_memopt.plain_data import shown
from hf_memopt.training.devices.readings import MemoryReading, read_memory
from hf_memopt.units import format_bytes

if TYPE_CHECKING:
    import torch
    from transformers.trainer_utils import TrainOutput


def print_gpu_utilization(device: torch.device | str | int | None = None) -> None:
    """Print the memory in use now, on the whole GPU and by this process, in one line.

    Without an accelerator it prints the host's memory and says so. ``device`` is as in ``read_memory``.

    Raises:
        ValueError: ``device`` does not exist.
    """
    print(_utilization(read_memory(device)))


def print_summary(result: TrainOutput, device: torch.device | str | int | None = None) -> None:
    """Print time, samples per second and memory of a run; ``result`` is what ``trainer.train()`` returned.

    With a ``MemoryReportCallback`` the peaks of each phase are printed too, then the memory in use now.

    Raises:
        ValueError: ``result`` is not the result of a training run, or ``device`` does not exist.
    """
    metrics = getattr(result, "metrics", None)
    if not isinstance(metrics, dict) or "train_runtime" not in metrics:
        raise ValueError(
            f"result={shown(result)} has no train_runtime; expected what trainer.train() returned. "
            "Call print_summary(trainer.train())."
        )
    utilization = _utilization(read_memory(device))
    print(f"Time: {metrics['train_runtime']:.2f} s")
    if "train_samples_per_second" in metrics:
        print(f"Samples/second: {metrics['train_samples_per_second']:.2f}")
    for key, value in metrics.items():
        if key.startswith("train_memory_"):
            print(f"{key.removeprefix('train_memory_').removesuffix('_gib').replace('_', ' ')}: {value:.3f} GiB")
    print(utilization)


def _utilization(reading: MemoryReading) -> str:
    if not reading.has_accelerator:
        peak = "" if reading.peak_rss_bytes is None else f" (peak {format_bytes(reading.peak_rss_bytes)})"
        return (
            f"Host memory, no accelerator: this process {format_bytes(reading.rss_bytes)}{peak}, "
            f"{format_bytes(reading.host_available_bytes)} of {format_bytes(reading.host_total_bytes)} available"
        )
    if reading.device_used_bytes is None:
        used = "use by all processes unavailable"
    else:
        used = f"{format_bytes(reading.device_used_bytes)} in use by all processes"
    total = "" if reading.device_total_bytes is None else f" of {format_bytes(reading.device_total_bytes)}"
    allocated, reserved = format_bytes(reading.allocated_bytes or 0), format_bytes(reading.reserved_bytes or 0)
    device_name = f"{reading.device} ({reading.device_name})"
    return f"{device_name}: {used}{total}; torch here: {allocated} allocated, {reserved} reserved"
