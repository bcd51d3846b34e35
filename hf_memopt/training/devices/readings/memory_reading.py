"""Read the memory of an accelerator, of this process and of the host.

Only this file asks torch, NVML or psutil for bytes. ``read_memory`` is for display and logs; ``PeakMeter`` is
cheap enough for every step (``benchmarks/memory_report.py`` prints its cost). On Linux the peak of the process is
``VmHWM`` and not ``ru_maxrss``, although that is faster: ``ru_maxrss`` survives ``exec``, so a small child of a process
that once held 10 GiB would report 10 GiB.

Limitations: memory by component (that is an estimate, not a reading), accelerators other than CUDA, ROCm, XPU and MPS
(there the host is read), and the limit of a container: the host's total is psutil's.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import psutil
import torch

from hf_memopt.plain_data import shown
from hf_memopt.units import format_bytes

_COUNTED = ("cuda", "xpu")  # torch counts peaks there; ROCm calls itself cuda
_ACCELERATORS = (*_COUNTED, "mps")
PEAK, TOTAL = " (peak {})", " of {}"
_STATUS = re.compile(rb"^Vm(?:HWM|RSS):\s*(\d+) kB$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """The result of ``read_memory``. Bytes everywhere; None where the backend has no figure.

    ``allocated`` and ``reserved`` are torch's terms for this process: what tensors hold, and what its allocator holds
    (on MPS: what the Metal driver holds for the process). ``device_used_bytes`` is the whole device: all processes,
    contexts included. RSS is the memory of this process that is resident on the host.
    """

    device: str
    device_name: str
    rss_bytes: int
    peak_rss_bytes: int | None
    host_total_bytes: int
    host_available_bytes: int
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    device_total_bytes: int | None = None
    device_used_bytes: int | None = None

    @property
    def has_accelerator(self) -> bool:
        """Whether an accelerator was read, and not the host alone."""
        return self.device != "cpu"

    def table(self) -> str:
        """Return the reading as a table."""
        rows = []
        if self.has_accelerator:
            rows.append(("allocated by tensors", _shown(self.allocated_bytes, self.peak_allocated_bytes, PEAK)))
            rows.append(("reserved by torch", _shown(self.reserved_bytes, self.peak_reserved_bytes, PEAK)))
            rows.append(("used on the device", _shown(self.device_used_bytes, self.device_total_bytes, TOTAL)))
        rows.append(("process, resident", _shown(self.rss_bytes, self.peak_rss_bytes, PEAK)))
        rows.append(("host, available", _shown(self.host_available_bytes, self.host_total_bytes, TOTAL)))
        kind = "accelerator" if self.has_accelerator else "no accelerator, host memory only"
        return "\n".join(
            [f"{self.device} ({self.device_name}): {kind}", *(f"  {name:<22}{text}" for name, text in rows)]
        )

    def __str__(self) -> str:
        return self.table()


def _shown(size_bytes: int | None, most_bytes: int | None, words: str) -> str:
    text = "unavailable" if size_bytes is None else format_bytes(size_bytes)
    return text if most_bytes is None else text + words.format(format_bytes(most_bytes))


def read_memory(device: torch.device | str | int | None = None) -> MemoryReading:
    """Read the memory of a device, of this process and of the host now.

    ``read_memory("cpu")`` never touches an accelerator. For a CUDA device torch's runtime is initialised, since only it
    knows the GPU's UUID, but no context is created: where this process holds no memory on the GPU and NVML is missing,
    ``device_used_bytes`` stays None.

    Args:
        device: None for the accelerator's current device, or the host if there is none; an index for a device of that
            accelerator; otherwise as torch spells it.

    Raises:
        ValueError: the device does not exist here, or torch cannot read its memory.

    Examples:
        >>> reading = read_memory("cpu")
        >>> reading.device, reading.allocated_bytes, reading.rss_bytes > 0
        ('cpu', None, True)
    """
    found = _find_device(device)
    rss_bytes, peak_rss_bytes = read_process()
    host = psutil.virtual_memory()
    return MemoryReading(
        device=str(found),
        rss_bytes=rss_bytes,
        peak_rss_bytes=peak_rss_bytes,
        host_total_bytes=host.total,
        host_available_bytes=host.available,
        **_read_device(found),
    )


def measured_device(device: torch.device) -> torch.device:
    """Return the device whose memory is read for a run on ``device``: itself, or the host."""
    return _find_device(device) if device.type in _ACCELERATORS else torch.device("cpu")


# ---- the process


def read_process() -> tuple[int, int | None]:
    """Return the resident bytes of this process and their peak so far (None where the system has no figure)."""
    if sys.platform == "linux":
        with open("/proc/self/status", "rb", buffering=0) as status:
            figures = _STATUS.findall(status.read(8192))
        if len(figures) == 2:  # some sandboxes leave them out
            return int(figures[1]) * 1024, int(figures[0]) * 1024
    info = psutil.Process().memory_info()
    peak_bytes = getattr(info, "peak_wset", None)  # Windows
    return info.rss, _read_maxrss(sys.platform) if peak_bytes is None else peak_bytes


def _read_maxrss(system: str) -> int | None:
    """Return ``ru_maxrss`` in bytes: macOS counts it in bytes, Linux and the BSDs in KiB."""
    try:
        import resource
    except ImportError:
        return None
    maxrss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return maxrss if system == "darwin" else maxrss * 1024


# ---- the device


def _find_device(device: torch.device | str | int | None) -> torch.device:
    """Return the device with its index; see ``read_memory``."""
    kind, index = "", None
    if device is None or type(device) is int:
        none = "cpu" if device is None else ""
        kind, index = next((kind for kind in _ACCELERATORS if _device_count(kind)), none), device
    elif isinstance(device, str | torch.device):
        with suppress(RuntimeError):  # what torch does not understand either
            parsed = torch.device(device)
            kind, index = parsed.type, parsed.index
    if kind == "cpu":
        return torch.device("cpu")
    if kind in _ACCELERATORS:
        if index is None:
            module = getattr(torch, kind)
            index = int(module.current_device()) if kind in _COUNTED and module.is_initialized() else 0
        if 0 <= index < _device_count(kind):
            return torch.device(kind, index)
    known = ["cpu", *(f"{kind}:{index}" for kind in _ACCELERATORS for index in range(_device_count(kind)))]
    raise ValueError(
        f"device={shown(device)} is not a device whose memory can be read here; expected None, the index of an "
        f"accelerator or one of: {', '.join(known)}. Call read_memory() for the current accelerator, else the host."
    )


def _device_count(kind: str) -> int:
    if kind == "mps":
        return int(torch.backends.mps.is_available())
    module = getattr(torch, kind)
    return int(module.device_count()) if module.is_available() else 0


def _read_device(device: torch.device) -> dict[str, Any]:
    """Return the fields of a ``MemoryReading`` that concern ``device``."""
    if device.type == "cpu":
        return {"device_name": platform.processor() or platform.machine()}
    if device.type == "mps":
        return {
            "device_name": getattr(torch.backends.mps, "get_name", lambda: "Apple GPU")(),  # since torch 2.9
            "allocated_bytes": torch.mps.current_allocated_memory(),
            "reserved_bytes": torch.mps.driver_allocated_memory(),
            "device_total_bytes": torch.mps.recommended_max_memory(),
        }
    properties = getattr(torch, device.type).get_device_properties(device)
    stats = _allocator_stats(device)
    return {
        "device_name": properties.name,
        "allocated_bytes": stats["allocated_bytes"]["current"],
        "reserved_bytes": stats["reserved_bytes"]["current"],
        "peak_allocated_bytes": stats["allocated_bytes"]["peak"],
        "peak_reserved_bytes": stats["reserved_bytes"]["peak"],
        "device_total_bytes": properties.total_memory,
        "device_used_bytes": read_device_used(device),
    }


def _allocator_stats(device: torch.device) -> dict[str, dict[str, int]]:
    """Return current and peak of allocated and reserved bytes by one call; zeros before the allocator's first use.

    The nested form is the one that torch gets from C++; ``memory_stats`` flattens and sorts all its entries on top, and
    so does each of the four wrappers (``memory_allocated`` and so on).
    """
    nested = getattr(torch, device.type).memory_stats_as_nested_dict(device.index)
    unused = {"all": {"current": 0, "peak": 0}}
    return {name: nested.get(name, unused)["all"] for name in ("allocated_bytes", "reserved_bytes")}


def read_device_used(device: torch.device) -> int | None:
    """Return the bytes in use on the whole GPU, by all processes and contexts included, or None where unavailable.

    NVML is asked first, since it needs no context; then the driver, if this process holds memory on the GPU and so
    already has its context there. On MPS and on the host there is no such figure.
    """
    if device.type not in _COUNTED:
        return None
    if device.type == "cuda" and torch.version.hip is None:
        used_bytes = _ask_nvml(device, lambda pynvml, handle: pynvml.nvmlDeviceGetMemoryInfo(handle).used)
        if used_bytes is not None:
            return used_bytes
    if not _allocator_stats(device)["reserved_bytes"]["current"]:
        return None
    try:
        free_bytes, total_bytes = getattr(torch, device.type).mem_get_info(device)
    except RuntimeError:  # XPU drivers without free-memory counters
        return None
    return int(total_bytes - free_bytes)


def read_context(device: torch.device) -> int | None:
    """Return what this process holds on a CUDA device besides torch's allocator, or None where unavailable.

    That is the CUDA context, the kernels loaded so far, the handles of the libraries and what else is
    allocated outside torch (NCCL, paged optimizers). CUDA loads kernels when they first run, so the figure of a process
    that has not trained yet is a lower bound. No context is created.

    NVML reports it by process id. It does not for a process that has no context yet, in a container with its own
    process ids, or on Windows.
    """
    if device.type != "cuda" or torch.version.hip is not None or not getattr(torch, device.type).is_initialized():
        return None

    def held(pynvml: Any, handle: Any) -> int:
        own = [entry for entry in pynvml.nvmlDeviceGetComputeRunningProcesses(handle) if entry.pid == os.getpid()]
        return sum(entry.usedGpuMemory for entry in own)  # None where NVML has no figures by process

    held_bytes, reserved_bytes = _ask_nvml(device, held), _allocator_stats(device)["reserved_bytes"]["current"]
    # less than torch holds: the id is that of another process, in the namespace of the host
    return None if held_bytes is None or held_bytes <= reserved_bytes else held_bytes - reserved_bytes


def _ask_nvml(device: torch.device, question: Callable[[Any, Any], int]) -> int | None:
    handle = nvml_handle(device)
    if handle is None:
        return None
    try:
        import pynvml

        return int(question(pynvml, handle))
    except Exception:  # a driver that fails must not stop a training run
        return None


def nvml_handle(device: torch.device) -> Any:
    """Return NVML's handle of a CUDA device, or None where NVML does not know it; no context is created."""
    return _nvml_handle(str(torch.cuda.get_device_properties(device).uuid))


