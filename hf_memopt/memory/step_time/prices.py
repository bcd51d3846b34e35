"""Predict the seconds of a training step on a GPU from the operations that were recorded, without the GPU.

Formula:
    each operation takes max(FLOPs / (rate x share), moved bytes / (bandwidth x share), launches on the host), and the
    GPU a fixed time for each kernel; a step is their sum, and a fixed time for each micro-batch.

Rates and bandwidth are those of a GPU's specification (``devices/gpu_table.py``). ``Constants`` are the same for all
GPUs. A recorded step is priced in about 0.1 ms for 100 different operations.

Limitations: kernels that overlap, compiled models, the routing of experts (which depends on the data),
the first steps, saving, logging, and data loading that is slower than the step. Apple GPUs (MPS) are not in the table,
and nothing is predicted for them. Under WSL the launch of a kernel costs more; what it costs there is not known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from hf_memopt.devices.gpus import Gpu, PeakRates
from hf_memopt.memory.step_time.communication import Communication
from hf_memopt.memory.step_time.operations import Operation

__all__ = [
    "CONSTANTS",
    "PARTS",
    "Constants",
    "Prices",
    "StepCosts",
    "StepTime",
    "equally_fast",
    "expected_error",
    "missing_figures",
    "step_time",
]

PARTS = ("products", "attention", "memory", "optimizer", "launches", "PCIe", "communication")
"""What the time of a step is divided into; see ``StepTime.shares``."""

SAME_FRACTION = 0.05
"""Set-ups whose times differ by no more than this count as equally fast."""

_LAUNCH_BOUND = 1 / 3  # from this share on, the host decides, which is unknown
_FASTEST_LAUNCH = 6.5e-6  # a recent desktop's, half of that of the cloud machine of 2022 in the fit
_MEASURED = 0.12  # the worst of 22 published rows: 11.8 %, santacoder with QLoRA on the A100
_NOT_MEASURED = 0.20  # fitted on the A100's rows alone, the worst of the V100's is off by 16 %
_PUBLISHED = ("V100", "A100")


@dataclass(frozen=True)
class Constants:
    """Shares of a GPU's peaks that are reached, and seconds; the same for every GPU.

    The first six were fitted once, together, and rounded: on nine rows of a V100 (BERT-large, the table of
    transformers' guide to training on one GPU) and nine of an A100 (fms-acceleration: santacoder, Mistral-7B and
    Llama-2-70b, full, LoRA and QLoRA), with an earlier recording; they were not fitted again to this one. The last
    three were set by hand and not fitted. ``benchmarks/step_time.py`` prints the errors.
    """

    half_fraction: float = 0.77  # of the rate of products in 16 bits, TF32 and 8 bits
    fp32_fraction: float = 0.86  # of the rate in float32
    attention_fraction: float = 0.52  # of the same rates, by fused attention
    memory_fraction: float = 0.78  # of the bandwidth, and of PCIe's
    kernel_seconds: float = 2e-6  # begin and end of a kernel on the GPU
    launch_seconds: float = 13e-6  # of a kernel from Python, on the host
    backward_launch_fraction: float = 0.6  # of that where C++ launches it
    view_fraction: float = 0.25  # of that for a view, which has no kernel
    micro_batch_seconds: float = 3e-3  # collator, copies to the GPU, the Trainer's loop


CONSTANTS = Constants()


@dataclass(frozen=True)
class Prices:
    """The figures of a device that decide what an operation takes.

    Attributes:
        rates: floating-point operations per second that are reached, by kind and dtype of an ``Operation``.
        bandwidth: bytes per second of its memory, by its specification.
        pcie: bytes per second between host and GPU.
        link: bytes per second between GPUs, in one direction.
        constants: what is reached of them.
        is_measured: whether published throughput of this GPU is among that of the fit.
        runs_ahead: False for a CPU, where the launch is added to the operation's own time.
    """

    rates: Mapping[tuple[str, str], float]
    bandwidth: float
    pcie: float = 32e9
    link: float = 32e9
    constants: Constants = CONSTANTS
    is_measured: bool = False
    runs_ahead: bool = True

    @classmethod
    def of(cls, gpu: Gpu, *, tf32: bool = False, constants: Constants = CONSTANTS) -> Prices:
        """Return the prices of a GPU.

        Raises:
            ValueError: its bandwidth or rates are unknown.
        """
        peak = gpu.peak_flops_per_second
        missing = missing_figures(gpu)
        if missing or gpu.bandwidth_bytes_per_second is None or peak.fp32 is None:
            raise ValueError(
                f"gpu={gpu.name!r} has no known {missing}; expected a GPU of the table. Pass gpu='RTX 3060 12GB'"
            )
        return cls(
            rates=_reached(peak, tf32, constants),
            bandwidth=gpu.bandwidth_bytes_per_second,
            pcie=gpu.pcie_bytes_per_second,
            link=gpu.link_bytes_per_second,
            constants=constants,
            is_measured=gpu.name.startswith(_PUBLISHED),
        )

    def seconds(self, cost: Operation) -> tuple[float, str]:
        """Return the seconds of an operation, and which of ``PARTS`` they belong to."""
        c = self.constants
        host = c.launch_seconds * cost.launches
        if cost.in_backward:
            host *= c.backward_launch_fraction
        if not cost.kernels:
            return host * c.view_fraction, "launches"
        part = "memory"
        if cost.kind == "pcie":
            own, part = cost.moved_bytes / (self.pcie * c.memory_fraction), "PCIe"
        else:
            own = cost.moved_bytes / (self.bandwidth * c.memory_fraction)
        if cost.flops:
            computing = cost.flops / self.rates[cost.kind, cost.dtype]
            if computing > own:
                own, part = computing, "attention" if cost.kind == "attention" else "products"
        own += c.kernel_seconds * cost.kernels
        if not self.runs_ahead:
            return own + host, part
        return (host, "launches") if host > own else (own, part)


def _reached(peak: PeakRates, tf32: bool, c: Constants) -> dict[tuple[str, str], float]:
    """Return the rates that are reached, by kind and dtype; a format that the GPU lacks runs as float32."""
    fp32 = peak.fp32 or 0
    formats = {
        "fp32": (peak.tf32, True) if tf32 and peak.tf32 else (fp32, False),
        "fp16": (peak.fp16, True) if peak.fp16 else (fp32, False),
        "bf16": (peak.bf16, True) if peak.bf16 else (fp32, False),
        "int8": (peak.fp16, True) if peak.fp16 else (fp32, False),  # bitsandbytes' reach no more than 16 bits do
    }
    found = {}
    for name, (rate, is_short) in formats.items():
        found["product", name] = (rate or 0) * (c.half_fraction if is_short else c.fp32_fraction)
        own = fp32 if name == "fp32" else rate or 0  # attention in float32 does not use TF32
        found["attention", name] = own * c.attention_fraction
    return found


def missing_figures(gpu: Gpu) -> str:
    """Return which figures of a GPU are unknown that a prediction needs, in words; "" for none."""
    missing = [] if gpu.bandwidth_bytes_per_second else ["bandwidth"]
    return " and ".join(missing if gpu.peak_flops_per_second.fp32 else [*missing, "rate of products"])


# ---- A step


@dataclass(frozen=True)
class StepCosts:
    """The operations of an optimizer step: recorded once, priced for any GPU of the same compute capability.

    Attributes:
        passes: (times per optimizer step, operations) of each different forward and backward pass.
        optimizer: operations of the optimizer, clipping and unscaling.
        micro_batches: forward and backward passes of a step.
        examples: of a step.
        tokens: of a step, padding included; None for a model without text.
        tf32: whether float32 products are computed in TF32.
        communication: with other processes and the host; None for one process.
        routes_tokens: whether tokens are routed to experts. What they cost assumes equally many for each, which ranks
            set-ups and predicts no time.
    """

    passes: tuple[tuple[float, Counter[Operation]], ...]
    optimizer: Counter[Operation]
    micro_batches: float
    examples: int
    tokens: float | None = None
    tf32: bool = False
    communication: Communication | None = None
    routes_tokens: bool = False

    def on(self, gpu: Gpu) -> StepTime:
        """Return the predicted time on a GPU.

        Raises:
            ValueError: the GPU's bandwidth or rates are unknown.
        """
        return step_time(self, Prices.of(gpu, tf32=self.tf32))


@dataclass(frozen=True)
class StepTime:
    """The predicted time of an optimizer step.

    Attributes:
        seconds: of a step with all its micro-batches.
        low: the least that it may be. The range is 12 % on either side of a GPU with published rows (V100, A100), 20 %
            of others, and reaches to the time with a host of half the launch cost where more than a third is launches.
        high: the most.
        shares: of the time, by ``PARTS``: products, fused attention and other kernels (memory) that the GPU's own
            speed bounds, the optimizer with clipping, what waits for launches on the host, copies over PCIe, and what
            waits for other processes. They add up to 1.
        examples: of a step.
        tokens: of a step, padding included; None for a model without text.
    """

    seconds: float
    low: float
    high: float
    shares: Mapping[str, float] = field(default_factory=dict)
    examples: int = 1
    tokens: float | None = None

    @property
    def examples_per_second(self) -> float:
        """Examples that are trained in a second."""
        return self.examples / self.seconds

    @property
    def is_launch_bound(self) -> bool:
        """Whether the host's launches take more than a third of the time, so that the host decides."""
        return self.shares.get("launches", 0.0) > _LAUNCH_BOUND

    def tokens_per_second(self, real_fraction: float = 1.0) -> float | None:
        """Return the tokens that are trained in a second; None for a model without text.

        Args:
            real_fraction: the share of the batches' tokens that is not padding.
        """
        return None if self.tokens is None else self.tokens * real_fraction / self.seconds


