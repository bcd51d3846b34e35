"""What the processes of a step send each other and their hosts, and how much of its time the computing does not hide.

Formula:
    a ring of N processes sends (N - 1) / N of what is gathered or reduced and scattered, and twice that of what is
    reduced for all. DDP and ZeRO-2 send gradients beside the backward pass, which takes two thirds of a pass (DDP's
    only once a step), and what is longer than that is waited for. What FSDP2 and ZeRO-3 send counts whole: they send
    ahead of the computing, but published runs on two A100 (Mistral-7B, with the FSDP of 2024) took as long or longer:
    full training 0 and 4 %, LoRA 5 and 10 %, QLoRA, whose adapters were units of their own, 5 and 18 %. With offload
    the copies to and from the host and its optimizer come on top.

Limitations: all of it is on one machine, with all GPUs of one kind and 16 lanes each; the order of transfers and their
latency, so many small ones cost more. The host's memory is assumed to reach 20e9 bytes per second for all processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hf_memopt.memory.distributed import ZERO_STAGES
from hf_memopt.memory.optimizers import optimizer_memory

if TYPE_CHECKING:
    from hf_memopt.memory.optimizers import ParameterFacts
    from hf_memopt.memory.recording import HostWeights
    from hf_memopt.memory.settings import StepSettings

BACKWARD_FRACTION = 2 / 3
HOST_BYTES_PER_SECOND = 20e9
_ADAMW_BYTES = 28  # of an element: weight, gradient and both averages are read, all but the gradient written
_FLOAT_BYTES, _SHORT_BYTES = 4, 2


@dataclass(frozen=True)
class Communication:
    """The bytes that one process moves in an optimizer step."""

    link_bytes: int  # that it sends to the other processes
    hiding_fraction: float  # the share of the computing that runs beside it
    pcie_bytes: int = 0  # between its GPU and the host
    host_bytes: int = 0  # that its optimizer reads and writes in the host's memory
    processes: int = 1  # that share this memory

    def seconds(self, computing: float, link: float, pcie: float) -> tuple[float, float, float]:
        """Return the seconds that are waited for, without any of the link's hidden, and with all of it hidden.

        ``computing`` are the seconds of the step without, ``link`` and ``pcie`` bytes per second in one direction.
        """
        host = self.pcie_bytes / pcie + self.host_bytes * self.processes / HOST_BYTES_PER_SECOND
        sent = self.link_bytes / link
        return host + max(0.0, sent - self.hiding_fraction * computing), host + sent, host


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

    def seconds(self, computing: float, link: float, pcie: float) -> tuple[float, float, float]:
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


def communication_of_step(
    facts: Sequence[ParameterFacts], settings: StepSettings, gathered_bytes: int, passes: float
) -> Communication:
    """Return what a step of several processes moves whose forward and backward passes each gather so many bytes."""
    engine, processes = settings.engine, settings.world_size
    sent = (processes - 1) / processes
    size = _SHORT_BYTES if settings.precision in ("bf16", "fp16") else _FLOAT_BYTES
    trained = sum(fact.elements for fact in facts)
    if engine == "ddp":
        gradients = sum(fact.size_bytes for fact in facts)
        return Communication(round(2 * sent * gradients), BACKWARD_FRACTION / passes)
    reduced = trained * size
    link = {
        "fsdp2": passes * gathered_bytes + reduced,
        "zero2": 2 * passes * reduced + reduced,  # DeepSpeed reduces whole buckets for all, then gathers the weights
        "zero3": passes * (gathered_bytes + reduced),
    }[engine]
    hiding = BACKWARD_FRACTION if engine == "zero2" else 0.0
    if not settings.offload_params:
        return Communication(round(sent * link), hiding)
    own = trained / processes
    weights = passes * gathered_bytes / processes if engine != "zero2" else own * size
    to_host = own * size * passes if engine in ZERO_STAGES else own * _FLOAT_BYTES
    return Communication(round(sent * link), hiding, round(weights + to_host), round(_ADAMW_BYTES * own), processes)
