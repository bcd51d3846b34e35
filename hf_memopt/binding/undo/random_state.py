"""Save the random number generators that a training step draws from, and restore them to repeat the step."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class RandomState:
    """The state of the random number generators that a training step can draw from.

    These are torch's for the host and for one device (dropout), numpy's (the masks of Wav2Vec2, BigBird's attention)
    and Python's (a user's own loss). Other devices are not read, since that would initialise CUDA on them.
    """

    device: torch.device
    host: torch.Tensor
    accelerator: torch.Tensor | None
    numpy: Any
    python: Any

    @classmethod
    def capture(cls, device: torch.device) -> RandomState:
        """Read the generators of the host and of ``device``."""
        accelerator = None
        if device.type != "cpu":
            module = torch.get_device_module(device)
            accelerator = module.get_rng_state(*_arguments(device))
        return cls(device, torch.get_rng_state(), accelerator, np.random.get_state(legacy=False), random.getstate())

    def is_same(self, other: RandomState) -> bool:
        """Return whether nothing was drawn between two readings."""
        pairs = ((self.host, other.host), (self.accelerator, other.accelerator))
        return (
            all(one is other or torch.equal(one, other) for one, other in pairs)  # type: ignore[arg-type]
            and self.python == other.python
            and repr(self.numpy) == repr(other.numpy)
        )

    def restore(self) -> None:
        """Set the generators to the saved state, as often as needed."""
        torch.set_rng_state(self.host)
        if self.accelerator is not None:
            module = torch.get_device_module(self.device)
            module.set_rng_state(self.accelerator, *_arguments(self.device))
        np.random.set_state(self.numpy)
        random.setstate(self.python)


def _arguments(device: torch.device) -> tuple[torch.device, ...]:
    return () if device.type == "mps" else (device,)  # MPS has one device and takes no argument
