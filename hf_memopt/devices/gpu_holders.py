"""Read how much of a GPU's memory is free, and which processes hold the rest.

NVML knows both for NVIDIA GPUs and needs no CUDA context. Limitations: on Windows it lists processes without their
bytes, and in a container those of the host may be missing or nameless.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from hf_memopt.devices.memory_reading import nvml_handle
from hf_memopt.units import format_bytes

__all__ = ["GpuUse", "Holder", "read_gpu_use"]


@dataclass(frozen=True, slots=True)
class Holder:
    """Another process on a GPU; ``held_bytes`` is None where the driver does not tell."""

    pid: int
    name: str
    held_bytes: int | None

    def __str__(self) -> str:
        size = "an unknown amount" if self.held_bytes is None else format_bytes(self.held_bytes)
        return f"{self.name} (process {self.pid}) {size}"


@dataclass(frozen=True, slots=True)
class GpuUse:
    """Bytes of a GPU that no process holds, all bytes that it has, and the other processes, largest first."""

    free_bytes: int
    total_bytes: int
    holders: tuple[Holder, ...]


def read_gpu_use(device: torch.device) -> GpuUse | None:
    """Return how a CUDA device is used now, or None where NVML is missing, fails or does not know the device."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    handle = nvml_handle(device)
    if handle is None:
        return None
    try:
        import pynvml

        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        return GpuUse(int(memory.free), int(memory.total), _holders(pynvml, handle))
    except Exception:  # a driver that fails leaves nothing to report
        return None


def _holders(pynvml: Any, handle: Any) -> tuple[Holder, ...]:
    found: dict[int, Holder] = {}
    for list_processes in (pynvml.nvmlDeviceGetComputeRunningProcesses, pynvml.nvmlDeviceGetGraphicsRunningProcesses):
        try:
            entries = list_processes(handle)
        except pynvml.NVMLError:  # GPUs that do not draw have no list of those that do
            continue
        for entry in entries:
            if entry.pid != os.getpid():
                held = None if entry.usedGpuMemory is None else int(entry.usedGpuMemory)
                found[entry.pid] = Holder(entry.pid, _name_of(entry.pid), held)
    return tuple(sorted(found.values(), key=lambda holder: -(holder.held_bytes or 0)))


def _name_of(pid: int) -> str:
    try:
        return str(psutil.Process(pid).name())
    except psutil.Error:  # of another user, or outside this container
        return "a process outside this container or of another user"