def step_time(costs: StepCosts, prices: Prices) -> StepTime:
    """Return the predicted time of a step; its range reaches from all communication hidden to none of it."""
    parts, least, most = _priced(costs, prices)
    seconds = sum(parts.values())
    error = expected_error(prices)
    shares = {name: part / seconds for name, part in parts.items()}
    found = StepTime(seconds, least * (1 - error), most * (1 + error), shares, costs.examples, costs.tokens)
    fast = prices.constants.launch_seconds > _FASTEST_LAUNCH
    if found.is_launch_bound and fast:
        constants = replace(prices.constants, launch_seconds=_FASTEST_LAUNCH)
        return replace(found, low=(1 - error) * _priced(costs, replace(prices, constants=constants))[1])
    return found


def expected_error(prices: Prices) -> float:
    """Return by how much, as a share, predicted seconds may be off on either side."""
    return _MEASURED if prices.is_measured else _NOT_MEASURED


def _priced(costs: StepCosts, prices: Prices) -> tuple[dict[str, float], float, float]:
    """Return the seconds of a step by ``PARTS``, and those with all communication hidden and with none of it."""
    parts = dict.fromkeys(PARTS, 0.0)
    parts["launches"] = costs.micro_batches * prices.constants.micro_batch_seconds
    for times, operations in costs.passes:
        for cost, number in operations.items():
            seconds, part = prices.seconds(cost)
            parts[part] += times * number * seconds
    for cost, number in costs.optimizer.items():
        seconds, part = prices.seconds(cost)
        parts[part if part == "PCIe" else "optimizer"] += number * seconds
    computing = sum(parts.values())
    if costs.communication is None:
        return parts, computing, computing
    reached = prices.constants.memory_fraction
    waited, most, least = costs.communication.seconds(computing, prices.link * reached, prices.pcie * reached)
    parts["communication"] = waited
    return parts, computing + least, computing + most


def equally_fast(seconds: float, other_seconds: float) -> bool:
    """Return whether two predicted times are too close to be told apart: within 5 % of the longer one.

    Examples:
        >>> equally_fast(1.00, 1.04), equally_fast(1.00, 1.08)
        (True, False)
    """
    return abs(seconds - other_seconds) <= SAME_FRACTION * max(seconds, other_seconds)
