"""Predict the seconds of a training step on a GPU from the operations that were recorded, without the GPU.

Formula:
    each operation takes max(FLOPs / (rate x share), moved bytes / (bandwidth x share), launches on the host), and the
    GPU a fixed time for each kernel; a step is their sum, and a fixed time for each micro-batch.

Rates and bandwidth are those of a GPU's specification (``devices/gpu_table.py``), of which every GPU reaches the same
shares; rates are less where the power limit is known to bind. A recorded step is priced in about 0.1 ms for 100
different operations.

Limitations: kernels that overlap, compiled models, the routing of experts (which depends on the data), convolutional
networks (published rows of a ResNet are slower than priced, those of ConvNeXt faster, whose grouped convolutions
torch's formula counts too high: no rule was found for both), the first steps, saving, logging, and data loading that
is slower than the step. Apple GPUs (MPS) are not in the table, and nothing is predicted for them. Under WSL the launch
of a kernel costs more; what it costs there is not known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from hf_memopt.prediction.memory.step_time.operations import UNPRICED_OPTIMIZERS, Operation, optimizer_operations
from hf_memopt.prediction.memory.step_time.streaming import Streaming, streaming_of_step
from hf_memopt.training.devices import Gpu, PeakRates, find_gpu
from hf_memopt.units import percent

if TYPE_CHECKING:
    from hf_memopt.prediction.memory.allocator import ReplayPlan
    from hf_memopt.prediction.memory.optimizers import OptimizerMemory, ParameterFacts
    from hf_memopt.prediction.memory.recording import StepTrace

PARTS = ("products", "attention", "memory", "optimizer", "launches", "PCIe")
"""What the time of a step is divided into; see ``StepTime.shares``."""

SAME_FRACTION = 0.05
"""Set-ups whose times differ by no more than this count as equally fast."""

_LAUNCH_BOUND = 1 / 3  # from this share on, the host decides, which is unknown
_CONVOLUTIONAL = 1 / 50  # of all bytes; patches of a ViT are 0.5 %, Whisper's stem 0.9 %, those of ConvNeXt 4 %

# How far the published rows of a GPU are off, so that its range holds at least 80 % of them: with at least five rows
# the GPU's own, else that of all rows together (``benchmarks/step_time.py`` prints both). These are fitted to the rows
# that they are judged by.
_RANGES = {"V100 16GB": 0.12, "V100 32GB": 0.12, "A100 40GB": 0.12, "A100 80GB": 0.12, "T4": 0.25, "RTX 3090": 0.2}
_OTHERS = 0.2
_OF_UNKNOWN_CLOCK = 0.5
"""Of laptops, where the same name is a third slower or faster by the power that its maker allows, and of cards with
tensor cores for at most 75 W: rows of a T4 were 20 to 75 % slower than by its boost clock."""
_AT_MOST_75_WATTS = {"A2", "A16", "L4", "RTX A1000", "RTX A2000 6GB", "RTX A2000 12GB"}  # by the pages of gpus.csv
_AT_MOST_75_WATTS |= {"RTX 2000 Ada", "RTX 4000 SFF Ada", "RTX PRO 2000"}

# Shares of a GPU's peaks that are reached, and seconds; the same for every GPU. The first six were fitted once,
# together, and rounded: on nine rows of a V100 (BERT-large, the table of transformers' guide to training on one GPU)
# and nine of an A100 (fms-acceleration: santacoder, Mistral-7B and Llama-2-70b, full, LoRA and QLoRA), with an earlier
# recording; they were not fitted again to this one. The last three were set by hand and not fitted.
# ``benchmarks/step_time.py`` prints the errors.
HALF_FRACTION = 0.77  # of the rate of products in 16 bits, TF32 and 8 bits
FP32_FRACTION = 0.86  # of the rate in float32
ATTENTION_FRACTION = 0.52  # of the same rates, by fused attention
MEMORY_FRACTION = 0.78  # of the bandwidth, and of PCIe's
KERNEL_SECONDS = 2e-6  # begin and end of a kernel on the GPU
LAUNCH_SECONDS = 13e-6  # of a kernel from Python, on the host
BACKWARD_LAUNCH_FRACTION = 0.6  # of that where C++ launches it
VIEW_FRACTION = 0.25  # of that for a view, which has no kernel
MICRO_BATCH_SECONDS = 3e-3  # collator, copies to the GPU, the Trainer's loop

_FASTEST_LAUNCH_SECONDS = 6.5e-6  # a recent desktop's, half of that of the cloud machine of 2022 in the fit


@dataclass(frozen=True)
class Prices:
    """What a device reaches."""

    rates: Mapping[tuple[str, str], float]  # floating-point operations per second, by kind and dtype
    bandwidth: float  # bytes per second of its memory
    pcie: float  # bytes per second between host and GPU, with 16 lanes
    launch_seconds: float = LAUNCH_SECONDS  # of a kernel from Python, on the host
    error: float = _OTHERS  # by how much, as a share, predicted seconds may be off on either side
    bus: float = 0.0  # as ``pcie`` with the GPU's own lanes, for streamed layers and waiting state

    @classmethod
    def of(cls, gpu: Gpu, *, tf32: bool = False) -> Prices:
        """Return the prices of a GPU whose bandwidth and rates are known."""
        if missing := missing_figures(gpu):
            raise ValueError(
                f"gpu={gpu.name!r} has no known {missing}; expected a GPU of the table. Pass gpu='RTX 3060 12GB'"
            )
        is_unknown = "Laptop" in gpu.name or gpu.name in _AT_MOST_75_WATTS
        reached = _reached(gpu.peak_flops_per_second, tf32)
        return cls(
            rates={kind: gpu.sustained_fraction * rate for kind, rate in reached.items()},
            bandwidth=(gpu.bandwidth_bytes_per_second or 0) * MEMORY_FRACTION,
            pcie=gpu.pcie_bytes_per_second * MEMORY_FRACTION,
            error=_OF_UNKNOWN_CLOCK if is_unknown else _RANGES.get(gpu.name, _OTHERS),
            bus=gpu.bus_bytes_per_second * MEMORY_FRACTION,
        )

    def seconds(self, cost: Operation) -> tuple[float, str]:
        """Return the seconds of an operation, and which of ``PARTS`` they belong to."""
        host = self.launch_seconds * cost.launches
        if cost.in_backward:
            host *= BACKWARD_LAUNCH_FRACTION
        if not cost.kernels:
            return host * VIEW_FRACTION, "launches"
        own, part = cost.moved_bytes / self.bandwidth, "memory"
        if cost.kind == "pcie":
            own, part = cost.moved_bytes / self.pcie, "PCIe"
        if cost.kind == "bus":
            own, part = cost.moved_bytes / self.bus, "PCIe"
        if cost.flops:
            computing = cost.flops / self.rates[cost.kind, cost.dtype]
            if computing > own:
                own, part = computing, "attention" if cost.kind == "attention" else "products"
        own += KERNEL_SECONDS * cost.kernels
        return (host, "launches") if host > own else (own, part)


def _reached(peak: PeakRates, tf32: bool) -> dict[tuple[str, str], float]:
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
        found["product", name] = (rate or 0) * (HALF_FRACTION if is_short else FP32_FRACTION)
        found["convolution", name] = found["product", name]
        own = fp32 if name == "fp32" else rate or 0  # attention in float32 does not use TF32
        found["attention", name] = own * ATTENTION_FRACTION
    return found


def missing_figures(gpu: Gpu) -> str:
    """Return which figures of a GPU are unknown that a prediction needs, in words; "" for none."""
    missing = [] if gpu.bandwidth_bytes_per_second else ["bandwidth"]
    return " and ".join(missing if gpu.peak_flops_per_second.fp32 else [*missing, "rate of products"])


# ---- A step


@dataclass(frozen=True)
class StepCosts:
    """The operations of an optimizer step: recorded once, priced for any GPU of the same compute capability.

    The first forward and backward pass of a step has new gradients, all later ones add to them; of a run with batches
    of differing lengths the mean step counts.

    Attributes:
        passes: (times per optimizer step, operations) of each different forward and backward pass.
        optimizer: operations of the optimizer, clipping and unscaling.
        micro_batches: forward and backward passes of a step.
        examples: of a step.
        tokens: of a step, padding included; None for a model without text.
        tf32: whether float32 products are computed in TF32.
        streaming: the copies of streamed layers from and to the host; None without them.
        routes_tokens: whether tokens are routed to experts. What they cost assumes equally many for each, which ranks
            set-ups and predicts no time.
    """

    passes: tuple[tuple[float, Counter[Operation]], ...]
    optimizer: Counter[Operation]
    micro_batches: float
    examples: int
    tokens: float | None = None
    tf32: bool = False
    streaming: Streaming | None = None
    routes_tokens: bool = False

    @property
    def convolution_share(self) -> float:
        """The share of the passes' bytes that convolutions move."""
        moved = {True: 0.0, False: 0.0}
        for times, operations in self.passes:
            for cost, number in operations.items():
                moved[cost.kind == "convolution"] += times * number * cost.moved_bytes
        return moved[True] / (sum(moved.values()) or 1)

    @property
    def ranking_rule(self) -> str:
        """What their time rests on that is not known, so that it ranks set-ups and is not predicted; "" for nothing."""
        if self.routes_tokens:
            return "equally many for each"
        return "convolutions as fast as other products" if self.convolution_share > _CONVOLUTIONAL else ""

    def hiding_tokens(self, gpu: str | Gpu) -> float | None:
        """Return the tokens of a pass from which computing hides the copies of streamed layers; None without these."""
        if self.streaming is None or self.tokens is None:
            return None
        prices = Prices.of(find_gpu(gpu), tf32=self.tf32)
        parts = _computed(self, prices)
        fixed, computing = parts["optimizer"], sum(parts.values())
        copied = max(0.0, self.streaming.copying(prices.bus) - fixed)
        return self.tokens / self.micro_batches * copied / (computing - fixed)

    def on(self, gpu: str | Gpu) -> StepTime:
        """Return the predicted time on a GPU, a name or a ``Gpu``.

        Raises:
            ValueError: no such GPU, or its bandwidth or rates are unknown.
        """
        return step_time(self, Prices.of(find_gpu(gpu), tf32=self.tf32))