@cache
def _nvml_handle(uuid: str) -> Any:
    """Return NVML's handle of a GPU, or None.

    By UUID, never by index: ``CUDA_VISIBLE_DEVICES`` and ``CUDA_DEVICE_ORDER`` renumber torch's devices, not NVML's.
    A GPU that is split (MIG) has no figures for one of its slices.
    """
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # not installed, no NVIDIA driver, or one of another version: there is no figure then
        return None
    with suppress(pynvml.NVMLError):
        return pynvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")
    with suppress(pynvml.NVMLError):
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        return None if _is_split(pynvml, handle) else handle
    return None


def _is_split(pynvml: Any, handle: Any) -> bool:
    with suppress(pynvml.NVMLError):  # of GPUs that cannot be split
        return bool(pynvml.nvmlDeviceGetMigMode(handle)[0] == pynvml.NVML_DEVICE_MIG_ENABLE)
    return False


# ---- every step


class PeakMeter:
    """The peaks of one device, span by span: ``read`` ends a span, returns its peaks and begins the next.

    On CUDA, ROCm and XPU these are the allocator's own peaks, host-side counters that need no synchronisation; reading
    them **resets torch's peak counters**. MPS has no peaks: what is read is a sample. On the host the
    peak of the process cannot be reset: a span in which it rose has exactly that peak; for any other span the
    resident bytes at its end are given, a lower bound.

    The first span began with the process (or with the last reset of the counters).
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._peak_rss_bytes = 0

    @property
    def only_samples(self) -> bool:
        """Whether a reading is only a sample, so that more readings see more."""
        return self.device.type == "mps"

    def read(self) -> dict[str, int]:
        """Return the peaks of the span that ends now, by kind: ``peak_allocated_bytes``, ``rss_bytes`` and so on."""
        if self.device.type in _COUNTED:
            stats = _allocator_stats(self.device)
            self.skip()
            return {
                "peak_allocated_bytes": stats["allocated_bytes"]["peak"],
                "peak_reserved_bytes": stats["reserved_bytes"]["peak"],
            }
        if self.device.type == "mps":
            return {
                "allocated_bytes": torch.mps.current_allocated_memory(),
                "reserved_bytes": torch.mps.driver_allocated_memory(),
            }
        rss_bytes, peak_bytes = read_process()
        rose = peak_bytes is not None and peak_bytes > self._peak_rss_bytes
        self._peak_rss_bytes = peak_bytes or 0
        return {"rss_bytes": self._peak_rss_bytes if rose else rss_bytes}

    def skip(self) -> None:
        """Begin the next span without a reading."""
        if self.device.type in _COUNTED:
            module = getattr(torch, self.device.type)
            if module.is_initialized():
                module.reset_peak_memory_stats(self.device.index)
        elif self.device.type == "cpu":
            self._peak_rss_bytes = read_process()[1] or 0
