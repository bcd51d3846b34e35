"""The meters of ``measure``: torch's counters on an accelerator, the storages of real operations on a CPU.

On a CPU torch counts no bytes, so the operations of the measured steps go through ``StorageTracker``: its bytes are
those that tensors hold, without the allocator's rounding and without what a kernel allocates inside itself. That slows
a step down; steps that are timed run without it.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack

import torch

from hf_memopt.devices.memory_reading import PeakMeter, measured_device, read_memory
from hf_memopt.memory.storage_tracker import StorageTracker

__all__ = ["StepMeter", "TrackedMeter", "meter_of"]


class StepMeter(PeakMeter):
    """Peaks span by span, and the bytes that are allocated now."""

    def begin(self, held: Iterable[torch.Tensor]) -> None:
        """Count from here; ``held`` are the tensors that are there already."""

    def end(self) -> None:
        """Stop counting: what remains of the run is timed."""

    def allocated_bytes(self) -> int:
        """Return the bytes that tensors hold now."""
        return read_memory(self.device).allocated_bytes or 0

    def synchronize(self) -> None:
        """Wait for the device."""
        torch.get_device_module(self.device).synchronize()


class TrackedMeter(StepMeter):
    """The same for a CPU, where every operation is looked at."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._tracker = StorageTracker(device_type="cpu", flops=False)
        self._on = ExitStack()
        self._seen = self._allocated_bytes = 0

    def begin(self, held: Iterable[torch.Tensor]) -> None:
        for tensor in held:
            self._tracker.add(tensor)
        self._on.callback(self._tracker.close)
        self._on.enter_context(self._tracker)

    def end(self) -> None:
        self._on.close()

    def read(self) -> dict[str, int]:
        """Return the peak since the last reading."""
        peak_bytes = self._allocated_bytes
        for _, delta in self._tracker.events[self._seen :]:
            self._allocated_bytes += delta
            peak_bytes = max(peak_bytes, self._allocated_bytes)
        self._seen = len(self._tracker.events)
        return {"peak_allocated_bytes": peak_bytes}

    def skip(self) -> None:
        self.read()

    def allocated_bytes(self) -> int:
        return self._allocated_bytes + sum(delta for _, delta in self._tracker.events[self._seen :])

    def synchronize(self) -> None:
        """Do nothing: the host waits for itself."""


def meter_of(device: torch.device) -> StepMeter:
    """Return the meter for a run on a device."""
    measured = measured_device(device)
    return TrackedMeter(measured) if measured.type == "cpu" else StepMeter(measured)
