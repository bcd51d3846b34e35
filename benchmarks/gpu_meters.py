"""What ``gpu_case.py`` measures with: torch's counters on the GPU, its profiler on the host, the driver, and the bytes
of tensors by walking them.
"""

from __future__ import annotations

import gc
import itertools
import json
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Figures = dict[str, Any]


def ask_driver(field: str, uuid: str | None) -> str | None:
    """Return what ``nvidia-smi`` tells of the GPU, or None where there is none that does."""
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    command += ["-i", f"GPU-{uuid}"] if uuid else []
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def device_used_bytes(uuid: str | None) -> int | None:
    """Return the bytes in use on the GPU by all processes, without making a context; None where nobody tells.

    By UUID, since ``CUDA_VISIBLE_DEVICES`` renumbers torch's devices and not the driver's.
    """
    answer = ask_driver("memory.used", uuid)
    return int(answer.split()[0]) * 2**20 if answer and answer.split()[0].isdigit() else None


class GpuMeter:
    """torch's own counters of the allocator on the GPU."""

    source = "torch.cuda and the driver"

    def __init__(self, uuid: str | None) -> None:
        self.uuid = uuid
        self.before_bytes = device_used_bytes(uuid)  # before the context

    def make_context(self) -> int | None:
        """Run a first kernel and return the bytes of the context, as the driver counts them."""
        import torch

        torch.zeros(1, device="cuda").add_(1)
        self.synchronise()
        used_bytes = self._own_bytes()
        return None if used_bytes is None else used_bytes - torch.cuda.memory_reserved()

    def _own_bytes(self) -> int | None:
        used_bytes = device_used_bytes(self.uuid)
        return None if used_bytes is None or self.before_bytes is None else used_bytes - self.before_bytes

    def begin(self, model: Any) -> None:
        """Give unused blocks back, and count from here: ``model`` is on the host yet."""
        import torch

        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    def synchronise(self) -> None:
        """Wait for the GPU."""
        import torch

        torch.cuda.synchronize()

    def end(self) -> Figures:
        """Return the figures of the run. What was reserved at its peak and given back since counts as in use."""
        import torch

        self.synchronise()
        own_bytes, reserved_bytes = self._own_bytes(), torch.cuda.memory_reserved()
        peak_bytes = torch.cuda.max_memory_reserved()
        return {
            "allocated_bytes": torch.cuda.max_memory_allocated(),
            "reserved_bytes": peak_bytes,
            "device_bytes": None if own_bytes is None else own_bytes + peak_bytes - reserved_bytes,
            "context_end_bytes": None if own_bytes is None else own_bytes - reserved_bytes,
        }


class HostMeter:
    """torch's allocator on the host, by its profiler. It reserves nothing and has no context.

    What was allocated before the run (the weights) is not in the profiler's count and is added to it.
    """

    source = "torch's allocator on the host, by its profiler"

    def __init__(self) -> None:
        self.model_bytes = 0
        self.profile: Any = None

    def make_context(self) -> int | None:
        """Return None: the host has no context."""
        return None

    def begin(self, model: Any) -> None:
        """Count from here."""
        import torch

        gc.collect()
        self.model_bytes = storage_bytes([*model.parameters(), *model.buffers()], "cpu")
        self.profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
        self.profile.start()

    def synchronise(self) -> None:
        """Do nothing: the host waits for itself."""

    def end(self) -> Figures:
        """Return the figures of the run."""
        self.profile.stop()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            self.profile.export_chrome_trace(str(path))
            events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        memory = [event for event in events if event.get("name") == "[memory]"]
        changes = [event["args"]["Bytes"] for event in sorted(memory, key=lambda event: event["ts"])]
        peak_bytes = max(itertools.accumulate(changes), default=0)
        return {"allocated_bytes": self.model_bytes + peak_bytes, "without": ["workspace"]}


def storage_bytes(tensors: Iterable[Any], device: str) -> int:
    """Return the bytes of tensors on a type of device, shared storages once."""
    held = [tensor.untyped_storage() for tensor in tensors if tensor.device.type == device]
    return sum({storage.data_ptr(): storage.nbytes() for storage in held}.values())


def state_tensors(state: Any) -> list[Any]:
    """Return every tensor in an optimizer's state, however deep."""
    from torch.utils._pytree import tree_leaves

    return [leaf for leaf in tree_leaves(state) if hasattr(leaf, "untyped_storage")]
