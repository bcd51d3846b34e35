"""What streamed layers copy between the GPU and its host, and how much of it the computing does not hide."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hf_memopt.prediction.memory.optimizers import optimizer_memory

if TYPE_CHECKING:
    from hf_memopt.prediction.memory.recording import HostWeights
    from hf_memopt.prediction.memory.settings import StepSettings

HOST_BYTES_PER_SECOND = 20e9


@dataclass(frozen=True)
class Streaming:
    """The copies of an optimizer step whose layers wait in host memory.

    Compute, copies in and copies out run beside each other, so that the longest of the three decides; it waits for the
    first layer of each pass, and for the optimizer's step on the host.
    """

    in_bytes: int  # to the GPU
    out_bytes: int  # to the host
    first_bytes: int  # of the layers that compute waits for
    host_bytes: int = 0  # that accumulating and stepping on the host read and write there

    def copying(self, pcie: float) -> float:
        """Return the seconds of the longer lane of copies."""
        return max(self.in_bytes, self.out_bytes) / pcie

    def seconds(self, computing: float, pcie: float) -> tuple[float, float, float]:
        """Return the seconds that are waited for, without any copy hidden, and with what can be."""
        waited = self.first_bytes / pcie + self.host_bytes / HOST_BYTES_PER_SECOND
        hidden = waited + max(0.0, self.copying(pcie) - computing)
        return hidden, waited + (self.in_bytes + self.out_bytes) / pcie, hidden


def streaming_of_step(on_host: HostWeights, settings: StepSettings, passes: float) -> Streaming:
    """Return what an optimizer step of so many forward and backward passes moves."""
    gradients, state = on_host.gradient_bytes, optimizer_memory(on_host.stepped, settings).state_bytes
    stepping = 3 * gradients + 2 * state  # weights, as large as their gradients, and state are read and written
    return Streaming(
        in_bytes=round(passes * on_host.in_bytes),
        out_bytes=round(passes * on_host.out_bytes),
        first_bytes=round(passes * on_host.first_bytes),
        host_bytes=round(stepping + 3 * (passes - 1) * gradients),
    )