@dataclass(frozen=True)
class StepTime:
    """The predicted time of an optimizer step.

    Attributes:
        seconds: of a step with all its micro-batches.
        low: the least that it may be. The range holds at least 80 % of published rows: 12 % on either side on V100 and
            A100, 25 % on a T4, 20 % on an RTX 3090 and on GPUs without rows, 50 % on laptops and cards whose power
            leaves less of their clock than is known. It reaches to the time with a host of half the launch cost where
            more than a third is launches.
        high: the most.
        shares: of the time, by ``PARTS``: products, fused attention and other kernels (memory) that the GPU's own
            speed bounds, the optimizer with clipping, what waits for launches on the host, and copies over PCIe. They
            add up to 1.
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
    """Return the predicted time of a step; its range reaches from all copies of streamed layers hidden to none."""
    parts, least, most = _priced(costs, prices)
    seconds = sum(parts.values())
    shares = {name: part / seconds for name, part in parts.items()}
    low, high = least * (1 - prices.error), most * (1 + prices.error)
    found = StepTime(seconds, low, high, shares, costs.examples, costs.tokens)
    if found.is_launch_bound:
        _, least, _ = _priced(costs, replace(prices, launch_seconds=_FASTEST_LAUNCH_SECONDS))
        return replace(found, low=(1 - prices.error) * least)
    return found


def _priced(costs: StepCosts, prices: Prices) -> tuple[dict[str, float], float, float]:
    """Return the seconds of a step by ``PARTS``, and those with all copies of streamed layers hidden and with none."""
    parts = _computed(costs, prices)
    computing = sum(parts.values())
    if costs.streaming is None:
        return parts, computing, computing
    waited, most, least = costs.streaming.seconds(computing, prices.bus)
    parts["PCIe"] += waited
    return parts, computing + least, computing + most


def _computed(costs: StepCosts, prices: Prices) -> dict[str, float]:
    """Return the seconds of a step by ``PARTS`` without the copies of streamed layers."""
    parts = dict.fromkeys(PARTS, 0.0)
    parts["launches"] = costs.micro_batches * MICRO_BATCH_SECONDS
    for times, operations in costs.passes:
        for cost, number in operations.items():
            seconds, part = prices.seconds(cost)
            parts[part] += times * number * seconds
    for cost, number in costs.optimizer.items():
        seconds, part = prices.seconds(cost)
        parts[part if part == "PCIe" else "optimizer"] += number * seconds
    return parts


def equally_fast(seconds: float, other_seconds: float) -> bool:
    """Return whether two predicted times are too close to be told apart: within 5 % of the longer one.

    Examples:
        >>> equally_fast(1.00, 1.04), equally_fast(1.00, 1.08)
        (True, False)
    """
    return abs(seconds - other_seconds) <= SAME_FRACTION * max(seconds, other_seconds)


# ---- A recorded step

_OF_EXPERTS = {"experts", "block_sparse_moe", "router"}
"""Names of modules that route tokens to experts; seen in transformers 5.8.1 to 5.23.0."""


def timing_of_step(
    traces: Sequence[StepTrace],
    plan: ReplayPlan,
    parameters: Sequence[ParameterFacts],
    optimizer: OptimizerMemory,
    gpu: Gpu | None,
    *,
    batch_size: int,
    lengths: Sequence[int | None],
) -> tuple[StepTime | None, StepCosts | None, str]:
    """Return the predicted time of a step, what it computes and moves, and why there is no time, "" where there is.

    ``parameters`` are the trainable ones; ``lengths`` the tokens of a row of each of the recorded steps.
    """
    settings = plan.settings
    if settings.optimizer_memory is None and settings.optim.startswith(UNPRICED_OPTIMIZERS):
        return None, None, (f"the step of optim={settings.optim!r} is not counted" if gpu is not None else "")
    steps = plan.order or ((0,) * settings.gradient_accumulation_steps,)
    batches_of_step = sum(map(len, steps)) / len(steps)
    rows = [lengths[trace] for batches in steps for trace in batches]
    known = [length for length in rows if length is not None]
    micro_batches = batches_of_step * plan.micro_batches
    on_host = traces[0].on_host
    costs = StepCosts(
        passes=_passes(traces, steps, plan),
        optimizer=optimizer_operations(parameters, optimizer, settings),
        micro_batches=micro_batches,
        streaming=None if on_host is None else streaming_of_step(on_host, settings, micro_batches),
        examples=round(batch_size * batches_of_step),
        tokens=batch_size * sum(known) / len(steps) if len(known) == len(rows) else None,
        tf32=settings.precision == "tf32",
        routes_tokens=not settings.quantize_experts
        and any(name.rpartition(".")[2] in _OF_EXPERTS for name in traces[0].tracker.modules),
    )
    if gpu is None:
        return None, costs, ""
    if costs.routes_tokens:
        return None, costs, "how many tokens each expert gets depends on the data"
    if costs.ranking_rule:
        share = f"convolutions move {percent(costs.convolution_share)} of its bytes"
        return None, costs, f"{share}, and how fast cuDNN's are is not known"
    if missing := missing_figures(gpu):
        return None, costs, f"{gpu.name} has no known {missing}"
    return costs.on(gpu), costs, ""


def _passes(
    traces: Sequence[StepTrace], steps: Sequence[Sequence[int]], plan: ReplayPlan
) -> tuple[tuple[float, Counter[Operation]], ...]:
    """Return (times per optimizer step, operations) of each different pass of ``steps``."""
    times: Counter[tuple[int, int]] = Counter()  # by trace, and the place of the pass in it
    for batches in steps:
        times.update(plan.passes(batches, plan.micro_batches, adds=not plan.settings.zero_grad_to_none))
    return tuple(
        (number / len(steps), Counter(traces[trace].tracker.operations[which]))
        for (trace, which), number in times.items()
    )
